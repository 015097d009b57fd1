"""Write `docs/api.md` from the docstrings of everything in `trl_klx.__all__`: python docs/api_page.py"""

import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

import trl_klx


PAGE = Path(__file__).with_name("api.md")
HEAD = """\
# API

Every public name, from its docstring. All of them are imported from `trl_klx`. The fields of the configs are in
[Config fields](config.md). This page is written by `docs/api_page.py`.
"""
GROUPS = {
    "Trainers": (
        "KLXGRPOTrainer KLXRLOOTrainer KLXPPOTrainer KLXCallback KLXTrainerMixin KLXRLOOMixin reward_timeout",
        "Drop-in trainers, and what adds KL control to others.",
    ),
    "Configs": ("KLXGRPOConfig KLXRLOOConfig KLXPPOConfig KLXConfigMixin", "What the trainers take as `args`."),
    "Controllers": (
        "HoldKLController PIDKLController AdaptiveKLController ExponentialKLController FixedKLController "
        "get_kl_controller list_kl_controllers register_kl_controller KLController KLControllerState BatchMeasurement",
        "The measured KL in, the next coefficient out. They need neither torch nor a trainer.",
    ),
    "Diagnostics": (
        "DriftMonitor KLAdviser relative_rms_error steps_to_settle",
        "Whether a target is held, and what to change if not.",
    ),
    "Maths": (
        "estimate_kl center_kl_advantages register_kl_estimator",
        "Tensors in, tensors out, usable without a trainer.",
    ),
    "References": (
        "KLReference ReferenceKind register_reference_kind SyncedReference loaded_whole",
        "The frozen policy that the KL is measured against.",
    ),
    "Placements": ("Placement ScorePlacement register_placement", "Where the penalty acts."),
    "KL control without a trainer": (
        "KLControl Rollout Scored Sums read_metrics",
        "What the trainers are made of.",
    ),
}
SECTION = re.compile(r"^(Args|Parameters|Attributes|Returns|Raises|Example|Examples):$")
ITEM = re.compile(r"^([\w*,. ]+?)(?: \((.+)\))?:$")


def link(text: str) -> str:
    """Turn the references of a docstring into links where this page has their target, and into code elsewhere."""

    def target(match: re.Match[str]) -> str:
        name = match[1].lstrip("~").removeprefix("trl_klx.")
        shown = name if match[1].startswith("~") is False else name.rpartition(".")[2]
        return f"[`{shown}`](#{name.lower()})" if name in trl_klx.__all__ else f"`{shown}`"

    return re.sub(r"\[`([\w.~]+)`\](?!\()", target, text)


def items(lines: list[str]) -> list[str]:
    """The arguments of a section as a list."""
    written: list[str] = []
    for line in lines:
        match = ITEM.match(line) if not line.startswith(" ") else None
        if match:
            name = ", ".join(f"`{part}`" for part in match[1].split(", "))
            written.append(f"- {name}{f' ({match[2]})' if match[2] else ''}:")
        elif line.strip():
            written.append(f"  {line.strip()}" if line.startswith(" ") else line)
    return written


def render(doc: str) -> str:
    """A docstring in Hugging Face's form as Markdown."""
    blocks: list[str] = []
    lines = inspect.cleandoc(doc).splitlines()
    index = 0
    while index < len(lines):
        match = SECTION.match(lines[index])
        if not match:
            blocks.append(lines[index])
            index += 1
            continue
        end = index + 1
        while end < len(lines) and (not lines[end] or lines[end].startswith("    ")):
            end += 1
        body = textwrap.dedent("\n".join(lines[index + 1 : end])).strip("\n").splitlines()
        blocks += [f"**{match[1]}**", ""] if body else []
        blocks += [*(items(body) if match[1] not in ("Returns", "Raises") else body), ""]
        index = end
    text = link("\n".join(blocks).strip())
    # The examples of docstrings are parts of scripts.
    return re.sub(r"^```python$", "<!-- not run: part of a docstring -->\n```python", text, flags=re.MULTILINE)


def signature(name: str, value: Any) -> str:
    """A call, one argument per line if it is long."""
    try:
        parameters = list(inspect.signature(value).parameters.values())
    except (TypeError, ValueError):
        return f"{name}(...)"
    shown = [
        str(parameter.replace(annotation=parameter.empty)) for parameter in parameters if parameter.name != "self"
    ]
    line = f"{name}({', '.join(shown)})"
    return line if len(line) <= 90 else f"{name}(\n" + "".join(f"    {part},\n" for part in shown) + ")"


def members(cls: type) -> list[tuple[str, Any]]:
    """The public, documented methods and properties that this package gives a class."""
    found: dict[str, Any] = {}
    for base in cls.__mro__:
        if not base.__module__.startswith("trl_klx"):
            continue
        for name, value in vars(base).items():
            documented = inspect.getdoc(value) if not isinstance(value, str | int | float | tuple) else None
            is_method = inspect.isfunction(value) or isinstance(value, property | classmethod | staticmethod)
            if is_method and documented and not name.startswith("_") and name not in found:
                found[name] = value
    return list(found.items())


def entry(name: str) -> str:
    """The part of the page on one public name."""
    value = getattr(trl_klx, name)
    parts = [f"### `{name}`", ""]
    is_config = inspect.isclass(value) and (issubclass(value, TrainingArguments) or name == "KLXConfigMixin")
    if not is_config:
        parts += ["<!-- not run: a signature -->", "```python", signature(name, value), "```", ""]
    parts += [render(value.__doc__), ""]
    if inspect.isclass(value) and not is_config:
        own = members(value)
        if own:
            parts += ["| member | |", "|---|---|"]
        for member, method in own:
            first = " ".join(inspect.getdoc(method).partition("\n\n")[0].split()).replace("|", "\\|")
            call = "" if isinstance(method, property) else "()"
            parts.append(f"| `{member}{call}` | {link(first)} |")
    return "\n".join(parts).rstrip() + "\n"


def page() -> str:
    """The whole page."""
    listed = [name for names, _ in GROUPS.values() for name in names.split()]
    if sorted(listed) != sorted(trl_klx.__all__):
        raise ValueError(f"GROUPS and `trl_klx.__all__` differ in {sorted({*listed} ^ {*trl_klx.__all__})}.")
    parts = [HEAD]
    for title, (names, text) in GROUPS.items():
        parts += [f"## {title}\n\n{text}\n", *(entry(name) for name in names.split())]
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
