"""The pages on metrics and API: nothing that the package has is missing from them, and nothing else is in them."""

import importlib.util
import inspect
import re
from pathlib import Path

import pytest
import torch

import trl_klx
from support.doc_pages import DOCS, ROOT
from support.tiny import train
from support.tiny_ppo import build_ppo
from trl_klx import KLXGRPOTrainer, KLXRLOOTrainer, Sums
from trl_klx.control.other_kls import add_sampler_kl


def load(path: Path):
    """Load a script of the docs as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- Metrics ----


@pytest.fixture(scope="module")
def rows() -> dict[str, list[str]]:
    """The cells of each row of the metrics page, by the metric's name."""
    found = re.findall(r"^\| `((?:klx|ppo)/\w+)` \|(.*)\|$", (DOCS / "metrics.md").read_text(), re.MULTILINE)
    assert len({name for name, _ in found}) == len(found)
    return {name: [cell.strip() for cell in rest.split("|")] for name, rest in found}


@pytest.fixture(scope="module")
def logged(tmp_path_factory) -> set[str]:
    """The names that runs with every kind of metric log."""
    folder = tmp_path_factory.mktemp("runs")
    several = {"num_iterations": 2, "max_steps": 2}
    trainers = [
        train(KLXGRPOTrainer, folder / "guard", kl_target=0.5, kl_lr_guard=True, kl_ref_reset_patience=2, max_steps=1),
        train(KLXGRPOTrainer, folder / "passes", kl_monitor=True, kl_update_target=1e-9, **several),
        train(KLXRLOOTrainer, folder / "rloo", kl_target=0.5, max_steps=1),
        build_ppo(folder / "ppo", kl_target=0.5, max_steps=1),
    ]
    trainers[-1].train()
    return {name for trainer in trainers for row in trainer.state.log_history for name in row if "/" in name}


def with_vllm() -> set[str]:
    window = Sums()
    zeros, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    add_sampler_kl(window, zeros, zeros, mask, "token")
    return {*window.pop(lambda sums: sums), "klx/sampler_max"}


def test_every_metric_that_is_logged_is_on_the_page(rows, logged):
    ours = {name for name in logged if name.startswith(("klx/", "ppo/"))}
    assert ours | with_vllm() == rows.keys()


def test_every_metric_in_the_source_is_on_the_page(rows):
    for file in (ROOT / "trl_klx").rglob("*.py"):
        for name in re.findall(r'"((?:klx|ppo)/\w+)"', file.read_text()):
            assert name in rows, f"{file.name} names {name}"


def test_every_row_says_formula_occasion_and_what_a_bad_value_means(rows):
    for name, (formula, _, occasion, meaning) in rows.items():
        assert formula and occasion, name
        assert meaning or name == "klx/target", name
    assert rows["klx/kl"][1] == "nats" and rows["klx/kl_per_token"][1] == "nats per token"


# ---- API ----


@pytest.fixture(scope="module")
def text() -> str:
    return (DOCS / "api.md").read_text()


def test_the_page_is_that_of_the_docstrings(text):
    assert load(DOCS / "api_page.py").page() == text, "Run `python docs/api_page.py`."


def test_every_public_name_is_on_the_page_once_with_its_docstring(text):
    headings = re.findall(r"^### `(\w+)`$", text, re.MULTILINE)
    assert sorted(headings) == sorted(trl_klx.__all__)
    for name in trl_klx.__all__:
        # A subclass or dataclass without a docstring would show its parent's, or a generated one.
        doc = inspect.cleandoc(vars(getattr(trl_klx, name)).get("__doc__") or getattr(trl_klx, name).__doc__)
        assert len(doc) > 40 and not doc.startswith(f"{name}("), name
        first = re.sub(r"[^\w ]", "", doc.split("\n")[0].replace("~trl.", ""))[:30]
        part = text.partition(f"### `{name}`")[2].partition("\n### ")[0]
        assert first in re.sub(r"[^\w \n]", "", re.sub(r"\]\(#\w+\)", "]", part)), name


def test_arguments_become_a_list_and_references_become_links():
    render = load(DOCS / "api_page.py").render
    doc = """
    Do it with [`Sums`], as [`~trl.GRPOTrainer`] does.

    Args:
        first (`int`, *optional*, defaults to `1`):
            What it is,
            in two lines.
        **kwargs:
            The others.

    Returns:
        `float`: The result.
    """
    assert render(doc).splitlines() == [
        "Do it with [`Sums`](#sums), as `GRPOTrainer` does.",
        "",
        "**Args**",
        "",
        "- `first` (`int`, *optional*, defaults to `1`):",
        "  What it is,",
        "  in two lines.",
        "- `**kwargs`:",
        "  The others.",
        "",
        "**Returns**",
        "",
        "`float`: The result.",
    ]
