"""A reference in 4 or 8 bits, by bitsandbytes."""

import importlib.util
from typing import Any

import torch
from transformers import BitsAndBytesConfig


def quantization_settings(quantization: str, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """
    Arguments of `from_pretrained` that quantize the weights.

    Args:
        quantization (`str`):
            `"4bit"`, which is NF4, or `"8bit"`.
        dtype (`torch.dtype`):
            Dtype of the computation, and of what stays whole: embeddings, norms and LM head.
        device (`torch.device`):
            Device of the process.
    """
    bits: dict[str, Any] = {"load_in_8bit": True}
    if quantization == "4bit":
        bits = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": dtype}
    config: Any = BitsAndBytesConfig
    return {"quantization_config": config(**bits), "device_map": {"": device}}


def has_bitsandbytes() -> bool:
    """Whether bitsandbytes is installed."""
    return importlib.util.find_spec("bitsandbytes") is not None
