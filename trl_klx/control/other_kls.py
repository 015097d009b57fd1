"""The other two KLs of a run: to the sampler that drew the tokens, and to the policy that the rollout began with."""

from collections.abc import Callable

import torch

from ..maths.estimators import MAX_LOG_RATIO, estimate_kl
from ..maths.totals import kl_totals
from .metrics import Sums


@torch.no_grad()
def add_sampler_kl(
    window: Sums, sampler: torch.Tensor, policy: torch.Tensor, mask: torch.Tensor, unit: str
) -> torch.Tensor:
    """
    Add KL(sampler || policy) to the window, as `k3` and `k1`, and the effective sample size of the tokens.

    Args:
        window ([`Sums`]):
            Sums that are logged.
        sampler (`torch.Tensor` of shape `(B, T)`):
            Log-probs of the tokens under the sampler; NaN where it has none.
        policy (`torch.Tensor` of shape `(B, T)`):
            Log-probs of the tokens under the policy.
        mask (`torch.Tensor` of shape `(B, T)`):
            Tokens that count.
        unit (`str`):
            `"sequence"` or `"token"`.

    Returns:
        `torch.Tensor`: 0-dim, the largest difference of log-probs of one token.
    """
    mask = mask & ~sampler.isnan()
    for name, kind in (("klx/sampler_kl", "k3"), ("klx/sampler_kl_k1", "k1")):
        total, tokens, sequences = kl_totals(estimate_kl(sampler, policy, kind), mask)
        window.add(name, total, sequences if unit == "sequence" else tokens)
    weights = torch.where(mask, (policy - sampler).clamp(max=MAX_LOG_RATIO).exp(), 0.0)
    window.add("klx/sampler_ess", weights.sum(), weights.square().sum(), mask.sum())
    return torch.where(mask, (policy - sampler).abs(), 0.0).amax()


@torch.no_grad()
def update_kl_sums(
    old_logps: torch.Tensor, logps: torch.Tensor, mask: torch.Tensor, unit: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    KL(policy of the rollout || policy) by `k3`, on the tokens that the rollout's policy sampled: its sum, and the
    number of sequences or tokens to divide it by.
    """
    total, tokens, sequences = kl_totals(estimate_kl(old_logps, logps.detach(), "k3"), mask)
    return total, sequences if unit == "sequence" else tokens


def check_update_target(target: float | None, dropout: bool) -> None:
    """Refuse `kl_update_target` for a policy with dropout, because no two of its passes agree."""
    if target is not None and dropout:
        raise ValueError(
            f"`kl_update_target={target!r}` cannot be used with dropout in the policy, which would be taken for a "
            "move. Set `disable_dropout=True` and `lora_dropout=0.0`, or unset it."
        )


class UpdateLimit:
    """
    Decides when a rollout has moved the policy far enough.

    Args:
        target (`float`, *optional*):
            KL to the rollout's policy, in nats, beyond which no more steps are taken. If unset, there is no limit.
    """

    def __init__(self, target: float | None):
        self.target = target
        self.passed = False
        self._sums = Sums()

    def begin(self) -> None:
        """Begin a rollout."""
        self.passed = False

    def add(self, total: torch.Tensor, count: torch.Tensor) -> None:
        """Add a micro-batch, see [`update_kl_sums`]."""
        if self.target is not None:
            self._sums.add("kl", total, count)

    def passes(self, reduce: Callable[[torch.Tensor], torch.Tensor]) -> bool:
        """
        Whether the optimizer step at hand is the first that must not be taken. Every process must call this, after the
        micro-batches of the step.
        """
        if self.passed or self.target is None:
            return False
        total, count = self._sums.pop(reduce)["kl"]
        self.passed = total > self.target * count
        return self.passed
