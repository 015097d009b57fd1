"""The command on runs that change while they are read, and on logs and names that nobody sane would write."""

import json
import shutil
import threading
from pathlib import Path

import pytest

from support.cli_command import command
from support.saved_runs import rows_of, write_state
from support.tiny import trained_lora
from trl_klx.cli import runs as reading
from trl_klx.cli.console import printable
from trl_klx.cli.main import main


PNG = b"\x89PNG"
ESCAPES = "\x1b]0;owned\x07\x1b[31m\u202e"


def assert_one_line(error: str, *words: str) -> None:
    assert error.count("\n") == 1 and all(word in error for word in words), error


# ---- Runs that train while they are read ----


@pytest.mark.parametrize("name", ["compare", "plot"])
def test_a_checkpoint_vanishes_once_it_was_read(name, tmp_path, monkeypatch, capsys):
    rows = rows_of(reward=[1.0, 2.0, 3.0])
    old, new = (write_state(tmp_path / f"checkpoint-{step}", rows[:step]) for step in (1, 3))
    read = reading._read_state

    def read_and_delete(file: Path, *args):
        run = read(file, *args)
        if file == old:
            shutil.rmtree(file.parent)
        return run

    monkeypatch.setattr(reading, "_read_state", read_and_delete)
    assert main([name, str(tmp_path)]) == 0
    assert not old.exists() and new.exists()


def test_every_checkpoint_vanishes_before_it_is_read(tmp_path, monkeypatch):
    """The newest one has taken their place by then."""
    rows = rows_of(reward=[1.0, 2.0, 3.0])
    old = write_state(tmp_path / "checkpoint-1", rows[:1])
    found = reading.state_files

    def find_and_replace(path: str):
        files = found(path)
        if old.exists():
            write_state(tmp_path / "checkpoint-3", rows)
            shutil.rmtree(old.parent)
        return files

    monkeypatch.setattr(reading, "state_files", find_and_replace)
    assert reading.read_run(str(tmp_path)).values("reward") == [1.0, 2.0, 3.0]


def test_compare_beside_a_thread_that_rotates_checkpoints(tmp_path, capsys):
    rows = rows_of(reward=[float(step) for step in range(100)])
    write_state(tmp_path / "checkpoint-1", rows[:1], max_steps=100)
    stop = threading.Event()

    def rotate():
        for step in range(2, 100):
            write_state(tmp_path / f"checkpoint-{step}", rows[:step], max_steps=100)
            shutil.rmtree(tmp_path / f"checkpoint-{step - 1}")
        stop.set()

    thread = threading.Thread(target=rotate)
    thread.start()
    try:
        calls = 0
        while not stop.is_set() or calls < 20:
            # 1: the moment when only a file that is being written was there.
            assert main(["compare", str(tmp_path)]) in (0, 1)
            calls += 1
    finally:
        thread.join()
    assert "Traceback" not in capsys.readouterr().err


def test_references_while_a_checkpoint_is_deleted(tmp_path, monkeypatch, capsys):
    for step in (1, 2):
        trained_lora(step).save_pretrained(tmp_path / f"checkpoint-{step}")
    from trl_klx.cli import references

    examine = references.examine

    def delete_and_examine(folder: Path, *args):
        if folder.name == "checkpoint-1":
            shutil.rmtree(folder)
        return examine(folder, *args)

    monkeypatch.setattr(references, "examine", delete_and_examine)
    assert main(["references", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert "checkpoint-2: adapter" in shown.out and "checkpoint-1" not in shown.out
    assert shown.err == "checkpoint-1: deleted while it was read\n"


# ---- Logs ----


def test_numbers_at_the_end_of_the_scale(tmp_path, capsys):
    huge = 1.7e308
    series = {"reward": [huge, -huge] * 4, "klx__kl": [huge] * 8, "klx__target": [1.0] * 8, "klx__coef": [1e-300] * 8}
    write_state(tmp_path / "huge", rows_of(**series), train_batch_size=4, max_steps=8)
    assert main(["compare", str(tmp_path / "huge")]) == 0
    row = capsys.readouterr().out.splitlines()[1].split()
    assert row[:8] == ["huge", "8", "-1.7e+308", "0", "1.7e+308", "1", f"{huge:.1%}", "1.7e+308"]
    assert main(["plot", str(tmp_path / "huge")]) == 0
    assert capsys.readouterr().err == "16 values beyond 1e+100 are not drawn\n"
    assert main(["controllers", "--simulate", str(tmp_path / "huge"), "--coef", "0.1"]) == 0
    for name in ("curves.png", "controllers.png"):
        assert (tmp_path / "huge" / name).read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ("[" * 100_000 + "]" * 100_000, "nested too deeply"),
        ('{"log_history": [{"step": 1, "x": ' + "[" * 100_000 + "]" * 100_000 + "}]}", "nested too deeply"),
        ('{"log_history": [{"step": 1}], "global_step": 1e999}', "its `global_step` is not a number"),
        ('{"log_history": [{"step": 1}], "max_steps": [1]}', "its `max_steps` is not a number"),
    ],
)
@pytest.mark.parametrize("arguments", [["compare"], ["plot"], ["controllers", "--simulate"]])
def test_states_that_cannot_be_read_are_one_error(arguments, state, reason, tmp_path, capsys):
    (tmp_path / "trainer_state.json").write_text(state)
    assert main([*arguments, str(tmp_path)]) == 1
    assert_one_line(capsys.readouterr().err, "trainer_state.json", reason)


def test_rows_that_are_no_curve_are_left_out(tmp_path, capsys):
    nested = json.loads("[" * 500 + "]" * 500)
    rows = [{"step": "two", "reward": 2.0}, {"step": [3], "reward": 3.0}, {"step": 10**400, "reward": 4.0}]
    write_state(tmp_path, [{"step": 1, "reward": 1.0, "odd": nested}, *rows])
    assert reading.read_run(str(tmp_path)).series("reward") == ([1], [1.0])
    assert main(["plot", str(tmp_path), "--all"]) == 0 and main(["compare", str(tmp_path)]) == 0


@pytest.mark.parametrize("target", [0.0, -1.0, 5e-324])
def test_a_target_that_cannot_be_held(target, tmp_path, capsys):
    write_state(tmp_path, rows_of(klx__kl=[1.0], klx__target=[target], klx__coef=[0.1]), train_batch_size=4)
    assert main(["compare", str(tmp_path)]) == main(["plot", str(tmp_path)]) == 0
    verdict = "above target (+inf%)" if target > 0 else f"a target of {target:.4g} cannot be held"
    assert verdict in capsys.readouterr().out


def test_thousands_of_metrics(tmp_path, capsys):
    """A figure with that many panels would never be finished."""
    names = [f"m{index:04}" for index in range(3000)]
    write_state(tmp_path, [{"step": step, **dict.fromkeys(names, 1.0), "reward": 1.0} for step in (1, 2)])
    assert main(["plot", str(tmp_path)]) == 0
    assert capsys.readouterr().err == "3000 more metrics were logged; name them with --metrics\n"
    assert main(["plot", str(tmp_path), "--all"]) == 2
    assert_one_line(capsys.readouterr().err, "3001 metrics are too many", "at most 64 panels", "--metrics")
    assert main(["plot", str(tmp_path), "--metrics", *names[:3]]) == 0


# ---- Names ----


def test_a_dollar_sign_is_no_formula(tmp_path, capsys):
    name, metric = r"a$\frac$", r"cost in \$ of $\x$"
    rows = rows_of(**{"klx__kl": [1.0], "klx__target": [1.0], "klx__coef": [0.1], metric: [1.0]})
    for folder in (name, "other"):
        write_state(tmp_path / folder, rows, train_batch_size=4)
    paths = [str(tmp_path / name), str(tmp_path / "other")]
    assert main(["plot", *paths, "--all", "--output", str(tmp_path / "x.png")]) == 0
    assert main(["controllers", "--simulate", paths[0]]) == 0
    assert (tmp_path / "x.png").read_bytes().startswith(PNG)


@pytest.mark.slow
def test_nothing_that_a_terminal_acts_on_is_printed(tmp_path):
    """Names of runs, metrics, controllers' states and files reach the terminal only as text."""
    run = tmp_path / f"run{ESCAPES}\nverdict: forged"
    write_state(run, rows_of(**{"reward": [1.0], "klx__kl": [1.0], "klx__target": [1.0], f"m{ESCAPES}": [1.0]}))
    trained_lora(1).save_pretrained(run / f"adapter{ESCAPES}")
    trained_lora(1).save_pretrained(run / "checkpoint-1")
    state = {"version": 1, "controller": {}, "drift": None, "reference": {"kind": f"step{ESCAPES}"}}
    (run / "checkpoint-1" / "kl_state.json").write_text(json.dumps(state))
    (run / "checkpoint-2").mkdir()
    (run / "checkpoint-2" / "kl_state.json").write_text(json.dumps(state | {"version": ESCAPES}))
    (tmp_path / f"torn{ESCAPES}").mkdir()
    for arguments in (
        ["compare", run, tmp_path / f"torn{ESCAPES}"],
        ["compare", run, run],
        ["plot", run, "--metrics", "none"],
        ["plot", run, "--all"],
        ["references", run],
        ["controllers", ESCAPES],
        ["controllers", "--simulate", run, "--completions", "4"],
        ["plot", run, f"--{ESCAPES}"],
    ):
        done = command(*arguments, cwd=tmp_path)
        shown = done.stdout + done.stderr
        assert "Traceback" not in shown
        assert printable(shown) == shown, ascii(shown)
        assert r"\x1b]0;owned\x07\x1b[31m\u202e" in shown
        assert not any(line.startswith("verdict: forged") for line in shown.splitlines())
