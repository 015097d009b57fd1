"""What moves the policy along the KL, for controllers that want to see it."""

import torch

from ..control.placements import Batch
from ..control.rollout import Pull, Rollout, TokenKL
from ..maths.advantages import split_group_advantages
from .forward_passes import ForwardPassMixin


class PullMixin(ForwardPassMixin):
    """Reads off a batch which advantages the rewards gave, and what one unit of coefficient takes off them."""

    def _klx_pull(self, batch: Batch, rollout: Rollout, kl: TokenKL, mask: torch.Tensor) -> Pull | None:
        """The pull of a measured batch or micro-batch of training; `None` if it cannot be told from the batch."""
        advantages: torch.Tensor = batch["advantages"]
        if advantages.dim() > 1:
            return None
        if not self._klx_placement.asks_at_generation:
            return Pull(advantages)
        if rollout.charged_kls is None or rollout.rewards is None:
            return None
        # The penalty is already in the advantages. A group may lie on several processes.
        mine = torch.stack([advantages, rollout.charged_kls.to(advantages.dtype)], dim=1)
        every, kls = self.accelerator.gather(mine).unbind(dim=1)
        rewards = self._klx_given_rewards(rollout.rewards)
        assert self.num_generations is not None  # TRL has filled it in
        parts = split_group_advantages(every, rewards, kls, rollout.coef, self.num_generations)
        first = self.accelerator.process_index * len(mine)
        return Pull(*(part[first : first + len(mine)] for part in parts))

    def _klx_given_rewards(self, rewards: torch.Tensor) -> torch.Tensor:
        """The reward of each completion without the penalty, given those of all reward functions and processes."""
        raise NotImplementedError


def sum_rewards(rewards: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The weighted sum over reward functions, `(N,)`; NaN for a completion that none of them could score."""
    total = (rewards * weights.to(rewards.device)).nansum(dim=1)
    return torch.where(rewards.isnan().all(dim=1), torch.nan, total)
