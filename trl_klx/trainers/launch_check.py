"""Whether a launch is what was asked for. Several wrong ones train on, alone or unsharded, and exit with 0."""

import os
import warnings
from collections.abc import Mapping

from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import DistributedType


logger = get_logger(__name__)

_ENGINES = {
    "ACCELERATE_USE_FSDP": (DistributedType.FSDP, "FSDP", "fsdp2.yaml"),
    "ACCELERATE_USE_DEEPSPEED": (DistributedType.DEEPSPEED, "DeepSpeed", "zero3.yaml"),
}


def find_launch_faults(
    environment: Mapping[str, str], num_processes: int, distributed_type: DistributedType
) -> list[str]:
    """
    What the launcher was asked for, as far as it left that in the environment, and the run has not got.

    Args:
        environment (`Mapping[str, str]`):
            Environment variables.
        num_processes (`int`):
            Number of processes that train together.
        distributed_type ([`~accelerate.utils.DistributedType`]):
            How they do so.

    Returns:
        `list[str]`: One message per fault, which says what to do; empty if there is none.
    """
    faults = []
    world = environment.get("WORLD_SIZE", "")
    launched = int(world) if world.isdigit() else 1
    if launched > num_processes:
        faults.append(
            f"{launched} processes were launched (WORLD_SIZE={launched}), but {num_processes} train together: each of them "
            "trains a model of its own, on a batch of its own. On a machine without GPUs, set `use_cpu=True` (`--use_cpu`) "
            "in the config of the trainer."
        )
    # Accelerate's launcher of one process says whether it uses the CPU. Where the process meets others it says only if it
    # was asked for more than one, of which it then starts one.
    alone = "ACCELERATE_USE_CPU" in environment and "LOCAL_RANK" not in environment and launched == 1
    if alone and num_processes == 1 and "MASTER_PORT" in environment:
        faults.append(
            "`accelerate launch` was asked for several processes and started one: with `--cpu`, and with a config file that "
            "says `MULTI_CPU` or `NO`, `--num_processes` has no effect. On CPUs, launch with `torchrun --nproc_per_node N "
            "script.py` and set `use_cpu=True`; on GPUs, with `accelerate launch --multi_gpu --num_processes N script.py` "
            "or `--config_file recipes/accelerate/multi_gpu.yaml`. If one process is what you want, take MASTER_PORT out of "
            "the environment."
        )
    for variable, (wanted, name, recipe) in _ENGINES.items():
        if environment.get(variable, "false").lower() in ("true", "1") and distributed_type != wanted:
            faults.append(
                f"{name} was asked for ({variable}={environment[variable]}), but the run is {distributed_type.value}: "
                "nothing is sharded, and every process holds the whole model. Accelerate shards only on GPUs and their "
                f"like, and only without `use_cpu`: launch on GPUs with `accelerate launch --config_file "
                f"recipes/accelerate/{recipe} script.py`, or leave {name} out."
            )
    return faults


def check_launch(accelerator: Accelerator) -> list[str]:
    """
    Say loudly, as a warning and in the log, where the run is not the one that the launcher was asked for.

    Args:
        accelerator ([`~accelerate.Accelerator`]):
            Accelerator of the trainer.

    Returns:
        `list[str]`: What was said.
    """
    faults = find_launch_faults(os.environ, accelerator.num_processes, accelerator.distributed_type)
    for fault in faults:
        logger.warning(fault)
        warnings.warn(f"This launch is not what was asked for. {fault}", stacklevel=3)
    return faults
