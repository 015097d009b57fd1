"""
Runs of two processes, killed at random moments of several epochs, one process or both, and resumed: they end as a run
that nobody killed, to the bit.
"""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from support.engines import TORCHRUN, ZERO3, by_accelerate, needs_deepspeed
from support.tiny import assert_same_weights


SCRIPTS = Path(__file__).parents[1] / "scripts"
sys.path.insert(0, str(SCRIPTS))

from engine_cases import prepare  # noqa: E402


# By engine: how it is launched, and a run of it. The references move, so that a checkpoint has something to lose.
ENGINES = {
    "ddp": (TORCHRUN, "grpo-lora-lag"),
    "fsdp2": (by_accelerate("fsdp2.yaml"), "grpo-full-lag"),
    "zero3": (TORCHRUN, "ppo-full-lag"),
}
STEPS = 10  # of engine_killed.py
ENGINE = pytest.mark.parametrize("engine", ["ddp", "fsdp2", pytest.param("zero3", marks=needs_deepspeed)])
pytestmark = [pytest.mark.engines, pytest.mark.xdist_group("engines")]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(engine: str, folder: Path, output: Path) -> subprocess.Popen:
    launch, case = ENGINES[engine]
    if launch is not TORCHRUN:
        launch = [*launch, "--main_process_port", str(free_port())]
    output.mkdir(exist_ok=True)
    for name in ("pid-0", "pid-1", *(f"step-{step}" for step in range(1, STEPS + 1))):
        (output / name).unlink(missing_ok=True)
    # A killed process leaves a lock on what DeepSpeed compiles, for which the next one would wait for ever.
    extensions = folder / "extensions"
    for lock in extensions.rglob("lock"):
        lock.unlink()
    environment = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(extensions)}
    log = open(output / "log.txt", "w")  # noqa: SIM115, the process writes it
    return subprocess.Popen(
        [sys.executable, "-m", *launch, str(SCRIPTS / "engine_killed.py"), str(folder), str(output), engine, case],
        env=os.environ | environment,
        stdout=log,
        stderr=log,
    )


def finish(engine: str, folder: Path, output: Path) -> list[dict]:
    code = start(engine, folder, output).wait(timeout=600)
    assert code == 0, (output / "log.txt").read_text()[-8000:]
    return [json.loads((output / f"result-{rank}.json").read_text()) for rank in (0, 1)]


def kill(engine: str, folder: Path, output: Path, step: int, delay: float, ranks: list[int]) -> None:
    """Kill processes some time after a step began."""
    process = start(engine, folder, output)
    try:
        limit = time.monotonic() + 600
        while not (output / f"step-{step}").exists():
            assert process.poll() is None, (output / "log.txt").read_text()[-8000:]
            assert time.monotonic() < limit
            time.sleep(0.01)
        time.sleep(delay)
        for rank in ranks:
            if process.poll() is None:
                os.kill(int((output / f"pid-{rank}").read_text()), signal.SIGKILL)
        process.wait(timeout=300)
    finally:
        process.kill()


def check_kills(engine: str, folder: Path, pairs: int, seed: int) -> None:
    prepare(folder)
    (folder / "zero3.json").write_text(json.dumps(ZERO3))
    draw = random.Random(seed)
    whole = finish(engine, folder, folder / "whole")
    assert whole[0]["epoch"] > 2 and len(whole[0]["series"]) == STEPS
    first, last = ((folder / "whole" / f"step-{step}").stat().st_mtime for step in (1, STEPS))
    for number in range(pairs):
        output = folder / f"killed-{number}"
        # The first kill falls into the first epoch, the second into the second or third, of the resumed run.
        kills = [
            (draw.randrange(*steps), draw.uniform(0.0, 1.5), draw.choice([[0], [1], [0, 1]]))
            for steps in ((1, 5), (5, STEPS))
        ]
        pace = (last - first) / (STEPS - 1)
        while not output.exists():
            for step, share, ranks in kills:
                print(f"{engine}: step {step} + {share * pace:.2f} s, ranks {ranks}", flush=True)
                kill(engine, folder, output, step, share * pace, ranks)
            if (output / "run" / f"checkpoint-{STEPS}").exists():
                # The run was faster than the first one, and the kill came too late.
                shutil.rmtree(output)
                pace /= 4
        assert finish(engine, folder, output) == whole
        saved, expected = (sorted((place / "saved").glob("*.safetensors")) for place in (output, folder / "whole"))
        assert [file.name for file in saved] == [file.name for file in expected] and saved
        for one, other in zip(saved, expected, strict=True):
            assert_same_weights(load_file(one), load_file(other))


@pytest.mark.slow
@ENGINE
def test_two_kills(engine, tmp_path):
    check_kills(engine, tmp_path, pairs=1, seed=0)


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@ENGINE
def test_twenty_kills(engine, tmp_path):
    seed = int(time.time())
    print(f"seed {seed}")
    check_kills(engine, tmp_path, pairs=10, seed=seed)
