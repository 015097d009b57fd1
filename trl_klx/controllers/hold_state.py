"""What [`HoldKLController`] knows, and the numbers that it works with."""

import math
from dataclasses import dataclass, replace

from .base import KLControllerState
from .setting_rules import is_finite_number


Matrix = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class HoldConstants:
    """
    Every number of [`HoldKLController`], and why it is what it is. None depends on the task, the unit of the KL, the
    size of the batch or the learning rate.

    Attributes:
        momentum (`float`):
            Adam's first beta. It decides how long the policy coasts.
        horizon (`float`):
            Optimizer steps in which the rest of the way is to be gone, at most. Shorter answers to noise, longer
            arrives late and wanders.
        shortest_horizon, braking_way (`float`):
            A fast policy has less time: the number of steps in which it covers the braking way without a penalty, but
            not less than the shortest horizon.
        horizon_rollouts (`float`):
            Rollouts that the horizon covers at least. A coefficient acts for one; it cannot correct sooner.
        shortest_way (`float`):
            Where the policy is slow, a deviation below this is met in proportion. Else noise alone would swing the
            coefficient from end to end.
        release, brake (`float`):
            Limits of the push. Some penalty always stays, to learn how well it brakes; one batch brakes with at most
            three times the drive.
        gusts (`float`):
            Random part of a rollout's push, in units of the relative error of its drive.
        usual_gusts, least_gusts, most_gusts (`float`):
            That part where no error of the drive is given, and the limits of what is believed.
        faster (`float`):
            Growth of the fastest speed in one batch, at most. An outlier of the KL must not pass for a speed.
        slowest (`float`):
            Least free speed, as a share of the fastest one seen.
        free_drift, free_step (`float`):
            Random drift of `log a` per optimizer step, and the most that one batch may change it by.
        first_spread (`float`):
            Uncertainty of `log a` after the first move. Adam's first step is not like the following ones.
        usual_correlation, usual_weight (`float`):
            Correlation of advantage and KL over completions that is usual, and for how many completions it counts. One
            batch of 32 tells the drive to about its own size.
        least_correlation (`float`):
            The least correlation that is believed. The mean drive may be negative by chance.
        drift (`float`):
            Change of `log hold` in one optimizer step at full speed. It sets how fast the law learns.
        streak_memory, streak_drift (`float`):
            Batches in the mean of the filter's surprises, and how much faster `log hold` may drift if they fall on one
            side, because the policy has changed by more than the drift allows for: the variance of the drift grows by
            `streak_drift` times the excess of the squared mean over what chance gives, relative to the latter.
        diffusion (`float`):
            Gradient noise adds to the KL too, and the drive does not show it. Its steps have no direction, so that
            they count by their square: as this many times `way * (drive_error / drive)^2` of the drive, where the way
            is that of one rollout without a penalty.
        usual_diffusion, most_diffusion (`float`):
            That share where the way or the error of the drive is unknown, and the most that is believed.
        spread, measured_spread (`float`):
            Uncertainty of `log hold` before the KL has shown anything, and once drive and drag have been measured
            near the reference. Most policies slow down on their way, whatever the penalty does. If `log hold` were
            less certain, the filter would take that for a penalty that brakes well.
        memory (`float`):
            Batches in the mean of drive and drag. One batch of 32 completions scatters by half.
        quietest, usual_noise (`float`):
            Relative noise of a KL: the least that is believed, and what is assumed where none is given.
        noise_memory, outlier (`float`):
            Batches in the mean of its square, and how many times that mean makes an outlier: a batch whose KL comes
            from a few completions, and which counts with its own noise. The error of the drive has outliers too: one
            adds at most half to its mean square.
        full_speed (`float`):
            Free speed at which `drift` is quoted. A policy that moves less changes less.
        first_way (`float`):
            A first distance beyond this is where the run started, not where its first step led.
        first_speed (`float`):
            Least free speed where the run starts away from its reference, and the first step tells little.
        integral, integral_above (`float`):
            Growth of `log hold` per unit of excess and of way, near the target and where the KL stays above it. As the
            policy learns, the coefficient that holds it drifts, and the filter alone would lag behind. In units of the
            way, it cannot wind up while nothing moves.
        patience (`float`):
            Optimizer steps in which a KL that stays above the target must be on its way to be there.
        arrived (`float`):
            Distance from which on it counts, and from which on the policy has arrived.
        longest (`float`):
            The most way of one rollout that it counts.
        band (`float`):
            Excess of the distance that counts as above the target, if its uncertainty is not larger.
    """

    momentum: float = 0.9
    horizon: float = 5.0
    shortest_horizon: float = 3.0
    braking_way: float = 0.35
    horizon_rollouts: float = 2.0
    shortest_way: float = 0.2
    release: float = 0.9
    brake: float = -2.0
    gusts: float = 1.2
    usual_gusts: float = 0.6
    least_gusts: float = 0.1
    most_gusts: float = 1.4
    faster: float = 1.25
    slowest: float = 0.33
    free_drift: float = 0.06
    free_step: float = 0.3
    first_spread: float = 0.5
    usual_weight: float = 300.0
    usual_correlation: float = 0.2
    least_correlation: float = 0.05
    drift: float = 0.04
    streak_memory: float = 6.0
    streak_drift: float = 4.0
    diffusion: float = 30.0
    usual_diffusion: float = 1.2
    most_diffusion: float = 30.0
    spread: float = 0.7
    measured_spread: float = 0.25
    memory: float = 40.0
    quietest: float = 0.04
    usual_noise: float = 0.1
    noise_memory: float = 20.0
    outlier: float = 4.0
    full_speed: float = 0.09
    first_way: float = 0.7
    first_speed: float = 0.03
    integral: float = 2.0
    integral_above: float = 4.0
    patience: float = 50.0
    arrived: float = 0.8
    longest: float = 0.2
    band: float = 0.05

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            # The law divides by memories, horizons and spreads, and a memory holds at least one batch.
            least = 1.0 if name.endswith("memory") else 1e-6 if name.endswith(("horizon", "spread")) else 0.0
            if not is_finite_number(value) or (value < least and name != "brake"):
                raise ValueError(
                    f"`{name}` in `constants` must be a finite number >= {least:g}, got {value!r}. The default is "
                    f"{getattr(type(self), name)}."
                )

    def squared_noise(self, kl: float, standard_error: float | None) -> float:
        """Squared relative noise of a measured KL, as far as it is believed."""
        noise = self.usual_noise
        if standard_error is not None and math.isfinite(standard_error):
            noise = standard_error / kl
        return min(max(noise, self.quietest), 10.0) ** 2


@dataclass(frozen=True)
class HoldKLControllerState(KLControllerState):
    """
    The coefficient, and what the law knows. `distance` is `sqrt(kl / target)`, `None` before the first KL above 0.
    `speed` is its change per optimizer step. `free_speed` is that of a policy without a penalty, per unit of learning
    rate, `None` before the first move; `fastest` is the greatest one seen. `bias` is the logarithm of `hold` over its
    estimate from drive and drag. `drive`, `drag` and `drive_variance`, the squared error of the former, are means of
    what the batches showed, scaled to the target; `batches` is how many, and `completions` the size of the last. `c..`
    is the covariance of distance, speed, bias and the logarithm of the free speed. `noise` is the mean squared
    relative noise of the KL. `rollouts` is how many the last optimizer step learned from, and `waiting` how many have
    been measured for the next one. `steps` and `rate` are the optimizer steps of the last rollout and their learning
    rate; `age` counts the steps since the first move. `acting` is the coefficient that the batch measured last had
    been given before it was measured, and that its steps follow; `None` if they follow `value`. `streak` is the mean
    surprise of the last batches, in units of the standard deviation that the filter expects.
    """

    # Far wider than any run needs. Rounding may leave a variance slightly below 0.
    limits = {
        "distance": (0.0, 1e6),
        "speed": (-1e6, 1e6),
        "bias": (-1e3, 1e3),
        "free_speed": (1e-30, 1e30),
        "fastest": (0.0, 1e30),
        "drive": (-1e30, 1e30),
        "drive_variance": (0.0, 1e60),
        "drag": (0.0, 1e30),
        "batches": (0.0, 1e12),
        "completions": (0.0, 1e12),
        "c00": (-1e-9, 1e12),
        "c01": (-1e12, 1e12),
        "c02": (-1e12, 1e12),
        "c11": (-1e-9, 1e12),
        "c12": (-1e12, 1e12),
        "c22": (-1e-9, 1e12),
        "c03": (-1e12, 1e12),
        "c13": (-1e12, 1e12),
        "c23": (-1e12, 1e12),
        "c33": (-1e-9, 1e12),
        "noise": (1e-12, 1e12),
        "rollouts": (1.0, 1e6),
        "waiting": (0.0, 1e6),
        "steps": (0.0, 1e6),
        "rate": (1e-30, 1e30),
        "live": (0.0, 1.0),
        "age": (0.0, 1e12),
        "acting": (0.0, 1e30),
        "streak": (-4.0, 4.0),
    }

    distance: float | None = None
    speed: float = 0.0
    bias: float = 0.0
    free_speed: float | None = None
    fastest: float = 0.0
    drive: float = 0.0
    drive_variance: float | None = None
    drag: float = 0.0
    batches: float = 0.0
    completions: float = 0.0
    c00: float = 0.0
    c01: float = 0.0
    c02: float = 0.0
    c11: float = 0.0
    c12: float = 0.0
    c22: float = 0.0
    c03: float = 0.0
    c13: float = 0.0
    c23: float = 0.0
    c33: float = 0.0
    noise: float | None = None
    rollouts: float = 1.0
    waiting: float = 0.0
    steps: float = 1.0
    rate: float = 1.0
    live: float = 1.0
    age: float = 0.0
    acting: float | None = None
    streak: float = 0.0

    @property
    def covariance(self) -> Matrix:
        return (
            (self.c00, self.c01, self.c02, self.c03),
            (self.c01, self.c11, self.c12, self.c13),
            (self.c02, self.c12, self.c22, self.c23),
            (self.c03, self.c13, self.c23, self.c33),
        )

    def after_rollout(self, stepped: bool) -> "HoldKLControllerState":
        """The state with one more rollout counted. If `stepped`, it is the first that the next step learns from."""
        if not stepped:
            return replace(self, waiting=self.waiting + 1.0)
        return replace(self, waiting=1.0, rollouts=max(self.waiting, 1.0))

    def with_bias_spread(self, most: float) -> "HoldKLControllerState":
        """The state with a bias that is known to this standard deviation, if it was known less well."""
        share = min(most / math.sqrt(self.c22), 1.0) if self.c22 > 0.0 else 1.0
        return replace(self, c02=share * self.c02, c12=share * self.c12, c22=share**2 * self.c22, c23=share * self.c23)

    def with_covariance(self, c: Matrix, **changes: float) -> "HoldKLControllerState":
        entries = {f"c{row}{column}": c[row][column] for row in range(4) for column in range(row, 4)}
        return replace(self, **entries, **changes)


def propagate(f: Matrix, c: Matrix) -> Matrix:
    """`f c f^T`."""
    fc = [[sum(f[i][m] * c[m][j] for m in range(4)) for j in range(4)] for i in range(4)]
    return tuple(tuple(sum(fc[i][m] * f[j][m] for m in range(4)) for j in range(4)) for i in range(4))


def add_noise(c: Matrix, shared: tuple[float, float], drifts: tuple[float, float]) -> Matrix:
    """The covariance after a noise that distance and speed share, and after the drifts of bias and free speed."""
    noise = [*shared, 0.0, 0.0]
    own = (0.0, 0.0, *drifts)
    return tuple(
        tuple(c[i][j] + noise[i] * noise[j] + (own[i] if i == j else 0.0) for j in range(4)) for i in range(4)
    )
