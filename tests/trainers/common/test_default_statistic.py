"""A target is held by the exact KL, unless the model does not allow it."""

import math

import pytest
import torch
from peft import get_peft_model

from support.grpo_checks import check_statistic
from support.oracle import kl_of_tokens
from support.tiny import build_model, build_trainer, logged, lora, recording, scaled_logits, train
from support.tiny_ppo import RecordingPPOTrainer, train_ppo
from trl_klx import KLXGRPOTrainer, KLXRLOOTrainer
from trl_klx.control.exact_kl import head_obstacle, lm_head_error
from trl_klx.control.rollout import Scored


ACCUMULATED = {"gradient_accumulation_steps": 2}
FALLS_BACK = "`kl_statistic` is unset: the KL is measured by 'k3'"


def warnings_of(caplog) -> list[str]:
    return [record.message for record in caplog.records if FALLS_BACK in record.message]


@pytest.mark.parametrize("trainer_class", [KLXGRPOTrainer, KLXRLOOTrainer])
def test_a_target_is_held_by_the_exact_kl(trainer_class, caplog, tmp_path):
    trainer = train(recording(trainer_class), tmp_path, kl_target=0.5, learning_rate=4e-3)
    assert trainer.kl_control.statistic == "full"
    check_statistic(trainer, trainer.generated, "full")
    assert warnings_of(caplog) == []


def test_a_target_of_ppo_is_held_by_the_exact_kl(tmp_path):
    trainer = train_ppo(tmp_path, RecordingPPOTrainer, kl_target=0.5, num_ppo_epochs=1, max_steps=4)
    check_statistic(trainer, trainer.rollouts, "full")


@pytest.mark.parametrize("batching", [{}, ACCUMULATED], ids=["one", "accumulated"])
@pytest.mark.parametrize("placement", ["advantage", "reward", "loss"])
@pytest.mark.parametrize("trainer_class", [KLXGRPOTrainer, KLXRLOOTrainer])
def test_logits_that_cannot_be_rebuilt_are_measured_by_k3(trainer_class, placement, batching, caplog, tmp_path):
    trainer = train(
        recording(trainer_class),
        tmp_path,
        model=scaled_logits(),
        kl_target=0.5,
        kl_placement=placement,
        learning_rate=4e-3,
        **batching,
    )
    (warning,) = warnings_of(caplog)
    assert "'full' cannot be used with CohereForCausalLM" in warning
    check_statistic(trainer, trainer.generated, "k3", scaled_logits())


def integer_head():
    """A head whose weights are no numbers to multiply by, like those of a quantized one."""
    model = build_model()
    weight = torch.zeros(model.lm_head.weight.shape, dtype=torch.int8)
    model.lm_head.weight = torch.nn.Parameter(weight, requires_grad=False)
    return model


@pytest.mark.parametrize(
    ("model", "obstacle"),
    [
        (build_model, None),
        (lambda: get_peft_model(build_model(), lora()), None),
        (lambda: get_peft_model(build_model(), lora(target_modules=["lm_head"])), "an adapter on the LM head"),
        (integer_head, "which has no plain weights"),
    ],
    ids=["plain", "LoRA", "adapter on the head", "integers"],
)
def test_what_is_known_before_the_first_pass(model, obstacle):
    # TRL refuses some of these itself, depending on its version.
    found = head_obstacle(model())
    assert found is None if obstacle is None else obstacle in found


@pytest.mark.parametrize("batching", [{}, ACCUMULATED], ids=["one", "accumulated"])
@pytest.mark.parametrize("placement", ["advantage", "reward", "loss"])
@pytest.mark.parametrize("scaled", ["policy", "reference"])
def test_one_model_whose_logits_cannot_be_rebuilt_is_enough(scaled, placement, batching, caplog, tmp_path):
    policy, reference = (build_model, scaled_logits) if scaled == "reference" else (scaled_logits, build_model)
    trainer = build_trainer(
        recording(KLXGRPOTrainer),
        tmp_path,
        model=policy(),
        kl_target=20.0,
        kl_placement=placement,
        learning_rate=4e-3,
        extras={"ref_model": reference()},
        **batching,
    )
    assert trainer.kl_control.statistic == "full" and warnings_of(caplog) == []
    trainer.train()
    (warning,) = warnings_of(caplog)
    assert "CohereForCausalLM" in warning
    check_statistic(trainer, trainer.generated, "k3", reference())


@pytest.mark.parametrize(
    ("trainer_class", "fields"), [(KLXGRPOTrainer, {}), (KLXGRPOTrainer, {"num_iterations": 2}), (KLXRLOOTrainer, {})]
)
def test_a_reference_of_the_same_class_is_checked_too(trainer_class, fields, caplog, tmp_path):
    """Some of these score the policy first, whose head shows its logits."""
    policy = scaled_logits()
    policy.logit_scale = policy.config.logit_scale = 1.0
    extras = {"ref_model": scaled_logits()}
    trainer = train(recording(trainer_class), tmp_path, model=policy, kl_target=20.0, extras=extras, **fields)
    assert len(warnings_of(caplog)) == 1
    check_statistic(trainer, trainer.generated, "k3", scaled_logits())


def test_a_nan_proves_nothing():
    model, tokens, mask = build_model(), torch.tensor([[5, 6]]), torch.ones(1, 2)
    hidden = torch.full((1, 2, model.config.hidden_size), math.nan)
    assert lm_head_error(model, 1.0, Scored(torch.zeros(1, 2), hidden), tokens, mask) is None
    assert lm_head_error(model, 1.0, Scored(torch.zeros(1, 2), 0.0 * hidden.nan_to_num()), tokens, mask) > 1.0


def test_the_card_says_what_was_measured(tmp_path):
    trainer = train(KLXGRPOTrainer, tmp_path, model=scaled_logits(), kl_target=0.5)
    trainer.create_model_card()
    assert "| `kl_statistic` | `k3` |" in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize("model", [scaled_logits, build_model])
def test_a_run_that_began_with_k3_continues_with_it(model, tmp_path, recwarn):
    # Either its model allows nothing else, or the run was begun when `k3` was the default.
    begun = {} if model is scaled_logits else {"kl_statistic": "k3"}
    fields = {"kl_target": 0.5, "learning_rate": 4e-3, "max_steps": 4}
    whole = train(KLXGRPOTrainer, tmp_path, model=model(), save_strategy="steps", save_steps=2, **begun, **fields)
    resumed = build_trainer(KLXGRPOTrainer, tmp_path / "resumed", model=model(), **fields)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.kl_control.statistic == "k3"
    assert logged(resumed, "klx/kl") == logged(whole, "klx/kl")
    assert logged(resumed, "klx/coef") == logged(whole, "klx/coef")
    assert not [warning for warning in recwarn if "measured otherwise" in str(warning.message)]


def test_another_controller_keeps_the_statistic_of_the_run(tmp_path, recwarn):
    fields = {"kl_target": 0.5, "learning_rate": 4e-3}
    train(KLXGRPOTrainer, tmp_path, save_strategy="steps", save_steps=2, max_steps=2, **fields)
    other = {"kl_controller": "adaptive", "kl_penalty_coef": 0.1, "max_steps": 4}
    resumed = build_trainer(recording(KLXGRPOTrainer), tmp_path / "resumed", **fields, **other)
    assert resumed.kl_control.statistic == "k3"
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.kl_control.statistic == "full"
    (batch, _), (*_, kl, _) = resumed.generated, logged(resumed, "klx/kl")
    expected = kl_of_tokens(batch["policy"], build_model(), batch, "full", resumed.args.temperature)
    assert kl == pytest.approx(sum(map(sum, expected)) / len(expected), rel=1e-4)
    messages = [str(warning.message) for warning in recwarn]
    assert any("The KL controller was changed" in text for text in messages)
    assert not any("measured otherwise" in text for text in messages)
