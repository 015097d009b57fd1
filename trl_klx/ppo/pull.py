"""What moves a PPO policy along the KL."""

from typing import TYPE_CHECKING

import torch

from ..control.placements import Batch
from ..control.rollout import Pull, Rollout, TokenKL
from ..maths.advantages import masked_moments, whiten_with_moments
from ..maths.gae import compute_gae, shape_rewards


if TYPE_CHECKING:
    from ..trainers.grpo import KLXGRPOTrainer
    from .config import KLXPPOConfig

    # The mixin is only ever combined with that trainer, so it may use its attributes.
    _Host = KLXGRPOTrainer
else:
    _Host = object


class PPOPullMixin(_Host):
    """Estimates what the scores alone would give as advantages, and what one unit of coefficient takes off them."""

    if TYPE_CHECKING:
        args: KLXPPOConfig

    def _klx_pull(self, batch: Batch, rollout: Rollout, kl: TokenKL, mask: torch.Tensor) -> Pull | None:
        scored = rollout.policy or rollout.clean
        if scored is None or scored.values is None:
            return None  # there was no pass over the whole rollout
        args, counted = self.args, mask
        mask = self._klx_generated(batch) & batch["ppo_scorable"].unsqueeze(1)
        rewards = shape_rewards(batch["ppo_scores"], torch.zeros_like(kl.k1), mask, 1.0)
        advantages, _ = compute_gae(rewards, scored.values, mask, args.gamma, args.lam)
        if not self._klx_placement.in_token_rewards:
            return Pull(self._ppo_whiten(advantages, mask))
        # The estimation is linear, so a penalty in the rewards reaches the advantages as a reward without values
        # would. Whitening divides both by the same number.
        paid, expected = (torch.where(counted, part, 0.0) for part in (kl.penalised, kl.expected))
        charged, _ = compute_gae(expected, torch.zeros_like(paid), mask, args.gamma, args.lam)
        charged = charged + paid - expected
        moments = torch.stack([masked_moments(part, mask) for part in (advantages, charged)])
        count, total, _ = self.accelerator.reduce(moments, reduction="sum").unbind(dim=1)
        means = (total / count.clamp(min=1.0)).to(advantages.dtype)
        return Pull(
            *(torch.where(mask, part - mean, 0.0) for part, mean in zip((advantages, charged), means, strict=True))
        )

    def _ppo_whiten(self, values: torch.Tensor, mask: torch.Tensor, shift_mean: bool = True) -> torch.Tensor:
        moments = self.accelerator.reduce(masked_moments(values, mask), reduction="sum")
        return whiten_with_moments(values, mask, moments, shift_mean=shift_mean)
