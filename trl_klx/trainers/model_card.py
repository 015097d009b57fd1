"""Adds a section on KL control to a model card."""

import os
import re
from dataclasses import fields
from typing import Any

from huggingface_hub import ModelCard

from .. import __version__


# TRL's card ends with versions and citations. Our section comes before them, with what was done to the model.
_FOLLOWING = "### Framework versions"
_MAIN = ("kl_penalty_coef", "kl_placement", "kl_estimator", "kl_controller")


def add_kl_section(path: str, section: str) -> None:
    """
    Add a section to the model card at `path`.

    Args:
        path (`str`):
            Model card that TRL's trainer has written.
        section (`str`):
            Markdown from [`describe_kl`].
    """
    card = ModelCard.load(path, ignore_metadata_errors=True)
    before, following, after = card.text.partition(_FOLLOWING)
    card.text = f"{before.rstrip()}\n\n{section}\n\n{following}{after}"
    card.save(path)


def describe_kl(args: Any, statistic: str, reference: dict[str, Any], log_history: list[dict[str, Any]]) -> str:
    """
    Describe a run's KL control: its settings, its reference, and the last KL and coefficient.

    Args:
        args ([`KLXConfigMixin`]):
            Config of the run.
        statistic (`str`):
            What the KL was measured by.
        reference (`dict`):
            Identity of the reference.
        log_history (`list[dict]`):
            Logged rows, oldest first.

    Returns:
        `str`: Markdown.
    """
    rows = [(f"`{name}`", _code(value)) for name, value in _chosen_settings(args, statistic).items()]
    rows.append(("reference", ", ".join(f"{key} {_code(_shown(value))}" for key, value in reference.items())))
    last = next((entry for entry in reversed(log_history) if entry.get("klx/kl") is not None), None)
    if last is not None:
        rows.append((f"KL at step {last['step']}", f"{last['klx/kl']:.4g} nats per {args.kl_target_unit}"))
        rows.append((f"KL coefficient at step {last['step']}", f"{last['klx/coef']:.4g}"))
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    return (
        "### KL control\n\nThe distance from a reference policy was measured and controlled with trl-klx "
        f"{__version__}.\n\n| | |\n|---|---|\n{table}"
    )


def _chosen_settings(args: Any, statistic: str) -> dict[str, str]:
    """Return the settings that had an effect: the main ones, and others that differ from their defaults."""
    chosen, own_defaults = {}, {field.name: field.default for field in fields(args)} | args._own_defaults()
    resolved = {"kl_controller": args.kl_controller_name, "kl_penalty_coef": args.kl_init_coef}
    resolved["kl_statistic"] = statistic
    for field in fields(args):
        value = resolved.get(field.name, getattr(args, field.name))
        if field.name in _MAIN or (field.name.startswith("kl_") and value != own_defaults[field.name]):
            chosen[field.name] = "chosen by the controller" if value is None else _shown(value)
    inert = set() if args.kl_penalty_enabled and args.kl_placement == "advantage" else {"kl_centering"}
    if not args.kl_penalty_enabled:
        inert.update(_MAIN)
    return {name: value for name, value in chosen.items() if name not in inert}


def _code(text: str) -> str:
    """
    A code span that the text cannot leave: its fence is longer than any run of backticks in the text (CommonMark,
    section 6.1). A space keeps a backtick at an end apart from the fence.
    """
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence, space = "`" * (longest + 1), " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{space}{text}{space}{fence}"


def _shown(value: Any) -> str:
    # Cards are published, so they must not show where a folder lies on the user's machine.
    text = os.path.basename(os.path.normpath(value)) if isinstance(value, str) and os.path.isabs(value) else str(value)
    return " ".join(text.replace("|", "\\|").splitlines())
