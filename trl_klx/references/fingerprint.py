"""Hashes that tell whether two sets of weights are the same."""

import hashlib
from collections.abc import Collection, Iterable
from typing import Protocol

import torch

from .sharding import broadcast_from_main, join_parts


class HasParameters(Protocol):
    """Anything with named weights: a model, or a file of one."""

    def named_parameters(self) -> Iterable[tuple[str, torch.Tensor]]: ...


def hash_tensors(tensors: dict[str, torch.Tensor]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes, sorted by name."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().to("cpu").contiguous()
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def fingerprint(model: HasParameters, without: Collection[int] = ()) -> str:
    """
    Hash a sample of every weight. The cost hardly depends on the size of the model, and models that were trained
    separately get different hashes.

    Args:
        model (`nn.Module`):
            Model, or anything else with `named_parameters()`.
        without (`Collection[int]`, *optional*, defaults to `()`):
            Values of `id()` of the weights to leave out.
    """
    sample = {}
    for name, weight in model.named_parameters():
        if id(weight) in without:
            continue
        flat = join_parts(weight).detach().reshape(-1)
        stride = max(1, flat.numel() // 256)
        sample[name] = flat[::stride][:256].float()
    return broadcast_from_main(hash_tensors(sample))
