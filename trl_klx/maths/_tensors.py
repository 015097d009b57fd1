"""Shape checks and dtypes that all formulas share."""

import torch


def check_same_shape(ndim: int | None = None, **tensors: torch.Tensor) -> None:
    """
    Raise if the tensors differ in shape, because broadcasting would turn a mistake into a plausible number.

    Args:
        ndim (`int`, *optional*):
            Number of dimensions that every tensor must have.
        **tensors (`torch.Tensor`):
            Tensors, keyed by the names that the message shows.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    text = ", ".join(f"`{name}` {shape}" for name, shape in shapes.items())
    if len(set(shapes.values())) > 1:
        raise ValueError(f"Shapes must be equal, but got {text}.")
    if ndim is not None and any(len(shape) != ndim for shape in shapes.values()):
        raise ValueError(f"Expected {ndim} dimensions, but got {text}.")


def wide_dtype(device: torch.device) -> torch.dtype:
    """The widest float for sums on this device: fp64, except where the backend may have none (MPS, XPU)."""
    return torch.float64 if device.type in ("cpu", "cuda") else torch.float32
