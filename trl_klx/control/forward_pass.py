"""How TRL's forward passes are made: with which LM head, with or without dropout, with the hidden states kept."""

import functools
import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from trl.trainer import utils as trl_utils

from ..references.peft_adapters import causal_lm
from ..trl_versions import TRL_HAS_LM_HEAD


# TRL's names for what projects hidden states to log-probs, and for how many words of the vocabulary it does at a time.
_PROJECTION, _TILE_WIDTH = "_ChunkedLogProbFunction", "_CHUNKED_LOGPROB_CHUNK_SIZE"
# What the projection returns after the log-probs, where its last argument asks for it.
_OPTIONAL_OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def _can_skip_lm_head() -> bool:
    """Whether this TRL projects as [`_NoProjection`] expects. Patch releases have changed it."""
    if not TRL_HAS_LM_HEAD:
        return False
    *_, last = inspect.signature(getattr(trl_utils, _PROJECTION).forward).parameters.values()
    return last.name == "outputs" and last.default == _OPTIONAL_OUTPUTS


CAN_SKIP_LM_HEAD = _can_skip_lm_head()


@contextmanager
def captured_hidden(model: nn.Module, logits_to_keep: int) -> Iterator[list[torch.Tensor]]:
    """Collect the last hidden states at the positions that predict the last `logits_to_keep` tokens."""
    captured: list[torch.Tensor] = []
    backbone: Any = causal_lm(model).base_model
    plain_class: type[nn.Module] = type(backbone)
    backbone._klx_hidden = []
    backbone.__class__ = _keeping_hidden(plain_class)  # type: ignore[arg-type]  # classes can be hashed
    try:
        yield captured
        captured.extend(hidden[:, -logits_to_keep - 1 : -1] for hidden in backbone._klx_hidden)
    finally:
        backbone.__class__ = plain_class
        del backbone._klx_hidden


@functools.cache
def _keeping_hidden(plain_class: type[nn.Module]) -> type[nn.Module]:
    """
    The class of a backbone that keeps its last hidden states. A forward hook would do, but not with `torch.compile`: a
    graph that was compiled without the hook, for another run or another pass, is taken although there is one now.
    Compiled graphs belong to classes, and this one is the same for every pass, so that each is compiled once.
    """

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = plain_class.forward(self, *args, **kwargs)
        self._klx_hidden.append(output.last_hidden_state if hasattr(output, "last_hidden_state") else output[0])
        return output

    # Under the same name, because transformers looks up by it what a model can record.
    names = {name: getattr(plain_class, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(plain_class.__name__, (plain_class,), {**names, "forward": forward})


# ---- Dropout ----


def _is_dropout_rate(name: str, value: object) -> bool:
    return "drop" in name and isinstance(value, float) and value > 0.0


def has_dropout(model: nn.Module) -> bool:
    """
    Whether a forward pass in training mode draws random numbers. Some layers call the function and keep the rate as an
    attribute, so attributes of that name count as well as dropout modules.
    """
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0.0:
            return True
        if any(_is_dropout_rate(name, value) for name, value in vars(module).items()):
            return True
    return False


# ---- TRL's LM head ----


@contextmanager
def _trl_with(name: str, value: object) -> Iterator[None]:
    """Replace one of TRL's module-level names."""
    kept = getattr(trl_utils, name)
    setattr(trl_utils, name, value)
    try:
        yield
    finally:
        setattr(trl_utils, name, kept)


def narrow_tiles(device: torch.device) -> AbstractContextManager[None]:
    """
    Let TRL's LM head work on narrower tiles of logits. TRL's tiles, of up to 4096 tokens and 32768 words, suit its
    kernel for GPUs. On a CPU, half a dozen tensors of that size are most of the memory of a step, and fit no cache.
    """
    return _trl_with(_TILE_WIDTH, 512) if device.type == "cpu" and TRL_HAS_LM_HEAD else nullcontext()


class _NoProjection:
    """Takes the place of TRL's projection and returns zeros."""

    @staticmethod
    def apply(hidden: torch.Tensor, *args: Any) -> tuple[torch.Tensor | None, ...]:
        zeros = hidden.new_zeros(len(hidden), dtype=torch.float32)
        return zeros, *(zeros if name in args[-1] else None for name in _OPTIONAL_OUTPUTS)


def no_lm_head() -> AbstractContextManager[None]:
    """Stop TRL's forward passes at the last hidden states. The log-probs that they return mean nothing."""
    return _trl_with(_PROJECTION, _NoProjection)
