"""Drift diagnostics: tell the user, in words, when the KL has left the neighbourhood of its target for long."""

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from ..maths.estimators import KL_UNITS
from .base import is_saved_kl
from .remedies import how_to_lower_kl, how_to_raise_kl
from .setting_rules import SETTING_RULES


_TYPICAL_TARGETS = {
    "sequence": "Typical targets are 5-6 nats per sequence.",
    "token": (
        "Typical targets per token are 0.01-0.03 nats (conservative), 0.05-0.10 (moderate) and 0.10-0.20 (aggressive)."
    ),
}
_SIDES = ("inside", "above", "below")


class DriftMonitor:
    """
    Watches the mean KL of the last batches, and warns once each time it leaves `[target / 2, 2 * target]`.

    It warns again only after the mean has come back inside, or has gone straight to the other side.

    Args:
        target (`float`):
            KL that should be held, in nats.
        window (`int`):
            Number of batches in the mean. There is no verdict before it is full.
        unit (`str`, *optional*, defaults to `"sequence"`):
            Unit of target and KL, `"sequence"` or `"token"`; it decides which typical targets are named.
        controller (`str`, *optional*, defaults to `"fixed"`):
            Name of the controller in use; the advice depends on it.
    """

    def __init__(self, target: float, window: int, unit: str = "sequence", controller: str = "fixed") -> None:
        SETTING_RULES["target"].check("target", target)
        if window < 1:
            raise ValueError(f"`window` must be at least 1, but got {window!r}. Build no monitor to switch it off.")
        if unit not in KL_UNITS:
            raise ValueError(f"Unknown KL unit {unit!r}. Choose one of {', '.join(KL_UNITS)}.")
        self.target = float(target)
        self.window = int(window)
        self.unit = unit
        self.controller = controller
        self.start_over()

    def start_over(self) -> None:
        """Forget the window."""
        self._values: deque[float] = deque(maxlen=self.window)
        self._side = "inside"

    def update(self, kl: float) -> str | None:
        """
        Add the KL of one batch.

        Args:
            kl (`float`):
                Measured KL in nats. A value that is not finite is skipped.

        Returns:
            `str` or `None`: A warning if the mean has just left the range, else `None`.
        """
        kl = float(kl)
        if not math.isfinite(kl):
            return None
        self._values.append(kl)
        if len(self._values) < self.window:
            return None
        mean = math.fsum(self._values) / self.window
        side = "above" if mean > 2.0 * self.target else "below" if mean < 0.5 * self.target else "inside"
        crossed = side != self._side and side != "inside"
        self._side = side
        return self._describe(mean, side) if crossed else None

    def _describe(self, mean: float, side: str) -> str:
        measured = (
            f"The mean KL per {self.unit} over the last {self.window} batches is {mean:.4g} nats, "
            f"{'more than twice' if side == 'above' else 'less than half'} the target of {self.target:.4g}."
        )
        if side == "above":
            advice = f"The penalty does not hold the policy. {how_to_lower_kl(self.controller)}"
        else:
            advice = (
                "The policy is held closer to the reference than asked, or is not learning. "
                f"{how_to_raise_kl(self.controller)}"
            )
        return f"{measured} {advice} {_TYPICAL_TARGETS[self.unit]}"

    def state_dict(self) -> dict[str, Any]:
        """The window, oldest first, and the side the mean was last on, as plain JSON values."""
        return {"values": list(self._values), "side": self._side}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """
        Restore what [`~DriftMonitor.state_dict`] gave. Of a window longer than the present one the newest values are
        kept. Nothing is changed if the state is invalid.

        Args:
            state (`Mapping[str, Any]`):
                The saved state.
        """
        if not isinstance(state, Mapping) or set(state) != {"values", "side"}:
            raise ValueError(f"State of DriftMonitor must have the keys 'values' and 'side', but got {state!r}.")
        values, side = state["values"], state["side"]
        if not isinstance(values, list):
            raise ValueError(f"State of DriftMonitor: 'values' must be a list of numbers, but got {values!r}.")
        for value in values:
            if not is_saved_kl(value):
                raise ValueError(f"State of DriftMonitor: 'values' holds {value!r}, which is not a KL.")
        if side not in _SIDES:
            raise ValueError(f"State of DriftMonitor: 'side' is {side!r}, not one of {', '.join(_SIDES)}.")
        self._values = deque((float(value) for value in values), maxlen=self.window)
        self._side = side
