"""No torn checkpoint is trusted: the newest complete one is used, and files are checked without unpickling any."""

import json
import os
import pickle
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from support.resumption import build_run, outcome
from support.tiny import assert_same_weights, build_trainer
from trl_klx import KLXGRPOTrainer
from trl_klx.checkpoints.integrity import checkpoint_fault, choose_checkpoint


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A finished run with a moving reference, and checkpoints at steps 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("whole")
    trainer = build_run("lag", str(folder), "")
    trainer.train()
    return folder, outcome(trainer)


@pytest.fixture
def run(whole, tmp_path):
    """A copy of the run, for tests that damage it."""
    return Path(shutil.copytree(whole[0], tmp_path / "run"))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


TEARS = {
    "no trainer_state.json": ("trainer_state.json", Path.unlink),
    "torn trainer_state.json": ("trainer_state.json", truncate),
    "empty trainer_state.json": ("trainer_state.json", empty),
    "other trainer_state.json": ("trainer_state.json", lambda path: path.write_text("[]")),
    "no weights": ("adapter_model.safetensors", Path.unlink),
    "torn weights": ("adapter_model.safetensors", truncate),
    "empty weights": ("adapter_model.safetensors", empty),
    "long weights": ("adapter_model.safetensors", lambda path: path.write_bytes(path.read_bytes() + b"x")),
    "header of weights": ("adapter_model.safetensors", lambda path: path.write_bytes(b"\xff" * 64)),
    "no optimizer": ("optimizer.pt", Path.unlink),
    "torn optimizer": ("optimizer.pt", truncate),
    "empty optimizer": ("optimizer.pt", empty),
    "no scheduler": ("scheduler.pt", Path.unlink),
    "torn scheduler": ("scheduler.pt", truncate),
    "torn random state": ("rng_state.pth", truncate),
}
# The code that reads these files reports what is wrong with them.
OWN_TEARS = {
    "torn kl_state.json": ("kl_state.json", truncate),
    "empty kl_state.json": ("kl_state.json", empty),
    "torn kl_reference.safetensors": ("kl_reference.safetensors", truncate),
    "torn ppo_state.json": ("ppo_state.json", lambda path: path.write_text("{")),
    "torn value_function.safetensors": ("value_function.safetensors", lambda path: path.write_bytes(b"torn")),
}


def tear(folder: Path, kind: str) -> str:
    name, action = (TEARS | OWN_TEARS)[kind]
    action(folder / name)
    return name


@pytest.mark.parametrize("kind", TEARS | OWN_TEARS)
def test_newest_whole_checkpoint_is_chosen(kind, run):
    name = tear(run / "checkpoint-6", kind)
    with pytest.warns(
        UserWarning, match=r"Resuming from '.*checkpoint-4', because '.*checkpoint-6' is not whole"
    ) as caught:
        assert choose_checkpoint(str(run), True) == str(run / "checkpoint-4")
    assert len(caught) == 1 and ("no weights" in kind or name in str(caught[0].message))


@pytest.mark.parametrize("kind", TEARS)
def test_torn_path_is_refused(kind, run):
    tear(run / "checkpoint-6", kind)
    with pytest.raises(ValueError, match=r"Cannot resume from '.*checkpoint-6', which is not whole: .*"):
        choose_checkpoint(str(run), str(run / "checkpoint-6"))


def test_whole_checkpoints_are_taken_without_a_word(run):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose_checkpoint(str(run), True) == str(run / "checkpoint-6")
        assert choose_checkpoint(str(run), str(run / "checkpoint-2")) == str(run / "checkpoint-2")


def test_nothing_whole_is_refused(run):
    for step, kind in ((2, "empty weights"), (4, "no optimizer"), (6, "no trainer_state.json")):
        tear(run / f"checkpoint-{step}", kind)
    with pytest.raises(ValueError, match=r"no checkpoint in .* is whole \(.*checkpoint-6.*checkpoint-4.*checkpoint-2"):
        choose_checkpoint(str(run), True)


def test_the_host_says_that_there_is_nothing(tmp_path):
    assert choose_checkpoint(str(tmp_path), True) is True
    assert choose_checkpoint(str(tmp_path), str(tmp_path / "checkpoint-3")) == str(tmp_path / "checkpoint-3")


def test_model_only_checkpoints_are_whole(run):
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        (run / "checkpoint-6" / name).unlink()
    assert checkpoint_fault(str(run / "checkpoint-6")) is None


def test_an_adapter_with_a_name_lies_in_a_folder(run):
    (run / "checkpoint-6" / "mine").mkdir()
    weights = run / "checkpoint-6" / "mine" / "adapter_model.safetensors"
    (run / "checkpoint-6" / "adapter_model.safetensors").rename(weights)
    assert checkpoint_fault(str(run / "checkpoint-6")) is None
    truncate(weights)
    assert "mine/adapter_model.safetensors` is torn" in checkpoint_fault(str(run / "checkpoint-6"))


def test_files_of_a_sharding_engine_are_its_own(run):
    for name in ("optimizer.pt", "adapter_model.safetensors"):
        (run / "checkpoint-6" / name).unlink()
    assert checkpoint_fault(str(run / "checkpoint-6"), sharded=True) is None
    (run / "checkpoint-6" / "trainer_state.json").unlink()
    assert "written last" in checkpoint_fault(str(run / "checkpoint-6"), sharded=True)


@pytest.mark.parametrize("shard", ["model-00002-of-00002.safetensors", "../outside.safetensors", "/etc/hostname"])
def test_shards_must_all_be_in_the_folder(shard, run):
    folder = run / "checkpoint-6"
    (folder / "adapter_model.safetensors").unlink()
    save_file({"a": torch.zeros(2)}, folder / "model-00001-of-00002.safetensors")
    save_file({"b": torch.zeros(2)}, run / "outside.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": shard}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert checkpoint_fault(str(folder)) == f"it has no `{shard}`"
    if os.sep not in shard:
        save_file({"b": torch.zeros(2)}, folder / shard)
        assert checkpoint_fault(str(folder)) is None


def test_nothing_is_unpickled(run, tmp_path):
    class Trap:
        def __reduce__(self):
            return Path.touch, (tmp_path / "unpickled",)

    pickled = pickle.dumps(Trap())
    for name in (
        "optimizer.pt",
        "scheduler.pt",
        "rng_state.pth",
        "adapter_model.safetensors",
        "kl_reference.safetensors",
    ):
        (run / "checkpoint-6" / name).write_bytes(pickled)
    torch.save(Trap(), run / "checkpoint-6" / "optimizer.pt")
    with pytest.warns(UserWarning, match="checkpoint-6' is not whole"):
        choose_checkpoint(str(run), True)
    assert not (tmp_path / "unpickled").exists()


# ---- In training ----


def test_training_goes_on_from_the_whole_one(run, whole):
    tear(run / "checkpoint-6", "torn weights")
    tear(run / "checkpoint-4", "no trainer_state.json")
    trainer = build_run("lag", str(run), "")
    with pytest.warns(UserWarning, match="Resuming from .*checkpoint-2'.*checkpoint-6'.*checkpoint-4'"):
        trainer.train(resume_from_checkpoint=True)
    history, weights = outcome(trainer)
    assert history == whole[1][0]
    assert_same_weights(weights, whole[1][1])
    # The torn checkpoints have been written again.
    assert [checkpoint_fault(str(run / f"checkpoint-{step}")) for step in (2, 4, 6)] == [None] * 3


def test_training_refuses_a_torn_path_before_it_does_anything(run):
    tear(run / "checkpoint-6", "torn optimizer")
    trainer = build_run("lag", str(run), "")
    with pytest.raises(ValueError, match="Cannot resume from .*checkpoint-6'.*optimizer.pt"):
        trainer.train(resume_from_checkpoint=str(run / "checkpoint-6"))
    assert trainer.state.global_step == 0


def test_without_kl_control_the_choice_is_the_hosts(run):
    tear(run / "checkpoint-6", "no trainer_state.json")
    trainer = build_trainer(KLXGRPOTrainer, run, max_steps=8)
    with pytest.raises(Exception) as caught:  # noqa: B017
        trainer.train(resume_from_checkpoint=True)
    assert "whole" not in str(caught.value)


def test_a_checkpoint_is_not_whole_while_it_is_written_over(run, monkeypatch):
    # A second run into the same folder that stops in the middle of a save would leave files of both runs there.
    trainer = build_run("lag", str(run), "", seed=1, max_steps=2)

    def end(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer, "_save_optimizer_and_scheduler", end)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert "written last" in checkpoint_fault(str(run / "checkpoint-2"))
