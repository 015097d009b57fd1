"""
What every controller is: measured KL in, next coefficient out.

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

from .setting_rules import check_settings, is_finite_number


SETTINGS = ("target", "horizon", "min_coef", "max_coef")


def is_saved_kl(value: object) -> bool:
    """Whether a number in a saved state may be a KL. No KL is near the limit, which keeps sums and squares finite."""
    return is_finite_number(value) and abs(value) <= 1e100  # type: ignore[arg-type]


def check_positive(name: str, value: object, remedy: str) -> None:
    if not (is_finite_number(value) and value > 0):  # type: ignore[operator]
        raise ValueError(f"`{name}` must be a positive finite number, but got {value!r}. {remedy}")


def safe_exp(exponent: float) -> float:
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
            Mean over completions of `sum_t A_t * z_t`: the pull of the reward along the KL. `A` is the centered
            advantage without the penalty, and `z = 1 - exp(-max(k1, -2))`, which is `k1` to first order and 0 on
            average in a state where `k1` stays above -2. Exactly 0 if no reward differs from another.
        drag (`float`, *optional*):
            Mean over completions of `sum_t k1_t * z_t`: the pull of one unit of coefficient. With the penalty in the
            rewards, `k1_t` is replaced by what one unit takes off the token's advantage.
        standard_error (`float`, *optional*):
            Standard error of `kl` over the completions.
        drive_error (`float`, *optional*):
            Standard error of `drive` over the completions.
        applied (`float`, *optional*):
            Coefficient already applied to the batch when it was measured. `None` if the batch gets the one that this
            measurement leads to.
    """

    kl: float
    completions: float
    optimizer_steps: float = 1.0
    learning_rate: float | None = None
    drive: float | None = None
    drag: float | None = None
    standard_error: float | None = None
    drive_error: float | None = None
    applied: float | None = None


@dataclass(frozen=True)
class KLControllerState:
    """
    What changes from update to update. A controller with more to remember extends it with defaulted fields, and may
    say in `limits` between which numbers each of them lies. A saved state outside of them is refused.
    """

    limits: ClassVar[Mapping[str, tuple[float, float]]] = {}

    value: float


class KLController(ABC):
    r"""
    Base of all controllers. A subclass defines `_next(kl, n_steps)`, which returns the next coefficient.

    A measured KL that is NaN, infinite or negative never reaches `_next`: the state stays as it is, and the first such
    value warns. The coefficient is kept in `[min_coef, max_coef]` for every class that lists them in `uses`.

    Class attributes:

    - `needs_target` (`bool`): whether construction without a target is refused.
    - `needs_start` (`bool`): whether construction without a first coefficient is refused.
    - `acts_at_once` (`bool`): whether a batch gets the coefficient that follows from its own KL, where the KL is known
      before the penalty is entered. Otherwise it gets the one before its update.
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
    needs_start: ClassVar[bool] = True
    acts_at_once: ClassVar[bool] = False
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
        settings = {"init_coef": init_coef, "target": target, "horizon": horizon}
        check_settings(type(self), type(self).__name__, settings | {"min_coef": min_coef, "max_coef": max_coef})
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
        """Whether the coefficient is at a bound and cannot go further in that direction."""
        return self.at_bound(self.value)

    def at_bound(self, coef: float) -> bool:
        """
        Whether a coefficient is at a bound of this controller.

        Args:
            coef (`float`):
                The coefficient.
        """
        at_min = "min_coef" in self.uses and coef <= self.min_coef
        at_max = "max_coef" in self.uses and coef >= self.max_coef
        return at_min or at_max

    def update(self, kl: float, n_steps: float) -> float:
        """
        Take the KL measured on one generation batch and return the new coefficient.

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
                    f"{type(self).__name__} got a KL of {kl!r}; a KL is finite and not negative. The coefficient "
                    f"stays at {self.value}. Further such values are skipped without a warning.",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return self.value
        before = self._state
        returned: object = self._next(kl, n_steps)
        try:
            value = float(returned)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError) as error:
            self._state = before
            raise TypeError(
                f"{type(self).__name__}._next({kl!r}, {n_steps!r}) returned {returned!r}, but must return the next "
                "coefficient, a number."
            ) from error
        bounded = self._bound(value)
        if not math.isfinite(bounded) or not self._is_coefficient(bounded):
            self._state = before
            raise ValueError(
                f"{type(self).__name__}._next({kl!r}, {n_steps!r}) returned {value!r}, but a coefficient must be "
                f"finite and {self._coefficients}."
            )
        self._state = replace(self._state, value=bounded)
        return self.value

    def observe(self, batch: BatchMeasurement) -> float:
        """
        Take everything measured on one generation batch. By default only the KL is used, through
        [`~KLController.update`].

        Args:
            batch ([`BatchMeasurement`]):
                What was measured.

        Returns:
            `float`: The new value.
        """
        return self.update(batch.kl, batch.completions)

    def lr_factor(self, learning_rate: float) -> float:
        """
        Factor, at most 1, by which `kl_lr_guard` scales the learning rate of the next optimizer step. A controller
        that does not know how far a step moves the KL leaves this as it is.

        Args:
            learning_rate (`float`):
                The scheduled learning rate.
        """
        return 1.0

    @abstractmethod
    def _next(self, kl: float, n_steps: float) -> float:
        """
        The new coefficient, before bounds. `kl` is finite and >= 0. A rule that remembers more than the coefficient
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
                    f"State of {type(self).__name__} has an unknown key {key!r} with value {state[key]!r}; the keys "
                    f"are {', '.join(expected)}. Was it saved by another controller?"
                )
        for key, default in expected.items():
            if key not in state:
                raise ValueError(f"State of {type(self).__name__} lacks the key {key!r}: got {dict(state)!r}.")
            if not is_finite_number(state[key]) and not (state[key] is None and default is None):
                raise ValueError(f"State of {type(self).__name__}: {key!r} is {state[key]!r}, not a finite number.")
            low, high = self.state_class.limits.get(key, (-math.inf, math.inf))
            if state[key] is not None and not low <= state[key] <= high:
                raise ValueError(
                    f"State of {type(self).__name__}: {key!r} is {state[key]!r}, outside of [{low:g}, {high:g}]."
                )
        value = state["value"]
        if not self._is_coefficient(value):
            raise ValueError(
                f"State of {type(self).__name__}: 'value' is {value!r}, but a coefficient must be "
                f"{self._coefficients}."
            )
        numbers = {key: None if state[key] is None else float(state[key]) for key in expected}
        self._state = self.state_class(**{**numbers, "value": self._bound(float(value))})  # type: ignore[arg-type]

    def __repr__(self) -> str:
        return f"{type(self).__name__}(value={self.value}, target={self.target})"
