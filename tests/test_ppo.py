"""KLXPPOTrainer: its rollouts, losses and metrics on real runs, against PPO worked out in plain loops."""

import json
import math
import statistics

import pandas as pd
import pytest
import torch
from datasets import Dataset

from oracle import centered, kl_of_tokens, sampled_logps
from tiny import RUN, WORDS, build_dataset, build_model, build_tokenizer, logged, lora, reward_even_tokens, weights
from tiny_ppo import (
    CHAT_TEMPLATE,
    EOS,
    RecordingPPOTrainer,
    advantages_by_hand,
    as_tensor,
    build_ppo,
    build_scorer,
    completion_of,
    counting,
    kl_by_hand,
    losses_by_hand,
    rollout_with_tools,
    train_ppo,
    values_by_hand,
    whitened,
)
from trl_klx import KLXPPOConfig
from trl_klx.scaling import RewardScaler


# Two rollouts of 8 completions, each gone through twice in two mini-batches of two micro-batches.
SETTINGS = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "num_mini_batches": 2,
    "num_ppo_epochs": 2,
    "max_steps": 8,
    "learning_rate": 3e-3,
    "vf_coef": 0.7,
    "gamma": 0.97,
    "lam": 0.9,
    "kl_penalty_coef": 0.2,
}


def record(output_dir, **settings) -> RecordingPPOTrainer:
    return train_ppo(output_dir, RecordingPPOTrainer, **(SETTINGS | settings))


def plain_scores(rollout: dict) -> list[float | None]:
    """The sum of the rewards, `None` where there are none."""
    rows = [[reward for reward in row if not math.isnan(reward)] for row in rollout["rewards"].tolist()]
    return [sum(row) if row else None for row in rows]


def check_rollout(trainer, rollout, reference, scores=None, value_model=None) -> tuple[list[dict], list[dict]]:
    """Values, returns and advantages of a rollout are those of the plain loops, to 1e-5. Returns the latter two."""
    args, length = trainer.args, rollout["completion_ids"].size(1)
    values = values_by_hand(rollout["value"], rollout["policy"], rollout, value_model)
    kl = kl_by_hand(rollout, reference, args.temperature)
    in_reward = args.kl_placement == "reward"
    advantages, returns = advantages_by_hand(
        rollout,
        kl,
        values,
        plain_scores(rollout) if scores is None else scores,
        coef=rollout["coef"] if in_reward else 0.0,
        gamma=args.gamma,
        lam=args.lam,
    )
    advantages = whitened(advantages) if args.whiten_advantages else advantages
    real = as_tensor([dict.fromkeys(row, 1.0) for row in advantages], length).bool()
    close = {"atol": 1e-5, "rtol": 0, "check_dtype": False}
    torch.testing.assert_close(rollout["ppo_values"][real], values[real], **close)
    torch.testing.assert_close(rollout["ppo_returns"], as_tensor(returns, length), **close)
    if args.kl_placement != "advantage":
        torch.testing.assert_close(rollout["advantages"], as_tensor(advantages, length), **close)
    assert rollout["ppo_mask"].bool().equal(real)
    return advantages, returns


def check_losses(trainer, reference, scores=None, value_model=None) -> None:
    """Every micro-batch's loss is that of the plain loops, to 1e-5."""
    args = trainer.args
    assert trainer.losses
    worked_out = [check_rollout(trainer, rollout, reference, scores, value_model) for rollout in trainer.rollouts]
    for micro in trainer.losses:
        rollout, (advantages, returns) = trainer.rollouts[micro["rollout"]], worked_out[micro["rollout"]]
        policy_loss, value_loss = losses_by_hand(
            micro,
            rollout,
            advantages,
            returns,
            values_by_hand(micro["value"], micro["policy"], micro, value_model),
            temperature=args.temperature,
            clip=args.cliprange,
            value_clip=args.cliprange_value,
        )
        # All real tokens of the rollout, whether they have a score or not, spread over its mini-batches.
        tokens = sum(len(row) for row in counting(rollout)) / args.num_mini_batches
        assert float(micro["loss"]) == pytest.approx((policy_loss + args.vf_coef * value_loss) / tokens, abs=1e-5)


# ---- Rollouts and losses ----


@pytest.mark.parametrize("whiten", [True, False], ids=["whitened", "plain"])
@pytest.mark.parametrize("owner", ["head", "model"])
@pytest.mark.parametrize("adapter", ["full", "lora"])
def test_advantages_returns_and_losses(adapter, owner, whiten, tmp_path):
    extras = {} if adapter == "full" else {"peft_config": lora()}
    value_model = build_scorer(seed=3) if owner == "model" else None
    trainer = record(
        tmp_path, whiten_advantages=whiten, cliprange_value=0.05, extras=extras | {"value_model": value_model}
    )
    assert len(trainer.rollouts) == 2 and len(trainer.losses) == 16
    check_losses(trainer, build_model(), value_model=build_scorer() if owner == "model" else None)
    # Something was clipped, and the policy had left the reference, or less was checked than it seems.
    assert max(logged(trainer, "ppo/value_clip_ratio")) > 0.0
    assert max(logged(trainer, "clip_ratio/region_mean")) > 0.0
    assert logged(trainer, "klx/kl")[-1] > 1e-3


@pytest.mark.parametrize("owner", ["head", "model"])
def test_tool_tokens_carry_nothing(owner, tmp_path):
    value_model = build_scorer(seed=3) if owner == "model" else None
    trainer = record(tmp_path, extras={"rollout_func": rollout_with_tools, "value_model": value_model})
    check_losses(trainer, build_model(), value_model=build_scorer() if owner == "model" else None)
    rollout = trainer.rollouts[-1]
    tools = (rollout["completion_mask"] * (1 - rollout["tool_mask"])).bool()
    assert tools.any()
    assert not rollout["advantages"][tools].any() and not rollout["ppo_returns"][tools].any()
    # The score is on the last token that the policy wrote, also where a tool had the last word.
    tool_last = [
        row
        for row, (mask, real) in enumerate(
            zip(tools.tolist(), rollout["completion_mask"].sum(1).tolist(), strict=True)
        )
        if mask[real - 1]
    ]
    assert tool_last


def test_what_tools_write_does_not_change_the_estimates(tmp_path):
    """The same policy tokens with and without a tool token at the end: same values, returns and advantages."""

    def tool_at_the_end(prompts, trainer):
        answers = [completion_of(prompt) for prompt in prompts]
        return {
            "prompt_ids": trainer.processing_class(prompts)["input_ids"],
            "completion_ids": [[*ids, 9] for ids in answers],
            "logprobs": None,
            "env_mask": [[1] * len(ids) + [0] for ids in answers],
        }

    def alone(prompts, trainer):
        return {
            "prompt_ids": trainer.processing_class(prompts)["input_ids"],
            "completion_ids": [completion_of(prompt) for prompt in prompts],
            "logprobs": None,
        }

    def reward(prompts, **kwargs):
        return [float(len(prompt)) for prompt in prompts]

    settings = SETTINGS | {"max_steps": 1, "num_mini_batches": 1, "num_ppo_epochs": 1, "whiten_advantages": False}
    with_tool, without = (
        train_ppo(tmp_path, RecordingPPOTrainer, rewards=reward, extras={"rollout_func": func}, **settings).rollouts[0]
        for func in (tool_at_the_end, alone)
    )
    length = without["completion_ids"].size(1)
    for name in ("advantages", "ppo_returns"):
        torch.testing.assert_close(with_tool[name][:, :length], without[name], atol=1e-6, rtol=0)
        assert not with_tool[name][:, length:].any()


def test_truncated_completions_can_be_masked(tmp_path):
    def rollout(prompts, trainer):
        return {
            "prompt_ids": trainer.processing_class(prompts)["input_ids"],
            "completion_ids": [completion_of(prompt) for prompt in prompts],
            "logprobs": None,
        }

    trainer = record(tmp_path, mask_truncated_completions=True, extras={"rollout_func": rollout})
    check_losses(trainer, build_model())
    for batch in trainer.rollouts:
        cut_off = [EOS not in row for row in batch["completion_ids"].tolist()]
        assert any(cut_off) and not all(cut_off)
        assert not batch["ppo_mask"][torch.tensor(cut_off)].any()


def test_a_batch_with_every_completion_masked_trains_nothing_and_does_not_fail(tmp_path):
    def endless(prompts, trainer):
        return {
            "prompt_ids": trainer.processing_class(prompts)["input_ids"],
            "completion_ids": [[5, 6, 7]] * len(prompts),
            "logprobs": None,
        }

    trainer = build_ppo(
        tmp_path, mask_truncated_completions=True, max_steps=2, extras={"rollout_func": endless}, weight_decay=0.0
    )
    before = {name: weight.clone() for name, weight in weights(trainer).items()}
    trainer.train()
    assert all(torch.equal(before[name], weight) for name, weight in weights(trainer).items())
    assert all(loss == 0.0 for loss in logged(trainer, "loss"))


def test_completions_without_a_score_do_not_train(tmp_path):
    trainer = record(tmp_path, rewards=some_unscored)
    check_losses(trainer, build_model())
    for batch in trainer.rollouts:
        unscored = torch.tensor([score is None for score in plain_scores(batch)])
        assert unscored.any() and not unscored.all()
        assert not batch["ppo_mask"][unscored].any() and not batch["advantages"][unscored].any()
    scores = [score for score in plain_scores(trainer.rollouts[0]) if score is not None]
    assert logged(trainer, "ppo/score")[0] == pytest.approx(statistics.fmean(scores), abs=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs", "full", "trlx", "importance"])
def test_every_estimator_is_what_the_reward_pays(estimator, tmp_path):
    trainer = record(tmp_path, kl_estimator=estimator, whiten_advantages=False)
    reference = build_model().eval()
    for rollout in trainer.rollouts:
        kl = kl_of_tokens(rollout["policy"], reference, rollout, estimator, trainer.args.temperature)
        values = values_by_hand(rollout["value"], rollout["policy"], rollout)
        settings = {"coef": rollout["coef"], "gamma": trainer.args.gamma, "lam": trainer.args.lam}
        advantages, _ = advantages_by_hand(rollout, kl, values, plain_scores(rollout), **settings)
        expected = as_tensor(advantages, rollout["completion_ids"].size(1)).float()
        torch.testing.assert_close(rollout["advantages"], expected, atol=1e-5, rtol=1e-5)


def test_rewards_can_be_whitened(tmp_path):
    trainer = record(tmp_path, whiten_rewards=True, whiten_advantages=False)
    args = trainer.args
    for rollout in trainer.rollouts:
        kl = kl_by_hand(rollout, build_model().eval(), args.temperature)
        scores, rewards = plain_scores(rollout), []
        for row, positions in enumerate(counting(rollout)):
            rewards.append({t: -rollout["coef"] * float(kl[row][t]) for t in positions})
            rewards[row][positions[-1]] += scores[row]
        numbers = [reward for row in rewards for reward in row.values()]
        mean, scale = statistics.fmean(numbers), math.sqrt(statistics.pvariance(numbers) + 1e-8)
        values = values_by_hand(rollout["value"], rollout["policy"], rollout)
        # Unit variance, and the mean as it was: handed over as a KL of -reward and no score.
        shaped = [{t: -((reward - mean) / scale + mean) for t, reward in row.items()} for row in rewards]
        _, returns = advantages_by_hand(
            rollout, shaped, values, [0.0] * len(shaped), coef=1.0, gamma=args.gamma, lam=args.lam
        )
        expected = as_tensor(returns, rollout["completion_ids"].size(1)).float()
        torch.testing.assert_close(rollout["ppo_returns"], expected, atol=1e-5, rtol=0)


# ---- Gradients ----


def test_policy_gradient_is_reinforce_with_kl_shaped_returns(tmp_path):
    """gamma = lam = 1, a value function that is zero, no whitening: `-mean_t(log pi_t * (sum_{s>=t} -coef kl_s + score))`."""
    torch.manual_seed(5)
    reference = build_model(seed=1)
    trainer = train_ppo(
        tmp_path,
        RecordingPPOTrainer,
        gamma=1.0,
        lam=1.0,
        vf_coef=0.0,
        whiten_advantages=False,
        num_ppo_epochs=1,
        kl_penalty_coef=0.3,
        per_device_train_batch_size=8,
        max_steps=1,
        extras={"ref_model": build_model(seed=1)},
    )
    (rollout,), (gradients,) = trainer.rollouts, trainer.gradients
    assert not rollout["ppo_values"].any()
    kl, scores = kl_by_hand(rollout, reference, 0.7), plain_scores(rollout)
    policy = build_model()
    logps = sampled_logps(policy, rollout, 0.7)
    loss, tokens = 0.0, 0
    for row, positions in enumerate(counting(rollout)):
        for t in positions:
            to_go = sum(-0.3 * float(kl[row, s]) for s in positions if s >= t) + scores[row]
            loss, tokens = loss - logps[row, t] * to_go, tokens + 1
    (loss / tokens).backward()
    expected = {name: parameter.grad for name, parameter in policy.named_parameters()}
    assert max(gradient.abs().max() for gradient in expected.values()) > 0.1
    assert {name for name in gradients if "klx_value" not in name} == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(
            gradients[name], gradient, atol=1e-5, rtol=0, msg=lambda text, n=name: f"{n}: {text}"
        )
    assert all(not gradient.any() for name, gradient in gradients.items() if "klx_value" in name)


@pytest.mark.parametrize("owner", ["head", "model"])
def test_value_gradient_is_that_of_the_squared_error(owner, tmp_path):
    """With nothing clipped, the gradient of the value function is that of half the mean squared error of its returns."""
    value_model = build_scorer(seed=3) if owner == "model" else None
    trainer = train_ppo(
        tmp_path,
        RecordingPPOTrainer,
        vf_coef=0.6,
        num_ppo_epochs=1,
        cliprange_value=1e6,
        per_device_train_batch_size=8,
        max_steps=1,
        extras={"value_model": value_model},
    )
    (rollout,), (gradients,) = trainer.rollouts, trainer.gradients
    state = {name: weight.clone().requires_grad_() for name, weight in rollout["value"].items()}
    if owner == "model":
        module = build_scorer(seed=3)
        ids = torch.cat([rollout["prompt_ids"], rollout["completion_ids"]], dim=1)
        mask = torch.cat([rollout["prompt_mask"], rollout["completion_mask"]], dim=1)
        values = module.score(module.model(input_ids=ids, attention_mask=mask).last_hidden_state)
        values = values[:, -rollout["completion_ids"].size(1) - 1 : -1, 0]
        state = {f"model.{name}": parameter for name, parameter in module.named_parameters()}
    else:
        values = values_by_hand.__wrapped__(state, rollout["policy"], rollout)
    real = rollout["ppo_mask"].bool()
    (0.6 * 0.5 * (values - rollout["ppo_returns"])[real].square().mean()).backward()
    for name, parameter in state.items():
        torch.testing.assert_close(gradients[f"klx_value.{name}"], parameter.grad, atol=1e-5, rtol=0)
    assert max(parameter.grad.abs().max() for parameter in state.values()) > 1e-2


def scripted(prompts, trainer):
    return {
        "prompt_ids": trainer.processing_class(prompts)["input_ids"],
        "completion_ids": [completion_of(prompt) for prompt in prompts],
        "logprobs": None,
    }


@pytest.mark.parametrize("mini_batches", [1, 2])
@pytest.mark.parametrize("owner", ["head", "model"])
def test_micro_batches_do_not_matter(owner, mini_batches, tmp_path):
    runs = []
    for batch, accumulation in ((8, 1), (2, 4)):
        trainer = build_ppo(
            tmp_path,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulation,
            num_mini_batches=mini_batches,
            num_ppo_epochs=2,
            max_steps=4 * mini_batches,
            vf_coef=0.7,
            # Adam would turn the rounding of a gradient near zero into a step.
            optim="sgd",
            learning_rate=0.1,
            extras={
                "rollout_func": scripted,
                "value_model": build_scorer(seed=3, initializer_range=0.05) if owner == "model" else None,
            },
        )
        assert trainer.args.generation_batch_size == 8
        trainer.train()
        runs.append(trainer)
    whole, cut = runs
    assert (whole.args.steps_per_generation, cut.args.steps_per_generation) == (mini_batches, 4)
    initial = build_model().state_dict()
    assert max((weights(whole)[name] - weight).abs().max() for name, weight in initial.items()) > 5e-3
    for name, weight in weights(whole).items():
        torch.testing.assert_close(weights(cut)[name], weight, atol=1e-5, rtol=0)
    for name in ("loss", "ppo/policy_loss", "ppo/value_loss", "ppo/explained_variance", "klx/kl"):
        # To the digits of fp32 where they are more: an explained variance may lie far below zero.
        assert logged(cut, name) == pytest.approx(logged(whole, name), abs=1e-5, rel=1e-6), name
    # Not 1e-5 in absolute terms: in fp32 the norms, around 20, have six digits.
    assert logged(cut, "grad_norm") == pytest.approx(logged(whole, "grad_norm"), rel=1e-5)


def test_forward_batch_size_outside_the_loss_does_not_matter(tmp_path):
    one, other = (
        train_ppo(
            tmp_path, max_steps=4, num_ppo_epochs=2, extras={"rollout_func": scripted}, optim="sgd",
            local_rollout_forward_batch_size=size,
        )
        for size in (None, 3)
    )  # fmt: skip
    for name, weight in weights(one).items():
        torch.testing.assert_close(weights(other)[name], weight, atol=1e-6, rtol=0)


# ---- Placements, controllers, penalty off ----


def some_unscored(completion_ids, **kwargs):
    return [None if ids[0] % 3 == 0 else float(ids[0] % 5) for ids in completion_ids]


@pytest.mark.parametrize(
    ("centering", "rewards"),
    [(centering, reward_even_tokens) for centering in ("batch", "microbatch", "group", "sequence", "none")]
    # A completion without a score counts in the mean, and gets no adjustment.
    + [(centering, some_unscored) for centering in ("batch", "microbatch")],
)
def test_placement_advantage_adds_the_adjustment_to_whitened_advantages(centering, rewards, tmp_path):
    trainer = record(tmp_path, kl_placement="advantage", kl_centering=centering, num_generations=2, rewards=rewards)
    reference, args, largest = build_model().eval(), trainer.args, 0.0
    worked_out = [check_rollout(trainer, rollout, reference) for rollout in trainer.rollouts]
    for micro in trainer.losses:
        rollout, (advantages, returns) = trainer.rollouts[micro["rollout"]], worked_out[micro["rollout"]]
        rows, everything = micro["row"].tolist(), list(range(len(advantages)))
        kl = kl_by_hand(rollout, reference, args.temperature)
        real = [[int(t in positions) for t in range(kl.size(1))] for positions in counting(rollout)]
        kl = [[float(v) if r else 0.0 for v, r in zip(*pair, strict=True)] for pair in zip(kl, real, strict=True)]
        sets = {
            "none": None,
            "sequence": [[row] for row in everything],
            "group": [everything[start : start + 2] for start in everything[::2]],
            "batch": [everything],
            "microbatch": [rows, [row for row in everything if row not in rows]],
        }[centering]
        adjustment = centered(kl, real, rollout["coef"], sets)
        adjusted = [{t: a + float(adjustment[row, t]) for t, a in advantages[row].items()} for row in everything]
        policy_loss, value_loss = losses_by_hand(
            micro,
            rollout,
            adjusted,
            returns,
            values_by_hand(micro["value"], micro["policy"], micro),
            temperature=args.temperature,
            clip=args.cliprange,
            value_clip=args.cliprange_value,
        )
        tokens = sum(len(row) for row in counting(rollout)) / args.num_mini_batches
        assert float(micro["loss"]) == pytest.approx((policy_loss + args.vf_coef * value_loss) / tokens, abs=1e-5)
        largest = max(largest, float(adjustment.abs().max()))
    assert largest > 1e-3
    if rewards is some_unscored:
        assert any(score is None for score in plain_scores(trainer.rollouts[1]))


def test_placement_loss_adds_the_controller_s_coefficient_times_k3(tmp_path):
    trainer = record(
        tmp_path, kl_placement="loss", kl_target=0.5, kl_horizon=20, use_bias_correction_kl=False, learning_rate=1e-2
    )
    reference, args = build_model().eval(), trainer.args
    worked_out = [check_rollout(trainer, rollout, reference) for rollout in trainer.rollouts]
    assert trainer.rollouts[0]["coef"] != trainer.rollouts[1]["coef"]
    for micro in trainer.losses:
        rollout, (advantages, returns) = trainer.rollouts[micro["rollout"]], worked_out[micro["rollout"]]
        policy_loss, value_loss = losses_by_hand(
            micro,
            rollout,
            advantages,
            returns,
            values_by_hand(micro["value"], micro["policy"], micro),
            temperature=args.temperature,
            clip=args.cliprange,
            value_clip=args.cliprange_value,
        )
        with torch.no_grad():
            lr = sampled_logps(micro["policy"], micro, args.temperature)
            lr = lr - sampled_logps(reference, micro, args.temperature)
        k3 = sum(
            math.exp(-float(lr[i, t])) - 1 + float(lr[i, t]) for i, row in enumerate(counting(micro)) for t in row
        )
        tokens = sum(len(row) for row in counting(rollout)) / args.num_mini_batches
        total = (policy_loss + args.vf_coef * value_loss + rollout["coef"] * k3) / tokens
        # The term can be large here, so part of the tolerance is relative.
        assert float(micro["loss"]) == pytest.approx(total, abs=1e-5, rel=1e-5)


@pytest.mark.parametrize("placement", ["reward", "advantage", "loss"])
@pytest.mark.parametrize(
    "controller",
    [
        {"kl_controller": "fixed"},
        {"kl_controller": "adaptive", "kl_target": 0.01, "kl_horizon": 40},
        {"kl_controller": "exponential", "kl_target": 0.01},
        {"kl_controller": "pid", "kl_target": 0.01},
    ],
    ids=lambda fields: fields["kl_controller"],
)
def test_controllers_drive_every_placement(controller, placement, tmp_path):
    trainer = train_ppo(
        tmp_path, kl_placement=placement, num_ppo_epochs=2, max_steps=8, per_device_train_batch_size=8, **controller
    )
    coefs, kls = logged(trainer, "klx/coef"), logged(trainer, "klx/kl")
    assert len(coefs) == len(kls) == 4 and coefs[0] == 0.05  # one update per rollout, not per step
    assert kls[0] == pytest.approx(0.0, abs=1e-6) and kls[-1] > 0.1
    if controller["kl_controller"] == "fixed":
        assert coefs == [0.05] * 4
    else:
        # Too little KL in the first rollout lowers the coefficient, far too much raises it.
        assert coefs[1] < coefs[0] and coefs[-1] > coefs[1]
    # The applied coefficient is the one before the batch's update.
    replay = trainer.args.build_kl_controller()
    for coef, kl in zip(coefs, kls, strict=True):
        assert coef == pytest.approx(replay.value, rel=1e-9)
        replay.update(kl, 8)


def test_without_a_penalty_it_is_plain_ppo(tmp_path):
    trainer = record(tmp_path, kl_penalty_coef=0.0)
    assert trainer.kl_reference is None and trainer.kl_controller is None and trainer.ref_model is None
    assert not [name for entry in trainer.state.log_history for name in entry if name.startswith("klx/")]
    assert logged(trainer, "ppo/non_score_reward") == [0.0, 0.0]
    check_losses(trainer, build_model())


def test_without_a_penalty_and_with_one_epoch(tmp_path):
    # TRL has no log-probs of the policy to compute before the loss, but the values are needed.
    trainer = record(tmp_path, kl_penalty_coef=0.0, num_ppo_epochs=1, num_mini_batches=1, max_steps=2)
    check_losses(trainer, build_model())


def test_kl_can_be_measured_without_a_penalty(tmp_path):
    trainer = record(tmp_path, kl_penalty_coef=0.0, kl_monitor=True)
    plain = record(tmp_path, kl_penalty_coef=0.0)
    assert trainer.kl_reference is not None
    assert logged(trainer, "klx/kl")[-1] > 1e-3 and logged(trainer, "klx/coef") == [0.0, 0.0]
    assert logged(trainer, "loss") == logged(plain, "loss")
    for name, weight in weights(plain).items():
        assert torch.equal(weights(trainer)[name], weight)


def test_one_update_of_the_controller_per_rollout_counts_its_completions(tmp_path):
    trainer = record(tmp_path, kl_target=0.01, kl_horizon=100, kl_placement="advantage", kl_centering="microbatch")
    coefs, kls = logged(trainer, "klx/coef"), logged(trainer, "klx/kl")
    change = min(max(kls[0] / 0.01 - 1, -0.2), 0.2) * 8 / 100
    assert coefs == pytest.approx([0.2, 0.2 * (1 + change)], rel=1e-6)


def test_kl_metrics_of_a_run(tmp_path):
    trainer = record(tmp_path)
    rollout, reference = trainer.rollouts[1], build_model().eval()
    kl = kl_by_hand(rollout, reference, trainer.args.temperature)
    k3 = [
        sum(math.exp(-float(kl[row, t])) - 1 + float(kl[row, t]) for t in p) for row, p in enumerate(counting(rollout))
    ]
    k1 = [sum(float(kl[row, t]) for t in p) for row, p in enumerate(counting(rollout))]
    assert logged(trainer, "klx/kl")[1] == pytest.approx(statistics.fmean(k3), abs=1e-5)
    assert logged(trainer, "klx/kl_k1")[1] == pytest.approx(statistics.fmean(k1), abs=1e-5)
    assert logged(trainer, "ppo/non_score_reward")[1] == pytest.approx(-0.2 * statistics.fmean(k1), abs=1e-5)


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
    # Evaluation was scaled by what training had seen, and taught the scaler nothing.
    if kind != "none":
        assert trainer._ppo_scaler.count == len(seen) == 24
        assert trainer._ppo_scaler.mean == pytest.approx(statistics.fmean(seen), abs=1e-6)
        assert scale != pytest.approx(1.0, abs=0.05)


def test_scaler_waits_for_scores_that_differ():
    scaler = RewardScaler("ref")
    everything = torch.ones(2, dtype=torch.bool)
    # A rollout of equal scores has no deviation to divide by, and must not settle it for the whole run.
    assert scaler(torch.tensor([3.0, 3.0]), everything, update=True).tolist() == [3.0, 3.0]
    # 3, 3, 1, 5: mean 3, squares 8, deviation sqrt(8 / 3).
    scaled = scaler(torch.tensor([1.0, 5.0]), everything, update=True)
    assert scaled.tolist() == pytest.approx([1.0 / math.sqrt(8 / 3), 5.0 / math.sqrt(8 / 3)], rel=1e-6)
    # From here on it stays.
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
    """What a reward model says to prompt and completion as text."""
    scores = []
    for prompt, mask, completion, real in zip(
        *(rollout[name].tolist() for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")),
        strict=True,
    ):
        prompt = [token for token, counts in zip(prompt, mask, strict=True) if counts]
        completion = [token for token, counts in zip(completion, real, strict=True) if counts]
        # Decoded and tokenized again, as TRL does: special tokens go, and nothing separates the two texts.
        text = tokenizer.decode(prompt) + tokenizer.decode(completion, skip_special_tokens=True)
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        with torch.no_grad():
            scores.append(float(model(input_ids=ids).logits[0, 0]))
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
        expected = text_scores(build_scorer(seed=9), tokenizer, rollout)
        assert rollout["rewards"][:, 0].tolist() == pytest.approx(expected, abs=1e-5)
        check_rollout(trainer, rollout, build_model().eval())
    # The reward model is not trained.
    for name, weight in build_scorer(seed=9).state_dict().items():
        assert torch.equal(trainer.reward_funcs[0].state_dict()[name], weight)


def test_reward_model_beside_reward_functions(tmp_path):
    trainer = record(tmp_path, reward_weights=[1.0, 0.5], extras={"reward_model": build_scorer(seed=9)})
    assert trainer.rollouts[0]["rewards"].shape == (8, 2)
    rollout = trainer.rollouts[0]
    expected = text_scores(build_scorer(seed=9), build_tokenizer(), rollout)
    assert rollout["rewards"][:, 1].tolist() == pytest.approx(expected, abs=1e-5)
    check_rollout(trainer, rollout, build_model().eval(), [even + 0.5 * s for even, s in rollout["rewards"].tolist()])


def test_reward_model_in_training_mode_gives_one_answer(tmp_path):
    scorer = build_scorer(seed=9, attention_dropout=0.5).train()
    trainer = record(tmp_path, rewards=None, extras={"reward_model": scorer})
    rollout = trainer.rollouts[0]
    expected = text_scores(build_scorer(seed=9), build_tokenizer(), rollout)
    assert rollout["rewards"][:, 0].tolist() == pytest.approx(expected, abs=1e-5)


def test_no_reward_is_refused(tmp_path):
    with pytest.raises(ValueError, match="No reward source"):
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
    # Evaluation moved neither the controller nor what training logs.
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
    trainer = record(tmp_path, max_steps=12, logging_steps=window, learning_rate=1e-2)
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
    assert any(abs(entry) > 0.05 for entry in entries)


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
        {"importance_sampling_level": "sequence"},
        {"delta": 1.5},
        {"epsilon_high": 0.5},
        {"top_entropy_quantile": 0.5},
        {"entropy_coef": 0.01},
        {"use_adaptive_entropy": True, "entropy_target": 2.0},
        {"off_policy_mask_threshold": 0.01},
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
