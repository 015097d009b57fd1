"""The commands that report on runs, and what all commands share. None of these commands trains."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from trl import GRPOTrainer

import trl_klx
from support.cli_command import command, start
from support.saved_runs import rows_of, write_state
from support.tiny import lora, train
from trl_klx import KLXGRPOTrainer
from trl_klx.cli import compare, plot
from trl_klx.cli.console import table
from trl_klx.cli.main import main
from trl_klx.cli.runs import read_run


PNG = b"\x89PNG"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two real runs: ours with a target, and TRL's own with its KL term."""
    root = tmp_path_factory.mktemp("runs")
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    train(KLXGRPOTrainer, root / "ours", kl_penalty_coef=0.1, kl_target=0.5, kl_horizon=50, **saving)
    train(GRPOTrainer, root / "theirs", beta=0.1, extras={"peft_config": lora()}, **saving)
    return root


# ---- What all commands share ----


def test_help_and_version(capsys):
    assert main([]) == 0
    listed = capsys.readouterr().out
    for name in ("grpo", "rloo", "ppo", "plot", "compare", "references", "controllers"):
        assert f"\n    {name}" in listed
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"trl-klx {trl_klx.__version__}\n"


@pytest.mark.parametrize("arguments", [["bogus"], ["compare"], ["plot"], ["references"], ["plot", "x", "--bogus"]])
def test_wrong_usage_exits_with_2(arguments):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2


def test_light_commands_do_not_import_torch(runs):
    code = """
import sys
from trl_klx.cli.main import main
figure = ["--output", "light.png", "--metrics", "reward"]
codes = [main([]), main(["compare", "ours"]), main(["plot", "ours", *figure]), main(["controllers"])]
heavy = {"torch", "transformers", "trl", "peft"} & sys.modules.keys()
sys.exit(f"{codes} {heavy}" if any(codes) or heavy else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=runs, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_public_names_are_imported_on_first_use():
    assert sorted(trl_klx._MODULES) == sorted(trl_klx.__all__)
    assert set(trl_klx.__all__) <= set(dir(trl_klx))
    for name in trl_klx.__all__:
        assert getattr(trl_klx, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'KLXDPOTrainer'"):
        trl_klx.KLXDPOTrainer  # noqa: B018


def test_tables_align_numbers_to_the_right():
    text = table(["run", "KL"], [["a", "10.5"], ["bcd", "-"], ["e", "3%"]])
    assert text.split("\n") == ["run    KL", "a    10.5", "bcd     -", "e      3%"]


# ---- Reading runs ----


def test_the_state_that_knows_most_is_read(tmp_path):
    rows = rows_of(reward=[1.0, 2.0, 3.0, float("nan")])
    write_state(tmp_path / "checkpoint-2", rows[:2])
    write_state(tmp_path / "checkpoint-10", rows)
    # Copied files may have dates in any order.
    os.utime(tmp_path / "checkpoint-10" / "trainer_state.json", (1, 1))
    run = read_run(str(tmp_path))
    assert run.file.parent.name == "checkpoint-10" and run.note is None
    assert run.series("reward") == ([1, 2, 3], [1.0, 2.0, 3.0])
    assert run.done and not read_run(str(tmp_path / "checkpoint-2")).done
    write_state(tmp_path, [*rows, {"step": 4, "train_runtime": 1.0}], step=4, max_steps=9)
    assert read_run(str(tmp_path)).file.parent == tmp_path
    assert read_run(str(tmp_path)).done  # stopped early


def test_of_two_runs_in_one_folder_the_later_is_read(tmp_path):
    old = write_state(tmp_path / "checkpoint-4", rows_of(reward=[1.0, 2.0, 3.0, 4.0]))
    write_state(tmp_path / "checkpoint-2", rows_of(reward=[5.0, 6.0]))
    os.utime(old, (1, 1))
    run = read_run(str(tmp_path))
    assert run.values("reward") == [5.0, 6.0]
    assert "2 different runs" in run.note


def test_a_torn_state_is_passed_over(tmp_path, capsys):
    write_state(tmp_path / "checkpoint-1", rows_of(reward=[1.0]))
    torn = write_state(tmp_path / "checkpoint-2", rows_of(reward=[1.0, 2.0]))
    torn.write_text(torn.read_text()[:40])
    assert read_run(str(tmp_path)).step == 1
    assert main(["compare", str(torn)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("trl-klx compare: error:") and "cannot be read" in error and error.count("\n") == 1


@pytest.mark.parametrize("name", ["compare", "plot"])
def test_folders_without_a_log_are_refused(name, tmp_path, capsys):
    assert main([name, str(tmp_path / "missing")]) == 1
    assert "does not exist" in capsys.readouterr().err
    assert main([name, str(tmp_path)]) == 1
    assert "holds no `trainer_state.json`" in capsys.readouterr().err


# ---- compare ----


def test_compare_works_out_the_numbers(tmp_path):
    # The last quarter of eight rows is two: KL (4 + 6) / 2 = 5; errors 0 and 0.5, so an RMS of sqrt(0.25 / 2); the
    # peak is 10 / 4.
    rows = rows_of(
        reward=[0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 2.0],
        klx__kl=[1.0, 10.0, 9.0, 8.0, 7.0, 6.0, 4.0, 6.0],
        klx__target=[4.0] * 8,
        klx__coef=[0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8],
        klx__saturated=[0.0] * 8,
    )
    write_state(tmp_path, rows, max_steps=8)
    summary = compare.summarise(read_run(str(tmp_path)))
    assert (summary.reward, summary.late_reward, summary.kl, summary.target) == (2.0, 1.5, 5.0, 4.0)
    assert summary.rms_error == pytest.approx((0.25 / 2) ** 0.5)
    assert (summary.peak, summary.coef) == (2.5, 0.8)
    assert summary.verdict == "above target (+25%)"


@pytest.mark.parametrize(
    ("kl", "saturated", "verdict"),
    [
        (4.0, 0.0, "held (+0%)"),
        (4.8, 1.0, "held (+20%)"),
        (2.0, 0.0, "below target (-50%)"),
        (2.0, 1.0, "below target (-50%), coefficient at its bound: lower kl_coef_min"),
        (8.0, 1.0, "above target (+100%), coefficient at its bound: raise kl_coef_max"),
    ],
)
def test_verdicts(tmp_path, kl, saturated, verdict):
    write_state(tmp_path, rows_of(klx__kl=[kl], klx__target=[4.0], klx__saturated=[saturated]), step=4)
    assert compare.summarise(read_run(str(tmp_path))).verdict == verdict
    write_state(tmp_path, rows_of(klx__kl=[kl], klx__target=[4.0], klx__saturated=[saturated]), step=1)
    assert compare.summarise(read_run(str(tmp_path))).verdict == f"{verdict} (step 1 of 4)"


def test_compare_real_runs(runs):
    done = command("compare", "ours", "theirs", cwd=runs)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split() == (
        "run steps final reward last quarter KL target RMS error peak/target coefficient verdict".split()
    )
    assert lines[1].startswith("ours") and " 0.5 " in lines[1] and "target (" in lines[1]
    assert lines[2].startswith("theirs") and "*" in lines[2] and lines[2].endswith("no target")
    assert "TRL's own KL" in lines[3]
    assert lines[-1].startswith("verdict: ") and "closest ours" in lines[-1] and "highest reward" in lines[-1]


@pytest.mark.parametrize("key", ["kl", "objective__kl"])
def test_the_target_of_a_callback_is_in_the_unit_of_the_trainers_own_kl(key, tmp_path):
    series = {key: [0.01, 0.05, 0.05, 0.05], "klx__target": [0.05] * 4, "klx__coef": [0.1] * 4}
    write_state(tmp_path / "run", rows_of(**series))
    summary = compare.summarise(read_run(tmp_path / "run"))
    assert summary.target == 0.05 and summary.rms_error == 0.0 and summary.peak == 1.0
    assert "TRL's own KL" in compare.format_summaries([summary])


def test_compare_one_run_and_one_without_kl(runs, tmp_path, capsys):
    write_state(tmp_path / "bare", rows_of(reward=[1.0]), max_steps=1)
    assert main(["compare", str(tmp_path / "bare")]) == 0
    assert capsys.readouterr().out.endswith("verdict: bare: no KL was logged\n")
    # Two runs with the same name are told apart by their paths.
    shutil.copytree(runs / "ours", tmp_path / "ours")
    assert main(["compare", str(tmp_path / "ours"), str(runs / "ours")]) == 0
    shown = capsys.readouterr().out
    assert str(tmp_path / "ours") in shown and str(runs / "ours") in shown


# ---- plot ----


def test_plot_draws_real_runs(runs):
    main_curves = ["reward", "klx/kl", "klx/coef", "kl"]
    done = command("plot", "ours", "theirs", "--output", "both.png", "--metrics", *main_curves, cwd=runs)
    assert (done.returncode, done.stdout) == (0, "both.png\n"), done.stderr
    assert (runs / "both.png").read_bytes().startswith(PNG)
    names = plot.metric_names([read_run(str(runs / "ours")), read_run(str(runs / "theirs"))])
    assert names[:4] == ["klx/kl", "kl", "klx/coef", "reward"]
    assert {"loss", "klx/kl_per_token", "completions/mean_length", "grad_norm"} <= set(names)
    assert not {"step", "epoch", "klx/target", "train_loss"} & set(names)


def test_plot_overlays_runs_and_draws_each_target(tmp_path, monkeypatch):
    for name, target in (("one", 2.0), ("two", 3.0)):
        write_state(tmp_path / name, rows_of(klx__kl=[1.0, target], klx__target=[target] * 2, klx__coef=[0.1, 0.2]))
    figures = []
    monkeypatch.setattr(plot, "save", lambda figure, output: figures.append(figure))
    assert main(["plot", str(tmp_path / "one"), str(tmp_path / "two")]) == 0
    panel, coefficient = figures[0].axes
    assert panel.get_legend() is not None and coefficient.get_yscale() == "log"
    curves = {line.get_label(): list(line.get_ydata()) for line in panel.lines}
    assert curves["one"] == [1.0, 2.0] and curves["two"] == [1.0, 3.0]
    labels = [text.get_text() for text in panel.get_legend().get_texts()]
    assert labels == ["one", "two", "target of one: 2 (±20%)", "target of two: 3 (±20%)"]
    assert [line.get_linestyle() for line in panel.lines[:2]] == ["-", "-."]
    levels = [line.get_ydata()[0] for line in panel.lines if line.get_linestyle() == "--"]
    assert levels == [2.0, 3.0]
    bands = [patch.get_extents().transformed(panel.transData.inverted()) for patch in panel.patches]
    assert [(round(band.y0, 6), round(band.y1, 6)) for band in bands] == [(1.6, 2.4), (2.4, 3.6)]


def test_plot_draws_five_panels_unless_it_is_asked_for_all(runs, tmp_path, monkeypatch, capsys):
    figures = []
    monkeypatch.setattr(plot, "save", lambda figure, output: figures.append(figure))
    assert main(["plot", str(runs / "ours")]) == 0
    panels = figures[0].axes
    titles = ["klx/kl: KL to the reference", "klx/coef: KL coefficient", "reward", "entropy of the policy", "loss"]
    assert [panel.get_title() for panel in panels] == titles
    assert [panel.get_ylabel() for panel in panels] == ["nats", "", "", "nats per token", ""]
    assert [text.get_text() for text in panels[0].get_legend().get_texts()] == ["ours", "target: 0.5 (±20%)"]
    assert "more metrics were logged; --all draws them too" in capsys.readouterr().err
    assert main(["plot", str(runs / "ours"), "--all"]) == 0
    assert [panel.get_title() for panel in figures[1].axes[:5]] == titles
    assert len(figures[1].axes) > 20 and capsys.readouterr().err == ""
    assert main(["plot", str(runs / "ours"), "--all", "--metrics", "loss"]) == 2
    # Without an entropy its place is taken by the length; a run without main metrics is drawn as it is.
    write_state(tmp_path / "bare", rows_of(loss=[1.0], completions__mean_length=[3.0], other=[1.0]))
    write_state(tmp_path / "odd", rows_of(other=[1.0]))
    assert main(["plot", str(tmp_path / "bare")]) == main(["plot", str(tmp_path / "odd")]) == 0
    assert [panel.get_title() for panel in figures[2].axes] == ["completions/mean_length", "loss"]
    assert [panel.get_title() for panel in figures[3].axes] == ["other"]


@pytest.mark.parametrize("name", ["compare", "plot"])
def test_a_run_that_cannot_be_read_is_passed_over(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_state(tmp_path / "good", rows_of(reward=[1.0]), max_steps=1)
    (tmp_path / "bare").mkdir()
    assert main([name, "bare", "good", "missing"]) == 1
    shown = capsys.readouterr()
    assert ("verdict: good" if name == "compare" else "curves.png") in shown.out
    first, second = shown.err.splitlines()
    assert first.startswith(f"trl-klx {name}: passed over: 'bare' holds no `trainer_state.json`")
    assert second.startswith(f"trl-klx {name}: passed over: 'missing' does not exist")
    assert main([name, "bare", "missing"]) == 1
    shown = capsys.readouterr()
    assert shown.out == "" and "'bare' holds no" in shown.err and "'missing' does not exist" in shown.err


def test_plot_writes_into_the_run_by_default(runs, tmp_path, capsys):
    shutil.copytree(runs / "ours", tmp_path / "ours")
    assert main(["plot", str(tmp_path / "ours"), "--metrics", "reward", "klx/kl"]) == 0
    assert (tmp_path / "ours" / "curves.png").read_bytes().startswith(PNG)
    assert main(["plot", str(tmp_path / "ours"), "--metrics", "rewards"]) == 2
    assert "'rewards' was not logged. Logged metrics: klx/kl, klx/coef, reward" in capsys.readouterr().err
    assert main(["plot", str(tmp_path / "ours"), "--output", str(tmp_path / "x.docx")]) == 2
    assert "its suffix must be one of" in capsys.readouterr().err
    assert main(["plot", str(tmp_path / "ours"), "--interval", "0"]) == 2
    (tmp_path / "file").write_text("")
    assert main(["plot", str(tmp_path / "ours"), "--output", str(tmp_path / "file" / "x.png")]) == 1
    assert "cannot write" in capsys.readouterr().err
    assert not list(tmp_path.rglob(".*.png"))


def test_plot_without_matplotlib(runs, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for arguments in (["plot", str(runs / "ours")], ["controllers", "--simulate", str(runs / "ours")]):
        assert main(arguments) == 1
        assert "pip install 'trl-klx[plot]'" in capsys.readouterr().err
    assert main(["controllers"]) == 0


def test_follow_until_interrupted(tmp_path):
    """The live view works before the run starts, while it grows, and until Ctrl-C."""
    rows = rows_of(reward=[1.0, 2.0, 3.0])
    folder = tmp_path / "run"
    process = start("plot", "--follow", "--interval", "0.1", folder, "--metrics", "reward")
    try:
        assert "waiting" in process.stderr.readline()
        write_state(folder / "checkpoint-1", rows[:1])
        assert process.stdout.readline() == f"{folder / 'curves.png'}: run step 1 of 4\n"
        first = (folder / "curves.png").read_bytes()
        write_state(folder / "checkpoint-3", rows)
        assert process.stdout.readline() == f"{folder / 'curves.png'}: run step 3 of 4\n"
        assert (folder / "curves.png").read_bytes() != first
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=120) == 0
    finally:
        process.kill()
        process.communicate()


def test_follow_ends_with_the_run(tmp_path, capsys):
    write_state(tmp_path, rows_of(reward=[1.0, 2.0, 3.0, 4.0]))
    assert main(["plot", "--follow", "--interval", "30", str(tmp_path)]) == 0
    assert "step 4 of 4" in capsys.readouterr().out


# ---- controllers ----


def install_controllers(folder: Path) -> None:
    """A package with one controller that works and one that does not."""
    (folder / "steps").mkdir(parents=True)
    (folder / "steps" / "__init__.py").write_text(
        f"open({str(folder / 'imported')!r}, 'w').close()\n"
        "from trl_klx import KLController\n"
        "class Step(KLController):\n"
        "    formula = 'coef * factor'\n"
        "    uses = frozenset({'max_coef'})\n"
        "    def __init__(self, init_coef, *, factor=2.0, mode='up', **kwargs):\n"
        "        super().__init__(init_coef, **kwargs)\n"
        "        self.factor = factor\n"
        "    def _next(self, kl, n_steps):\n"
        "        return self.value * self.factor\n"
    )
    info = folder / "steps_for_klx-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: steps-for-klx\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[trl_klx.kl_controllers]\nstep = steps:Step\ntorn = steps:Missing\n")


def test_controllers_lists_built_in_ones_and_entry_points(tmp_path):
    install_controllers(tmp_path)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])

    def listed(*names):
        done = command("controllers", *names, PYTHONPATH=path)
        assert done.returncode == 0, done.stderr
        return {block.split("\n")[0]: block for block in done.stdout.split("\n\n")}

    blocks = listed()
    assert {"adaptive", "exponential", "fixed", "pid", "step", "torn"} <= blocks.keys()
    assert "clip=0.2, horizon=10000, min_coef=0.0001, max_coef=10" in blocks["adaptive"]
    assert "coef * exp(rate * (kl - target))" in blocks["exponential"] and "rate=0.1" in blocks["exponential"]
    assert "no target" in blocks["fixed"] and "no settings" in blocks["fixed"] and "built in" in blocks["fixed"]
    # A package is imported only when its controller is asked for.
    assert not (tmp_path / "imported").exists()
    assert "steps:Step (entry point of steps-for-klx, not imported)" in blocks["step"]
    assert "steps:Missing (entry point of steps-for-klx, not imported)" in blocks["torn"]
    blocks = listed("step", "torn")
    assert (tmp_path / "imported").exists() and not {"adaptive", "fixed"} & blocks.keys()
    assert "steps.Step (entry point of steps-for-klx)" in blocks["step"]
    assert "factor=2, mode=up, max_coef=10\n" in blocks["step"] + "\n"
    assert "cannot be used" in blocks["torn"] and "Repair or uninstall" in blocks["torn"]


def test_simulate_plays_the_recorded_kl(tmp_path, capsys):
    rows = rows_of(klx__kl=[2.0, 2.0, 1.0], klx__target=[1.0] * 3, klx__coef=[0.5, 0.6, 0.7])
    write_state(tmp_path / "run", rows, train_batch_size=4)
    arguments = ["controllers", "--simulate", str(tmp_path / "run"), "--horizon", "10", "--completions", "5"]
    assert main([*arguments, "--controllers", "adaptive", "fixed"]) == 0
    shown = capsys.readouterr().out
    assert "open loop: the recorded KL does not react" in shown
    # Twice the target is an error of 1, clipped to 0.2; at 5 completions and a horizon of 10, the factor is 1.1.
    rows = {line.split()[0]: line.split()[1:] for line in shown.splitlines() if line}
    assert rows["adaptive"] == ["0.5", "0.5", "0.605", "0.605"]
    assert rows["fixed"] == ["0.5"] * 4
    assert (tmp_path / "run" / "controllers.png").read_bytes().startswith(PNG)


def test_simulate_on_real_runs(runs, tmp_path):
    done = command("controllers", "--simulate", "ours", "--output", tmp_path / "s.png", cwd=runs)
    assert done.returncode == 0, done.stderr
    assert "completions per update: 4 (the batch size on one device" in done.stdout
    for name in ("adaptive", "exponential", "fixed", "pid"):
        assert f"\n{name} " in done.stdout
    assert (tmp_path / "s.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["fuzzy"], 2, "unknown controller 'fuzzy'. Choose from adaptive"),
        (["pid", "--simulate", "ours"], 2, "'pid' has no effect with --simulate: use --controllers."),
        (["--target", "1"], 2, "--target has no effect without --simulate"),
        (["--simulate", "theirs"], 2, "the run has no target. Set --target"),
        (["--simulate", "ours", "--target", "-1"], 2, "`target` must be a finite number > 0 (nats), got -1.0"),
        (["--simulate", "ours", "--controllers", "fuzzy"], 2, "unknown controller 'fuzzy'. Choose from adaptive"),
        (["--simulate", "ours", "--kwargs", '{"kp": 1}'], 2, "--kwargs is for one controller"),
        (["--simulate", "ours", "--controllers", "pid", "--kwargs", "kp=1"], 2, "--kwargs is not JSON"),
        (["--simulate", "ours", "--controllers", "pid", "--kwargs", "[1]"], 2, "must be a JSON object"),
        (["--simulate", "ours", "--controllers", "pid", "--kwargs", '{"kq": 1}'], 2, "takes no argument 'kq'"),
        (["--simulate", "ours", "--completions", "0"], 2, "--completions must be at least 1, got 0"),
        (["--simulate", "missing"], 1, "'missing' does not exist"),
    ],
)
def test_simulate_refuses(runs, monkeypatch, capsys, arguments, code, message):
    monkeypatch.chdir(runs)
    assert main(["controllers", *arguments]) == code
    error = capsys.readouterr().err
    assert error.startswith("trl-klx controllers: error: ") and message in error and error.count("\n") == 1


def test_simulate_needs_a_kl(tmp_path, capsys):
    write_state(tmp_path, rows_of(reward=[1.0]))
    assert main(["controllers", "--simulate", str(tmp_path), "--target", "1"]) == 1
    assert "has no KL. Train with `kl_monitor: true`" in capsys.readouterr().err
    write_state(tmp_path, rows_of(klx__kl=[1.0]))
    assert main(["controllers", "--simulate", str(tmp_path), "--target", "1"]) == 2
    assert "Set --completions" in capsys.readouterr().err
