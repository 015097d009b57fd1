"""Train every PPO run that is to be resumed in a process of its own that is killed on the way. Prints one signal each."""

import gc
import os
import signal
import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import TrainerCallback

from tiny_ppo import RESUMED_RUNS, build_resumed_run


torch.set_num_threads(1)
gc.freeze()
folder, adapter = sys.argv[1:]


class KillAfterStep(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 10:
            os.kill(os.getpid(), signal.SIGKILL)


class KillInsideStep(TrainerCallback):
    """After the gradients, before the optimizer."""

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step == 10:
            os.kill(os.getpid(), signal.SIGKILL)


for number, name in enumerate(RESUMED_RUNS):
    # Forked before anything has run, so that each child starts afresh but need not import everything again.
    child = os.fork()
    if child == 0:
        trainer = build_resumed_run(name, f"{folder}/{name}", adapter)
        trainer.add_callback(KillInsideStep() if number % 2 else KillAfterStep())
        trainer.train()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    print(name, os.WTERMSIG(status) if os.WIFSIGNALED(status) else "survived", flush=True)
