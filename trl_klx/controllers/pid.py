"""A rule that steers the speed at which the policy nears its target."""

import math
from dataclasses import dataclass, replace
from typing import Any

from .base import KLController, KLControllerState, check_positive, safe_exp
from .setting_rules import is_finite_number


@dataclass(frozen=True)
class PIDKLControllerState(KLControllerState):
    """
    The coefficient, and what the rule knows of the policy's way: its distance (`None` before the first update) and
    speed, the greatest speed it has shown, how far the measurements scatter around the prediction (a guess at first),
    the sum of errors, and the pace at which the coefficient that holds the policy has been changing.
    """

    # Far wider than any run needs.
    limits = {
        "distance": (0.0, 1e3),
        "speed": (-1e3, 1e3),
        "top_speed": (0.0, 1e3),
        "scatter": (0.0, 1e3),
        "integral": (-1e6, 1e6),
        "trend": (-1e6, 1e6),
    }

    distance: float | None = None
    speed: float = 0.0
    top_speed: float = 0.0
    scatter: float = 0.04
    integral: float = 0.0
    trend: float = 0.0


class PIDKLController(KLController):
    r"""
    Steers the speed at which the policy nears the target, and then holds it there.

    Near its reference, the KL of a policy grows with the square of the way it has gone. So the rule looks at the
    distance `x = sqrt(kl / target)`, which is 1 at the target, and at its speed `v` per update, both smoothed by a
    filter that predicts (the measured KL of a batch is noisy). The speed it wants falls with the way `w = 1 - x` that
    is left, as `kp / kd * w * (1 + 4 / 3 * max(w, 0))`, and is at most half of the greatest speed the policy has
    shown: a policy that is slowed down early tells how strong the penalty must be before it arrives, where momentum
    would carry it past the target. With `e = gain * (v - wanted speed)`, limited to `±error_clip`:

    `log coef = log init_coef + integral + e`, then the bounds; `integral += ki * (1 + 3 * abs(w)) * e + trend`, where
    `3 * abs(w)` is left out while the policy is on its way and too slow

    As the policy learns, the coefficient that holds it changes, and a sum of errors alone would lag behind: `trend` is
    a slow mean of `2 * ki * e` near the target.

    `gain` is `kd`, or less where the policy is fast or the measurements scatter, so that neither leads to swings: that
    is why no gain needs to be tuned to the unit of the KL, the size of the batch or the learning rate. While the
    coefficient is at a bound and the error pushes it further out, the integral stands still, so that there is nothing
    to unwind when the error turns. One update is one step of the loop, so `n_steps` does not matter.

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
            if not is_finite_number(gain) or gain < 0:
                raise ValueError(
                    f"`{name}` must be a finite number >= 0, but got {gain!r}. The defaults are kp=1.5, ki=0.15, "
                    "kd=20.0."
                )
        check_positive("kd", kd, "The defaults are kp=1.5, ki=0.15, kd=20.0.")
        check_positive("error_clip", error_clip, "Set `error_clip` to a value such as 1.5.")
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
        return safe_exp(log_coef)

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
