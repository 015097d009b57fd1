"""In a process group: one rank's reference gives a NaN, once and then in every batch. Each rank writes what it did."""

import gc
import logging
import math
import os
import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from support.snapshots import train_with_snapshots
from support.tiny import build_trainer, weights
from support.tiny_ppo import build_ppo
from trl_klx import KLXGRPOTrainer, KLXRLOOTrainer
from trl_klx.trainers.forward_passes import ForwardPassMixin


torch.set_num_threads(1)
gc.freeze()
folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
score, steps = ForwardPassMixin._klx_score_reference, set()


def spoiled(self, args, kwargs):
    scored = score(self, args, kwargs)
    if self.state.global_step + 1 in steps and rank == 1:
        scored.logps[0, 0] = math.nan
    return scored


class Messages(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())


def build(kind, optim, **fields):
    penalty = {"kl_penalty_coef": 0.1, "kl_placement": "loss"}
    settings = penalty | {"max_steps": 4, "per_device_train_batch_size": 2, "optim": optim} | fields
    if kind == "PPO":
        return build_ppo(folder / kind, num_ppo_epochs=1, **settings)
    return build_trainer(KLXGRPOTrainer if kind == "GRPO" else KLXRLOOTrainer, folder / kind, **settings)


said: list[str] = []
logging.getLogger("trl_klx.trainers.finite_steps").addHandler(Messages())
ForwardPassMixin._klx_score_reference = spoiled
outcomes = {}
for kind, optim in (("GRPO", "adamw_torch_fused"), ("RLOO", "sgd"), ("PPO", "adamw_torch_fused")):
    said.clear()
    steps = {2}
    trainer = build(kind, optim)
    assert trainer.accelerator.num_processes == 2
    outcome = {"moved": train_with_snapshots(trainer).moved(), "weights": weights(trainer), "messages": list(said)}
    steps = set(range(2, 20))
    try:
        train_with_snapshots(build(kind, optim, max_steps=12))
    except FloatingPointError as error:
        outcome["stopped"] = str(error)
    outcomes[kind] = outcome
torch.save(outcomes, folder / f"rank{rank}.pt")
