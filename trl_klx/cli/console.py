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


def printable(text: str) -> str:
    """
    Return a text with every character that a terminal could act on written as its escape sequence, such as `\\x1b`.
    Names of folders and metrics come from files that anybody may have written. Line ends stay.
    """
    return "".join(char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in text)


def single_line(text: object) -> str:
    """Return a name from outside on one line, so that it cannot pass for a line that a command printed."""
    return printable(str(text)).replace("\n", "\\n")


def say(text: object = "", *, error: bool = False, end: str = "\n") -> None:
    """Print to the terminal. Everything that a command says passes here, and [`printable`]."""
    print(printable(str(text)), file=sys.stderr if error else sys.stdout, end=end, flush=True)


def one_line(error: BaseException) -> str:
    """Format an error as one line, with its type if the message alone says too little."""
    message = " ".join(str(error).split())
    if isinstance(error, (CLIError, ValueError)) and message:
        return message
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def notice(text: str) -> None:
    """Tell an interactive user what is loading."""
    if sys.stderr.isatty():
        say(f"{text} ...", error=True)


def passed_over(command: str, problems: Iterable[str]) -> None:
    """Say which of several inputs were passed over, and why."""
    for problem in problems:
        say(f"trl-klx {command}: passed over: {problem}", error=True)


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
