"""Methods that only scripts written for TRL 1.12's PPO still call."""

import os
import warnings
from typing import TYPE_CHECKING

from datasets import Dataset  # type: ignore[import-untyped]


if TYPE_CHECKING:
    from ..trainers.grpo import KLXGRPOTrainer

    # The methods are only ever combined with that trainer, so they may use its attributes.
    _Host = KLXGRPOTrainer
else:
    _Host = object


class TRL112Methods(_Host):
    """The methods of TRL 1.12's `PPOTrainer` that new scripts do not need."""

    def generate_completions(self, sampling: bool = False) -> None:
        """
        Complete the evaluation prompts and show the completions. Many scripts call this in their last line.

        Args:
            sampling (`bool`, *optional*, defaults to `False`):
                Whether to complete only one batch.
        """
        warnings.warn(
            "`generate_completions` is now `evaluate`, with `log_completions=True`.", FutureWarning, stacklevel=2
        )
        if self.eval_dataset is None:
            return
        dataset = self.eval_dataset
        if sampling and isinstance(dataset, Dataset):
            batch = self.args.per_device_eval_batch_size * self.accelerator.num_processes
            dataset = dataset.select(range(min(len(dataset), batch // self.num_generations_eval)))
        assert self.args.output_dir is not None
        os.makedirs(os.path.join(self.args.output_dir, "completions"), exist_ok=True)
        logs, self.log_completions = self.log_completions, True
        try:
            self.evaluate(dataset)
        finally:
            self.log_completions = logs
