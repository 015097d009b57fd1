"""Optimizer steps between two measurements, and their learning rates."""

import math
from collections.abc import Mapping
from typing import Any


class StepClock:
    """
    Counts optimizer steps and adds up their learning rates, until they are taken. `lr_factor` is what `kl_lr_guard`
    scaled the last learning rate by.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._rates = 0.0
        self.lr_factor = 1.0

    def tick(self, learning_rate: float, lr_factor: float = 1.0) -> None:
        """Count one optimizer step, made at `learning_rate`."""
        self._steps += 1
        self._rates += learning_rate
        self.lr_factor = lr_factor

    def forget(self, steps: int) -> None:
        """
        Uncount steps that turned out not to have been taken. Which of the counted ones they were is not known, so that
        the others keep the mean learning rate of all.
        """
        steps = min(steps, self._steps)
        if steps:
            self._rates *= (self._steps - steps) / self._steps
            self._steps -= steps

    def pop(self) -> tuple[float, float | None]:
        """The steps since this was last called, and their mean learning rate, `None` if there were none."""
        steps, rates = self._steps, self._rates
        self._steps, self._rates = 0, 0.0
        return float(steps), rates / steps if steps else None

    def state_dict(self) -> dict[str, Any]:
        """The steps that were not yet taken, as plain JSON values."""
        return {"steps": self._steps, "rates": self._rates, "lr_factor": self.lr_factor}

    def load_state_dict(self, state: Mapping[str, Any] | None, source: str) -> None:
        """Restore what [`~StepClock.state_dict`] returned; `source` is named if it is not valid."""
        state = StepClock().state_dict() if state is None else state
        state = {"lr_factor": 1.0, **state} if isinstance(state, Mapping) else {}
        steps, rates, factor = (state.get(name) for name in ("steps", "rates", "lr_factor"))
        numbers = all(type(number) in (int, float) and math.isfinite(number or 0.0) for number in (rates, factor))
        if not (type(steps) is int and steps >= 0 and numbers):
            raise ValueError(f"Cannot resume: the optimizer steps in {source!r} are not valid, got {state!r}.")
        self._steps, self._rates, self.lr_factor = steps, float(rates or 0.0), float(factor or 0.0)
