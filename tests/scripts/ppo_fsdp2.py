"""PPO under FSDP2, uninterrupted and resumed from a checkpoint. Each rank writes both outcomes."""

import gc
import os
import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

from support.tiny import history
from support.tiny_ppo import build_resumed_run


torch.set_num_threads(1)
gc.freeze()
folder = sys.argv[1]
rank = int(os.environ["RANK"])
plain_init = AcceleratorState.__init__


def init(self, *args, **kwargs):
    # Accelerate supports FSDP only for process groups of GPUs, and silently falls back to DDP otherwise.
    plain_init(self, *args, **kwargs)
    if self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type = DistributedType.FSDP
        self.fsdp_plugin = FullyShardedDataParallelPlugin()  # from the launcher's settings


AcceleratorState.__init__ = init


def train(name: str, checkpoint: str | None = None, **overrides) -> dict:
    trainer = build_resumed_run(name, f"{folder}/{name}", "", **overrides)
    assert trainer.accelerator.distributed_type == DistributedType.FSDP and trainer.accelerator.num_processes == 2
    trainer.train(resume_from_checkpoint=checkpoint)
    sharded = [hasattr(parameter, "full_tensor") for parameter in trainer.value_function.module.parameters()]
    return {"history": history(trainer)[:-1], "values": trainer.value_function.state_dict(), "sharded": all(sharded)}


outcomes = {}
for name in ("head", "lora", "value_model"):
    outcomes[name] = {
        "whole": train(name),
        "resumed": train(name, f"{folder}/{name}/checkpoint-8", save_strategy="no"),
    }
torch.save(outcomes, f"{folder}/rank{rank}.pt")
