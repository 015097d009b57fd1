"""GRPO with the penalty in the reward or in the loss, its metrics, and what it refuses."""

import functools
import inspect
import itertools
import statistics

import pytest
import torch
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from support.grpo_checks import ACCUMULATED, LORA, check_adaptive_trace, check_advantages, rollout_with_tools
from support.oracle import counting, kl_of_tokens, plain_model, sampled_logps
from support.tiny import (
    RUN,
    build_dataset,
    build_model,
    build_trainer,
    history,
    logged,
    recording,
    reward_even_tokens,
    scripted_rollout,
    train,
    trained_lora,
    weights,
)
from trl_klx import KLController, KLXGRPOConfig, KLXGRPOTrainer, register_kl_controller
from trl_klx.trainers import grpo


# ---- kl_placement="reward" ----


def reward_or_none(completion_ids, **kwargs):
    """No score for completions that start with an odd token."""
    rewards = reward_even_tokens(completion_ids)
    return [None if ids[0] % 2 else reward for ids, reward in zip(completion_ids, rewards, strict=True)]


def expected_reward_advantages(batch, reference, coef, reward_func, generations, scale, estimator="k1"):
    """
    TRL's baseline and scale by hand, for the reward minus the sequence's KL: the centered scores, 0 where there is no
    score, and the divisor that TRL uses.
    """
    kl = kl_of_tokens(batch["policy"], reference, batch, estimator)
    lengths = batch["completion_mask"].sum(1).tolist()
    tokens = [ids[:length] for ids, length in zip(batch["completion_ids"].tolist(), lengths, strict=True)]
    scores = [
        None if reward is None else reward - coef * sum(values)
        for reward, values in zip(reward_func(completion_ids=tokens), kl, strict=True)
    ]
    differences, divisors = [], []
    for start in range(0, len(scores), generations):
        group = scores[start : start + generations]
        scored = [score for score in group if score is not None]
        mean = statistics.fmean(scored) if scored else 0.0
        spread = statistics.stdev(scored) if len(scored) > 1 else 0.0
        differences += [0.0 if score is None else score - mean for score in group]
        divisors += [spread + 1e-4 if scale == "group" else 1.0] * generations
    return torch.tensor(differences), torch.tensor(divisors)


@pytest.mark.parametrize("reward_func", [reward_even_tokens, reward_or_none])
@pytest.mark.parametrize("scale", ["group", "none"])
@pytest.mark.parametrize("adapter", ["full", "lora"])
def test_reward_placement(adapter, scale, reward_func, tmp_path):
    trainer = train(
        recording(KLXGRPOTrainer),
        tmp_path,
        kl_penalty_coef=0.3,
        kl_placement="reward",
        scale_rewards=scale,
        num_generations=4,
        rewards=reward_func,
        extras=LORA if adapter == "lora" else {},
        **ACCUMULATED,
    )
    check_reward_advantages(trainer, reward_func, scale)
    if reward_func is reward_or_none:
        odd = torch.cat([batch["completion_ids"][:, 0] % 2 == 1 for batch in trainer.generated])
        advantages = torch.cat([batch["advantages"] for batch in trainer.generated])
        assert odd.any() and not odd.all()
        assert torch.equal(advantages[odd], torch.zeros(int(odd.sum())))


def check_reward_advantages(trainer, reward_func, scale, estimator="k1"):
    coefs = logged(trainer, "klx/coef")
    reference = build_model()
    effect = 0.0
    for rollout, batch in enumerate(trainer.generated):
        settings = (reward_func, trainer.num_generations, scale, estimator)
        expected, divisors = expected_reward_advantages(batch, reference, coefs[rollout], *settings)
        torch.testing.assert_close(batch["advantages"] * divisors, expected, atol=1e-5, rtol=0)
        without, _ = expected_reward_advantages(batch, reference, 0.0, *settings)
        effect = max(effect, (expected - without).abs().max().item())
        for loss in (loss for loss in trainer.losses if loss["rollout"] == rollout):
            assert torch.equal(loss["advantages"], batch["advantages"][loss["row"]])
    assert effect > 1e-2


@pytest.mark.parametrize(
    ("estimator", "fields"),
    [("importance", {}), ("k1", {"kl_statistic": "full"}), ("k1", {"loss_type": "vespo"})],
    ids=["importance", "full statistic", "vespo"],
)
def test_reward_placement_in_other_settings(estimator, fields, tmp_path):
    trainer = train(
        recording(KLXGRPOTrainer),
        tmp_path,
        kl_penalty_coef=0.3,
        kl_placement="reward",
        kl_estimator=estimator,
        scale_rewards="none",
        extras=LORA,
        **fields,
        **ACCUMULATED,
    )
    check_reward_advantages(trainer, reward_even_tokens, "none", estimator)


def test_reward_placement_leaves_tools_out(tmp_path):
    trainer = train(
        recording(KLXGRPOTrainer),
        tmp_path,
        kl_penalty_coef=0.3,
        kl_placement="reward",
        scale_rewards="none",
        extras={"rollout_func": rollout_with_tools, **LORA},
        **ACCUMULATED,
    )
    check_reward_advantages(trainer, reward_even_tokens, "none")


def test_reward_placement_with_several_reward_functions(tmp_path):
    def length(completion_ids, **kwargs):
        return [float(len(ids)) for ids in completion_ids]

    def both(completion_ids, **kwargs):
        return [
            2.0 * a + 0.5 * b for a, b in zip(reward_even_tokens(completion_ids), length(completion_ids), strict=True)
        ]

    trainer = train(
        recording(KLXGRPOTrainer),
        tmp_path,
        kl_penalty_coef=0.3,
        kl_placement="reward",
        scale_rewards="none",
        rewards=[reward_even_tokens, length],
        reward_weights=[2.0, 0.5],
        extras=LORA,
    )
    check_reward_advantages(trainer, both, "none")
    penalty, coef, k1 = (logged(trainer, name) for name in ("rewards/kl_penalty/mean", "klx/coef", "klx/kl_k1"))
    assert penalty == pytest.approx([-c * k for c, k in zip(coef, k1, strict=True)], rel=1e-4, abs=1e-6)


def test_reward_placement_leaves_the_users_lists_alone(tmp_path):
    rewards = [reward_even_tokens]
    fields = {"kl_penalty_coef": 0.3, "kl_placement": "reward", "scale_rewards": "none", "rewards": rewards}
    for seed in range(2):
        trainer = train(KLXGRPOTrainer, tmp_path, seed=seed, max_steps=1, reward_weights=[2.0], **fields)
        assert rewards == [reward_even_tokens] and len(trainer.reward_funcs) == 2


def test_reward_placement_with_a_coefficient_that_ends_at_zero(tmp_path):
    @register_kl_controller("test-ending")
    class Ending(KLController):
        multiplicative = False
        uses = frozenset()

        def _next(self, kl, n_steps):
            return 0.0

    fields = {"kl_penalty_coef": 0.3, "kl_placement": "reward", "scale_rewards": "none"}
    trainer = train(KLXGRPOTrainer, tmp_path, kl_controller="test-ending", learning_rate=1e-2, **fields)
    assert logged(trainer, "klx/coef") == [0.3, 0.0, 0.0]
    assert logged(trainer, "rewards/kl_penalty/mean")[1:] == [0.0, 0.0] and logged(trainer, "klx/kl")[-1] > 0


# ---- kl_placement="loss" ----


@pytest.mark.parametrize("batching", [{}, ACCUMULATED, {"num_iterations": 2}], ids=["one", "accumulated", "twice"])
@pytest.mark.parametrize("adapter", ["full", "lora"])
def test_loss_placement_equals_beta_of_trl(adapter, batching, tmp_path):
    build_model().save_pretrained(tmp_path / "model")  # TRL loads the reference of full fine-tuning from disk
    fields = {
        "model": str(tmp_path / "model"),
        "max_steps": 5,
        # Adam would turn the rounding of a gradient near zero into a whole step.
        "optim": "sgd",
        "learning_rate": 0.3 if adapter == "lora" else 0.1,
        "extras": LORA if adapter == "lora" else {},
        **batching,
    }
    # The default since TRL 1.10.
    theirs = train(GRPOTrainer, tmp_path, beta=0.2, use_bias_correction_kl=True, **fields)
    ours = train(KLXGRPOTrainer, tmp_path, kl_penalty_coef=0.2, kl_placement="loss", **fields)
    assert logged(ours, "loss") == pytest.approx(logged(theirs, "loss"), rel=0, abs=1e-6)
    # Also logged under TRL's name, once per rollout. Over several micro-batches TRL's value is a mean of means.
    assert logged(ours, "kl") == logged(ours, "klx/kl_per_token")
    if batching == {}:
        assert logged(ours, "kl") == pytest.approx(logged(theirs, "kl"), rel=1e-5, abs=1e-6)
    assert max(logged(ours, "kl")) > 1e-3
    for name, weight in weights(theirs).items():
        torch.testing.assert_close(weights(ours)[name], weight, atol=1e-5, rtol=0)


def test_loss_placement_applies_the_coefficient_of_the_controller(tmp_path):
    fields = {"kl_penalty_coef": 0.2, "kl_placement": "loss", "extras": LORA, "max_steps": 4}
    trainer = train(
        recording(KLXGRPOTrainer), tmp_path, kl_controller="exponential", kl_target=0.1, loss_type="grpo", **fields
    )
    coefs = logged(trainer, "klx/coef")
    assert coefs[0] == 0.2 and len(set(coefs)) == 4
    for loss, coef in zip(trainer.losses, coefs, strict=True):
        batch = trainer.generated[loss["rollout"]]
        kl = kl_of_tokens(batch["policy"], build_model(), batch, "k3")
        counts = counting(batch)
        # On policy, the surrogate of a sequence is its advantage, and `grpo` averages over tokens, then sequences.
        per_sequence = [coef * sum(values) / sum(row) for values, row in zip(kl, counts, strict=True)]
        own = -batch["advantages"].mean().item()
        assert loss["loss"].item() == pytest.approx(own, abs=1e-5)
        assert loss["total"].item() == pytest.approx(own + statistics.fmean(per_sequence), abs=1e-5)


class KeepsPolicies(recording(KLXGRPOTrainer)):
    """Keeps the policy of each loss."""

    def _compute_loss(self, model, inputs):
        policy = plain_model(self.accelerator.unwrap_model(self.model))
        total = super()._compute_loss(model, inputs)
        self.losses[-1]["policy"] = policy
        return total


@pytest.mark.parametrize("batching", [ACCUMULATED, {"num_iterations": 2}], ids=["accumulated", "twice"])
@pytest.mark.parametrize("estimator", ["k2", "k3", "full"])
def test_loss_placement_keeps_the_coefficient_of_the_batch(estimator, batching, tmp_path):
    trainer = train(
        KeepsPolicies,
        tmp_path,
        kl_penalty_coef=0.2,
        kl_placement="loss",
        kl_estimator=estimator,
        kl_controller="exponential",
        kl_target=0.1,
        max_steps=4,
        extras=LORA,
        **batching,
    )
    coefs = logged(trainer, "klx/coef")
    assert len(set(coefs)) == len(coefs) > 1
    largest = 0.0
    for loss in trainer.losses:
        coef, rollout = coefs[loss["rollout"]], trainer.generated[loss["rollout"]]
        kl = torch.tensor(kl_of_tokens(loss["policy"], build_model(), loss, estimator))
        with torch.no_grad():
            ratio = torch.exp(sampled_logps(loss["policy"], loss) - sampled_logps(rollout["policy"], loss))
        # By default TRL divides the sum over tokens by the number of tokens of one optimizer step, here the generation
        # batch. The exact KL is not sampled from the rollout's policy, so no ratio weighs it.
        weighted = (kl if estimator == "full" else ratio * kl) * loss["completion_mask"]
        expected = coef * weighted.sum().item() / rollout["completion_mask"].sum().item()
        assert (loss["total"] - loss["loss"]).item() == pytest.approx(expected, rel=1e-4, abs=1e-6)
        largest = max(largest, expected)
    assert largest > 1e-3


# ---- Metrics, controller, evaluation ----


@pytest.mark.parametrize("unit", ["sequence", "token"])
@pytest.mark.parametrize("centering", ["batch", "microbatch"])
def test_metrics_and_controller(centering, unit, tmp_path):
    trainer = train(
        recording(KLXGRPOTrainer),
        tmp_path,
        kl_penalty_coef=0.3,
        kl_centering=centering,
        kl_target=0.05,
        kl_target_unit=unit,
        kl_horizon=100,
        max_steps=4,
        **ACCUMULATED,
    )
    check_adaptive_trace(trainer, completions=8)
    for rollout, batch in enumerate(trainer.generated):
        counts = counting(batch)
        tokens = sum(map(sum, counts))
        k1, k3 = (sum(map(sum, kl_of_tokens(batch["policy"], build_model(), batch, name))) for name in ("k1", "k3"))
        per = len(counts) if unit == "sequence" else tokens
        adjustments = [
            loss["advantages"] - batch["advantages"][loss["row"]].unsqueeze(1)
            for loss in trainer.losses
            if loss["rollout"] == rollout
        ]
        expected = {
            "kl": k3 / per,
            "kl_k1": k1 / per,
            "kl_per_token": k3 / tokens,
            "target": 0.05,
            "error": k3 / per / 0.05 - 1,
            "saturated": 0.0,
            "adjustment_abs_mean": sum(part.abs().sum().item() for part in adjustments) / tokens,
        }
        for name, value in expected.items():
            assert logged(trainer, f"klx/{name}")[rollout] == pytest.approx(value, rel=1e-4, abs=1e-5), name


def test_saturation_is_logged(tmp_path):
    trainer = train(
        KLXGRPOTrainer,
        tmp_path,
        kl_penalty_coef=0.3,
        kl_controller="exponential",
        kl_controller_kwargs={"rate": 10.0},
        kl_target=10.0,
        kl_coef_min=0.2,
        max_steps=4,
    )
    assert logged(trainer, "klx/coef") == [0.3, 0.2, 0.2, 0.2]
    assert logged(trainer, "klx/saturated") == [0.0, 1.0, 1.0, 1.0]


def test_drift_warns_once_per_crossing(tmp_path, caplog):
    trainer = train(
        KLXGRPOTrainer,
        tmp_path,
        kl_penalty_coef=0.1,
        kl_controller="fixed",
        kl_target=1e-6,
        kl_warn_window=2,
        max_steps=5,
        extras=LORA,
    )
    assert min(logged(trainer, "klx/kl")[1:]) > 1e-5
    (record,) = [record for record in caplog.records if "The mean KL per sequence" in record.getMessage()]
    assert record.levelname == "WARNING" and "more than twice the target of 1e-06" in record.getMessage()


def test_monitor_with_a_target(tmp_path, caplog):
    trainer = train(KLXGRPOTrainer, tmp_path, kl_monitor=True, kl_target=1e-6, kl_warn_window=2, extras=LORA)
    kl = logged(trainer, "klx/kl")
    assert logged(trainer, "klx/error") == pytest.approx([value / 1e-6 - 1 for value in kl])
    assert logged(trainer, "klx/coef") == [0.0, 0.0, 0.0]
    assert logged(trainer, "klx/saturated") == logged(trainer, "klx/adjustment_abs_mean") == []
    assert sum("The mean KL per sequence" in record.getMessage() for record in caplog.records) == 1


def test_public_attributes(tmp_path):
    trainer = build_trainer(KLXGRPOTrainer, tmp_path, kl_penalty_coef=0.3, kl_controller="pid", kl_target=0.5)
    assert trainer.kl_controller.value == 0.3 and trainer.kl_controller.target == 0.5
    assert trainer.kl_reference.identity["kind"] == "step"
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad(), trainer.kl_reference.active() as reference:
        before = reference(input_ids=ids).logits
    trainer.train()
    with torch.no_grad(), trainer.kl_reference.active() as reference:
        assert torch.equal(reference(input_ids=ids).logits, before)
        torch.testing.assert_close(before, build_model()(input_ids=ids).logits)


def keep_generator_state(trainer):
    """Restore the random state after an evaluation."""

    class Restore(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            self.state = torch.get_rng_state()

        def on_evaluate(self, *args, **kwargs):
            torch.set_rng_state(self.state)

    trainer.add_callback(Restore())


@pytest.mark.parametrize(
    "fields",
    [
        {"kl_centering": "batch"},
        {"kl_centering": "microbatch"},
        {"kl_placement": "reward"},
        {"kl_placement": "loss"},
        None,
    ],
    ids=["batch", "microbatch", "reward", "loss", "trl"],
)
def test_evaluation_does_not_touch_training(fields, tmp_path):
    # Evaluation comes in the middle of each generation batch, which lasts for two optimizer steps.
    trainer_class = GRPOTrainer if fields is None else recording(KLXGRPOTrainer)
    control = {"kl_penalty_coef": 0.3, "kl_target": 0.05, "kl_horizon": 100}
    fields = {} if fields is None else control | fields
    fields |= {"steps_per_generation": 2, "max_steps": 6, "per_device_eval_batch_size": 4, "num_generations_eval": 2}
    runs = []
    for extras in ({}, {"eval_strategy": "steps", "eval_steps": 1}):
        trainer = build_trainer(
            trainer_class,
            tmp_path,
            extras={"rollout_func": scripted_rollout, "eval_dataset": build_dataset(6), **LORA},
            **fields,
            **extras,
        )
        keep_generator_state(trainer)
        trainer.train()
        runs.append(trainer)
    without, with_it = runs
    trained = [entry for entry in history(with_it) if not any(key.startswith("eval_") for key in entry)]
    assert trained == history(without)
    for name, weight in weights(without).items():
        assert torch.equal(weights(with_it)[name], weight)
    if trainer_class is not GRPOTrainer:
        check_adaptive_trace(with_it, completions=8)
        evaluated = logged(with_it, "eval_klx/kl")
        assert len(evaluated) == 6
        # The first evaluation follows the first step, so the policy has left the reference.
        assert all(value > 1e-5 for value in evaluated)


def test_evaluation_metrics(tmp_path):
    trainer = build_trainer(
        recording(KLXGRPOTrainer),
        tmp_path,
        model=trained_lora(1),
        kl_penalty_coef=0.3,
        kl_target=0.05,
        per_device_eval_batch_size=4,
        num_generations_eval=2,
        extras={"rollout_func": scripted_rollout, "eval_dataset": build_dataset(2)},
    )
    metrics = trainer.evaluate()
    (batch,) = trainer.generated
    assert batch["mode"] == "eval"
    kl = kl_of_tokens(batch["policy"], build_model(), batch, "full")
    assert metrics["eval_klx/kl"] == pytest.approx(sum(map(sum, kl)) / len(kl), rel=1e-4)
    assert metrics["eval_klx/coef"] == 0.3 and trainer.kl_controller.value == 0.3
    check_advantages(trainer, build_model(), coefs=[0.3])


# ---- Refusals and extension ----


def test_plain_config_is_refused(tmp_path):
    with pytest.raises(TypeError, match="`args` of KLXGRPOTrainer must be a `KLXGRPOConfig`.*got `GRPOConfig`"):
        KLXGRPOTrainer(build_model(), reward_even_tokens, GRPOConfig(output_dir=str(tmp_path), **RUN))


def test_config_may_be_left_out(tmp_path, monkeypatch, tokenizer):
    monkeypatch.chdir(tmp_path)
    # TRL's default precision does not run on CPU.
    monkeypatch.setattr(grpo, "KLXGRPOConfig", functools.partial(KLXGRPOConfig, use_cpu=True, bf16=False))
    model = build_model()
    model.config._name_or_path = "someone/tiny"
    trainer = KLXGRPOTrainer(model, reward_even_tokens, train_dataset=build_dataset(), processing_class=tokenizer)
    assert isinstance(trainer.args, KLXGRPOConfig) and trainer.args.output_dir == "tiny-GRPO"
    assert trainer.kl_reference is None


def test_a_users_own_controller(tmp_path):
    @register_kl_controller("test-doubling")
    class Doubling(KLController):
        def _next(self, kl, n_steps):
            return 2.0 * self.value

    trainer = train(KLXGRPOTrainer, tmp_path, kl_penalty_coef=0.1, kl_controller="test-doubling", max_steps=4)
    assert logged(trainer, "klx/coef") == pytest.approx([0.1, 0.2, 0.4, 0.8])


def test_a_controller_from_an_entry_point(tmp_path, monkeypatch):
    (tmp_path / "halving_controller.py").write_text(
        "from trl_klx import KLController\n\n\n"
        "class Halving(KLController):\n"
        "    def _next(self, kl, n_steps):\n"
        "        return 0.5 * self.value\n"
    )
    metadata = tmp_path / "halving_controller-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: halving-controller\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[trl_klx.kl_controllers]\ntest-halving = halving_controller:Halving\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    trainer = train(KLXGRPOTrainer, tmp_path / "run", kl_penalty_coef=0.8, kl_controller="test-halving", max_steps=4)
    assert logged(trainer, "klx/coef") == pytest.approx([0.8, 0.4, 0.2, 0.1])


def test_forward_arguments_carry_every_multimodal_key(tmp_path):
    trainer = build_trainer(KLXGRPOTrainer, tmp_path, kl_penalty_coef=0.3)
    # All arguments that TRL's log-prob method may get besides the tokens.
    names = ("_full_logits_logps", "_get_per_token_logps_and_entropies")
    method = next(getattr(GRPOTrainer, name) for name in names if hasattr(GRPOTrainer, name))
    own = {"self", "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size"}
    own |= {"compute_entropy", "compute_aux_loss"}
    multimodal = inspect.signature(method).parameters.keys() - own
    assert "pixel_values" in multimodal and "image_grid_thw" in multimodal
    tokens = {name: torch.ones(2, 3, dtype=torch.long) for name in ("prompt_ids", "prompt_mask")}
    tokens |= {name: torch.ones(2, 4, dtype=torch.long) for name in ("completion_ids", "completion_mask")}
    extra = dict(zip(sorted(multimodal), itertools.count()))
    args, kwargs = trainer._klx_forward_arguments(tokens | extra | {"advantages": torch.zeros(2), "row": 0})
    assert kwargs == extra | {"batch_size": 4}
    assert args[0].shape == args[1].shape == (2, 7) and args[2] == 4
