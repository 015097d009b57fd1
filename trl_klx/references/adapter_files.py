"""Adapters on disk: read their config and weights safely, and say why one cannot serve as a reference."""

import copy
import glob
import json
import os
from dataclasses import MISSING, fields
from typing import cast

import torch
from peft import PEFT_TYPE_TO_CONFIG_MAPPING, LoraConfig, PeftConfig, PeftType
from safetensors.torch import load_file


CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PICKLE_FILE = "adapter_model.bin"

# The settings that a LoRA config may have. Any other setting makes PEFT rewrite the base weights, which policy and
# reference share, or import modules that the config names, or needs a different forward pass.
_PLAIN_LORA = set(
    """
    alpha_pattern auto_mapping base_model_name_or_path bias corda_config ensure_weight_tying eva_config exclude_modules
    fan_in_fan_out inference_mode init_lora_weights layers_pattern layers_to_transform loftq_config lora_alpha
    lora_bias lora_dropout lora_ga_config modules_to_save peft_type peft_version r rank_pattern revision runtime_config
    target_modules target_parameters task_type trainable_token_indices use_dora use_rslora
    """.split()
)
# Initialisations that do not change the base weights.
PLAIN_INITS = (True, False, "gaussian", "eva", "orthogonal", "mica")


class UnusableAdapterError(Exception):
    """An adapter cannot serve as a reference; the message says why."""


def find_folder(path: str, may_be_on_hub: bool, files: list[str], error_class: type[Exception]) -> str:
    """
    The folder at `path`, or the local copy of the Hub repository of that name.

    Args:
        path (`str`):
            Folder, or name of a Hub repository.
        may_be_on_hub (`bool`):
            Whether `path` could be such a name.
        files (`list[str]`):
            Patterns of the files to download.
        error_class (`type[Exception]`):
            What to raise if there is no such folder.
    """
    if os.path.isdir(path):
        return path
    if os.path.exists(path):
        raise error_class("it is not a directory.")
    if not may_be_on_hub:
        raise error_class("the directory does not exist.")
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(path, allow_patterns=files)
    except Exception as error:
        raise error_class(
            f"the directory does not exist, and no such Hub repository could be downloaded ({type(error).__name__})."
        ) from error


def local_adapter_folder(path: str) -> str:
    """The folder at `path`, or the local copy of the Hub repository of that name."""
    is_name = path.count("/") == 1 and not path.startswith((".", "/", "~"))
    return find_folder(path, is_name, [CONFIG_FILE, WEIGHTS_FILE], UnusableAdapterError)


def read_adapter_config(folder: str) -> PeftConfig:
    """The config of the adapter in a folder, for frozen use."""
    file = os.path.join(folder, CONFIG_FILE)
    if not os.path.isfile(file):
        hint = (
            " It holds a full model: set `kl_ref_model_path` instead."
            if glob.glob(os.path.join(glob.escape(folder), "model*.safetensors"))
            else ""
        )
        found = glob.glob(os.path.join(glob.escape(folder), "checkpoint-*"))
        if found:
            names = ", ".join(sorted(map(os.path.basename, found)))
            hint += f" It is the folder of a run; choose one of its checkpoints: {names}."
        raise UnusableAdapterError(f"it has no `{CONFIG_FILE}`.{hint}")
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
            raise ValueError(f"the installed PEFT does not know the setting {unknown[0]!r}")
        settings = {name: value for name, value in content.items() if name in known}
        config: PeftConfig = PeftConfig.from_peft_type(**settings)  # type: ignore[no-untyped-call]
    except Exception as error:
        raise UnusableAdapterError(f"its `{CONFIG_FILE}` cannot be read ({type(error).__name__}: {error}).") from error
    return frozen_config(config)


def frozen_config(config: PeftConfig, initialised: bool = False) -> PeftConfig:
    """
    A copy of the config for frozen use: without dropout, and without an initialisation that changes the shared base
    weights.

    Args:
        config ([`~peft.PeftConfig`]):
            Config of the adapter.
        initialised (`bool`, *optional*, defaults to `False`):
            Whether the adapter is already part of the policy, so that its initialisation no longer changes anything.
    """
    config = copy.deepcopy(config)
    if config.is_prompt_learning or config.is_adaption_prompt:
        raise UnusableAdapterError(
            f"it is of type {cast(PeftType, config.peft_type).value}, which cannot be combined with another adapter."
        )
    bias = getattr(config, "bias", "none")
    if bias != "none":
        raise UnusableAdapterError(
            f"it trains biases (bias={bias!r}), which belong to the base weights that policy and reference share. "
            "Train it with bias='none'."
        )
    if isinstance(config, LoraConfig):
        defaults = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(config)}
        other = [name for name, default in defaults.items() if getattr(config, name) != default]
        other = [name for name in other if name not in _PLAIN_LORA]
        if other:
            raise UnusableAdapterError(
                f"it sets `{other[0]}`, but the reference must be a plain LoRA adapter that does not change the base "
                "weights, which it shares with the policy."
            )
        if config.init_lora_weights not in PLAIN_INITS and not initialised:
            raise UnusableAdapterError(
                f"it was initialised with {config.init_lora_weights!r}, which rewrites the base weights that policy "
                "and reference share. Convert it to a plain LoRA adapter first."
            )
        config.init_lora_weights = True
        config.lora_dropout = 0.0
    config.inference_mode = True
    return config


def read_adapter_weights(folder: str) -> dict[str, torch.Tensor]:
    """The weights of the adapter in a folder. Only safetensors files are read; nothing is unpickled."""
    file = os.path.join(folder, WEIGHTS_FILE)
    if not os.path.isfile(file):
        if os.path.isfile(os.path.join(folder, PICKLE_FILE)):
            raise UnusableAdapterError(
                f"it only has `{PICKLE_FILE}`, a pickle, which is never loaded. Save it again as `{WEIGHTS_FILE}`."
            )
        raise UnusableAdapterError(f"it has no `{WEIGHTS_FILE}`.")
    try:
        weights = load_file(file, device="cpu")
    except Exception as error:
        raise UnusableAdapterError(f"its `{WEIGHTS_FILE}` cannot be read ({error}).") from error
    if not weights:
        raise UnusableAdapterError(f"its `{WEIGHTS_FILE}` holds no weights.")
    return weights
