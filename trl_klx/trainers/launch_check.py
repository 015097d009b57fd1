"""
Checks that a run is the one that was asked for, and that it does not overwrite another. Without them, some mistakes go
unnoticed.
"""

import os
import warnings
from collections.abc import Mapping

from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import DistributedType

from ..checkpoints.kl_state import read_kl_state
from ..references.loading import saved_steps


logger = get_logger(__name__)

_ENGINES = {
    "ACCELERATE_USE_FSDP": (DistributedType.FSDP, "FSDP", "fsdp2.yaml"),
    "ACCELERATE_USE_DEEPSPEED": (DistributedType.DEEPSPEED, "DeepSpeed", "zero3.yaml"),
}


def find_launch_faults(
    environment: Mapping[str, str], num_processes: int, distributed_type: DistributedType
) -> list[str]:
    """
    Compare the run with what the launcher was asked for, as far as the environment tells.

    Args:
        environment (`Mapping[str, str]`):
            Environment variables.
        num_processes (`int`):
            Number of processes that train together.
        distributed_type ([`~accelerate.utils.DistributedType`]):
            How they train together.

    Returns:
        `list[str]`: One message per fault, which also says what to do.
    """
    faults = []
    world = environment.get("WORLD_SIZE", "")
    launched = int(world) if world.isdigit() else 1
    if launched > num_processes:
        faults.append(
            f"{launched} processes were launched (WORLD_SIZE={launched}), but the run has {num_processes}: the "
            "processes do not train together, and each of them trains a separate model. On a machine without GPUs, "
            "set `use_cpu=True` (`--use_cpu`) in the trainer's config."
        )
    # Accelerate's single-process launcher sets ACCELERATE_USE_CPU, and MASTER_PORT only if more than one process was
    # requested.
    alone = "ACCELERATE_USE_CPU" in environment and "LOCAL_RANK" not in environment and launched == 1
    if alone and num_processes == 1 and "MASTER_PORT" in environment:
        faults.append(
            "`accelerate launch` was asked for several processes and started one: `--num_processes` has no effect "
            "with `--cpu`, or with a config file that says `MULTI_CPU` or `NO`. On CPUs, launch with `torchrun "
            "--nproc_per_node N script.py` and set `use_cpu=True`. On GPUs, launch with `accelerate launch "
            "--multi_gpu --num_processes N script.py` or `--config_file recipes/accelerate/multi_gpu.yaml`. If you "
            "want one process, unset MASTER_PORT."
        )
    for variable, (wanted, name, recipe) in _ENGINES.items():
        if environment.get(variable, "false").lower() in ("true", "1") and distributed_type != wanted:
            faults.append(
                f"{name} was asked for ({variable}={environment[variable]}), but the run is {distributed_type.value}: "
                "nothing is sharded, and every process holds the whole model. Accelerate shards only on GPUs and "
                "similar devices, and only without `use_cpu`: launch on GPUs with `accelerate launch --config_file "
                f"recipes/accelerate/{recipe} script.py`, or do not ask for {name}."
            )
    return faults


def check_launch(accelerator: Accelerator) -> list[str]:
    """
    Warn, and log, if the run is not the one that the launcher was asked for.

    Args:
        accelerator ([`~accelerate.Accelerator`]):
            Accelerator of the trainer.

    Returns:
        `list[str]`: The faults that were reported.
    """
    faults = find_launch_faults(os.environ, accelerator.num_processes, accelerator.distributed_type)
    for fault in faults:
        logger.warning(fault)
        warnings.warn(f"This launch is not what was asked for. {fault}", stacklevel=3)
    return faults


def find_overwritten(
    output_dir: str, reference_step: int, save_steps: int | None, max_steps: int, deletes: bool
) -> list[int]:
    """
    Find the checkpoints of an earlier run that a run in its folder may overwrite or delete.

    Args:
        output_dir (`str`):
            Folder of both runs.
        reference_step (`int`):
            Step of the earlier run that is the reference. Its checkpoint is spared.
        save_steps (`int` or `None`):
            Steps between two checkpoints of the new run; `None` if they are not known.
        max_steps (`int`):
            Last step of the new run; not known unless it is positive.
        deletes (`bool`):
            Whether the new run deletes old checkpoints.

    Returns:
        `list[int]`: Their steps.
    """
    found = []
    for step in saved_steps(output_dir):
        reached = (max_steps <= 0 or step <= max_steps) and (
            save_steps is None or step % save_steps == 0 or step == max_steps
        )
        if step != reference_step and (deletes or reached) and not _has_reference(output_dir, step, reference_step):
            found.append(step)
    return found


def _has_reference(output_dir: str, step: int, reference_step: int) -> bool:
    """Whether a checkpoint is of a run with this reference, which may be the one that is now resumed."""
    try:
        state = read_kl_state(os.path.join(output_dir, f"checkpoint-{step}"))
    except (OSError, ValueError):
        return False
    reference = (state or {}).get("reference", {})
    return bool((reference.get("kind"), reference.get("step")) == ("step", reference_step))
