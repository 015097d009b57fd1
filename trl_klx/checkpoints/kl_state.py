"""The KL-control state in a checkpoint: one JSON file, and one safetensors file if the reference needs it."""

import json
import os
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ..references.moving import Weights
from .atomic_write import atomic_write


STATE_FILE = "kl_state.json"
REFERENCE_FILE = "kl_reference.safetensors"
STATE_VERSION = 1


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
    except (OSError, ValueError) as error:
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
    write_json(os.path.join(folder, STATE_FILE), {"version": STATE_VERSION, **state})


def read_kl_state(folder: str) -> dict[str, Any] | None:
    """Read the state in a checkpoint folder. Returns `None` if the folder has none."""
    path = os.path.join(folder, STATE_FILE)
    if not os.path.isfile(path):
        return None
    state = read_json(path)
    if state.get("version") != STATE_VERSION:
        raise ValueError(
            f"Cannot resume: {path!r} has version {state.get('version')!r}, expected {STATE_VERSION}. {_REMEDY}"
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


def check_kl_reference(folder: str, weights: Weights, shapes: dict[str, tuple[int, ...]]) -> None:
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
    """
    sets: dict[str, Weights] = {}
    for key, weight in weights.items():
        owner, _, name = key.rpartition("|")
        sets.setdefault(owner, {})[name] = weight
    faults = [
        f"it has {owner!r} where a step should be"
        for owner in sets
        if owner not in ("", "reference") and not owner.isdecimal()
    ]
    if ("" in sets) == ("reference" in sets) or ("" in sets and len(sets) > 1):
        faults.append("it does not say which weights are the reference's")
    for found in sets.values():
        for name in sorted(found.keys() ^ shapes.keys())[:1]:
            faults.append(f"{name!r} is missing, or is not a weight of the reference")
        for name in sorted(found.keys() & shapes.keys()):
            if tuple(found[name].shape) != shapes[name]:
                faults.append(f"{name!r} has shape {tuple(found[name].shape)}, expected {shapes[name]}")
            elif not found[name].is_floating_point() or not bool(torch.isfinite(found[name]).all()):
                faults.append(f"{name!r} holds values that are not finite numbers")
    if faults:
        path = os.path.join(folder, REFERENCE_FILE)
        raise ValueError(
            f"Cannot resume: the weights in {path!r} are not those of the reference ({faults[0]}). {_REMEDY}"
        )
