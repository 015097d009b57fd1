"""Choosing the newest whole checkpoint to resume from. A run that is killed while it saves leaves a torn one."""

import json
import math
import os
import re
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import TrainerState
from trl import GRPOConfig, RLOOConfig

from ..controllers.setting_rules import is_finite_number
from ..references.finite import file_fault
from ..references.loading import saved_steps
from .checksums import CHECKSUM_FILE, checksum_fault
from .kl_state import read_json, read_kl_state


# Transformers writes it last, so a checkpoint without it was never finished.
LAST_FILE = "trainer_state.json"
INDEX_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SAFETENSORS = re.compile(r"(adapter_)?model(-\d+-of-\d+)?\.safetensors")
# Older versions of transformers can be told to write these.
PICKLES = re.compile(r"(pytorch|adapter)_model(-\d+-of-\d+)?\.bin")
# Transformers writes both or neither: with `save_only_model` a checkpoint holds the model alone.
OPTIMIZER, SCHEDULER = "optimizer.pt", "scheduler.pt"
RANDOM_STATE = re.compile(r"rng_state(_\d+)?\.pth")
RUN_FILES = re.compile(r"(optimizer|scheduler|scaler)\.pt|rng_state(_\d+)?\.pth")
# JSON files that our trainers write in addition to the KL-control state.
OWN_JSON = ("ppo_state.json",)


class TornCheckpointError(Exception):
    """A checkpoint is not whole; the message says why."""


def choose_checkpoint(
    output_dir: str, asked: str | bool, sharded: bool = False, restore: Callable[[str], None] | None = None
) -> str | bool:
    """
    Choose the checkpoint to resume from. Every file is read once for its checksum, and nothing is unpickled.

    Args:
        output_dir (`str`):
            Folder of the run.
        asked (`str` or `bool`):
            The user's `resume_from_checkpoint`: a folder, or `True` for the newest checkpoint in `output_dir`.
        sharded (`bool`, *optional*, defaults to `False`):
            Whether the engine (FSDP or DeepSpeed) writes weights and optimizer in its own format.
        restore (`Callable`, *optional*):
            Tries whether the state in a folder can be restored, and raises a `ValueError` if not.

    Returns:
        `str` or `bool`: A whole checkpoint. If there are no checkpoints, `asked`, which transformers then refuses.
    """
    if not isinstance(asked, bool):
        fault = None
        if os.path.isdir(asked):
            fault = checkpoint_fault(asked, sharded)
            if fault is None and restore is not None:
                restore(asked)  # its error says more than a checksum that differs
            fault = fault or consistency_fault(asked) or content_fault(asked)
        if fault is not None:
            raise ValueError(
                f"Cannot resume from {asked!r}, which is not whole: {fault}. Resume from another checkpoint, or pass "
                "`resume_from_checkpoint=True` for the newest one that is whole."
            )
        return asked
    torn: list[str] = []
    for step in reversed(saved_steps(output_dir)):
        folder = os.path.join(output_dir, f"checkpoint-{step}")
        fault = (
            checkpoint_fault(folder, sharded)
            or _own_fault(folder, restore)
            or consistency_fault(folder)
            or content_fault(folder)
        )
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
    """
    Call this before overwriting an earlier run's checkpoint, so that a mixture of both never counts as whole. It also
    removes links, because the host would write through them into another folder.
    """
    if os.path.islink(folder):
        os.unlink(folder)
    for name in os.listdir(folder) if os.path.isdir(folder) else []:
        path = os.path.join(folder, name)
        if name in (LAST_FILE, CHECKSUM_FILE) or os.path.islink(path):
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
        weights = _weight_files(folder)
        if LAST_FILE not in names:
            raise TornCheckpointError(f"it has no `{LAST_FILE}`, which is written last")
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


def _weight_files(folder: str) -> list[str]:
    # PEFT saves an adapter that is not called "default" in a subfolder with the adapter's name.
    inner = [name for name in sorted(os.listdir(folder)) if os.path.isdir(os.path.join(folder, name))]
    inner = [os.path.join(name, file) for name in inner for file in _files(os.path.join(folder, name))]
    return [name for name in [*_files(folder), *inner] if _is_weights(os.path.basename(name))]


def _is_weights(name: str) -> bool:
    return bool(SAFETENSORS.fullmatch(name) or PICKLES.fullmatch(name))


def consistency_fault(folder: str) -> str | None:
    """
    Say which files of a checkpoint do not belong together: another step in the KL-control state, or the random state
    of a process that is missing. Returns `None` if all do.
    """
    try:
        state = read_kl_state(folder) or {}
    except ValueError:
        return None  # whoever reads it reports it
    step, saved = state.get("step"), saved_step(folder)
    if step is not None and saved is not None and step != saved:
        return f"its `kl_state.json` is of step {step!r}, and its `{LAST_FILE}` of step {saved}"
    states = [name for name in _files(folder) if RANDOM_STATE.fullmatch(name)]
    processes = state.get("processes")
    if states and type(processes) is int and processes < 100_000:
        names = ["rng_state.pth"] if processes == 1 else [f"rng_state_{rank}.pth" for rank in range(processes)]
        missing = [name for name in names if name not in states]
        if missing:
            return f"it has no `{missing[0]}`, the random state of one of its {processes} processes"
    return None


def content_fault(folder: str) -> str | None:
    """
    Say which file of a checkpoint is not what was written, or holds weights that no run can go on with. Returns `None`
    if there is none.
    """
    fault = checksum_fault(folder)
    if fault is not None:
        return fault
    weights = [name for name in _weight_files(folder) if name.endswith(".safetensors")]
    own = [name for name in _files(folder) if name.endswith(".safetensors") and name not in weights]
    try:
        for name in [*weights, *own]:
            fault = file_fault(os.path.join(folder, name))
            if fault is not None:
                return f"its `{name}` cannot be used: {fault}"
    except (OSError, SafetensorError) as error:
        return f"its `{name}` is torn ({error})"
    return None


def saved_step(folder: str) -> int | None:
    """The step in a checkpoint's `trainer_state.json`, or `None` if it cannot be read."""
    try:
        state = _read_json(os.path.join(folder, LAST_FILE), LAST_FILE)
    except TornCheckpointError:
        return None
    step = state.get("global_step") if isinstance(state, dict) else None
    return step if type(step) is int else None


def _own_fault(folder: str, restore: Callable[[str], None] | None = None) -> str | None:
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
        if restore is not None:
            restore(folder)
    except (ValueError, TornCheckpointError) as error:
        return str(error).removeprefix("Cannot resume: ")
    return None


def _check_file(path: str, name: str) -> None:
    if name == LAST_FILE:
        _check_trainer_state(_read_json(path, name), os.path.basename(os.path.dirname(os.path.abspath(path))))
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


def _check_trainer_state(state: Any, folder: str) -> None:
    """Check what transformers trusts in a state that it resumes from."""
    if not isinstance(state, dict) or type(state.get("global_step")) is not int:
        raise TornCheckpointError(f"its `{LAST_FILE}` has no step")
    unknown = sorted(state.keys() - {field.name for field in fields(TrainerState)})
    if unknown:
        raise TornCheckpointError(
            f"its `{LAST_FILE}` has {unknown[0]!r}, which the installed version of transformers does not know"
        )
    for name, (kind, sound) in _TRAINER_STATE.items():
        if name in state and state[name] is not None and not sound(state[name]):
            raise TornCheckpointError(f"its `{LAST_FILE}` has a {name!r} that is not {kind}: {state[name]!r:.80}")
    number = re.fullmatch(r"checkpoint-(\d+)", folder)
    if number and int(number.group(1)) != state["global_step"]:
        raise TornCheckpointError(f"its `{LAST_FILE}` is of step {state['global_step']}")


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


_TRAINER_STATE: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "global_step": ("a count", _is_count),
    "train_batch_size": ("a count", _is_count),
    "num_input_tokens_seen": ("a count", _is_count),
    "epoch": ("a number of epochs", lambda value: is_finite_number(value) and 0 <= value < 2**63),
    "total_flos": ("a number", is_finite_number),
    "log_history": (
        "a list of logs",
        lambda value: isinstance(value, list) and all(isinstance(entry, dict) for entry in value),
    ),
    "best_model_checkpoint": ("a path", lambda value: isinstance(value, str)),
    "stateful_callbacks": ("a dict of states", lambda value: isinstance(value, dict)),
}


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
