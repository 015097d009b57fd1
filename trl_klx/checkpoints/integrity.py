"""Choosing the newest whole checkpoint to resume from. A run that is killed while it saves leaves a torn one."""

import json
import math
import os
import re
import warnings
import zipfile
from typing import Any

from safetensors import SafetensorError, safe_open
from trl import GRPOConfig, RLOOConfig

from ..references.loading import saved_steps
from .kl_state import read_json, read_kl_state


# Transformers writes it last, so a checkpoint without it was never finished.
LAST_FILE = "trainer_state.json"
INDEX_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SAFETENSORS = re.compile(r"(adapter_)?model(-\d+-of-\d+)?\.safetensors")
# Older versions of transformers can be told to write these.
PICKLES = re.compile(r"(pytorch|adapter)_model(-\d+-of-\d+)?\.bin")
# Transformers writes both or neither: with `save_only_model` a checkpoint holds the model alone.
OPTIMIZER, SCHEDULER = "optimizer.pt", "scheduler.pt"
RUN_FILES = re.compile(r"(optimizer|scheduler|scaler)\.pt|rng_state(_\d+)?\.pth")
# JSON files that our trainers write in addition to the KL-control state.
OWN_JSON = ("ppo_state.json",)


class TornCheckpointError(Exception):
    """A checkpoint is not whole; the message says why."""


def choose_checkpoint(output_dir: str, asked: str | bool, sharded: bool = False) -> str | bool:
    """
    Choose the checkpoint to resume from. This reads only headers and tables of contents, and unpickles nothing.

    Args:
        output_dir (`str`):
            Folder of the run.
        asked (`str` or `bool`):
            The user's `resume_from_checkpoint`: a folder, or `True` for the newest checkpoint in `output_dir`.
        sharded (`bool`, *optional*, defaults to `False`):
            Whether the engine (FSDP or DeepSpeed) writes weights and optimizer in its own format.

    Returns:
        `str` or `bool`: A whole checkpoint. If there are no checkpoints, `asked`, which transformers then refuses.
    """
    if not isinstance(asked, bool):
        fault = checkpoint_fault(asked, sharded) if os.path.isdir(asked) else None
        if fault is not None:
            raise ValueError(
                f"Cannot resume from {asked!r}, which is not whole: {fault}. Resume from another checkpoint, or pass "
                "`resume_from_checkpoint=True` for the newest one that is whole."
            )
        return asked
    torn: list[str] = []
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
            "`resume_from_checkpoint` to start again from the beginning."
        )
    return asked


def check_checkpoints(args: GRPOConfig | RLOOConfig) -> None:
    """Warn if a checkpoint falls inside a rollout. Rollouts are not saved, so a resumed run would sample a new one."""
    per_rollout = args.num_iterations * (args.steps_per_generation or args.gradient_accumulation_steps)
    steps = per_rollout // math.gcd(per_rollout, args.gradient_accumulation_steps)
    if args.save_strategy == "steps" and args.save_steps >= 1 and args.save_steps % steps:
        warnings.warn(
            f"`save_steps={args.save_steps}` puts checkpoints inside a rollout, and a run resumed from there does not "
            f"repeat the original exactly. Set it to a multiple of {steps}.",
            stacklevel=3,
        )


def mark_unfinished(folder: str) -> None:
    """Call this before overwriting an earlier run's checkpoint, so that a mixture of both never counts as whole."""
    path = os.path.join(folder, LAST_FILE)
    if os.path.lexists(path):
        os.unlink(path)


def checkpoint_fault(folder: str, sharded: bool = False) -> str | None:
    """
    Say what is wrong with the files that transformers wrote into a checkpoint. Returns `None` if they are whole.

    Args:
        folder (`str`):
            Checkpoint folder.
        sharded (`bool`, *optional*, defaults to `False`):
            Whether the engine writes weights and optimizer in its own format. Then they are not checked.
    """
    try:
        names = _files(folder)
        if LAST_FILE not in names:
            raise TornCheckpointError(f"it has no `{LAST_FILE}`, which is written last")
        # PEFT saves an adapter that is not called "default" in a subfolder with the adapter's name.
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
    Say what is wrong with the files that a KLX trainer adds. Having none is not a fault, because TRL's trainer may
    have written the checkpoint.
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
        # Opening a zip file reads the table of contents at its end, which a torn file lacks.
        try:
            with zipfile.ZipFile(path) as archive:
                empty = not archive.namelist()
        except (OSError, zipfile.BadZipFile, ValueError) as error:
            raise TornCheckpointError(f"its `{name}` is torn ({error})") from error
        if empty:
            raise TornCheckpointError(f"its `{name}` is empty")


def _read_json(path: str, name: str) -> Any:
    try:
        with open(path, encoding="utf-8") as stream:
            return json.load(stream)
    except (OSError, ValueError, RecursionError) as error:
        raise TornCheckpointError(f"its `{name}` is torn ({error})") from error


def _check_safetensors(path: str, name: str) -> None:
    try:
        # Opening reads only the header, and checks the file's length against it.
        with safe_open(path, framework="pt"):
            pass
    except (OSError, SafetensorError) as error:
        raise TornCheckpointError(f"its `{name}` is torn ({error})") from error


def _check_shards(path: str, name: str, names: list[str]) -> None:
    index = _read_json(path, name)
    shards = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(shards, dict):
        raise TornCheckpointError(f"its `{name}` lists no weights")
    # Only the folder's own files count, so a path that leads out of the folder is missing.
    missing = sorted(set(map(str, shards.values())) - set(names))
    if missing:
        raise TornCheckpointError(f"it has no `{missing[0]}`")
