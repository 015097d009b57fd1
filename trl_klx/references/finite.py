"""Weights that no training can use: NaN, infinite, or so large that the first product with them is."""

import math
import os
from collections.abc import Mapping

import torch
from safetensors import safe_open


# The square of a larger weight, summed over the width of a layer, leaves the range of fp32. Trained weights are many
# orders of magnitude smaller, but a flipped bit of an exponent easily makes 1e38 of one.
LARGEST_WEIGHT = 1e15
# LoRA's `lora_alpha / r`. Values in use are below 1000.
LARGEST_SCALING = 1e6


def weight_fault(weight: torch.Tensor) -> str | None:
    """
    Say what is wrong with the values of a weight.

    Args:
        weight (`torch.Tensor`):
            Weight. One that does not hold floating-point numbers, such as a quantised one, is not looked at.

    Returns:
        `str` or `None`: The fault, or `None` if there is none.
    """
    if not weight.is_floating_point() or not weight.numel():
        return None
    # Torch compares no 8-bit floats.
    low, high = (weight.float() if weight.dtype.itemsize == 1 else weight).aminmax()
    largest = max(abs(float(low)), abs(float(high)))  # both are NaN if any value is
    if not math.isfinite(largest):
        return "holds NaN or infinite values"
    return f"holds values up to {largest:.1e}" if largest > LARGEST_WEIGHT else None


def file_fault(path: str | os.PathLike[str]) -> str | None:
    """Say which weight in a safetensors file training cannot use, and why. Returns `None` if there is none."""
    with safe_open(path, framework="pt") as weights:
        for name in weights.keys():  # noqa: SIM118 - it is no dict
            fault = weight_fault(weights.get_tensor(name))
            if fault is not None:
                return f"weight {name!r} {fault}"
    return None


def weights_fault(weights: Mapping[str, torch.Tensor]) -> str | None:
    """Say which of several weights training cannot use, and why. Returns `None` if there is none."""
    for name in sorted(weights):
        fault = weight_fault(weights[name])
        if fault is not None:
            return f"weight {name!r} {fault}"
    return None
