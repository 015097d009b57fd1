"""Every accepted penalty follows the gradient that the docs name, on policy and one step off it."""

import itertools
from dataclasses import dataclass

import pytest

from gradient_oracle import ROWS, Exact, cosine_and_scale, importance, k1, recorded_steps
from trl_klx import KLXGRPOTrainer, KLXPPOTrainer, KLXRLOOTrainer
from trl_klx.maths.estimators import KL_ESTIMATORS
from trl_klx.trainers.config import KL_CENTERINGS, KL_PLACEMENTS


# Tokens of the population, by which TRL's default loss divides.
TOKENS = 144
TRAINERS = {
    "GRPO": (KLXGRPOTrainer, {"num_iterations": 2, "epsilon": 0.9, "scale_rewards": "none"}),
    "GRPO, sequence": (
        KLXGRPOTrainer,
        {"num_iterations": 2, "epsilon": 0.9, "scale_rewards": "none", "importance_sampling_level": "sequence"},
    ),
    "RLOO": (KLXRLOOTrainer, {"num_iterations": 2, "epsilon": 0.9}),
    "PPO": (KLXPPOTrainer, {"num_ppo_epochs": 2, "cliprange": 0.9}),
}
CHARGES = {"k1": k1, "importance": importance}


@dataclass(frozen=True)
class Case:
    trainer: str
    placement: str
    estimator: str
    centering: str | None
    discount: float

    def __str__(self) -> str:
        return "-".join(str(part) for part in vars(self).values() if part)

    @property
    def fields(self) -> dict:
        fields = {"kl_penalty_coef": 1.0, "kl_placement": self.placement, "kl_estimator": self.estimator}
        if self.centering is not None:
            fields |= {"kl_centering": self.centering, "kl_discount": self.discount}
        return fields


def every_case():
    for trainer, placement, estimator in itertools.product(TRAINERS, KL_PLACEMENTS, KL_ESTIMATORS):
        if placement != "advantage":
            yield Case(trainer, placement, estimator, None, 0.0)
            continue
        for centering, discount in itertools.product(KL_CENTERINGS, (0.0, 0.5, 1.0)):
            yield Case(trainer, placement, estimator, centering, discount)


def is_accepted(case: Case, output_dir) -> bool:
    trainer_class, settings = TRAINERS[case.trainer]
    try:
        trainer_class._config_class(output_dir=str(output_dir), use_cpu=True, bf16=False, **settings, **case.fields)
    except ValueError as error:
        assert "kl_" in str(error), error  # it names the field
        return False
    return True


def promised(case: Case, exact: Exact):
    """The objective that the docs name for a combination, and the factor before its gradient."""
    per_token, charge = ROWS / TOKENS, CHARGES.get(case.estimator)
    if case.trainer == "RLOO":
        # With a baseline of the other completions, an advantage is that much larger than with one of all.
        per_token, leave_one_out = 1.0, ROWS / (ROWS - 1)
    if case.placement == "loss":
        return exact.token_kl(), per_token
    if case.trainer == "GRPO, sequence":
        over = "completions" if case.placement == "reward" else "nothing" if case.centering == "none" else "tokens"
        return exact.charged_by_mean_ratio(over, charge), per_token
    if case.placement == "reward":
        if case.trainer == "RLOO":
            return exact.charged_by_sequence(charge), leave_one_out
        return exact.charged_to_go(1.0, charge), per_token
    if case.centering == "sequence" and case.discount == 0.0:
        return exact.charged_within(charge), per_token
    return exact.charged_to_go(case.discount, charge), per_token


# Of the discounted charges, one centering stands for all: discounting comes before centering.
CASES = [case for case in every_case() if case.discount == 0.0 or case.centering == "batch"]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_follows_what_the_docs_name(case, tmp_path):
    if not is_accepted(case, tmp_path):
        pytest.skip("refused by the config")
    trainer_class, settings = TRAINERS[case.trainer]
    steps = recorded_steps(trainer_class, tmp_path, max_steps=2, **settings, **case.fields)
    assert len(steps) == 2
    for step in steps:
        exact = Exact(step.weight, steps[0].weight)
        objective, factor = promised(case, exact)
        cosine, scale = cosine_and_scale(step.gradient, exact.gradient(objective))
        assert cosine == pytest.approx(1.0, abs=1e-6)
        assert scale == pytest.approx(factor, rel=1e-4)
