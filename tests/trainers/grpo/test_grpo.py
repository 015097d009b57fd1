"""KLXGRPOTrainer: the effect of its penalty on real batches of TRL's trainer, with every setting."""

import math

import pytest
import torch
from trl import GRPOTrainer

from support.grpo_checks import (
    ACCUMULATED,
    ESTIMATORS,
    LORA,
    check_adaptive_trace,
    check_advantages,
    check_statistic,
    rollout_with_tools,
)
from support.oracle import centering_sets, kl_of_tokens, plain_model, sampled_logps
from support.tiny import (
    assert_same_weights,
    build_dataset,
    build_model,
    build_trainer,
    history,
    logged,
    lora,
    recording,
    scaled_logits,
    scripted_rollout,
    train,
    trained_lora,
    weights,
)
from trl_klx import KLXGRPOTrainer


CENTERINGS = ("batch", "microbatch", "group", "sequence", "none")
# All of TRL's except "vespo", which is refused in the advantage.
LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo")


# ---- kl_placement="advantage" ----


@pytest.mark.parametrize("batching", [{}, ACCUMULATED], ids=["one", "accumulated"])
@pytest.mark.parametrize("centering", CENTERINGS)
@pytest.mark.parametrize("adapter", ["full", "lora"])
def test_advantages_get_the_centered_adjustment(adapter, centering, batching, tmp_path):
    # Groups of four where a group is a whole micro-batch, and of two otherwise.
    generations = 4 if adapter == "full" and batching else 2
    trainer = train(
        recording(KLXGRPOTrainer),
        tmp_path,
        kl_penalty_coef=0.3,
        kl_centering=centering,
        num_generations=generations,
        extras=LORA if adapter == "lora" else {},
        **batching,
    )
    check_advantages(trainer, build_model())
    if centering != "none":
        check_zero_sums(trainer, centering, generations)


def check_zero_sums(trainer, centering: str, generations: int) -> None:
    """The adjustment sums to zero over its set, and there is none outside the mask."""
    for rollout, batch in enumerate(trainer.generated):
        adjustment = torch.zeros(batch["completion_ids"].shape)
        micro_batches = [loss for loss in trainer.losses if loss["rollout"] == rollout]
        for loss in micro_batches:
            own = loss["advantages"] - batch["advantages"][loss["row"]].unsqueeze(1)
            assert torch.equal(own * (1 - loss["completion_mask"]), torch.zeros_like(own))
            adjustment[loss["row"]] = own
        for loss in micro_batches:
            for rows in centering_sets(centering, len(adjustment), generations, loss["row"].tolist()):
                assert adjustment[rows].sum().item() == pytest.approx(0.0, abs=1e-5)
    assert adjustment.abs().max() > 1e-2


@pytest.mark.parametrize("placement", ["advantage", "reward", "loss"])
def test_recording_a_run_does_not_change_it(placement, tmp_path):
    # What is checked on recorded runs also holds for the trainer that users have.
    fields = {
        "kl_penalty_coef": 0.3,
        "kl_placement": placement,
        "scale_rewards": "none",
        "extras": LORA,
        **ACCUMULATED,
    }
    plain, recorded = (train(each, tmp_path, **fields) for each in (KLXGRPOTrainer, recording(KLXGRPOTrainer)))
    assert history(recorded) == history(plain)
    assert_same_weights(weights(plain), weights(recorded))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_advantages_with_every_estimator(estimator, tmp_path):
    trainer = train(
        recording(KLXGRPOTrainer),
        tmp_path,
        # `importance` multiplies the rounding of a log-prob; a small coefficient keeps it below 1e-5.
        kl_penalty_coef=0.05,
        kl_estimator=estimator,
        temperature=0.7,
        extras=LORA,
        **ACCUMULATED,
    )
    check_advantages(trainer, build_model(), estimator)
    for entry in trainer.state.log_history[:-1]:
        assert all(math.isfinite(value) for key, value in entry.items() if key.startswith("klx/"))


@pytest.mark.parametrize("fields", [{}, {"kl_penalty_reference_step": 0}], ids=["base", "step"])
@pytest.mark.parametrize("batching", [{}, ACCUMULATED], ids=["one", "accumulated"])
def test_exact_kl_when_the_lm_head_is_trained_too(batching, fields, tmp_path):
    # Policy and reference then project their hidden states through separate heads.
    trainer = train(
        recording(KLXGRPOTrainer),
        tmp_path,
        kl_penalty_coef=0.3,
        kl_statistic="full",
        learning_rate=4e-3,
        extras={"peft_config": lora(modules_to_save=["lm_head"])},
        **batching,
        **fields,
    )
    check_advantages(trainer, build_model())
    check_statistic(trainer, trainer.generated, "full")


def test_exact_kl_refuses_an_adapter_on_the_lm_head(tmp_path):
    # Newer versions of TRL refuse it altogether.
    with pytest.raises(ValueError, match="adapter (on the LM head|to `lm_head`)"):
        build_trainer(
            KLXGRPOTrainer,
            tmp_path,
            kl_penalty_coef=0.3,
            kl_statistic="full",
            extras={"peft_config": lora(target_modules=["q_proj", "lm_head"])},
        )


def test_exact_kl_refuses_logits_that_it_cannot_rebuild(tmp_path):
    # Cohere scales its logits. The first completion is masked, and proves nothing.
    def rollout(prompts, trainer):
        completions = [[5, 6, 7]] + [[5, 6, 1]] * (len(prompts) - 1)
        return scripted_rollout(prompts, trainer) | {"completion_ids": completions}

    with pytest.raises(ValueError, match="The 'full' KL cannot be used with CohereForCausalLM"):
        train(
            KLXGRPOTrainer,
            tmp_path,
            model=scaled_logits(),
            kl_penalty_coef=0.3,
            kl_statistic="full",
            mask_truncated_completions=True,
            extras={"rollout_func": rollout},
        )


@pytest.mark.parametrize("centering", CENTERINGS)
def test_advantages_with_discount(centering, tmp_path):
    trainer = train(
        recording(KLXGRPOTrainer),
        tmp_path,
        kl_penalty_coef=0.3,
        kl_centering=centering,
        kl_discount=0.9,
        extras=LORA,
        **ACCUMULATED,
    )
    check_advantages(trainer, build_model(), discount=0.9)


@pytest.mark.parametrize("statistic", ["k3", "full"])
@pytest.mark.parametrize("centering", CENTERINGS)
def test_advantages_of_reused_batches(centering, statistic, tmp_path):
    # Two optimizer steps per generation batch, each twice: the policy moves while the batch is in use, but the
    # adjustment stays that of the policy that sampled it.
    trainer = train(
        recording(KLXGRPOTrainer),
        tmp_path,
        kl_penalty_coef=0.3,
        kl_centering=centering,
        kl_statistic=statistic,
        steps_per_generation=2,
        num_iterations=2,
        max_steps=8,
        extras=LORA,
    )
    assert [loss["rollout"] for loss in trainer.losses] == [0] * 4 + [1] * 4
    check_advantages(trainer, build_model())
    check_statistic(trainer, trainer.generated, statistic)
    assert len(logged(trainer, "klx/kl")) == 2


def test_exact_kl_of_reused_batches(tmp_path):
    # The policy's LM head moves while the batch is in use, even between two micro-batches.
    trainer = train(
        recording(KLXGRPOTrainer),
        tmp_path,
        kl_penalty_coef=0.3,
        kl_centering="microbatch",
        kl_statistic="full",
        steps_per_generation=2,
        max_steps=4,
        learning_rate=2e-3,
    )
    check_advantages(trainer, build_model())
    check_statistic(trainer, trainer.generated, "full")


def test_advantages_of_a_batch_used_twice_in_one_step(tmp_path):
    # Accumulation covers both iterations, so TRL keeps no old log-probs and the KL is measured in the loss, twice.
    trainer = train(
        recording(KLXGRPOTrainer),
        tmp_path,
        kl_penalty_coef=0.3,
        kl_target=0.05,
        kl_horizon=100,
        gradient_accumulation_steps=2,
        steps_per_generation=1,
        num_iterations=2,
        extras=LORA,
    )
    assert "old_per_token_logps" not in trainer.losses[0]
    assert [loss["rollout"] for loss in trainer.losses] == [0, 0, 1, 1, 2, 2]
    check_advantages(trainer, build_model())
    check_adaptive_trace(trainer, completions=4)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_loss_type_takes_the_adjustment(loss_type, tmp_path):
    fields = {"loss_type": loss_type, "extras": LORA, **ACCUMULATED}
    if loss_type == "luspo":
        fields["importance_sampling_level"] = "sequence"
    trainer = train(recording(KLXGRPOTrainer), tmp_path, kl_penalty_coef=0.3, **fields)
    check_advantages(trainer, build_model())
    plain = train(GRPOTrainer, tmp_path, **fields)
    assert all(math.isfinite(value) for value in logged(trainer, "loss") + logged(trainer, "grad_norm"))
    # The first step has no KL; after it the penalty must change the gradient.
    assert logged(trainer, "grad_norm")[0] == pytest.approx(logged(plain, "grad_norm")[0], rel=1e-5)
    assert logged(trainer, "grad_norm")[2] != pytest.approx(logged(plain, "grad_norm")[2], rel=1e-3)


@pytest.mark.parametrize("placement", ["advantage", "reward", "loss"])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_accumulation_gives_the_gradient_of_the_whole(loss_type, placement, tmp_path):
    runs = [
        train(
            KLXGRPOTrainer,
            tmp_path,
            model=trained_lora(1),
            kl_penalty_coef=0.3,
            kl_placement=placement,
            loss_type=loss_type,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=8 // size,
            max_steps=2,
            learning_rate=1e-3,
        )
        for size in (8, 2)
    ]
    for name in ("grad_norm", "klx/kl", "klx/kl_k1"):
        assert logged(runs[1], name) == pytest.approx(logged(runs[0], name), rel=1e-4)


def test_sequence_level_importance_sampling(tmp_path):
    trainer = train(
        recording(KLXGRPOTrainer),
        tmp_path,
        kl_penalty_coef=0.3,
        importance_sampling_level="sequence",
        loss_type="grpo",
        num_iterations=2,
        max_steps=6,
        extras=LORA,
    )
    check_advantages(trainer, build_model())


def test_temperature_is_that_of_the_rollouts_on_both_sides(tmp_path):
    trainer = train(recording(KLXGRPOTrainer), tmp_path, kl_penalty_coef=0.3, temperature=1.7, extras=LORA)
    check_advantages(trainer, build_model())
    # The test is not vacuous: another temperature gives other numbers.
    trainer.args.temperature = 1.0
    with pytest.raises(AssertionError):
        check_advantages(trainer, build_model())


def test_truncated_completions_do_not_count(tmp_path):
    trainer = train(
        recording(KLXGRPOTrainer),
        tmp_path,
        kl_penalty_coef=0.3,
        kl_target=0.05,
        kl_horizon=100,
        mask_truncated_completions=True,
        extras={"rollout_func": scripted_rollout, **LORA},
        **ACCUMULATED,
    )
    # They are still completions of the batch, which the controller counts.
    check_adaptive_trace(trainer, completions=8)
    masked = [batch["completion_mask"].sum(1) == 0 for batch in trainer.generated]
    assert any(rows.any() for rows in masked) and not any(rows.all() for rows in masked)
    check_advantages(trainer, build_model())


def test_a_batch_without_any_counting_token(tmp_path):
    # No completion ends within one token: everything is masked and there is no KL, but nothing breaks.
    trainer = train(
        KLXGRPOTrainer,
        tmp_path,
        kl_penalty_coef=0.3,
        kl_target=0.1,
        mask_truncated_completions=True,
        rewards=lambda completion_ids, **kwargs: [float(len(ids)) for ids in completion_ids],
        extras={"rollout_func": endless_rollout, **LORA},
    )
    assert logged(trainer, "klx/kl") == []
    assert trainer.kl_controller.value == 0.3


def endless_rollout(prompts, trainer):
    output = scripted_rollout(prompts, trainer)
    return output | {"completion_ids": [[5, 6, 7] for _ in prompts]}


@pytest.mark.parametrize("centering", CENTERINGS)
def test_tokens_of_tools_do_not_count(centering, tmp_path):
    trainer = train(
        recording(KLXGRPOTrainer),
        tmp_path,
        kl_penalty_coef=0.3,
        kl_centering=centering,
        extras={"rollout_func": rollout_with_tools, **LORA},
        **ACCUMULATED,
    )
    assert all((batch["tool_mask"][:, 1] == 0).all() for batch in trainer.generated)
    check_advantages(trainer, build_model())
    # The metric leaves them out too.
    batch = trainer.generated[-1]
    kl = kl_of_tokens(batch["policy"], build_model(), batch, "k3")
    assert logged(trainer, "klx/kl")[-1] == pytest.approx(sum(map(sum, kl)) / len(kl), rel=1e-4)


@pytest.mark.parametrize(
    "fields",
    [
        {"off_policy_mask_threshold": 0.5, "num_iterations": 2},
        {"top_entropy_quantile": 0.5, "entropy_coef": 0.01},
        {"delta": 2.0, "loss_type": "bnpo", "num_iterations": 2},
        {"scale_rewards": "batch", "multi_objective_aggregation": "normalize_then_sum"},
        {"cast_lm_head_to_fp32": True, "pad_to_multiple_of": 8, "kl_statistic": "full"},
        {"disable_dropout": True, "shuffle_dataset": False, "lora_dropout": 0.5},
    ],
    ids=lambda fields: "+".join(fields),
)
def test_other_settings_of_trl(fields, tmp_path):
    fields = dict(fields)
    extras = {"peft_config": lora(lora_dropout=fields.pop("lora_dropout", 0.0))}
    trainer = train(recording(KLXGRPOTrainer), tmp_path, kl_penalty_coef=0.3, extras=extras, **ACCUMULATED, **fields)
    # Where TRL uses the advantages to decide about a token, the adjustment stays out of them.
    apart = bool({"off_policy_mask_threshold", "top_entropy_quantile"} & fields.keys())
    check_advantages(trainer, build_model(), apart=apart)
    check_statistic(trainer, trainer.generated, fields.get("kl_statistic", "k3"))
    assert all(math.isfinite(value) for value in logged(trainer, "loss") + logged(trainer, "grad_norm"))


def test_dropout_of_the_policy_is_not_in_the_reference(tmp_path):
    # The reference runs without dropout: its log-probs are those of the plain model.
    trainer = train(
        recording(KLXGRPOTrainer),
        tmp_path,
        model=build_model(attention_dropout=0.5),
        kl_penalty_coef=0.3,
        kl_placement="loss",
        extras={"peft_config": lora(lora_dropout=0.5)},
    )
    assert trainer.losses
    for loss in trainer.losses:
        counts = loss["completion_mask"].bool()
        with torch.no_grad():
            expected = sampled_logps(build_model().eval(), loss).float()
        torch.testing.assert_close(loss["klx_ref_logps"][counts], expected[counts], atol=1e-5, rtol=0)


@pytest.mark.parametrize("statistic", ["k3", "full"])
def test_half_precision(statistic, tmp_path):
    trainer = train(
        recording(KLXGRPOTrainer),
        tmp_path,
        model=build_model().to(torch.bfloat16),
        kl_penalty_coef=0.3,
        kl_statistic=statistic,
        **ACCUMULATED,
    )
    assert logged(trainer, "klx/kl")[0] == 0.0 and logged(trainer, "klx/kl")[-1] > 1e-3
    assert all(loss["advantages"].dtype == torch.float32 for loss in trainer.losses)


def test_iterable_dataset(tmp_path):
    trainer = train(
        recording(KLXGRPOTrainer),
        tmp_path,
        kl_penalty_coef=0.3,
        dataset=build_dataset().to_iterable_dataset(),
        extras=LORA,
        **ACCUMULATED,
    )
    check_advantages(trainer, build_model())


@pytest.mark.parametrize(
    "kl", [{"kl_statistic": "full"}, {"kl_placement": "loss", "kl_estimator": "full"}], ids=["measured", "in the loss"]
)
def test_gradient_checkpointing(kl, tmp_path):
    fields = {"kl_penalty_coef": 0.3, "extras": LORA, **kl, **ACCUMULATED}
    without = train(KLXGRPOTrainer, tmp_path, **fields)
    with_it = train(KLXGRPOTrainer, tmp_path, gradient_checkpointing=True, **fields)
    for name in ("loss", "grad_norm", "klx/kl"):
        assert logged(with_it, name) == pytest.approx(logged(without, name), rel=1e-4, abs=1e-6)


class FakeSync:
    """Stands in for TRL's vLLM engine. The rollouts come from a function."""

    def sync_weights(self):
        pass


def rollout_of_another_engine(prompts, trainer):
    """Scripted completions with log-probs of a sampler that is off by a constant."""
    output = scripted_rollout(prompts, trainer)
    policy = plain_model(trainer.model)
    logprobs = []
    for prompt, completion in zip(output["prompt_ids"], output["completion_ids"], strict=True):
        ids = torch.tensor([completion])
        batch = {"prompt_ids": torch.tensor([prompt]), "completion_ids": ids}
        batch |= {f"{key}_mask": torch.ones_like(batch[f"{key}_ids"]) for key in ("prompt", "completion")}
        with torch.no_grad():
            logprobs.append((sampled_logps(policy, batch)[0] - 0.25).tolist())
    return output | {"logprobs": logprobs}


@pytest.mark.parametrize("placement", ["advantage", "reward", "loss"])
def test_importance_ratio_of_vllm(placement, tmp_path):
    trainer = build_trainer(
        recording(KLXGRPOTrainer),
        tmp_path,
        kl_penalty_coef=0.3,
        kl_placement=placement,
        extras={"rollout_func": rollout_of_another_engine, **LORA},
        **ACCUMULATED,
    )
    trainer.use_vllm, trainer._last_loaded_step, trainer.vllm_generation = True, -1, FakeSync()
    trainer.train()
    # TRL's correction for vLLM is active, per token or as one factor per sequence.
    ratios = torch.cat([loss["importance_sampling_ratio"].flatten() for loss in trainer.losses])
    assert (ratios > 1.2).any()
    if placement == "advantage":
        # Both sides come from the trainer's own forward passes, so the sampler's 0.25 nats are in neither.
        check_advantages(trainer, build_model())
    batch = trainer.generated[-1]
    kl = kl_of_tokens(batch["policy"], build_model(), batch, "k3")
    assert logged(trainer, "klx/kl")[-1] == pytest.approx(sum(map(sum, kl)) / len(kl), rel=1e-4)
