"""
In a process group: `kill` trains until rank 1 is killed. `compare` trains without interruption and resumes the killed
run; each rank writes both outcomes.
"""

import gc
import os
import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from support.resumption import build_run, deadly_reward, outcome


torch.set_num_threads(1)
gc.freeze()
action, folder, adapter = sys.argv[1:]
rank = int(os.environ["RANK"])


def build(name, place, **overrides):
    trainer = build_run(name, f"{folder}/{place}", adapter, per_device_train_batch_size=2, **overrides)
    assert trainer.accelerator.num_processes == 2, trainer.accelerator.num_processes
    assert str(trainer.accelerator.distributed_type) == "DistributedType.MULTI_CPU", trainer.accelerator.state
    return trainer


def compare(name, whole, resumed):
    resumed.train(resume_from_checkpoint=f"{resumed.args.output_dir}/checkpoint-4")
    torch.save({"whole": outcome(whole), "resumed": outcome(resumed)}, f"{folder}/{name}-rank{rank}.pt")


if action == "kill":
    build("adapter", "killed", **({"rewards": deadly_reward(step=4)} if rank == 1 else {})).train()
else:
    whole = build("adapter", "whole")
    whole.train()
    compare("adapter", whole, build("adapter", "killed"))
    # A moving reference and one that is reset, resumed from a checkpoint of a finished run.
    for name in ("lag", "reset"):
        whole = build(name, name)
        whole.train()
        compare(name, whole, build(name, name, save_strategy="no"))
