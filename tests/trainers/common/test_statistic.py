"""`kl_statistic` is the KL that is logged and drives the controller, whatever is penalised."""

import pytest

from support.grpo_checks import check_statistic
from support.tiny import logged, lora, recording, train, watch_projections
from support.tiny_ppo import RecordingPPOTrainer, train_ppo
from trl_klx import KLXGRPOTrainer, KLXRLOOTrainer
from trl_klx.control.forward_pass import CAN_SKIP_LM_HEAD


pytestmark = pytest.mark.slow


ACCUMULATED = {"gradient_accumulation_steps": 2}


@pytest.mark.parametrize("batching", [{}, ACCUMULATED], ids=["one", "accumulated"])
@pytest.mark.parametrize("placement", ["advantage", "reward", "loss"])
@pytest.mark.parametrize("trainer_class", [KLXGRPOTrainer, KLXRLOOTrainer])
def test_full_statistic_of_another_penalty(trainer_class, placement, batching, tmp_path):
    fields = {"kl_penalty_coef": 0.3, "kl_placement": placement, "temperature": 0.7, "learning_rate": 4e-3, **batching}
    full = train(recording(trainer_class), tmp_path / "full", kl_statistic="full", **fields)
    check_statistic(full, full.generated, "full")
    plain = train(recording(trainer_class), tmp_path / "k3", **fields)
    check_statistic(plain, plain.generated, "k3")
    # At a fixed coefficient it is only a measurement. In the advantage, the penalty's log-probs come from the exact
    # KL's pass, which sums in a different order.
    same = logged(plain, "loss")
    assert logged(full, "loss") == (pytest.approx(same, rel=0, abs=1e-7) if placement == "advantage" else same)


@pytest.mark.skipif(not CAN_SKIP_LM_HEAD, reason="this TRL projects inside of the model's forward")
@pytest.mark.parametrize(("placement", "passes"), [("advantage", 1), ("loss", 2)])
def test_the_exact_kl_spares_the_reference_s_own_projection(placement, passes, tmp_path, monkeypatch):
    calls = watch_projections(monkeypatch)
    fields = {"kl_penalty_coef": 0.3, "kl_placement": placement, "max_steps": 3}
    train(KLXGRPOTrainer, tmp_path / "full", kl_statistic="full", **fields)
    # TRL's own KL term needs the reference's log-probs before the loss.
    assert len(calls) == passes * 3
    calls.clear()
    train(KLXGRPOTrainer, tmp_path / "k3", **fields)
    assert len(calls) == 2 * 3


@pytest.mark.parametrize("trainer_class", [KLXGRPOTrainer, KLXRLOOTrainer])
def test_k3_statistic_of_the_full_penalty(trainer_class, tmp_path):
    trainer = train(
        recording(trainer_class),
        tmp_path,
        kl_penalty_coef=0.3,
        kl_placement="loss",
        kl_estimator="full",
        kl_statistic="k3",
        extras={"peft_config": lora()},
    )
    check_statistic(trainer, trainer.generated, "k3")


def test_monitored_full_statistic(tmp_path):
    trainer = train(recording(KLXGRPOTrainer), tmp_path, kl_monitor=True, kl_statistic="full")
    check_statistic(trainer, trainer.generated, "full")


@pytest.mark.parametrize("placement", ["advantage", "reward", "loss"])
def test_full_statistic_of_ppo(placement, tmp_path):
    trainer = train_ppo(
        tmp_path,
        RecordingPPOTrainer,
        kl_penalty_coef=0.3,
        kl_placement=placement,
        kl_statistic="full",
        num_ppo_epochs=1,
        max_steps=4,
    )
    check_statistic(trainer, trainer.rollouts, "full")
