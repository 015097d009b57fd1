"""
Kill training runs with `kill -9` at random moments, resume them, and compare them with uninterrupted runs.

Usage: fault_kills.py FOLDER KILLS_PER_TRAINER SEED. Prints one JSON line per kill. Everything is imported once; each
run is a fork of this process.
"""

import gc
import json
import os
import random
import shutil
import signal
import sys
import time
import warnings
from functools import partial
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from support.resumption import build_run, kill_self, outcome
from support.tiny import trained_lora
from support.tiny_ppo import build_resumed_run, ppo_outcome
from trl_klx.checkpoints.integrity import checkpoint_fault
from trl_klx.references.loading import saved_steps


torch.set_num_threads(1)
gc.freeze()

# By trainer: its runs, and the steps after which each run saves and ends.
RUNS = {
    "GRPO": (["adapter", "lag", "full-sync", "step"], 2, 6),
    "RLOO": (["sync", "adapter-rloo"], 2, 6),
    "PPO": (["head", "lora-adapter", "value_model"], 4, 12),
}
PHASES = {"rollout": "_generate_and_score_completions", "loss": "_compute_loss", "save": "_save_checkpoint"}


def build(trainer: str, run: str, folder: Path, adapter: str):
    return (build_resumed_run if trainer == "PPO" else build_run)(run, str(folder), adapter)


def result(trainer) -> dict:
    """All that must be the same after a kill: the logs, the weights, and every state."""
    if hasattr(trainer, "_ppo_scaler"):
        found = ppo_outcome(trainer)
    else:
        found = dict(zip(("history", "weights"), outcome(trainer), strict=True))
    found["controller"] = trainer.kl_controller.state_dict()
    found["drift"] = trainer.kl_control.drift.state_dict()
    found["reference"] = {name: weight.detach() for name, weight in trainer.kl_reference.weights().items()}
    return found


def differences(one: dict, other: dict) -> list[str]:
    """The entries that are not equal to the bit."""
    tensors = ("weights", "reference")
    different = [key for key in one if key not in tensors and one[key] != other[key]]
    for key in tensors:
        if one[key].keys() != other[key].keys():
            different.append(key)
        else:
            different += [name for name in one[key] if not torch.equal(one[key][name], other[key][name])]
    return different


def in_child(action) -> int:
    """Run in a fork, which exits with 0 unless it raises. Returns its process id."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            action()
            code = 0
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(code)
    return child


def ends(child: int) -> str:
    _, status = os.waitpid(child, 0)
    return f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit {os.WEXITSTATUS(status)}"


def kill(trainer: str, run: str, folder: Path, adapter: str, phase: str, step: int, delay: float | None) -> bool:
    """
    Start a run and kill it `delay` seconds after it enters a phase with `step` steps done, or, without a delay, in the
    middle of the save. Returns whether it was still running then.
    """
    reader, writer = os.pipe()

    def train():
        built = build(trainer, run, folder, adapter)
        method = getattr(built, PHASES[phase])

        def announced(*args, **kwargs):
            if built.state.global_step == step:
                os.write(writer, b".")
                if delay is None:
                    built._save_optimizer_and_scheduler = lambda *args: kill_self()
            return method(*args, **kwargs)

        setattr(built, PHASES[phase], announced)
        built.train()

    child = in_child(train)
    os.close(writer)
    assert os.read(reader, 1), "the run never got there"
    if delay is not None:
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
    os.close(reader)
    return ends(child) == "signal 9"


def came_too_late(folder: Path, phase: str, last: int) -> bool:
    """
    Whether the run was over with its last checkpoint complete, or a kill meant for a moment outside a save hit the
    next one. If resumed, a finished run would train one step too many, as any run of transformers does.
    """
    newest = max(saved_steps(str(folder)), default=None)
    if newest is None:
        return False
    whole = checkpoint_fault(str(folder / f"checkpoint-{newest}")) is None
    return newest == last if whole else phase != "save"


def train_whole(trainer: str, run: str, folder: Path, adapter: str, whole: Path) -> None:
    """Train without interruption, and keep the outcome and the duration of each phase."""
    built = build(trainer, run, folder, adapter)
    lengths: dict[str, float] = {}

    def timed(phase: str, method):
        def call(*args, **kwargs):
            start = time.monotonic()
            try:
                return method(*args, **kwargs)
            finally:
                lengths[phase] = max(lengths.get(phase, 0.0), time.monotonic() - start)

        return call

    for phase, name in PHASES.items():
        setattr(built, name, timed(phase, getattr(built, name)))
    built.train()
    torch.save({"lengths": lengths, "result": result(built)}, whole)


def resume(trainer: str, run: str, folder: Path, adapter: str, whole: Path, report: Path) -> None:
    """Resume a killed run as a user would, and compare it with the uninterrupted one."""
    found = {"resumed_from": None, "torn": None}
    built = build(trainer, run, folder, adapter)
    load = built._load_from_checkpoint

    def note(checkpoint, *args):
        found["resumed_from"] = Path(checkpoint).name
        return load(checkpoint, *args)

    built._load_from_checkpoint = note
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            built.train(resume_from_checkpoint=True)
        except ValueError as error:
            # Killed before the first checkpoint was complete.
            found["refused"] = str(error)
            built = build(trainer, run, folder, adapter)
            built.train()
    texts = [str(warning.message) for warning in caught if "is not whole" in str(warning.message)]
    if texts:
        found["torn"] = texts[0]
    expected = torch.load(whole, weights_only=False)["result"]
    found["steps"] = built.state.global_step
    found["different"] = differences(expected, result(built))
    report.write_text(json.dumps(found))


def main() -> None:
    root, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    draw = random.Random(seed)
    adapter = str(root / "adapter")
    assert ends(in_child(lambda: trained_lora(2, scale=0.1).save_pretrained(adapter))) == "exit 0"
    for trainer, (runs, every, last) in RUNS.items():
        for number in range(kills):
            run, phase = runs[number // len(PHASES) % len(runs)], list(PHASES)[number % len(PHASES)]
            whole, folder, report = root / f"{trainer}-{run}.pt", root / f"{trainer}-{number}", root / "report.json"
            if not whole.exists():
                arguments = (trainer, run, root / f"{trainer}-{run}", adapter, whole)
                assert ends(in_child(partial(train_whole, *arguments))) == "exit 0"
            if phase == "save":
                step = draw.choice([every, 2 * every, last])  # the first save leaves nothing to resume from
            elif phase == "rollout":
                step = every * draw.randrange(1, last // every)  # the phase begins where a checkpoint ends
            else:
                step = draw.randrange(every, last)
            length = torch.load(whole, weights_only=False)["lengths"][phase]
            delay = draw.uniform(0.0, 0.9) * length
            if phase == "save" and number < len(PHASES):
                delay = None  # so that each trainer leaves a torn checkpoint, whatever the load of the machine
            # Durations were measured once, and the machine may have become faster since.
            while not kill(trainer, run, folder, adapter, phase, step, delay) or came_too_late(folder, phase, last):
                shutil.rmtree(folder)
                delay /= 4
            left = [f"checkpoint-{saved}" for saved in saved_steps(str(folder))]
            report.unlink(missing_ok=True)
            end = ends(in_child(partial(resume, trainer, run, folder, adapter, whole, report)))
            line = {"trainer": trainer, "run": run, "phase": phase, "step": step, "delay": delay, "left": left}
            line |= {"end": end} | (json.loads(report.read_text()) if report.exists() else {})
            print("KILL " + json.dumps(line), flush=True)
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
