"""What every subcommand prints with: errors of the user, tables, progress."""

import sys
from collections.abc import Iterable, Sequence
from typing import Any


class CLIError(Exception):
    """
    Something that the user can put right: shown as one line, without a traceback.

    Args:
        message (`str`):
            What is wrong, and what to do instead.
        code (`int`, *optional*, defaults to `1`):
            Exit code: 1 for a failure, 2 for a wrong use of the command.
    """

    def __init__(self, message: str, code: int = 1):
        super().__init__(message)
        self.code = code


def one_line(error: BaseException) -> str:
    """The message of an error on one line, with its type where the message alone says too little."""
    message = " ".join(str(error).split())
    if isinstance(error, (CLIError, ValueError)) and message:
        return message
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def notice(text: str) -> None:
    """What is being waited for, where someone is looking: an import takes seconds, and has no length to show."""
    if sys.stderr.isatty():
        print(f"{text} ...", file=sys.stderr, flush=True)


def number(value: float | None, form: str = ".4g") -> str:
    """A number for a table; a dash for none."""
    return "-" if value is None else format(value, form)


def table(header: Sequence[str], rows: Iterable[Sequence[str]], indent: str = "") -> str:
    """Columns as wide as their widest cell; those whose cells are all numbers are aligned to the right."""
    rows = [list(row) for row in rows]
    columns = list(zip(header, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    right = [all(_is_number(cell) for cell in column[1:]) and len(column) > 1 for column in columns]
    lines = []
    for row in [list(header), *rows]:
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


def progress(items: Iterable[Any] | None = None, **settings: Any):
    """A progress bar that appears once the work has taken a second, and only where someone is looking."""
    from tqdm import tqdm

    return tqdm(items, **({"delay": 1.0, "disable": None, "leave": False} | settings))
