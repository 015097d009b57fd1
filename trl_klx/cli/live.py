"""Writing a run's log while it trains, so that `trl-klx plot --follow` need not wait for a checkpoint."""

import os
import time

from transformers import TrainerCallback

from .runs import STATE_FILE


class LiveStateCallback(TrainerCallback):
    """
    Keep `trainer_state.json` in the run's folder up to date with the log. Transformers writes it into checkpoints only.
    `trl-klx grpo|rloo|ppo` has it on; in a script of your own, `trainer.add_callback(LiveStateCallback())`.

    Args:
        every (`float`, *optional*, defaults to `2.0`):
            Least number of seconds between two writes. The end of the training is always written.
    """

    def __init__(self, every: float = 2.0):
        self.every = every
        self.started = False
        self._written: float | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        self.started = True

    def on_log(self, args, state, control, **kwargs):
        if self._written is None or time.monotonic() - self._written >= self.every:
            self._write(args, state)

    def on_train_end(self, args, state, control, **kwargs):
        self._write(args, state)

    def _write(self, args, state) -> None:
        if not state.is_world_process_zero:
            return
        os.makedirs(args.output_dir, exist_ok=True)
        path = os.path.join(args.output_dir, STATE_FILE)
        # A reader finds the old file or the new one, never a part.
        state.save_to_json(f"{path}.tmp")
        os.replace(f"{path}.tmp", path)
        self._written = time.monotonic()
