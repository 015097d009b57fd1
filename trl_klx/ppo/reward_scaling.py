"""Scaling and clipping of scores before they become rewards."""

import math
from typing import Any

import torch

from ..controllers.setting_rules import is_finite_number


class RewardScaler:
    """
    Divides scores by their standard deviation over all processes, then clips them. The standard deviation covers all
    scores so far (`"running"`), or those up to and including the first rollout whose scores differ (`"ref"`). The mean
    is not subtracted, because the baseline does that.

    Args:
        kind (`str`):
            `"none"`, `"running"` or `"ref"`.
        cliprange (`float`, *optional*):
            Clip to `[-cliprange, cliprange]`.
    """

    def __init__(self, kind: str, cliprange: float | None = None):
        self.kind = kind
        self.cliprange = cliprange
        self.count, self.mean, self.squares = 0, 0.0, 0.0
        self.reference_std: float | None = None

    @property
    def std(self) -> float:
        """Standard deviation of all scores so far, or 1 if they do not vary."""
        std = math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0
        return std if std > 0.0 else 1.0

    def _observe(self, scores: list[float]) -> None:
        """Update mean and sum of squared deviations with a batch (Chan et al. 1983)."""
        count = len(scores)
        if not count:
            return
        mean = math.fsum(scores) / count
        squares = math.fsum((score - mean) ** 2 for score in scores)
        total = self.count + count
        self.squares += squares + (mean - self.mean) ** 2 * self.count * count / total
        self.mean += (mean - self.mean) * count / total
        self.count = total

    def __call__(self, scores: torch.Tensor, valid: torch.Tensor, update: bool) -> torch.Tensor:
        """
        Args:
            scores (`torch.Tensor` of shape `(N,)`):
                Scores of all processes.
            valid (`torch.Tensor` of shape `(N,)`):
                Which of them count.
            update (`bool`):
                Whether to update the standard deviation; `False` in evaluation.
        """
        if self.kind != "none":
            if update:
                seen = [score for score in scores[valid].tolist() if math.isfinite(score)]
                self._observe(seen)
                if self.reference_std is None and self.squares > 0.0:
                    self.reference_std = self.std
            scores = scores / (self.std if self.kind == "running" else self.reference_std or 1.0)
        if self.cliprange is not None:
            scores = scores.clamp(-self.cliprange, self.cliprange)
        return scores

    def state_dict(self) -> dict[str, Any]:
        return {
            "count": self.count,
            "mean": self.mean,
            "squares": self.squares,
            "reference_std": self.reference_std,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for key in self.state_dict():
            value = state.get(key)
            if key == "reference_std" and value is None:
                continue
            if not is_finite_number(value) or (key != "mean" and value < 0):  # type: ignore[operator]
                expected = "a finite number" if key == "mean" else "a finite number >= 0"
                raise ValueError(f"Cannot resume: {key!r} of the reward scaling is {value!r}, expected {expected}.")
        self.count, self.mean, self.squares = int(state["count"]), float(state["mean"]), float(state["squares"])
        self.reference_std = state.get("reference_std")
