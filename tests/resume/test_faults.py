"""Faults: a run continues correctly, or stops with one clear error and its last good checkpoint intact."""

import json
import math
import os
import re
import resource
import shutil
import subprocess
import sys
import time
import warnings
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from datasets import Dataset

from support.launch import SCRIPTS
from support.resumption import build_run, outcome
from support.tiny import (
    WORDS,
    assert_same_weights,
    build_model,
    build_trainer,
    logged,
    reward_even_tokens,
    trained_lora,
    weights,
)
from support.tiny_ppo import build_ppo
from trl_klx import KLXGRPOTrainer, KLXRLOOTrainer
from trl_klx.checkpoints.integrity import checkpoint_fault
from trl_klx.control.rollout import TokenKL


KL = {
    "kl_penalty_coef": 0.1,
    "kl_target": 0.2,
    "kl_controller": "pid",
    "kl_warn_window": 2,
    "max_steps": 4,
    "save_strategy": "steps",
    "save_steps": 2,
}
TRAINERS = ("GRPO", "RLOO", "PPO")


def build(kind: str, folder, **overrides):
    if kind == "PPO":
        return build_ppo(folder, **(KL | {"reward_scaling": "running", "num_ppo_epochs": 1} | overrides))
    trainer_class = KLXGRPOTrainer if kind == "GRPO" else KLXRLOOTrainer
    return build_trainer(trainer_class, folder, **(KL | overrides))


def whole_checkpoints(folder) -> list[str]:
    return sorted(path.name for path in Path(folder).glob("checkpoint-*") if checkpoint_fault(str(path)) is None)


def assert_sound(trainer, steps: int = 4) -> None:
    """The run finished, and policy and controller hold only finite numbers."""
    assert trainer.state.global_step == steps
    assert all(torch.isfinite(weight).all() for weight in weights(trainer).values())
    assert all(math.isfinite(value) for value in logged(trainer, "klx/kl"))
    assert trainer.args.kl_coef_min <= trainer.kl_controller.value <= trainer.args.kl_coef_max
    json.dumps(trainer.kl_control.state_dict(), allow_nan=False)


# ---- kill -9 ----


def kills(folder, per_trainer: int, seed: int, timeout: int) -> list[dict]:
    command = [sys.executable, str(SCRIPTS / "fault_kills.py"), str(folder), str(per_trainer), str(seed)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line.removeprefix("KILL ")) for line in done.stdout.splitlines() if line.startswith("KILL ")]
    assert len(lines) == per_trainer * len(TRAINERS)
    return lines


def check_kills(lines: list[dict]) -> None:
    for line in lines:
        assert line["end"] == "exit 0" and line["different"] == [], line
        assert line["steps"] == (12 if line["trainer"] == "PPO" else 6), line
        if line["resumed_from"] is None:
            # Killed in its first save: the user is told, and the run starts over.
            assert line["phase"] == "save" and line["step"] == (4 if line["trainer"] == "PPO" else 2), line
            assert re.search("no checkpoint in .* is whole|No valid checkpoint found", line["refused"]), line
        elif line["resumed_from"] != line["left"][-1]:
            assert line["phase"] == "save" and line["left"][-1] in line["torn"], line
    torn = sum(line["torn"] is not None or "refused" in line for line in lines)
    print(f"\n{len(lines)} kills survived, {torn} of them with a torn checkpoint")
    assert torn >= len(TRAINERS)


@pytest.mark.slow
@pytest.mark.xdist_group("fault_kills")
def test_killed_at_random_moments(tmp_path):
    check_kills(kills(tmp_path, per_trainer=3, seed=0, timeout=800))


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_killed_at_many_random_moments(tmp_path):
    per_trainer = int(os.environ.get("KLX_KILLS", "21"))
    seed = int(time.time())
    print(f"seed {seed}")
    check_kills(kills(tmp_path, per_trainer, seed, timeout=7000))


@pytest.mark.nightly
def test_the_others_do_not_wait_for_a_dead_process(tmp_path):
    trained_lora(2, scale=0.1).save_pretrained(tmp_path / "adapter")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    arguments = [str(SCRIPTS / "run_in_group.py"), "kill", str(tmp_path), str(tmp_path / "adapter")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([*launcher, *arguments], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode != 0 and "Signal 9" in done.stderr
    assert whole_checkpoints(tmp_path / "killed") == ["checkpoint-2", "checkpoint-4"]


# ---- A full disk ----


@contextmanager
def small_disk(folder: Path, size: int):
    """A file system of this size or, if none can be mounted, a limit on the size of files."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    mounted = (
        hasattr(os, "geteuid") and os.geteuid() == 0 and subprocess.run(mount, capture_output=True).returncode == 0
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if not mounted:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size // 16, hard))
    try:
        yield mounted
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def size_of(folder: Path) -> int:
    blocks = (-(-path.stat().st_size // 4096) * 4096 for path in folder.rglob("*") if path.is_file())
    return sum(blocks)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    trainer = build_run("full-sync", str(folder), "")
    trainer.train()
    return folder, outcome(trainer)


# The first fills up in our own files, which are written first, the others in those of transformers.
@pytest.mark.parametrize("room", [0.05, 0.5, 0.9])
def test_disk_full_while_saving(room, uninterrupted, tmp_path):
    folder, expected = uninterrupted
    one = size_of(folder / "checkpoint-2")
    disk = tmp_path / "disk"
    # The model card lies next to the checkpoints.
    with small_disk(disk, int(one * (1 + room)) // 4096 * 4096 + 8 * 4096) as mounted:
        trainer = build_run("full-sync", str(disk / "run"), "")
        with pytest.raises(Exception) as caught:  # noqa: B017
            trainer.train()
        left = whole_checkpoints(disk / "run")
        if mounted:
            assert left == ["checkpoint-2"], caught.value
        shutil.copytree(disk / "run", tmp_path / "saved")
    if not left:
        pytest.skip("no file system can be mounted here, and the first checkpoint met the limit")
    again = build_run("full-sync", str(tmp_path / "saved"), "")
    with pytest.warns(UserWarning, match="Resuming from .*checkpoint-2'"):
        again.train(resume_from_checkpoint=True)
    assert outcome(again)[0] == expected[0]
    assert_same_weights(outcome(again)[1], expected[1])


# ---- Reward functions ----


def spoiled(kind: str):
    """A reward function that fails once, after two steps."""

    def reward(completion_ids, trainer_state, **kwargs):
        good = reward_even_tokens(completion_ids)
        if trainer_state.global_step != 2:
            return good
        if kind == "raises":
            raise RuntimeError("the reward service is down")
        return {
            "None": None,
            "short": good[:-1],
            "long": [*good, 0.0],
            "text": ["good"] * len(good),
            "Nones": [None] * len(good),
            "one None": [None, *good[1:]],
            "NaN": [math.nan] * len(good),
            "-inf": [-math.inf] * len(good),
        }[kind]

    return reward


@pytest.mark.parametrize("kind", ["raises", "None", "short", "long", "text"])
@pytest.mark.parametrize("trainer", TRAINERS)
def test_reward_that_stops_the_run(trainer, kind, tmp_path):
    run = build(trainer, tmp_path, rewards=spoiled(kind))
    # TRL's words, and torch's in versions of TRL that do not count.
    counts = {"short": r"returned 3 rewards|existing size \(3\)", "long": r"returned 5 rewards|existing size \(5\)"}
    message = {"raises": "the reward service is down", **counts}
    with pytest.raises((RuntimeError, TypeError, ValueError), match=message.get(kind, ".")):
        run.train()
    assert run.state.global_step == 2 and whole_checkpoints(tmp_path) == ["checkpoint-2"]
    saved = json.loads((tmp_path / "checkpoint-2" / "kl_state.json").read_text())
    again = build(trainer, tmp_path)
    again.train(resume_from_checkpoint=True)
    assert_sound(again)
    assert logged(again, "klx/coef")[2] == saved["controller"]["state"]["value"]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["Nones", "one None", "NaN", "-inf"])
@pytest.mark.parametrize("trainer", TRAINERS)
def test_reward_that_is_left_out(trainer, kind, tmp_path):
    # One infinite reward is like one None: test_odd_rewards.py.
    run = build(trainer, tmp_path, rewards=spoiled(kind))
    run.train()
    assert_sound(run)
    # The KL does not depend on rewards, so it was measured throughout.
    assert len(logged(run, "klx/kl")) == 4


# ---- Completions and prompts ----


@pytest.mark.parametrize("trainer", TRAINERS)
def test_every_completion_is_masked(trainer, tmp_path, caplog):
    settings = {"mask_truncated_completions": True, "max_completion_length": 2}
    run = build(trainer, tmp_path, generation_kwargs={"suppress_tokens": [0, 1], "min_new_tokens": 2}, **settings)
    start = {name: weight.clone() for name, weight in weights(run).items() if "klx_value" not in name}
    before = run.kl_controller.state_dict()
    run.train()
    assert run.state.global_step == 4
    assert logged(run, "klx/kl") == [] and run.kl_controller.state_dict() == before
    told = [record.message for record in caplog.records if "Every completion of a batch is masked" in record.message]
    assert len(told) == 1
    assert_same_weights({name: weight for name, weight in weights(run).items() if name in start}, start)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_prompt_longer_than_the_context(trainer, tmp_path):
    prompts = [" ".join(WORDS[(i + j) % 28] for j in range(200)) for i in range(8)]
    run = build(trainer, tmp_path, dataset=Dataset.from_dict({"prompt": prompts}))
    assert run.model.config.max_position_embeddings == 128
    run.train()
    assert_sound(run)


def with_empty(count: int):
    def rollout(prompts: list[str], trainer) -> dict:
        spoil = count if trainer.state.global_step == 2 else 0
        return {
            "prompt_ids": trainer.processing_class(prompts)["input_ids"],
            "completion_ids": [[] if index < spoil else [5 + index, 6, 1] for index in range(len(prompts))],
            "logprobs": None,
        }

    return rollout


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("trainer", ["GRPO", "PPO"])
def test_empty_completions(trainer, count, tmp_path):
    run = build(trainer, tmp_path, extras={"rollout_func": with_empty(count)})
    # TRL reads the last token of each completion.
    with pytest.raises(IndexError):
        run.train()
    assert whole_checkpoints(tmp_path) == ["checkpoint-2"]
    assert (
        run.kl_controller.value
        == json.loads((tmp_path / "checkpoint-2" / "kl_state.json").read_text())["controller"]["state"]["value"]
    )


# ---- A KL that explodes ----


@pytest.mark.parametrize("controller", ["adaptive", "exponential", "pid"])
@pytest.mark.parametrize("trainer", TRAINERS)
def test_policy_that_runs_away(trainer, controller, tmp_path):
    run = build(
        trainer,
        tmp_path,
        # Large weights and large steps: after one step, almost nothing that was likely still is.
        model=build_model(initializer_range=3.0),
        learning_rate=1.0,
        kl_controller=controller,
        kl_horizon=10 if controller == "adaptive" else 10000,
        save_strategy="no",
        max_steps=3,
    )
    run.train()
    assert_sound(run, steps=3)
    assert max(logged(run, "klx/kl")) > 500 * run.args.kl_target
    assert run.kl_controller.value > 0.1


@pytest.mark.parametrize("trainer", TRAINERS)
def test_kl_that_is_not_a_number_changes_nothing(trainer, tmp_path):
    run = build(trainer, tmp_path, model=trained_lora(1, scale=0.1), kl_ref_lag=2, max_steps=2)
    run.train()
    before = run.kl_control.state_dict()
    run.model.train()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rollout, nothing = run.kl_control.begin(), torch.full((2, 3), math.nan)
        run.kl_control.add(rollout, TokenKL(nothing, nothing, nothing, nothing), torch.ones(2, 3, dtype=torch.bool))
        run.kl_control.finish(rollout, reduce=lambda sums: sums, train=True)
    assert run.kl_control.state_dict() == before
    assert any("got a KL of nan" in str(warning.message) for warning in caught)
