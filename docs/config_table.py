"""Write the tables of `docs/config.md` from the configs: python docs/config_table.py"""

import re
from dataclasses import MISSING, fields
from pathlib import Path

from trl_klx import KLXGRPOConfig, KLXPPOConfig
from trl_klx.trainers.config import KLXConfigMixin


PAGE = Path(__file__).with_name("config.md")


def _cell(text: str) -> str:
    return " ".join(text.replace("%%", "%").split()).replace("|", "\\|")


def _default(field) -> str:
    assert field.default is not MISSING
    return "unset" if field.default is None else f"`{field.default!r}`"


def kl_table() -> str:
    """Every KL field, with PPO's default where it differs."""
    ppo = KLXPPOConfig.__dataclass_fields__
    rows = ["| field | default | meaning |", "|---|---|---|"]
    for field in fields(KLXConfigMixin):
        default, theirs = _default(field), _default(ppo[field.name])
        default += "" if theirs == default else f"; PPO {theirs}"
        choices = ", ".join(f"`{choice}`" for choice in field.metadata.get("choices", ()))
        text = _cell(field.metadata["help"]) + (f" One of {choices}." if choices else "")
        rows.append(f"| `{field.name}` | {default} | {text} |")
    return "\n".join(rows)


def ppo_table() -> str:
    """The fields that PPO adds to GRPO's."""
    known = {field.name for field in fields(KLXGRPOConfig)}
    rows = ["| field | default | meaning |", "|---|---|---|"]
    for field in fields(KLXPPOConfig):
        if field.name not in known:
            rows.append(f"| `{field.name}` | {_default(field)} | {_cell(field.metadata['help'])} |")
    return "\n".join(rows)


TABLES = {"kl fields": kl_table, "ppo fields": ppo_table}


def fill(text: str) -> str:
    """The page with each table between its markers."""
    for name, table in TABLES.items():
        marked = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        text, count = marked.subn(lambda match, table=table: f"{match[1]}\n{table()}\n\n{match[2]}", text)
        if count != 1:
            raise ValueError(f"{PAGE.name} must have the markers of {name!r} once, but has them {count} times.")
    return text


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text()))
