"""Train every run of `resumption.py` in its own process, which is killed midway. Prints one signal per run."""

import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from killing import KillAfterStep, run_all

from support.resumption import RUNS, build_run, deadly_reward


folder, adapter = sys.argv[1:]


def train(number: int, name: str) -> None:
    between_steps = number % 2 == 0
    rewards = {} if between_steps else {"rewards": deadly_reward(step=4)}
    trainer = build_run(name, f"{folder}/{name}", adapter, **rewards)
    if between_steps:
        trainer.add_callback(KillAfterStep(5))
    trainer.train()


run_all(RUNS, train)
