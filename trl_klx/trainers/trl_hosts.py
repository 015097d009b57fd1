"""
What our mixins use of TRL's trainers and configs. Only type checkers import this module: at run time the mixins are
combined with TRL's own classes.
"""

from collections import defaultdict
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from ..control.placements import Batch
from .config import KLXGRPOConfig, KLXRLOOConfig


class TRLConfig(TrainingArguments):
    """The fields that [`~trl.GRPOConfig`] and [`~trl.RLOOConfig`] share, as far as we use them."""

    beta: float
    generation_kwargs: dict[str, Any] | str | None
    min_p: float | None
    num_generations: int | None
    num_iterations: int
    steps_per_generation: int | None
    top_k: int
    top_p: float

    def __post_init__(self) -> None:
        raise NotImplementedError


class TRLTrainer(Trainer):
    """The attributes and methods that [`~trl.GRPOTrainer`] and [`~trl.RLOOTrainer`] share, as far as we use them."""

    args: KLXGRPOConfig | KLXRLOOConfig
    model: Any  # a `PreTrainedModel` or a `PeftModel`, never None
    beta: float
    eos_token_ids: list[int]
    log_completions: bool
    num_generations: int | None
    num_generations_eval: int | None
    num_iterations: int
    ref_model: Any
    reward_func_names: list[str]
    reward_weights: torch.Tensor
    temperature: float
    use_vllm: bool
    vllm_generation: Any
    _logs: dict[str, Any]
    _metrics: dict[str, defaultdict[str, list[float]]]
    _step: int
    _tokenizer: Any

    def __init__(self, model: Any, reward_funcs: Any, args: Any, *positional: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Batch:
        raise NotImplementedError

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        raise NotImplementedError

    def _compute_loss(self, model: nn.Module, inputs: Batch) -> torch.Tensor:
        raise NotImplementedError
