"""How well a series of measured KLs held its target: pure functions of plain numbers."""

import math
from collections.abc import Sequence


SETTLED_BAND = 0.2
SETTLED_WINDOW = 5


def relative_rms_error(kls: Sequence[float], target: float) -> float:
    """
    `sqrt(mean((kl / target - 1)^2))`: 0.1 means that the KL is usually within a tenth of the target.

    Args:
        kls (`Sequence[float]`):
            Measured KLs, one per generation batch, without those of the first phase.
        target (`float`):
            The KL to hold.
    """
    if not kls:
        raise ValueError("`kls` is empty, so there is no error to compute.")
    # `hypot` scales, where the square of a large error would overflow.
    return math.hypot(*(kl / target - 1.0 for kl in kls)) / math.sqrt(len(kls))


def steps_to_settle(
    kls: Sequence[float], target: float, band: float = SETTLED_BAND, window: int = SETTLED_WINDOW
) -> int | None:
    """
    Number of batches before the KL has come to stay: from then on every mean of `window` consecutive batches is within
    `band` of the target (single batches are too noisy to tell). `None` if it never does.

    Args:
        kls (`Sequence[float]`):
            Measured KLs, one per generation batch.
        target (`float`):
            The KL to hold.
        band (`float`, *optional*, defaults to `0.2`):
            Greatest relative error of a mean.
        window (`int`, *optional*, defaults to `5`):
            Batches in a mean.
    """
    means = [math.fsum(kls[start : start + window]) / window for start in range(len(kls) - window + 1)]
    inside = [abs(mean / target - 1.0) <= band for mean in means]
    if not inside or not inside[-1]:
        return None
    return max((start + 1 for start, good in enumerate(inside) if not good), default=0)
