"""LoRA adapters as references: load, copy, activate and hide them, without a trace on the policy."""

import copy
import functools
import glob
import hashlib
import json
import math
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields

import torch
from peft import (
    PEFT_TYPE_TO_CONFIG_MAPPING,
    LoraConfig,
    PeftConfig,
    PeftModel,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from safetensors.torch import load_file
from torch import nn


# PEFT adapter names must not contain a dot, and TRL gives a meaning of its own to the name "ref".
REFERENCE_ADAPTER = "klx_ref"

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PICKLE_FILE = "adapter_model.bin"

# What a LoRA config may set. Other settings make PEFT rewrite the base weights, which policy and reference share,
# import modules that the config names, or need a forward pass of their own.
_PLAIN_LORA = set(
    """
    alpha_pattern auto_mapping base_model_name_or_path bias corda_config ensure_weight_tying eva_config exclude_modules
    fan_in_fan_out inference_mode init_lora_weights layers_pattern layers_to_transform loftq_config lora_alpha lora_bias
    lora_dropout lora_ga_config modules_to_save peft_type peft_version r rank_pattern revision runtime_config
    target_modules target_parameters task_type trainable_token_indices use_dora use_rslora
    """.split()
)
# Initialisations that leave the base weights alone.
PLAIN_INITS = (True, False, "gaussian", "eva", "orthogonal", "mica")


def trained_adapter(model: PeftModel) -> str:
    """Name of the adapter that is being trained."""
    active = model.active_adapters
    if len(active) != 1:
        raise ValueError(
            f"The policy must have one active adapter, got {active}. Call `set_adapter` with one of them."
        )
    return active[0]


@contextmanager
def adapter_active(model: PeftModel, name: str | None) -> Iterator[None]:
    """
    Run with another adapter active, or with none, and leave every `requires_grad` flag as it was: PEFT's own switch
    makes the activated adapter trainable.
    """
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        if name is None:
            with model.disable_adapter():
                yield
        else:
            previous = model.active_adapters
            model.base_model.set_adapter(name, inference_mode=True)
            try:
                yield
            finally:
                model.base_model.set_adapter(previous)
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


@contextmanager
def only_trained_adapter(model: nn.Module) -> Iterator[None]:
    """
    Make `save_pretrained` write the trained adapter and no other. A checkpoint that holds a second adapter is one from
    which the host restores the wrong weights.
    """
    if not isinstance(model, PeftModel):
        yield
        return
    before = vars(model).get("save_pretrained")
    model.save_pretrained = functools.partial(model.save_pretrained, selected_adapters=list(model.active_adapters))
    try:
        yield
    finally:
        del model.save_pretrained
        if before is not None:
            model.save_pretrained = before


@contextmanager
def only_trained_modules(model: PeftModel) -> Iterator[None]:
    """Take the modules off the model that adapters other than the trained one save whole (`modules_to_save`)."""
    trained = trained_adapter(model)
    places = [module._modules.get("modules_to_save") for module in model.modules()]
    places = [place for place in places if isinstance(place, nn.ModuleDict)]
    whole = [dict(place) for place in places]
    try:
        for place in places:
            for name in [name for name in place if name != trained]:
                del place[name]
        yield
    finally:
        for place, modules in zip(places, whole, strict=True):
            # All of them anew, in their old order.
            place.clear()
            place.update(modules)


def adapter_tensors(model: PeftModel, name: str, as_name: str | None = None) -> dict[str, torch.Tensor]:
    """The parameters of one adapter, keyed by parameter name with the adapter's name replaced by `as_name`."""
    as_name = name if as_name is None else as_name
    found = {}
    for key, parameter in model.named_parameters():
        parts = key.split(".")
        if name in parts:
            found[".".join(as_name if part == name else part for part in parts)] = parameter
    return found


def hash_tensors(tensors: dict[str, torch.Tensor]) -> str:
    """SHA-256 over names, shapes, types and bytes, in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().to("cpu").contiguous()
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def copy_trained_adapter(model: PeftModel) -> str:
    """Add a frozen copy of the trained adapter under [`REFERENCE_ADAPTER`]. Returns the hash of its weights."""
    source = trained_adapter(model)
    try:
        _check_name_is_free(model)
        config = _reference_config(model.peft_config[source], rewritten=True)
    except _BadAdapterError as error:
        raise ValueError(f"Cannot copy the policy's adapter {source!r} as KL reference: {error}") from error
    weights = get_peft_model_state_dict(model, adapter_name=source, save_embedding_layers=False)
    weights = {name: tensor.detach().clone() for name, tensor in weights.items()}
    _attach(model, config, weights)
    # A copy that computes in another precision than the original would be off from the start.
    originals = adapter_tensors(model, source)
    for name, parameter in adapter_tensors(model, REFERENCE_ADAPTER, as_name=source).items():
        parameter.data = parameter.data.to(originals[name].dtype)
    return hash_tensors(weights)


def load_reference_adapter(model: PeftModel, path: str) -> str:
    """
    Load the adapter at `path` beside the policy's, frozen, under [`REFERENCE_ADAPTER`]. Only a local safetensors file
    is ever read, nothing is unpickled, and whatever is wrong with the adapter is found on a weightless copy of the
    model before the real one is touched.

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
        folder = _local_folder(os.path.expanduser(path))
        config = _read_config(folder)
        weights = _fit(model, config, _read_weights(folder))
    except _BadAdapterError as error:
        raise ValueError(f"Cannot use the adapter at {path!r} as KL reference: {error}") from error
    ours = model.peft_config[trained_adapter(model)].base_model_name_or_path
    theirs = config.base_model_name_or_path
    if ours and theirs and ours != theirs:
        warnings.warn(
            f"The adapter at {path!r}, the KL reference, was trained on the base model {theirs!r}, but the policy's is "
            f"{ours!r}. Their shapes agree; whether their weights do cannot be told.",
            stacklevel=2,
        )
    _attach(model, config, weights)
    return hash_tensors(weights)


class _BadAdapterError(Exception):
    """Why an adapter cannot serve as reference."""


def _check_name_is_free(model: PeftModel) -> None:
    if REFERENCE_ADAPTER in model.peft_config:
        raise _BadAdapterError(
            f"the policy already has an adapter {REFERENCE_ADAPTER!r}, perhaps from an earlier trainer. Call "
            f"`model.delete_adapter({REFERENCE_ADAPTER!r})` first."
        )


def _local_folder(path: str) -> str:
    if os.path.isdir(path):
        return path
    if os.path.exists(path):
        raise _BadAdapterError("it is not a directory.")
    if path.count("/") != 1 or path.startswith((".", "/", "~")):
        raise _BadAdapterError("the directory does not exist.")
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(path, allow_patterns=[CONFIG_FILE, WEIGHTS_FILE])
    except Exception as error:
        raise _BadAdapterError(
            f"the directory does not exist, and no such Hub repository could be downloaded ({type(error).__name__})."
        ) from error


def _read_config(folder: str) -> PeftConfig:
    file = os.path.join(folder, CONFIG_FILE)
    if not os.path.isfile(file):
        hint = " It holds a full model." if glob.glob(os.path.join(glob.escape(folder), "model*.safetensors")) else ""
        raise _BadAdapterError(f"it has no `{CONFIG_FILE}`.{hint}")
    try:
        with open(file, encoding="utf-8") as stream:
            content = json.load(stream)
        if not isinstance(content, dict):
            raise ValueError("not a JSON object")
        if content.get("peft_type") not in list(PEFT_TYPE_TO_CONFIG_MAPPING):
            raise ValueError(f"unknown peft_type {content.get('peft_type')!r}")
        known = {f.name for f in fields(PEFT_TYPE_TO_CONFIG_MAPPING[content["peft_type"]])}
        unknown = sorted(name for name, value in content.items() if value and name not in known - {"runtime_config"})
        if unknown:
            raise ValueError(f"the installed PEFT knows no setting {unknown[0]!r}")
        config = PeftConfig.from_peft_type(**{name: value for name, value in content.items() if name in known})
    except Exception as error:
        raise _BadAdapterError(f"its `{CONFIG_FILE}` cannot be read ({type(error).__name__}: {error}).") from error
    return _reference_config(config)


def _reference_config(config: PeftConfig, rewritten: bool = False) -> PeftConfig:
    """
    A copy of the config for frozen use: no dropout, no initialisation that touches the shared base weights. With
    `rewritten`, such an initialisation has done its work already.
    """
    config = copy.deepcopy(config)
    if config.is_prompt_learning or config.is_adaption_prompt:
        raise _BadAdapterError(f"it is of type {config.peft_type.value}, which cannot stand beside another adapter.")
    if getattr(config, "bias", "none") != "none":
        raise _BadAdapterError(
            f"it trains biases (bias={config.bias!r}), which belong to the base weights that policy and reference share. "
            "Train it with bias='none'."
        )
    if isinstance(config, LoraConfig):
        defaults = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(config)}
        other = [name for name, default in defaults.items() if getattr(config, name) != default]
        other = [name for name in other if name not in _PLAIN_LORA]
        if other:
            raise _BadAdapterError(
                f"it sets `{other[0]}`, but the reference must be a plain LoRA adapter that leaves the base weights, "
                "which it shares with the policy, as they are."
            )
        if config.init_lora_weights not in PLAIN_INITS and not rewritten:
            raise _BadAdapterError(
                f"it was initialised with {config.init_lora_weights!r}, which rewrites the base weights that policy and "
                "reference share. Convert it to a plain LoRA adapter first."
            )
        config.init_lora_weights = True
        config.lora_dropout = 0.0
    config.inference_mode = True
    return config


def _read_weights(folder: str) -> dict[str, torch.Tensor]:
    file = os.path.join(folder, WEIGHTS_FILE)
    if not os.path.isfile(file):
        if os.path.isfile(os.path.join(folder, PICKLE_FILE)):
            raise _BadAdapterError(
                f"it only has `{PICKLE_FILE}`, a pickle, which is never loaded. Save it again as `{WEIGHTS_FILE}`."
            )
        raise _BadAdapterError(f"it has no `{WEIGHTS_FILE}`.")
    try:
        weights = load_file(file, device="cpu")
    except Exception as error:
        raise _BadAdapterError(f"its `{WEIGHTS_FILE}` cannot be read ({error}).") from error
    if not weights:
        raise _BadAdapterError(f"its `{WEIGHTS_FILE}` holds no weights.")
    return weights


def _weightless_copy(model: PeftModel) -> PeftModel:
    """The same modules with parameters and buffers on the meta device: the structure at no memory."""
    memo = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, memo)


def _fit(model: PeftModel, config: PeftConfig, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights to attach. Refuses those that do not fit the model exactly, name by name and shape by shape."""
    skeleton = _weightless_copy(model)
    try:
        with rng_kept(model):
            skeleton.add_adapter(REFERENCE_ADAPTER, copy.deepcopy(config), low_cpu_mem_usage=True)
        expected = get_peft_model_state_dict(skeleton, adapter_name=REFERENCE_ADAPTER, save_embedding_layers=False)
    except Exception as error:
        raise _BadAdapterError(f"it does not fit the model ({error}).") from error
    if not expected:
        raise _BadAdapterError("it targets no module of the model.")
    for layer in skeleton.modules():
        scaling = vars(layer).get("scaling")
        if isinstance(scaling, dict) and not math.isfinite(scaling.get(REFERENCE_ADAPTER, 1.0)):
            raise _BadAdapterError(f"its scaling (`lora_alpha`) is {scaling[REFERENCE_ADAPTER]}.")
    weights = _without_base_weights(model, weights, expected)
    missing, unexpected = sorted(expected.keys() - weights.keys()), sorted(weights.keys() - expected.keys())
    if missing or unexpected:
        parts = []
        if missing:
            parts.append(f"{len(missing)} of {len(expected)} weights are missing (first: {missing[0]!r})")
        if unexpected:
            parts.append(f"{len(unexpected)} weights have no place in the model (first: {unexpected[0]!r})")
        raise _BadAdapterError("; ".join(parts) + ".")
    for name, tensor in weights.items():
        slot = expected[name]
        if tensor.shape != slot.shape:
            raise _BadAdapterError(
                f"weight {name!r} has shape {tuple(tensor.shape)}, but the model needs {tuple(slot.shape)}."
            )
        if not tensor.is_floating_point():
            raise _BadAdapterError(f"weight {name!r} is of type {tensor.dtype}, which holds no weights.")
        if not torch.isfinite(tensor.to(slot.dtype)).all():
            raise _BadAdapterError(f"weight {name!r} holds NaN or infinite values.")
    return weights


def _without_base_weights(model: PeftModel, weights: dict, expected: dict) -> dict[str, torch.Tensor]:
    """PEFT saves the embeddings along with an adapter on them; they say nothing new if they are the policy's."""

    def plain(name: str) -> str:
        return ".".join(part for part in name.split(".") if part not in ("base_layer", "original_module"))

    base = {plain(name): parameter for name, parameter in model.named_parameters(remove_duplicate=False)}
    for name in sorted(weights.keys() - expected.keys()):
        if plain(name) in base:
            own = base[plain(name)].detach()
            if own.shape != weights[name].shape or not torch.equal(weights[name].to(own.device, own.dtype), own):
                raise _BadAdapterError(
                    f"it carries {name!r}, a base weight, with other values than the policy's, which it would share. "
                    "Save it with `save_embedding_layers=False`, and set its new embeddings on the policy's base model."
                )
            weights = {key: tensor for key, tensor in weights.items() if key != name}
    return weights


@contextmanager
def rng_kept(model: nn.Module) -> Iterator[None]:
    """New adapters are initialised at random; the rollouts of a seeded run must not depend on that."""
    with torch.random.fork_rng({parameter.device for parameter in model.parameters() if parameter.is_cuda}):
        yield


def _attach(model: PeftModel, config: PeftConfig, weights: dict[str, torch.Tensor]) -> None:
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    with rng_kept(model):
        model.add_adapter(REFERENCE_ADAPTER, config)
    for parameter, flag in flags:
        parameter.requires_grad_(flag)
    for name, parameter in adapter_tensors(model, REFERENCE_ADAPTER).items():
        parameter.requires_grad_(False)
        if ".lora_" in name and parameter.dtype.itemsize < 4:
            parameter.data = parameter.data.float()  # as PEFT loads adapters, and its later versions add them
    set_peft_model_state_dict(model, weights, adapter_name=REFERENCE_ADAPTER)
