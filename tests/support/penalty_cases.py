"""Every combination of trainer, placement, estimator and centering, and the gradient that the accepted ones follow."""

import itertools
from dataclasses import dataclass

import torch

from support.gradient_oracle import ROWS, Exact, importance, k1
from trl_klx import KLXGRPOTrainer, KLXPPOTrainer, KLXRLOOTrainer
from trl_klx.maths.estimators import KL_ESTIMATORS
from trl_klx.trainers.field_rules import KL_CENTERINGS


# Number of tokens in the population, by which TRL's default loss divides.
TOKENS = 144


TRAINERS = {
    "GRPO": (KLXGRPOTrainer, {"num_iterations": 2, "epsilon": 0.9, "scale_rewards": "none"}),
    "GRPO by sequence": (
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
    for trainer, placement, estimator in itertools.product(TRAINERS, ("advantage", "loss", "reward"), KL_ESTIMATORS):
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


@dataclass(frozen=True)
class Promise:
    """
    What the penalty of a combination follows.

    Attributes:
        follows (`str`):
            What the docs say about the first step on a rollout.
        later (`str`):
            What the docs say about further steps on it.
        objective (`torch.Tensor`):
            The objective, as a function of the policy.
        factor (`float`):
            Factor by which the trainer's loss scales its gradient.
    """

    follows: str
    later: str
    objective: torch.Tensor
    factor: float


WHOLE, PART = "KL(policy ‖ reference)", "its per-token part"


AS_MEASURED, AS_IT_IS = "as measured at the rollout", "as it is then"


def promised(case: Case, exact: Exact) -> Promise:
    # By default TRL's GRPO loss is a mean over all tokens. RLOO's baseline leaves out the completion itself, which
    # makes its advantages larger by ROWS / (ROWS - 1).
    factor = 1.0 if case.trainer == "RLOO" else ROWS / TOKENS
    if case.placement == "loss":
        return Promise(PART, AS_IT_IS, exact.token_kl(), factor)
    charge = CHARGES[case.estimator]
    if case.trainer == "GRPO by sequence":
        if case.placement == "reward":
            return Promise(WHOLE, AS_MEASURED, exact.charged_by_mean_ratio("completions", charge), factor)
        over = "nothing" if case.centering == "none" else "tokens"
        follows = f"{WHOLE}, each completion weighted by 1 / length"
        return Promise(follows, AS_MEASURED, exact.charged_by_mean_ratio(over, charge), factor)
    if case.placement == "reward" and case.trainer == "RLOO":
        return Promise(WHOLE, AS_MEASURED, exact.charged_by_sequence(charge), ROWS / (ROWS - 1))
    if case.placement == "reward" or case.discount == 1.0:
        return Promise(WHOLE, AS_MEASURED, exact.charged_to_go(1.0, charge), factor)
    if case.discount > 0.0:
        return Promise(
            f"between {PART} and the whole", AS_MEASURED, exact.charged_to_go(case.discount, charge), factor
        )
    if case.centering == "sequence":
        return Promise(f"{PART}, less the mean of the completion", AS_MEASURED, exact.charged_within(charge), factor)
    return Promise(PART, AS_MEASURED, exact.charged_by_token(charge), factor)


# With discounting, one centering stands for all, because discounting comes before centering.
CASES = [case for case in every_case() if case.discount == 0.0 or case.centering == "batch"]
