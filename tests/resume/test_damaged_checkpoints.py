"""A damaged checkpoint is named with its file and the reason, and the newest whole one before it is taken."""

import json
import math
import os
import shutil
import socket
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from support.resumption import build_run
from support.tiny import build_trainer, logged, lora
from trl_klx import KLXGRPOTrainer
from trl_klx.checkpoints.checksums import CHECKSUM_FILE, content_checksum
from trl_klx.checkpoints.run_lock import LOCK_FILE, RunLockedError


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    build_run("lag", str(folder), "").train()
    return folder


@pytest.fixture
def run(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "run"))


def rewrite_json(path: Path, change) -> None:
    content = json.loads(path.read_text())
    change(content)
    if "checksum" in content:
        content["checksum"] = content_checksum(content)
    path.write_text(json.dumps(content))


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) * 3 // 4] ^= 4
    path.write_bytes(content)


def rename_step(path: Path) -> None:
    weights = load_file(path)
    save_file({name.replace("6|", "999|", 1): weight for name, weight in weights.items()}, path)


def spoil_weight(path: Path) -> None:
    weights = load_file(path)
    next(iter(weights.values())).view(-1)[0] = math.nan
    save_file(weights, path)


def state(*keys, value):
    def change(content: dict) -> None:
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = value

    return lambda path: rewrite_json(path, change)


# By what happened: the file, how it is damaged, and what the message says. Checksums are kept only where they are what
# finds the damage.
FLIPS = [
    "adapter_model.safetensors",
    "kl_reference.safetensors",
    "optimizer.pt",
    "rng_state.pth",
    "trainer_state.json",
]
DAMAGES = {
    "renamed step": ("kl_reference.safetensors", rename_step, r"\[5, 999\], which are not the last 2"),
    "NaN in the adapter": ("adapter_model.safetensors", spoil_weight, "holds NaN"),
    "another step": ("trainer_state.json", state("global_step", value=5), "is of step 5"),
    "another step in the KL state": ("kl_state.json", state("step", value=4), "is of step 4"),
    "a step that is none": ("trainer_state.json", state("global_step", value=True), "has no step"),
    "an epoch that is none": ("trainer_state.json", state("epoch", value="x"), "'epoch' that is not a number of"),
    "an infinite epoch": ("trainer_state.json", state("epoch", value=1e999), "'epoch' that is not a number of"),
    "an unknown key": ("trainer_state.json", state("global_stop", value=1), "'global_stop'"),
    "nested": ("kl_state.json", lambda path: path.write_text("[" * 100_000), "kl_state.json"),
    "a huge number": ("kl_state.json", state("controller", "state", "speed", value=10**400), "not a finite number"),
    "a huge KL": ("kl_state.json", state("drift", "values", value=[1e308] * 3), "not a KL"),
    "a negative scatter": ("kl_state.json", state("controller", "state", "scatter", value=-1.0), "'scatter' is -1.0"),
    "a clock that is none": ("kl_state.json", state("clock", "rates", value=10**400), "kl_state.json|checkpoint-6"),
    "lost random state": ("rng_state.pth", Path.unlink, "rng_state.pth"),
    "lost random state of a process": ("kl_state.json", state("processes", value=2), "rng_state_0.pth"),
}


def check_named(run: Path, reason: str) -> None:
    trainer = build_run("lag", str(run), "")
    with pytest.raises(ValueError, match=reason) as caught:
        trainer._klx_choose_checkpoint(str(run / "checkpoint-6"))
    assert "checkpoint-6" in str(caught.value) and str(caught.value).startswith("Cannot resume")
    with pytest.warns(UserWarning, match=rf"(?s)Resuming from '.*checkpoint-4', because '.*checkpoint-6'.*({reason})"):
        assert trainer._klx_choose_checkpoint(True) == str(run / "checkpoint-4")
    assert trainer.kl_controller.value == 0.2  # trying a state changes nothing


@pytest.mark.parametrize("name", FLIPS)
def test_a_flipped_bit_is_found(name, run):
    flip_a_bit(run / "checkpoint-6" / name)
    check_named(run, name)


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_is_found_without_the_checksum(kind, run):
    name, damage, reason = DAMAGES[kind]
    damage(run / "checkpoint-6" / name)
    if kind != "lost random state":
        (run / "checkpoint-6" / CHECKSUM_FILE).unlink()
    check_named(run, reason)


def test_a_run_goes_on_from_the_checkpoint_before(run):
    flip_a_bit(run / "checkpoint-6" / "optimizer.pt")
    trainer = build_run("lag", str(run), "")
    with pytest.warns(UserWarning, match=r"checkpoint-6' is not whole: its `optimizer.pt` is not what was saved"):
        trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 6
    again = build_run("lag", str(run), "")
    assert again._klx_choose_checkpoint(True) == str(run / "checkpoint-6")  # it has been written again


# ---- What is measured ----


@pytest.mark.parametrize("fields", [{"kl_target_unit": "token"}, {"kl_statistic": "full"}], ids=str)
def test_another_measure_of_the_kl_is_noticed(fields, run):
    trainer = build_run("lag", str(run), "", max_steps=8, save_strategy="no", **fields)
    with pytest.warns(UserWarning, match="The KL is measured otherwise than in the checkpoint"):
        trainer.train(resume_from_checkpoint=str(run / "checkpoint-6"))
    assert logged(trainer, "klx/coef")[6] == 0.2


# ---- One run per folder ----


def test_a_folder_in_use_is_refused(tmp_path):
    trainer = build_trainer(KLXGRPOTrainer, tmp_path, kl_monitor=True, max_steps=1, extras={"peft_config": lora()})
    holder = {"host": socket.gethostname(), "pid": os.getppid(), "since": "noon", "token": "other"}
    (tmp_path / LOCK_FILE).write_text(json.dumps(holder))
    with pytest.raises(RunLockedError, match=rf"process {os.getppid()} on .*, since noon"):
        trainer.train()
    assert trainer.state.global_step == 0
    (tmp_path / LOCK_FILE).unlink()
    seen = []
    trainer.reward_funcs[0] = lambda completions, **kwargs: (
        seen.extend(os.listdir(tmp_path)) or [0.0] * len(completions)
    )
    trainer.train()
    assert LOCK_FILE in seen and LOCK_FILE not in os.listdir(tmp_path)


def test_without_kl_control_there_is_no_lock(tmp_path):
    (tmp_path / LOCK_FILE).write_text(json.dumps({"host": socket.gethostname(), "pid": os.getppid()}))
    build_trainer(KLXGRPOTrainer, tmp_path, beta=0.0, max_steps=1).train()


def test_an_error_gives_the_folder_back(tmp_path):
    def fail(completions, **kwargs):
        raise KeyError("reward")

    trainer = build_trainer(KLXGRPOTrainer, tmp_path, kl_monitor=True, rewards=fail, extras={"peft_config": lora()})
    with pytest.raises(KeyError):
        trainer.train()
    assert LOCK_FILE not in os.listdir(tmp_path)


def test_the_live_log_is_not_written_through_a_link(tmp_path):
    from trl_klx.cli.live import LiveStateCallback

    (tmp_path / "precious").write_text("precious")
    folder = tmp_path / "run"
    trainer = build_trainer(KLXGRPOTrainer, folder, kl_monitor=True, max_steps=1, extras={"peft_config": lora()})
    folder.mkdir(exist_ok=True)
    (folder / "trainer_state.json").symlink_to(tmp_path / "precious")
    trainer.add_callback(LiveStateCallback())
    trainer.train()
    assert (tmp_path / "precious").read_text() == "precious"
    assert json.loads((folder / "trainer_state.json").read_text())["global_step"] == 1
    assert not (folder / "trainer_state.json").is_symlink()
    assert not [name for name in os.listdir(folder) if name.endswith(".tmp")]
