"""Reading the log of a run of TRL or of this package from its `trainer_state.json` files."""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..controllers.setting_rules import is_finite_number
from .console import CLIError, progress, single_line


STATE_FILE = "trainer_state.json"
# A run that trains may delete every checkpoint that was found before it is read, and has newer ones by then.
ATTEMPTS = 5
# KL control's statistic, and the names under which TRL's trainers log their KL.
OWN_KL_KEY, TRL_KL_KEYS = "klx/kl", ("kl", "objective/kl")


@dataclass(frozen=True)
class Run:
    """
    The log of one run so far.

    Attributes:
        name (`str`):
            Name to show.
        file (`Path`):
            The `trainer_state.json` that it was read from.
        date (`float`):
            When that file was written.
        step (`int`):
            Last optimizer step in the file.
        max_steps (`int`):
            Last step of the whole run.
        batch_size (`int` or `None`):
            Completions per device and micro-batch.
        rows (`list[dict]`):
            The logged rows, without values that are lists or tables.
        note (`str` or `None`):
            Remark for whoever reads the result.
    """

    name: str
    file: Path
    date: float
    step: int
    max_steps: int
    batch_size: int | None
    rows: list[dict[str, Any]]
    note: str | None = None

    @property
    def done(self) -> bool:
        """Whether the run has finished."""
        ended = bool(self.rows) and "train_runtime" in self.rows[-1]
        return ended or (self.max_steps > 0 and self.step >= self.max_steps)

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Return the steps and values of one metric. Rows without a finite number for it are left out."""
        rows = [row for row in self.rows if is_finite_number(row.get("step")) and is_finite_number(row.get(key))]
        return [row["step"] for row in rows], [float(row[key]) for row in rows]

    def values(self, key: str) -> list[float]:
        return self.series(key)[1]

    @property
    def kl_key(self) -> str | None:
        """Name of the KL that the run logs, or `None` if it logs none."""
        return next((key for key in (OWN_KL_KEY, *TRL_KL_KEYS) if self.values(key)), None)

    @property
    def target(self) -> float | None:
        """The last target that the run logged, in the unit of its KL."""
        values = self.values("klx/target")
        return values[-1] if values else None


def last_quarter(values: Sequence[float]) -> list[float]:
    """Return the last quarter of a series, but at least one value."""
    return list(values[-max(1, len(values) // 4) :])


def mean(values: Sequence[float]) -> float | None:
    # Divided first, because the sum of large values would overflow.
    return sum(value / len(values) for value in values) if values else None


def read_runs(paths: Sequence[str]) -> list[Run]:
    """Read several runs, all of which must be readable. See [`read_readable_runs`]."""
    return [read_run(path, name) for path, name in progress(_named(paths), desc="Reading", unit="run")]


def read_readable_runs(paths: Sequence[str]) -> tuple[list[Run], list[str]]:
    """
    Read several runs, and pass over those that cannot be read, unless none can.

    Args:
        paths (`Sequence[str]`):
            Folders or files, see [`read_run`]. Runs whose folders have the same name are shown with their paths.

    Returns:
        `tuple[list[Run], list[str]]`: The runs, and what is wrong with the others.
    """
    runs, problems = [], []
    for path, name in progress(_named(paths), desc="Reading", unit="run"):
        try:
            runs.append(read_run(path, name))
        except CLIError as error:
            problems.append(str(error))
    if not runs:
        raise CLIError(" ".join(problems))
    return runs, problems


def _named(paths: Sequence[str]) -> list[tuple[str, str]]:
    short = [Path(path).resolve().name for path in paths]
    names = [path if short.count(name) > 1 else name for path, name in zip(paths, short, strict=True)]
    return list(zip(paths, names, strict=True))


def read_run(path: str, name: str | None = None) -> Run:
    """
    Read a run from its output folder, from one of its checkpoints, or from a `trainer_state.json`.

    Args:
        path (`str`):
            Folder or file.
        name (`str`, *optional*):
            Name to show. If unset, the folder's name.
    """
    name = single_line(name or Path(path).resolve().name)
    for _ in range(ATTEMPTS):
        runs, problems, vanished = [], [], False
        for file in state_files(path):
            try:
                runs.append(_read_state(file, name))
            except (OSError, ValueError) as error:
                vanished |= isinstance(error, FileNotFoundError)
                problems.append(f"{str(file)!r} cannot be read ({error})")
        if runs:
            return _newest(runs, name)
        if not vanished:
            break
    raise CLIError(problems[0] + ". If it is being written, try again.")


def state_files(path: str) -> list[Path]:
    """Find the `trainer_state.json` of a run's folder and of its checkpoints."""
    root = Path(path)
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise CLIError(f"{path!r} does not exist. Pass the `output_dir` of a run.")
    try:
        checkpoints = [entry for entry in root.iterdir() if re.fullmatch(r"checkpoint-\d+", entry.name)]
    except OSError as error:
        raise CLIError(f"{path!r} cannot be read ({error.strerror or error}).") from error
    files = [folder / STATE_FILE for folder in [root, *checkpoints] if (folder / STATE_FILE).is_file()]
    if not files:
        raise CLIError(
            f"{path!r} holds no `{STATE_FILE}`, and neither does a `checkpoint-N` in it. Every checkpoint has one: "
            "set `save_strategy` to something other than 'no', call `trainer.save_state()`, or train with `trl-klx`."
        )
    return files


def _read_state(file: Path, name: str) -> Run:
    with open(file, encoding="utf-8") as stream:
        # The file may vanish once it was read: a run that trains deletes its old checkpoints.
        date = os.fstat(stream.fileno()).st_mtime
        try:
            # NaN is read as text, because it does not equal itself and two states of the same run must compare equal.
            state = json.load(stream, parse_constant=str)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
    rows = state.get("log_history") if isinstance(state, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError("it has no `log_history`")
    return Run(
        name=name,
        file=file,
        date=date,
        step=_whole(state, "global_step"),
        max_steps=_whole(state, "max_steps"),
        batch_size=state.get("train_batch_size"),
        rows=[{key: value for key, value in row.items() if not isinstance(value, list | dict)} for row in rows],
    )


def _whole(state: dict[str, Any], key: str) -> int:
    value = state.get(key) or 0
    if not is_finite_number(value):
        raise ValueError(f"its `{key}` is not a number")
    return int(value)


def _newest(runs: list[Run], name: str) -> Run:
    """
    Return the longest state of the run. If several runs were trained into the folder, their logs differ, and the one
    that was written last counts. Dates are not used otherwise, because copying changes them.
    """
    tips: list[tuple[Run, float]] = []
    for run in sorted(runs, key=lambda run: (len(run.rows), run.step), reverse=True):
        for index, (tip, newest) in enumerate(tips):
            if tip.rows[: len(run.rows)] == run.rows:
                tips[index] = (tip, max(newest, run.date))
                break
        else:
            tips.append((run, run.date))
    tip, _ = max(tips, key=lambda pair: pair[1])
    if len(tips) == 1:
        return tip
    note = f"{name}: the folder holds {len(tips)} different runs; this is the one written last, from {str(tip.file)!r}"
    return Run(**{**vars(tip), "note": note})
