"""The recipes that make several runs, on tiny local models: comparing controllers and sweeping the coefficient."""

import csv
import json
import subprocess
import sys

import pytest

import compare_controllers
import kl_lab
import sweep_kl_coef
from compare_controllers import Outcome, judge, parse_controller
from support.hh_models import ON_CPU, RECIPES, dialogue, save_models
from trl_klx import KLXGRPOConfig, KLXPPOConfig, KLXRLOOConfig


pytestmark = pytest.mark.slow


FAST = [
    *ON_CPU,
    "--max_steps=3",
    "--per_device_train_batch_size=8",
    "--num_generations=2",
    "--max_completion_length=5",
]


def count_vowels(completions, **kwargs) -> list[float]:
    return [float(sum(letter in "aeiou" for letter in text)) for text in completions]


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    """Flags of a user's setup: local model, local prompts, reward as a function or as a model."""
    folder = tmp_path_factory.mktemp("lab")
    save_models(folder)
    rows = [dialogue(index) for index in range(40)]
    (folder / "full.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (folder / "bare.jsonl").write_text("\n".join(json.dumps({"prompt": row["prompt"]}) for row in rows))
    (folder / "empty.jsonl").write_text("\n".join(json.dumps({"text": row["prompt"]}) for row in rows))
    return folder


def flags(setup, *more, data="full", reward="test_kl_lab.count_vowels"):
    path = [f"--model_name_or_path={setup / 'policy'}", f"--dataset_name={setup / data}.jsonl", f"--reward={reward}"]
    return [*path, *FAST, *more]


def test_comparison(setup, tmp_path, capsys):
    line = flags(setup, "--kl_target=0.5", "--kl_penalty_coef=0.05", f"--output_dir={tmp_path}", "--seeds", "0", "1")
    line += ["--controllers", "fixed:0.2", "adaptive:100", 'pid:{"kp": 1.0}']
    compare_controllers.main(line)
    said = capsys.readouterr().out
    summary = json.loads((tmp_path / "comparison.json").read_text())
    assert summary["verdict"] in said
    assert [one["label"] for one in summary["outcomes"]] == ["fixed 0.2", "adaptive 100", 'pid {"kp": 1.0}']
    assert (tmp_path / "comparison.png").read_bytes()[:4] == b"\x89PNG"
    files = sorted((tmp_path / "runs").glob("*.json"))
    assert len(files) == 6
    record = json.loads((tmp_path / "runs" / "fixed_0.2-seed1.json").read_text())
    assert record["coef"] == [0.2] * 3 and record["kl"][0] < 1e-6 < record["kl"][1]
    assert record["step"] == [1, 2, 3] and record["perplexity"][0][0] == 0 and record["perplexity"][-1][0] == 3
    adaptive = json.loads((tmp_path / "runs" / "adaptive_100-seed0.json").read_text())
    # 8 completions, a horizon of 100, a KL of 0: the limit of the relative error.
    assert adaptive["coef"][1] == pytest.approx(0.05 * (1 - 0.2 * 8 / 100))

    # The same command repeats no run; another target repeats all of them.
    stamps = [file.stat().st_mtime_ns for file in files]
    compare_controllers.main(line)
    assert [file.stat().st_mtime_ns for file in files] == stamps
    compare_controllers.main([*line, "--kl_target=0.6"])
    assert all(file.stat().st_mtime_ns != stamp for file, stamp in zip(files, stamps, strict=True))


def test_sweep(setup, tmp_path, capsys):
    sweep_kl_coef.main(
        flags(setup, f"--output_dir={tmp_path}", "--coefs", "1.0", "0.01", "--kl_penalty_reference_step=0")
    )
    with (tmp_path / "frontier.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["coef"]) for row in rows] == [0.01, 1.0]
    for row in rows:
        record = json.loads((tmp_path / "runs" / f"{float(row['coef']):g}-seed0.json").read_text())
        assert float(row["kl"]) == pytest.approx(sum(record["kl"]) / 3)
        assert float(row["reward"]) == pytest.approx(sum(record["reward"]) / 3)
    assert (tmp_path / "frontier.png").exists()
    assert "Frontier" in capsys.readouterr().out


def test_sweep_of_the_nine_values_by_default():
    script_args, args, _ = kl_lab.parse(
        ["--config", str(RECIPES / "sweep_kl_coef.yaml"), "--kl_penalty_coef=1"], sweep_kl_coef.SweepArguments
    )
    assert script_args.coefs == [0.0001, 0.000316, 0.001, 0.00316, 0.01, 0.0316, 0.1, 0.316, 1.0]
    assert args.kl_penalty_reference_step == 0 and args.max_steps == 20


def test_default_of_the_comparison():
    line = kl_lab.with_defaults(["--max_steps=7"], compare_controllers.DEFAULT_CONFIG)
    script_args, args, model_args = kl_lab.parse(line, compare_controllers.CompareArguments)
    assert script_args.controllers == ["fixed", "adaptive:1000", "pid"] and model_args.model_name_or_path is None
    assert (args.max_steps, args.kl_target, args.kl_statistic) == (7, 2.0, "full")
    assert kl_lab.with_defaults(["--model_name_or_path=x"], compare_controllers.DEFAULT_CONFIG) == [
        "--model_name_or_path=x"
    ]


@pytest.mark.parametrize("algorithm, config_class", [("rloo", KLXRLOOConfig), ("ppo", KLXPPOConfig)])
def test_other_algorithms_and_a_reward_model(algorithm, config_class, setup, tmp_path):
    line = flags(setup, f"--algorithm={algorithm}", f"--output_dir={tmp_path}", data="bare", reward=setup / "reward")
    assert isinstance(kl_lab.parse(line)[1], config_class)
    (record,) = kl_lab.run_all(line, [kl_lab.Setting("one", ("--kl_penalty_coef", "0.1"))], tmp_path)
    assert len(record["kl"]) >= 1 and len(record["reward"]) == len(record["kl"])
    # Without answers there is no perplexity.
    assert record["perplexity"] == []


def test_algorithm_of_a_config_file(setup, tmp_path):
    config = tmp_path / "lab.yaml"
    config.write_text("algorithm: rloo\n")
    script_args, training_args, _ = kl_lab.parse(flags(setup, "--config", str(config), f"--output_dir={tmp_path}"))
    assert script_args.algorithm == "rloo" and isinstance(training_args, KLXRLOOConfig)
    line = flags(setup, "--config", str(config), "--algorithm", "grpo", f"--output_dir={tmp_path}")
    assert isinstance(kl_lab.parse(line)[1], KLXGRPOConfig)


def test_a_changed_config_file_makes_new_runs(setup, tmp_path):
    config = tmp_path / "lab.yaml"
    line = flags(setup, "--config", str(config), "--max_steps=1", f"--output_dir={tmp_path}", data="bare")
    marks = []
    for rate in ("1.0e-3", "1.0e-3", "2.0e-3"):
        config.write_text(f"learning_rate: {rate}\n")
        (record,) = kl_lab.run_all(line, [kl_lab.Setting("one", ("--kl_penalty_coef=0.1",))], tmp_path / "runs")
        marks.append(record["mark"])
    assert marks[0] == marks[1] != marks[2]


def test_another_seed_or_coefficient_keeps_the_records(setup, tmp_path):
    settings = [kl_lab.Setting("one", ("--kl_penalty_coef", "0.1"))]
    marks = []
    for lists in (["--seeds", "0"], ["--seeds=0", "--coefs", "0.1", "0.2"], ["--seeds", "0", "1", "--last=2"]):
        line = flags(setup, *lists, "--max_steps=1", f"--output_dir={tmp_path}")
        marks.append(kl_lab.run_all(line, settings, tmp_path, sweep_kl_coef.SweepArguments)[0]["mark"])
    assert len(set(marks)) == 1


def test_shares_make_every_run_once(setup, tmp_path):
    line = flags(setup, "--seeds", "0", "1", "2", "--max_steps=1", f"--output_dir={tmp_path}")
    settings = [kl_lab.Setting("one", ("--kl_penalty_coef", "0.1"))]
    parts = [kl_lab.run_all(line, settings, tmp_path, share=(index, 2)) for index in range(2)]
    assert [[record["seed"] for record in part] for part in parts] == [[0, 2], [1]]


@pytest.mark.parametrize(
    "more, message",
    [
        (["--controllers", "pod"], "unknown controller 'pod'. Choose from adaptive"),
        (["--controllers", "pid:3"], r"'pid:3' has no short form"),
        (["--controllers", "fixed:x"], "'x' in 'fixed:x' is not a number"),
        (["--controllers", "pid", "pid"], "lists a controller twice"),
        (["--controllers", "adaptive:-1"], "`kl_horizon` must be"),
        (["--algorithm=dpo"], "--algorithm must be one of grpo, rloo, ppo, got 'dpo'"),
        (["--dataset_name=nowhere.jsonl"], "nowhere.jsonl' cannot be loaded"),
    ],
)
def test_bad_arguments_of_the_comparison(more, message, setup, tmp_path):
    with pytest.raises(ValueError, match=message):
        compare_controllers.main(
            flags(setup, "--kl_target=0.5", "--kl_penalty_coef=0.05", f"--output_dir={tmp_path}", *more)
        )
    assert not list(tmp_path.rglob("*.json"))


def test_a_target_and_a_prompt_column_are_needed(setup, tmp_path):
    with pytest.raises(ValueError, match="Set --kl_target"):
        compare_controllers.main(flags(setup, "--kl_penalty_coef=0.05", f"--output_dir={tmp_path}"))
    with pytest.raises(ValueError, match=r"needs a column `prompt` with text. Its columns are \['text'\]"):
        sweep_kl_coef.main(flags(setup, f"--output_dir={tmp_path}", data="empty"))
    with pytest.raises(ValueError, match="--reward together"):
        sweep_kl_coef.main([f"--model_name_or_path={setup / 'policy'}", *FAST, f"--output_dir={tmp_path}"])
    with pytest.raises(ValueError, match="--coefs must be positive and different"):
        sweep_kl_coef.main(flags(setup, f"--output_dir={tmp_path}", "--coefs", "0.1", "0.1"))


def test_a_mistake_is_one_line_and_an_exit_code(setup, tmp_path):
    result = subprocess.run(
        [sys.executable, str(RECIPES / "sweep_kl_coef.py"), "--algorithm=dpo"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert result.returncode == 1
    assert result.stderr.strip().splitlines()[-1] == "error: --algorithm must be one of grpo, rloo, ppo, got 'dpo'."


def test_short_forms():
    assert parse_controller("fixed:0.1").flags == ("--kl_controller", "fixed", "--kl_penalty_coef", "0.1")
    assert parse_controller("adaptive:300").flags == ("--kl_controller", "adaptive", "--kl_horizon", "300")
    assert parse_controller("pid").flags == ("--kl_controller", "pid")
    assert parse_controller('pid:{"kp": 1}').flags == ("--kl_controller", "pid", "--kl_controller_kwargs", '{"kp": 1}')


def outcome(label, error, reward, kl=4.0, perplexity=2.0):
    return Outcome(label, kl=kl, reward=reward, error=error, peak=1.1, settled=10, perplexity=perplexity)


def test_verdict():
    static, moving = outcome("fixed 0.1", 0.8, 1.0, kl=8.0), outcome("pid", 0.08, 0.95, perplexity=1.5)
    text = judge([static, moving], first_reward=0.0, target=4.0)
    assert "pid held the target best: its KL was off by 8%" in text
    assert "similar to the highest, 1.000 of fixed 0.1, which went to 2.00 times the target KL" in text
    assert "adapting the coefficient paid here" in text and "lowest held-out perplexity is 1.500, of pid" in text
    assert "None of them" not in text
    text = judge([outcome("fixed", 0.4, 1.0, perplexity=None), outcome("adaptive", 0.5, 0.2)], 0.0, 4.0)
    assert "fixed held the target best" in text and "It also has the highest reward" in text
    assert "did not pay" in text and "None of them held it well" in text and "perplexity" not in text
    assert "is below the highest" in judge([static, outcome("pid", 0.08, 0.5)], first_reward=0.0, target=4.0)
