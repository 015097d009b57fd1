"""`kl_target` alone holds the KL in every trainer, and `kl_lr_guard` shortens steps that are too long for it."""

import pytest
import torch
from accelerate.logging import MultiProcessAdapter

from support.tiny import build_trainer, logged
from support.tiny_ppo import build_ppo
from trl_klx import KLXGRPOTrainer, KLXPPOTrainer, KLXRLOOTrainer


TRAINERS = [KLXGRPOTrainer, KLXRLOOTrainer, KLXPPOTrainer]


def build(trainer_class, tmp_path, **fields):
    fields = {"max_steps": 6, "learning_rate": 0.02, "logging_steps": 1} | fields
    if trainer_class is KLXPPOTrainer:
        return build_ppo(tmp_path, num_ppo_epochs=1, **fields)
    return build_trainer(trainer_class, tmp_path, **fields)


@pytest.mark.parametrize("trainer_class", TRAINERS)
def test_a_target_alone_is_steered_to(trainer_class, tmp_path):
    trainer = build(trainer_class, tmp_path, kl_target=2.0, learning_rate=2e-3)
    assert trainer.args.kl_controller_name == "hold" and trainer.kl_controller.target == 2.0
    trainer.train()
    coefs, kls = logged(trainer, "klx/coef"), logged(trainer, "klx/kl")
    assert len(coefs) == 6 and len(set(coefs)) > 2 and kls[-1] > 0
    assert logged(trainer, "klx/target") == [2.0] * 6
    # The controller got its inputs.
    state = trainer.kl_controller.state_dict()
    assert state["age"] == 5 and state["rate"] == pytest.approx(2e-3 / 3)  # linear schedule


def weights(trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters() if p.requires_grad])


@pytest.mark.parametrize("trainer_class", TRAINERS)
def test_the_guard_shortens_the_first_step_and_leaves_the_schedule(trainer_class, tmp_path):
    moves = {}
    for guard in (False, True):
        torch.manual_seed(0)
        trainer = build(trainer_class, tmp_path / str(guard), kl_target=0.5, kl_lr_guard=guard, max_steps=1)
        before = weights(trainer)
        trainer.train()
        moves[guard] = (weights(trainer) - before).norm()
        assert logged(trainer, "learning_rate") == [0.02]
        assert trainer.optimizer.param_groups[0]["lr"] == trainer.lr_scheduler.get_last_lr()[0]
    assert float(moves[True] / moves[False]) == pytest.approx(0.1, rel=0.02)


def test_the_guard_follows_the_speed_of_the_kl(tmp_path):
    free = build(KLXGRPOTrainer, tmp_path / "free", kl_target=0.01, learning_rate=0.1)
    free.train()
    guarded = build(KLXGRPOTrainer, tmp_path / "guarded", kl_target=0.01, learning_rate=0.1, kl_lr_guard=True)
    guarded.train()
    factors = logged(guarded, "klx/lr_factor")
    # The first KL is measured on the reference itself; the guard adapts from then on.
    assert factors[0] == 1.0 and factors[1] == 0.1 and max(factors[2:]) < 0.1
    # It is logged with the batch after its step. The schedule falls and the policy shows greater speeds: the learning
    # rate that is left never rises.
    rates = [factor * rate for factor, rate in zip(factors[1:], logged(guarded, "learning_rate"), strict=False)]
    assert all(after <= before for before, after in zip(rates[1:], rates[2:], strict=False)) and rates[-1] < rates[1]
    assert max(logged(guarded, "klx/kl")) < 0.2 * max(logged(free, "klx/kl"))
    assert "klx/lr_factor" not in free.state.log_history[0]


def test_a_guarded_run_resumes_to_the_bit(tmp_path):
    fields = {"kl_target": 0.05, "kl_lr_guard": True, "learning_rate": 0.05}
    whole = build(KLXGRPOTrainer, tmp_path / "run", save_steps=3, save_strategy="steps", **fields)
    whole.train()
    resumed = build(KLXGRPOTrainer, tmp_path / "again", **fields)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    for name in ("klx/kl", "klx/coef", "klx/lr_factor"):
        assert logged(resumed, name) == logged(whole, name)


def test_a_changed_default_is_named_once(tmp_path, caplog):
    MultiProcessAdapter.warning_once.cache_clear()
    with caplog.at_level("WARNING"):
        for _ in range(2):
            build(KLXGRPOTrainer, tmp_path, kl_target=2.0, kl_penalty_coef=0.1)
        build(KLXGRPOTrainer, tmp_path, kl_target=2.0)
        build(KLXGRPOTrainer, tmp_path, kl_target=2.0, kl_penalty_coef=0.1, kl_controller="pid")
    assert sum("`kl_controller` is unset" in record.message for record in caplog.records) == 1
    assert "kl_controller='adaptive'" in caplog.text
