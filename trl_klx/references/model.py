"""References with separate weights: a frozen copy of the policy, or another model."""

import copy
import functools
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from accelerate import Accelerator
from accelerate.utils import fsdp2_prepare_model
from torch import nn
from trl.models.utils import prepare_deepspeed, prepare_fsdp
from trl.trainer import utils as trl_utils

from ..trl_versions import TRL_HAS_LM_HEAD
from .base import KLReference
from .moving import Mover, Weights
from .peft_adapters import unwrapped
from .sharding import is_sharded, join_parts, shard_again


class ModelReference(KLReference):
    """
    A reference that is a model separate from the policy.

    Args:
        policy (`nn.Module`):
            Policy.
        model (`nn.Module`):
            Frozen model.
        identity (`dict`):
            What the reference is.
        accelerator ([`~accelerate.Accelerator`]):
            Places and shards the model in the same way as the policy.
        mover ([`Mover`], *optional*):
            How the model follows the policy.
    """

    def __init__(
        self,
        policy: nn.Module,
        model: nn.Module,
        identity: dict[str, Any],
        accelerator: Accelerator,
        mover: Mover | None = None,
    ):
        super().__init__(identity, mover)
        self.policy = policy
        shared = {id(parameter) for parameter in policy.parameters()}
        self._own = {name for name, parameter in model.named_parameters() if id(parameter) not in shared}
        self.model = _prepare(model, accelerator)

    @contextmanager
    def active(self) -> Iterator[nn.Module]:
        yield self.model

    def weights(self) -> Weights:
        shard_again(self.model)
        return {name: weight for name, weight in unwrapped(self.model).named_parameters() if name in self._own}

    def policy_weights(self) -> Weights:
        shard_again(self.policy)
        return dict(unwrapped(self.policy).named_parameters())


def _prepare(model: nn.Module, accelerator: Accelerator) -> nn.Module:
    prepared: nn.Module
    if getattr(model, "is_quantized", False):
        return model  # it was loaded to its device, and is sharded by no engine
    fsdp_plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if getattr(accelerator.state, "deepspeed_plugin", None) is not None:
        prepared = prepare_deepspeed(model, accelerator)
    elif fsdp_plugin is not None and fsdp_plugin.fsdp_version == 2:
        # This shards layer by layer, like the policy, and uses the main process's weights if only that process has
        # loaded them. TRL's function would join the whole model at once and trust the weights of every process.
        prepared = fsdp2_prepare_model(accelerator, model).requires_grad_(False).eval()
    elif fsdp_plugin is not None:
        prepared = cast(nn.Module, prepare_fsdp(model, accelerator))
    else:
        prepared = accelerator.prepare_model(model, evaluation_mode=True)
    return prepared


def add_trl_lm_head(model: nn.Module, temperature: float, cast_lm_head_to_fp32: bool) -> None:
    """Add TRL's LM head for log-probs, if this version of TRL has one, to a model that TRL has not prepared."""
    if TRL_HAS_LM_HEAD:
        trl_utils.add_fused_lm_head(
            cast(Any, model), temperature=temperature, cast_lm_head_to_fp32=cast_lm_head_to_fp32
        )


def frozen_copy(policy: nn.Module, share: bool) -> nn.Module:
    """
    A frozen copy of the policy as it is now.

    Args:
        policy (`nn.Module`):
            Policy.
        share (`bool`):
            Whether the copy shares the weights that are not trained, which never change.
    """
    memo: dict[int, Any] = {}
    for parameter in policy.parameters():
        if is_sharded(parameter):
            # Under ZeRO-3, `from_pretrained` shards the policy. The copy stays on the CPU until it is sharded as well.
            memo[id(parameter)] = nn.Parameter(join_parts(parameter).detach().cpu(), requires_grad=False)
        elif share and not parameter.requires_grad:
            memo[id(parameter)] = parameter
    model = copy.deepcopy(policy, memo).requires_grad_(False).eval()
    for module in model.modules():
        if "forward" in vars(module):
            module.forward = _rebind(module.forward, memo)
    return model


def _rebind(value: Any, memo: dict[int, Any]) -> Any:
    """
    The counterpart of `value` for the copy that `memo` describes. TRL patches forwards with closures over the policy.
    `copy.deepcopy` treats functions as constants, so the copied forward would still read the policy.
    """
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, functools.partial):
        arguments = (_rebind(argument, memo) for argument in value.args)
        return functools.partial(_rebind(value.func, memo), *arguments, **value.keywords)
    if isinstance(value, types.MethodType):
        return types.MethodType(_rebind(value.__func__, memo), _rebind(value.__self__, memo))
    if not isinstance(value, types.FunctionType) or value.__closure__ is None:
        return value
    cells = tuple(types.CellType() for _ in value.__closure__)
    rebound = types.FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
    rebound.__kwdefaults__ = value.__kwdefaults__
    rebound.__dict__.update(value.__dict__)
    memo[id(value)] = rebound
    for cell, original in zip(cells, value.__closure__, strict=True):
        cell.cell_contents = _rebind(original.cell_contents, memo)
    return rebound
