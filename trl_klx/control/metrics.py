"""Named sums on the device, reduced over all processes at once, and the metrics computed from them."""

from collections.abc import Callable, Mapping

import torch

from ..maths.estimators import wide_dtype


class Sums:
    """
    Sums by name, each a few numbers. Adding to them does not wait for the device. They are exact however the items
    were split into batches, steps and processes.
    """

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}

    def add(self, name: str, *totals: torch.Tensor) -> None:
        """Add 0-dim totals to the numbers of that name."""
        dtype = wide_dtype(totals[0].device)
        sums = torch.stack([total.detach().to(dtype) for total in totals])
        self._sums[name] = self._sums[name] + sums if name in self._sums else sums

    def merge(self, other: "Sums") -> None:
        """Take over all sums of `other`, which is left with nothing."""
        sums, other._sums = other._sums, {}
        for name, part in sums.items():
            self._sums[name] = self._sums[name] + part if name in self._sums else part

    def pop(self, reduce: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, list[float]]:
        """
        Take the sums over all processes, and start again from nothing. Every process must call this, with the same
        names.

        Args:
            reduce (`Callable`):
                Sums a tensor over all processes.
        """
        if not self._sums:
            return {}
        sums, self._sums = self._sums, {}
        numbers = iter(reduce(torch.cat(list(sums.values()))).tolist())
        return {name: [next(numbers) for _ in range(len(part))] for name, part in sums.items()}


def mean(total: float, count: float) -> float:
    """The mean of so many items; NaN of none."""
    return total / count if count else float("nan")


def explained_variance(count: float, total: float, squares: float, _: float, error: float, errors: float) -> float:
    """
    `1 - Var(R - V) / Var(R)` from count, sum and sum of squares of the returns `R` and of `R - V`; 0 if `R` does not
    vary.
    """
    if count == 0:
        return float("nan")
    variance = squares / count - (total / count) ** 2
    unexplained = max(0.0, errors / count - (error / count) ** 2)
    # Below this, the difference is rounding: the returns are fp32.
    if variance <= 1e-12 * squares / count:
        return 0.0
    return 1.0 - unexplained / variance


def effective_sample_share(total: float, squares: float, count: float) -> float:
    """Effective sample size `(sum w)^2 / sum w^2` of importance weights, as a share of the samples."""
    return total**2 / (squares * count) if squares and count else float("nan")


# How to read a metric that is no mean.
READINGS: Mapping[str, Callable[..., float]] = {
    "ppo/explained_variance": explained_variance,
    "klx/sampler_ess": effective_sample_share,
}


def read_metrics(sums: Mapping[str, list[float]]) -> dict[str, float]:
    """The metrics whose sums these are: means, but for those in `READINGS`."""
    return {name: READINGS.get(name, mean)(*numbers) for name, numbers in sums.items()}
