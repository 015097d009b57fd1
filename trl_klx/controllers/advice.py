"""Advice: what KL control cannot do in a run, said early, once and with numbers."""

import math
from collections import deque
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from .base import BatchMeasurement, is_saved_kl
from .lr_guard import lr_guard_factor
from .remedies import how_to_lower_kl, how_to_raise_kl
from .setting_rules import SETTING_RULES
from .tracking_error import relative_rms_error


class KLAdviser:
    """
    Tells the user early what KL control cannot do here, once each, with numbers and with what to change.

    It speaks of a step that is too long for the target, of a coefficient at its bound, of a policy that does not move,
    of a target that is not reached, and of a KL that stays above its target.

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

    # A move of the KL in one rollout that is too much, as a share of the target, and how many of WINDOW batches show
    # it.
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
        SETTING_RULES["target"].check("target", target)
        self.target, self.controller, self.max_coef, self.guarded = float(target), controller, float(max_coef), guarded
        self._told: list[str] = []
        self.start_over()

    def start_over(self) -> None:
        """Forget the batches, but not what was said about them."""
        self._kls: list[float] = []
        self._moves: deque[float] = deque(maxlen=self.WINDOW)
        self._at_bound = self._still = 0

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
        numbers = (
            f"mean {mean:.3g} nats for a target of {self.target:.3g}, error {error:.0%}, second half of "
            f"{len(self._kls)} batches"
        )
        if abs(mean / self.target - 1.0) <= self.HELD_MEAN and error <= self.HELD_ERROR:
            return f"KL held: {numbers}."
        if mean > self.target * (1.0 + self.HELD_MEAN):
            remedy = how_to_lower_kl(self.controller, self.guarded)
        elif mean < self.target * (1.0 - self.HELD_MEAN):
            remedy = how_to_raise_kl(self.controller)
        else:
            remedy = "Measure it better: a larger batch, or `kl_statistic='full'` if it is 'k3'."
        return f"KL not held: {numbers}. {remedy}"

    def _advise_step(self, batch: BatchMeasurement) -> str | None:
        moves = sorted((abs(move) for move in self._moves), reverse=True)
        if len(moves) < self.LONG_TIMES or moves[self.LONG_TIMES - 1] <= self.LONG * self.target:
            return None
        move, steps = moves[self.LONG_TIMES - 1], max(batch.optimizer_steps, 1.0)
        # At the target, where the KL moves twice as fast as its root.
        factor = lr_guard_factor(move / self.target / 2.0)
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
            f"The policy has had nothing to learn from for {self._still} batches: {why}. The controller waits; the KL "
            f"is {batch.kl:.3g} nats. Check the reward function, and `learning_rate`."
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
            f"{self.target:.3g}, and {when}. {how_to_raise_kl(self.controller)}"
        )

    def _advise_above(self, batch: BatchMeasurement) -> str | None:
        window = self.WINDOW
        if len(self._kls) < max(self.ABOVE_AFTER, 2 * window):
            return None
        before, now = fmean(self._kls[-2 * window : -window]), fmean(self._kls[-window:])
        if now <= self.ABOVE * self.target or now < 0.95 * before:
            return None
        return (
            f"The mean KL of the last {window} batches is {now:.3g} nats, {now / self.target:.2g} times the target, "
            f"and it does not fall. {how_to_lower_kl(self.controller, self.guarded)}"
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
        Restore what [`~KLAdviser.state_dict`] gave. Nothing is changed if the state is invalid.

        Args:
            state (`Mapping[str, Any]`):
                The saved state.
        """
        if not isinstance(state, Mapping) or set(state) != set(self.state_dict()):
            raise ValueError(
                f"State of KLAdviser must have the keys {', '.join(self.state_dict())}, but got {state!r}."
            )
        for key in ("kls", "moves"):
            if not isinstance(state[key], list) or not all(map(is_saved_kl, state[key])):
                raise ValueError(f"State of KLAdviser: {key!r} must be a list of KLs, but got {state[key]!r}.")
        for key in ("at_bound", "still"):
            if type(state[key]) is not int or state[key] < 0:
                raise ValueError(f"State of KLAdviser: {key!r} must be a count, but got {state[key]!r}.")
        if not isinstance(state["told"], list):
            raise ValueError(f"State of KLAdviser: 'told' must be a list, but got {state['told']!r}.")
        self._kls = [float(kl) for kl in state["kls"]]
        self._moves = deque((float(move) for move in state["moves"]), maxlen=self.WINDOW)
        self._at_bound, self._still = int(state["at_bound"]), int(state["still"])
        self._told = [str(kind) for kind in state["told"]]
