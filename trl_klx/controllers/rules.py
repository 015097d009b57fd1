"""
Controllers: measured KL in, next coefficient out.

A controller is a small object of plain floats. Its changing part is one frozen record that each update replaces, so
saving it is dumping that record. Users add their own with [`register_kl_controller`], or from a package through the
entry-point group `trl_klx.kl_controllers`.
"""

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar


SETTINGS = ("target", "horizon", "min_coef", "max_coef")


def _is_finite_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check_positive(name: str, value: object, remedy: str) -> None:
    if not (_is_finite_number(value) and value > 0):  # type: ignore[operator]
        raise ValueError(f"`{name}` must be a positive finite number, but got {value!r}. {remedy}")


def _exp(exponent: float) -> float:
    # `math.exp` raises above 709. Every result is bounded afterwards, so the limit is never seen.
    return math.exp(min(max(exponent, -700.0), 700.0))


@dataclass(frozen=True)
class BatchMeasurement:
    """
    What a controller may see of one generation batch. Only the first two are always known.

    Attributes:
        kl (`float`):
            Measured KL in nats, in the unit of the target.
        completions (`float`):
            Number of completions in the batch, over all processes.
        optimizer_steps (`float`):
            Optimizer steps since the batch measured before. 0 if the weights are still the same.
        learning_rate (`float`, *optional*):
            Mean learning rate of those steps.
        drive (`float`, *optional*):
            Mean over completions of `sum_t A_t * k1_t`: the pull of the reward along the KL. `A` is the centered advantage
            without the penalty. If it is the same for all tokens of a completion, this is the covariance of `A` and the
            completion's KL. Exactly 0 if no reward differs from another.
        drag (`float`, *optional*):
            Mean over completions of `sum_t k1_t^2`: the pull of one unit of coefficient.
        standard_error (`float`, *optional*):
            Standard error of `kl` over the completions.
        drive_error (`float`, *optional*):
            Standard error of `drive` over the completions.
    """

    kl: float
    completions: float
    optimizer_steps: float = 1.0
    learning_rate: float | None = None
    drive: float | None = None
    drag: float | None = None
    standard_error: float | None = None
    drive_error: float | None = None


@dataclass(frozen=True)
class KLControllerState:
    """What changes from update to update. A controller with more to remember extends it with defaulted fields."""

    value: float


class KLController(ABC):
    r"""
    Base of all controllers. A subclass defines `_next(kl, n_steps)`, which returns the next coefficient.

    A measured KL that is NaN, infinite or negative never reaches `_next`: the state stays as it is, and the first such
    value warns. The coefficient is kept in `[min_coef, max_coef]` for every class that lists them in `uses`.

    Class attributes:

    - `needs_target` (`bool`): whether construction without a target is refused.
    - `multiplicative` (`bool`): whether the rule scales the coefficient, and so can never leave 0.
    - `uses` (`frozenset[str]`): which of `target`, `horizon`, `min_coef` and `max_coef` the rule reads.
    - `formula` (`str`): the rule, in one line.
    - `state_class` (`type`): the record behind `state_dict`, [`KLControllerState`] or an extension of it.

    Args:
        init_coef (`float`):
            First coefficient (`kl_penalty_coef` in a config).
        target (`float`, *optional*):
            KL to hold, in nats (`kl_target`).
        horizon (`float`, *optional*, defaults to `10000`):
            Number of episodes over which the rule acts (`kl_horizon`).
        min_coef (`float`, *optional*, defaults to `1e-4`):
            Lower bound of the coefficient (`kl_coef_min`).
        max_coef (`float`, *optional*, defaults to `10.0`):
            Upper bound of the coefficient (`kl_coef_max`).
    """

    needs_target: ClassVar[bool] = False
    multiplicative: ClassVar[bool] = True
    uses: ClassVar[frozenset[str]] = frozenset(SETTINGS)
    formula: ClassVar[str] = "defined by `_next`"
    state_class: ClassVar[type[KLControllerState]] = KLControllerState

    def __init__(
        self,
        init_coef: float,
        target: float | None = None,
        horizon: float = 10000,
        min_coef: float = 1e-4,
        max_coef: float = 10.0,
    ) -> None:
        if not _is_finite_number(init_coef) or init_coef < 0:
            raise ValueError(
                f"`init_coef` (`kl_penalty_coef`) must be a finite number >= 0, but got {init_coef!r}. "
                "Set a small positive value such as 0.05."
            )
        if target is None and self.needs_target:
            raise ValueError(
                f"{type(self).__name__} needs a `target`, but got {target!r}. Set `target` (`kl_target`) to the KL to "
                "hold, e.g. 6.0 nats per sequence, or use the 'fixed' controller."
            )
        if target is not None:
            _check_positive("target", target, "Set `target` (`kl_target`) to the KL to hold, in nats.")
        _check_positive("horizon", horizon, "Set `horizon` (`kl_horizon`) to a number of episodes such as 10000.")
        _check_positive("min_coef", min_coef, "Set `min_coef` (`kl_coef_min`) to a small value such as 1e-4.")
        _check_positive("max_coef", max_coef, "Set `max_coef` (`kl_coef_max`) to a large value such as 10.0.")
        if max_coef < min_coef:
            raise ValueError(
                f"`max_coef` ({max_coef!r}) is smaller than `min_coef` ({min_coef!r}). Swap or widen the bounds "
                "(`kl_coef_min`, `kl_coef_max`)."
            )
        if init_coef == 0 and self.multiplicative:
            raise ValueError(
                f"`init_coef` (`kl_penalty_coef`) is {init_coef!r}, but a multiplicative rule cannot leave 0. Set a "
                f"value in [{min_coef}, {max_coef}], or use the 'fixed' controller."
            )
        if ("min_coef" in self.uses and init_coef < min_coef) or ("max_coef" in self.uses and init_coef > max_coef):
            raise ValueError(
                f"`init_coef` (`kl_penalty_coef`) is {init_coef!r}, outside of [{min_coef}, {max_coef}]. Set a value "
                "inside, or move `min_coef` and `max_coef` (`kl_coef_min`, `kl_coef_max`)."
            )
        self.init_coef = float(init_coef)
        self.target = None if target is None else float(target)
        self.horizon = float(horizon)
        self.min_coef = float(min_coef)
        self.max_coef = float(max_coef)
        self._state = self.state_class(value=self.init_coef)
        self._warned = False

    @property
    def value(self) -> float:
        """The coefficient to apply now."""
        return self._state.value

    @property
    def saturated(self) -> bool:
        """Whether the coefficient is at a bound, so that the controller cannot do more in that direction."""
        at_min = "min_coef" in self.uses and self.value <= self.min_coef
        at_max = "max_coef" in self.uses and self.value >= self.max_coef
        return at_min or at_max

    def update(self, kl: float, n_steps: float) -> float:
        """
        Take the KL measured on one generation batch and return the coefficient for the next.

        Args:
            kl (`float`):
                Measured KL in nats, in the unit of the target.
            n_steps (`float`):
                Number of episodes in the batch, over all processes.

        Returns:
            `float`: The new value.
        """
        kl, n_steps = float(kl), float(n_steps)
        if not math.isfinite(n_steps) or n_steps < 0:
            raise ValueError(f"`n_steps` must be a finite number >= 0, but got {n_steps!r}.")
        if not math.isfinite(kl) or kl < 0:
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"{type(self).__name__} got a KL of {kl!r}; a KL is finite and not negative. The coefficient stays "
                    f"at {self.value}. Further such values are skipped without a warning.",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return self.value
        before = self._state
        value = float(self._next(kl, n_steps))
        bounded = self._bound(value)
        if not math.isfinite(bounded) or not self._is_coefficient(bounded):
            self._state = before
            raise ValueError(
                f"{type(self).__name__}._next({kl!r}, {n_steps!r}) returned {value!r}, but a coefficient must be finite and "
                f"{self._coefficients}."
            )
        self._state = replace(self._state, value=bounded)
        return self.value

    def observe(self, batch: BatchMeasurement) -> float:
        """
        Take all that was measured on one generation batch. A controller that needs no more than the KL leaves this as it
        is and gets [`~KLController.update`].

        Args:
            batch ([`BatchMeasurement`]):
                What was measured.

        Returns:
            `float`: The new value.
        """
        return self.update(batch.kl, batch.completions)

    @abstractmethod
    def _next(self, kl: float, n_steps: float) -> float:
        """
        The next coefficient, before bounds. `kl` is finite and >= 0. A rule that remembers more than the coefficient
        replaces `self._state` here; it need not set `value`.
        """

    def _is_coefficient(self, value: float) -> bool:
        return value > 0 or (value == 0 and not self.multiplicative)

    @property
    def _coefficients(self) -> str:
        return "positive" if self.multiplicative else ">= 0"

    def _bound(self, value: float) -> float:
        if "min_coef" in self.uses:
            value = max(value, self.min_coef)
        if "max_coef" in self.uses:
            value = min(value, self.max_coef)
        return value

    def state_dict(self) -> dict[str, Any]:
        """The changing part as plain JSON values. Settings are not in it: they come from the config."""
        return asdict(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """
        Restore what [`~KLController.state_dict`] gave. A coefficient outside of the present bounds is moved to the
        nearest one. Nothing is changed if the state is invalid.

        Args:
            state (`Mapping[str, Any]`):
                The saved state.
        """
        expected = {field.name: field.default for field in fields(self.state_class)}
        if not isinstance(state, Mapping):
            raise ValueError(f"State of {type(self).__name__} must be a dict, but got {state!r}.")
        for key in state:
            if key not in expected:
                raise ValueError(
                    f"State of {type(self).__name__} has an unknown key {key!r} with value {state[key]!r}; the keys are "
                    f"{', '.join(expected)}. Was it saved by another controller?"
                )
        for key, default in expected.items():
            if key not in state:
                raise ValueError(f"State of {type(self).__name__} lacks the key {key!r}: got {dict(state)!r}.")
            if not _is_finite_number(state[key]) and not (state[key] is None and default is None):
                raise ValueError(f"State of {type(self).__name__}: {key!r} is {state[key]!r}, not a finite number.")
        value = state["value"]
        if not self._is_coefficient(value):
            raise ValueError(
                f"State of {type(self).__name__}: 'value' is {value!r}, but a coefficient must be {self._coefficients}."
            )
        numbers = {key: None if state[key] is None else float(state[key]) for key in expected}
        self._state = self.state_class(**{**numbers, "value": self._bound(float(value))})  # type: ignore[arg-type]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(value={self.value}, target={self.target})"


class FixedKLController(KLController):
    """
    A constant coefficient, for determinism and debugging. 0.0 is allowed.

    Args:
        init_coef (`float`):
            The coefficient.
        **kwargs:
            The other settings of [`KLController`]; they have no effect on a constant.
    """

    multiplicative = False
    uses = frozenset()
    formula = "coef"

    def _next(self, kl: float, n_steps: float) -> float:
        return self.value


class AdaptiveKLController(KLController):
    r"""
    `coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * n_steps / horizon`, then the bounds.

    Section 2.2 of [Ziegler et al. (2019)](https://huggingface.co/papers/1909.08593).

    Args:
        init_coef (`float`):
            First coefficient.
        clip (`float`, *optional*, defaults to `0.2`):
            Limit of the relative error, so that one odd batch cannot move the coefficient far.
        **kwargs:
            The other settings of [`KLController`]; `target` is required.
    """

    needs_target = True
    formula = "coef * (1 + clip(kl / target - 1, -clip, clip) * n_steps / horizon)"

    def __init__(self, init_coef: float, *, clip: float = 0.2, **kwargs: Any) -> None:
        super().__init__(init_coef, **kwargs)
        _check_positive("clip", clip, "Set `clip` to a value such as 0.2.")
        self.clip = float(clip)

    def _next(self, kl: float, n_steps: float) -> float:
        assert self.target is not None
        error = min(max(kl / self.target - 1.0, -self.clip), self.clip)
        # With a batch larger than `horizon / clip` the factor may be negative; the lower bound catches that.
        return self.value * (1.0 + error * n_steps / self.horizon)


class ExponentialKLController(KLController):
    r"""
    `coef *= exp(rate * (kl - target))`, then the bounds.

    The error is absolute, in nats, so a good `rate` depends on the unit of the target.

    Args:
        init_coef (`float`):
            First coefficient.
        rate (`float`, *optional*, defaults to `0.1`):
            Change of `log coef` per nat of error and update.
        **kwargs:
            The other settings of [`KLController`]; `target` is required.
    """

    needs_target = True
    uses = frozenset({"target", "min_coef", "max_coef"})
    formula = "coef * exp(rate * (kl - target))"

    def __init__(self, init_coef: float, *, rate: float = 0.1, **kwargs: Any) -> None:
        super().__init__(init_coef, **kwargs)
        _check_positive("rate", rate, "Set `rate` to a value such as 0.1.")
        self.rate = float(rate)

    def _next(self, kl: float, n_steps: float) -> float:
        assert self.target is not None
        return self.value * _exp(self.rate * (kl - self.target))


@dataclass(frozen=True)
class PIDKLControllerState(KLControllerState):
    """
    The coefficient, and what the rule knows of the policy's way: its distance (`None` before the first update) and
    speed, the greatest speed it has shown, how far the measurements scatter around the prediction (a guess at first),
    the sum of errors, and the pace at which the coefficient that holds the policy has been changing.
    """

    distance: float | None = None
    speed: float = 0.0
    top_speed: float = 0.0
    scatter: float = 0.04
    integral: float = 0.0
    trend: float = 0.0


class PIDKLController(KLController):
    r"""
    Steers the speed at which the policy nears the target, and then holds it there.

    Near its reference, the KL of a policy grows with the square of the way it has gone. So the rule looks at the distance
    `x = sqrt(kl / target)`, which is 1 at the target, and at its speed `v` per update, both smoothed by a filter that
    predicts (the measured KL of a batch is noisy). The speed it wants falls with the way `w = 1 - x` that is left, as
    `kp / kd * w * (1 + 4 / 3 * max(w, 0))`, and is at most half of the greatest speed the policy has shown: a policy that
    is slowed down early tells how strong the penalty must be before it arrives, where momentum would carry it past the
    target. With `e = gain * (v - wanted speed)`, limited to `±error_clip`:

    `log coef = log init_coef + integral + e`, then the bounds; `integral += ki * (1 + 3 * abs(w)) * e + trend`, where
    `3 * abs(w)` is left out while the policy is on its way and too slow

    As the policy learns, the coefficient that holds it changes, and a sum of errors alone would lag behind: `trend` is a
    slow mean of `2 * ki * e` near the target.

    `gain` is `kd`, or less where the policy is fast or the measurements scatter, so that neither leads to swings: that is
    why no gain needs to be tuned to the unit of the KL, the size of the batch or the learning rate. While the coefficient
    is at a bound and the error pushes it further out, the integral stands still, so that there is nothing to unwind when
    the error turns. One update is one step of the loop, so `n_steps` does not matter.

    Args:
        init_coef (`float`):
            First coefficient. A bad guess costs some steps, or an overshoot if it is far too low.
        kp (`float`, *optional*, defaults to `1.5`):
            Gain of the distance; `kp / kd` is the share of the way that is left to be gone in one update.
        ki (`float`, *optional*, defaults to `0.15`):
            Gain of the summed error.
        kd (`float`, *optional*, defaults to `20.0`):
            Greatest gain of the speed.
        error_clip (`float`, *optional*, defaults to `1.5`):
            Limit of the error, and so of how far one update moves `log coef` beyond the integral.
        **kwargs:
            The other settings of [`KLController`]; `target` is required.
    """

    needs_target = True
    uses = frozenset({"target", "min_coef", "max_coef"})
    formula = "init_coef * exp(e + ki * sum(e)), x = sqrt(kl / target), e = kp * (x - 1) + kd * dx/dt"
    state_class = PIDKLControllerState
    _state: PIDKLControllerState

    # Shares of a surprise that correct the distance and the speed.
    DISTANCE_SHARE, SPEED_SHARE = 0.5, 0.3
    # Rate at which the scatter follows the surprises, and at which the greatest speed is forgotten.
    SCATTER_RATE, SPEED_DECAY = 0.1, 0.99
    # The gain times the speed, and times the scatter, stay below these: what is left of either in `log coef`.
    SPEED_AUTHORITY, SCATTER_AUTHORITY = 3.0, 1.0
    # Weight of the trend beside the sum of errors, the rate at which it forms, and how near the target it does.
    TREND_WEIGHT, TREND_RATE, TREND_RANGE = 2.0, 0.03, 0.25
    APPROACH, HURRY, SLOWEST, FARTHEST = 0.5, 4 / 3, 0.02, 3.0

    def __init__(
        self,
        init_coef: float,
        *,
        kp: float = 1.5,
        ki: float = 0.15,
        kd: float = 20.0,
        error_clip: float = 1.5,
        **kwargs: Any,
    ) -> None:
        super().__init__(init_coef, **kwargs)
        for name, gain in (("kp", kp), ("ki", ki)):
            if not _is_finite_number(gain) or gain < 0:
                raise ValueError(
                    f"`{name}` must be a finite number >= 0, but got {gain!r}. The defaults are kp=1.5, ki=0.15, kd=20.0."
                )
        _check_positive("kd", kd, "The defaults are kp=1.5, ki=0.15, kd=20.0.")
        _check_positive("error_clip", error_clip, "Set `error_clip` to a value such as 1.5.")
        self.kp, self.ki, self.kd = float(kp), float(ki), float(kd)
        self.error_clip = float(error_clip)

    def _next(self, kl: float, n_steps: float) -> float:
        assert self.target is not None
        distance, state = self._follow(math.sqrt(kl / self.target))
        left = 1.0 - distance
        gain = min(self.kd, self.SPEED_AUTHORITY / state.top_speed, self.SCATTER_AUTHORITY / max(state.scatter, 1e-6))
        hurry = 1.0 + self.HURRY * max(left, 0.0)
        wanted = min(max(self.kp / self.kd * hurry * left, -state.top_speed), self.APPROACH * state.top_speed)
        error = min(max(gain * (state.speed - wanted), -self.error_clip), self.error_clip)
        push = self.TREND_WEIGHT * self.ki * error if abs(left) < self.TREND_RANGE else 0.0
        trend = state.trend + self.TREND_RATE * (push - state.trend)
        # On the way, a coefficient that falls too far costs an overshoot, one that rises too far only some steps.
        haste = 0.0 if left > 0 and error < 0 else 3.0 * min(abs(left), 1.0)
        integral = state.integral + self.ki * (1.0 + haste) * error + trend
        log_coef = math.log(self.init_coef) + integral + error
        outward = (log_coef > math.log(self.max_coef) and error > 0) or (
            log_coef < math.log(self.min_coef) and error < 0
        )
        # The output still goes to the bound; only the memory of it is not kept.
        self._state = replace(state, trend=0.0) if outward else replace(state, integral=integral, trend=trend)
        return _exp(log_coef)

    def _follow(self, measured: float) -> tuple[float, PIDKLControllerState]:
        """The distance, and the state, after a filter that predicts both it and the speed has seen one more of it."""
        state, measured = self._state, min(measured, self.FARTHEST)
        predicted = measured if state.distance is None else state.distance + state.speed
        surprise = measured - predicted
        distance = max(predicted + self.DISTANCE_SHARE * surprise, 0.0)
        speed = state.speed + self.SPEED_SHARE * surprise
        return distance, replace(
            state,
            distance=distance,
            speed=speed,
            top_speed=max(self.SPEED_DECAY * state.top_speed, abs(speed), self.SLOWEST),
            scatter=state.scatter + self.SCATTER_RATE * (abs(surprise) - state.scatter),
        )
