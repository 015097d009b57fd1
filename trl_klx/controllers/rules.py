"""The simple rules: a constant, Ziegler's, and an exponential one."""

from typing import Any

from .base import KLController, check_positive, safe_exp


class FixedKLController(KLController):
    """
    A constant coefficient, for determinism and debugging. 0.0 is allowed.

    Args:
        init_coef (`float`):
            The coefficient.
        **kwargs:
            The other settings of [`KLController`]; they have no effect on a constant.
    """

    multiplicative = False
    uses = frozenset()
    formula = "coef"

    def _next(self, kl: float, n_steps: float) -> float:
        return self.value


class AdaptiveKLController(KLController):
    r"""
    `coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * n_steps / horizon`, then the bounds.

    Section 2.2 of [Ziegler et al. (2019)](https://huggingface.co/papers/1909.08593).

    Args:
        init_coef (`float`):
            First coefficient.
        clip (`float`, *optional*, defaults to `0.2`):
            Limit of the relative error, so that one odd batch cannot move the coefficient far.
        **kwargs:
            The other settings of [`KLController`]; `target` is required.
    """

    needs_target = True
    formula = "coef * (1 + clip(kl / target - 1, -clip, clip) * n_steps / horizon)"

    def __init__(self, init_coef: float, *, clip: float = 0.2, **kwargs: Any) -> None:
        super().__init__(init_coef, **kwargs)
        check_positive("clip", clip, "Set `clip` to a value such as 0.2.")
        self.clip = float(clip)

    def _next(self, kl: float, n_steps: float) -> float:
        assert self.target is not None
        error = min(max(kl / self.target - 1.0, -self.clip), self.clip)
        # With a batch larger than `horizon / clip` the factor may be negative; the lower bound catches that.
        return self.value * (1.0 + error * n_steps / self.horizon)


class ExponentialKLController(KLController):
    r"""
    `coef *= exp(rate * (kl - target))`, then the bounds.

    The error is absolute, in nats, so a good `rate` depends on the unit of the target.

    Args:
        init_coef (`float`):
            First coefficient.
        rate (`float`, *optional*, defaults to `0.1`):
            Change of `log coef` per nat of error and update.
        **kwargs:
            The other settings of [`KLController`]; `target` is required.
    """

    needs_target = True
    uses = frozenset({"target", "min_coef", "max_coef"})
    formula = "coef * exp(rate * (kl - target))"

    def __init__(self, init_coef: float, *, rate: float = 0.1, **kwargs: Any) -> None:
        super().__init__(init_coef, **kwargs)
        check_positive("rate", rate, "Set `rate` to a value such as 0.1.")
        self.rate = float(rate)

    def _next(self, kl: float, n_steps: float) -> float:
        assert self.target is not None
        return self.value * safe_exp(self.rate * (kl - self.target))
