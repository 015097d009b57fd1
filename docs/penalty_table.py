"""
Write the table of `docs/choosing.md` that says which gradient each penalty follows. It comes from the cases that the
tests check against exact gradients: python docs/penalty_table.py
"""

import re
import sys
import tempfile
from pathlib import Path


ROOT = Path(__file__).resolve().parent.parent
PAGE = Path(__file__).with_name("choosing.md")
sys.path[:0] = [str(ROOT / "tests")]

from support.gradient_oracle import Exact, build_policy  # noqa: E402
from support.penalty_cases import CASES, is_accepted, promised  # noqa: E402


def penalty_table() -> str:
    """Every accepted combination. Those that follow the same gradient share a row."""
    weight = build_policy().lm_head.weight.detach().double()
    exact = Exact(weight, weight)
    rows: dict[tuple[str, ...], dict[str, dict[str, None]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            # "importance" charges a different price in the same places.
            if case.estimator == "importance" or not is_accepted(case, folder):
                continue
            promise = promised(case, exact)
            discount = "" if case.centering is None else "0" if not case.discount else f"{case.discount:g}"
            key = (case.placement, discount, promise.follows, promise.later)
            seen = rows.setdefault(key, {"trainers": {}, "estimators": {}, "centerings": {}})
            seen["trainers"][case.trainer] = None
            seen["estimators"][f"`{case.estimator}`"] = None
            if case.centering is not None:
                seen["centerings"][f"`{case.centering}`"] = None
    lines = [
        "| placement | trainers | estimators | centering | `kl_discount` | follows | further steps on a rollout |",
        "|---|---|---|---|---|---|---|",
    ]
    for (placement, discount, follows, later), seen in rows.items():
        cells = [", ".join(seen[name]) for name in ("trainers", "estimators", "centerings")]
        lines.append(f"| `{placement}` | {' | '.join(cells)} | {discount} | {follows} | {later} |")
    return "\n".join(lines)


def main() -> None:
    page = PAGE.read_text()
    PAGE.write_text(
        re.sub(
            r"(<!-- penalties -->\n).*?(\n<!-- /penalties -->)",
            lambda match: match[1] + penalty_table() + match[2],
            page,
            flags=re.DOTALL,
        )
    )


if __name__ == "__main__":
    main()
