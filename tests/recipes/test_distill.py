"""The recipe of on-policy distillation."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import distill


RECIPES = Path(__file__).parents[2] / "recipes"


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        # The KL of a sampled token is noisy; with fewer completions it takes more than 30 steps to see the KL fall.
        ["--per_device_train_batch_size=256", "--learning_rate=1e-3"],
        ["--kl_placement=loss", "--kl_estimator=full"],
    ],
    ids=["advantage", "loss"],
)
def test_default_runs_offline_and_the_reverse_kl_falls(flags, tmp_path_factory):
    cache = tmp_path_factory.getbasetemp() / "distill_models"  # the second run finds the models of the first
    folder = tmp_path_factory.mktemp("distill")
    result = subprocess.run(
        [sys.executable, str(RECIPES / "distill.py"), "--quick", f"--cache_dir={cache}", "--max_steps=30", *flags],
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    for stage in ("[1/3]", "[2/3]", "[3/3]", "reverse KL to the teacher", "held-out perplexity", "no reward"):
        assert stage in result.stdout
    output = folder / "outputs" / "distill"
    assert (output / "report.png").read_bytes()[:4] == b"\x89PNG"
    report = json.loads((output / "report.json").read_text())
    kls = [entry["klx/kl_per_token"] for entry in report["history"] if "klx/kl_per_token" in entry]
    assert len(kls) == 30 and mean(kls[-5:]) < 0.8 * mean(kls[:5])


def test_default_config_is_reverse_kl_at_coefficient_one():
    _, args, _ = distill.parse([])
    assert args.kl_init_coef == 1.0 and args.kl_controller_name == "fixed" and args.kl_target is None
    assert (args.kl_placement, args.kl_estimator, args.kl_centering) == ("advantage", "k1", "none")
    _, args, _ = distill.parse(["--kl_placement=loss", "--kl_estimator=full"])
    assert (args.kl_placement, args.kl_estimator) == ("loss", "full")


@pytest.mark.parametrize("flags", [["--kl_ref_model_path=teacher"], ["--model_name_or_path=student"]])
def test_student_and_teacher_come_together(flags):
    flags = [*flags, "--output_dir=out", "--use_cpu", "--bf16=False", "--kl_penalty_coef=1"]
    with pytest.raises(ValueError, match="Set --model_name_or_path and --kl_ref_model_path together"):
        distill.main(*distill.parse(flags))
