"""Support for a padding token whose id has no row in a model's embeddings."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..references.peft_adapters import causal_lm


@dataclass(frozen=True)
class SkipPadding:
    """
    Forward pre-hook that makes an embedding read padding as token 0. The attention mask hides the result. Other tokens
    pass unchanged, so any other token without a row still raises.

    Args:
        pad_token_id (`int`):
            Id of the padding token.
    """

    pad_token_id: int

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        tokens, *others = args
        return tokens.masked_fill(tokens == self.pad_token_id, 0), *others


def _find_table(model: Any) -> tuple[nn.Module, nn.Embedding] | None:
    """The module that embeds the model's tokens, and the table inside it. They differ if PEFT wraps the table."""
    try:
        embedding = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return None  # a user's module without input embeddings
    table = next((module for module in embedding.modules() if isinstance(module, nn.Embedding)), None)
    return None if table is None else (embedding, table)


def skip_padding(model: nn.Module, pad_token_id: int | None) -> bool:
    """
    Let a model read padding whose id has no row in its embeddings, for example because the padding token was added
    only to the tokenizer. A model that has the row is left alone.

    Args:
        model (`nn.Module`):
            Model that reads padded tokens.
        pad_token_id (`int` or `None`):
            Id of the padding token.

    Returns:
        `bool`: Whether the row is missing.
    """
    found = _find_table(model)
    # Not the weight's shape: under ZeRO-3 the weight is empty between forward passes.
    if found is None or pad_token_id is None or pad_token_id < found[1].num_embeddings:
        return False
    embedding, hook = found[0], SkipPadding(pad_token_id)
    if hook not in embedding._forward_pre_hooks.values():
        embedding.register_forward_pre_hook(hook)
    return True


def skip_padding_in_policy(policy: nn.Module, pad_token_id: int | None) -> bool:
    """
    Call [`skip_padding`] on the policy, and keep the id out of its configs whenever a model is built from them:
    `from_pretrained` would look for the row.
    """
    if pad_token_id is None or not skip_padding(policy, pad_token_id):
        return False
    model = causal_lm(policy)
    for config in _configs_with(model, pad_token_id):
        config.pad_token_id = _own_padding(model)
    # A partial rather than a closure, so that a copy of the policy saves itself.
    model.save_pretrained = functools.partial(_save_loadable, model, pad_token_id, model.save_pretrained)
    return True


def mask_padding(input_ids: torch.Tensor, attention_mask: torch.Tensor, *others: Any) -> tuple[Any, ...]:
    """
    Replace padding by 0 in the arguments of TRL's log-prob method. Some versions of TRL look up the log-probs of
    padding tokens too.
    """
    return input_ids.masked_fill(attention_mask == 0, 0), attention_mask, *others


def skip_padding_in_other_models(trainer: Any, value_model: nn.Module | None) -> None:
    """Call [`skip_padding`] on the other models that read the policy's samples: reference, value and reward models."""
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
    """The padding id that the model was built with."""
    found = _find_table(model)
    return None if found is None else found[1].padding_idx


@contextmanager
def _loadable(model: nn.Module, pad_token_id: int) -> Iterator[None]:
    # The host trainer writes the tokenizer's padding id into the configs again when training begins.
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
