"""Drift diagnostics: tell the user, in words, when the KL has left the neighbourhood of its target for long."""

import math
from collections import deque
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from ..maths.estimators import KL_UNITS
from .hold import lr_guard_factor
from .rules import BatchMeasurement
from .tracking_error import relative_rms_error


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
    """

    def __init__(self, target: float, window: int, unit: str = "sequence") -> None:
        if not (math.isfinite(target) and target > 0):
            raise ValueError(f"`target` must be a positive finite number, but got {target!r}. Set the KL to hold.")
        if window < 1:
            raise ValueError(f"`window` must be at least 1, but got {window!r}. Build no monitor to switch it off.")
        if unit not in KL_UNITS:
            raise ValueError(f"Unknown KL unit {unit!r}. Choose one of {', '.join(KL_UNITS)}.")
        self.target = float(target)
        self.window = int(window)
        self.unit = unit
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
            advice = (
                "The policy drifts from the reference faster than the penalty holds it. Raise `kl_penalty_coef`, lower "
                '`learning_rate`, or let the controller react faster (a shorter `kl_horizon`, or `kl_controller="pid"`).'
            )
        else:
            advice = (
                "The policy is held closer to the reference than asked, or is not learning. Lower `kl_penalty_coef` "
                "(and `kl_coef_min` if the coefficient is already there), or, if the task is not being learned, raise "
                "`kl_target` or `learning_rate`."
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
            if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
                raise ValueError(f"State of DriftMonitor: 'values' holds {value!r}, which is not a finite number.")
        if side not in _SIDES:
            raise ValueError(f"State of DriftMonitor: 'side' is {side!r}, not one of {', '.join(_SIDES)}.")
        self._values = deque((float(value) for value in values), maxlen=self.window)
        self._side = side


class KLAdviser:
    """
    Tells the user early what KL control cannot do here, once each, with numbers and with what to change.

    It speaks of a step that is too long for the target, of a coefficient at its bound, of a policy that does not move, of
    a target that is not reached, and of a KL that stays above its target.

    Args:
        target (`float`):
            KL to hold, in nats.
        controller (`str`):
            Name of the controller in use. The advice depends on it.
        max_coef (`float`, *optional*, defaults to `10.0`):
            Upper bound of the coefficient.
        guarded (`bool`, *optional*, defaults to `False`):
            Whether `kl_lr_guard` is on.
    """

    # A move of the KL in one rollout that is too much, as a share of the target, and how many of WINDOW batches show it.
    LONG, LONG_TIMES = 0.5, 2
    WINDOW = 10
    # A KL below this share of the target has not moved.
    STILL = 1e-6
    # Distance to the target that counts as not arrived, and the batches that are too many for the rest.
    SHORT, TOO_MANY = 0.7, 200
    # A mean above this share of the target, after this many batches, is not held.
    ABOVE, ABOVE_AFTER = 1.5, 20
    # Mean and error up to which a run counts as held.
    HELD_MEAN, HELD_ERROR = 0.1, 0.2

    def __init__(self, target: float, controller: str, max_coef: float = 10.0, guarded: bool = False) -> None:
        if not (math.isfinite(target) and target > 0):
            raise ValueError(f"`target` must be a positive finite number, but got {target!r}. Set the KL to hold.")
        self.target, self.controller, self.max_coef, self.guarded = float(target), controller, float(max_coef), guarded
        self._kls: list[float] = []
        self._moves: deque[float] = deque(maxlen=self.WINDOW)
        self._at_bound = self._still = 0
        self._told: list[str] = []

    def update(self, batch: BatchMeasurement, coef: float) -> str | None:
        """
        Add one batch.

        Args:
            batch ([`BatchMeasurement`]):
                What was measured.
            coef (`float`):
                The coefficient that was applied to it.

        Returns:
            `str` or `None`: Advice that was not given before, else `None`.
        """
        if not math.isfinite(batch.kl):
            return None
        if self._kls and batch.optimizer_steps > 0:
            self._moves.append(batch.kl - self._kls[-1])
        self._kls.append(float(batch.kl))
        self._still = self._still + 1 if batch.kl < self.STILL * self.target or batch.drive == 0.0 else 0
        rising = batch.kl > 1.1 * self.target and batch.kl >= min(self._kls[-5:])
        self._at_bound = self._at_bound + 1 if coef >= 0.999 * self.max_coef and rising else 0
        for kind, advise in (
            ("step", self._advise_step),
            ("bound", self._advise_bound),
            ("still", self._advise_still),
            ("short", self._advise_short),
            ("above", self._advise_above),
        ):
            text = None if kind in self._told else advise(batch)
            if text is not None:
                self._told.append(kind)
                return text
        return None

    def summary(self) -> str:
        """One line on the second half of the run: held, or by how much not and what to change."""
        if len(self._kls) < 2:
            return "KL control: too few batches to say whether the target was held."
        tail = self._kls[len(self._kls) // 2 :]
        mean, error = fmean(tail), relative_rms_error(tail, self.target)
        numbers = f"mean {mean:.3g} nats for a target of {self.target:.3g}, error {error:.0%}, second half of {len(self._kls)} batches"
        if abs(mean / self.target - 1.0) <= self.HELD_MEAN and error <= self.HELD_ERROR:
            return f"KL held: {numbers}."
        if mean > self.target * (1.0 + self.HELD_MEAN):
            remedy = self._lower()
        elif mean < self.target * (1.0 - self.HELD_MEAN):
            remedy = self._raise()
        else:
            remedy = "Measure it better: a larger batch, or `kl_statistic='full'`."
        return f"KL not held: {numbers}. {remedy}"

    def _lower(self) -> str:
        if self.controller != "hold":
            return f"`kl_controller={self.controller!r}` did not hold it; `kl_controller='hold'` needs no tuning."
        guard = "" if self.guarded else ", or set `kl_lr_guard=True`"
        return f"Lower `learning_rate` or the optimizer steps per rollout{guard}."

    def _raise(self) -> str:
        if self.controller == "fixed":
            return "Lower `kl_penalty_coef`, or set `kl_controller='hold'`."
        if self.controller != "hold":
            return "Lower `kl_penalty_coef` and `kl_coef_min`, or set `kl_controller='hold'`."
        return "Train longer, raise `learning_rate`, or lower `kl_target` to what the reward asks for."

    def _advise_step(self, batch: BatchMeasurement) -> str | None:
        moves = sorted((abs(move) for move in self._moves), reverse=True)
        if len(moves) < self.LONG_TIMES or moves[self.LONG_TIMES - 1] <= self.LONG * self.target:
            return None
        move, steps = moves[self.LONG_TIMES - 1], max(batch.optimizer_steps, 1.0)
        # At the target, where the KL moves twice as fast as its root.
        factor = lr_guard_factor(move / self.target / 2.0 / steps, steps)
        rate = (
            f"{factor:.2g} times what it is"
            if not batch.learning_rate
            else f"about {factor * batch.learning_rate:.1g}"
        )
        guard = "" if self.guarded else " or `kl_lr_guard=True`"
        return (
            f"The {steps:.0f} optimizer steps of one rollout move the KL by {move:.3g} nats; the target is "
            f"{self.target:.3g}. No coefficient can hold that. Set `learning_rate` to {rate}{guard}."
        )

    def _advise_bound(self, batch: BatchMeasurement) -> str | None:
        if self._at_bound < 5:
            return None
        return (
            f"The coefficient has been at its bound of {self.max_coef:g} for {self._at_bound} batches, and the KL of "
            f"{batch.kl:.3g} nats does not fall to its target of {self.target:.3g}. Raise `kl_coef_max`, or lower "
            "`learning_rate`."
        )

    def _advise_still(self, batch: BatchMeasurement) -> str | None:
        if self._still < self.WINDOW:
            return None
        why = (
            "the rewards of each group are all equal"
            if batch.drive == 0.0 and batch.kl > 0
            else "the learning rate is 0 or the rewards do not differ"
        )
        return (
            f"The policy has had nothing to learn from for {self._still} batches: {why}. The controller waits; the KL is "
            f"{batch.kl:.3g} nats. Check the reward function, and `learning_rate`."
        )

    def _advise_short(self, batch: BatchMeasurement) -> str | None:
        window = self.WINDOW
        if len(self._kls) < 2 * window or self._still:
            return None
        before, now = (
            fmean(math.sqrt(max(kl, 0.0) / self.target) for kl in part)
            for part in (self._kls[-2 * window : -window], self._kls[-window:])
        )
        pace = (now - before) / window
        if now >= self.SHORT or (1.0 - now) <= self.TOO_MANY * pace:
            return None
        when = (
            f"at this pace it takes {(1.0 - now) / pace:.0f} more batches" if pace > 1e-4 else "it has stopped rising"
        )
        return (
            f"The KL is {fmean(self._kls[-window:]):.3g} nats after {len(self._kls)} batches, the target is "
            f"{self.target:.3g}, and {when}. {self._raise()}"
        )

    def _advise_above(self, batch: BatchMeasurement) -> str | None:
        window = self.WINDOW
        if len(self._kls) < max(self.ABOVE_AFTER, 2 * window):
            return None
        before, now = fmean(self._kls[-2 * window : -window]), fmean(self._kls[-window:])
        if now <= self.ABOVE * self.target or now < 0.95 * before:
            return None
        return (
            f"The mean KL of the last {window} batches is {now:.3g} nats, {now / self.target:.2g} times the target, and it "
            f"does not fall. {self._lower()}"
        )

    def state_dict(self) -> dict[str, Any]:
        """What was seen and said, as plain JSON values."""
        return {
            "kls": list(self._kls),
            "moves": list(self._moves),
            "at_bound": self._at_bound,
            "still": self._still,
            "told": list(self._told),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """
        Restore what [`~KLAdviser.state_dict`] gave.

        Args:
            state (`Mapping[str, Any]`):
                The saved state.
        """
        if not isinstance(state, Mapping) or set(state) != set(self.state_dict()):
            raise ValueError(
                f"State of KLAdviser must have the keys {', '.join(self.state_dict())}, but got {state!r}."
            )
        self._kls = [float(kl) for kl in state["kls"]]
        self._moves = deque((float(move) for move in state["moves"]), maxlen=self.WINDOW)
        self._at_bound, self._still = int(state["at_bound"]), int(state["still"])
        self._told = [str(kind) for kind in state["told"]]
