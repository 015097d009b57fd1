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
            Adam's first beta. It decides how long the policy coasts, and how far its noise goes.
        horizon, horizon_rollouts (`float`):
            Optimizer steps, and rollouts at least, in which the rest of the way is to be gone. A coefficient acts for
            one rollout; it cannot correct sooner.
        sway (`float`):
            Way of a free policy over the horizon below which a deviation is met in proportion. Else noise alone would
            swing the coefficient of a slow policy from end to end.
        release, brake (`float`):
            Least and most of the penalty, in units of the one that holds the KL still. Some penalty always stays, to
            learn how well it brakes.
        noise_ratio (`float`):
            Length of the noise of one step, in units of what the error of the drive does. So many directions are
            there, squared.
        gusts (`float`):
            Random part of a rollout's push, in units of the length of its noise.
        filling, filled (`float`):
            Mean square way that the noise has walked at which a push is down to 0.7 of what it did at first, and the
            most of it that counts.
        repetition (`float`):
            Steps that follow the same rollout repeat themselves: `n` of them push only `n^(1 - repetition)` times as
            far as one.
        mobility_spread, mobility_drift, most_mobility (`float`):
            Uncertainty of `log mobility` after the first move, its drift per unit of noise that was walked, and the
            most that the mobility may differ from 1, as a factor.
        bias_spread, bias_drift, most_bias_spread (`float`):
            Uncertainty of the bias before the KL has shown anything, its drift per unit of noise that was walked, and
            the most uncertainty, in units of the usual drive. A policy that does not move does not change.
        usual_correlation, usual_weight (`float`):
            Correlation of advantage and KL over completions that is usual, and for how many completions it counts. One
            batch of 32 tells the drive to about its own size.
        least_drive (`float`):
            The least drive that is believed, in units of its standard error. The mean may be negative by chance.
        memory (`float`):
            Batches in the mean of drive and drag. One batch of 32 completions scatters by half.
        quietest, usual_noise (`float`):
            Relative noise of a KL: the least that is believed, and what is assumed where none is given.
        likeness (`float`):
            How much greater the noise of a KL is than the scatter of its completions says. Those of one prompt are
            alike.
        noise_memory, outlier (`float`):
            Batches in the mean of its square, and how many times that mean makes an outlier: a batch whose KL comes
            from a few completions, and which counts with its own noise. The error of the drive has outliers too: one
            adds at most half to its mean square.
        first_way (`float`):
            A first distance beyond this is where the run started, not where its first step led.
        first_speed (`float`):
            Uncertainty of the speed after the first move, in units of the length of its noise.
        known_start, usual_stride (`float`):
            A run that starts nearer than this shows in its first move how far noise goes in one step. Farther away the
            move tells little, and the usual stride is assumed.
        arrived (`float`):
            Distance from which on the policy has arrived.
        band (`float`):
            Excess of the distance that counts as above the target, if its uncertainty is not larger.
        patience, growth, longest (`float`):
            A KL that stays above the target must be on its way to be there in this many optimizer steps. Else the
            drive is taken to be larger, by this much per unit of excess and of way, of which one rollout counts at
            most the longest. In units of the way, it cannot wind up while nothing moves.
    """

    momentum: float = 0.9
    horizon: float = 3.0
    horizon_rollouts: float = 2.0
    sway: float = 0.2
    release: float = 0.1
    brake: float = 3.0
    noise_ratio: float = 12.0
    gusts: float = 0.1
    filling: float = 1.0
    filled: float = 8.0
    repetition: float = 0.3
    mobility_spread: float = 0.4
    mobility_drift: float = 0.3
    most_mobility: float = 30.0
    bias_spread: float = 0.5
    bias_drift: float = 0.75
    most_bias_spread: float = 2.0
    usual_correlation: float = 0.2
    usual_weight: float = 300.0
    least_drive: float = 0.05
    memory: float = 20.0
    quietest: float = 0.04
    usual_noise: float = 0.1
    likeness: float = 1.3
    noise_memory: float = 20.0
    outlier: float = 4.0
    first_way: float = 0.7
    first_speed: float = 0.25
    known_start: float = 0.3
    usual_stride: float = 0.2
    arrived: float = 0.8
    band: float = 0.05
    patience: float = 50.0
    growth: float = 4.0
    longest: float = 0.2

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            # The law divides by memories, horizons and ratios, and a memory holds at least one batch.
            least = 0.0
            if name.endswith("memory") or name == "most_mobility":
                least = 1.0
            elif name.endswith(("horizon", "ratio", "sway", "least_drive", "usual_stride", "filling")):
                least = 1e-6
            if not is_finite_number(value) or value < least:
                raise ValueError(
                    f"`{name}` in `constants` must be a finite number >= {least:g}, got {value!r}. The default is "
                    f"{getattr(type(self), name)}."
                )
        if self.momentum >= 1.0:
            raise ValueError(f"`momentum` in `constants` must be below 1, got {self.momentum!r}. The default is 0.9.")

    def squared_noise(self, kl: float, standard_error: float | None) -> float:
        """Squared relative noise of a measured KL, as far as it is believed."""
        noise = self.usual_noise
        if standard_error is not None and math.isfinite(standard_error):
            noise = self.likeness * standard_error / kl
        return min(max(noise, self.quietest), 10.0) ** 2


@dataclass(frozen=True)
class HoldKLControllerState(KLControllerState):
    """
    The coefficient, and what the law knows. Speeds are per optimizer step and unit of learning rate.

    `distance` is `sqrt(kl / target)`, `None` before the first KL above 0, and `speed` its directed change. `stride` is
    how far the noise of one step goes, `None` before the first move; `known` is 0 if it had to be assumed. `walked` is
    the square of the way that the noise went in all, `noise_speed` the mean square of the speed that it has left in
    Adam's momentum, and `noise_lean` the mean product of that speed with the way from the reference. `mobility` is how
    far a push moves the policy, as a factor of what stride and error of the drive tell. `drive`, `drag` and
    `drive_variance`, the squared error of the former, are means of what the batches showed, scaled to the target;
    `batches` is how many, and `completions` the size of the last. `bias` is what the drive lacks by what the KL has
    shown, in units of the usual drive. `c..` is the covariance of distance, speed, `log mobility` and bias. `noise` is
    the mean squared relative noise of the KL. `rollouts` is how many the last optimizer step learned from, and
    `waiting` how many have been measured for the next one. `steps` and `rate` are the optimizer steps of the last
    rollout and their learning rate; `age` counts the steps since the first move. `acting` is the coefficient that the
    batch measured last had been given before it was measured, and that its steps follow; `None` if they follow
    `value`. `live` is 0 if no reward of that batch differed from another.
    """

    # Far wider than any run needs. Rounding may leave a variance slightly below 0.
    limits = {
        "distance": (0.0, 1e6),
        "speed": (-1e30, 1e30),
        "stride": (1e-30, 1e30),
        "known": (0.0, 1.0),
        "mobility": (1e-6, 1e6),
        "noise_speed": (0.0, 1e60),
        "noise_lean": (0.0, 1e60),
        "walked": (0.0, 1e60),
        "drive": (-1e30, 1e30),
        "drive_variance": (0.0, 1e60),
        "drag": (0.0, 1e30),
        "batches": (0.0, 1e12),
        "completions": (0.0, 1e12),
        "bias": (-1e30, 1e30),
        "c00": (-1e-9, 1e12),
        "c01": (-1e60, 1e60),
        "c02": (-1e12, 1e12),
        "c03": (-1e12, 1e12),
        "c11": (-1e-9, 1e60),
        "c12": (-1e60, 1e60),
        "c13": (-1e60, 1e60),
        "c22": (-1e-9, 1e12),
        "c23": (-1e12, 1e12),
        "c33": (-1e-9, 1e12),
        "noise": (1e-12, 1e12),
        "rollouts": (1.0, 1e6),
        "waiting": (0.0, 1e6),
        "steps": (0.0, 1e6),
        "rate": (1e-30, 1e30),
        "age": (0.0, 1e12),
        "acting": (0.0, 1e30),
        "live": (0.0, 1.0),
    }

    distance: float | None = None
    speed: float = 0.0
    stride: float | None = None
    known: float = 1.0
    mobility: float = 1.0
    noise_speed: float = 0.0
    noise_lean: float = 0.0
    walked: float = 0.0
    drive: float = 0.0
    drive_variance: float | None = None
    drag: float = 0.0
    batches: float = 0.0
    completions: float = 0.0
    bias: float = 0.0
    c00: float = 0.0
    c01: float = 0.0
    c02: float = 0.0
    c03: float = 0.0
    c11: float = 0.0
    c12: float = 0.0
    c13: float = 0.0
    c22: float = 0.0
    c23: float = 0.0
    c33: float = 0.0
    noise: float | None = None
    rollouts: float = 1.0
    waiting: float = 0.0
    steps: float = 1.0
    rate: float = 1.0
    age: float = 0.0
    acting: float | None = None
    live: float = 1.0

    @property
    def covariance(self) -> Matrix:
        return (
            (self.c00, self.c01, self.c02, self.c03),
            (self.c01, self.c11, self.c12, self.c13),
            (self.c02, self.c12, self.c22, self.c23),
            (self.c03, self.c13, self.c23, self.c33),
        )

    @property
    def drift(self) -> float:
        """Present change of the distance in one optimizer step, that by noise included."""
        return self.rate * (self.speed + self.noise_lean / max(self.distance or 0.0, 1e-3))

    def after_rollout(self, stepped: bool) -> "HoldKLControllerState":
        """The state with one more rollout counted. If `stepped`, it is the first that the next step learns from."""
        if not stepped:
            return replace(self, waiting=self.waiting + 1.0)
        return replace(self, waiting=1.0, rollouts=max(self.waiting, 1.0))

    def with_stride(self, stride: float) -> "HoldKLControllerState":
        """The state where noise and pushes go as far as this, and always have."""
        assert self.stride is not None
        ratio = stride / self.stride
        c = self.covariance
        scales = (1.0, ratio, 1.0, 1.0)
        scaled = tuple(tuple(scales[i] * scales[j] * c[i][j] for j in range(4)) for i in range(4))
        return replace(
            self.with_covariance(scaled),
            stride=stride,
            speed=ratio * self.speed,
            noise_speed=ratio**2 * self.noise_speed,
            noise_lean=ratio**2 * self.noise_lean,
        )

    def with_covariance(self, c: Matrix) -> "HoldKLControllerState":
        return replace(self, **{f"c{row}{column}": c[row][column] for row in range(4) for column in range(row, 4)})
