"""Writing a run's log while it trains, so that `trl-klx plot --follow` need not wait for a checkpoint."""

import os
import time
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..checkpoints.atomic_write import atomic_write
from .runs import STATE_FILE


class LiveStateCallback(TrainerCallback):
    """
    Keeps `trainer_state.json` in the run's folder up to date with the log. Transformers writes it only into
    checkpoints. `trl-klx grpo|rloo|ppo` adds this callback. In your own script, call
    `trainer.add_callback(LiveStateCallback())`.

    Args:
        every (`float`, *optional*, defaults to `2.0`):
            Minimum time between two writes, in seconds. The final state is always written.
    """

    def __init__(self, every: float = 2.0):
        self.every = every
        self.started = False
        self._written: float | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.started = True

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._written is None or time.monotonic() - self._written >= self.every:
            self._write(args, state)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._write(args, state)

    def _write(self, args: TrainingArguments, state: TrainerState) -> None:
        if not state.is_world_process_zero:
            return
        with atomic_write(os.path.join(args.output_dir or "", STATE_FILE)) as temporary:
            state.save_to_json(temporary)
        self._written = time.monotonic()
