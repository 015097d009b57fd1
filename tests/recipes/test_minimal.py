"""The one-file recipes run as they stand, and the YAML files for real models build what their heads say."""

import os
import re
import shlex
import subprocess
import sys

import pytest
import yaml

from support.hh_models import RECIPES
from trl_klx.cli import train
from trl_klx.cli.algorithms import make_parser
from trl_klx.cli.main import main


SIZES = sorted(RECIPES.glob("grpo_*b.yaml"))


@pytest.mark.parametrize("name", ["grpo_minimal.py", "rloo_minimal.py"])
def test_minimal_recipes_are_short(name):
    assert len((RECIPES / name).read_text().splitlines()) <= 60


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo_minimal.py", "rloo_minimal.py"])
def test_minimal_recipes_run_without_a_model_and_without_network(name, tmp_path):
    # With fewer steps, but otherwise as they stand.
    script = tmp_path / name
    text = (RECIPES / name).read_text()
    assert text.count("max_steps=60") == text.count("logging_steps=5") == 1
    script.write_text(text.replace("max_steps=60", "max_steps=2").replace("logging_steps=5", "logging_steps=1"))
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.findall(r"'klx/target': '?3", done.stdout) and "'reward'" in done.stdout


def test_there_are_recipes_for_small_and_large_models():
    assert [path.name for path in SIZES] == ["grpo_0.5b.yaml", "grpo_3b.yaml", "grpo_8b.yaml"]


@pytest.mark.parametrize("path", SIZES, ids=lambda path: path.name)
def test_recipes_for_real_models_parse_and_build(path):
    content = yaml.safe_load(path.read_text())
    parser = make_parser("grpo")
    script_args, args, model_args, _ = parser.parse_args_and_config(
        ["--config", str(path), "--use_cpu", "True", "--bf16", "False"], fail_with_unknown_args=True
    )
    assert args.kl_controller_name == "hold" and (args.kl_target, args.kl_target_unit) == (0.03, "token")
    assert args.use_vllm and args.vllm_mode == "colocate" and model_args.use_peft
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps == 64
    assert args.output_dir == content["output_dir"] == f"outputs/{path.stem}"
    assert script_args.reward_funcs == ["accuracy_reward"]


@pytest.mark.parametrize("path", SIZES, ids=lambda path: path.name)
def test_heads_say_hardware_and_a_launch_line_that_starts(path, monkeypatch):
    head = path.read_text().partition("output_dir:")[0]
    assert re.search(r"^# Sized for: .*GPU.* GB", head, re.MULTILINE)
    (line,) = re.findall(r"^# Launch: (.+)$", head, re.MULTILINE)
    tool, *arguments = shlex.split(line)
    assert tool == "trl-klx" and f"recipes/{path.name}" in arguments
    launched = []
    monkeypatch.chdir(RECIPES.parent)
    monkeypatch.setattr(train, "launch_command", launched.append)
    assert main(arguments) == 0
    (launch,) = launched
    processes = re.search(r"--num_processes (\d+)", line)
    assert launch.num_processes == (int(processes[1]) if processes else None)
