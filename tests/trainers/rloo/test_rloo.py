"""KLXRLOOTrainer: the effect of its penalty on real batches of TRL's trainer, in every placement and setting."""

import functools
import math

import pytest
import torch
from trl import RLOOConfig, RLOOTrainer

from support.oracle import (
    centered,
    centering_sets,
    counting,
    discounted,
    kl_of_tokens,
    log_distributions,
    plain_model,
    sampled_logps,
)
from support.tiny import (
    RUN,
    build_dataset,
    build_model,
    build_trainer,
    logged,
    lora,
    recording,
    reward_even_tokens,
    train,
    trained_lora,
    weights,
)
from trl_klx import KLXRLOOConfig, KLXRLOOTrainer
from trl_klx.maths.losses import clipped_surrogate
from trl_klx.trainers import rloo


# Estimators that can be penalised through rewards and advantages.
ESTIMATORS = ("k1", "importance")
CENTERINGS = ("batch", "microbatch", "group", "sequence", "none")
LORA = {"peft_config": lora()}
ACCUMULATED = {"gradient_accumulation_steps": 2}


def expected_adjustment(trainer, loss, reference, estimator="k1", discount=0.0) -> torch.Tensor:
    """The expected adjustment of each token in a micro-batch, in addition to its sequence's advantage."""
    batch, rows = trainer.generated[loss["rollout"]], loss["row"].tolist()
    counts = counting(batch)
    kl = kl_of_tokens(batch["policy"], reference, batch, estimator, trainer.args.temperature)
    sets = centering_sets(trainer.args.kl_centering, len(kl), trainer.num_generations, rows)
    coef = logged(trainer, "klx/coef")[loss["rollout"]]
    return centered(discounted(kl, counts, discount), counts, coef, sets)[rows]


def check_adjustments(trainer, estimator="k1", discount=0.0) -> None:
    reference, largest = build_model(), 0.0
    for loss in trainer.losses:
        expected = expected_adjustment(trainer, loss, reference, estimator, discount)
        torch.testing.assert_close(loss["klx_adjustment"], expected, atol=1e-5, rtol=0)
        # TRL's loss takes only one advantage per sequence.
        batch = trainer.generated[loss["rollout"]]
        assert torch.equal(loss["advantages"], batch["advantages"][loss["row"]])
        largest = max(largest, expected.abs().max().item())
    assert largest > 1e-3, "the policy never left the reference, so nothing was checked"


# ---- kl_placement="advantage" ----


@pytest.mark.parametrize("batching", [{}, ACCUMULATED], ids=["one", "accumulated"])
@pytest.mark.parametrize("centering", CENTERINGS)
def test_tokens_get_the_centered_adjustment(centering, batching, tmp_path):
    trainer = train(
        recording(KLXRLOOTrainer), tmp_path, kl_penalty_coef=0.3, kl_centering=centering, extras=LORA, **batching
    )
    check_adjustments(trainer)
    for loss in trainer.losses:
        # On policy every ratio is 1, so the added term is the mean over sequences of the summed adjustments.
        added = -expected_adjustment(trainer, loss, build_model()).sum(1).mean()
        assert (loss["total"] - loss["loss"]).item() == pytest.approx(added.item(), abs=1e-5)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_every_estimator(estimator, tmp_path):
    trainer = train(
        recording(KLXRLOOTrainer),
        tmp_path,
        kl_penalty_coef=0.3,
        kl_estimator=estimator,
        kl_discount=0.5,
        temperature=0.7,
        learning_rate=4e-3,
        extras=LORA,
        **ACCUMULATED,
    )
    check_adjustments(trainer, estimator, discount=0.5)
    for entry in trainer.state.log_history[:-1]:
        assert all(math.isfinite(value) for key, value in entry.items() if key.startswith("klx/"))


def test_full_fine_tuning(tmp_path):
    trainer = train(recording(KLXRLOOTrainer), tmp_path, kl_penalty_coef=0.1, learning_rate=2e-3, **ACCUMULATED)
    check_adjustments(trainer)


@pytest.mark.parametrize("centering", CENTERINGS)
def test_reused_batches(centering, tmp_path):
    trainer = train(
        recording(KLXRLOOTrainer),
        tmp_path,
        kl_penalty_coef=0.3,
        kl_centering=centering,
        steps_per_generation=2,
        num_iterations=2,
        max_steps=8,
        extras=LORA,
    )
    assert [loss["rollout"] for loss in trainer.losses] == [0] * 4 + [1] * 4
    check_adjustments(trainer)
    assert len(logged(trainer, "klx/kl")) == 2


def test_as_many_tokens_as_completions(tmp_path):
    # With (B, T) advantages and T == B, TRL's RLOO loss would pair every token with another sequence.
    trainer = train(
        recording(KLXRLOOTrainer),
        tmp_path,
        kl_penalty_coef=0.3,
        max_completion_length=4,
        generation_kwargs={"min_new_tokens": 4},
        extras=LORA,
    )
    assert all(loss["completion_ids"].shape == (4, 4) for loss in trainer.losses)
    check_adjustments(trainer)


@pytest.mark.parametrize(
    "fields", [{"mask_truncated_completions": True}, {"iterable": True}], ids=["truncated", "iterable"]
)
def test_other_settings_of_trl(fields, tmp_path):
    dataset = build_dataset()
    if fields.pop("iterable", False):
        dataset = dataset.to_iterable_dataset()
    trainer = train(
        recording(KLXRLOOTrainer),
        tmp_path,
        kl_penalty_coef=0.3,
        dataset=dataset,
        num_generations=4,
        max_completion_length=10,
        extras=LORA,
        **fields,
        **ACCUMULATED,
    )
    check_adjustments(trainer)
    if fields:
        masked = torch.cat([batch["completion_mask"].sum(1) == 0 for batch in trainer.generated])
        assert masked.any() and not masked.all()


def move(model, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.05 * torch.randn(weight.shape, generator=generator)


def first_batch(trainer) -> dict:
    """The first inputs of the loss, for a policy that has already left its reference."""
    move(trainer.model, seed=3)
    trainer.model.train()
    return trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))


def gradients(model, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters()}


def assert_same_gradients(one, other):
    assert max(grad.abs().max() for grad in one.values()) > 1e-2
    for name, grad in one.items():
        torch.testing.assert_close(grad, other[name], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("centering", CENTERINGS)
def test_gradient_is_that_of_per_token_advantages(centering, tmp_path):
    trainer = build_trainer(
        recording(KLXRLOOTrainer), tmp_path, kl_penalty_coef=0.5, kl_centering=centering, kl_discount=0.5
    )
    batch = first_batch(trainer)
    ours = gradients(trainer.model, trainer._compute_loss(trainer.model, batch))

    adjustment = expected_adjustment_of_first(trainer, batch)
    policy = plain_model(trainer.model)
    logps = sampled_logps(policy, batch)
    per_token = (batch["advantages"].unsqueeze(1) + adjustment) * logps * batch["completion_mask"]
    assert_same_gradients(ours, gradients(policy, -per_token.sum(1).mean()))
    # The adjustment is a substantial part of it.
    per_sequence = batch["advantages"] * (sampled_logps(policy, batch) * batch["completion_mask"]).sum(1)
    with pytest.raises(AssertionError):
        assert_same_gradients(ours, gradients(policy, -per_sequence.mean()))


def expected_adjustment_of_first(trainer, batch):
    counts = counting(batch)
    kl = discounted(kl_of_tokens(plain_model(trainer.model), build_model(), batch), counts, trainer.args.kl_discount)
    everything = list(range(len(kl)))
    # The rows were shuffled, so groups are found by their prompts.
    sets = {
        "none": None,
        "sequence": [[row] for row in everything],
        "batch": [everything],
        "microbatch": [everything],
        "group": [
            [row for row in everything if torch.equal(batch["prompt_ids"][row], prompt)]
            for prompt in batch["prompt_ids"].unique(dim=0)
        ],
    }[trainer.args.kl_centering]
    return centered(kl, counts, trainer.args.kl_penalty_coef, sets)


def test_surrogate_numbers():
    # Ratios 1, 2 and 0.5; clipped to [0.8, 1.2].
    old = torch.tensor([[-1.0, -1.0, -1.0]])
    logps = (old + torch.tensor([[1.0, 2.0, 0.5]]).log()).requires_grad_()
    for advantage, values, slopes in (
        (2.0, [2.0, 2.4, 1.0], [2.0, 0.0, 1.0]),  # 1 * 2, min(4, 1.2 * 2), min(0.5 * 2, 0.8 * 2)
        (-2.0, [-2.0, -4.0, -1.6], [-2.0, -4.0, 0.0]),  # 1 * -2, min(-4, 1.2 * -2), min(0.5 * -2, 0.8 * -2)
    ):
        surrogate = clipped_surrogate(logps, old, torch.full_like(old, advantage), 0.2, 0.2)
        torch.testing.assert_close(surrogate, torch.tensor([values]))
        (grad,) = torch.autograd.grad(surrogate.sum(), logps)
        torch.testing.assert_close(grad, torch.tensor([slopes]))


def test_surrogate_passes_gradients_to_the_policy_alone():
    tensors = [torch.randn(2, 3, requires_grad=True) for _ in range(3)]
    clipped_surrogate(*tensors, 0.2, 0.2).sum().backward()
    assert tensors[0].grad is not None and tensors[1].grad is None and tensors[2].grad is None


def test_surrogate_refuses_to_broadcast():
    with pytest.raises(ValueError, match=r"`advantages` \(2,\) must have the same shape"):
        clipped_surrogate(torch.zeros(2, 2), torch.zeros(2, 2), torch.zeros(2), 0.2, 0.2)


# ---- kl_placement="reward" ----


@pytest.mark.parametrize("batching", [{}, ACCUMULATED, {"num_iterations": 2}], ids=["one", "accumulated", "twice"])
@pytest.mark.parametrize("adapter", ["full", "lora"])
def test_reward_placement_equals_beta_of_trl(adapter, batching, tmp_path):
    build_model().save_pretrained(tmp_path / "model")  # TRL loads the reference of full fine-tuning from disk
    fields = {"model": str(tmp_path / "model"), "max_steps": 5, "learning_rate": 2e-3, **batching}
    fields["extras"] = LORA if adapter == "lora" else {}
    theirs = train(RLOOTrainer, tmp_path, beta=0.2, **fields)
    ours = train(KLXRLOOTrainer, tmp_path, kl_penalty_coef=0.2, kl_placement="reward", **fields)
    assert logged(ours, "loss") == pytest.approx(logged(theirs, "loss"), rel=0, abs=1e-6)
    assert logged(ours, "kl") == pytest.approx(logged(theirs, "kl"), rel=1e-5, abs=1e-6)
    assert max(logged(ours, "kl")) > 1e-4
    for name, weight in weights(theirs).items():
        torch.testing.assert_close(weights(ours)[name], weight, atol=1e-5, rtol=0)


def reward_or_none(completion_ids, **kwargs):
    """No score for completions that start with an odd token."""
    rewards = reward_even_tokens(completion_ids)
    return [None if ids[0] % 2 else reward for ids, reward in zip(completion_ids, rewards, strict=True)]


@pytest.mark.parametrize("reward_func", [reward_even_tokens, reward_or_none])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_reward_placement(estimator, reward_func, tmp_path):
    trainer = train(
        recording(KLXRLOOTrainer),
        tmp_path,
        kl_penalty_coef=0.3,
        kl_placement="reward",
        kl_estimator=estimator,
        num_generations=4,
        normalize_advantages=False,
        rewards=reward_func,
        extras=LORA,
        **ACCUMULATED,
    )
    effect = 0.0
    for batch in trainer.generated:
        lengths = batch["completion_mask"].sum(1).tolist()
        tokens = [ids[:n] for ids, n in zip(batch["completion_ids"].tolist(), lengths, strict=True)]
        penalties = [0.3 * sum(values) for values in kl_of_tokens(batch["policy"], build_model(), batch, estimator)]
        scores = [
            None if reward is None else reward - penalty
            for reward, penalty in zip(reward_func(completion_ids=tokens), penalties, strict=True)
        ]
        expected = []
        for start in range(0, len(scores), 4):
            group = scores[start : start + 4]
            for index, score in enumerate(group):
                others = [other for place, other in enumerate(group) if place != index and other is not None]
                known = score is not None and others
                expected.append(score - sum(others) / len(others) if known else 0.0)
        torch.testing.assert_close(batch["advantages"], torch.tensor(expected), atol=1e-5, rtol=1e-5)
        effect = max(effect, *penalties)
    assert effect > 1e-3


# ---- kl_placement="loss" ----


@pytest.mark.parametrize("batching", [{}, ACCUMULATED], ids=["one", "accumulated"])
@pytest.mark.parametrize("estimator", ["k2", "k3", "full"])
def test_loss_placement(estimator, batching, tmp_path):
    trainer = train(
        recording(KLXRLOOTrainer),
        tmp_path,
        kl_penalty_coef=0.3,
        kl_placement="loss",
        kl_estimator=estimator,
        kl_controller="exponential",
        kl_target=0.05,
        extras=LORA,
        **batching,
    )
    coefs = logged(trainer, "klx/coef")
    assert coefs[0] == 0.3 and len(set(coefs)) == 3
    for loss in trainer.losses:
        batch = trainer.generated[loss["rollout"]]
        # On policy every ratio is 1.
        kl = kl_of_tokens(batch["policy"], build_model(), batch, estimator)
        rows = loss["row"].tolist()
        added = coefs[loss["rollout"]] * sum(sum(kl[row]) for row in rows) / len(rows)
        assert (loss["total"] - loss["loss"]).item() == pytest.approx(added, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("moved", [False, True], ids=["on policy", "off policy"])
@pytest.mark.parametrize("estimator", ["k2", "k3", "full"])
def test_loss_placement_gradient(estimator, moved, tmp_path):
    # A ratio beyond the clipping range would remove its sequence from TRL's own loss.
    trainer = build_trainer(
        recording(KLXRLOOTrainer),
        tmp_path,
        kl_penalty_coef=0.5,
        kl_placement="loss",
        kl_estimator=estimator,
        epsilon=1e6,
    )
    batch = first_batch(trainer)
    with torch.no_grad():
        old = sampled_logps(plain_model(trainer.model), batch)
        reference = log_distributions(build_model().eval(), batch)
    if moved:
        move(trainer.model, seed=5)
    ours = gradients(trainer.model, trainer._compute_loss(trainer.model, batch))
    policy = plain_model(trainer.model)
    mask = batch["completion_mask"]
    distributions = log_distributions(policy, batch)
    logps, ref_logps = (
        table.gather(2, batch["completion_ids"].unsqueeze(2)).squeeze(2) for table in (distributions, reference)
    )
    ratio, drift = torch.exp(logps - old), logps - ref_logps
    terms = {
        "k2": ratio.detach() * drift**2 / 2,
        "k3": ratio * (torch.exp(-drift) - 1 + drift),
        "full": (distributions.exp() * (distributions - reference)).sum(2),
    }
    sequence_ratio = torch.exp(((logps - old) * mask).sum(1))
    loss = -(batch["advantages"] * sequence_ratio).mean() + 0.5 * (terms[estimator] * mask).sum(1).mean()
    assert_same_gradients(ours, gradients(policy, loss))


# ---- Common ----


@pytest.mark.parametrize("placement", ["advantage", "reward", "loss"])
def test_accumulation_gives_the_gradient_of_the_whole(placement, tmp_path):
    runs = [
        train(
            KLXRLOOTrainer,
            tmp_path,
            model=trained_lora(1),
            kl_penalty_coef=0.3,
            kl_placement=placement,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=8 // size,
            max_steps=2,
            learning_rate=1e-3,
        )
        for size in (8, 4, 2)
    ]
    plain = train(RLOOTrainer, tmp_path, model=trained_lora(1), beta=0.0, per_device_train_batch_size=8, max_steps=2)
    for run in runs[1:]:
        for name in ("grad_norm", "klx/kl", "klx/kl_k1"):
            assert logged(run, name) == pytest.approx(logged(runs[0], name), rel=1e-4)
    assert logged(runs[0], "grad_norm")[0] != pytest.approx(logged(plain, "grad_norm")[0], rel=1e-2)


def test_beta_gives_way_to_the_penalty(tmp_path):
    trainer = train(KLXRLOOTrainer, tmp_path, kl_penalty_coef=0.3, extras=LORA)
    assert trainer.args.beta == 0.0 and trainer.beta == 0.0
    assert "kl" not in trainer.state.log_history[0]
    assert build_trainer(KLXRLOOTrainer, tmp_path, extras=LORA).args.beta == RLOOConfig(**RUN).beta == 0.05


def test_controller_follows_the_statistic(tmp_path):
    trainer = train(
        KLXRLOOTrainer,
        tmp_path,
        kl_penalty_coef=0.3,
        kl_target=0.01,
        kl_target_unit="token",
        kl_horizon=50,
        max_steps=5,
        extras=LORA,
        **ACCUMULATED,
    )
    coefs, kls = logged(trainer, "klx/coef"), logged(trainer, "klx/kl")
    assert coefs[0] == 0.3
    for now, after, kl in zip(coefs, [*coefs[1:], trainer.kl_controller.value], kls, strict=True):
        assert after == pytest.approx(now * (1 + min(max(kl / 0.01 - 1, -0.2), 0.2) * 8 / 50), rel=1e-9)


@pytest.mark.parametrize("placement", ["advantage", "reward", "loss"])
def test_evaluation(placement, tmp_path):
    trainer = build_trainer(
        recording(KLXRLOOTrainer),
        tmp_path,
        model=trained_lora(1),
        kl_penalty_coef=0.3,
        kl_placement=placement,
        kl_target=0.05,
        per_device_eval_batch_size=4,
        num_generations_eval=2,
        extras={"eval_dataset": build_dataset(2)},
    )
    metrics = trainer.evaluate()
    (batch,) = trainer.generated
    kl = kl_of_tokens(batch["policy"], build_model(), batch, "full")
    assert metrics["eval_klx/kl"] == pytest.approx(sum(map(sum, kl)) / len(kl), rel=1e-4)
    assert metrics["eval_klx/coef"] == 0.3 and trainer.kl_controller.value == 0.3


def test_plain_config_is_refused(tmp_path):
    with pytest.raises(TypeError, match="`args` of KLXRLOOTrainer must be a `KLXRLOOConfig`.*got `RLOOConfig`"):
        KLXRLOOTrainer(build_model(), reward_even_tokens, RLOOConfig(output_dir=str(tmp_path), **RUN))


def test_config_may_be_left_out(tmp_path, monkeypatch, tokenizer):
    monkeypatch.chdir(tmp_path)
    # TRL's default precision does not run on CPU, and its default penalty loads the reference from a path.
    defaults = {"use_cpu": True, "bf16": False, "beta": 0.0}
    monkeypatch.setattr(rloo, "KLXRLOOConfig", functools.partial(KLXRLOOConfig, **defaults))
    model = build_model()
    model.config._name_or_path = "someone/tiny"
    trainer = KLXRLOOTrainer(model, reward_even_tokens, train_dataset=build_dataset(), processing_class=tokenizer)
    assert isinstance(trainer.args, KLXRLOOConfig) and trainer.args.output_dir == "tiny-RLOO"
