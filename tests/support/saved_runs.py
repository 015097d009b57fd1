"""Folders of runs with a log of our choice, as a trainer would leave them."""

import json
from pathlib import Path


def write_state(folder: Path, rows: list[dict], step: int | None = None, max_steps: int = 4, **more) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    state = {"log_history": rows, "global_step": step if step is not None else len(rows), "max_steps": max_steps}
    file = folder / "trainer_state.json"
    file.write_text(json.dumps(state | more))
    return file


def rows_of(**series) -> list[dict]:
    """Log rows from one list of values per metric. `__` in a name stands for `/`."""
    length = len(next(iter(series.values())))
    return [
        {"step": index + 1} | {name.replace("__", "/"): values[index] for name, values in series.items()}
        for index in range(length)
    ]
