"""The trackers of a real run receive what KL control logs."""

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing

import pytest
from trl import GRPOTrainer

from support.tiny import build_trainer, logged, lora
from trl_klx import KLXCallback, KLXGRPOTrainer


FIELDS = {"kl_penalty_coef": 0.1, "kl_target": 0.5}
NAMES = ["kl", "kl_k1", "kl_per_token", "coef", "target", "error", "saturated", "adjustment_abs_mean"]


def scalars_of(folder) -> dict[str, list[float]]:
    """The scalars in TensorBoard's event files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [event.value for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.fixture
def tensorboard(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    return tmp_path / "events"


def test_tensorboard(tensorboard, tmp_path):
    trainer = build_trainer(KLXGRPOTrainer, tmp_path, report_to=["tensorboard"], **FIELDS)
    trainer.train()
    scalars = scalars_of(tensorboard)
    for name in NAMES:
        values = logged(trainer, f"klx/{name}")
        assert len(values) == 3 and scalars[f"train/klx/{name}"] == pytest.approx(values, rel=1e-6), name


def test_tensorboard_sees_what_the_callback_adds(tensorboard, tmp_path):
    extras = {"peft_config": lora()}
    trainer = build_trainer(GRPOTrainer, tmp_path, report_to=["tensorboard"], beta=0.1, extras=extras)
    trainer.add_callback(KLXCallback(trainer, target=0.01))
    trainer.train()
    scalars = scalars_of(tensorboard)
    assert scalars["train/klx/coef"] == pytest.approx(logged(trainer, "klx/coef"), rel=1e-6)
    assert scalars["train/klx/target"] == pytest.approx([0.01] * 3)


# A step that is too long for its target, a KL above it and a bound that is reached; then a resume with another
# controller, which starts from the config.
TRACKED_RUN = """
import json, sys
from support.tiny import build_trainer
from trl_klx import KLXGRPOTrainer

tracker, folder, history, step = sys.argv[1:]
fields = {"kl_target": 0.05, "kl_coef_max": 0.2, "learning_rate": 5e-2, "max_steps": 30, "save_strategy": "steps"}
fields |= {"save_steps": 30, "kl_controller": "hold"}
if step == "resumed":
    fields |= {"kl_controller": "adaptive", "kl_penalty_coef": 0.1, "max_steps": 32}
trainer = build_trainer(KLXGRPOTrainer, folder, report_to=[tracker], project="klx", **fields)
trainer.train(resume_from_checkpoint=step == "resumed")
open(history, "w").write(json.dumps(trainer.state.log_history))
"""


def run_tracked(tracker, tmp_path, step, **variables) -> tuple[list[dict], str]:
    """Train with a tracker in a separate process, because trackers read their settings when they are imported."""
    environment = os.environ | variables | {"PYTHONPATH": os.pathsep.join(sys.path)}
    history = tmp_path / "history.json"
    command = [sys.executable, "-c", TRACKED_RUN, tracker, str(tmp_path / "out"), str(history), step]
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(history.read_text()), result.stderr


def warnings_of(stderr: str) -> list[str]:
    """The warnings of the controller in what a run has printed."""
    starts = ("The coefficient has been at its bound", "The mean KL of the last", "The 1 optimizer steps")
    lines = (line.partition("] ")[2] for line in stderr.splitlines() if line.startswith("[RANK 0]"))
    return [line for line in lines if line.startswith(starts)]


@pytest.mark.slow
def test_trackio(tmp_path):
    pytest.importorskip("trackio")
    settings = {"TRACKIO_DIR": str(tmp_path / "trackio")}
    history, stderr = run_tracked("trackio", tmp_path, "first", **settings)
    with closing(sqlite3.connect(tmp_path / "trackio" / "klx.db")) as database:
        rows = [json.loads(row) for (row,) in database.execute("select metrics from metrics order by id")]
        alerts = database.execute("select title, text, level from alerts order by id").fetchall()
    for name in NAMES:
        logged = [entry[f"klx/{name}"] for entry in history if f"klx/{name}" in entry]
        found = [row[f"train/klx/{name}"] for row in rows if f"train/klx/{name}" in row]
        assert len(logged) == 30 and found == pytest.approx(logged, rel=1e-6), name
    told = warnings_of(stderr)
    assert any("at its bound of 0.2" in text for text in told) and len(told) >= 2
    assert alerts == [("KL control", text, "warn") for text in told]

    run_tracked("trackio", tmp_path, "resumed", **settings)
    with closing(sqlite3.connect(tmp_path / "trackio" / "klx.db")) as database:
        later = [text for (text,) in database.execute("select text from alerts order by id")][len(alerts) :]
    assert len([text for text in later if "The KL controller was changed since the checkpoint" in text]) == 1


@pytest.mark.slow
def test_wandb_gets_the_same_alerts(tmp_path):
    pytest.importorskip("wandb")
    _, stderr = run_tracked("wandb", tmp_path, "first", WANDB_MODE="offline", WANDB_DIR=str(tmp_path))
    told = warnings_of(stderr)
    (record,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    sent = record.read_bytes()
    assert len(told) >= 2
    for text in told:
        assert text.encode() in sent


def test_a_run_without_such_a_tracker_sends_nothing(tmp_path):
    trainer = build_trainer(KLXGRPOTrainer, tmp_path, **FIELDS)
    trainer.kl_control.alert("a warning")
    assert trainer.kl_control.alert._waiting == {}
