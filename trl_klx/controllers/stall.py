"""When a run needs a new reference: the KL is used up, and the reward has stopped rising."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from .base import is_saved_kl
from .setting_rules import is_finite_number


REACHED = 0.9  # share of the target from which the KL counts as being there; above the target it does too


def has_stalled(rewards: Sequence[float], kls: Sequence[float], target: float | None = None) -> bool:
    """
    Whether the reward has not risen over these batches, although the KL is at its target.

    - The reward has not risen if its mean over the second half of the batches is not above that over the first half.
      With an odd number of batches, the one in the middle is in neither half.
    - The KL is at its target if its mean over all batches is at least `0.9 * target`. Without a target only the reward
      counts.

    Args:
        rewards (`Sequence[float]`):
            Mean reward of each batch, oldest first. There must be two at least.
        kls (`Sequence[float]`):
            KL of each batch, in the unit of the target.
        target (`float`, *optional*):
            KL to hold, in nats.
    """
    if len(rewards) != len(kls) or len(rewards) < 2:
        raise ValueError(
            f"There must be as many rewards as KLs, and two at least, but got {len(rewards)} and {len(kls)}."
        )
    half = len(rewards) // 2
    risen = fmean(rewards[-half:]) > fmean(rewards[:half])
    return not risen and (target is None or fmean(kls) >= REACHED * target)


class StallMonitor:
    """
    Keeps reward and KL of the last batches against one reference, and says whether the run has stalled.

    Args:
        patience (`int`):
            Number of batches to judge by. There is no verdict before there are as many.
        target (`float`, *optional*):
            KL to hold, in nats.
    """

    def __init__(self, patience: int, target: float | None = None) -> None:
        if patience < 2:
            raise ValueError(f"`patience` must be at least 2, but got {patience!r}.")
        self.patience = int(patience)
        self.target = None if target is None else float(target)
        self._batches: deque[tuple[float, float]] = deque(maxlen=self.patience)

    def update(self, reward: float, kl: float) -> None:
        """Add one batch. One whose reward or KL is not finite is skipped."""
        if math.isfinite(reward) and math.isfinite(kl):
            self._batches.append((float(reward), float(kl)))

    @property
    def stalled(self) -> bool:
        """Whether the last `patience` batches are ones in which the run has stalled, see [`has_stalled`]."""
        if len(self._batches) < self.patience:
            return False
        rewards, kls = zip(*self._batches, strict=True)
        return has_stalled(rewards, kls, self.target)

    def clear(self) -> None:
        """Begin again: another reference makes other KLs."""
        self._batches.clear()

    def state_dict(self) -> dict[str, Any]:
        """The batches, oldest first, as plain JSON values."""
        return {"rewards": [reward for reward, _ in self._batches], "kls": [kl for _, kl in self._batches]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """
        Restore what [`~StallMonitor.state_dict`] gave. Of more batches than the present patience, the newest are kept.
        Nothing is changed if the state is invalid.

        Args:
            state (`Mapping[str, Any]`):
                The saved state.
        """
        if not isinstance(state, Mapping) or set(state) != {"rewards", "kls"}:
            raise ValueError(f"State of StallMonitor must have the keys 'rewards' and 'kls', but got {state!r}.")
        rewards, kls = state["rewards"], state["kls"]
        if not isinstance(rewards, list) or not all(map(is_finite_number, rewards)):
            raise ValueError(f"State of StallMonitor: 'rewards' must be a list of numbers, but got {rewards!r}.")
        if not isinstance(kls, list) or not all(map(is_saved_kl, kls)) or len(kls) != len(rewards):
            raise ValueError(f"State of StallMonitor: 'kls' must be a KL for each reward, but got {kls!r}.")
        pairs = ((float(reward), float(kl)) for reward, kl in zip(rewards, kls, strict=True))
        self._batches = deque(pairs, maxlen=self.patience)
