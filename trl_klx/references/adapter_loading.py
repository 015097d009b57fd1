"""Attach a frozen reference adapter to the policy, copied from the trained one or loaded from a folder."""

import copy
import os
import warnings

import torch
from peft import PeftConfig, PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from torch import nn

from .adapter_files import (
    UnusableAdapterError,
    frozen_config,
    local_adapter_folder,
    read_adapter_config,
    read_adapter_weights,
)
from .fingerprint import hash_tensors
from .finite import LARGEST_SCALING, weights_fault
from .moving import Weights
from .patterns import check_patterns
from .peft_adapters import adapter_tensors, rng_kept, save_without, trained_adapter


# PEFT adapter names must not contain a dot, and TRL gives the name "ref" a special meaning.
REFERENCE_ADAPTER = "klx_ref"


def copy_trained_adapter(model: PeftModel) -> str:
    """Add a frozen copy of the trained adapter under [`REFERENCE_ADAPTER`]. Returns the hash of its weights."""
    source = trained_adapter(model)
    try:
        _check_name_is_free(model)
        config = frozen_config(model.peft_config[source], initialised=True)
    except UnusableAdapterError as error:
        raise ValueError(f"Cannot copy the policy's adapter {source!r} as KL reference: {error}") from error
    weights = get_peft_model_state_dict(model, adapter_name=source, save_embedding_layers=False)
    weights = {name: tensor.detach().clone() for name, tensor in weights.items()}
    _attach(model, config, weights)
    # A copy in another precision would differ from the original from the start.
    originals = adapter_tensors(model, source)
    for name, parameter in adapter_tensors(model, REFERENCE_ADAPTER, as_name=source).items():
        parameter.data = parameter.data.to(originals[name].dtype)
    return hash_tensors(weights)


def load_reference_adapter(model: PeftModel, path: str) -> str:
    """
    Load the adapter at `path` into the policy, frozen, under [`REFERENCE_ADAPTER`]. Only a local safetensors file is
    read and nothing is unpickled. All checks run on a weightless copy of the model, before the real one is changed.

    Args:
        model ([`~peft.PeftModel`]):
            Policy that shares its base weights with the reference.
        path (`str`):
            Directory with `adapter_config.json` and `adapter_model.safetensors`, or a Hub repository that has them.

    Returns:
        `str`: Hash of the adapter's weights.
    """
    try:
        _check_name_is_free(model)
        folder = local_adapter_folder(os.path.expanduser(path))
        config = read_adapter_config(folder)
        check_patterns(config, [name for name, _ in model.get_base_model().named_modules()])
        weights = _checked_weights(model, config, read_adapter_weights(folder))
    except UnusableAdapterError as error:
        raise ValueError(f"Cannot use the adapter at {path!r} as KL reference: {error}") from error
    ours = model.peft_config[trained_adapter(model)].base_model_name_or_path
    theirs = config.base_model_name_or_path
    if ours and theirs and ours != theirs:
        warnings.warn(
            f"The adapter at {path!r}, the KL reference, was trained on the base model {theirs!r}, but the policy's "
            f"is {ours!r}. Their shapes agree, but their weights may differ.",
            stacklevel=2,
        )
    _attach(model, config, weights)
    return hash_tensors(weights)


def _check_name_is_free(model: PeftModel) -> None:
    if REFERENCE_ADAPTER in model.peft_config:
        raise UnusableAdapterError(
            f"the policy already has an adapter {REFERENCE_ADAPTER!r}, perhaps from an earlier trainer. Call "
            f"`model.delete_adapter({REFERENCE_ADAPTER!r})` first."
        )


def _attach(model: PeftModel, config: PeftConfig, weights: Weights) -> None:
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    with rng_kept(model):
        model.add_adapter(REFERENCE_ADAPTER, config)
    for parameter, flag in flags:
        parameter.requires_grad_(flag)
    for name, weight in adapter_tensors(model, REFERENCE_ADAPTER).items():
        weight.requires_grad_(False)
        if ".lora_" in name and weight.dtype.itemsize < 4:
            # PEFT does the same when it loads an adapter, and its later versions also when they add one.
            weight.data = weight.data.float()
    set_peft_model_state_dict(model, weights, adapter_name=REFERENCE_ADAPTER)
    save_without(model, REFERENCE_ADAPTER)


def _checked_weights(model: PeftModel, config: PeftConfig, weights: Weights) -> Weights:
    """Check that every name and shape fits the model exactly, and return the weights to attach."""
    expected = _expected_weights(model, config)
    weights = _without_base_weights(model, weights, expected)
    missing, unexpected = sorted(expected.keys() - weights.keys()), sorted(weights.keys() - expected.keys())
    if missing or unexpected:
        parts = []
        if missing:
            parts.append(f"{len(missing)} of {len(expected)} weights are missing (first: {missing[0]!r})")
        if unexpected:
            parts.append(f"{len(unexpected)} weights have no place in the model (first: {unexpected[0]!r})")
        raise UnusableAdapterError("; ".join(parts) + ".")
    for name, tensor in weights.items():
        slot = expected[name]
        if tensor.shape != slot.shape:
            raise UnusableAdapterError(
                f"weight {name!r} has shape {tuple(tensor.shape)}, but the model needs {tuple(slot.shape)}."
            )
        if not tensor.is_floating_point():
            raise UnusableAdapterError(f"weight {name!r} has dtype {tensor.dtype}, expected floating point.")
    fault = weights_fault({name: tensor.to(expected[name].dtype) for name, tensor in weights.items()})
    if fault is not None:
        raise UnusableAdapterError(f"{fault}.")
    return weights


def _expected_weights(model: PeftModel, config: PeftConfig) -> Weights:
    """The weights that an adapter with this config has on this model, as tensors without values."""
    skeleton = _weightless_copy(model)
    try:
        with rng_kept(model):
            skeleton.add_adapter(REFERENCE_ADAPTER, copy.deepcopy(config), low_cpu_mem_usage=True)
        expected: Weights = get_peft_model_state_dict(
            skeleton, adapter_name=REFERENCE_ADAPTER, save_embedding_layers=False
        )
    except Exception as error:
        raise UnusableAdapterError(f"it does not fit the model ({error}).") from error
    if not expected:
        raise UnusableAdapterError("it targets no module of the model.")
    for layer in skeleton.modules():
        scaling = vars(layer).get("scaling")
        if isinstance(scaling, dict) and not abs(scaling.get(REFERENCE_ADAPTER, 1.0)) <= LARGEST_SCALING:
            raise UnusableAdapterError(
                f"its scaling (`lora_alpha / r`) is {scaling[REFERENCE_ADAPTER]}, beyond {LARGEST_SCALING:g}."
            )
    return expected


def _weightless_copy(model: PeftModel) -> PeftModel:
    """The same modules with parameters and buffers on the meta device, which take no memory."""
    memo: dict[int, torch.Tensor] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = _weightless(parameter)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, memo)


def _weightless(parameter: nn.Parameter) -> nn.Parameter:
    plain = parameter.data.as_subclass(torch.Tensor)
    empty = nn.Parameter(torch.empty_like(plain, device="meta"), requires_grad=False)
    if type(parameter) is not nn.Parameter:
        # A quantised weight, such as that of bitsandbytes, says in its attributes how it is quantised. PEFT reads them
        # when it adds a layer. They are shared, not copied.
        vars(empty).update(vars(parameter))
    return empty


def _without_base_weights(model: PeftModel, weights: Weights, expected: Weights) -> Weights:
    """
    The weights without the embeddings of the base model, which PEFT saves together with an adapter on them. They must
    equal the policy's.
    """

    def plain(name: str) -> str:
        return ".".join(part for part in name.split(".") if part not in ("base_layer", "original_module"))

    base = {plain(name): parameter for name, parameter in model.named_parameters(remove_duplicate=False)}
    for name in sorted(weights.keys() - expected.keys()):
        if plain(name) in base:
            own = base[plain(name)].detach()
            if own.shape != weights[name].shape or not torch.equal(weights[name].to(own.device, own.dtype), own):
                raise UnusableAdapterError(
                    f"it contains the base weight {name!r}, which it would share with the policy, but the values "
                    "differ. Save it with `save_embedding_layers=False`, and set its new embeddings on the policy's "
                    "base model."
                )
            weights = {key: tensor for key, tensor in weights.items() if key != name}
    return weights
