"""PPO's metrics: sums over a logging window, reduced over all processes once, when they are logged."""

import torch
from accelerate import Accelerator

from ..maths.advantages import masked_moments
from ..maths.estimators import wide_dtype


class PPOMetrics:
    """
    Means and the explained variance over everything that was added since the last [`~PPOMetrics.pop`], exact however it
    was cut into batches, steps and processes. Adding does not wait for the device.
    """

    def __init__(self):
        self._sums: dict[str, torch.Tensor] = {}

    def _add(self, name: str, sums: torch.Tensor) -> None:
        self._sums[name] = self._sums[name] + sums if name in self._sums else sums

    def add_mean(self, name: str, total: torch.Tensor, count: torch.Tensor) -> None:
        """Add to a mean the sum over some items and their number, both 0-dim."""
        dtype = wide_dtype(total.device)
        self._add(name, torch.stack([total.detach().to(dtype), count.to(dtype)]))

    def add_returns(self, values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor) -> None:
        """Add the tokens of a rollout, `(B, T)` each, to the explained variance."""
        self._add(
            "explained_variance", torch.cat([masked_moments(returns, mask), masked_moments(returns - values, mask)])
        )

    def pop(self, accelerator: Accelerator) -> dict[str, float]:
        """The metrics of the window, over all processes, which must all call this. A metric of nothing is NaN."""
        if not self._sums:
            return {}
        sums, self._sums = self._sums, {}
        reduced = iter(accelerator.reduce(torch.cat(list(sums.values())), reduction="sum").tolist())
        metrics = {}
        for name, part in sums.items():
            numbers = [next(reduced) for _ in range(len(part))]
            metrics[name] = _explained_variance(*numbers) if len(numbers) == 6 else _ratio(*numbers)
        return metrics


def _ratio(total: float, count: float) -> float:
    return total / count if count else float("nan")


def _explained_variance(count: float, total: float, squares: float, _, error: float, error_squares: float) -> float:
    """`1 - Var(R - V) / Var(R)` from count, sum and sum of squares of `R` and of `R - V`; 0 if `R` does not vary."""
    if count == 0:
        return float("nan")
    variance = squares / count - (total / count) ** 2
    unexplained = max(0.0, error_squares / count - (error / count) ** 2)
    # Below this, what is left of the difference is rounding: the returns are fp32.
    if variance <= 1e-12 * squares / count:
        return 0.0
    return 1.0 - unexplained / variance
