"""The law that holds a KL target with no other setting."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .base import BatchMeasurement, KLController
from .hold_motion import coast, correct, predict
from .hold_state import HoldConstants, HoldKLControllerState
from .lr_guard import lr_guard_factor


FIRST_COEF = 0.2  # if unset; the choice hardly matters, because the penalty does not pull at the reference

FIRST_LR_FACTOR = 0.1  # guards the learning rate until the first move has been seen


class HoldKLController(KLController):
    r"""
    Holds the KL at the target. It needs no starting value and no tuning.

    Near its reference the KL of a policy grows with the square of the way it has gone. So the law works with the
    distance `x = sqrt(kl / target)`, which is 1 at the target. Three things move the policy: the reward drives it
    away, the penalty drags it back, and gradient noise makes it walk without a direction, which takes it away too.
    Adam's momentum passes all three on:

    `v <- momentum * v + (1 - momentum) * gain * (drive + bias - coef * drag * x)`, `x <- x + v`, and `x^2` grows by
    the square of the walk

    Each batch measures drive and drag. Adam divides a step by its noise, so the length of the first step, which is
    nearly all noise, tells how far the walk goes, and the error of the drive tells the gain: what a drive of that
    size would do. The gain is corrected by a factor, the mobility, and the drive by a bias. An extended Kalman filter
    on this model follows `x`, `v`, mobility and bias from the measured KL and its standard error. All steps on a
    rollout share its coefficient, its `x` and its noise.

    A batch gets the coefficient that follows from its own KL. Where the penalty must be entered before the KL is
    known, the batch gets the coefficient that followed from the previous batch, and the law looks one rollout ahead.
    It asks the model which coefficient leads to the right place in `horizon` optimizer steps, or two rollouts if they
    are longer:

    - `x0`, `x1`: where the coefficients 0 and `hold` would lead. `hold = (drive + bias + walk) / drag`, at the
      target, is the one at which the KL would stand still there
    - `w = x + (1 - x) * min(1, way / sway)`: where it wants to be. A policy whose free way over the horizon is short
      cannot be at the target so soon
    - `coef = clip(hold * (x0 - w) / (x0 - x1), release * hold, brake * hold) / max(x, (x + w) / 2)`: the drag grows
      with the distance, and on the way up it is that of the mean

    Three rules bound it. Above the target, unless the KL is on its way down to it, neither the coefficient nor the
    bias falls, and the bias grows. A KL of exactly 0, a batch without any drive and a learning rate of 0 teach
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
        "clip(hold * (x0 - w) / (x0 - x1), hold / 10, 3 * hold) / max(x, (x + w) / 2), "
        "w = x + (1 - x) * min(1, 5 * way), "
        "x0, x1 = x in max(3 steps, 2 rollouts) with coefficients 0 and hold, way = that of a free policy, "
        "x = sqrt(kl / target), hold = (drive + bias + walk) / drag at x = 1"
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
            low, high = kwargs.get("min_coef", FIRST_COEF), kwargs.get("max_coef", math.inf)
            init_coef = min(max(FIRST_COEF, low), high)
        super().__init__(init_coef, **kwargs)
        self._state = replace(self._state, value=self._bound(self._state.value))
        self._batch: BatchMeasurement | None = None

    @property
    def hold(self) -> float:
        """The coefficient at which the KL would stand still at the target, as far as is known."""
        return self._hold(self._state)

    @property
    def free_speed(self) -> float | None:
        """
        How far one optimizer step moves `sqrt(kl / target)` at the target where nothing brakes, at the last learning
        rate. `None` before the first move.
        """
        return None if self._state.stride is None else self._free_speed(self._state)

    def lr_factor(self, learning_rate: float) -> float:
        state = self._state
        if state.stride is None:
            return FIRST_LR_FACTOR  # a step that is surely short enough shows how far a step goes
        way = max(state.steps, 1.0) * learning_rate
        # The present speed counts at once, although it may be an outlier: a short step does no harm.
        speed = max(self._gain(state) * self._drive(state), abs(state.speed))
        return lr_guard_factor(way * speed, way * state.stride)

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
        # At the reference no drive shows, so that the first batch away from it tells for the one before.
        if before.stride is None and not (before.live and (before.batches > 0.0 or batch.drive != 0.0)):
            moved = False  # the first move is that of a reward, and not of weight decay or rounding
        measured = math.sqrt(kl / self.target)
        own = k.squared_noise(kl, batch.standard_error)
        noise = own if before.noise is None else before.noise + (own - before.noise) / k.noise_memory
        state = replace(before, noise=noise)
        noise = own if own > k.outlier * noise else noise
        variance = noise * (measured / 2.0) ** 2
        if state.distance is None:
            # A first KL this large is not the work of a first step: the run starts away from its reference.
            moved = moved and measured < k.first_way
            state = replace(state, distance=0.0 if moved else measured, c00=variance)
        assert state.distance is not None
        if moved:
            if state.stride is not None and not state.known:  # the usual stride is that of the highest learning rate
                state = state.with_stride(min(state.stride, k.usual_stride / rate))
            state = replace(state, steps=steps, rate=rate)
        if moved and state.stride is None:
            state = self._take_first_move(state, measured, variance)
        else:
            state = self._predict(state) if moved else state
            distance = state.distance or 0.0
            if distance > k.arrived:
                # A batch with much KL has a large error too: weighed by it, the mean KL would come out too low.
                variance = noise * (distance / 2.0) ** 2
            state = correct(state, measured, variance, k)
            if moved and rate > before.rate:
                state = self._shorten_stride(state, measured)
            if not before.live:  # steps without a reward: whatever moved the policy is not in the model
                state = replace(state, mobility=before.mobility, bias=before.bias, walked=before.walked)
        state = replace(self._weigh(state, batch, measured), acting=batch.applied)
        if not moved or not state.live:
            self._state = state
            return self.value
        return self._decide(state, before)

    # ---- What the model says ----

    def _pull(self, state: HoldKLControllerState) -> tuple[float, float, float]:
        """Mean drive, the error of one batch's drive, and drag, at the target."""
        k, error = self.constants, self._drive_error(state)
        if state.drag <= 0.0:
            return 1.0, error, 1.0 / (self.init_coef or FIRST_COEF)
        if not state.drive_variance:
            return state.drive, error, state.drag
        # A batch scatters by about as much as its mean, so the usual correlation of advantage and KL counts too.
        weight = k.usual_weight / (k.usual_weight + state.completions * state.batches)
        return state.drive + weight * (self._usual_drive(state) - state.drive), error, state.drag

    def _drive_error(self, state: HoldKLControllerState) -> float:
        if state.drag <= 0.0:  # not known: any unit will do, because the gain follows the error
            return 1.0
        return math.sqrt(state.drive_variance or 0.0) or max(abs(state.drive), self.min_coef * state.drag)

    def _usual_drive(self, state: HoldKLControllerState) -> float:
        """The drive at the usual correlation of advantage and KL. It does not depend on the size of the batch."""
        error = self._drive_error(state)
        return (
            self.constants.usual_correlation * math.sqrt(state.completions) * error if state.drive_variance else error
        )

    def _drive(self, state: HoldKLControllerState) -> float:
        drive, error, _ = self._pull(state)
        return max(drive + state.bias * self._usual_drive(state), self.constants.least_drive * error)

    def _gain(self, state: HoldKLControllerState) -> float:
        """Speed that a unit of drive gives."""
        k, (drive, error, _) = self.constants, self._pull(state)
        assert state.stride is not None
        noise = k.noise_ratio * error / math.sqrt(state.rollouts)
        # The walk soon fills the directions in which the penalty pulls best.
        return state.mobility * state.stride / math.hypot(noise, drive) / math.sqrt(1.0 + state.walked / k.filling)

    def _walk(self, state: HoldKLControllerState) -> float:
        """Mean speed at the target by noise alone. The steps on a rollout share its noise, and so add up."""
        assert state.stride is not None
        return 0.5 * state.rate * max(state.steps, 1.0) * state.stride**2

    def _free_speed(self, state: HoldKLControllerState) -> float:
        return state.rate * (self._gain(state) * self._drive(state) + self._walk(state))

    def _hold(self, state: HoldKLControllerState) -> float:
        drive, drag = self._drive(state), self._pull(state)[2]
        if state.stride is not None:
            drive += self._walk(state) / self._gain(state)
        return max(drive / drag, self.min_coef)

    # ---- What the batches tell ----

    def _take_first_move(
        self, state: HoldKLControllerState, measured: float, variance: float
    ) -> HoldKLControllerState:
        """The state after the first steps, which show how far noise goes."""
        k, start, way = self.constants, state.distance or 0.0, state.steps * state.rate
        away = math.sqrt(max(measured**2 - start**2, 0.0))
        known = away > 0.0 and start < k.known_start
        stride = away / way if known else k.usual_stride / state.rate
        spread = k.mobility_spread if known else math.log(k.most_mobility) / 2.0
        return replace(
            state,
            distance=measured,
            stride=stride,
            known=float(known),
            mobility=math.pow(state.steps, -k.repetition),
            noise_speed=stride**2,
            noise_lean=way * stride**2,
            walked=(way * stride) ** 2,
            age=state.steps,
            c00=variance,
            c11=(k.first_speed * stride) ** 2,
            c22=spread**2,
            c33=k.bias_spread**2,
        )

    def _shorten_stride(self, state: HoldKLControllerState, measured: float) -> HoldKLControllerState:
        """The state after a warm-up's first moves, which may be so tiny that rounding made their KL."""
        near = state.known and measured < self.constants.known_start
        if not near or state.stride is None or state.walked <= measured**2:
            return state
        # So near the reference hardly anything brakes: the noise has gone at most as far as the policy.
        shorter = state.with_stride(measured / math.sqrt(state.walked) * state.stride)
        return replace(shorter, walked=measured**2)

    def _advance(self, state: HoldKLControllerState, coef: float) -> HoldKLControllerState:
        """The state after the optimizer steps of one rollout that was given this coefficient."""
        drag = self._pull(state)[2]
        # The advantages were measured at the start of the rollout, and so was the penalty.
        pull = state.live * self._drive(state) - coef * drag * (state.distance or 0.0)
        return coast(state, self._gain(state) * pull, state.steps, self.constants)

    def _predict(self, state: HoldKLControllerState) -> HoldKLControllerState:
        """The state after the optimizer steps of one rollout, before its KL is seen."""
        # Those steps followed the batch measured before them, and so the coefficient that it was given.
        coef = self.value if state.acting is None else state.acting
        return predict(state, lambda now: self._advance(now, coef), self.constants)

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
        batches = min(state.batches + 1.0, k.memory * state.rollouts)
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

    # ---- What follows from it ----

    def _decide(self, state: HoldKLControllerState, before: HoldKLControllerState) -> float:
        """The next coefficient."""
        k = self.constants
        assert state.distance is not None
        excess = state.distance - 1.0
        above = max(2.0 * math.sqrt(max(state.c00, 0.0)), k.band)
        coasts = k.momentum / (1.0 - k.momentum)
        stays_above = excess > above and excess + coasts * state.drift > 0.0
        if stays_above:
            state = replace(state, bias=max(state.bias, before.bias))
            if excess + k.patience * state.drift >= 0.0:  # else more would only have to be taken back
                state = self._raise_bias(state, excess)
        state = self._state = self._keep_bias_bounded(state)
        if state.acting is not None:
            # The steps on the batch just measured are still to come, at the coefficient that it was given.
            state = self._advance(state, state.acting)
        coef = self._solve(state)
        return max(coef, self.value) if stays_above else coef

    def _solve(self, state: HoldKLControllerState) -> float:
        """The coefficient that leads to the right place at the end of the horizon."""
        k, distance = self.constants, state.distance or 0.0
        horizon = max(k.horizon, k.horizon_rollouts * max(state.steps, 1.0))
        wanted = distance + (1.0 - distance) * min(1.0, horizon * self._free_speed(state) / k.sway)
        gain, drive, drag, hold = self._gain(state), self._drive(state), self._pull(state)[2], self._hold(state)
        free, held = (coast(state, gain * (drive - coef * drag), horizon, k).distance for coef in (0.0, hold))
        assert free is not None and held is not None
        coef = hold * (free - wanted) / max(free - held, 1e-12)
        level = max(distance, 0.5 * (distance + wanted))
        return min(max(coef, k.release * hold), k.brake * hold) / level

    def _raise_bias(self, state: HoldKLControllerState, excess: float) -> HoldKLControllerState:
        """The state with a greater drive, because the KL stays above the target by this much."""
        k, drag = self.constants, self._pull(state)[2]
        way = min(max(state.steps, 1.0) * self._free_speed(state), k.longest)
        more = k.growth * min(excess, 1.0) * way * self._hold(state) * drag
        return replace(state, bias=state.bias + more / self._usual_drive(state))

    def _keep_bias_bounded(self, state: HoldKLControllerState) -> HoldKLControllerState:
        """Without it the bias would wind up where it changes nothing any more."""
        (drive, error, drag), unit = self._pull(state), self._usual_drive(state)
        low = (self.constants.least_drive * error - drive) / unit
        most = self.max_coef * max(state.distance or 0.0, 1.0) * drag - self._walk(state) / self._gain(state)
        return replace(state, bias=min(max(state.bias, low), max(low, (most - drive) / unit)))
