"""Models on disk: find one, load it without running its code, and say why it cannot serve as a reference."""

import os
import re
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoTokenizer, PretrainedConfig

from .adapter_files import CONFIG_FILE as ADAPTER_CONFIG_FILE
from .adapter_files import find_folder
from .finite import file_fault, weight_fault
from .peft_adapters import causal_lm, rng_kept
from .quantization import has_bitsandbytes, quantization_settings
from .sharding import broadcast_from_main, join_parts


MODEL_CONFIG_FILE = "config.json"
# Tokenizers save at least one of them.
_TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json")
# What is downloaded from the Hub: neither pickles nor code.
_HUB_FILES = [
    MODEL_CONFIG_FILE,
    ADAPTER_CONFIG_FILE,
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "*.model",
    "special_tokens_map.json",
    "added_tokens.json",
]
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_REMEDY = "Load the model in your script and pass it to the trainer as `ref_model`."


class UnusableModelError(Exception):
    """A model cannot serve as a reference; the message says why."""


def load_reference_model(
    path: str,
    policy: nn.Module,
    dtype: torch.dtype,
    tokenizer: Any,
    quantization: str | None = None,
    device: torch.device | None = None,
) -> nn.Module:
    """
    Load the model at `path`. Only safetensors files are read, and only classes of transformers are used. Everything
    that can be checked without the weights is checked before they are loaded.

    Args:
        path (`str`):
            Folder, or name of a Hub repository.
        policy (`nn.Module`):
            Policy, whose vocabulary the model must share.
        dtype (`torch.dtype`):
            Dtype of the loaded weights.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`] or `None`):
            Tokenizer of the policy. If the folder has a tokenizer, its vocabulary must be the same.
        quantization (`str`, *optional*):
            `"4bit"` or `"8bit"`. If unset, the weights stay whole.
        device (`torch.device`, *optional*):
            Device of a quantized model, which cannot be moved later.
    """
    folder = local_model_folder(path)
    config = _read_config(folder)
    check_vocabulary(config, policy)
    if tokenizer is not None:
        _check_tokenizer(folder, tokenizer)
    if not any(re.fullmatch(r"model(-\d+-of-\d+)?\.safetensors", name) for name in os.listdir(folder)):
        raise UnusableModelError("it has no `model.safetensors`; other formats of weights are never loaded.")
    base = causal_lm(policy)
    settings: dict[str, Any] = {"dtype": dtype}
    if type(config) is type(base.config):
        settings["attn_implementation"] = base.config._attn_implementation
    if quantization is not None:
        if not has_bitsandbytes():
            raise UnusableModelError(
                f"`kl_ref_quantization={quantization!r}` needs bitsandbytes: `pip install bitsandbytes`."
            )
        # The values of a quantized weight could not be told, so the files are searched.
        for file in sorted(Path(folder).glob("model*.safetensors")):
            fault = file_fault(file)
            if fault is not None:
                raise UnusableModelError(f"{fault}.")
        settings |= quantization_settings(quantization, dtype, device or torch.device("cpu"))
    try:
        with rng_kept(policy):
            model, info = _model_class(config).from_pretrained(
                folder, use_safetensors=True, output_loading_info=True, **settings
            )
    except UnusableModelError:
        raise
    except Exception as error:
        raise UnusableModelError(f"its weights cannot be loaded ({type(error).__name__}: {error}).") from error
    misfits = sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]]))
    if misfits:
        raise UnusableModelError(f"the weight {misfits[0]!r} is missing, or has another shape than the model needs.")
    return cast(nn.Module, model)


def local_model_folder(path: str) -> str:
    """The folder at `path`, or the local copy of the Hub repository of that name."""
    return find_folder(path, _HUB_NAME.fullmatch(path) is not None, _HUB_FILES, UnusableModelError)


def _read_config(folder: str) -> PretrainedConfig:
    if not os.path.isfile(os.path.join(folder, MODEL_CONFIG_FILE)):
        hint = ""
        if os.path.isfile(os.path.join(folder, ADAPTER_CONFIG_FILE)):
            hint = " It holds an adapter: set `kl_ref_adapter_path` instead."
        raise UnusableModelError(f"it has no `{MODEL_CONFIG_FILE}`.{hint}")
    try:
        content, _ = PretrainedConfig.get_config_dict(folder)
        kind = content.get("model_type")
        if kind not in CONFIG_MAPPING:
            if content.get("auto_map"):
                raise UnusableModelError(
                    "it needs `trust_remote_code`, and the code of a reference is never run without your asking. "
                    f"{_REMEDY}"
                )
            raise UnusableModelError(f"the installed transformers does not know its `model_type` {kind!r}.")
        return cast(PretrainedConfig, AutoConfig.from_pretrained(folder, trust_remote_code=False))
    except UnusableModelError:
        raise
    except Exception as error:
        raise UnusableModelError(
            f"its `{MODEL_CONFIG_FILE}` cannot be read ({type(error).__name__}: {error})."
        ) from error


def _model_class(config: PretrainedConfig) -> Any:
    names = config.architectures or []
    model_class = getattr(transformers, names[0], None) if names else None
    if names and model_class is None and getattr(config, "auto_map", None):
        raise UnusableModelError(
            f"its class {names[0]} needs `trust_remote_code`, which is never used here. {_REMEDY}"
        )
    model_class = model_class or transformers.AutoModelForCausalLM
    can_generate = getattr(model_class, "can_generate", None)
    if config.is_encoder_decoder or (can_generate is not None and not can_generate()):
        raise UnusableModelError(f"its class is {model_class.__name__}, which is no causal language model.")
    return model_class


def check_vocabulary(config: Any, policy: nn.Module) -> None:
    """Refuse a model whose vocabulary has another size than the policy's."""
    theirs, ours = (_vocabulary_size(each) for each in (config, getattr(causal_lm(policy), "config", None)))
    if theirs is not None and ours is not None and theirs != ours:
        raise UnusableModelError(
            f"its vocabulary has {theirs} entries, and the policy's has {ours}, so their log-probs cannot be "
            "compared. Choose a model with the policy's tokenizer; if only the padding of its embeddings differs, "
            f"call `resize_token_embeddings({ours})` on it first."
        )


def _vocabulary_size(config: Any) -> int | None:
    text = getattr(config, "get_text_config", lambda: config)()
    return getattr(text, "vocab_size", None)


def _check_tokenizer(folder: str, tokenizer: Any) -> None:
    """
    Refuse a folder whose tokenizer is not the policy's. A padding token that only one of them has does not matter, as
    padding is never scored.
    """
    if not any(os.path.isfile(os.path.join(folder, name)) for name in _TOKENIZER_FILES):
        return
    try:
        other = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        theirs = other.get_vocab()
    except Exception as error:
        raise UnusableModelError(f"its tokenizer cannot be loaded ({type(error).__name__}: {error}).") from error
    ours = tokenizer.get_vocab()
    only_padding = {tokenizer.pad_token, other.pad_token} & (ours.keys() ^ theirs.keys())
    differing = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
    differing = [token for token in differing if token not in only_padding]
    if differing:
        token = differing[0]
        raise UnusableModelError(
            f"its tokenizer is not the policy's: {len(differing)} tokens have different ids, the first of them is "
            f"{token!r} ({theirs.get(token)} in the reference, {ours.get(token)} in the policy). Choose a model with "
            "the policy's tokenizer."
        )


def check_finite(model: nn.Module) -> None:
    """Refuse a model with a weight that holds NaN, infinite or absurdly large values."""
    faults = ((name, weight_fault(join_parts(weight).detach())) for name, weight in model.named_parameters())
    # All weights, because every process must take part in joining sharded ones.
    found = [f"weight {name!r} {fault}." for name, fault in faults if fault is not None]
    fault = broadcast_from_main(found[0] if found else None)
    if fault is not None:
        raise UnusableModelError(fault)


def check_separate(model: nn.Module, policy: nn.Module) -> None:
    """Refuse a model that shares a weight with the policy that the policy trains."""
    trained = {id(weight) for weight in policy.parameters() if weight.requires_grad}
    shared = [name for name, weight in model.named_parameters() if id(weight) in trained]
    if shared:
        raise UnusableModelError(
            f"it shares the weight {shared[0]!r} with the policy, which trains it. Pass a model with its own weights."
        )
