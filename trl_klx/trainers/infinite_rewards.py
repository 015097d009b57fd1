"""Infinite rewards, which would make every weight NaN within one step, are left out."""

import warnings
from collections.abc import MutableMapping
from typing import Any

import torch

from ..control.metrics import Sums
from ..control.rollout import Rollout
from .forward_passes import ForwardPassMixin


# Name of their number among the sums of a rollout or of the logging window.
INFINITE = "infinite_rewards"


class InfiniteRewardsMixin(ForwardPassMixin):
    """Treats an infinite reward as if the reward function had returned `None`. TRL's own trainers differ in it."""

    _klx_rollout: Rollout | None
    _klx_window: dict[str, Sums]

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        parent: Any = super()
        rewards: torch.Tensor = parent._calculate_rewards(*args, **kwargs)  # of all processes
        if self._klx_rollout is None:
            return rewards  # KL control is off
        infinite = rewards.isinf()
        sums = self._klx_window[self._klx_mode] if self.kl_control is None else self._klx_rollout.sums
        sums.add(INFINITE, infinite.sum())
        return rewards.masked_fill(infinite, torch.nan)


def warn_of_infinite_rewards(sums: MutableMapping[str, list[float]]) -> None:
    """Warn if there were any, and take their number from the sums. Called where the sums are read anyway."""
    if sums.pop(INFINITE, [0.0])[0] > 0:
        warnings.warn("Infinite rewards are ignored, as if the reward function had returned None.", stacklevel=2)
