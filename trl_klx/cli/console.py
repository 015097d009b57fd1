"""How the subcommands print: user errors, tables, progress."""

import sys
from collections.abc import Iterable, Sequence
from typing import Any


class CLIError(Exception):
    """
    An error that the user can fix. It is shown as one line, without a traceback.

    Args:
        message (`str`):
            What is wrong, and what to do instead.
        code (`int`, *optional*, defaults to `1`):
            Exit code: 1 for a failure, 2 for wrong usage.
    """

    def __init__(self, message: str, code: int = 1):
        super().__init__(message)
        self.code = code


def one_line(error: BaseException) -> str:
    """Format an error as one line, with its type if the message alone says too little."""
    message = " ".join(str(error).split())
    if isinstance(error, (CLIError, ValueError)) and message:
        return message
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def notice(text: str) -> None:
    """Tell an interactive user what is loading."""
    if sys.stderr.isatty():
        print(f"{text} ...", file=sys.stderr, flush=True)


def passed_over(command: str, problems: Iterable[str]) -> None:
    """Say which of several inputs were passed over, and why."""
    for problem in problems:
        print(f"trl-klx {command}: passed over: {problem}", file=sys.stderr)


def number(value: float | None, form: str = ".4g") -> str:
    """Format a number for a table, with a dash for `None`."""
    return "-" if value is None else format(value, form)


def table(header: Sequence[str], rows: Iterable[Sequence[str]], indent: str = "") -> str:
    """Format a table. Columns are as wide as their widest cell, and columns of numbers are aligned to the right."""
    lists = [list(row) for row in rows]
    columns = list(zip(header, *lists, strict=True))
    widths = [max(map(len, column)) for column in columns]
    right = [all(_is_number(cell) for cell in column[1:]) and len(column) > 1 for column in columns]
    lines = []
    for row in [list(header), *lists]:
        cells = [
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ]
        lines.append((indent + "  ".join(cells)).rstrip())
    return "\n".join(lines)


def _is_number(cell: str) -> bool:
    try:
        float(cell.rstrip("%*x"))
    except ValueError:
        return cell == "-"
    return True


def progress(items: Iterable[Any] | None = None, **settings: Any) -> Any:
    """Return a progress bar that appears after one second of work, and only in a terminal."""
    from tqdm import tqdm

    return tqdm(items, **({"delay": 1.0, "disable": None, "leave": False} | settings))
