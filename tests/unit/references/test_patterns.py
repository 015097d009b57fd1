"""Regular expressions in a foreign adapter's config: one that never ends is refused by name."""

import json
import time

import pytest

from support.adapter_checks import CONFIG, change_config, make, save, untouched
from trl_klx.references import patterns
from trl_klx.references.adapter_loading import load_reference_adapter


pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(patterns, "SECONDS", 4.0)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("target_modules", r"(([a-z._0-9]+)+)+!"),
        ("target_modules", r"(.*)*(.*)*(.*)*!"),
        ("exclude_modules", r"([a-z._0-9]|[a-z._0-9]+)*!"),
        ("rank_pattern", {"plain": 4, r"([a-z._0-9]+)+!": 4}),
        ("alpha_pattern", {r"([a-z._0-9]+)+!": 4}),
        ("modules_to_save", [r"([a-z._0-9]+)+!"]),
        ("layers_pattern", [r"([a-z._0-9]+)+!"]),
    ],
)
def test_a_pattern_that_never_ends_is_refused_by_name(tmp_path, setting, value):
    changes = {setting: value} | ({"layers_to_transform": [0]} if setting == "layers_pattern" else {})
    change_config(save(tmp_path), **changes)
    policy, start = make(0), time.monotonic()
    with untouched(policy), pytest.raises(ValueError, match=rf"its `{setting}` has the pattern .*does not finish"):
        load_reference_adapter(policy, str(tmp_path))
    assert time.monotonic() - start < 30


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("a" * 20_000, "has a pattern of 20000 characters"),
        ("(?P<x>a", "is not a regular expression"),
        ("(" * 3000 + ")" * 3000, "is not a regular expression|has the pattern"),
        (r"a{4294967296}+", "is not a regular expression"),
    ],
    ids=["long", "broken", "nested", "huge repeat"],
)
def test_a_pattern_that_is_none_is_refused_by_name(tmp_path, value, reason):
    change_config(save(tmp_path), target_modules=value)
    with pytest.raises(ValueError, match=rf"its `target_modules` .*({reason})"):
        load_reference_adapter(make(0), str(tmp_path))


@pytest.mark.parametrize("pattern", [r".*\.(q|v)_proj", r"model\.layers\.\d+\.self_attn\.(?:q_proj|v_proj)"])
def test_patterns_in_use_are_accepted(tmp_path, pattern):
    change_config(save(tmp_path), target_modules=pattern)
    load_reference_adapter(make(0), str(tmp_path))


def test_plain_names_need_no_other_process(tmp_path, monkeypatch):
    save(tmp_path)
    rank = json.loads((tmp_path / CONFIG).read_text())["r"]
    change_config(tmp_path, rank_pattern={"layers.0.self_attn.q_proj": rank})
    monkeypatch.setattr(patterns.subprocess, "run", lambda *args, **kwargs: pytest.fail("started a process"))
    load_reference_adapter(make(0), str(tmp_path))
