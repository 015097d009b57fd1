"""Sharded weights, as under FSDP2 and ZeRO-3, where each process holds a part: get the part, and join the parts."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import torch
import torch.distributed.fsdp
from accelerate.utils import broadcast_object_list
from torch import nn
from torch.distributed import all_gather
from transformers.integrations import deepspeed as zero_loading
from transformers.integrations import is_fsdp_enabled


if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    class _Zero3Weight(torch.Tensor):
        """The attributes that DeepSpeed adds to a weight."""

        ds_tensor: torch.Tensor
        ds_process_group: torch.distributed.ProcessGroup
        ds_numel: int
        ds_shape: torch.Size
        ds_status: Any

        def partition(self) -> None: ...


Value = TypeVar("Value")


def _is_zero3(weight: torch.Tensor) -> "TypeGuard[_Zero3Weight]":
    """Whether DeepSpeed has partitioned the weight. Its `data` is then complete only while it is in use."""
    return getattr(weight, "ds_tensor", None) is not None


def _is_dtensor(weight: torch.Tensor) -> "TypeGuard[DTensor]":
    """Whether FSDP2 has sharded the weight."""
    return hasattr(weight, "full_tensor")


def is_sharded(weight: torch.Tensor) -> bool:
    """Whether other processes hold parts of the weight."""
    return _is_zero3(weight) or _is_dtensor(weight)


def whole_shape(weight: torch.Tensor) -> tuple[int, ...]:
    """The shape of the complete weight."""
    return tuple(weight.ds_shape if _is_zero3(weight) else weight.shape)


def local_part(weight: torch.Tensor) -> torch.Tensor:
    """
    The part of a weight that this process holds, which may be flattened; the weight itself if it is not sharded.
    Values written to the part reach the weight after [`use_written_parts`].
    """
    if _is_zero3(weight):
        return weight.ds_tensor
    if _is_dtensor(weight):
        detached: Any = weight.detach()
        part: torch.Tensor = detached.to_local()
        return part
    return weight


def join_parts(weight: torch.Tensor, part: torch.Tensor | None = None) -> torch.Tensor:
    """
    The complete weight, on its device. If it is sharded, every process must call this.

    Args:
        weight (`torch.Tensor`):
            Weight, which tells how it is sharded.
        part (`torch.Tensor`, *optional*):
            Part that this process holds of other values with the same layout. If unset, the weight's values are
            joined.
    """
    part = local_part(weight) if part is None else part
    if _is_zero3(weight):
        part = part.to(weight.device).contiguous()
        group = weight.ds_process_group
        parts = [torch.empty_like(part) for _ in range(torch.distributed.get_world_size(group))]
        all_gather(parts, part, group=group)
        return torch.cat(parts)[: weight.ds_numel].view(weight.ds_shape)
    if _is_dtensor(weight):
        from torch.distributed.tensor import DTensor

        part = part.to(weight.device)
        layout: dict[str, Any] = {"shape": weight.shape, "stride": weight.stride()}
        joined = DTensor.from_local(part, weight.device_mesh, weight.placements, run_check=False, **layout)
        whole: torch.Tensor = joined.full_tensor()
        return whole
    return part


def cut_part(weight: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """
    The part of `whole` that this process holds if `whole` is sharded like `weight`. The inverse of [`join_parts`].
    """
    if _is_zero3(weight):
        size, rank = weight.ds_tensor.numel(), torch.distributed.get_rank(weight.ds_process_group)
        missing = size * torch.distributed.get_world_size(weight.ds_process_group) - whole.numel()
        return nn.functional.pad(whole.reshape(-1), (0, missing))[rank * size : (rank + 1) * size]
    if _is_dtensor(weight):
        from torch.distributed.tensor import distribute_tensor

        sharded: Any = distribute_tensor(whole.to(weight.device), weight.device_mesh, weight.placements)
        part: torch.Tensor = sharded.to_local()
        return part
    return whole


@torch.no_grad()
def use_written_parts(weights: Iterable[torch.Tensor]) -> None:
    """Drop the weights that DeepSpeed has joined, so that it joins the written parts again."""
    for weight in weights:
        if _is_zero3(weight) and weight.ds_status.name == "AVAILABLE":
            weight.partition()


def shard_again(model: nn.Module) -> None:
    """
    Shard the parameters that FSDP2 left joined after a forward pass. Values written to joined ones would be lost.
    """
    # Older versions of torch have no FSDP2.
    fsdp_module: Any = getattr(torch.distributed.fsdp, "FSDPModule", ())
    sharded: list[Any] = [module for module in model.modules() if isinstance(module, fsdp_module)]
    for module in sharded:
        module.reshard()


def broadcast_from_main(value: Value) -> Value:
    """
    The main process's value, for facts about the weights of a model. With `fsdp_cpu_ram_efficient_loading`, only the
    main process has loaded them until they are sharded.
    """
    if not is_fsdp_enabled():
        return value
    box: list[Value] = [value]
    broadcast_object_list(box)  # in place
    return box[0]


@contextmanager
def loaded_whole() -> Iterator[None]:
    """
    Make `from_pretrained` load a complete model on every process. Use it for models that a script calls itself, such
    as a reward model: ZeRO-3 would partition them, and `fsdp_cpu_ram_efficient_loading` would leave their weights at
    zero on all processes except the main one.
    """
    variable = "FSDP_CPU_RAM_EFFICIENT_LOADING"
    setting = os.environ.get(variable)
    partitioning = getattr(zero_loading, "_hf_deepspeed_config_weak_ref", None)
    config = None if partitioning is None else partitioning()
    os.environ[variable] = "false"
    zero_loading.unset_hf_deepspeed_config()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        del os.environ[variable]
        if setting is not None:
            os.environ[variable] = setting
        if config is not None:
            zero_loading.set_hf_deepspeed_config(config)  # type: ignore[no-untyped-call]
