"""Every example in README and docs runs, every link and name in them resolves, and the site builds."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import yaml
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from support.doc_pages import DOCS, PAGES, ROOT, blocks, prose, run_page
from support.tiny import build_model, build_tokenizer
from trl_klx import KLXPPOConfig
from trl_klx.controllers import registry
from trl_klx.trainers.config import KLXConfigMixin


RUN = {"python", "bash", "diff"}
SITE = ROOT / ".mkdocs.yml"
# Fields that the model of the examples shares with that of the other tests.
SIZES = {
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "pad_token_id",
    "eos_token_id",
    "bos_token_id",
    "initializer_range",
}
# Names of other packages, of arguments and of metrics, which are not our fields.
OTHER_NAMES = {
    "kl_key",
    "kl_penalty_step_lag",
    "kl_policy_ref",
    "kl_penalty",
    "kl_lab",
    "kl_control",
    "kl_reference",
    "kl_t",
}


def load(path: Path):
    """Load a script of the docs as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- Examples ----


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A working directory with the files that the examples use: a model, prompts and the log of an earlier run."""
    # A Llama, because its tokenizer can be loaded from the folder as it was saved.
    config = LlamaConfig(**{key: value for key, value in build_model().config.to_dict().items() if key in SIZES})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(tmp_path / "tiny-model")
    build_tokenizer().save_pretrained(tmp_path / "tiny-model")
    # The tiny model stands in for the Hub's: a folder of that name comes first.
    (tmp_path / "Qwen").mkdir()
    (tmp_path / "Qwen" / "Qwen2.5-0.5B-Instruct").symlink_to(tmp_path / "tiny-model")
    rows = [json.dumps({"prompt": f"w{index} w{index + 1}"}) for index in range(16)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(rows))
    log = [{"step": step, "klx/kl": 2.0 * step, "klx/coef": 0.1} for step in range(1, 6)]
    state = {"log_history": log, "global_step": 5, "max_steps": 5, "train_batch_size": 8}
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "trainer_state.json").write_text(json.dumps(state))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "rewards", raising=False)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if any(block.language in RUN and not block.excuse for block in blocks(page))],
    ids=lambda page: page.stem,
)
def test_examples_run(page, desk, monkeypatch, capsys):
    # Diffs assume a script that already has these names.
    given = {
        "model": "tiny-model",
        "dataset": Dataset.from_dict({"prompt": [f"w{index}" for index in range(16)]}),
        "reward": lambda completions, **kwargs: [float(len(text)) for text in completions],
    }
    assert run_page(page, given, monkeypatch, capsys) > 0
    if page.stem == "cli":
        for name in ("pid", "adaptive", "rloo", "ppo"):
            state = json.loads((desk / "runs" / name / "trainer_state.json").read_text())
            assert state["global_step"] == 3
        assert (desk / "runs" / "pid" / "curves.png").is_file() and (desk / "both.png").is_file()


def test_guides_have_examples():
    # These are not guides, or are tested in test_ppo_migration.py and test_reference_pages.py.
    without = {"api", "changelog", "compatibility", "costs", "from_trl_ppo", "metrics", "reliability"}
    for page in DOCS.glob("*.md"):
        if page.stem not in without:
            assert any(block.language == "python" and not block.excuse for block in blocks(page)), page.name


# ---- Names and links ----


def slug(heading: str) -> str:
    """The anchor of a heading in Python-Markdown and on GitHub."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading.replace("`", "")).strip().lower())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_resolve(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"https?:|mailto:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), f"{page.name} links to {link}"
        # The site contains only the docs.
        assert page.parent != DOCS or target.is_relative_to(DOCS), f"{page.name} links to {link}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", prose(target), re.MULTILINE)
            assert anchor in map(slug, headings), f"{page.name} links to {link}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_named_files_exist(page):
    for name in re.findall(
        r"\b(?:recipes|benchmarks|docs|tests|trl_klx)/[\w./-]+\.(?:py|yaml|md|png)", page.read_text()
    ):
        assert (ROOT / name).is_file(), f"{page.name} names {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_named_fields_exist(page):
    known = {field.name for field in fields(KLXPPOConfig)} | OTHER_NAMES
    named = set(re.findall(r"(?<![\w/.])(kl_[a-z_]*[a-z])(?![\w.(])", page.read_text()))
    # Metrics are written with their prefix, and local variables of examples are not fields.
    assert named <= known, f"{page.name}: {named - known}"


def test_config_page_is_that_of_the_configs():
    text = (DOCS / "config.md").read_text()
    assert load(DOCS / "config_table.py").fill(text) == text, "Run `python docs/config_table.py`."


def test_config_page_has_every_field_with_its_default():
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", (DOCS / "config.md").read_text(), re.MULTILINE))
    for field in fields(KLXConfigMixin):
        default = "unset" if field.default is None else f"`{field.default!r}`"
        assert rows[field.name].split(";")[0] == default, field.name


# ---- Pictures ----


def test_pictures_are_drawn(tmp_path):
    draw = load(DOCS / "img" / "draw.py")
    for name in ("estimators", "placements"):
        draw.PICTURES[name](tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
    assert {f"{name}.png" for name in draw.PICTURES} == {path.name for path in (DOCS / "img").glob("*.png")}


def test_picture_of_the_controllers_shows_what_the_text_says():
    draw = load(DOCS / "img" / "draw.py")
    runs = {label: draw.simulate(*settings) for label, settings in draw.CONTROLLERS.items()}
    late = {label: [kl / draw.TARGET for kl in kls[120:]] for label, (kls, _) in runs.items()}
    mean = {label: sum(kls) / len(kls) for label, kls in late.items()}
    assert mean["fixed, 0.1"] > 4 and mean["adaptive, horizon 10000"] > 4
    assert max(late["adaptive, horizon 1000"]) > 4 > late["adaptive, horizon 1000"][-1]
    assert {1e-4, 10.0} <= set(runs["exponential"][1])
    assert 0.9 < mean["hold"] < 1.1 and max(runs["hold"][0]) < 1.5 * draw.TARGET


# ---- Site ----


def pages_of(nav) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [page for entry in (nav if isinstance(nav, list) else nav.values()) for page in pages_of(entry)]


def test_site_has_every_page():
    nav = pages_of(yaml.safe_load(SITE.read_text())["nav"])
    assert sorted(nav) == sorted(page.name for page in DOCS.glob("*.md"))


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("material") is None, reason="mkdocs-material is not installed: pip install '.[docs]'"
)
def test_site_builds(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", SITE, "--site-dir", tmp_path]
    built = subprocess.run(command, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    index = json.loads((tmp_path / "search" / "search_index.json").read_text())
    for page in DOCS.glob("*.md"):
        html = (tmp_path / f"{page.stem}.html").read_text()
        # The page loads nothing from other servers.
        assert not re.search(
            r'<(?:script|img)[^>]+src="(?:https?:)?//|<link[^>]+stylesheet[^>]+href="(?:https?:)?//', html
        )
        assert any(entry["location"].startswith(f"{page.stem}.html") and entry["text"] for entry in index["docs"])
    assert any("kl_penalty_coef" in entry["text"] for entry in index["docs"])
    assert not list(tmp_path.rglob("*.py"))
