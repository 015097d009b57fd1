"""Converting the arguments of PPO's constructor into those that TRL's trainers take today."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import is_peft_model
from datasets import Dataset, IterableDataset  # type: ignore[import-untyped]
from torch import nn

from ..control.rollout import Rollout
from .config import KLXPPOConfig
from .rollout_tokens import RolloutTokens


def with_prompts(dataset: Any, processing_class: Any, num_proc: int | None = None) -> Any:
    """
    Convert tokenized data, as TRL 1.12's PPO took it, to the text prompts that TRL's trainers take today. The text
    keeps the prompt's special tokens, but not the padding or the BOS token that the tokenizer adds to every text.
    """
    if isinstance(dataset, dict):
        return {name: with_prompts(split, processing_class, num_proc) for name, split in dataset.items()}
    if not isinstance(dataset, (Dataset, IterableDataset)):
        return dataset
    first: dict[str, Any] = next(iter(dataset), {})
    if "prompt" in first or "input_ids" not in first:
        return dataset
    if processing_class is None:
        raise ValueError("Tokenized data (`input_ids`) needs a `processing_class` to decode it.")
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    adds_bos = tokenizer.bos_token_id is not None and tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]

    def real_ids(row: dict[str, Any]) -> list[int]:
        ids = list(row["input_ids"])
        if row.get("attention_mask") is not None:
            return [token for token, real in zip(ids, row["attention_mask"], strict=True) if real]
        while ids and ids[0] == tokenizer.pad_token_id:
            ids = ids[1:]
        while ids and ids[-1] == tokenizer.pad_token_id:
            ids = ids[:-1]
        return ids

    def decode(row: dict[str, Any]) -> dict[str, str]:
        ids = real_ids(row)
        ids = ids[1:] if adds_bos and ids[:1] == [tokenizer.bos_token_id] else ids
        return {"prompt": tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)}

    if tokenizer(decode(first)["prompt"])["input_ids"] != real_ids(first):
        warnings.warn(
            "The dataset's `input_ids` are decoded to text, but tokenizing this text gives different tokens. Pass the "
            "text itself in a `prompt` column.",
            stacklevel=4,
        )
    settings = {"num_proc": num_proc} if isinstance(dataset, Dataset) else {}
    gone = [name for name in first if name in ("input_ids", "attention_mask")]
    return dataset.map(decode, remove_columns=gone, **settings)


def collect_rewards(
    args: KLXPPOConfig,
    reward_model: Any,
    reward_funcs: Any,
    reward_processing_classes: Any,
    processing_class: Any,
    value_model: nn.Module | None,
    current_rollout: Callable[[], Rollout | None],
) -> tuple[list[Any] | None, list[Any] | None]:
    """
    Collect the reward functions and their tokenizers, with the reward model last. A reward model that shares the
    policy's tokenizer reads the tokens of the batch that `current_rollout` returns.
    """
    if reward_model is None and reward_funcs is None:
        reward_model = args.reward_model_path
    funcs = [] if reward_funcs is None else reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
    if value_model is not None and any(value_model is func for func in [*funcs, reward_model]):
        raise ValueError(
            "`value_model` must not be the reward model itself, because training would change it. Pass a copy, or "
            "leave it unset for a value head on the policy."
        )
    if reward_model is None:
        return funcs or None, reward_processing_classes
    classes = reward_processing_classes
    classes = [None] * len(funcs) if classes is None else classes if isinstance(classes, list) else [classes]
    own: Any = None  # A reward model passed as a path has its own tokenizer.
    if isinstance(reward_model, nn.Module):
        labels = getattr(reward_model.config, "num_labels", None)
        if labels != 1:
            raise ValueError(
                f"`reward_model` must be a sequence-classification model with `num_labels=1`, got "
                f"{type(reward_model).__name__} with `num_labels={labels}`."
            )
        reward_model.eval()
        own = None if processing_class is None else RolloutTokens(processing_class, current_rollout)
    return [*funcs, reward_model], [*classes, own]


def used_ref_model(args: KLXPPOConfig, ref_model: nn.Module | None) -> nn.Module | None:
    """The reference model if the KL is measured, else `None`."""
    if ref_model is None or args.kl_enabled:
        return ref_model
    # Not an error, because TRL 1.12 required this argument and old scripts pass it.
    warnings.warn(
        "`ref_model` is not used while `kl_penalty_coef=0.0`. Set `kl_monitor=True` to measure the KL.",
        stacklevel=3,
    )
    return None


def activate_adapter(model: Any, peft_config: Any, name: str | None) -> None:
    """Activate the adapter to train."""
    if name is None or (peft_config is not None and name == "default"):
        return
    known = list(model.peft_config) if is_peft_model(model) else []
    if name not in known:
        raise ValueError(
            f"`model_adapter_name={name!r}` is not an adapter of the policy, which has {known}. Leave it unset, or "
            "choose one of them."
        )
    model.set_adapter(name)


def check_prompts(args: KLXPPOConfig, dataset: Any) -> None:
    """Refuse a dataset too small for one rollout: the sampler would yield nothing, and training would do nothing."""
    assert args.generation_batch_size is not None
    needed = args.generation_batch_size // args.num_generations
    if isinstance(dataset, Dataset) and len(dataset) < needed:
        raise ValueError(
            f"`train_dataset` has {len(dataset)} prompts, but a rollout needs {needed}. Add prompts, or lower "
            "`per_device_train_batch_size` or `gradient_accumulation_steps`."
        )


def train_with_optimizer(
    optimizer: torch.optim.Optimizer, scheduler: Any, module: nn.Module, learning_rate: float | None
) -> None:
    """Add the value function to the user's optimizer, with its own learning rate if one is set."""
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    missing = [parameter for parameter in module.parameters() if id(parameter) not in known]
    if not missing:
        if learning_rate is not None:
            raise ValueError(
                f"`value_learning_rate={learning_rate}` has no effect with an optimizer that already has the value "
                "function. Set the learning rate in the optimizer, and unset `value_learning_rate`."
            )
        return
    if scheduler is not None:
        raise ValueError(
            "`optimizers` has a scheduler for an optimizer without the value function. Pass `(optimizer, None)` to "
            "let the trainer add the value function and create the scheduler, or pass a `value_model` and give its "
            "parameters to the optimizer."
        )
    optimizer.add_param_group({"params": missing} | ({} if learning_rate is None else {"lr": learning_rate}))


def split_off(optimizer: torch.optim.Optimizer, module: nn.Module, learning_rate: float) -> None:
    """Move a module's parameters to separate groups with another learning rate. The new groups come last."""
    chosen = {id(parameter) for parameter in module.parameters()}
    for group in list(optimizer.param_groups):
        moved = [parameter for parameter in group["params"] if id(parameter) in chosen]
        if moved:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in chosen]
            optimizer.add_param_group({**group, "params": moved, "lr": learning_rate})
