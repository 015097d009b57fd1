"""The law that holds a KL target with no other setting."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .base import BatchMeasurement, KLController, safe_exp
from .hold_state import HoldConstants, HoldKLControllerState, add_noise, propagate
from .lr_guard import lr_guard_factor


FIRST_COEF = 0.2  # if unset; the choice hardly matters, because the penalty does not pull at the reference

FIRST_LR_FACTOR = 0.1  # guards the learning rate until the first move has been seen


class HoldKLController(KLController):
    r"""
    Holds the KL at the target. It needs no starting value and no tuning.

    Near its reference the KL of a policy grows with the square of the way it has gone. So the law works with the
    distance `x = sqrt(kl / target)`, which is 1 at the target. The reward drives the policy away; the penalty drags it
    back. The drag grows with `coef * x`. Adam's momentum makes the speed `v` lag behind both:

    `v <- momentum * v + (1 - momentum) * a * (1 - coef * x / hold + noise)`, `x <- x + v`

    `a` is the free speed, that of the policy without a penalty. `hold` is the coefficient at which a policy at the
    target stands still. Each batch gives an estimate of it, up to a bias: `exp(bias) * (1 + diffusion) * drive / drag`
    at the target. The diffusion is what gradient noise adds to the KL: a random walk, which counts the more against
    the drive the longer the steps are. All steps on a rollout share its coefficient, its `x` and its noise. An
    extended Kalman filter on this model estimates `x`, `v`, `bias` and `log a` from the measured KL and its standard
    error. When batch after batch falls on the same side of its prediction, the filter learns faster.

    A batch gets the coefficient that follows from its own KL. Where the penalty must be entered before the KL is
    known, the batch gets the coefficient that followed from the previous batch, and the law looks ahead to the weights
    that its answer will act on. It wants to go the rest of the way in `horizon` optimizer steps, fewer if the policy
    is fast. That is the wanted speed `w * a`. It then asks which constant push gives that mean speed over the horizon.
    The push is the share of the drive that the penalty leaves:

    - `horizon = clip(braking_way / a, 3, 5)`, but at least two rollouts
    - `w = (1 - x) / max(horizon * a, shortest_way)`
    - `push = w + lead * (w - v / a)`, limited to `[brake, release]`; `lead` follows from horizon and momentum
    - `coef = hold * (1 - push) / max(x, 1)`; below the target no more is needed, and the model is least sure there

    Three rules bound it. Above the target, unless momentum alone carries the KL down to it, neither the coefficient
    nor `hold` falls, and `hold` grows. A KL of exactly 0, a batch without any drive and a learning rate of 0 teach
    nothing. Several rollouts of the same weights are one measurement: they sharpen the estimate, the coefficient
    stays, and their step has the noise of their mean.

    Call [`~KLController.observe`] with everything you know about a batch. `update(kl, n_steps)` works too: it assumes
    one optimizer step at a constant learning rate, and finds `hold` from the KL alone, which takes longer.

    Args:
        init_coef (`float`, *optional*):
            Coefficient of the first batches. Unset, the law finds its own.
        constants ([`HoldConstants`] or `dict`, *optional*):
            The numbers of the law.
        **kwargs:
            The other settings of [`KLController`]; `target` is required.
    """

    needs_target = True
    needs_start = False
    acts_at_once = True
    uses = frozenset({"target", "min_coef", "max_coef"})
    formula = (
        "hold * (1 - clip(w + lead * (w - v / a), -2, 0.9)) / max(x, 1), w = (1 - x) / max(horizon * a, 1/5), "
        "horizon = max(clip(0.35 / a, 3, 5), 2 rollouts), "
        "x = sqrt(kl / target), v = dx/dstep, a = free v, hold = exp(bias) * (1 + diffusion) * drive / drag at x = 1"
    )
    state_class = HoldKLControllerState
    _state: HoldKLControllerState

    def __init__(
        self,
        init_coef: float | None = None,
        *,
        constants: HoldConstants | Mapping[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        self.constants = constants if isinstance(constants, HoldConstants) else HoldConstants(**(constants or {}))
        if init_coef is None:
            low, high = (kwargs.get(name, FIRST_COEF) for name in ("min_coef", "max_coef"))
            init_coef = min(max(FIRST_COEF, low), high)
        super().__init__(init_coef, **kwargs)
        self._state = replace(self._state, value=self._bound(self._state.value), c22=self.constants.spread**2)
        self._batch: BatchMeasurement | None = None

    @property
    def free_speed(self) -> float | None:
        """
        How far one optimizer step moves `sqrt(kl / target)` where nothing brakes, at the last learning rate. `None`
        before the first move.
        """
        return None if self._state.free_speed is None else self._state.free_speed * self._state.rate

    def lr_factor(self, learning_rate: float) -> float:
        state = self._state
        if state.free_speed is None:
            return FIRST_LR_FACTOR  # a step that is surely short enough shows how far a step goes
        # The present speed counts at once, although it may be an outlier: a short step does no harm.
        speed = max(state.fastest, abs(state.speed) / state.rate)
        return lr_guard_factor(speed * learning_rate, state.steps)

    @property
    def hold(self) -> float:
        """The coefficient at which the KL would stand still at the target, as far as is known."""
        return self._hold(self._state)

    def observe(self, batch: BatchMeasurement) -> float:
        self._batch = batch
        try:
            return super().update(batch.kl, batch.completions)
        finally:
            self._batch = None

    def _next(self, kl: float, n_steps: float) -> float:
        assert self.target is not None
        batch = self._batch or BatchMeasurement(kl, n_steps)
        self._state = self._state.after_rollout(stepped=batch.optimizer_steps > 0)
        if kl == 0.0:
            if self._state.distance is None:
                self._state = replace(self._state, distance=0.0)  # the run starts at its reference
            return self.value
        k, before = self.constants, self._state
        steps, rate = float(batch.optimizer_steps), 1.0 if batch.learning_rate is None else float(batch.learning_rate)
        moved = steps > 0 and rate > 0
        if before.free_speed is None and not (before.live and batch.drive != 0.0):
            moved = False  # the first move is that of a reward, and not of weight decay or rounding
        measured = math.sqrt(kl / self.target)
        own = k.squared_noise(kl, batch.standard_error)
        noise = own if before.noise is None else before.noise + (own - before.noise) / k.noise_memory
        state, first_move = replace(before, noise=noise), False
        noise = own if own > k.outlier * noise else noise
        variance = noise * (measured / 2.0) ** 2
        if state.distance is None:
            # A first KL this large is not the work of a first step: the run starts away from its reference.
            moved = moved and measured < k.first_way
            state = replace(state, distance=0.0 if moved else measured, c00=variance)
        if moved:
            first_move = state.free_speed is None
            if first_move:
                assert state.distance is not None
                # Adam's first step is about twice as long as the following ones.
                speed = max(abs(measured - state.distance) / (steps + 1.0), k.first_speed if state.distance else 1e-6)
                state = replace(state, free_speed=speed / rate, fastest=speed / rate)
            state = self._predict(replace(state, steps=steps, rate=rate))
        if state.distance is not None and state.distance > k.arrived:
            # A batch with much KL has a large error too: weighed by it, the mean KL would come out too low.
            variance = noise * (state.distance / 2.0) ** 2
        state = self._correct(state, measured, variance, moved)
        if not before.live:  # steps without a reward: whatever moved the policy, it was not what the model describes
            learned = ("bias", "free_speed", "fastest", "streak")
            state = replace(state, **{name: getattr(before, name) for name in learned})
        if first_move:
            state = replace(state, c33=k.first_spread**2)  # from here on the filter learns the free speed
        state = replace(self._weigh(state, batch, measured), acting=batch.applied)
        if not moved or not state.live:
            self._state = state
            return self.value
        return self._decide(state, before)

    def _hold(self, state: HoldKLControllerState) -> float:
        k, drive = self.constants, self._drive(state)
        if state.drag <= 0.0 or drive <= 0.0:
            return max((self.init_coef or FIRST_COEF) * safe_exp(state.bias), self.min_coef)
        share = k.usual_diffusion
        if state.drive_variance is not None and state.free_speed is not None:
            way = state.free_speed * state.rate * max(state.steps, 1.0)
            share = min(k.diffusion * way * state.drive_variance / state.rollouts / drive**2, k.most_diffusion)
        return max(drive / state.drag * (1.0 + share) * safe_exp(state.bias), self.min_coef)

    def _drive(self, state: HoldKLControllerState) -> float:
        """
        The mean drive. A batch scatters by about as much as its mean, so the usual correlation of advantage and KL
        counts too, for some completions.
        """
        k = self.constants
        if state.drive_variance is None:
            return state.drive
        deviation = math.sqrt(state.drive_variance * state.completions)
        weight = k.usual_weight / (k.usual_weight + state.completions * state.batches)
        drive = state.drive + weight * (k.usual_correlation * deviation - state.drive)
        return max(drive, k.least_correlation * deviation)

    def _response(self, steps: float, age: float) -> tuple[float, float, float, float]:
        """
        What some optimizer steps on one rollout make of a speed and of a constant push in units of the free speed:
        `x += xv * v + xp * push`, `v = vv * v + vp * push`. Adam's first moment starts at 0 and is corrected for that,
        so that its first steps follow the push more closely; `age` is the number of steps before. Steps without a
        gradient do not count: its second moment is then 0 too, and the first gradient makes a full step.
        """
        momentum = self.constants.momentum
        xv, xp, vv, vp = 0.0, 0.0, 1.0, 0.0
        for step in range(max(math.ceil(steps), 1)):
            follows = (1.0 - momentum) / (1.0 - math.pow(momentum, age + step + 1.0))
            vv, vp = (1.0 - follows) * vv, vp + follows * (1.0 - vp)
            share = min(steps - step, 1.0)  # a horizon may end within a step
            xv, xp = xv + share * vv, xp + share * vp
        return xv, xp, vv, vp

    def _push(self, distance: float, coef: float, state: HoldKLControllerState) -> float:
        """
        What the penalty leaves of the drive, over all steps on a rollout: its advantages were measured at its start.
        """
        return max(state.live - coef * distance / self._hold(state), -8.0)

    def _advance(self, state: HoldKLControllerState, coef: float) -> tuple[float, float]:
        """Distance and speed after the optimizer steps of one rollout that was given this coefficient."""
        xv, xp, vv, vp = self._response(state.steps, state.age)
        distance, speed = state.distance or 0.0, state.speed
        push = (state.free_speed or 0.0) * state.rate * self._push(distance, coef, state)
        return max(distance + xv * speed + xp * push, 0.0), vv * speed + vp * push

    def _predict(self, state: HoldKLControllerState) -> HoldKLControllerState:
        """The state after the optimizer steps of one rollout, before its KL is seen."""
        k, distance = self.constants, state.distance or 0.0
        free = (state.free_speed or 0.0) * state.rate
        # Those steps followed the batch measured before them, and so the coefficient that it was given.
        coef = self.value if state.acting is None else state.acting
        xv, xp, vv, vp = self._response(state.steps, state.age)
        by_distance = -free * coef / self._hold(state)
        by_bias = -by_distance * distance
        by_free = free * self._push(distance, coef, state)
        moves = (
            (1.0 + xp * by_distance, xv, xp * by_bias, xp * by_free),
            (vp * by_distance, vv, vp * by_bias, vp * by_free),
            (0.0, 0.0, 1.0, 0.0),
            (0.0, 0.0, 0.0, 1.0),
        )
        # All steps on a rollout share its noise.
        gust = free * self._push_noise(state)
        drift = k.drift**2 * state.steps * min(1.0, free / k.full_speed)
        # The mean of independent surprises has a variance of 1 / (2 * memory - 1). Anything beyond that is not chance.
        drift *= 1.0 + k.streak_drift * max((2.0 * k.streak_memory - 1.0) * state.streak**2 - 1.0, 0.0)
        # A policy that stops short of the target surprises for other reasons, and must not make the bias run away.
        drift = min(drift, max(k.spread**2 - state.c22, 0.0))
        free_drift = min(k.free_drift**2 * state.steps, max(k.first_spread**2 - state.c33, 0.0)) if state.c33 else 0.0
        c = add_noise(propagate(moves, state.covariance), (xp * gust, vp * gust), (drift, free_drift))
        distance, speed = self._advance(state, coef)
        return state.with_covariance(c, distance=distance, speed=speed, age=state.age + state.steps)

    def _push_noise(self, state: HoldKLControllerState) -> float:
        """Standard deviation of a rollout's push, from the scatter of its completions."""
        k, drive = self.constants, self._drive(state)
        if state.drive_variance is None or drive <= 0.0:
            return k.usual_gusts
        return min(max(k.gusts * math.sqrt(state.drive_variance) / drive, k.least_gusts), k.most_gusts)

    def _correct(
        self, state: HoldKLControllerState, measured: float, variance: float, moved: bool
    ) -> HoldKLControllerState:
        """The state after one measured distance."""
        assert state.distance is not None
        k, c = self.constants, state.covariance
        total = max(c[0][0], 0.0) + variance
        limit = 3.0 * math.sqrt(total)
        surprise = min(max(measured - state.distance, -limit), limit)
        gain = [c[row][0] / total for row in range(4)]
        speed, free, fastest = state.speed + gain[1] * surprise, state.free_speed, state.fastest
        streak = state.streak
        if free is not None and moved:
            streak += (surprise / math.sqrt(total) - streak) / k.streak_memory
            # One outlier must not pass for a speed. And a policy that stands still because the penalty is stronger
            # than the filter believes must not pass for one that cannot move.
            fastest = max(fastest, min(abs(speed) / state.rate, k.faster * fastest))
            free *= safe_exp(min(max(gain[3] * surprise, -k.free_step), k.free_step))
            # A greater speed would mean more noise, a filter that follows noise, and so an ever greater speed.
            free = min(max(free, k.slowest * fastest), fastest)
        c = tuple(tuple(c[i][j] - gain[i] * c[0][j] for j in range(4)) for i in range(4))
        return replace(
            state.with_covariance(c),
            distance=max(state.distance + gain[0] * surprise, 0.0),
            speed=speed,
            bias=state.bias + gain[2] * surprise,
            free_speed=free,
            fastest=fastest,
            streak=streak,
        )

    def _weigh(self, state: HoldKLControllerState, batch: BatchMeasurement, measured: float) -> HoldKLControllerState:
        """
        The state after a batch's drive and drag. Both are scaled to the target, where they would be 1 / x and 1 / x^2.
        """
        drive, drag = batch.drive, batch.drag
        if drive is None or drag is None:
            return replace(state, live=1.0)
        if drive == 0.0:
            return replace(state, live=0.0)
        if not (math.isfinite(drive) and math.isfinite(drag) and drag > 0):
            return replace(state, live=1.0)
        k, drive, drag = self.constants, drive / measured, drag / measured**2
        if not state.batches and measured < k.first_way:
            state = state.with_bias_spread(k.measured_spread)
        batches = min(state.batches + 1.0, k.memory)
        variance, share = state.drive_variance, 1.0 / batches
        if batch.drive_error is not None and math.isfinite(batch.drive_error):
            scaled = (batch.drive_error / measured) ** 2
            variance = variance or scaled
            if scaled > k.outlier * variance:  # a group with hardly any spread of rewards, or rewards that grow
                share = min(share, 0.5 * variance / scaled)
            variance += share * (scaled - variance)
        return replace(
            state,
            live=1.0,
            batches=batches,
            completions=float(batch.completions),
            drive=state.drive + share * (drive - state.drive),
            drive_variance=variance,
            drag=state.drag + share * (drag - state.drag),
        )

    def _decide(self, state: HoldKLControllerState, before: HoldKLControllerState) -> float:
        """The next coefficient."""
        k = self.constants
        assert state.distance is not None and state.free_speed is not None
        distance, speed, free = state.distance, state.speed, state.free_speed * state.rate
        coasts = k.momentum / (1.0 - k.momentum)
        excess = distance - 1.0
        above = max(2.0 * math.sqrt(max(state.c00, 0.0)), k.band)
        stays_above = excess > above and excess + coasts * speed > 0.0
        if stays_above:
            state = replace(state, bias=max(state.bias, before.bias))
        if excess > k.arrived - 1.0:
            # Where the KL comes down well, more would only have to be taken back.
            falls = excess + k.patience * speed < 0.0
            rate = k.integral if not stays_above else 0.0 if falls else k.integral_above
            counted = min(excess, 1.0 if stays_above else 1.0 - k.arrived)
            state = replace(state, bias=state.bias + rate * counted * min(free * state.steps, k.longest))
        state = self._state = self._keep_bias_bounded(state)

        age = state.age
        if state.acting is not None:
            # The steps on the batch just measured are still to come, at the coefficient that it was given.
            distance, speed = self._advance(state, state.acting)
            age += state.steps
        horizon = min(max(k.braking_way / free, k.shortest_horizon), k.horizon)
        horizon = max(horizon, k.horizon_rollouts * state.steps)
        by_speed, by_push, _, _ = self._response(horizon, age)
        wanted = (1.0 - distance) / max(horizon * free, k.shortest_way)
        push = min(max(wanted + by_speed / by_push * (wanted - speed / free), k.brake), k.release)
        coef = self._hold(state) * (1.0 - push) / max(distance, 1.0)
        return max(coef, self.value) if stays_above else coef

    def _keep_bias_bounded(self, state: HoldKLControllerState) -> HoldKLControllerState:
        """Without it the bias would wind up where the coefficient is at a bound and `hold` can do no more."""
        unbiased = self._hold(replace(state, bias=0.0))
        low = math.log(self.min_coef / unbiased)
        high = math.log(self.max_coef * max(state.distance or 0.0, 1.0) / unbiased)
        return replace(state, bias=min(max(state.bias, low), max(low, high)))
