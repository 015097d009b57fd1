"""
List the steps, adapters and models in an output directory that can serve as the KL reference, each with the hash that
checkpoints store for it and the config lines that choose it. For those that cannot serve, say why.

Weights are read only from safetensors; nothing is unpickled. Whether an adapter's weights or a model's vocabulary fit
the policy is checked when the training starts. The hash of a model is that of its weights in the dtype they are saved
in: loaded in another dtype, by `kl_ref_dtype` or to match the policy, it has another hash.
"""

import json
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .console import CLIError, notice, one_line, progress, say, single_line


if TYPE_CHECKING:
    import torch

STEP = re.compile(r"checkpoint-(\d+)")
FULL_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
INDEX_FILE = "model.safetensors.index.json"
MODEL_CONFIG_FILE = "config.json"
# Other engines and older versions write these instead of safetensors.
UNREADABLE = (
    ("pytorch_model*.bin", "a pickle, which is never loaded"),
    ("pytorch_model_fsdp*", "sharded weights of FSDP: save with FULL_STATE_DICT"),
    ("global_step*", "sharded weights of DeepSpeed: set `stage3_gather_16bit_weights_on_model_save`"),
)


@dataclass(frozen=True)
class Candidate:
    """
    A folder whose weights may serve as the reference.

    Attributes:
        folder (`Path`):
            Folder that holds the weights.
        kind (`str`):
            Kind of weights.
        hash (`str` or `None`):
            Hash that a checkpoint trained against this reference stores.
        lines (`tuple[str, ...]`):
            Config lines that choose it. One of them is enough.
        problem (`str` or `None`):
            Why it cannot serve.
    """

    folder: Path
    kind: str = ""
    hash: str | None = None
    lines: tuple[str, ...] = ()
    problem: str | None = None


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("output_dir", help="`output_dir` of a run")


def run(args: Namespace) -> int:
    root = Path(args.output_dir)
    if not root.is_dir():
        raise CLIError(f"{args.output_dir!r} does not exist or is not a folder. Pass the `output_dir` of a run.")
    notice("loading torch")
    folders = find_folders(root)
    if not folders:
        raise CLIError(f"{args.output_dir!r} holds neither a `checkpoint-N` nor an adapter nor a model.")
    total = sum(_size(file) for folder in folders for file in folder.glob("*.safetensors"))
    with progress(total=total, desc="Hashing", unit="B", unit_scale=True) as bar:
        examined = [examine(folder, root, bar.update) for folder in folders]
    # A run that trains deletes its old checkpoints, also while they are read.
    candidates = [candidate for candidate in examined if candidate.problem is None or candidate.folder.is_dir()]
    say("step 0: the policy that a run starts from\n  use   kl_penalty_reference_step: 0\n")
    for candidate in candidates:
        say(_format(candidate, root), end="\n\n")
    for line in trained_against([candidate.folder for candidate in candidates]):
        say(line)
    for gone in sorted({folder.name for folder in folders} - {candidate.folder.name for candidate in candidates}):
        say(f"{single_line(gone)}: deleted while it was read", error=True)
    return 0


def _format(candidate: Candidate, root: Path) -> str:
    relative = candidate.folder.relative_to(root)
    name = "the folder itself" if relative == Path() else single_line(relative)
    if candidate.problem is not None:
        return f"{name}: cannot serve\n  why   {candidate.problem}"
    uses = [
        f"  {'use' if index == 0 else 'or'}".ljust(8) + single_line(line) for index, line in enumerate(candidate.lines)
    ]
    return "\n".join([f"{name}: {candidate.kind}", f"  hash  {candidate.hash}", *uses])


def find_folders(root: Path) -> list[Path]:
    """
    Find the checkpoints in the order of their steps, the run's folder if it holds weights, and all folders down to the
    second level that hold an adapter or a model. PEFT saves an adapter that is not called "default" in a subfolder
    with its name.
    """
    from ..references.loading import saved_steps

    found = []
    for checkpoint in (root / f"checkpoint-{step}" for step in saved_steps(str(root))):
        inner = [folder for folder in _below(checkpoint) if _holds_adapter(folder)]
        has_own = _holds_adapter(checkpoint) or _shards(checkpoint)
        found += [checkpoint, *inner] if has_own or not inner else inner
    if _holds_adapter(root) or _shards(root):
        found.append(root)
    others = [folder for folder in _below(root) if not STEP.fullmatch(folder.name)]
    others += [inner for folder in others for inner in _below(folder)]
    return found + [folder for folder in others if _holds_adapter(folder) or _holds_model(folder)]


def _below(folder: Path) -> list[Path]:
    return sorted(entry for entry in _entries(folder) if entry.is_dir())


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except FileNotFoundError:  # it was deleted since it was found
        return []


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


def _holds_adapter(folder: Path) -> bool:
    from ..references.adapter_files import CONFIG_FILE, PICKLE_FILE, WEIGHTS_FILE

    return any((folder / name).is_file() for name in (CONFIG_FILE, PICKLE_FILE, WEIGHTS_FILE))


def _holds_model(folder: Path) -> bool:
    return (folder / MODEL_CONFIG_FILE).is_file() and bool(_shards(folder))


def _shards(folder: Path) -> list[Path]:
    return sorted(file for file in _entries(folder) if FULL_WEIGHTS.fullmatch(file.name))


def examine(folder: Path, root: Path, read: Callable[[int], object] = lambda size: None) -> Candidate:
    """
    Find out whether the weights in a folder can serve as the reference.

    Args:
        folder (`Path`):
            Folder with an adapter or a model.
        root (`Path`):
            The run's `output_dir`.
        read (`Callable[[int], None]`, *optional*):
            Called with the size of each weight, in bytes, after it was read.
    """
    is_adapter = _holds_adapter(folder)
    lines = []
    for place, name in ((folder, None), (folder.parent, folder.name)):
        step = STEP.fullmatch(place.name) if place.parent == root else None
        if step:
            where = f"with output_dir: {root}" + (f", and the policy's adapter called {name!r}" if name else "")
            lines.append(f"kl_penalty_reference_step: {step[1]}  # {where}")
    if is_adapter:
        lines.append(f"kl_ref_adapter_path: {folder}")
    elif (folder / MODEL_CONFIG_FILE).is_file():
        lines.append(f"kl_ref_model_path: {folder}")
    try:
        digest = _adapter_hash(folder, read) if is_adapter else _model_hash(folder, read)
        if not lines:
            raise ValueError(f"it has no `{MODEL_CONFIG_FILE}`, and is not a `checkpoint-N` to be chosen by its step.")
    except Exception as error:
        return Candidate(folder, problem=one_line(error))
    return Candidate(folder, "adapter, for a policy with PEFT" if is_adapter else "full model", digest, tuple(lines))


def _adapter_hash(folder: Path, read: Callable[[int], object]) -> str:
    from ..references.adapter_files import UnusableAdapterError, read_adapter_config, read_adapter_weights
    from ..references.fingerprint import hash_tensors

    try:
        read_adapter_config(str(folder))
        weights = read_adapter_weights(str(folder))
    except UnusableAdapterError as error:
        raise ValueError(str(error)) from error
    for name, weight in weights.items():
        _check_weight(name, weight)
        read(weight.numel() * weight.element_size())
    return hash_tensors(weights)


def _model_hash(folder: Path, read: Callable[[int], object]) -> str:
    from ..references.fingerprint import fingerprint

    shards = _shards(folder)
    if not shards:
        for pattern, what in UNREADABLE:
            others = sorted(folder.glob(pattern))
            if others:
                raise ValueError(f"it has no `model.safetensors`, only `{others[0].name}`: {what}.")
        raise ValueError("it has neither an adapter nor a `model.safetensors`.")
    index = folder / INDEX_FILE
    if index.is_file():
        needed = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        missing = sorted(needed - {shard.name for shard in shards})
        if missing:
            raise ValueError(f"`{missing[0]}`, which its index names, is missing.")
    return fingerprint(_Saved(shards, read))


class _Saved:
    """A saved model with just the interface that its fingerprint needs. It reads one weight at a time."""

    def __init__(self, shards: list[Path], read: Callable[[int], object]):
        self.shards, self.read = shards, read

    def named_parameters(self) -> "Iterator[tuple[str, torch.Tensor]]":
        from safetensors import safe_open

        for shard in self.shards:
            try:
                with safe_open(shard, framework="pt") as file:
                    for name in file.keys():
                        weight = file.get_tensor(name)
                        _check_weight(name, weight)
                        self.read(weight.numel() * weight.element_size())
                        yield name, weight
            except ValueError:
                raise
            except Exception as error:
                raise ValueError(f"its `{shard.name}` cannot be read ({error}).") from error


def _check_weight(name: str, weight: "torch.Tensor") -> None:
    import torch

    if weight.is_floating_point() and not torch.isfinite(weight).all():
        raise ValueError(f"weight {name!r} holds NaN or infinite values.")


def trained_against(folders: list[Path]) -> list[str]:
    """Say which reference the checkpoints were trained against."""
    from ..checkpoints.kl_state import STATE_FILE, read_kl_state

    found: dict[str, list[str]] = {}
    for folder in folders:
        try:
            state = read_kl_state(str(folder))
        except ValueError as error:
            found.setdefault(f"its {STATE_FILE} cannot be read: {one_line(error)}", []).append(folder.name)
            continue
        if state is not None:
            identity = ", ".join(f"{key} {value}" for key, value in state["reference"].items())
            found.setdefault(f"trained against: {identity}", []).append(folder.name)
    return [single_line(f"{_listed(names)}: {text}") for text, names in found.items()]


def _listed(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{names[0]} to {names[-1]} ({len(names)})"
