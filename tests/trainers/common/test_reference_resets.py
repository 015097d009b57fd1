"""A fresh start: the policy becomes the reference, and the controller begins again."""

import pytest
import torch
from peft import PeftModel
from transformers import TrainerCallback

from support.reference_checks import (
    MODELS,
    Watched,
    WatchedGRPOTrainer,
    assert_used,
    borrowed,
    made,
    rebuilt,
    run,
    save_adapter,
    save_checkpoints,
)
from support.tiny import build_model, build_trainer, logged, lora, reward_even_tokens, trained_lora
from trl_klx import KLXGRPOTrainer, KLXPPOTrainer, KLXRLOOTrainer


class WatchedRLOOTrainer(Watched, KLXRLOOTrainer):
    pass


class WatchedPPOTrainer(Watched, KLXPPOTrainer):
    pass


TRAINERS = {"grpo": WatchedGRPOTrainer, "rloo": WatchedRLOOTrainer, "ppo": WatchedPPOTrainer}
every_trainer = pytest.mark.parametrize("kind", TRAINERS)
# Two batches without progress, by a reward that falls from step to step, are reason enough.
RESETS = {"kl_penalty_coef": 0.1, "kl_ref_reset_patience": 2, "max_steps": 6}


def falling_reward(completion_ids, trainer_state, **kwargs) -> list[float]:
    """Differs between completions, so that the policy moves, and falls with every step."""
    return [reward - 10.0 * trainer_state.global_step for reward in reward_even_tokens(completion_ids)]


def rising_reward(completion_ids, trainer_state, **kwargs) -> list[float]:
    return [reward + 10.0 * trainer_state.global_step for reward in reward_even_tokens(completion_ids)]


def run_falling(output_dir, kind="grpo", **settings):
    defaults = {"rewards": falling_reward, "trainer_class": TRAINERS[kind]} | RESETS
    return run(output_dir, **(defaults | ({"num_ppo_epochs": 1} if kind == "ppo" else {}) | settings))


def starting_reference(trainer):
    """What the reference is before any reset: the base model under PEFT, else the initial weights."""
    return build_model() if isinstance(trainer.model, PeftModel) else rebuilt(trainer, 0)


def optimizer_steps(trainer) -> set[float]:
    return {float(state["step"]) for state in trainer.optimizer.state.values()}


@every_trainer
@pytest.mark.parametrize("policy", MODELS)
def test_the_policy_becomes_the_reference(kind, policy, tmp_path):
    trainer = run_falling(tmp_path, kind, **made(policy), kl_controller="adaptive", kl_target=1e-6, kl_horizon=20)
    assert [seen["step"] for seen in trainer.seen] == [0, 1, 2, 3, 4, 5]
    references = [starting_reference(trainer), rebuilt(trainer, 2), rebuilt(trainer, 4)]
    for seen in trainer.seen:
        assert_used(seen, references[seen["step"] // 2], trainer.temperature)
    kls, coefs = logged(trainer, "klx/kl"), logged(trainer, "klx/coef")
    assert kls[2] == pytest.approx(0.0, abs=1e-6) and kls[4] == pytest.approx(0.0, abs=1e-6)
    assert kls[1] > 1e-4 and kls[3] > 1e-4 and kls[5] > 1e-4
    # The controller begins again with the first coefficient.
    assert coefs[0] == coefs[2] == coefs[4] == 0.1
    assert logged(trainer, "klx/reference_resets") == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
    assert trainer.kl_reference.resets == 2
    # What it began as is still its identity.
    assert trainer.kl_reference.description == trainer.kl_reference.identity | {"resets": 2}


def test_a_saved_step_can_be_the_first_reference(tmp_path):
    checkpoints = save_checkpoints(tmp_path / "saved")
    for policy, settings in {"lora": {"peft": lora()}, "full": {}}.items():
        folder = borrowed(checkpoints[policy], tmp_path / policy)
        trainer = run_falling(folder, kl_penalty_reference_step=1, max_steps=3, **settings)
        assert logged(trainer, "klx/kl")[0] > 1e-4
        assert_used(trainer.seen[2], rebuilt(trainer, 2))


def test_a_saved_adapter_of_another_shape_is_refused(tmp_path):
    save_adapter(tmp_path / "run" / "checkpoint-3")
    with pytest.raises(
        ValueError, match="`kl_ref_reset_patience=2` cannot be used with `kl_penalty_reference_step=3`"
    ):
        run_falling(tmp_path / "run", kl_penalty_reference_step=3, peft=lora(), train=False)


@pytest.mark.parametrize(
    "settings",
    [
        {"rewards": rising_reward},
        {"kl_target": 50.0, "kl_statistic": "k3"},
        {"kl_ref_reset_patience": 7},
    ],
    ids=["the reward rises", "the KL is below its target", "too few batches"],
)
def test_no_reset_without_reason(settings, tmp_path):
    trainer = run_falling(tmp_path, **settings)
    assert logged(trainer, "klx/reference_resets") == [0.0] * 6
    assert_used(trainer.seen[-1], rebuilt(trainer, 0))


def test_nothing_is_logged_without_resets(tmp_path):
    trainer = run_falling(tmp_path, kl_ref_reset_patience=None)
    assert not logged(trainer, "klx/reference_resets") and trainer.kl_reference.state() == {}


def test_a_patience_that_is_never_used_up_changes_nothing(tmp_path):
    plain = run_falling(tmp_path / "plain", kl_ref_reset_patience=None, peft=lora())
    patient = run_falling(tmp_path / "patient", kl_ref_reset_patience=50, peft=lora())
    for one, other in zip(plain.seen, patient.seen, strict=True):
        assert torch.equal(one["logps"], other["logps"])
    assert logged(plain, "loss") == logged(patient, "loss")


@pytest.mark.parametrize("clear", [False, True])
@every_trainer
def test_the_optimizers_state_is_cleared_if_asked(kind, clear, tmp_path):
    trainer = run_falling(tmp_path, kind, kl_ref_reset_optimizer=clear, max_steps=5)
    # Resets after steps 2 and 4.
    assert optimizer_steps(trainer) == ({1.0} if clear else {5.0})


def test_every_micro_batch_of_a_rollout_meets_one_reference(tmp_path):
    # Two optimizer steps on each rollout, the second of which measures what the first left.
    settings = {"gradient_accumulation_steps": 2, "steps_per_generation": 4, "kl_centering": "microbatch"}
    trainer = run_falling(tmp_path, **settings, max_steps=8)
    assert [seen["step"] for seen in trainer.seen] == [0, 2, 4, 6]
    # Two rollouts are judged, so the third is the first against the new reference.
    for seen, step in zip(trainer.seen, [0, 0, 4, 4], strict=True):
        assert_used(seen, rebuilt(trainer, step))


class ResetAfter(TrainerCallback):
    """Resets the reference by hand after a step."""

    trainer = None

    def __init__(self, step: int, **arguments):
        self.step, self.arguments = step, arguments

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.trainer.reset_kl_reference(**self.arguments)


def run_by_hand(output_dir, callback: ResetAfter, **settings):
    trainer = run(output_dir, train=False, **({"kl_penalty_coef": 0.1} | settings))
    callback.trainer = trainer
    trainer.add_callback(callback)
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    ("policy", "settings"),
    [
        ("full", {}),
        ("new lora", {"kl_penalty_reference_step": 0}),
        ("trained lora", {"kl_penalty_reference_step": 0}),
        ("trained lora", {"kl_ref_reset_patience": 50}),
    ],
)
def test_a_reset_by_hand(policy, settings, tmp_path):
    trainer = run_by_hand(tmp_path, ResetAfter(3), **made(policy), **settings)
    assert_used(trainer.seen[3], rebuilt(trainer, 3))
    assert logged(trainer, "klx/reference_resets")[-1] == 1.0 and optimizer_steps(trainer) == {4.0}


def test_a_reset_by_hand_may_clear_the_optimizer(tmp_path):
    assert optimizer_steps(run_by_hand(tmp_path, ResetAfter(3, reset_optimizer=True))) == {1.0}


def test_a_rollout_scored_by_the_earlier_reference_teaches_nothing(tmp_path):
    settings = {"gradient_accumulation_steps": 1, "steps_per_generation": 2, "kl_centering": "microbatch"}
    settings |= {"kl_controller": "adaptive", "kl_target": 1e-6, "kl_horizon": 20, "max_steps": 4}
    trainer = run_by_hand(tmp_path, ResetAfter(3), **settings)
    # The second rollout began before the reset, and its KL is measured by its last micro-batch, after the reset.
    assert logged(trainer, "klx/kl")[-1] > 1e-4
    assert trainer.kl_controller.value == 0.1


def other_model(tmp_path) -> dict:
    return {"extras": {"ref_model": build_model(seed=3)}}


def base_under_peft(tmp_path) -> dict:
    return {"extras": {"peft_config": lora()}}


def other_adapter(tmp_path) -> dict:
    trained_lora(2).save_pretrained(tmp_path / "adapter")
    return {"extras": {"peft_config": lora()}, "kl_ref_adapter_path": str(tmp_path / "adapter")}


def lagging(tmp_path) -> dict:
    return {"kl_ref_lag": 1}


@pytest.mark.parametrize("reference", [other_model, base_under_peft, other_adapter, lagging])
def test_a_reset_by_hand_needs_a_copy_of_the_policy(reference, tmp_path):
    trainer = build_trainer(KLXGRPOTrainer, tmp_path, kl_penalty_coef=0.1, **reference(tmp_path))
    with pytest.raises(ValueError, match="cannot be reset.*`kl_penalty_reference_step=0`"):
        trainer.reset_kl_reference()


def test_a_reset_without_kl_control_is_refused(tmp_path):
    with pytest.raises(ValueError, match="There is no KL reference to reset"):
        build_trainer(KLXGRPOTrainer, tmp_path).reset_kl_reference()


@every_trainer
def test_resets_are_refused_with_a_passed_model(kind, tmp_path):
    with pytest.raises(ValueError, match="`kl_ref_reset_patience=2` cannot be used with a `ref_model`"):
        build_trainer(TRAINERS[kind], tmp_path, **RESETS, extras={"ref_model": build_model(seed=3)})


def test_resets_are_alerts(tmp_path):
    told = []

    class Listening(WatchedGRPOTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.kl_control.alert = told.append

    trainer = run_falling(tmp_path, trainer_class=Listening)
    resets = [text for text in told if text.startswith("The KL reference is now the policy of step")]
    assert len(resets) == trainer.kl_reference.resets > 0
