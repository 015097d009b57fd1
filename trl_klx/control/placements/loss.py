"""The penalty as a KL term in the loss."""

from typing import Any

import torch

from ...maths.losses import kl_loss_terms
from ...trl_versions import TRL_CORRECTS_BIAS
from ..rollout import Scored
from .base import ALGORITHMS, Batch, ExactKL, Placement, register_placement, weigh_by_sampler


@register_placement("loss", *ALGORITHMS)
class LossPlacement(Placement):
    """A KL term in the loss, with the gradient of KL(policy || reference) at the states of the rollout."""

    estimators = ("k3", "k2", "full")
    in_loss = True

    @classmethod
    def why_not(cls, estimator: str) -> str:
        if estimator == "k1":
            return "the expected gradient of its term is zero"
        return "the expected gradient of its term is not that of KL(policy || reference)"

    @classmethod
    def check(cls, args: Any) -> None:
        # TRL 1.9 has it off by default, RLOO has no such field.
        if getattr(args, "use_bias_correction_kl", True) is not True and TRL_CORRECTS_BIAS:
            raise ValueError(
                f"`use_bias_correction_kl={args.use_bias_correction_kl!r}` has no effect with `kl_placement='loss'`, "
                "whose term always has the gradient of KL(policy || reference). Unset it."
            )

    @property
    def needs_reference_logps(self) -> bool:
        return bool(self.args.kl_estimator != "full")

    def loss_term(self, batch: Batch, policy: Scored, coef: float, exact: ExactKL) -> torch.Tensor:
        reference = Scored(batch.get("klx_ref_logps"), batch.get("klx_ref_hidden"))
        if self.args.kl_estimator == "full":
            term = exact(policy, reference)
        else:
            assert policy.logps is not None and reference.logps is not None
            old_logps = batch.get("old_per_token_logps", batch.get("klx_old_logps"))
            term = kl_loss_terms(policy.logps, old_logps, reference.logps, self.args.kl_estimator)
        return coef * weigh_by_sampler(batch, term)
