"""
How the cost of KL control grows: with the processes, with the batch, with the lag of a reference.

```bash
python benchmarks/growth.py                       # all parts, some minutes
python benchmarks/growth.py --part processes
```

- `processes`: real GRPO runs with 1 to 8 processes (gloo). Counts the collective operations of a step and the bytes
  that each process gives to them, and takes off those of TRL's own trainer with `beta`. DDP's gradients are the same
  in both and are not counted.
- `batch`: CPU time of what is done per generation batch besides forward passes, on tensors of many shapes, and a line
  through it. Times are those of one thread.
- `lag`: CPU time of a step of `kl_ref_lag=N`, and what it keeps.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from measuring import MARK, PLAIN_RUN, build_tokenizer, llama_config


PROCESSES, STEPS, ROWS = (1, 2, 4, 8), 4, 4
RUNS = {
    "TRL, `beta`": {"beta": 0.04},
    "`kl_target`": {"kl_target": 1.0},
    "`kl_target`, `kl_centering='group'`": {"kl_target": 1.0, "kl_centering": "group"},
    "`kl_target`, `kl_placement='loss'`": {"kl_target": 1.0, "kl_placement": "loss", "kl_estimator": "k3"},
    "`kl_target`, `kl_ref_reset_patience`": {"kl_target": 1.0, "kl_ref_reset_patience": 2},
}
# What a step sends beyond TRL's, as docs/costs.md has it: the batch's sums in fp64, and what centers them in fp32. TRL
# sends two numbers in fp32 for the KL that it logs.
FORMULAS = {
    "`kl_target`": 8 * 15 + 4 * 2 - 4 * 2,
    "`kl_target`, `kl_centering='group'`": 8 * 15 + 4 * 3 * ROWS - 4 * 2,
    "`kl_target`, `kl_placement='loss'`": 8 * 14 - 4 * 2,
    "`kl_target`, `kl_ref_reset_patience`": 8 * 17 + 4 * 2 - 4 * 2,
}
COLLECTIVES = ("all_reduce", "all_gather", "all_gather_into_tensor", "broadcast", "all_gather_object")


class Counter:
    """Counts collective operations and the bytes that this process gives to them."""

    def __init__(self):
        import torch.distributed as dist

        self.calls, self.bytes = 0, 0
        for name in COLLECTIVES:
            setattr(dist, name, self.counted(name, getattr(dist, name)))

    def counted(self, name: str, function):
        # The tensor that is sent is the last of the positional ones where there is one to receive.
        index = 1 if "gather" in name else 0

        def call(*args, **kwargs):
            self.calls += 1
            if name == "all_gather_object":
                self.bytes += len(repr(args[1]))
            else:
                self.bytes += args[index].nbytes
            return function(*args, **kwargs)

        return call


def run_of_processes(name: str) -> None:
    """Train in a group of processes, and print from the first what a step sends."""
    import torch
    import torch.distributed as dist
    from datasets import Dataset
    from transformers import LlamaForCausalLM, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from trl_klx import KLXGRPOConfig, KLXGRPOTrainer

    counter, steps, fields = Counter(), [], RUNS[name]

    class Watch(TrainerCallback):
        def on_log(self, args, state, control, **kwargs):
            steps.append((counter.calls, counter.bytes))

    torch.manual_seed(0)
    ours = "beta" not in fields
    config_class, trainer_class = (KLXGRPOConfig, KLXGRPOTrainer) if ours else (GRPOConfig, GRPOTrainer)
    with tempfile.TemporaryDirectory() as folder:
        policy = LlamaForCausalLM(llama_config(hidden=48, layers=1, vocabulary=64))
        policy.save_pretrained(f"{folder}/policy")
        args = config_class(
            output_dir=os.environ["GROWTH_FOLDER"],
            **PLAIN_RUN | {"save_strategy": "steps"},
            save_steps=STEPS,
            max_steps=STEPS,
            per_device_train_batch_size=ROWS,
            num_generations=2,
            max_completion_length=8,
            model_init_kwargs={"dtype": "float32"},
            **fields,
        )
        trainer = trainer_class(
            f"{folder}/policy",
            reward_funcs=lambda completion_ids, **kwargs: [sum(ids) % 7 / 7 for ids in completion_ids],
            args=args,
            processing_class=build_tokenizer(64),
            train_dataset=Dataset.from_dict({"prompt": [f"w{4 + i % 60}" for i in range(256)]}),
            callbacks=[Watch()],
        )
        trainer.train()
    if trainer.accelerator.is_main_process:
        saved = Path(os.environ["GROWTH_FOLDER"]) / f"checkpoint-{STEPS}"
        # The first step, and the checkpoint at the last, send more.
        (calls, sent), (last_calls, last_sent) = steps[0], steps[-2]
        between = len(steps) - 2
        result = {
            "calls": (last_calls - calls) / between,
            "bytes": (last_sent - sent) / between,
            "kept": sum(file.stat().st_size for file in saved.glob("kl_*")),
        }
        print(MARK + json.dumps(result), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


def grow_with_processes() -> None:
    counts = " | ".join(f"{count} processes" for count in PROCESSES)
    print(f"| run | {counts} | bytes by formula | KL files of a checkpoint |")
    print("|---|" + "---|" * (len(PROCESSES) + 2))
    base = {}
    for name in RUNS:
        cells, kept = [], 0
        for count in PROCESSES:
            with tempfile.TemporaryDirectory() as folder:
                launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}"]
                process = subprocess.run(
                    [*launch, __file__, "--worker", name],
                    capture_output=True,
                    text=True,
                    env={**os.environ, "GROWTH_FOLDER": folder},
                )
            lines = [line for line in process.stdout.splitlines() if MARK in line]
            if not lines:
                raise RuntimeError(process.stderr[-3000:])
            result = json.loads(lines[-1].split(MARK)[1])
            calls, sent, kept = result["calls"], result["bytes"], result["kept"]
            if "beta" in RUNS[name]:
                base[count] = (calls, sent)
                cells.append(f"{calls:g} calls, {sent:g} bytes")
            else:
                cells.append(f"{calls - base[count][0]:+g} calls, {sent - base[count][1]:+g} bytes")
        formula = f"{FORMULAS[name]:+}" if name in FORMULAS else ""
        print(f"| {name} | {' | '.join(cells)} | {formula} | {kept} bytes |", flush=True)


def timed(call, repeats: int = 5) -> float:
    """Median CPU time of a call."""
    times = []
    for _ in range(repeats + 1):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return statistics.median(times[1:])


def line_through(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Offset and slope of a line, by least squares of the relative error."""
    weights = [1.0 / y**2 for _, y in points]
    total = sum(weights)
    x_mean = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    y_mean = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    slope = sum(w * (x - x_mean) * (y - y_mean) for w, (x, y) in zip(weights, points, strict=True))
    slope /= sum(w * (x - x_mean) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    return y_mean - slope * x_mean, slope


def grow_with_batch() -> None:
    import torch

    from trl_klx import KLControl, KLReference, Scored, get_kl_controller
    from trl_klx.control.rollout import Pull
    from trl_klx.maths.advantages import center_kl_advantages, discount_kl

    torch.set_num_threads(1)
    # As GRPO with `kl_target` does it: the default controller, which reads drive and drag from the batch.
    controller = get_kl_controller("hold", target=1.0)
    control = KLControl(controller, KLReference({"kind": "benchmark"}), name="hold", target=1.0)
    points = {"statistic and controller": [], "centering": [], "KL-to-go": []}
    print("| completions | tokens | " + " | ".join(f"{name}, ms" for name in points) + " |")
    print("|---|---|" + "---|" * len(points))
    for batch, length in itertools.product((8, 32, 128, 512, 2048), (64, 512, 4096)):
        policy, reference = -torch.rand(2, batch, length)
        mask = torch.arange(length) < torch.randint(length // 2, length + 1, (batch, 1))

        advantages = torch.randn(batch)

        def steer(policy=policy, reference=reference, mask=mask, advantages=advantages):
            rollout = control.begin()
            kl = control.measure(Scored(policy), Scored(reference))
            # Any tensor of this shape costs the same as the adjustment, whose making is the next column.
            control.add(rollout, kl, mask, charge=reference, pull=Pull(advantages))
            return control.finish(rollout, lambda totals: totals, train=True)

        calls = {
            "statistic and controller": steer,
            "centering": lambda kl=policy, mask=mask, advantages=advantages: center_kl_advantages(
                advantages, kl, mask, 0.1
            ),
            "KL-to-go": lambda kl=policy, mask=mask: discount_kl(kl, mask, 0.95),
        }
        seconds = {name: timed(call) for name, call in calls.items()}
        for name, value in seconds.items():
            points[name].append((batch * length, value))
        cells = " | ".join(f"{1000 * value:.2f}" for value in seconds.values())
        print(f"| {batch} | {length} | {cells} |", flush=True)
    for name, values in points.items():
        offset, slope = line_through(values)
        worst = max(abs(y / (offset + slope * x) - 1) for x, y in values)
        print(f"{name}: {1e6 * offset:.0f} us + {1e9 * slope:.1f} ns per token, off by at most {worst:.0%}")


def grow_with_lag() -> None:
    import torch

    from trl_klx.references.moving import LaggedReference

    torch.set_num_threads(1)
    numbers = 2**20
    print("| lag | CPU ms per step | on disk, in copies | in memory, in copies |")
    print("|---|---|---|---|")
    for lag in (1, 5, 50, 500):
        with tempfile.TemporaryDirectory() as folder:
            mover = LaggedReference(lag, folder)
            policy, reference = {"weight": torch.randn(numbers)}, {"weight": torch.randn(numbers)}
            times, before = [], os.sysconf("SC_PAGE_SIZE") * int(Path("/proc/self/statm").read_text().split()[1])
            for step in range(1, lag + 21):
                start = time.process_time()
                mover.step(step, policy, reference)
                times.append(time.process_time() - start)
            after = os.sysconf("SC_PAGE_SIZE") * int(Path("/proc/self/statm").read_text().split()[1])
            copies = len(mover.kept_steps)
        memory = (after - before) / (4 * numbers)
        print(f"| {lag} | {1000 * statistics.median(times[-20:]):.2f} | {copies} | {memory:.1f} |", flush=True)


PARTS = {"processes": grow_with_processes, "batch": grow_with_batch, "lag": grow_with_lag}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--part", choices=list(PARTS), help="(default: all)")
    options = parser.parse_args()
    if options.worker:
        run_of_processes(options.worker)
        return
    for name in [options.part] if options.part else PARTS:
        print(f"\n{name}", flush=True)
        PARTS[name]()


if __name__ == "__main__":
    main()
