"""A launch is reported only if it differs from the requested one, and accelerate accepts the launch files."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DistributedType

from support.tiny import build_trainer
from trl_klx import KLXGRPOTrainer
from trl_klx.trainers.launch_check import find_launch_faults


ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes" / "accelerate"
SCRIPT = Path(__file__).parents[1] / "scripts" / "engine_launch.py"
LAUNCH = "accelerate.commands.launch"
# Environment variables that an outer launcher leaves in the process that launches another one here.
LEFT_BEHIND = re.compile(r"ACCELERATE_|FSDP_|MASTER_|WORLD_SIZE|RANK|LOCAL_|TORCHELASTIC_|GROUP_|ROLE_")


def launch(folder: Path, module: str | None, *flags: str, use_cpu: bool = True) -> list[dict]:
    """The reports of all processes that a launcher started."""
    command = [sys.executable, *(["-m", module] if module else []), *flags, str(SCRIPT), str(folder)]
    environment = {name: value for name, value in os.environ.items() if not LEFT_BEHIND.match(name)}
    result = subprocess.run(
        [*command, "cpu" if use_cpu else "any"],
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    reports = [json.loads(file.read_text()) for file in sorted(folder.glob("process*.json"))]
    for report in reports:
        # Reported as a warning and in the log.
        assert len(report["warnings"]) == len(report["faults"])
        for fault, warning in zip(report["faults"], report["warnings"], strict=True):
            assert fault in warning and fault in result.stderr
    return reports


def launched(test):
    """Marks of a test that starts processes."""
    return pytest.mark.engines(pytest.mark.slow(pytest.mark.xdist_group("engines")(test)))


def write_config(folder: Path, **settings) -> str:
    """A launch file for accelerate with a free port."""
    defaults = {
        "num_machines": 1,
        "num_processes": 2,
        "main_process_port": 0,
        "mixed_precision": "no",
        "use_cpu": True,
    }
    path = folder / "config.json"
    path.write_text(json.dumps(defaults | {"compute_environment": "LOCAL_MACHINE"} | settings))
    return str(path)


@launched
def test_a_launch_as_asked_for_is_not_spoken_of(tmp_path):
    (report,) = launch(tmp_path, None)
    assert (report["num_processes"], report["faults"]) == (1, [])


@pytest.mark.parametrize("recipe", ["single.yaml", "multi_gpu.yaml"])
@launched
def test_recipes_for_cpus_launch_what_they_say(recipe, tmp_path):
    reports = launch(tmp_path, LAUNCH, "--config_file", str(RECIPES / recipe))
    expected = 1 if recipe == "single.yaml" else 2
    assert [report["num_processes"] for report in reports] == [expected] * expected
    assert {report["distributed_type"] for report in reports} == {"NO" if expected == 1 else "MULTI_CPU"}
    assert [report["faults"] for report in reports] == [[]] * expected


@launched
def test_processes_that_were_never_started(tmp_path):
    (report,) = launch(tmp_path, LAUNCH, "--cpu", "--num_processes", "2")
    assert report["num_processes"] == 1 and "WORLD_SIZE" not in report["environment"]
    (fault,) = report["faults"]
    assert "asked for several processes and started one" in fault and "torchrun --nproc_per_node N" in fault


@launched
def test_one_process_that_was_asked_for(tmp_path):
    (report,) = launch(tmp_path, LAUNCH, "--cpu", "--num_processes", "1")
    assert report["faults"] == []


@launched
def test_processes_of_a_multi_cpu_file_that_were_never_started(tmp_path):
    config = write_config(tmp_path, distributed_type="MULTI_CPU")
    (report,) = launch(tmp_path, LAUNCH, "--config_file", config)
    assert report["num_processes"] == 1
    assert "asked for several processes and started one" in report["faults"][0]


@launched
def test_worlds_of_one(tmp_path):
    flags = ["--standalone", "--nproc_per_node", "2"]
    reports = launch(tmp_path, "torch.distributed.run", *flags, use_cpu=False)
    if len(reports) == 2 and reports[0]["num_processes"] == 2:
        pytest.skip("this machine has GPUs: the two processes found each other without `use_cpu`")
    assert [report["num_processes"] for report in reports] == [1, 1]
    for report in reports:
        assert "each of them trains a separate model" in report["faults"][0]
        assert "`use_cpu=True`" in report["faults"][0]


@launched
def test_sharding_that_was_asked_for_and_not_got(tmp_path):
    reports = launch(tmp_path, LAUNCH, "--config_file", str(RECIPES / "fsdp2.yaml"))
    assert [report["distributed_type"] for report in reports] == ["MULTI_CPU", "MULTI_CPU"]
    # In a group of processes, only the main process logs.
    for report in reports:
        assert "FSDP was asked for" in report["faults"][0] and "recipes/accelerate/fsdp2.yaml" in report["faults"][0]


@pytest.mark.parametrize(
    ("environment", "num_processes", "kind", "expected"),
    [
        ({}, 1, "NO", None),
        ({"WORLD_SIZE": "1", "LOCAL_RANK": "0"}, 1, "MULTI_GPU", None),
        ({"WORLD_SIZE": "8", "LOCAL_RANK": "0"}, 8, "FSDP", None),
        ({"WORLD_SIZE": "8", "ACCELERATE_USE_FSDP": "true"}, 8, "FSDP", None),
        ({"WORLD_SIZE": "8", "ACCELERATE_USE_DEEPSPEED": "true"}, 8, "DEEPSPEED", None),
        ({"WORLD_SIZE": "8"}, 4, "MULTI_GPU", "8 processes were launched"),
        ({"WORLD_SIZE": "2", "ACCELERATE_USE_DEEPSPEED": "true"}, 2, "MULTI_CPU", "DeepSpeed was asked for"),
        ({"ACCELERATE_USE_FSDP": "True"}, 1, "NO", "FSDP was asked for"),
        # A cluster's own variables are no reason to complain about a run that accelerate did not launch.
        ({"MASTER_PORT": "29500", "MASTER_ADDR": "node1"}, 1, "NO", None),
        ({"MASTER_PORT": "29500", "ACCELERATE_USE_CPU": "False"}, 1, "NO", "asked for several processes"),
    ],
)
def test_faults(environment, num_processes, kind, expected):
    faults = find_launch_faults(environment, num_processes, DistributedType(kind))
    if expected is None:
        assert faults == []
    else:
        assert len(faults) == 1 and expected in faults[0]


def test_trainers_look(tmp_path, monkeypatch):
    # The environment of `accelerate launch --cpu --num_processes 2`.
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.warns(UserWarning, match="was asked for several processes and started one"):
        build_trainer(KLXGRPOTrainer, tmp_path)


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.name)
def test_every_launch_file_is_accelerates(path):
    config = load_config_from_file(str(path))
    kinds = {"single": "NO", "multi_gpu": "MULTI_GPU", "fsdp2": "FSDP", "zero2": "DEEPSPEED", "zero3": "DEEPSPEED"}
    assert config.distributed_type == kinds[path.stem]
    assert config.num_processes == (1 if path.stem == "single" else 2) and config.num_machines == 1
    if path.stem == "fsdp2":
        assert config.fsdp_config["fsdp_version"] == 2
    if path.stem.startswith("zero"):
        assert config.deepspeed_config["zero_stage"] == int(path.stem[-1])
    header = [line for line in path.read_text().splitlines() if line.startswith("#")]
    text = "\n".join(header)
    assert path.read_text().startswith("#") and "# Hardware:" in text
    (command,) = re.findall(r"# Launch: (accelerate launch .*)", text)
    assert f"--config_file recipes/accelerate/{path.name}" in command
    for file in re.findall(r"recipes/\S+\.(?:yaml|py)", command):
        assert (ROOT / file).is_file(), file
