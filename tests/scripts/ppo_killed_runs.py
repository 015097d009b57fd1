"""Train every PPO run to be resumed in its own process, which is killed midway. Prints one signal per run."""

import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from killing import KillAfterStep, run_all
from transformers import TrainerCallback

from support.resumption import kill_self
from support.tiny_ppo import RESUMED_RUNS, build_resumed_run


folder, adapter = sys.argv[1:]


class KillInsideStep(TrainerCallback):
    """Kill the process after the gradients, before the optimizer step."""

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step == 10:
            kill_self()


def train(number: int, name: str) -> None:
    trainer = build_resumed_run(name, f"{folder}/{name}", adapter)
    trainer.add_callback(KillInsideStep() if number % 2 else KillAfterStep(10))
    trainer.train()


run_all(RESUMED_RUNS, train)
