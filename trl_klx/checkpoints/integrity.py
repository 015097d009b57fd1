"""Which checkpoint to resume from: the newest that is whole. A run that is killed while it saves leaves a torn one."""

import json
import math
import os
import re
import struct
import warnings
import zipfile

from trl import GRPOConfig, RLOOConfig

from ..references.loading import saved_steps
from .kl_state import read_json, read_kl_state


# The host writes it last, so that a checkpoint without it was never finished.
LAST_FILE = "trainer_state.json"
INDEX_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SAFETENSORS = re.compile(r"(adapter_)?model(-\d+-of-\d+)?\.safetensors")
# Older hosts can be told to write these.
PICKLES = re.compile(r"(pytorch|adapter)_model(-\d+-of-\d+)?\.bin")
# Written together, if at all: a checkpoint may hold the model only.
OPTIMIZER, SCHEDULER = "optimizer.pt", "scheduler.pt"
RUN_FILES = re.compile(r"(optimizer|scheduler|scaler)\.pt|rng_state(_\d+)?\.pth")
# Those of the trainers here, beside the KL-control state; a fault in them is told by who reads them.
OWN_JSON = ("ppo_state.json",)
# No header is longer in what safetensors itself reads.
LONGEST_HEADER = 100_000_000


class TornCheckpointError(Exception):
    """Why a checkpoint is not whole."""


def choose_checkpoint(output_dir: str, asked: str | bool, sharded: bool = False) -> str | bool:
    """
    The checkpoint to resume from. Reads the ends and headers of its files, whatever their size, and unpickles nothing.

    Args:
        output_dir (`str`):
            Folder of the run.
        asked (`str` or `bool`):
            What the user passed as `resume_from_checkpoint`: `True` for the newest checkpoint in `output_dir`.
        sharded (`bool`, *optional*, defaults to `False`):
            Whether the engine keeps weights and optimizer in files of its own.

    Returns:
        `str` or `bool`: A checkpoint that is whole; `asked` itself where there is none at all, which the host refuses.
    """
    if not isinstance(asked, bool):
        fault = checkpoint_fault(asked, sharded) if os.path.isdir(asked) else None
        if fault is not None:
            raise ValueError(
                f"Cannot resume from {asked!r}, which is not whole: {fault}. Resume from another checkpoint, or pass "
                "`resume_from_checkpoint=True` for the newest one that is whole."
            )
        return asked
    torn = []
    for step in reversed(saved_steps(output_dir)):
        folder = os.path.join(output_dir, f"checkpoint-{step}")
        fault = checkpoint_fault(folder, sharded) or _own_fault(folder)
        if fault is None:
            if torn:
                warnings.warn(f"Resuming from {folder!r}, because {'; '.join(torn)}.", stacklevel=3)
            return folder
        torn.append(f"{folder!r} is not whole: {fault}")
    if torn:
        raise ValueError(
            f"Cannot resume: no checkpoint in {output_dir!r} is whole ({'; '.join(torn)}). Train without "
            "`resume_from_checkpoint` to start anew."
        )
    return asked


def check_checkpoints(args: GRPOConfig | RLOOConfig) -> None:
    """Warn of checkpoints inside a rollout: it is not saved, so a resumed run samples a new one."""
    per_rollout = args.num_iterations * args.steps_per_generation
    steps = per_rollout // math.gcd(per_rollout, args.gradient_accumulation_steps)
    if args.save_strategy == "steps" and args.save_steps >= 1 and args.save_steps % steps:
        warnings.warn(
            f"`save_steps={args.save_steps}` puts checkpoints inside a rollout, from which a run cannot go on exactly as "
            f"it was. Set it to a multiple of {steps}.",
            stacklevel=3,
        )


def mark_unfinished(folder: str) -> None:
    """Before files of an earlier run are written over: a mixture of both must not be taken for a whole checkpoint."""
    path = os.path.join(folder, LAST_FILE)
    if os.path.lexists(path):
        os.unlink(path)


def checkpoint_fault(folder: str, sharded: bool = False) -> str | None:
    """
    What is missing from the host's files in a checkpoint; `None` if it is whole.

    Args:
        folder (`str`):
            Checkpoint.
        sharded (`bool`, *optional*, defaults to `False`):
            Whether the engine keeps weights and optimizer in files of its own, which are then not looked for.
    """
    try:
        names = _files(folder)
        if LAST_FILE not in names:
            raise TornCheckpointError(f"it has no `{LAST_FILE}`, which is written last")
        # PEFT saves an adapter of any other name than "default" into a folder of that name.
        inner = [name for name in sorted(os.listdir(folder)) if os.path.isdir(os.path.join(folder, name))]
        inner = [os.path.join(name, file) for name in inner for file in _files(os.path.join(folder, name))]
        weights = [name for name in [*names, *inner] if _is_weights(os.path.basename(name))]
        if not sharded and not weights:
            raise TornCheckpointError("it has no weights")
        run_files = [name for name in names if RUN_FILES.fullmatch(name)]
        for name in (OPTIMIZER, SCHEDULER):
            if run_files and name not in names and not sharded:
                raise TornCheckpointError(f"it has no `{name}`")
        for name in [LAST_FILE, *weights, *run_files]:
            _check_file(os.path.join(folder, name), name)
        for name in INDEX_FILES:
            if name in names:
                _check_shards(os.path.join(folder, name), name, names)
    except TornCheckpointError as fault:
        return str(fault)
    return None


def _files(folder: str) -> list[str]:
    return [name for name in sorted(os.listdir(folder)) if os.path.isfile(os.path.join(folder, name))]


def _is_weights(name: str) -> bool:
    return bool(SAFETENSORS.fullmatch(name) or PICKLES.fullmatch(name))


def _own_fault(folder: str) -> str | None:
    """
    What is wrong with the files that a KLX trainer adds. That there are none is not a fault: the host may have trained
    alone.
    """
    try:
        read_kl_state(folder)
        for name in _files(folder):
            path = os.path.join(folder, name)
            if name in OWN_JSON:
                read_json(path)
            elif name.endswith(".safetensors"):
                _check_safetensors(path, name)
    except (ValueError, TornCheckpointError) as error:
        return str(error).removeprefix("Cannot resume: ")
    return None


def _check_file(path: str, name: str) -> None:
    if name == LAST_FILE:
        state = _read_json(path, name)
        if not isinstance(state, dict) or not isinstance(state.get("global_step"), int):
            raise TornCheckpointError(f"its `{name}` has no step")
    elif name.endswith(".safetensors"):
        _check_safetensors(path, name)
    else:
        # A zip file ends with its table of contents.
        try:
            with zipfile.ZipFile(path) as archive:
                empty = not archive.namelist()
        except (OSError, zipfile.BadZipFile, ValueError) as error:
            raise TornCheckpointError(f"its `{name}` is torn ({error})") from error
        if empty:
            raise TornCheckpointError(f"its `{name}` is empty")


def _read_json(path: str, name: str):
    try:
        with open(path, encoding="utf-8") as stream:
            return json.load(stream)
    except (OSError, ValueError, RecursionError) as error:
        raise TornCheckpointError(f"its `{name}` is torn ({error})") from error


def _check_safetensors(path: str, name: str) -> None:
    """The header says how long the file must be."""
    try:
        size = os.path.getsize(path)
        with open(path, "rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > min(size - 8, LONGEST_HEADER):
                raise ValueError("it ends in its header")
            header = json.loads(stream.read(length))
        ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
        expected = 8 + length + max(ends, default=0)
        if size != expected:
            raise ValueError(f"{size} bytes of {expected}")
    except (
        OSError,
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        AttributeError,
        struct.error,
        RecursionError,
    ) as error:
        raise TornCheckpointError(f"its `{name}` is torn ({error})") from error


def _check_shards(path: str, name: str, names: list[str]) -> None:
    index = _read_json(path, name)
    shards = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(shards, dict):
        raise TornCheckpointError(f"its `{name}` lists no weights")
    # A name that leaves the folder is not among its files.
    missing = sorted(set(map(str, shards.values())) - set(names))
    if missing:
        raise TornCheckpointError(f"it has no `{missing[0]}`")
