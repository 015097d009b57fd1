"""LoRA adapters as references: load, copy, activate and hide them, without a trace on the policy."""

import copy
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from peft import PeftConfig, PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file
from torch import nn


# PEFT adapter names must not contain a dot, and TRL gives a meaning of its own to the name "ref".
REFERENCE_ADAPTER = "klx_ref"

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PICKLE_FILE = "adapter_model.bin"

# Initialisations that rewrite the base weights, which the reference shares with the policy.
_REWRITES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


def trained_adapter(model: PeftModel) -> str:
    """Name of the adapter that is being trained."""
    return model.active_adapters[0]


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
    Hide every adapter but the trained one from `save_pretrained`. A checkpoint that holds a second adapter is one from
    which the host restores the wrong weights.
    """
    if not isinstance(model, PeftModel):
        yield
        return
    keep = set(model.active_adapters)
    # `peft_config` may be a property, so its dict is changed in place.
    configs = model.peft_config
    everything = dict(configs)
    try:
        for name in everything.keys() - keep:
            del configs[name]
        yield
    finally:
        configs.clear()
        configs.update(everything)


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
        digest.update(tensor.view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return digest.hexdigest()


def copy_trained_adapter(model: PeftModel) -> str:
    """Add a frozen copy of the trained adapter under [`REFERENCE_ADAPTER`]. Returns the hash of its weights."""
    source = trained_adapter(model)
    try:
        config = _reference_config(model.peft_config[source], "it", rewrite_ok=True)
    except _BadAdapterError as error:
        raise ValueError(f"Cannot copy the policy's adapter {source!r} as KL reference: {error}") from error
    weights = get_peft_model_state_dict(model, adapter_name=source, save_embedding_layers=False)
    weights = {name: tensor.detach().clone() for name, tensor in weights.items()}
    _attach(model, config, weights)
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
        folder = _local_folder(path)
        config = _read_config(folder)
        weights = _read_weights(folder)
        _rehearse(model, config, weights)
    except _BadAdapterError as error:
        raise ValueError(f"Cannot use the adapter at {path!r} as KL reference: {error}") from error
    _attach(model, config, weights)
    return hash_tensors(weights)


class _BadAdapterError(Exception):
    """Why an adapter cannot serve as reference."""


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
        raise _BadAdapterError(f"it has no `{CONFIG_FILE}`.")
    try:
        with open(file, encoding="utf-8") as stream:
            content = json.load(stream)
        if not isinstance(content, dict):
            raise ValueError("not a JSON object")
        config = PeftConfig.from_peft_type(**content)
    except Exception as error:
        raise _BadAdapterError(f"its `{CONFIG_FILE}` cannot be read ({error}).") from error
    return _reference_config(config, "it")


def _reference_config(config: PeftConfig, owner: str, rewrite_ok: bool = False) -> PeftConfig:
    """A copy of the config for frozen use: no dropout, no initialisation that touches the shared base weights."""
    config = copy.deepcopy(config)
    if getattr(config, "bias", "none") != "none":
        raise _BadAdapterError(
            f"{owner} trains biases (bias={config.bias!r}), which belong to the base weights that policy and reference "
            "share. Train it with bias='none'."
        )
    if getattr(config, "layer_replication", None):
        raise _BadAdapterError(f"{owner} replicates layers of the base model, which policy and reference share.")
    init = getattr(config, "init_lora_weights", True)
    if isinstance(init, str) and init.lower().startswith(_REWRITES_BASE) and not rewrite_ok:
        raise _BadAdapterError(
            f"{owner} was initialised with {init!r}, which rewrites the base weights that policy and reference share. "
            "Convert it to a plain LoRA adapter first."
        )
    if hasattr(config, "init_lora_weights"):
        config.init_lora_weights = True
    if hasattr(config, "lora_dropout"):
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
    for name, tensor in weights.items():
        if not torch.isfinite(tensor.float()).all():
            raise _BadAdapterError(f"weight {name!r} holds NaN or infinite values.")
    return weights


def _weightless_copy(model: PeftModel) -> PeftModel:
    """The same modules with parameters and buffers on the meta device: the structure at no memory."""
    memo = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, memo)


def _rehearse(model: PeftModel, config: PeftConfig, weights: dict[str, torch.Tensor]) -> None:
    """Refuse an adapter that does not fit the model exactly, name by name and shape by shape."""
    skeleton = _weightless_copy(model)
    try:
        with torch.random.fork_rng():
            skeleton.add_adapter(REFERENCE_ADAPTER, copy.deepcopy(config), low_cpu_mem_usage=True)
        expected = get_peft_model_state_dict(skeleton, adapter_name=REFERENCE_ADAPTER, save_embedding_layers=False)
    except Exception as error:
        raise _BadAdapterError(f"it does not fit the model ({error}).") from error
    if not expected:
        raise _BadAdapterError("it targets no module of the model.")
    missing, unexpected = sorted(expected.keys() - weights.keys()), sorted(weights.keys() - expected.keys())
    if missing or unexpected:
        parts = []
        if missing:
            parts.append(f"{len(missing)} of {len(expected)} weights are missing (first: {missing[0]!r})")
        if unexpected:
            parts.append(f"{len(unexpected)} weights have no place in the model (first: {unexpected[0]!r})")
        raise _BadAdapterError("; ".join(parts) + ".")
    for name, tensor in weights.items():
        if tensor.shape != expected[name].shape:
            raise _BadAdapterError(
                f"weight {name!r} has shape {tuple(tensor.shape)}, but the model needs {tuple(expected[name].shape)}."
            )


def _attach(model: PeftModel, config: PeftConfig, weights: dict[str, torch.Tensor]) -> None:
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    # New adapters are initialised at random; the rollouts of a seeded run must not depend on that.
    with torch.random.fork_rng():
        model.add_adapter(REFERENCE_ADAPTER, config)
    set_peft_model_state_dict(model, weights, adapter_name=REFERENCE_ADAPTER)
    model.base_model.set_adapter(model.active_adapters)
    for parameter, flag in flags:
        parameter.requires_grad_(flag)
    for parameter in adapter_tensors(model, REFERENCE_ADAPTER).values():
        parameter.requires_grad_(False)
