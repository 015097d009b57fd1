"""Padding whose token id has no row in a model's embeddings."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..control.forward_pass import causal_lm


@dataclass(frozen=True)
class SkipPadding:
    """
    Forward pre-hook of an embedding that reads padding as token 0. The attention mask hides the result. Every other token
    passes unchanged, so that a token without a row still raises.

    Args:
        pad_token_id (`int`):
            Id of the padding token.
    """

    pad_token_id: int

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        tokens, *others = args
        return tokens.masked_fill(tokens == self.pad_token_id, 0), *others


def _find_table(model: Any) -> tuple[nn.Module, nn.Embedding] | None:
    """What the model calls with its tokens, and the table inside: PEFT may have wrapped the one around the other."""
    try:
        embedding = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return None  # a module of the user's that does not say what it embeds
    table = next((module for module in embedding.modules() if isinstance(module, nn.Embedding)), None)
    return None if table is None else (embedding, table)


def skip_padding(model: nn.Module, pad_token_id: int | None) -> bool:
    """
    Let a model read padding whose id has no row in its embeddings, as that of a token that was added to the tokenizer
    alone. Nothing is done to a model that has the row.

    Args:
        model (`nn.Module`):
            Model that is given padded tokens.
        pad_token_id (`int` or `None`):
            Id of the padding.

    Returns:
        `bool`: Whether the row is missing.
    """
    found = _find_table(model)
    # The number that the table was made for: under ZeRO-3 the weight itself is empty between two forwards.
    if found is None or pad_token_id is None or pad_token_id < found[1].num_embeddings:
        return False
    embedding, hook = found[0], SkipPadding(pad_token_id)
    if hook not in embedding._forward_pre_hooks.values():
        embedding.register_forward_pre_hook(hook)
    return True


def skip_padding_in_policy(policy: nn.Module, pad_token_id: int | None) -> bool:
    """
    [`skip_padding`] for the policy, and keep that id out of its configs wherever they are read to build a model:
    `from_pretrained` would look for the row.
    """
    if pad_token_id is None or not skip_padding(policy, pad_token_id):
        return False
    model = causal_lm(policy)
    for config in _configs_with(model, pad_token_id):
        config.pad_token_id = _own_padding(model)
    # A partial, because a copy of the policy then saves itself.
    model.save_pretrained = functools.partial(_save_loadable, model, pad_token_id, model.save_pretrained)
    return True


def mask_padding(input_ids: torch.Tensor, attention_mask: torch.Tensor, *others: Any) -> tuple[Any, ...]:
    """
    Arguments of TRL's log-prob method, with 0 for padding. TRL looks up the log-prob of every token, and some versions do so
    for padding too.
    """
    return input_ids.masked_fill(attention_mask == 0, 0), attention_mask, *others


def skip_padding_in_other_models(trainer: Any, value_model: nn.Module | None) -> None:
    """[`skip_padding`] for all that reads what the policy has sampled: reference, value model and reward models."""
    pad_token_id = trainer._tokenizer.pad_token_id
    readers = [(value_model, pad_token_id), (getattr(trainer.kl_reference, "model", None), pad_token_id)]
    for reward_func, tokenizer in zip(trainer.reward_funcs, trainer.reward_processing_classes, strict=True):
        if isinstance(reward_func, nn.Module) and tokenizer is not None:
            readers.append((reward_func, tokenizer.pad_token_id))
    for model, padding in readers:
        if model is not None:
            skip_padding(trainer.accelerator.unwrap_model(model), padding)


def _configs_with(model: Any, pad_token_id: int) -> list[Any]:
    configs = [model.config.get_text_config(), getattr(model, "generation_config", None)]
    return [config for config in configs if getattr(config, "pad_token_id", None) == pad_token_id]


def _own_padding(model: nn.Module) -> int | None:
    """The padding with which the model was made."""
    found = _find_table(model)
    return None if found is None else found[1].padding_idx


@contextmanager
def _loadable(model: nn.Module, pad_token_id: int) -> Iterator[None]:
    # The host writes the tokenizer's padding into the configs again when training begins.
    configs = _configs_with(model, pad_token_id)
    for config in configs:
        config.pad_token_id = _own_padding(model)
    try:
        yield
    finally:
        for config in configs:
            config.pad_token_id = pad_token_id


def _save_loadable(model: nn.Module, pad_token_id: int, save: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _loadable(model, pad_token_id):
        return save(*args, **kwargs)
