"""Entry point of the `trl-klx` command. Subcommands are imported only when they run, so that `--help` is fast."""

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from .. import __version__
from .console import CLIError, notice, one_line, printable, say


TRAINING = {"grpo": "GRPO", "rloo": "RLOO", "ppo": "PPO"}
# Each module has `add_arguments(parser)` and `run(args) -> int`, and imports torch only when it needs it.
REPORTS = {
    "plot": "plot the curves of one or more runs, once or while they train",
    "compare": "compare runs in a table: reward, KL, distance to the target, coefficient",
    "references": "list the steps and adapters of a run that can serve as the KL reference",
    "controllers": "list the KL controllers, or simulate them on the KL that a run recorded",
}


class Parser(argparse.ArgumentParser):
    """A parser whose errors cannot steer the terminal: the shell may have put names of files into the arguments."""

    def error(self, message: str) -> NoReturn:
        super().error(printable(message))


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="trl-klx",
        description="Train with KL control, and see what it did.",
        epilog="`trl-klx COMMAND --help` explains a command. Exit codes: 0 done, 1 failed, 2 wrong usage.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"trl-klx {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, title in TRAINING.items():
        commands.add_parser(name, help=f"train with {title}: the flags of `trl` and the KL fields", add_help=False)
    for name, text in REPORTS.items():
        # The command's module adds its arguments, and is imported only once the command is known.
        commands.add_parser(name, help=text, add_help=False)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """
    Run the command.

    Args:
        argv (`Sequence[str]`, *optional*):
            Command-line arguments. If unset, those of the process.

    Returns:
        `int`: Exit code.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser()
    if not argv:
        parser.print_help()
        return 0
    # The command comes first, so all arguments after it belong to it.
    command = parser.parse_args(argv[:1]).command
    try:
        if command in TRAINING:
            notice("loading torch and TRL")
            code: int = import_module(".train", __package__).run(command, argv[1:])
        else:
            code = _report(command, argv[1:])
        sys.stdout.flush()
        return code
    except CLIError as error:
        say(f"trl-klx {command}: error: {one_line(error)}", error=True)
        return error.code
    except KeyboardInterrupt:
        say(f"trl-klx {command}: interrupted", error=True)
        return 130
    except BrokenPipeError:
        # The reader, such as `head`, has closed the pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _report(command: str, argv: list[str]) -> int:
    module = import_module(f".{command}", __package__)
    parser = Parser(
        prog=f"trl-klx {command}", description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    module.add_arguments(parser)
    args = parser.parse_args(argv)
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: say(
            f"trl-klx {command}: warning: {' '.join(str(message).split())}", error=True
        )
        code: int = module.run(args)
        return code


if __name__ == "__main__":
    sys.exit(main())
