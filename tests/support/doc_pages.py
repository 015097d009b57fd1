"""The pages of the documentation as the tests see them: code blocks in order, and the functions that run them."""

import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from trl_klx.cli import train
from trl_klx.cli.main import TRAINING, main
from trl_klx.control.placements.base import _PLACEMENTS
from trl_klx.controllers.registry import _REGISTRY
from trl_klx.maths.estimators import _ESTIMATORS
from trl_klx.references.kinds import _KINDS


ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "CONTRIBUTING.md", ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
# Languages of blocks that are not run, and why.
SHOWN = {
    "": "output of a command",
    "text": "output, compared with what the example above it prints",
    "toml": "part of a package's own file",
    "yaml": "a file that commands below it read",
}


@dataclass(frozen=True)
class Block:
    """
    A fenced block.

    Attributes:
        language, code (`str`):
            Its content.
        title (`str` or `None`):
            File name under which the page shows it.
        excuse (`str` or `None`):
            Why it is not run, from a comment `<!-- not run: ... -->` on the line above it.
    """

    language: str
    code: str
    title: str | None
    excuse: str | None


def blocks(page: Path) -> list[Block]:
    pattern = re.compile(r"(?:^<!-- not run: (.+) -->\n+)?^```(\w*)(.*)\n((?:.*\n)*?)^```$", re.MULTILINE)
    found = []
    for excuse, language, rest, code in pattern.findall(page.read_text()):
        title = re.search(r'title="(.+?)"', rest)
        found.append(Block(language, code, title and title[1], excuse or None))
    return found


def prose(page: Path) -> str:
    """The page without its blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def commands(block: Block) -> Iterator[list[str]]:
    """The command lines of a block, split into words."""
    for line in block.code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            yield words


@contextmanager
def registries_kept():
    """Undo what the examples of a page register."""
    registries = (_REGISTRY, _ESTIMATORS, _KINDS, _PLACEMENTS)
    before = [dict(registry) for registry in registries]
    try:
        yield
    finally:
        for registry, entries in zip(registries, before, strict=True):
            registry.clear()
            registry.update(entries)


@registries_kept()
def run_page(page: Path, names: dict, monkeypatch, capsys) -> int:
    """
    Run a page from top to bottom in the working directory. Returns the number of blocks run.

    Args:
        page (`Path`):
            The page.
        names (`dict`):
            Names that its code takes for granted.
    """
    printed: list[str] = []

    def record(*values, sep=" ", end="\n"):
        # Only what the example prints: its shown output leaves out what trainers print.
        printed.append(sep.join(map(str, values)) + end)

    space = names | {"__name__": f"docs_{page.stem}", "print": record}
    count = 0
    for block in blocks(page):
        if block.excuse:
            continue
        if block.title:
            Path(block.title).write_text(block.code)
        if block.language == "python":
            printed.clear()
            exec(compile(block.code, str(page), "exec"), space)
            count += 1
        elif block.language == "diff":
            # Run the version that the page recommends.
            after = "\n".join(line[1:] for line in block.code.splitlines() if not line.startswith("-"))
            with monkeypatch.context() as patch:
                # The script is written for a GPU; here its trainer is only built, not trained.
                patch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
                exec(compile(after, str(page), "exec"), space)
            count += 1
        elif block.language == "bash":
            for words in commands(block):
                run_command(words, monkeypatch, capsys)
            count += 1
        elif block.language == "text":
            assert "".join(printed) == block.code
        else:
            assert block.language in SHOWN, f"{page.name}: nothing runs a block of {block.language!r}"
    return count


def run_command(words: list[str], monkeypatch, capsys) -> None:
    """Run a command line of a page. For one that takes long or needs a GPU, only check that it can be run."""
    tool, arguments = words[0], words[1:]
    if tool == "trl-klx":
        if arguments[0] in TRAINING:
            monkeypatch.setattr(train, "launch_command", _train_here)
        assert main(arguments) == 0, words
    elif tool == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert arguments[0] in targets, words
    elif tool == "pip":
        assert arguments[0] == "install", words
    elif words[:3] == ["python", "-m", "http.server"]:
        pass  # serves forever
    elif tool in ("python", "accelerate"):
        scripts = [index for index, word in enumerate(arguments) if word.endswith(".py")]
        assert scripts, words
        check_script(ROOT / arguments[scripts[0]], arguments[scripts[0] + 1 :], monkeypatch, capsys)
    else:
        pytest.fail(
            f"No test runs {' '.join(words)!r}. Teach `run_command` to, or mark the block `<!-- not run: ... -->`."
        )


def _train_here(launch) -> None:
    """Run in this process what accelerate would launch. A launch of several processes is checked but not run."""
    from trl_klx.cli import script

    assert launch.training_script == train.SCRIPT
    name, *arguments = launch.training_script_args
    if launch.num_processes in (None, 1) and launch.config_file is None:
        assert script.main(name, arguments) == 0, arguments


def check_script(script: Path, arguments: list[str], monkeypatch, capsys) -> None:
    """Check that a script exists and knows the flags on its command line."""
    assert script.is_file(), script
    flags = [word.split("=")[0] for word in arguments if word.startswith("--")]
    if script.parent.name != "recipes" and not flags:
        return  # a benchmark without arguments starts measuring at once
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    monkeypatch.syspath_prepend(str(script.parent))
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(script), run_name="__main__")
    known = capsys.readouterr().out
    assert stop.value.code == 0
    for flag in flags:
        assert re.search(rf"(?<![\w-]){flag}(?![\w-])", known), f"{script.name} does not know {flag}"
