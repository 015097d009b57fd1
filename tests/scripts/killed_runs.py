"""Train every run of `resumption.py` in a process of its own that is killed on the way. Prints one signal per run."""

import gc
import os
import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import TrainerCallback

from resumption import RUNS, build_run, deadly_reward, kill_self


torch.set_num_threads(1)
gc.freeze()
folder, adapter = sys.argv[1:]


class KillAfterStep(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 5:
            kill_self()


for number, name in enumerate(RUNS):
    # Forked before anything has run, so that each child starts afresh but need not import everything again.
    child = os.fork()
    if child == 0:
        between_steps = number % 2 == 0
        rewards = {} if between_steps else {"rewards": deadly_reward(step=4)}
        trainer = build_run(name, f"{folder}/{name}", adapter, **rewards)
        if between_steps:
            trainer.add_callback(KillAfterStep())
        trainer.train()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    print(name, os.WTERMSIG(status) if os.WIFSIGNALED(status) else "survived", flush=True)
