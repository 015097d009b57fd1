"""
Regular expressions in the config of a foreign adapter. PEFT matches them against the names of all modules, and one
like `(a+)+` may take longer than the age of the universe. They are tried in another process, which can be stopped.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator

from peft import PeftConfig

from .adapter_files import CONFIG_FILE, UnusableAdapterError


LONGEST_PATTERN = 10_000
MOST_PATTERNS = 10_000
# Expressions in use take milliseconds. Most of the time is for a busy machine to start the process.
SECONDS = 20.0

# How PEFT uses the expressions of each setting: all of the name, or with something around them.
_WHOLE = {"target_modules": "{}", "exclude_modules": "{}", "feedforward_modules": "{}"}
_PARTS = {
    "rank_pattern": r"(.*\.)?({})$",
    "alpha_pattern": r"(.*\.)?({})$",
    "layers_pattern": r"(?:^|.*?\.){}\.(?P<idx>\d+)\.",
    "modules_to_save": r"(^|.*\.){}($|\..*)",
}
# Without repetitions and groups there is nothing to backtrack into.
_HARMLESS = re.compile(r"[^*+?{(]*")

# Reads `[[setting, pattern, whole], ...], names` and writes each finished line's number.
_MATCHER = """
import json, re, sys
patterns, names = json.load(sys.stdin)
for number, (pattern, whole) in enumerate(patterns):
    compiled = re.compile(pattern)
    match = compiled.fullmatch if whole else compiled.match
    for name in names:
        match(name)
    print(number, flush=True)
"""


def check_patterns(config: PeftConfig, names: Iterable[str]) -> None:
    """
    Refuse a config with a regular expression that is none, or that takes too long on the names of the modules.

    Args:
        config ([`~peft.PeftConfig`]):
            Config of a foreign adapter.
        names (`Iterable[str]`):
            Names of the modules of the model that it is for.
    """
    patterns = list(_patterns(config))
    if len(patterns) > MOST_PATTERNS:
        raise UnusableAdapterError(
            f"its `{CONFIG_FILE}` has {len(patterns)} patterns of module names, more than {MOST_PATTERNS}."
        )
    for setting, pattern, form in patterns:
        if len(pattern) > LONGEST_PATTERN:
            raise UnusableAdapterError(
                f"its `{setting}` has a pattern of {len(pattern)} characters, more than {LONGEST_PATTERN}."
            )
        try:
            re.compile(form.format(pattern))
        except (re.error, RecursionError, OverflowError) as error:
            raise UnusableAdapterError(
                f"its `{setting}` has {_short(pattern)}, which is not a regular expression ({error})."
            ) from error
    doubtful = [entry for entry in patterns if not _HARMLESS.fullmatch(entry[1])]
    if doubtful:
        _try(doubtful, list(names))


def _patterns(config: PeftConfig) -> Iterator[tuple[str, str, str]]:
    """Setting, pattern, and the expression around the pattern."""
    for setting, form in _WHOLE.items():
        # In a list, PEFT compares the entries as they are.
        value = getattr(config, setting, None)
        if isinstance(value, str) and value != "all-linear":
            yield setting, value, form
    for setting, form in _PARTS.items():
        value = getattr(config, setting, None)
        entries = [value] if isinstance(value, str) else value if isinstance(value, list | tuple | set | dict) else []
        for entry in entries:
            yield setting, str(entry), form


def _try(patterns: list[tuple[str, str, str]], names: list[str]) -> None:
    """Match every pattern with every name in another process, and refuse the pattern at which it does not finish."""
    expressions = [(form.format(pattern), setting in _WHOLE) for setting, pattern, form in patterns]
    # Isolated, so that it imports nothing but the standard library.
    command = [sys.executable, "-I", "-S", "-c", _MATCHER]
    try:
        ended = subprocess.run(
            command,
            input=json.dumps([expressions, names]),
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=SECONDS,
            check=False,
        )
        output, reason = ended.stdout, ended.stderr.strip().rsplit("\n", 1)[-1]
    except subprocess.TimeoutExpired as error:
        written = error.stdout or b""
        output = written.decode() if isinstance(written, bytes) else written
        reason = f"it does not finish within {SECONDS:g} seconds on the names of the model's modules"
    except OSError as error:
        raise UnusableAdapterError(
            f"its `{patterns[0][0]}` is a regular expression, and no process could be started to try it ({error}). "
            "List the modules' names instead."
        ) from error
    done = len(output.splitlines())
    if done < len(patterns):
        setting, pattern, _ = patterns[done]
        raise UnusableAdapterError(
            f"its `{setting}` has the pattern {_short(pattern)}, which cannot be used: {reason}. List the modules' "
            "names instead."
        )


def _short(pattern: str) -> str:
    return repr(pattern if len(pattern) <= 80 else f"{pattern[:77]}...")
