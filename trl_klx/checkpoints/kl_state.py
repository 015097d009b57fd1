"""The KL-control state that a checkpoint carries, as JSON and safetensors files of its own."""

import json
import os
from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ..references.moving import Weights


STATE_FILE = "kl_state.json"
REFERENCE_FILE = "kl_reference.safetensors"
STATE_VERSION = 1


def _replace(path: str, write: Callable[[str], None]) -> None:
    """Write beside the file and rename, so that a reader finds the old file, the new one or none, never a torn one."""
    # Not from `tempfile`, whose files none but the owner may read.
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        write(temporary)
        # A rename that survives a power cut while the data does not would leave an empty file.
        with open(temporary, "rb") as stream:
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise


def write_json(path: str, content: dict[str, Any]) -> None:
    """Write plain JSON values, all or nothing; makes the folder if needed."""

    def dump(temporary: str) -> None:
        with open(temporary, "w", encoding="utf-8") as stream:
            json.dump(content, stream, indent=2, allow_nan=False)

    os.makedirs(os.path.dirname(path), exist_ok=True)
    _replace(path, dump)


def read_json(path: str) -> dict[str, Any]:
    """Read what [`write_json`] wrote."""
    try:
        with open(path, encoding="utf-8") as stream:
            content = json.load(stream)
        if not isinstance(content, dict):
            raise ValueError("not a JSON object")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"Cannot resume: {path!r} cannot be read ({error}). Resume from another checkpoint, or delete the file to start "
            "from the config what it holds."
        ) from error
    return content


def _plain(weight: torch.Tensor) -> torch.Tensor:
    """The weight in host memory, as safetensors takes it: with a storage that no other weight shares."""
    weight = weight.detach().to("cpu").contiguous()
    # Those that have one are not copied: a lagging reference has many, and they lie on disk.
    return weight if weight.untyped_storage().nbytes() == weight.nbytes else weight.clone()


def write_weights(path: str, weights: Weights) -> None:
    """Write weights as safetensors, all or nothing; makes the folder if needed."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    plain = {name: _plain(weight) for name, weight in weights.items()}
    _replace(path, lambda temporary: save_file(plain, temporary))


def write_kl_state(folder: str, state: dict[str, Any], reference: Weights) -> None:
    """
    Write the state into a checkpoint folder.

    Args:
        folder (`str`):
            Checkpoint folder; made if needed.
        state (`dict`):
            Plain JSON values.
        reference (`dict[str, torch.Tensor]`):
            Weights of the reference, where no other file has them; else empty.
    """
    if reference:
        write_weights(os.path.join(folder, REFERENCE_FILE), reference)
    write_json(os.path.join(folder, STATE_FILE), {"version": STATE_VERSION, **state})


def read_kl_state(folder: str) -> dict[str, Any] | None:
    """The state in a checkpoint folder; `None` if there is none."""
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
    """The weights of the reference in a checkpoint folder."""
    path = os.path.join(folder, REFERENCE_FILE)
    try:
        return load_file(path, device="cpu")
    except Exception as error:
        raise ValueError(
            f"Cannot resume: the weights of the reference in {path!r} cannot be read ({error}). {_REMEDY}"
        ) from error


def check_kl_reference(folder: str, weights: Weights, shapes: dict[str, tuple[int, ...]]) -> None:
    """
    Refuse weights of a reference that do not fit it.

    Args:
        folder (`str`):
            Checkpoint folder they come from.
        weights (`dict[str, torch.Tensor]`):
            What [`read_kl_reference`] returned: one set of weights, or several with `reference|` or a step before each
            name.
        shapes (`dict[str, tuple[int, ...]]`):
            Shapes of the reference's weights by name.
    """
    sets: dict[str, Weights] = {}
    for key, weight in weights.items():
        owner, _, name = key.rpartition("|")
        sets.setdefault(owner, {})[name] = weight
    faults = [
        f"it has {owner!r} for a step" for owner in sets if owner not in ("", "reference") and not owner.isdecimal()
    ]
    if ("" in sets) == ("reference" in sets) or ("" in sets and len(sets) > 1):
        faults.append("it does not say which weights are the reference's")
    for found in sets.values():
        for name in sorted(found.keys() ^ shapes.keys())[:1]:
            faults.append(f"{name!r} is missing, or has no place in the reference")
        for name in sorted(found.keys() & shapes.keys()):
            if tuple(found[name].shape) != shapes[name]:
                faults.append(f"{name!r} has shape {tuple(found[name].shape)}, expected {shapes[name]}")
            elif not found[name].is_floating_point() or not bool(torch.isfinite(found[name]).all()):
                faults.append(f"{name!r} holds values that are no finite numbers")
    if faults:
        path = os.path.join(folder, REFERENCE_FILE)
        raise ValueError(
            f"Cannot resume: the weights in {path!r} are not those of the reference ({faults[0]}). {_REMEDY}"
        )


_REMEDY = f"Resume from another checkpoint, or delete `{STATE_FILE}` in it to start KL control from the config."
