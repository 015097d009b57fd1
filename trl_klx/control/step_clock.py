"""Optimizer steps between two measurements, and their learning rates."""

import math
from collections.abc import Mapping
from typing import Any


class StepClock:
    """Counts optimizer steps and adds up their learning rates, until they are taken."""

    def __init__(self) -> None:
        self._steps = 0
        self._rates = 0.0

    def tick(self, learning_rate: float) -> None:
        """Count one optimizer step."""
        self._steps += 1
        self._rates += learning_rate

    def pop(self) -> tuple[float, float | None]:
        """The steps since this was last called, and their mean learning rate, `None` if there were none."""
        steps, rates = self._steps, self._rates
        self._steps, self._rates = 0, 0.0
        return float(steps), rates / steps if steps else None

    def state_dict(self) -> dict[str, Any]:
        """The steps that were not yet taken, as plain JSON values."""
        return {"steps": self._steps, "rates": self._rates}

    def load_state_dict(self, state: Mapping[str, Any] | None, source: str) -> None:
        """Restore what [`~StepClock.state_dict`] returned; `source` is named if it is not valid."""
        state = {"steps": 0, "rates": 0.0} if state is None else state
        steps, rates = (state.get(name) if isinstance(state, Mapping) else None for name in ("steps", "rates"))
        sound = type(steps) is int and steps >= 0 and type(rates) in (int, float) and math.isfinite(rates or 0.0)
        if not sound:
            raise ValueError(f"Cannot resume: the optimizer steps in {source!r} are not valid, got {state!r}.")
        self._steps, self._rates = int(steps or 0), float(rates or 0.0)
