"""How [`HoldKLController`] foresees the way of a policy, and what it learns from where the policy is."""

import math
from collections.abc import Callable
from dataclasses import replace

from .base import safe_exp
from .hold_state import HoldConstants, HoldKLControllerState, Matrix


def coast(state: HoldKLControllerState, push: float, steps: float, constants: HoldConstants) -> HoldKLControllerState:
    """
    The state after some optimizer steps under a constant push away from the reference.

    The push and the noise of the gradient both pass through Adam's first moment, which starts at 0 and is corrected
    for that. The noise has no direction, so that its mean square counts: with `u` its part of the speed and `d` the
    way from the reference, `E[u^2]` and `E[d * u]` are followed exactly. All steps on a rollout share its noise.

    Args:
        state ([`HoldKLControllerState`]):
            Where the policy is. It has made its first move.
        push (`float`):
            Speed that the push would lead to in the end, per unit of learning rate.
        steps (`float`):
            Number of steps. Every `state.steps` of them, from the first on, follow a rollout of their own.
        constants ([`HoldConstants`]):
            The numbers of the law.
    """
    assert state.distance is not None and state.stride is not None
    rate, distance, speed, age = state.rate, state.distance, state.speed, state.age
    noise_speed, noise_lean = state.noise_speed, state.noise_lean
    for step in range(max(math.ceil(steps), 1)):
        if step % max(int(state.steps), 1) == 0:
            # Mean products of the rollout's noise with the random speed and with the way.
            same_speed = same_lean = 0.0
        age += 1.0
        follows = _follows(age, constants)
        keeps = 1.0 - follows
        speed = keeps * speed + follows * push
        noise_speed = keeps**2 * noise_speed + follows * (2.0 * keeps * same_speed + follows * state.stride**2)
        noise_lean = keeps * noise_lean + follows * same_lean + rate * noise_speed
        same_speed = keeps * same_speed + follows * state.stride**2
        same_lean += rate * same_speed
        walked = rate * (2.0 * noise_lean - rate * noise_speed)
        distance = math.sqrt(max(max(distance + rate * speed, 0.0) ** 2 + walked, 0.0))
    return replace(state, distance=distance, speed=speed, age=age, noise_speed=noise_speed, noise_lean=noise_lean)


def predict(
    state: HoldKLControllerState,
    advance: Callable[[HoldKLControllerState], HoldKLControllerState],
    constants: HoldConstants,
) -> HoldKLControllerState:
    """
    The state after the steps of one rollout, and how uncertain it is.

    Args:
        state ([`HoldKLControllerState`]):
            Where the policy was.
        advance (`Callable`):
            Makes the steps.
        constants ([`HoldConstants`]):
            The numbers of the law.
    """
    k, after = constants, advance(state)
    assert state.distance is not None and state.stride is not None and after.distance is not None
    step = 1e-4
    nudges = (
        ({"distance": state.distance + step}, step),
        ({"speed": state.speed + step * state.stride}, step * state.stride),
        ({"mobility": state.mobility * math.exp(step)}, step),
        ({"bias": state.bias + step}, step),
    )
    distances, speeds = [], []
    for change, width in nudges:
        nudged = advance(replace(state, **change))
        assert nudged.distance is not None
        distances.append((nudged.distance - after.distance) / width)
        speeds.append((nudged.speed - after.speed) / width)
    c = propagate((tuple(distances), tuple(speeds), (0.0, 0.0, 1.0, 0.0), (0.0, 0.0, 0.0, 1.0)), state.covariance)
    noise = state.steps * (state.rate * state.stride) ** 2
    # A gust is a push that nothing foresees. From rest, and without a walk, it shows how far it reaches.
    still = replace(state, distance=0.0, speed=0.0, stride=0.0, noise_speed=0.0, noise_lean=0.0)
    blown = coast(still, k.gusts * state.stride, state.steps, k)
    gust = (blown.distance or 0.0, blown.speed, 0.0, 0.0)
    drifts = (
        0.0,
        0.0,
        _bounded_drift(k.mobility_drift**2 * noise, state.c22, k.mobility_spread),
        _bounded_drift(k.bias_drift**2 * noise, state.c33, k.most_bias_spread),
    )
    c = tuple(tuple(c[i][j] + gust[i] * gust[j] + (drifts[i] if i == j else 0.0) for j in range(4)) for i in range(4))
    # The steps of one rollout share its noise, and so add up.
    return replace(after.with_covariance(c), walked=min(state.walked + state.steps * noise, k.filled))


def correct(
    state: HoldKLControllerState, measured: float, variance: float, constants: HoldConstants
) -> HoldKLControllerState:
    """
    The state after one measurement.

    Args:
        state ([`HoldKLControllerState`]):
            What was foreseen.
        measured (`float`):
            Measured distance.
        variance (`float`):
            Its squared error.
        constants ([`HoldConstants`]):
            The numbers of the law.
    """
    assert state.distance is not None
    c = state.covariance
    total = max(c[0][0], 0.0) + variance
    limit = 3.0 * math.sqrt(total)
    surprise = min(max(measured - state.distance, -limit), limit)
    # One great surprise may be an outlier. If it comes again, the policy is there, whatever the model says.
    missed = min((measured - state.distance - surprise) ** 2, 1.0)
    gain = [c[row][0] / total for row in range(4)]
    mobility = state.mobility * safe_exp(gain[2] * surprise)
    c = tuple(tuple(c[i][j] - gain[i] * c[0][j] for j in range(4)) for i in range(4))
    c = ((c[0][0] + missed, *c[0][1:]), *c[1:])
    return replace(
        state.with_covariance(c),
        distance=max(state.distance + gain[0] * surprise, 0.0),
        speed=state.speed + gain[1] * surprise,
        mobility=min(max(mobility, 1.0 / constants.most_mobility), constants.most_mobility),
        bias=state.bias + gain[3] * surprise,
    )


def propagate(f: Matrix, c: Matrix) -> Matrix:
    """`f c f^T`."""
    fc = [[sum(f[i][m] * c[m][j] for m in range(4)) for j in range(4)] for i in range(4)]
    return tuple(tuple(sum(fc[i][m] * f[j][m] for m in range(4)) for j in range(4)) for i in range(4))


def _follows(age: float, constants: HoldConstants) -> float:
    """How much of a gradient Adam's corrected first moment takes over at its `age`-th step."""
    return (1.0 - constants.momentum) / (1.0 - math.pow(constants.momentum, age))


def _bounded_drift(drift: float, variance: float, most: float) -> float:
    return min(drift, max(most**2 - variance, 0.0))
