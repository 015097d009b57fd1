"""The prompts of a resumed run."""

import math
import warnings
from typing import Any

from torch.utils.data import Sampler
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import has_length
from trl.trainer.utils import RepeatSampler


class ResumeSampler(TrainerCallback):
    """
    Lets a run that is resumed after its first epoch see the prompts that it would have seen. TRL's sampler draws the
    order of each epoch from a generator that is seeded once, so a new sampler would begin with the order of the first
    epoch again. Transformers skips only the batches of the epoch at hand.

    With `ignore_data_skip=True` the data start from the beginning, as they do in transformers.
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        loader: Any = kwargs["train_dataloader"]
        if args.ignore_data_skip or state.global_step == 0:
            return
        if not has_length(loader):
            _warn_of_later_pass(state)
            return
        sampler = find_sampler(loader)
        if not isinstance(sampler, RepeatSampler):
            return  # the user's own
        steps_per_epoch = max(1, math.ceil(len(loader) / args.gradient_accumulation_steps))
        for _ in range(state.global_step // steps_per_epoch):
            next(iter(sampler), None)  # the first prompt of an epoch draws the order of them all


def _warn_of_later_pass(state: TrainerState) -> None:
    if (state.epoch or 0.0) >= 1.0:
        warnings.warn(
            f"The training dataset is iterable, and its first pass ended before step {state.global_step}: "
            "transformers finds no place in a later pass, so the prompts are not those of the run that is resumed. "
            "Use a dataset with a length.",
            stacklevel=2,
        )


def find_sampler(loader: Any) -> Sampler[Any] | None:
    """The sampler of single examples in a dataloader, inside whatever splits its batches over processes."""
    batches: Any = getattr(loader, "batch_sampler", None)
    while hasattr(batches, "batch_sampler"):
        batches = batches.batch_sampler
    sampler: Sampler[Any] | None = getattr(batches, "sampler", None)
    return sampler
