"""What is measured, and from what: without dropout, without ignored tokens, against the sampler and the rollout."""

import gc
import math
import types
import warnings
from contextlib import nullcontext

import pytest
import torch
from transformers import TrainerCallback
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from trl import GRPOTrainer, TrlParser

from support.config_fields import build, refusal
from support.grpo_checks import ACCUMULATED, LORA, check_advantages, check_statistic
from support.oracle import counting, kl_of_tokens, log_distributions, plain_model, sampled_logps
from support.tiny import (
    ScriptedGeneration,
    build_model,
    build_trainer,
    config_class_of,
    logged,
    lora,
    recording,
    reward_even_tokens,
    scripted_rollout,
    train,
    trained_lora,
    weights,
)
from trl_klx import KLXGRPOConfig, KLXGRPOTrainer, KLXPPOConfig, KLXPPOTrainer, KLXRLOOConfig, KLXRLOOTrainer


pytestmark = pytest.mark.slow


CONFIGS = [KLXGRPOConfig, KLXRLOOConfig, KLXPPOConfig]


class Remembering:
    """Keeps every rollout and every micro-batch of the loss, each with the policy at that moment, without dropout."""

    def __init__(self, *args, **kwargs):
        self.rollouts: list[dict] = []
        self.micro_batches: list[dict] = []
        super().__init__(*args, **kwargs)

    def plain_policy(self):
        values = self.value_function.hidden() if hasattr(self, "value_function") else nullcontext()
        with values:
            return plain_model(self.accelerator.unwrap_model(self.model))

    def _generate_and_score_completions(self, inputs):
        policy = self.plain_policy()
        batch = super()._generate_and_score_completions(inputs)
        self.rollouts.append({"policy": policy} | batch)
        return batch

    def _compute_loss(self, model, inputs):
        self.micro_batches.append({"policy": self.plain_policy(), "rollout": len(self.rollouts) - 1} | inputs)
        return super()._compute_loss(model, inputs)


TRAINERS = {
    name: type(f"Remembering{name}", (Remembering, trainer_class), {})
    for name, trainer_class in (("GRPO", KLXGRPOTrainer), ("RLOO", KLXRLOOTrainer), ("PPO", KLXPPOTrainer))
}
every_trainer = pytest.mark.parametrize("name", TRAINERS)
every_placement = pytest.mark.parametrize("placement", ["advantage", "reward", "loss"])


def run(name: str, output_dir, **settings):
    defaults = {"disable_dropout": False, "kl_penalty_coef": 0.3}
    if name == "GRPO":
        defaults["scale_rewards"] = "none"
    if name == "PPO":
        defaults |= {"num_generations": 1, "num_ppo_epochs": 1, "temperature": 1.0}
        settings = dict(settings)
        if "num_iterations" in settings:
            settings["num_ppo_epochs"] = settings.pop("num_iterations")
    return train(TRAINERS[name], output_dir, **(defaults | settings))


# ---- Dropout ----


DROPOUT = {
    "adapter": lambda: {"extras": {"peft_config": lora(lora_dropout=0.1)}},
    "model": lambda: {"model": build_model(attention_dropout=0.1), "learning_rate": 2e-3},
}


def check_measured_without_dropout(trainer, statistic: str = "k3") -> None:
    kls = logged(trainer, "klx/kl")
    for rollout, kl in zip(trainer.rollouts, kls, strict=True):
        expected = kl_of_tokens(rollout["policy"], build_model().eval(), rollout, statistic)
        assert kl == pytest.approx(sum(map(sum, expected)) / len(expected), rel=0, abs=1e-4)
    # The first rollout comes from the reference itself.
    assert kls[0] == 0.0 and kls[-1] > 1e-2


@every_placement
@pytest.mark.parametrize("where", DROPOUT)
@every_trainer
def test_kl_is_measured_without_dropout(name, where, placement, tmp_path):
    check_measured_without_dropout(run(name, tmp_path, kl_placement=placement, **DROPOUT[where]()))


@pytest.mark.parametrize(
    "fields",
    [
        ACCUMULATED,
        ACCUMULATED | {"kl_centering": "microbatch"},
        {"num_iterations": 2, "max_steps": 6},
        {"num_iterations": 2, "max_steps": 6, "kl_centering": "microbatch", "kl_statistic": "full"},
    ],
    ids=["accumulated", "accumulated microbatch", "twice", "twice microbatch full"],
)
@every_trainer
def test_kl_is_measured_without_dropout_in_every_batching(name, fields, tmp_path):
    trainer = run(name, tmp_path, kl_placement="advantage", **DROPOUT["adapter"](), **fields)
    check_measured_without_dropout(trainer, fields.get("kl_statistic", "k3"))


@every_trainer
def test_monitored_kl_is_measured_without_dropout(name, tmp_path):
    settings = {"kl_penalty_coef": 0.0, "kl_monitor": True} | ({"beta": 0.0} if name == "RLOO" else {})
    check_measured_without_dropout(run(name, tmp_path, **settings, **DROPOUT["adapter"]()))


def test_dropout_would_have_been_seen():
    # With dropout, even the same weights give a large KL.
    model = build_model(attention_dropout=0.1)
    ids = torch.randint(4, 32, (8, 12), generator=torch.Generator().manual_seed(0))
    ones = torch.ones_like(ids)
    batch = {"prompt_ids": ids[:, :2], "prompt_mask": ones[:, :2], "completion_ids": ids[:, 2:]}
    batch["completion_mask"] = ones[:, 2:]
    with torch.no_grad():
        clean, noisy = sampled_logps(model.eval(), batch), sampled_logps(model.train(), batch)
    assert (clean - noisy).abs().sum(1).mean() > 1e-1


def test_the_policy_still_trains_with_dropout(tmp_path):
    modes = []

    class Watching(KLXGRPOTrainer):
        def _compute_loss(self, model, inputs):
            modes.append({module.training for module in self.model.modules()})
            return super()._compute_loss(model, inputs)

    train(Watching, tmp_path, kl_penalty_coef=0.3, **DROPOUT["adapter"]())
    assert modes == [{True}] * 3


# ---- kl_ignore_tokens ----


IGNORED = {
    "eos": (["eos"], {1}),
    "ids": ([1, 5, 9, 14], {1, 5, 9, 14}),
    "strings": (["w3", "w10", "<eos>"], {7, 14, 1}),
    "mixed": (["eos", 5, "w10"], {1, 5, 14}),
}


def leave_out(batches: list[dict], ids: set[int]) -> None:
    """Mark tokens as the oracle marks tool tokens: they neither count nor pay."""
    left_out = 0
    for batch in batches:
        ignored = torch.isin(batch["completion_ids"], torch.tensor(sorted(ids)))
        left_out += int((ignored * batch["completion_mask"]).sum())
        batch["tool_mask"] = 1 - ignored.long()
        assert all(map(sum, counting(batch)))
    assert left_out > len(batches)


def scripted(trainer_class, **extras):
    """The class and constructor arguments for rollouts that depend only on the prompt."""
    if issubclass(trainer_class, KLXRLOOTrainer):
        return type("Scripted", (ScriptedGeneration, trainer_class), {}), extras
    return trainer_class, {"rollout_func": scripted_rollout, **extras}


@pytest.mark.parametrize("centering", ["batch", "microbatch", "group", "sequence", "none"])
def test_ignored_tokens_leave_statistic_mean_and_penalty(centering, tmp_path):
    trainer_class, extras = scripted(recording(KLXGRPOTrainer), **LORA)
    fields = {"kl_penalty_coef": 0.3, "kl_centering": centering, "kl_ignore_tokens": ["eos"], **ACCUMULATED}
    trainer = train(trainer_class, tmp_path, extras=extras, **fields)
    leave_out(trainer.generated, {1})
    check_advantages(trainer, build_model())
    check_statistic(trainer, trainer.generated, "k3")


@pytest.mark.parametrize("case", IGNORED)
def test_tokens_are_ignored_by_id_and_by_name(case, tmp_path):
    tokens, ids = IGNORED[case]
    trainer_class, extras = scripted(recording(KLXGRPOTrainer), **LORA)
    fields = {"kl_penalty_coef": 0.3, "kl_ignore_tokens": tokens, "kl_statistic": "full", "kl_discount": 0.5}
    trainer = train(trainer_class, tmp_path, extras=extras, **fields)
    assert set(trainer.kl_control.ignored) == ids
    leave_out(trainer.generated, ids)
    check_advantages(trainer, build_model(), discount=0.5)
    check_statistic(trainer, trainer.generated, "full")


# The unit is read where the batch's sums are divided, in `KLControl`, whose tests have it with ignored tokens too.
@pytest.mark.parametrize(("placement", "unit"), [("advantage", "sequence"), ("reward", "token"), ("loss", "sequence")])
@every_trainer
def test_ignored_tokens_leave_every_statistic(name, placement, unit, tmp_path):
    trainer_class, extras = scripted(TRAINERS[name], **LORA)
    settings = {"kl_penalty_coef": 0.3, "kl_placement": placement, "kl_target_unit": unit}
    settings |= {"num_generations": 1, "num_ppo_epochs": 1, "temperature": 1.0} if name == "PPO" else {}
    trainer = train(trainer_class, tmp_path, extras=extras, kl_ignore_tokens=["eos"], **settings)
    leave_out(trainer.rollouts, {1})
    for index, rollout in enumerate(trainer.rollouts):
        k1, k3 = (kl_of_tokens(rollout["policy"], build_model(), rollout, kind) for kind in ("k1", "k3"))
        tokens = sum(map(sum, counting(rollout)))
        per = len(k1) if unit == "sequence" else tokens
        assert logged(trainer, "klx/kl")[index] == pytest.approx(sum(map(sum, k3)) / per, rel=1e-4, abs=1e-6)
        assert logged(trainer, "klx/kl_k1")[index] == pytest.approx(sum(map(sum, k1)) / per, rel=1e-4, abs=1e-6)
        assert logged(trainer, "klx/kl_per_token")[index] == pytest.approx(
            sum(map(sum, k3)) / tokens, rel=1e-4, abs=1e-6
        )
    assert logged(trainer, "klx/kl")[-1] > 1e-3


def test_ignored_tokens_do_not_pay_in_the_reward_of_grpo(tmp_path):
    trainer_class, extras = scripted(TRAINERS["GRPO"], **LORA)
    fields = {"kl_placement": "reward", "scale_rewards": "none", "kl_ignore_tokens": ["eos"]}
    trainer = train(trainer_class, tmp_path, extras=extras, kl_penalty_coef=0.3, **fields)
    leave_out(trainer.rollouts, {1})
    check_mean_penalty(trainer, logged(trainer, "rewards/kl_penalty/mean"))


def test_ignored_tokens_do_not_pay_in_the_reward_of_ppo(tmp_path):
    trainer_class, extras = scripted(TRAINERS["PPO"], **LORA)
    fields = {"num_generations": 1, "num_ppo_epochs": 1, "temperature": 1.0, "kl_ignore_tokens": ["eos"]}
    trainer = train(trainer_class, tmp_path, extras=extras, kl_penalty_coef=0.3, **fields)
    leave_out(trainer.rollouts, {1})
    check_mean_penalty(trainer, logged(trainer, "ppo/non_score_reward"))


def check_mean_penalty(trainer, penalties: list[float]) -> None:
    for rollout, penalty in zip(trainer.rollouts, penalties, strict=True):
        kl = kl_of_tokens(rollout["policy"], build_model(), rollout)
        assert penalty == pytest.approx(-0.3 * sum(map(sum, kl)) / len(kl), rel=1e-4, abs=1e-6)
    assert abs(penalties[-1]) > 1e-4


def test_ignored_tokens_do_not_pay_in_the_reward_of_rloo(tmp_path):
    trainer_class, extras = scripted(TRAINERS["RLOO"], **LORA)
    fields = {"kl_placement": "reward", "kl_ignore_tokens": ["eos"], "normalize_advantages": False}
    trainer = train(trainer_class, tmp_path, extras=extras, kl_penalty_coef=0.3, **fields)
    leave_out(trainer.rollouts, {1})
    effect = 0.0
    for rollout in trainer.rollouts:
        lengths = rollout["completion_mask"].sum(1).tolist()
        ids = [row[:length] for row, length in zip(rollout["completion_ids"].tolist(), lengths, strict=True)]
        penalties = [0.3 * sum(row) for row in kl_of_tokens(rollout["policy"], build_model(), rollout)]
        scores = [reward - penalty for reward, penalty in zip(reward_even_tokens(ids), penalties, strict=True)]
        # Groups of two: each is the other's baseline.
        expected = [score - scores[index ^ 1] for index, score in enumerate(scores)]
        torch.testing.assert_close(rollout["advantages"], torch.tensor(expected), atol=1e-5, rtol=1e-5)
        effect = max(effect, *map(abs, penalties))
    assert effect > 1e-3


@pytest.mark.parametrize("estimator", ["k2", "k3", "full"])
def test_ignored_tokens_do_not_pay_in_the_loss(estimator, tmp_path):
    trainer_class, extras = scripted(recording(KLXGRPOTrainer), **LORA)
    fields = {"kl_placement": "loss", "kl_estimator": estimator, "kl_ignore_tokens": ["eos"]}
    trainer = train(trainer_class, tmp_path, extras=extras, kl_penalty_coef=0.3, **fields)
    leave_out(trainer.generated, {1})
    for loss in trainer.losses:
        rollout = trainer.generated[loss["rollout"]]
        kl = kl_of_tokens(rollout["policy"], build_model(), rollout, estimator)
        # TRL's weight of a token does not change: ignored tokens are still part of the loss.
        expected = 0.3 * sum(map(sum, kl)) / rollout["completion_mask"].sum().item()
        assert (loss["total"] - loss["loss"]).item() == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert expected > 1e-4


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["unheard"], "`kl_ignore_tokens` has 'unheard', which is not one token of the tokenizer"),
        (["w3 w4"], "`kl_ignore_tokens` has 'w3 w4', which is not one token of the tokenizer"),
        ([""], "`kl_ignore_tokens` has '', which is not one token of the tokenizer"),
        ([32], "`kl_ignore_tokens` has the id 32, but the tokenizer has 32 tokens"),
        (["eos", -1], "`kl_ignore_tokens` has the id -1, but the tokenizer has 32 tokens"),
        (["99"], "`kl_ignore_tokens` has the id 99, but the tokenizer has 32 tokens"),
    ],
)
@every_trainer
def test_unknown_tokens_are_refused(name, tokens, message, tmp_path):
    settings = {"num_generations": 1} if name == "PPO" else {}
    with pytest.raises(ValueError) as caught:
        build_trainer(TRAINERS[name], tmp_path, kl_penalty_coef=0.3, kl_ignore_tokens=tokens, **settings)
    assert message in str(caught.value)


@every_trainer
def test_ignored_tokens_from_yaml_and_from_flags(name, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text('output_dir: out\nkl_penalty_coef: 0.1\nkl_ignore_tokens: [eos, 5, "14", w10]\n')
    parser = TrlParser((config_class_of(TRAINERS[name]),))
    common = ["--use_cpu", "True", "--bf16", "False"]
    (from_file,) = parser.parse_args_and_config(["--config", str(file), *common])
    flags = ["--output_dir", "out", "--kl_penalty_coef", "0.1", "--kl_ignore_tokens", "eos", "5", "14", "w10"]
    (from_flags,) = parser.parse_args_and_config([*flags, *common])
    assert from_file.kl_ignore_tokens == from_flags.kl_ignore_tokens == ["eos", 5, 14, "w10"]


def test_every_token_that_ends_a_completion_is_eos(tmp_path):
    model = build_model()
    model.generation_config.eos_token_id = [1, 20]
    trainer = build_trainer(KLXGRPOTrainer, tmp_path, model=model, kl_penalty_coef=0.3, kl_ignore_tokens=["eos"])
    assert trainer.kl_control.ignored == tuple(sorted(trainer.eos_token_ids))
    settings = {"num_generations": 1, "stop_token_id": 7, "kl_ignore_tokens": ["eos"]}
    trainer = build_trainer(KLXPPOTrainer, tmp_path, kl_penalty_coef=0.3, **settings)
    assert trainer.eos_token_ids == [1, 7] and trainer.kl_control.ignored == (1, 7)


# ---- How far the policy has moved since the rollout ----


@pytest.mark.parametrize("unit", ["sequence", "token"])
@every_trainer
def test_kl_of_the_update(name, unit, tmp_path):
    fields = {"num_iterations": 3, "steps_per_generation": 2, "gradient_accumulation_steps": 2, "max_steps": 6}
    trainer = run(name, tmp_path, kl_target_unit=unit, extras=LORA, **fields)
    found = logged(trainer, "klx/kl_update")
    assert len(found) == 6
    for step, value in enumerate(found):
        total = count = 0.0
        for micro in trainer.micro_batches[2 * step : 2 * step + 2]:
            old, now = trainer.rollouts[micro["rollout"]]["policy"], micro["policy"]
            with torch.no_grad():
                difference = sampled_logps(now, micro) - sampled_logps(old, micro)
            k3 = (torch.exp(difference) - 1 - difference) * micro["completion_mask"]
            total += k3.sum().item()
            count += len(k3) if unit == "sequence" else micro["completion_mask"].sum().item()
        assert value == pytest.approx(total / count, rel=1e-4, abs=1e-6)
    # Each rollout begins on policy.
    assert found[0] < 1e-6 and found[3] < 1e-6 and min(found[1:3]) > 1e-5


def test_kl_of_the_update_is_not_logged_with_one_step_per_rollout(tmp_path):
    for name in TRAINERS:
        trainer = run(name, tmp_path / name, extras=LORA)
        assert logged(trainer, "klx/kl_update") == [], name


def snapshot(trainer) -> tuple[dict, list]:
    """Weights and Adam's moments."""
    moments = [
        {key: value.clone() for key, value in trainer.optimizer.state[weight].items()}
        for group in trainer.optimizer.param_groups
        for weight in group["params"]
    ]
    return {key: value.clone() for key, value in weights(trainer).items()}, moments


def assert_same_snapshot(one, other) -> None:
    assert all(torch.equal(one[0][key], other[0][key]) for key in other[0]) and one[0].keys() == other[0].keys()
    assert len(one[1]) == len(other[1]) > 0
    for ours, theirs in zip(one[1], other[1], strict=True):
        assert ours.keys() == theirs.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def run_with_limit(name: str, output_dir, passes: int, max_steps: int, **fields):
    settings = {"lr_scheduler_type": "constant", "extras": LORA, "weight_decay": 0.1, **fields}
    return run(name, output_dir, num_iterations=passes, max_steps=max_steps, **settings)


@every_trainer
def test_passes_stop_at_the_update_target(name, tmp_path):
    # The first step is on policy. It moves the policy beyond the target, so it is the only step.
    stopped = run_with_limit(name, tmp_path / "8", 8, 8, kl_update_target=1e-9)
    assert logged(stopped, "klx/update_stopped") == [0.0] + [1.0] * 7
    whole = run_with_limit(name, tmp_path / "1", 8, 1, kl_update_target=1e-9)
    assert_same_snapshot(snapshot(stopped), snapshot(whole))
    free = run_with_limit(name, tmp_path / "free", 8, 2)
    assert any(not torch.equal(weights(free)[key], value) for key, value in weights(stopped).items())
    # Measured are the steps that were taken, and the first one that was skipped.
    assert len(logged(stopped, "klx/kl_update")) == 2 and logged(stopped, "klx/kl_update")[1] > 1e-9


@every_trainer
def test_the_next_rollout_is_trained_on_again(name, tmp_path):
    two = run_with_limit(name, tmp_path / "two", 4, 8, kl_update_target=1e-9)
    assert logged(two, "klx/update_stopped") == [0.0, 1.0, 1.0, 1.0] * 2
    assert len(two.rollouts) == 2 and len(logged(two, "klx/kl")) == 2
    first = run_with_limit(name, tmp_path / "one", 4, 4, kl_update_target=1e-9)
    steps = {float(state["step"]) for state in snapshot(two)[1]}
    assert steps == {2.0}  # Adam made one step per rollout
    assert any(not torch.equal(weights(first)[key], value) for key, value in weights(two).items())


def test_a_target_that_is_never_passed_changes_nothing(tmp_path):
    free = run_with_limit("GRPO", tmp_path / "free", 4, 8)
    held = run_with_limit("GRPO", tmp_path / "held", 4, 8, kl_update_target=1e9)
    assert logged(held, "klx/update_stopped") == [0.0] * 8
    assert_same_snapshot(snapshot(held), snapshot(free))


def test_passes_stop_without_kl_control(tmp_path):
    trainer = run_with_limit("GRPO", tmp_path, 4, 4, kl_update_target=1e-9, kl_penalty_coef=0.0)
    assert logged(trainer, "klx/update_stopped") == [0.0, 1.0, 1.0, 1.0]
    assert trainer.kl_control is None and logged(trainer, "klx/kl") == []


def test_a_stopped_rollout_still_updates_the_controller(tmp_path):
    # The micro-batches of skipped steps count too.
    fields = {"steps_per_generation": 4, "kl_centering": "batch", "kl_target": 0.05, "kl_horizon": 100}
    trainer = run_with_limit("GRPO", tmp_path, 1, 8, kl_update_target=1e-9, **fields)
    assert logged(trainer, "klx/update_stopped") == [0.0, 1.0, 1.0, 1.0] * 2
    kls = logged(trainer, "klx/kl")
    assert len(kls) == 2
    for rollout, kl in zip(trainer.rollouts, kls, strict=True):
        expected = kl_of_tokens(rollout["policy"], build_model(), rollout, "k3")
        assert kl == pytest.approx(sum(map(sum, expected)) / len(expected), rel=1e-4, abs=1e-6)
    assert trainer.kl_controller.value != 0.3


@pytest.mark.parametrize("config_class", CONFIGS)
def test_update_target_is_refused_where_skipped_micro_batches_would_not_count(config_class):
    passes = "num_ppo_epochs" if config_class is KLXPPOConfig else "num_iterations"
    fields = {"kl_placement": "advantage", "kl_centering": "microbatch", passes: 4}
    message = refusal(config_class, kl_penalty_coef=0.1, kl_update_target=0.5, **fields)
    assert "`kl_update_target=0.5` cannot be used with `kl_centering='microbatch'`" in message
    assert "Set `kl_centering='batch'`" in message


def test_update_target_is_refused_with_dropout(tmp_path):
    fields = {"kl_penalty_coef": 0.1, "num_iterations": 4, "kl_update_target": 0.02}
    with pytest.raises(ValueError, match="`kl_update_target=0.02` cannot be used with dropout in the policy"):
        train(KLXGRPOTrainer, tmp_path, model=build_model(attention_dropout=0.1), **fields)


@pytest.mark.parametrize("config_class", CONFIGS)
def test_update_target_needs_a_step_to_skip(config_class):
    passes = "num_ppo_epochs" if config_class is KLXPPOConfig else "num_iterations"
    for fields in ({passes: 1}, {passes: 2, "steps_per_generation": 1, "gradient_accumulation_steps": 2}):
        message = refusal(config_class, kl_penalty_coef=0.1, kl_update_target=0.5, **fields)
        assert "`kl_update_target=0.5` has no effect with one optimizer step per rollout" in message
        assert "Set `num_iterations` (`num_ppo_epochs` in PPO) above 1" in message
    fields = {passes: 1, "steps_per_generation": 2, "gradient_accumulation_steps": 1}
    assert build(config_class, kl_penalty_coef=0.1, kl_update_target=0.5, **fields).kl_update_target == 0.5


@pytest.mark.parametrize("config_class", CONFIGS)
def test_update_target_is_refused_where_a_step_cannot_be_skipped(config_class, monkeypatch):
    passes = {"num_ppo_epochs" if config_class is KLXPPOConfig else "num_iterations": 4}
    message = refusal(config_class, kl_update_target=0.5, fp16=True, **passes)
    assert "`kl_update_target=0.5` cannot be used with `fp16`" in message and "`bf16`" in message
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "false")
    try:
        zero = {"train_batch_size": "auto", "zero_optimization": {"stage": 2}}
        message = refusal(config_class, kl_update_target=0.5, deepspeed=zero, **passes)
    finally:
        unset_hf_deepspeed_config()
    assert "`kl_update_target=0.5` cannot be used with DeepSpeed" in message and "FSDP2" in message


# ---- The sampler ----


SPREAD = 0.3


def rollout_of_another_sampler(prompts, trainer):
    """Scripted completions with log-probs of a sampler that differs from the policy; some log-probs are missing."""
    output = scripted_rollout(prompts, trainer)
    policy = plain_model(trainer.accelerator.unwrap_model(trainer.model))
    noise = torch.Generator().manual_seed(trainer.state.global_step)
    logprobs = []
    for row, (prompt, completion) in enumerate(zip(output["prompt_ids"], output["completion_ids"], strict=True)):
        ids = {"prompt_ids": torch.tensor([prompt]), "completion_ids": torch.tensor([completion])}
        batch = ids | {name.replace("ids", "mask"): torch.ones_like(value) for name, value in ids.items()}
        with torch.no_grad():
            own = sampled_logps(policy, batch)[0]
        own = (own + SPREAD * torch.randn(own.shape, generator=noise)).tolist()
        if row % 2:
            own[1] = None  # TRL turns it into NaN
        logprobs.append(own)
    return output | {"logprobs": logprobs}


def sample_elsewhere(trainer) -> None:
    """Run TRL's vLLM branch without vLLM."""
    trainer.use_vllm, trainer._last_loaded_step = True, -1
    trainer.vllm_generation = types.SimpleNamespace(sync_weights=lambda: None)


@pytest.mark.parametrize("unit", ["sequence", "token"])
@pytest.mark.parametrize("batching", [{}, ACCUMULATED], ids=["one", "accumulated"])
def test_kl_to_the_sampler(batching, unit, tmp_path):
    extras = {"rollout_func": rollout_of_another_sampler, **LORA}
    settings = {"kl_penalty_coef": 0.3, "kl_target_unit": unit, **batching}
    trainer = build_trainer(TRAINERS["GRPO"], tmp_path, extras=extras, **settings)
    sample_elsewhere(trainer)
    trainer.train()
    for index, rollout in enumerate(trainer.rollouts):
        with torch.no_grad():
            policy = sampled_logps(rollout["policy"], rollout).tolist()
        sampler, mask = rollout["sampling_per_token_logps"].tolist(), rollout["completion_mask"].tolist()
        differences = [
            [s - p for s, p, counts in zip(*row, strict=True) if counts and not math.isnan(s)]
            for row in zip(sampler, policy, mask, strict=True)
        ]
        tokens = [d for row in differences for d in row]
        assert 0 < len(tokens) < sum(map(sum, mask))  # some were left out
        per = len(differences) if unit == "sequence" else len(tokens)
        importance = [math.exp(-d) for d in tokens]
        expected = {
            "sampler_kl": sum(math.exp(-d) - 1 + d for d in tokens) / per,
            "sampler_kl_k1": sum(tokens) / per,
            "sampler_max": max(map(abs, tokens)),
            "sampler_ess": sum(importance) ** 2 / (len(tokens) * sum(w * w for w in importance)),
        }
        for metric, value in expected.items():
            assert logged(trainer, f"klx/{metric}")[index] == pytest.approx(value, rel=1e-4, abs=1e-5), metric
        assert expected["sampler_kl"] > 1e-3 and expected["sampler_ess"] < 0.99
    # The sampler affects neither the KL to the reference nor the penalty.
    reference = build_model()
    for rollout, kl in zip(trainer.rollouts, logged(trainer, "klx/kl"), strict=True):
        expected = kl_of_tokens(rollout["policy"], reference, rollout, "k3")
        per = len(expected) if unit == "sequence" else rollout["completion_mask"].sum().item()
        assert kl == pytest.approx(sum(map(sum, expected)) / per, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("logging_steps", [1, 2])
def test_kl_to_the_sampler_is_exact_over_a_logging_window(logging_steps, tmp_path):
    extras = {"rollout_func": rollout_of_another_sampler, **LORA}
    settings = {"kl_monitor": True, "kl_target_unit": "token", "logging_steps": logging_steps, "max_steps": 4}
    trainer = build_trainer(TRAINERS["GRPO"], tmp_path, extras=extras, **settings)
    sample_elsewhere(trainer)
    trainer.train()
    found = logged(trainer, "klx/sampler_kl_k1")
    assert len(found) == 4 // logging_steps
    for index, value in enumerate(found):
        rollouts = trainer.rollouts[index * logging_steps : (index + 1) * logging_steps]
        total = count = 0.0
        for rollout in rollouts:
            with torch.no_grad():
                difference = rollout["sampling_per_token_logps"] - sampled_logps(rollout["policy"], rollout)
            counts = rollout["completion_mask"].bool() & ~difference.isnan()
            total, count = total + difference[counts].sum().item(), count + counts.sum().item()
        assert value == pytest.approx(total / count, rel=1e-4, abs=1e-5)


def test_without_another_sampler_nothing_is_said_of_it(tmp_path):
    trainer = run("GRPO", tmp_path, extras=LORA)
    assert not [key for entry in trainer.state.log_history for key in entry if key.startswith("klx/sampler")]


# ---- Sampling from another distribution than the policy's ----


CUT = [{"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.05}]
CUT += [{"generation_kwargs": fields} for fields in CUT]


def warnings_of(config_class, **fields) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        build(config_class, **fields)
    return [str(warning.message) for warning in caught if "cut unlikely tokens" in str(warning.message)]


@pytest.mark.parametrize("fields", CUT, ids=str)
@pytest.mark.parametrize("config_class", CONFIGS)
def test_truncated_sampling_warns_once(config_class, fields):
    for kl in ({"kl_penalty_coef": 0.1}, {"kl_penalty_coef": 0.0, "kl_monitor": True}):
        (message,) = warnings_of(config_class, **kl, **fields)
        ((name, value),) = fields.get("generation_kwargs", fields).items()
        assert f"`{name}={value!r}`" in message
        assert "the sampled KL is too low" in message and "`kl_statistic='full'`" in message
    (message,) = warnings_of(config_class, kl_target=4.0, **fields)
    assert "the sampled KL is too low" in message and "kl_statistic" not in message  # it is 'full' by default


@pytest.mark.parametrize("config_class", CONFIGS)
def test_truncated_sampling_names_every_option_in_one_warning(config_class):
    (message,) = warnings_of(config_class, kl_penalty_coef=0.1, top_p=0.9, generation_kwargs={"top_k": 20})
    assert "`top_p=0.9`" in message and "`top_k=20`" in message


@pytest.mark.parametrize("config_class", CONFIGS)
def test_plain_sampling_does_not_warn(config_class):
    assert warnings_of(config_class, kl_penalty_coef=0.1) == []
    plain = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "generation_kwargs": {"top_p": 1.0, "repetition_penalty": 1.1}}
    assert warnings_of(config_class, kl_penalty_coef=0.1, **plain) == []
    # Without KL control we leave TRL alone.
    assert warnings_of(config_class, kl_penalty_coef=0.0, top_p=0.9) == []


# ---- The term in the loss ----


class KeepsGradients:
    """Keeps the gradient of each optimizer step, summed over its micro-batches."""

    def __init__(self, *args, **kwargs):
        self.gradients: list[dict[str, torch.Tensor]] = []
        super().__init__(*args, **kwargs)

    def training_step(self, model, *args, **kwargs):
        loss = super().training_step(model, *args, **kwargs)
        if self.accelerator.sync_gradients:
            named = self.accelerator.unwrap_model(model).named_parameters()
            self.gradients.append({name: p.grad.clone() for name, p in named if p.grad is not None})
        return loss


LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")


class MovesThePolicy(TrainerCallback):
    """Moves an adapter before each step in the same way, so that all trainers follow the same path."""

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        generator = torch.Generator().manual_seed(state.global_step)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "lora_" in name and weight.requires_grad:
                    # First away from the reference, then slightly away from the rollout's policy.
                    scale = 0.2 if state.global_step == 0 else 0.02
                    weight.add_(scale * torch.randn(weight.shape, generator=generator))


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_term_in_the_loss_equals_that_of_trl(loss_type, accumulation, tmp_path):
    fields = {
        "loss_type": loss_type,
        "gradient_accumulation_steps": accumulation,
        "num_iterations": 2,
        "max_steps": 4,
        "max_grad_norm": 0.0,
        "learning_rate": 0.0,
    }

    def trained(trainer_class, **penalty):
        kept = type("Kept", (KeepsGradients, trainer_class), {})
        extras = {"rollout_func": scripted_rollout, "callbacks": [MovesThePolicy()], **LORA}
        return train(kept, tmp_path, extras=extras, **fields, **penalty)

    theirs = trained(GRPOTrainer, beta=0.2, use_bias_correction_kl=True)
    ours = trained(KLXGRPOTrainer, kl_penalty_coef=0.2, kl_placement="loss")
    without = trained(GRPOTrainer, beta=0.0)
    assert logged(ours, "loss") == pytest.approx(logged(theirs, "loss"), rel=1e-5, abs=1e-6)
    assert len(ours.gradients) == len(theirs.gradients) == 4
    for one, other, bare in zip(ours.gradients, theirs.gradients, without.gradients, strict=True):
        assert one.keys() == other.keys() == bare.keys() and one
        for name in one:
            assert (one[name] - other[name]).norm() < 3e-6 * other[name].norm(), name
        # On and off policy, the term is a substantial part of the gradient.
        assert max((one[name] - bare[name]).norm() / bare[name].norm() for name in one) > 1e-2
    updates = logged(ours, "klx/kl_update")
    assert max(updates[::2]) < 1e-6 and min(updates[1::2]) > 1e-4
    assert min(logged(ours, "klx/kl")) > 1e-1


VOCABULARY = 4096


def batch_of(trainer) -> dict:
    """The first inputs of the loss."""
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))


def build_with_exact_term(output_dir, adapter: str, **settings):
    """A policy away from its reference, with the exact KL in the loss and a much larger vocabulary."""
    fields = {"kl_penalty_coef": 0.7, "kl_placement": "loss", "kl_estimator": "full", **settings}
    model = build_model(vocab_size=VOCABULARY)
    if adapter == "lora":
        model = trained_lora(1, model=model)
    trainer = build_trainer(
        KLXGRPOTrainer, output_dir, model=model, extras={"rollout_func": scripted_rollout}, **fields
    )
    if adapter == "full":
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for weight in trainer.model.parameters():
                weight += 0.05 * torch.randn(weight.shape, generator=generator)
    return trainer


@pytest.mark.parametrize("adapter", ["lora", "full"])
def test_exact_term_keeps_no_tensor_of_the_whole_vocabulary(adapter, tmp_path):
    trainer = build_with_exact_term(tmp_path, adapter)
    batch = batch_of(trainer)
    owned = {weight.untyped_storage().data_ptr() for weight in trainer.model.parameters()}
    kept: list[tuple[int, ...]] = []

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in owned:
            kept.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = trainer._compute_loss(trainer.model, batch)
    # A `(B, T, V)` tensor of any shape would be larger than one token's whole vocabulary.
    largest = max(math.prod(shape) for shape in kept)
    assert largest < VOCABULARY, kept
    gc.collect()
    alive = [o for o in gc.get_objects() if isinstance(o, torch.Tensor) and VOCABULARY in o.shape]
    assert all(tensor.untyped_storage().data_ptr() in owned | stored(trainer) for tensor in alive)
    loss.backward()


def stored(trainer) -> set[int]:
    """Addresses of the reference's weights in memory."""
    with trainer.kl_reference.active() as model:
        return {weight.untyped_storage().data_ptr() for weight in model.parameters()}


@pytest.mark.parametrize("ignored", [None, ["eos"]], ids=["all", "without eos"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("adapter", ["lora", "full"])
def test_gradient_of_the_exact_term_is_that_of_a_dense_computation(adapter, temperature, ignored, tmp_path):
    trainer = build_with_exact_term(tmp_path, adapter, temperature=temperature, kl_ignore_tokens=ignored)
    batch, model = batch_of(trainer), trainer.model

    def gradients(loss):
        model.zero_grad()
        loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    ours = gradients(trainer._compute_loss(model, batch))
    with torch.no_grad():
        reference = log_distributions(build_model(vocab_size=VOCABULARY).eval(), batch, temperature)
    policy = log_distributions(model, batch, temperature)
    logps = policy.gather(2, batch["completion_ids"].unsqueeze(2)).squeeze(2)
    kl = (policy.exp() * (policy - reference)).sum(2)
    if ignored:
        kl = kl * (batch["completion_ids"] != 1)
    surrogate = torch.exp(logps - logps.detach()) * batch["advantages"].unsqueeze(1)
    mask = batch["completion_mask"]
    dense = gradients(((0.7 * kl - surrogate) * mask).sum() / mask.sum())
    assert ours.keys() == dense.keys() and max(grad.abs().max() for grad in ours.values()) > 1e-2
    for name in ours:
        torch.testing.assert_close(ours[name], dense[name], rtol=1e-4, atol=1e-5)
    plain = gradients(-(surrogate_again(model, batch, temperature) * mask).sum() / mask.sum())
    assert max((plain[name] - ours[name]).abs().max() for name in ours) > 1e-2


def surrogate_again(model, batch, temperature):
    logps = sampled_logps(model, batch, temperature)
    return torch.exp(logps - logps.detach()) * batch["advantages"].unsqueeze(1)
