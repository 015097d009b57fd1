"""The KL of each completion, as a column in TRL's table of completions."""

from collections import deque
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather

from ..maths.estimators import sum_kl_per_sequence


COLUMN = "klx/kl"


class CompletionKLs:
    """
    Fills the column `klx/kl` of the table that `log_completions=True` writes: the KL statistic of each completion,
    summed over its tokens.

    TRL fills its table at generation. If the KL is measured in the loss, a row holds `None` until its micro-batch has
    been trained on, so a table that is logged in the middle of a generation batch is complete only in the next log. A
    completion keeps `None` if none of its tokens count.

    Args:
        columns (`dict[str, deque]`):
            TRL's extra columns. Each is as long as the table.
        accelerator ([`~accelerate.Accelerator`]):
            Accelerator of the trainer.
    """

    def __init__(self, columns: dict[str, deque[Any]], accelerator: Accelerator):
        self.columns = columns
        self.accelerator = accelerator
        self.added = 0

    def add(self, batch: dict[str, Any]) -> None:
        """
        Add empty rows for a generation batch, and number its completions, so that they can be found again after TRL
        has shuffled and split the batch. Call this for every batch: TRL adds every batch to its table, whether or not
        the table is written.
        """
        size, device = len(batch["completion_ids"]), batch["completion_ids"].device
        # TRL gathers completions in the order of the processes.
        first = self.added + self.accelerator.process_index * size
        batch["klx_row"] = torch.arange(first, first + size, device=device)
        total = size * self.accelerator.num_processes
        self.columns[COLUMN].extend([None] * total)
        self.added += total

    def fill(self, batch: dict[str, Any], per_token_kl: torch.Tensor, mask: torch.Tensor) -> None:
        """Enter the KL of a batch or micro-batch. Every process must call this."""
        kls = sum_kl_per_sequence(per_token_kl, mask).masked_fill(mask.sum(1) == 0, torch.nan)
        kls, rows = gather(kls).tolist(), gather(batch["klx_row"]).tolist()
        column = self.columns[COLUMN]
        dropped = self.added - len(column)  # the table keeps the newest rows
        for row, kl in zip(rows, kls, strict=True):
            if row >= dropped:
                column[row - dropped] = None if kl != kl else kl
