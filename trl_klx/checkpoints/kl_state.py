"""The KL-control state in a checkpoint: one JSON file, and one safetensors file if the reference needs it."""

import json
import os
import re
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ..references.finite import weight_fault, weights_fault
from ..references.moving import Weights
from .atomic_write import atomic_write
from .checksums import CHECKSUM_KEY, content_checksum


STATE_FILE = "kl_state.json"
REFERENCE_FILE = "kl_reference.safetensors"
# Version 1 has no checksum. No single flipped bit makes a 1 of a 2.
STATE_VERSION, UNSUMMED_VERSION = 2, 1


_STEP = re.compile(r"0|[1-9][0-9]{0,17}")
_REMEDY = f"Resume from another checkpoint, or delete `{STATE_FILE}` in it to start KL control from the config."


def write_json(path: str, content: dict[str, Any]) -> None:
    """Write plain JSON values, all or nothing. The folder is created if needed."""
    with atomic_write(path) as temporary, open(temporary, "w", encoding="utf-8") as stream:
        json.dump(content, stream, indent=2, allow_nan=False)


def read_json(path: str) -> dict[str, Any]:
    """Read a file written by [`write_json`]."""
    try:
        with open(path, encoding="utf-8") as stream:
            content = json.load(stream)
        if not isinstance(content, dict):
            raise ValueError("not a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"Cannot resume: {path!r} cannot be read ({error}). Resume from another checkpoint, or delete the file to "
            "reset this state to the config's values."
        ) from error
    return content


def _plain(weight: torch.Tensor) -> torch.Tensor:
    """The weight on the CPU, in a storage that it shares with no other weight, because safetensors requires that."""
    weight = weight.detach().to("cpu").contiguous()
    # Copy only if needed: a lagging reference keeps many sets of weights, which are mapped from disk.
    return weight if weight.untyped_storage().nbytes() == weight.nbytes else weight.clone()


def write_weights(path: str, weights: Weights) -> None:
    """Write weights as safetensors, all or nothing. The folder is created if needed."""
    plain = {name: _plain(weight) for name, weight in weights.items()}
    with atomic_write(path) as temporary:
        save_file(plain, temporary)


def write_kl_state(folder: str, state: dict[str, Any], reference: Weights) -> None:
    """
    Write the state into a checkpoint folder.

    Args:
        folder (`str`):
            Checkpoint folder. It is created if needed.
        state (`dict`):
            Plain JSON values.
        reference (`dict[str, torch.Tensor]`):
            Weights of the reference. Empty if another file holds them.
    """
    if reference:
        write_weights(os.path.join(folder, REFERENCE_FILE), reference)
    content = {"version": STATE_VERSION, **state}
    write_json(os.path.join(folder, STATE_FILE), content | {CHECKSUM_KEY: content_checksum(content)})


def read_kl_state(folder: str) -> dict[str, Any] | None:
    """Read the state in a checkpoint folder. Returns `None` if the folder has none."""
    path = os.path.join(folder, STATE_FILE)
    if not os.path.isfile(path):
        return None
    state = read_json(path)
    version = state.get("version")
    if type(version) is not int or version not in (STATE_VERSION, UNSUMMED_VERSION):
        raise ValueError(f"Cannot resume: {path!r} has version {version!r}, expected {STATE_VERSION}. {_REMEDY}")
    if version == STATE_VERSION and state.pop(CHECKSUM_KEY, None) != content_checksum(state):
        raise ValueError(
            f"Cannot resume: {path!r} is not what was saved: it does not have the checksum that it names for itself. "
            f"{_REMEDY}"
        )
    for key, kind in (("controller", dict), ("reference", dict), ("drift", dict | None)):
        if not isinstance(state.get(key), kind):
            raise ValueError(f"Cannot resume: {path!r} has no valid {key!r}, got {state.get(key)!r}. {_REMEDY}")
    return state


def read_kl_reference(folder: str) -> Weights:
    """Read the reference's weights in a checkpoint folder."""
    path = os.path.join(folder, REFERENCE_FILE)
    try:
        return load_file(path, device="cpu")
    except Exception as error:
        raise ValueError(
            f"Cannot resume: the weights of the reference in {path!r} cannot be read ({error}). {_REMEDY}"
        ) from error


def read_finite_weights(path: str) -> Weights:
    """
    Read a safetensors file, and refuse one with a weight that training cannot use: NaN, infinite or absurdly large.

    Args:
        path (`str`):
            File to read.
    """
    weights = load_file(path, device="cpu")
    fault = weights_fault(weights)
    if fault is not None:
        raise ValueError(f"{fault} in {path!r}")
    return weights


def check_kl_reference(
    folder: str,
    weights: Weights,
    shapes: dict[str, tuple[int, ...]],
    lag: int | None = None,
    step: int | None = None,
) -> None:
    """
    Check that saved weights fit the reference.

    Args:
        folder (`str`):
            Checkpoint folder that the weights come from.
        weights (`dict[str, torch.Tensor]`):
            Result of [`read_kl_reference`]: one set of weights, or several sets whose names start with `reference|` or
            `<step>|`.
        shapes (`dict[str, tuple[int, ...]]`):
            Shapes of the reference's weights by name.
        lag (`int`, *optional*):
            How many steps a lagging reference is behind. Its kept steps must be the last ones before the checkpoint.
        step (`int`, *optional*):
            Step of the checkpoint.
    """
    sets: dict[str, Weights] = {}
    for key, weight in weights.items():
        owner, _, name = key.rpartition("|")
        sets.setdefault(owner, {})[name] = weight
    owners = [owner for owner in sets if owner not in ("", "reference")]
    faults = [f"it has {owner!r} where a step should be" for owner in owners if not _STEP.fullmatch(owner)]
    if lag is not None and not faults:
        faults.extend(_step_faults(sorted(map(int, owners)), lag, step))
    if ("" in sets) == ("reference" in sets) or ("" in sets and len(sets) > 1):
        faults.append("it does not say which weights are the reference's")
    for found in sets.values():
        for name in sorted(found.keys() ^ shapes.keys())[:1]:
            faults.append(f"{name!r} is missing, or is not a weight of the reference")
        for name in sorted(found.keys() & shapes.keys()):
            if tuple(found[name].shape) != shapes[name]:
                faults.append(f"{name!r} has shape {tuple(found[name].shape)}, expected {shapes[name]}")
            elif not found[name].is_floating_point():
                faults.append(f"{name!r} holds values that are not floating-point numbers")
            elif (fault := weight_fault(found[name])) is not None:
                faults.append(f"{name!r} {fault}")
    if faults:
        path = os.path.join(folder, REFERENCE_FILE)
        raise ValueError(
            f"Cannot resume: the weights in {path!r} are not those of the reference ({faults[0]}). {_REMEDY}"
        )


def _step_faults(kept: list[int], lag: int, step: int | None) -> list[str]:
    """What is wrong with the steps that a lagging reference keeps: they follow each other, up to the checkpoint's."""
    if not kept:
        return []
    expected = list(range(max(kept[0], kept[-1] - lag + 1), kept[-1] + 1))
    if kept != expected or (step is not None and kept[-1] != step):
        where = "" if step is None else f" of a checkpoint at step {step}"
        return [f"it holds the steps {kept}, which are not the last {lag} or fewer{where}"]
    return []
