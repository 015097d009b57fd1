"""Weights of which each process holds only a part, as under FSDP2 and ZeRO-3: take the part, join the parts."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed.fsdp
from accelerate.utils import broadcast_object_list
from torch import nn
from torch.distributed import all_gather
from transformers.integrations import deepspeed as zero_loading
from transformers.integrations import is_fsdp_enabled


Value = TypeVar("Value")


def _is_zero3(weight: torch.Tensor) -> bool:
    """Whether DeepSpeed has partitioned the weight. Its `data` is then whole only while it is in use."""
    return getattr(weight, "ds_tensor", None) is not None


def _is_dtensor(weight: torch.Tensor) -> bool:
    return hasattr(weight, "full_tensor")


def is_sharded(weight: torch.Tensor) -> bool:
    """Whether other processes hold parts of the weight."""
    return _is_zero3(weight) or _is_dtensor(weight)


def local_part(weight: torch.Tensor) -> torch.Tensor:
    """
    What this process holds of a weight, flat or not; the weight itself where it is not sharded. Writing to it writes to
    the weight, after [`use_written_parts`].
    """
    if _is_zero3(weight):
        return weight.ds_tensor
    return weight.detach().to_local() if _is_dtensor(weight) else weight


def join_parts(weight: torch.Tensor, part: torch.Tensor | None = None) -> torch.Tensor:
    """
    A weight as a whole, on the weight's device. Where it is sharded, every process must call this.

    Args:
        weight (`torch.Tensor`):
            Weight, which says how it is sharded.
        part (`torch.Tensor`, *optional*):
            What this process holds, if not the weight's own values but others of the same layout.
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
        layout = {"shape": weight.shape, "stride": weight.stride()}
        return DTensor.from_local(part, weight.device_mesh, weight.placements, run_check=False, **layout).full_tensor()
    return part


def cut_part(weight: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """The part of `whole` that this process would hold if it were `weight`. The inverse of [`join_parts`]."""
    if _is_zero3(weight):
        size, rank = weight.ds_tensor.numel(), torch.distributed.get_rank(weight.ds_process_group)
        missing = size * torch.distributed.get_world_size(weight.ds_process_group) - whole.numel()
        return nn.functional.pad(whole.reshape(-1), (0, missing))[rank * size : (rank + 1) * size]
    if _is_dtensor(weight):
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(whole.to(weight.device), weight.device_mesh, weight.placements).to_local()
    return whole


@torch.no_grad()
def use_written_parts(weights: Iterable[torch.Tensor]) -> None:
    """Let go of what DeepSpeed has joined of these weights, so that it joins the parts anew."""
    for weight in weights:
        if _is_zero3(weight) and weight.ds_status.name == "AVAILABLE":
            weight.partition()


def shard_again(model: nn.Module) -> None:
    """FSDP2 may leave parameters joined after a forward pass, and what is written to them then would be lost."""
    for module in model.modules():
        if isinstance(module, getattr(torch.distributed.fsdp, "FSDPModule", ())):
            module.reshard()


def value_of_main(value: Value) -> Value:
    """
    What the main process found out about a model. With `fsdp_cpu_ram_efficient_loading`, it alone has loaded the weights
    until they are sharded.
    """
    if not is_fsdp_enabled():
        return value
    box: list[Any] = [value]
    return broadcast_object_list(box)[0]


@contextmanager
def loaded_whole() -> Iterator[None]:
    """
    Let `from_pretrained` load a whole model on every process. For models beside the policy, such as a reward model that a
    script calls itself: ZeRO-3 would partition it, and `fsdp_cpu_ram_efficient_loading` would leave zeros for weights on
    all processes but the main one.
    """
    variable = "FSDP_CPU_RAM_EFFICIENT_LOADING"
    setting = os.environ.get(variable)
    partitioning = getattr(zero_loading, "_hf_deepspeed_config_weak_ref", None)
    config = None if partitioning is None else partitioning()
    os.environ[variable] = "false"
    zero_loading.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        del os.environ[variable]
        if setting is not None:
            os.environ[variable] = setting
        if config is not None:
            zero_loading.set_hf_deepspeed_config(config)
