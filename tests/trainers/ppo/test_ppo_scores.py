"""PPO: scores, data, metrics, and TRL's loss options."""

import json
import math
import statistics

import pandas as pd
import pytest
import torch
from datasets import Dataset

from support.ppo_checks import SETTINGS, check_losses, check_rollout, plain_scores, record, scripted
from support.tiny import RUN, WORDS, build_dataset, build_model, build_tokenizer, logged, reward_even_tokens, weights
from support.tiny_ppo import (
    CHAT_TEMPLATE,
    EOS,
    RecordingPPOTrainer,
    build_ppo,
    build_scorer,
    counting,
    losses_by_hand,
    train_ppo,
    values_by_hand,
)
from trl_klx import KLXPPOConfig
from trl_klx.ppo.reward_scaling import RewardScaler


pytestmark = pytest.mark.slow


# ---- Scores ----


def ends(rows: list[list[int]]) -> list[bool]:
    return [EOS in row for row in rows]


def test_missing_eos_penalty(tmp_path):
    trainer = record(tmp_path, missing_eos_penalty=1.5, extras={"rollout_func": scripted})
    for rollout in trainer.rollouts:
        ended = ends(rollout["completion_ids"].tolist())
        assert any(ended) and not all(ended)
        scores = [s if e else s - 1.5 for s, e in zip(plain_scores(rollout), ended, strict=True)]
        check_rollout(trainer, rollout, build_model().eval(), scores)


def test_an_eos_token_inside_a_completion_does_not_end_it(tmp_path):
    # With tools, every turn of the policy ends in EOS; the last one may still be cut off.
    def two_turns(prompts, trainer):
        return {
            "prompt_ids": trainer.processing_class(prompts)["input_ids"],
            "completion_ids": [[5, EOS, 9, 6, EOS if i % 2 else 7] for i in range(len(prompts))],
            "logprobs": None,
            "env_mask": [[1, 1, 0, 1, 1]] * len(prompts),
        }

    trainer = record(tmp_path, missing_eos_penalty=1.5, extras={"rollout_func": two_turns})
    rollout = trainer.rollouts[0]
    ended = [row[-1] == EOS for row in rollout["completion_ids"].tolist()]
    assert any(ended) and not all(ended)
    scores = [s if e else s - 1.5 for s, e in zip(plain_scores(rollout), ended, strict=True)]
    check_rollout(trainer, rollout, build_model().eval(), scores)


def varying_reward(completion_ids, **kwargs):
    return [float(ids[0]) / 3.0 - 2.0 for ids in completion_ids]


@pytest.mark.parametrize("cliprange", [None, 0.8])
@pytest.mark.parametrize("kind", ["none", "running", "ref"])
def test_reward_scaling(kind, cliprange, tmp_path):
    trainer = record(
        tmp_path, rewards=varying_reward, reward_scaling=kind, cliprange_reward=cliprange, eval_strategy="steps",
        eval_steps=4, per_device_eval_batch_size=4, extras={"eval_dataset": build_dataset(4)}, max_steps=12,
    )  # fmt: skip
    seen: list[float] = []
    first = None
    trained = [rollout for rollout in trainer.rollouts if rollout["mode"] == "train"]
    assert len(trained) == 3 and len(trainer.rollouts) == 6
    for rollout in trainer.rollouts:
        scores = plain_scores(rollout)
        if rollout["mode"] == "train":
            seen += scores
            first = statistics.stdev(scores) if first is None else first
        scale = {"none": 1.0, "running": statistics.stdev(seen), "ref": first}[kind]
        scores = [score / scale for score in scores]
        if cliprange is not None:
            scores = [min(max(score, -cliprange), cliprange) for score in scores]
        check_rollout(trainer, rollout, build_model().eval(), scores)
    # Evaluation is scaled by the statistics of training, and does not update them.
    if kind != "none":
        assert trainer._ppo_scaler.count == len(seen) == 24
        assert trainer._ppo_scaler.mean == pytest.approx(statistics.fmean(seen), abs=1e-6)
        assert scale != pytest.approx(1.0, abs=0.05)


def test_scaler_waits_for_scores_that_differ():
    scaler = RewardScaler("ref")
    everything = torch.ones(2, dtype=torch.bool)
    # A rollout of equal scores has no deviation, and must not fix the scale for the whole run.
    assert scaler(torch.tensor([3.0, 3.0]), everything, update=True).tolist() == [3.0, 3.0]
    # 3, 3, 1, 5: mean 3, squares 8, deviation sqrt(8 / 3).
    scaled = scaler(torch.tensor([1.0, 5.0]), everything, update=True)
    assert scaled.tolist() == pytest.approx([1.0 / math.sqrt(8 / 3), 5.0 / math.sqrt(8 / 3)], rel=1e-6)
    # From here on it is fixed.
    scaled = scaler(torch.tensor([100.0, -100.0]), everything, update=True)
    assert scaled.tolist() == pytest.approx([100.0 / math.sqrt(8 / 3), -100.0 / math.sqrt(8 / 3)], rel=1e-6)


def test_scaler_ignores_what_does_not_count():
    scaler = RewardScaler("running")
    valid = torch.tensor([True, True, False, True])
    scaled = scaler(torch.tensor([1.0, 3.0, 1e9, math.inf]), valid, update=True)
    assert scaler.count == 2 and scaler.mean == 2.0
    assert scaled[:2].tolist() == pytest.approx([1 / math.sqrt(2), 3 / math.sqrt(2)], rel=1e-6)


@pytest.mark.parametrize("key", ["count", "mean", "squares", "reference_std"])
def test_scaler_refuses_a_broken_state(key):
    scaler = RewardScaler("running")
    with pytest.raises(ValueError, match=f"Cannot resume: '{key}' of the reward scaling"):
        scaler.load_state_dict(scaler.state_dict() | {key: "x"})


def test_several_reward_functions_with_weights(tmp_path):
    def sometimes(completion_ids, **kwargs):
        return [None if ids[0] % 2 else float(ids[0]) for ids in completion_ids]

    trainer = record(tmp_path, rewards=[reward_even_tokens, sometimes], reward_weights=[2.0, 0.25])
    for rollout in trainer.rollouts:
        scores = []
        for even, other in rollout["rewards"].tolist():
            scores.append(2.0 * even + (0.0 if math.isnan(other) else 0.25 * other))
        assert any(math.isnan(other) for _, other in rollout["rewards"].tolist())
        check_rollout(trainer, rollout, build_model().eval(), scores)


def text_scores(model, tokenizer, rollout) -> list[float]:
    """A reward model's scores of prompt and completion as text."""
    scores = []
    for prompt, mask, completion, real in zip(
        *(rollout[name].tolist() for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")),
        strict=True,
    ):
        prompt = [token for token, counts in zip(prompt, mask, strict=True) if counts]
        completion = [token for token, counts in zip(completion, real, strict=True) if counts]
        # Decoded and tokenized again, as TRL does: special tokens are dropped, and nothing separates the two texts.
        text = tokenizer.decode(prompt) + tokenizer.decode(completion, skip_special_tokens=True)
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        with torch.no_grad():
            scores.append(float(model(input_ids=ids).logits[0, 0]))
    return scores


def token_scores(model, rollout) -> list[float]:
    """A reward model's scores of prompt and completion as sampled tokens."""
    scores = []
    for row in range(len(rollout["completion_ids"])):
        real = [rollout[f"{part}_ids"][row][rollout[f"{part}_mask"][row].bool()] for part in ("prompt", "completion")]
        with torch.no_grad():
            scores.append(float(model(input_ids=torch.cat(real).unsqueeze(0)).logits[0, 0]))
    return scores


@pytest.mark.parametrize("given", ["instance", "path", "config", "function"])
def test_reward_model(given, tmp_path):
    scorer, tokenizer = build_scorer(seed=9), build_tokenizer()
    scorer.save_pretrained(tmp_path / "reward")
    tokenizer.save_pretrained(tmp_path / "reward")
    path = str(tmp_path / "reward")
    fields, extras, rewards = {}, {}, None
    if given == "instance":
        extras["reward_model"] = scorer
    elif given == "path":
        extras["reward_model"] = path
    elif given == "config":
        fields["reward_model_path"] = path
    else:
        rewards = path
    trainer = record(tmp_path / "out", rewards=rewards, extras=extras, **fields)
    assert len(trainer.reward_funcs) == 1
    for rollout in trainer.rollouts:
        by_text = text_scores(build_scorer(seed=9), tokenizer, rollout)
        by_token = token_scores(build_scorer(seed=9), rollout)
        assert by_text != pytest.approx(by_token, abs=1e-2)
        # A model given by path has its own tokenizer, and reads the text.
        expected = by_token if given == "instance" else by_text
        assert rollout["rewards"][:, 0].tolist() == pytest.approx(expected, abs=1e-5)
        check_rollout(trainer, rollout, build_model().eval())
    # The reward model is not trained.
    for name, weight in build_scorer(seed=9).state_dict().items():
        assert torch.equal(trainer.reward_funcs[0].state_dict()[name], weight)


def test_reward_model_beside_reward_functions(tmp_path):
    trainer = record(tmp_path, reward_weights=[1.0, 0.5], extras={"reward_model": build_scorer(seed=9)})
    assert trainer.rollouts[0]["rewards"].shape == (8, 2)
    rollout = trainer.rollouts[0]
    expected = token_scores(build_scorer(seed=9), rollout)
    assert rollout["rewards"][:, 1].tolist() == pytest.approx(expected, abs=1e-5)
    check_rollout(trainer, rollout, build_model().eval(), [even + 0.5 * s for even, s in rollout["rewards"].tolist()])


def test_reward_model_in_training_mode_gives_one_answer(tmp_path):
    scorer = build_scorer(seed=9, attention_dropout=0.5).train()
    trainer = record(tmp_path, rewards=None, extras={"reward_model": scorer})
    rollout = trainer.rollouts[0]
    expected = token_scores(build_scorer(seed=9), rollout)
    assert rollout["rewards"][:, 0].tolist() == pytest.approx(expected, abs=1e-5)


def test_no_reward_is_refused(tmp_path):
    with pytest.raises(ValueError, match="Without reward functions only the KL trains"):
        build_ppo(tmp_path, rewards=None)


def test_reward_model_with_two_labels_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"`reward_model` must be .*`num_labels=1`, got LlamaForSeq.* `num_labels=2`"):
        build_ppo(tmp_path, rewards=None, extras={"reward_model": build_scorer(num_labels=2)})


# ---- Data ----


def test_several_completions_per_prompt(tmp_path):
    trainer = record(tmp_path, num_generations=4)
    check_losses(trainer, build_model())
    prompts = [tuple(row) for row in trainer.rollouts[0]["prompt_ids"].tolist()]
    assert len(set(prompts)) == 2 and all(prompts.count(prompt) == 4 for prompt in prompts)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_odd_batches(batch_size, tmp_path):
    trainer = record(
        tmp_path,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=1,
        num_mini_batches=1,
        max_steps=4,
    )
    check_losses(trainer, build_model())


def chat_tokenizer():
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<user>", "<assistant>"]})
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def test_conversational_prompts(tmp_path):
    tokenizer = chat_tokenizer()
    seen = []

    def reward(prompts, completions, **kwargs):
        seen.extend(zip(prompts, completions, strict=True))
        return [float(len(completion[0]["content"])) for completion in completions]

    dataset = Dataset.from_dict({"prompt": [[{"role": "user", "content": f"{word} w1"}] for word in WORDS[:16]]})
    model = build_model(vocab_size=len(tokenizer))
    args = KLXPPOConfig(output_dir=str(tmp_path), **(RUN | SETTINGS | {"num_generations": 1}))
    trainer = RecordingPPOTrainer(
        args=args, model=model, reward_funcs=reward, train_dataset=dataset, processing_class=tokenizer
    )
    trainer.train()
    check_losses(trainer, build_model(vocab_size=len(tokenizer)))
    user, assistant = tokenizer.convert_tokens_to_ids(["<user>", "<assistant>"])
    assert all(row[0] == user and row[-1] == assistant for row in trainer.rollouts[0]["prompt_ids"].tolist())
    prompt, completion = seen[0]
    assert prompt[0]["role"] == "user" and completion[0]["role"] == "assistant"


def test_iterable_dataset(tmp_path):
    trainer = record(tmp_path, dataset=build_dataset().to_iterable_dataset())
    assert len(trainer.rollouts) == 2
    check_losses(trainer, build_model())


def test_evaluation(tmp_path):
    trainer = record(
        tmp_path, eval_strategy="steps", eval_steps=4, per_device_eval_batch_size=4,
        extras={"eval_dataset": build_dataset(8)}, kl_target=0.01, kl_horizon=100,
    )  # fmt: skip
    (entries) = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(entries) == 2
    evaluated = [rollout for rollout in trainer.rollouts if rollout["mode"] == "eval"]
    assert len(evaluated) == 4
    scores = [score for rollout in evaluated[:2] for score in plain_scores(rollout)]
    assert entries[0]["eval_ppo/score"] == pytest.approx(statistics.fmean(scores), abs=1e-6)
    for name in ("value_loss", "policy_loss", "value_clip_ratio", "explained_variance", "non_score_reward"):
        assert math.isfinite(entries[0][f"eval_ppo/{name}"])
    assert entries[0]["eval_klx/kl"] > 0.0
    for rollout in evaluated:
        check_rollout(trainer, rollout, build_model().eval())
    # Evaluation changes neither the controller nor the logs of training.
    change = min(max(logged(trainer, "klx/kl")[0] / 0.01 - 1, -0.2), 0.2) * 8 / 100
    assert logged(trainer, "klx/coef") == pytest.approx([0.2, 0.2 * (1 + change)], rel=1e-6)
    # The loss of an evaluation: the mean over its batches, each normalised by its own tokens.
    losses = [micro for micro in trainer.losses if trainer.rollouts[micro["rollout"]]["mode"] == "eval"]
    assert entries[0]["eval_loss"] == pytest.approx(statistics.fmean(float(m["loss"]) for m in losses[:2]), abs=1e-6)


def test_evaluation_alone(tmp_path):
    trainer = build_ppo(tmp_path, per_device_eval_batch_size=4, extras={"eval_dataset": build_dataset(8)})
    metrics = trainer.evaluate()
    assert metrics["eval_ppo/score"] == pytest.approx(metrics["eval_reward"], abs=1e-6)


def test_completions_are_logged_with_ppo_s_advantages(tmp_path, capsys):
    trainer = record(tmp_path, log_completions=True, num_completions_to_print=1)
    table = pd.read_parquet(tmp_path / "completions" / "completions_00004.parquet")
    rollout = trainer.rollouts[0]
    means = [
        statistics.fmean(row)
        for row in ([float(rollout["advantages"][i, t]) for t in p] for i, p in enumerate(counting(rollout)))
    ]
    assert table["advantage"].tolist() == pytest.approx(means, abs=1e-5)
    assert len(table) == 8 and set(table["prompt"]) <= set(build_dataset()["prompt"])
    assert table["reward_even_tokens"].tolist() == pytest.approx(plain_scores(rollout), abs=1e-6)
    assert "frac_reward_zero_std" not in trainer.state.log_history[0]


# ---- Metrics ----


@pytest.mark.parametrize("window", [4, 6])
def test_explained_variance_is_that_of_all_tokens_of_the_window(window, tmp_path):
    # The same prompts in every rollout, with rewards that depend only on them: a critic learns these in a few steps.
    trainer = record(
        tmp_path,
        max_steps=12,
        logging_steps=window,
        rewards=lambda prompts, **kwargs: [3.0 * (int(prompt.split()[0][1:]) % 2) for prompt in prompts],
        dataset=build_dataset(8),
        learning_rate=1e-3,
        value_learning_rate=1e-2,
        cliprange_value=10.0,
    )
    trained = {4: [[0], [1], [2]], 6: [[0, 1], [2]]}[window]
    entries = logged(trainer, "ppo/explained_variance")
    assert len(entries) == len(trained)
    for entry, rollouts in zip(entries, trained, strict=True):
        returns, errors = [], []
        for rollout in (trainer.rollouts[index] for index in rollouts):
            real = rollout["ppo_mask"].bool()
            returns += rollout["ppo_returns"][real].tolist()
            errors += (rollout["ppo_returns"] - rollout["ppo_values"])[real].tolist()
        expected = 1.0 - statistics.pvariance(errors) / statistics.pvariance(returns)
        assert entry == pytest.approx(expected, abs=1e-5)
    assert entries[-1] > 0.15


def test_explained_variance_of_returns_that_do_not_vary_is_zero(tmp_path):
    trainer = train_ppo(
        tmp_path,
        rewards=lambda completion_ids, **kwargs: [0.1] * len(completion_ids),
        kl_penalty_coef=0.0,
        gamma=1.0,
        lam=1.0,
        max_steps=1,
    )
    assert logged(trainer, "ppo/explained_variance") == [0.0]


def test_means_over_the_window_weigh_every_token_alike(tmp_path):
    trainer = record(tmp_path, logging_steps=8)
    tokens = [sum(len(row) for row in counting(micro)) for micro in trainer.losses]
    assert len(set(tokens)) > 1
    totals = []
    for micro in trainer.losses:
        rollout = trainer.rollouts[micro["rollout"]]
        returns = {
            row: {t: float(rollout["ppo_returns"][row, t]) for t in counting(rollout)[row]}
            for row in micro["row"].tolist()
        }
        empty = {row: {} for row in returns}
        values = values_by_hand(micro["value"], micro["policy"], micro)
        settings = {"temperature": 0.7, "clip": 1.0, "value_clip": trainer.args.cliprange_value}
        totals.append(losses_by_hand(micro, rollout, empty, returns, values, **settings)[1])
    (entry,) = logged(trainer, "ppo/value_loss")
    assert entry == pytest.approx(sum(totals) / sum(tokens), abs=1e-6)


def test_everything_logged_is_json(tmp_path):
    trainer = record(tmp_path, kl_target=1.0)
    for entry in trainer.state.log_history:
        json.dumps(entry, allow_nan=False)


# ---- TRL's loss options that work with PPO ----


@pytest.mark.parametrize(
    "fields",
    [
        {"loss_type": "grpo"},
        {"loss_type": "bnpo"},
        {"loss_type": "dr_grpo"},
        {"delta": 1.5},
        {"epsilon_high": 0.5},
        {"top_entropy_quantile": 0.5},
        {"entropy_coef": 0.01},
        {"use_adaptive_entropy": True, "entropy_target": 2.0},
        {"gradient_checkpointing": True},
        {"bf16": True},
        {"whiten_rewards": True},
        {"stop_token": "eos"},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_trl_s_options_train(fields, tmp_path):
    trainer = build_ppo(tmp_path, **(SETTINGS | {"learning_rate": 1e-2} | fields))
    before = {name: weight.clone() for name, weight in weights(trainer).items()}
    trainer.train()
    moved = {name for name, weight in weights(trainer).items() if not torch.equal(before[name], weight)}
    assert {"klx_value.inner.weight", "klx_value.outer.weight", "lm_head.weight"} <= moved
    assert all(math.isfinite(loss) for loss in logged(trainer, "loss") + logged(trainer, "ppo/value_loss"))


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo"])
def test_value_loss_is_the_same_whatever_the_average_of_the_policy_loss(loss_type, tmp_path):
    one, other = (
        train_ppo(tmp_path, extras={"rollout_func": scripted}, max_steps=1, num_ppo_epochs=1, loss_type=kind)
        for kind in ("dapo", loss_type)
    )
    assert logged(one, "ppo/value_loss") == pytest.approx(logged(other, "ppo/value_loss"), abs=1e-7)
