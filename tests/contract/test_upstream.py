"""The code of TRL and transformers that this package overrides or relies on is the code that we have read."""

import importlib.metadata
import importlib.util
import re
import sys
from pathlib import Path

import pytest

import trl_klx.trainers.mixin


def load_script():
    path = Path(__file__).parents[2] / ".ci" / "upstream.py"
    spec = importlib.util.spec_from_file_location("upstream", path)
    module = sys.modules["upstream"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


upstream = load_script()
RECORD = upstream.read_record()
DEFINITIONS = {definition.key: definition for definition in upstream.definitions()}


def read_versions(package: str) -> list[str]:
    """The recorded versions of a package, in order."""
    return list({version: None for key, versions in RECORD.items() if key.startswith(package) for version in versions})


def explain(definition, version: str) -> str:
    """Say which definition changed, why that matters, and how to see the change."""
    package, known = definition.package, read_versions(definition.package)
    reason = upstream.RELIED_ON.get(definition.key)
    reason = "We override it" if reason is None else f"It {reason}"
    old = version if version in known else known[-1]
    return (
        f"{definition.key.replace(':', '.')} of {package} {version} is not the code that was read. {reason}. `python "
        f".ci/upstream.py --package {package} --old {old} --new installed` shows the difference. Once our code fits, "
        "record it with `python .ci/upstream.py --write`."
    )


def installed(definition) -> str | None:
    return upstream.fingerprint(definition.source(upstream.installed_folder(definition.package)))


# A definition that is neither in the record nor in the installed version cannot be checked.
KNOWN = [key for key, definition in DEFINITIONS.items() if key in RECORD or installed(definition) is not None]


@pytest.mark.parametrize("key", KNOWN)
def test_code_is_the_one_that_was_read(key):
    definition = DEFINITIONS[key]
    version = importlib.metadata.version(definition.package)
    recorded = RECORD.get(key, {})
    if version in read_versions(definition.package):
        assert installed(definition) == recorded.get(version), explain(definition, version)
    else:
        # An unread version may still contain code that was read in another version.
        assert installed(definition) in recorded.values(), explain(definition, version)


def test_record_holds_what_we_depend_on_and_nothing_else():
    assert RECORD.keys() <= DEFINITIONS.keys(), "Run `python .ci/upstream.py --write`."
    assert upstream.RELIED_ON.keys() <= RECORD.keys(), "A name in `RELIED_ON` is in no version that was read."


def test_both_ends_of_the_range_are_recorded():
    root = Path(__file__).parents[2]
    oldest = re.search(r"trl>=([\d.]+)", (root / "pyproject.toml").read_text())[1]
    pinned = dict(re.findall(r"^(trl|transformers)==(\S+)", (root / ".ci" / "constraints.txt").read_text(), re.M))
    assert {oldest, pinned["trl"]} <= set(read_versions("trl"))
    assert pinned["transformers"] in read_versions("transformers")


def test_table_of_the_mixin_lists_every_override():
    trainers = [cls for cls in upstream.our_classes() if cls.__name__.endswith("Trainer")]
    rows = re.findall(r"^\| (`.+?) \|", trl_klx.trainers.mixin.__doc__, re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    overridden = set(upstream.overridden(trainers))
    assert overridden <= listed, f"The table in trl_klx/trainers/mixin.py lacks {sorted(overridden - listed)}."
    assert listed <= overridden, f"The table in trl_klx/trainers/mixin.py lists {sorted(listed - overridden)}."


# ---- The guard itself ----

BEFORE = '''@decorated
def method(self, a, b=1):
    """What it does."""
    # Why it does it.
    return f"{a}" + str(b)
'''


@pytest.mark.parametrize(
    "after",
    [
        BEFORE.replace("What it does.", "Something else."),
        BEFORE.replace("# Why it does it.", ""),
        BEFORE.replace('    """What it does."""\n', ""),
        BEFORE.replace("(self, a, b=1)", "(\n    self,\n    a,\n    b=1,\n)"),
    ],
    ids=["docstring", "comment", "no docstring", "layout"],
)
def test_fingerprint_ignores_what_does_not_run(after):
    assert upstream.fingerprint(after) == upstream.fingerprint(BEFORE)


@pytest.mark.parametrize(
    "old, new", [("b=1", "b=2"), ("str(b)", "repr(b)"), ("@decorated", "@other"), ("return", "yield"), ("1", "True")]
)
def test_fingerprint_sees_every_change(old, new):
    assert upstream.fingerprint(BEFORE.replace(old, new)) != upstream.fingerprint(BEFORE)


def package(folder: Path, body: str) -> Path:
    """Write a TRL with one trainer, whose loss returns `body`."""
    file = folder / "trl" / "trainer" / "grpo_trainer.py"
    file.parent.mkdir(parents=True)
    file.write_text(f"class GRPOTrainer:\n    def _compute_loss(self, model, inputs):\n        return {body}\n")
    return folder


def test_differences_name_the_method_and_show_the_lines(tmp_path):
    old, same, new = (
        package(tmp_path / name, body) for name, body in (("old", "1"), ("same", "1  # one"), ("new", "2"))
    )
    assert upstream.differences("trl", old, same, "1.0", "1.1") == {}
    ((key, diff),) = upstream.differences("trl", old, new, "1.0", "1.1").items()
    assert key == "trl.trainer.grpo_trainer:GRPOTrainer._compute_loss"
    assert "-        return 1" in diff and "+        return 2" in diff


def test_a_method_that_a_host_begins_to_define_is_seen():
    # In the versions that were read, RLOO inherits this method from transformers.
    key = "trl.trainer.rloo_trainer:RLOOTrainer._load_optimizer_and_scheduler"
    assert key in DEFINITIONS and key not in RECORD


def test_message_says_how_to_look():
    key = "trl.trainer.grpo_trainer:GRPOTrainer._prepare_inputs"
    message = explain(DEFINITIONS[key], "99.0")
    assert message.startswith("trl.trainer.grpo_trainer.GRPOTrainer._prepare_inputs of trl 99.0 ")
    assert f"--package trl --old {read_versions('trl')[-1]} --new installed" in message and "`_step`" in message
