"""Checkpoints of a run as references: which steps were saved, and how the weights of a model are loaded."""

import os
import re
from typing import Any

import torch

from .adapter_files import WEIGHTS_FILE
from .peft_adapters import rng_kept
from .sharding import join_parts


def saved_steps(output_dir: str) -> list[int]:
    """The steps N for which `output_dir` has a `checkpoint-N`."""
    if not os.path.isdir(output_dir):
        return []
    matches = (re.fullmatch(r"checkpoint-(\d+)", entry.name) for entry in os.scandir(output_dir) if entry.is_dir())
    return sorted(int(match.group(1)) for match in matches if match)


def checkpoint_folder(output_dir: str, step: int) -> str:
    """The folder `checkpoint-{step}` in `output_dir`, which must exist."""
    folder = os.path.join(output_dir, f"checkpoint-{step}")
    if not os.path.isdir(folder):
        steps = saved_steps(output_dir)
        there = ", ".join(str(saved) for saved in steps) if steps else "none"
        raise ValueError(
            f"`kl_penalty_reference_step={step}` was never saved: there is no `checkpoint-{step}` in {output_dir!r}. "
            f"Saved steps: {there}. Choose one of them, 0 for the initial policy, or leave the field unset."
        )
    return folder


def load_model_weights(model: Any, folder: str) -> None:
    """
    Load the weights in a checkpoint of full fine-tuning.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            Model that receives them. Every weight must fit.
        folder (`str`):
            Folder with a `model.safetensors`, which may be split into several files.
    """
    names = os.listdir(folder)
    if not any(re.fullmatch(r"model(-\d+-of-\d+)?\.safetensors", name) for name in names):
        hint = " It holds an adapter, but the policy has none." if WEIGHTS_FILE in names else ""
        raise ValueError(f"Cannot use {folder!r} as KL reference: it has no `model.safetensors`.{hint}")
    try:
        weights = _read_model_weights(model, folder)
        model.load_state_dict({name: join_parts(weight) for name, weight in weights.items()})
    except Exception as error:
        raise ValueError(f"Cannot use {folder!r} as KL reference: its weights cannot be loaded ({error}).") from error
    if not all(torch.isfinite(weight).all() for weight in model.parameters()):
        raise ValueError(f"Cannot use {folder!r} as KL reference: its weights hold NaN or infinite values.")


def _read_model_weights(model: Any, folder: str) -> dict[str, torch.Tensor]:
    # With several dtypes, as when TRL keeps the LM head in a higher precision, fp32 loses nothing.
    dtypes = {weight.dtype for weight in model.parameters()}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    with rng_kept(model):
        # The class's loader maps the names in the file to those of the modules, which may differ.
        loaded, info = type(model).from_pretrained(
            folder, config=model.config, dtype=dtype, use_safetensors=True, output_loading_info=True
        )
    misfits = [*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]]
    if misfits:
        raise ValueError(f"{sorted(map(str, misfits))[0]!r} is missing, or has no place in the model")
    weights: dict[str, torch.Tensor] = loaded.state_dict(keep_vars=True)
    return weights
