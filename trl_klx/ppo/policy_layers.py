"""The policy's layers: which of them are trained, and copies of them for the value head."""

import copy
from typing import Any

import torch
from torch import nn

from ..references.peft_adapters import causal_lm
from ..references.sharding import join_parts


def layer_stack(policy: nn.Module) -> nn.ModuleList | None:
    """The policy's layers, from the bottom up; `None` if they are not in one list."""
    model = causal_lm(policy)
    depth = model.config.get_text_config().num_hidden_layers
    # Search only the text decoder, because a vision tower may have the same number of layers.
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    lists = (module for module in decoder.modules() if isinstance(module, nn.ModuleList))
    return next((layers for layers in lists if len(layers) == depth), None)


def top_layers(policy: nn.Module, count: int) -> list[nn.Module]:
    """The top `count` layers of the policy."""
    stack = layer_stack(policy) if count else None
    return [] if stack is None else list(stack)[len(stack) - count :]


def _is_quantized(model: Any, layer: nn.Module) -> bool:
    if getattr(model, "is_quantized", False) or getattr(model.config, "quantization_config", None) is not None:
        return True
    tensors = [*layer.parameters(), *layer.buffers()]
    # Integers and one-byte floats mean nothing without their scales.
    return any(weight.element_size() < 2 and weight.dtype != torch.bool for weight in tensors)


def copy_top_layers(policy: nn.Module, count: int) -> list[nn.Module]:
    """
    Copies of the policy's top `count` layers, or of all layers if it has fewer, without PEFT adapters. If the policy
    is sharded, every process must call this, and gets complete copies.
    """
    if count == 0:
        return []
    stack = layer_stack(policy)
    if stack is None:
        reason = "its layers are not in one list"
    elif _is_quantized(causal_lm(policy), stack[-1]):
        reason = "its layers are quantized, and cannot be trained"
    else:
        return [_copy_layer(layer) for layer in top_layers(policy, min(count, len(stack)))]
    raise ValueError(
        f"`num_value_layers={count}` cannot copy layers of this policy: {reason}. Set `num_value_layers=0` for a "
        "value head on its last hidden states, or pass a `value_model`."
    )


def _copy_layer(layer: nn.Module) -> nn.Module:
    copied = copy.deepcopy(layer)
    for (_, source), (name, weight) in zip(layer.named_parameters(), list(copied.named_parameters()), strict=True):
        # Under ZeRO-3 this process holds only a part of the source, and the copy is empty.
        if weight.numel() == 0:
            owner, _, last = name.rpartition(".")
            setattr(copied.get_submodule(owner), last, nn.Parameter(join_parts(source).detach().clone()))
    for parent in list(copied.modules()):
        for name, child in parent.named_children():
            if hasattr(child, "base_layer"):
                setattr(parent, name, child.base_layer)
    return copied


def freeze_bottom_layers(policy: nn.Module, num_layers_unfrozen: int) -> None:
    """
    Freeze all embeddings, including position embeddings, and all but the top `num_layers_unfrozen` layers. The final
    norm and an LM head that is not tied to the embeddings stay trainable.
    """
    model, stack = causal_lm(policy), layer_stack(policy)
    depth = model.config.get_text_config().num_hidden_layers
    if not 0 < num_layers_unfrozen <= depth or stack is None:
        raise ValueError(
            f"`num_layers_unfrozen={num_layers_unfrozen}` does not fit a model of {depth} layers. Choose 1 to "
            f"{depth}, or leave it unset to train all of them."
        )
    for layer in stack[: depth - num_layers_unfrozen]:
        layer.requires_grad_(False)
    layers = set(stack.modules())
    for name, module in model.base_model.named_modules():
        if module not in layers and (isinstance(module, nn.Embedding) or "embed" in name):
            module.requires_grad_(False)
