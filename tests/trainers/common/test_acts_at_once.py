"""Which coefficient a batch is given: the one that follows from its own KL, or the one before."""

import pytest

from support.tiny import build_trainer, logged
from support.tiny_ppo import build_ppo
from trl_klx import KLController, KLXGRPOTrainer, KLXPPOTrainer, KLXRLOOTrainer, register_kl_controller
from trl_klx.controllers import registry


START = 0.05


def follow(kl: float) -> float:
    return 0.1 + 0.5 * kl


@pytest.fixture(autouse=True, params=[True, False], ids=["at once", "before"])
def at_once(request):
    """A controller whose coefficient tells which KL it follows from."""

    @register_kl_controller("telling")
    class Telling(KLController):
        uses = frozenset()
        acts_at_once = request.param

        def _next(self, kl, n_steps):
            return follow(kl)

    yield request.param
    del registry._REGISTRY["telling"]


def train(trainer_class, tmp_path, **fields):
    """Train, and return the trainer and the coefficients that its placement was given."""
    fields = {"kl_penalty_coef": START, "kl_controller": "telling", "max_steps": 4} | fields
    trainer = (build_ppo if trainer_class is KLXPPOTrainer else build_trainer)(
        *(() if trainer_class is KLXPPOTrainer else (trainer_class,)), tmp_path, **fields
    )
    placement, given = trainer._klx_placement, []
    name = "loss_term" if placement.in_loss else "apply"
    method = getattr(placement, name)

    def watch(*args):
        given.append(args[2])  # the coefficient, in both
        return method(*args)

    setattr(placement, name, watch)
    trainer.train()
    return trainer, given


CASES = {
    "GRPO": (KLXGRPOTrainer, {}),
    "GRPO, two iterations": (KLXGRPOTrainer, {"num_iterations": 2, "max_steps": 8}),
    "GRPO, accumulation": (KLXGRPOTrainer, {"gradient_accumulation_steps": 2}),
    "GRPO, in the loss": (KLXGRPOTrainer, {"kl_placement": "loss"}),
    "RLOO": (KLXRLOOTrainer, {}),
    "RLOO, in the loss": (KLXRLOOTrainer, {"kl_placement": "loss"}),
    "PPO, one pass": (KLXPPOTrainer, {"num_ppo_epochs": 1}),
    "PPO, two epochs": (KLXPPOTrainer, {"num_ppo_epochs": 2, "max_steps": 8}),
    "PPO, in the advantage": (KLXPPOTrainer, {"num_ppo_epochs": 1, "kl_placement": "advantage"}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_batch_that_is_measured_whole(case, at_once, tmp_path):
    trainer_class, fields = CASES[case]
    trainer, given = train(trainer_class, tmp_path, **fields)
    kls, coefs = logged(trainer, "klx/kl"), logged(trainer, "klx/coef")
    assert len(kls) == 4 and kls[-1] > 1e-4
    expected = [follow(kl) for kl in kls] if at_once else [START, *map(follow, kls[:-1])]
    assert coefs == pytest.approx(expected, rel=1e-6)
    # What is logged is what acted, in every step on the rollout.
    assert list(dict.fromkeys(given)) == pytest.approx(coefs)


@pytest.mark.parametrize(
    "trainer_class, fields",
    [
        (KLXGRPOTrainer, {"kl_centering": "microbatch", "gradient_accumulation_steps": 2}),
        (KLXGRPOTrainer, {"kl_placement": "loss", "gradient_accumulation_steps": 2}),
        (KLXGRPOTrainer, {"kl_placement": "reward", "scale_rewards": "batch"}),
        (KLXRLOOTrainer, {"kl_placement": "reward"}),
    ],
    ids=["micro-batches", "micro-batches in the loss", "GRPO's rewards", "RLOO's rewards"],
)
def test_a_penalty_that_is_entered_before_the_kl_is_known(trainer_class, fields, tmp_path):
    """All of the batch gets the coefficient before its update, whatever the controller."""
    trainer, given = train(trainer_class, tmp_path, **fields)
    kls, coefs = logged(trainer, "klx/kl"), logged(trainer, "klx/coef")
    assert len(kls) == 4 and kls[-1] > 1e-4
    assert coefs == pytest.approx([START, *map(follow, kls[:-1])], rel=1e-6)
    assert not given or list(dict.fromkeys(given)) == pytest.approx(coefs)


def test_evaluation_decides_nothing(tmp_path):
    trainer, _ = train(KLXGRPOTrainer, tmp_path, max_steps=2)
    value = trainer.kl_controller.value
    metrics = trainer.evaluate(trainer.train_dataset)
    assert metrics["eval_klx/coef"] == trainer.kl_controller.value == value
