"""Runs that are killed midway, each in its own process."""

import gc
import os
from collections.abc import Callable, Iterable

import torch
from transformers import TrainerCallback

from support.resumption import kill_self


class KillAfterStep(TrainerCallback):
    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            kill_self()


def run_all(names: Iterable[str], train: Callable[[int, str], None]) -> None:
    """Call `train` with the number and name of each run in a child process. Prints the signal that ended it."""
    torch.set_num_threads(1)
    gc.freeze()
    for number, name in enumerate(names):
        # Forked before anything has run, so that each child has a fresh state without importing everything again.
        child = os.fork()
        if child == 0:
            train(number, name)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(name, os.WTERMSIG(status) if os.WIFSIGNALED(status) else "survived", flush=True)
