"""The trackers of a real run receive what KL control logs."""

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from importlib.util import find_spec

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


TRACKIO_RUN = """
import json, sys
from support.tiny import build_trainer
from trl_klx import KLXGRPOTrainer

trainer = build_trainer(
    KLXGRPOTrainer, sys.argv[1], report_to=["trackio"], project="klx", kl_penalty_coef=0.1, kl_target=0.5
)
trainer.train()
open(sys.argv[2], "w").write(json.dumps(trainer.state.log_history))
"""


@pytest.mark.slow
def test_trackio(tmp_path):
    if find_spec("trackio") is None:
        pytest.skip("trackio is not installed")
    # In a separate process, because trackio reads its folder when TRL imports it.
    environment = os.environ | {"TRACKIO_DIR": str(tmp_path / "trackio"), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", TRACKIO_RUN, str(tmp_path / "out"), str(tmp_path / "history.json")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-4000:]
    history = json.loads((tmp_path / "history.json").read_text())
    with closing(sqlite3.connect(tmp_path / "trackio" / "klx.db")) as database:
        rows = [json.loads(row) for (row,) in database.execute("select metrics from metrics order by id")]
    for name in NAMES:
        logged = [entry[f"klx/{name}"] for entry in history if f"klx/{name}" in entry]
        found = [row[f"train/klx/{name}"] for row in rows if f"train/klx/{name}" in row]
        assert len(logged) == 3 and found == pytest.approx(logged, rel=1e-6), name
