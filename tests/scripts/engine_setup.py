"""What a process needs before it can train on an engine."""

from importlib import import_module
from pathlib import Path
from typing import Any

from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin


plain_init = AcceleratorState.__init__


def init_fsdp(self, *args, **kwargs):
    # Accelerate supports FSDP only for process groups of GPUs, and silently falls back to DDP otherwise.
    plain_init(self, *args, **kwargs)
    if self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type = DistributedType.FSDP
        self.fsdp_plugin = FullyShardedDataParallelPlugin()  # from the launcher's settings


def set_up(engine: str, folder: Path) -> dict[str, Any]:
    """Prepare this process, and return the config fields that choose the engine."""
    if engine == "fsdp2":
        AcceleratorState.__init__ = init_fsdp
    if engine.startswith("zero"):
        import deepspeed

        # A faster all-reduce between CPUs, which takes minutes to compile. `deepspeed.comm.torch` is torch itself.
        vars(import_module("deepspeed.comm.torch"))["build_shm_op"] = lambda: None
        deepspeed.init_distributed(dist_backend="gloo")
    fields: dict[str, dict[str, Any]] = {
        "zero3": {"deepspeed": str(folder / "zero3.json")},
        "batching": {
            "use_transformers_continuous_batching": True,
            "transformers_continuous_batching_config": {"num_blocks": 64, "max_batch_tokens": 256},
        },
    }
    return fields.get(engine, {})
