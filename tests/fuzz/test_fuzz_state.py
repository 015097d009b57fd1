"""Damaged KL-control files in a checkpoint: refused with one clear error, or restored to something sound."""

import json
import math
import os
import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import TrainerState

from support.damage import FUZZ, changed, damaged_bytes, damaged_header
from support.resumption import build_run
from trl_klx import get_kl_controller
from trl_klx.checkpoints.checksums import content_checksum
from trl_klx.checkpoints.kl_state import write_json, write_kl_state
from trl_klx.controllers.base import BatchMeasurement


STATE, REFERENCE = "kl_state.json", "kl_reference.safetensors"
REFUSALS = ("Cannot resume", "The KL reference is not the one")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A trainer with a lagging reference, and the files it saved after six steps."""
    folder = tmp_path_factory.mktemp("run")
    trainer = build_run("lag", str(folder / "saved"), "")
    trainer.train()
    files = {name: (folder / "saved" / "checkpoint-6" / name).read_bytes() for name in (STATE, REFERENCE)}
    return build_run("lag", str(folder / "resumed"), ""), files, folder / "checkpoint"


def check_restored_or_refused(run, files) -> None:
    trainer, _, folder = run
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    before = sorted(os.listdir(folder.parent))
    try:
        trainer._load_optimizer_and_scheduler(str(folder))
    except ValueError as error:
        assert str(error).startswith(REFUSALS) and str(folder) in str(error), error
    # Restored or not, the state that the run continues with is sound.
    args = trainer.args
    assert args.kl_coef_min <= trainer.kl_controller.value <= args.kl_coef_max
    assert all(math.isfinite(value) for value in trainer.kl_control.drift.state_dict()["values"])
    assert all(torch.isfinite(weight).all() for weight in trainer.kl_reference.weights().values())
    trainer.kl_controller.update(0.3, 4)
    trainer.kl_reference.follow(7)
    assert all(torch.isfinite(weight).all() for weight in trainer.kl_reference.state().values())
    json.dumps(trainer.kl_control.state_dict(), allow_nan=False)
    assert sorted(os.listdir(folder.parent)) == before


@FUZZ
@given(data=st.data())
def test_damaged_bytes(run, data):
    name = data.draw(st.sampled_from([STATE, REFERENCE]))
    check_restored_or_refused(run, run[1] | {name: damaged_bytes(data, run[1][name])})


@FUZZ
@given(data=st.data())
def test_changed_state(run, data):
    # With the checksum of the changed state, or in a version without one, so that the checks behind it are reached.
    content = changed(data, json.loads(run[1][STATE]))
    try:
        content = (
            content | {"version": 1} if data.draw(st.booleans()) else content | {"checksum": content_checksum(content)}
        )
    except ValueError:  # no JSON number
        pass
    check_restored_or_refused(run, run[1] | {STATE: json.dumps(content).encode()})


@FUZZ
@given(data=st.data())
def test_changed_trainer_state(run, data):
    folder = run[2].parent / "checkpoint-6"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(run[2].parent / "saved" / "checkpoint-6", folder)
    (folder / "kl_checksums.json").unlink()
    path = folder / "trainer_state.json"
    content = changed(data, json.loads(path.read_text()))
    path.write_text(json.dumps(content))
    try:
        assert run[0]._klx_choose_checkpoint(str(folder)) == str(folder)
        TrainerState.load_from_json(str(path))
        assert content["global_step"] == 6
    except ValueError as error:
        assert str(error).startswith("Cannot resume from") and "trainer_state.json" in str(error), error
    finally:
        shutil.rmtree(folder)


@FUZZ
@given(data=st.data())
@pytest.mark.parametrize("name", ["hold", "pid", "adaptive"])
def test_changed_state_of_a_controller(name, data):
    def build():
        return get_kl_controller(name, init_coef=0.1, target=0.3)

    controller, restored = build(), build()
    for step in range(5):
        controller.observe(BatchMeasurement(0.05 * (step + 1), 4, 1, 1e-3, 0.2, 0.5, 0.01, 0.1))
    content = json.loads(json.dumps(changed(data, controller.state_dict())))
    try:
        restored.load_state_dict(content)
    except ValueError as error:
        assert str(error).startswith("State of ")
        assert restored.state_dict() == build().state_dict()
    for kl in (0.3, 2.0, 1e-9):
        restored.observe(BatchMeasurement(kl, 4, 1, 1e-3, 0.2, 0.5, 0.01, 0.1))
        assert math.isfinite(restored.value)


@FUZZ
@given(data=st.data())
def test_changed_header_of_the_reference(run, data):
    check_restored_or_refused(run, run[1] | {REFERENCE: damaged_header(data, run[1][REFERENCE])})


def test_what_was_saved_is_restored(run):
    trainer, files, _ = run
    check_restored_or_refused(run, files)
    shutil.rmtree(run[2])
    run[2].mkdir()
    for name, content in files.items():
        (run[2] / name).write_bytes(content)
    trainer._load_optimizer_and_scheduler(str(run[2]))
    assert trainer.kl_controller.state_dict() == json.loads(files[STATE])["controller"]["state"]
    assert trainer.kl_reference.mover.kept_steps == [5, 6]


# ---- Paths that nobody passed ----


def test_links_are_replaced_not_followed(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    folder = tmp_path / "checkpoint-2"
    folder.mkdir()
    for name in (STATE, REFERENCE):
        (outside / name).write_text("precious")
        (folder / name).symlink_to(outside / name)
    state = {"controller": {}, "drift": None, "reference": {}}
    write_kl_state(str(folder), state, {"w": torch.zeros(2)})
    assert [(outside / name).read_text() for name in (STATE, REFERENCE)] == ["precious"] * 2
    assert not any((folder / name).is_symlink() for name in (STATE, REFERENCE))


def test_names_of_weights_are_no_paths(tmp_path):
    folder = tmp_path / "run" / "checkpoint-2"
    state = {"controller": {}, "drift": None, "reference": {"path": "../../outside"}}
    write_kl_state(str(folder), state, {"../../outside": torch.zeros(1), "/outside": torch.ones(1)})
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == [REFERENCE, STATE]


def test_a_full_disk_leaves_the_old_state(tmp_path):
    import resource

    path = tmp_path / STATE
    write_json(str(path), {"a": 1})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(OSError):
            write_json(str(path), {"a": list(range(5000))})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert json.loads(path.read_text()) == {"a": 1} and os.listdir(tmp_path) == [STATE]
