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
        if math.isnan(value):
            self._state = before
            raise ValueError(f"{type(self).__name__}._next({kl!r}, {n_steps!r}) returned NaN. Return a number.")
        self._state = replace(self._state, value=self._bound(value))
        return self.value

    @abstractmethod
    def _next(self, kl: float, n_steps: float) -> float:
        """
        The next coefficient, before bounds. `kl` is finite and >= 0. A rule that remembers more than the coefficient
        replaces `self._state` here; it need not set `value`.
        """

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
        if value < 0 or (value == 0 and self.multiplicative):
            raise ValueError(
                f"State of {type(self).__name__}: 'value' is {value!r}, but a coefficient must be "
                f"{'positive' if self.multiplicative else '>= 0'}."
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
    """The coefficient, the sum of errors, and the last error (`None` before the first update)."""

    integral: float = 0.0
    error: float | None = None


class PIDKLController(KLController):
    r"""
    Proportional, integral and derivative terms on the relative error, acting on the log of the coefficient.

    With `e = log(kl / target)`, limited to `±error_clip`, and its running sum `I`:
    `log coef = log init_coef + kp * e + ki * I + kd * (e - e_prev)`, then the bounds. In logs the loop behaves the
    same whatever the scale of KL and coefficient. While the coefficient is at a bound and the error pushes it further
    out, `I` stands still, so that there is nothing to unwind when the error turns.

    One update is one step of the loop, so `n_steps` does not matter. The default gains suit a KL that answers slowly, as
    it does in training; if the KL alternates around the target from batch to batch, lower `kd` first, then `kp`.

    Args:
        init_coef (`float`):
            First coefficient, and the one that an error and integral of 0 give.
        kp (`float`, *optional*, defaults to `2.0`):
            Gain of the error.
        ki (`float`, *optional*, defaults to `0.1`):
            Gain of the summed error.
        kd (`float`, *optional*, defaults to `4.0`):
            Gain of the change of the error. The first update has no such term.
        error_clip (`float`, *optional*, defaults to `log(10)`):
            Limit of the error; a KL of 0 counts as the lower limit.
        **kwargs:
            The other settings of [`KLController`]; `target` is required.
    """

    needs_target = True
    uses = frozenset({"target", "min_coef", "max_coef"})
    formula = "init_coef * exp(kp * e + ki * sum(e) + kd * (e - e_prev)), e = log(kl / target)"
    state_class = PIDKLControllerState
    _state: PIDKLControllerState

    def __init__(
        self,
        init_coef: float,
        *,
        kp: float = 2.0,
        ki: float = 0.1,
        kd: float = 4.0,
        error_clip: float = math.log(10.0),
        **kwargs: Any,
    ) -> None:
        super().__init__(init_coef, **kwargs)
        for name, gain in (("kp", kp), ("ki", ki), ("kd", kd)):
            if not _is_finite_number(gain) or gain < 0:
                raise ValueError(
                    f"`{name}` must be a finite number >= 0, but got {gain!r}. The defaults are kp=2.0, ki=0.1, kd=4.0."
                )
        _check_positive("error_clip", error_clip, "Set `error_clip` to a value such as 2.3, a factor of ten.")
        self.kp, self.ki, self.kd = float(kp), float(ki), float(kd)
        self.error_clip = float(error_clip)

    def _next(self, kl: float, n_steps: float) -> float:
        assert self.target is not None
        error = math.log(kl) - math.log(self.target) if kl > 0 else -self.error_clip
        error = min(max(error, -self.error_clip), self.error_clip)
        change = 0.0 if self._state.error is None else error - self._state.error
        low, high = math.log(self.min_coef), math.log(self.max_coef)
        integral = self._state.integral + error
        log_coef = math.log(self.init_coef) + self.kp * error + self.ki * integral + self.kd * change
        if (log_coef > high and error > 0) or (log_coef < low and error < 0):
            # This output still goes to the bound; only the memory of it is not kept.
            integral = self._state.integral
        self._state = replace(self._state, integral=integral, error=error)
        return _exp(log_coef)
