"""
PPO in a process group: on one global batch of completions, and resumed from a checkpoint to compare with the
uninterrupted run. Each rank writes its results.
"""

import gc
import os
import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from support.tiny_ppo import SPREAD_RUNS, build_resumed_run, ppo_outcome, run_spread


torch.set_num_threads(1)
gc.freeze()
folder = sys.argv[1]
rank = int(os.environ["RANK"])


def compare(name: str) -> dict:
    whole = build_resumed_run(name, f"{folder}/whole-{name}", "")
    assert whole.accelerator.num_processes == 2, whole.accelerator.num_processes
    whole.train()
    resumed = build_resumed_run(name, f"{folder}/whole-{name}", "", save_strategy="no")
    resumed.train(resume_from_checkpoint=f"{folder}/whole-{name}/checkpoint-8")
    return {"whole": ppo_outcome(whole), "resumed": ppo_outcome(resumed)}


outcomes = {
    "spread": {name: run_spread(name, f"{folder}/{name}", processes=2) for name in SPREAD_RUNS},
    "resumed": {name: compare(name) for name in ("head", "lora")},
}
torch.save(outcomes, f"{folder}/rank{rank}.pt")
