"""
On-policy distillation next to TRL's own trainer: the same student, teacher, prompts, number of samples and learning
rate. The teacher is a small pretrained model, the student the same model without its last layers.

```bash
python benchmarks/distill.py --assets ASSETS --json distill.json           # half an hour; can be stopped
python benchmarks/distill.py --assets ASSETS --steps 24 --cost             # CPU time and memory of training by itself
```

`ASSETS` is described in `promise.py`. The KL is exact, on samples of the student that are drawn for the measurement.
CPU time is that of training alone, without the measurements. Memory is the process's peak, to which a measurement may
add: with `--cost` there is none.
"""

import argparse
import json
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

from measuring import MARK, PLAIN_RUN, Results, stoppable, take_turns


LAYERS, LENGTH, BATCH, RATE = 3, 48, 32, 1e-3
RUNS = {
    "TRL's `DistillationTrainer`": None,
    "exact KL in the loss": {"kl_placement": "loss", "kl_estimator": "full"},
    "`k1` in the advantage": {"kl_placement": "advantage", "kl_centering": "none"},
    "`k1` in the advantage, centered": {"kl_placement": "advantage"},
}
POINTS = 4  # measurements during a run


def run_once(case: dict) -> None:
    """Train once in this process, and print the KL to the teacher on the way, CPU time and memory."""
    import torch
    from stories import exact_kl, load_prompts, model_path
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, set_seed
    from trl import DistillationConfig, DistillationTrainer

    from trl_klx import KLXGRPOConfig, KLXGRPOTrainer

    torch.set_num_threads(1)
    path = model_path(case["assets"], case.get("model"))
    set_seed(case["seed"])
    tokenizer = AutoTokenizer.from_pretrained(path)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    teacher, student, judge = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for _ in range(3))
    del student.model.layers[LAYERS:]
    student.config.num_hidden_layers = LAYERS
    every = case["steps"] // POINTS

    class Measure(TrainerCallback):
        def __init__(self):
            self.kls, self.stamps, self.paused = [], [], 0.0

        def measure(self, model):
            if case.get("cost"):
                return
            began = time.process_time()
            with torch.random.fork_rng():
                torch.manual_seed(0)
                self.kls.append(exact_kl(model, judge, tokenizer, prompts, LENGTH)[1])
            self.paused += time.process_time() - began

        def on_train_begin(self, args, state, control, model=None, **kwargs):
            self.measure(model)
            self.stamps.append(time.process_time() - self.paused)

        def on_step_end(self, args, state, control, model=None, **kwargs):
            self.stamps.append(time.process_time() - self.paused)
            if state.global_step % every == 0:
                self.measure(model)

    with tempfile.TemporaryDirectory() as folder:
        dataset = load_prompts(Path(case["assets"]), folder)
        prompts = dataset[:128]["prompt"]
        common = {
            **PLAIN_RUN,
            "output_dir": folder,
            "logging_steps": case["steps"],
            "lr_scheduler_type": "constant",
            "temperature": 1.0,
            "seed": case["seed"],
            "max_steps": case["steps"],
            "learning_rate": RATE,
            "per_device_train_batch_size": BATCH,
            "max_completion_length": LENGTH,
        }
        fields, measure = RUNS[case["run"]], Measure()
        shared = {"train_dataset": dataset, "processing_class": tokenizer, "callbacks": [measure]}
        if fields is None:
            # The reverse KL.
            trainer = DistillationTrainer(student, teacher, DistillationConfig(**common, beta=1.0), **shared)
        else:
            args = KLXGRPOConfig(**common, num_generations=1, kl_penalty_coef=1.0, **fields)
            trainer = KLXGRPOTrainer(student, None, args, ref_model=teacher, **shared)
        trainer.train()
    steps = [after - before for before, after in zip(measure.stamps[1:], measure.stamps[2:], strict=False)]
    result = {
        "kl": measure.kls,
        "seconds": statistics.median(steps),
        "fastest": min(steps),
        "megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    print(MARK + json.dumps(result), flush=True)


def kl_after(means: list[float], every: int, seconds: float, budget: float) -> float:
    """The KL after `budget` seconds, between the measurements on a straight line."""
    position = min(budget / seconds / every, len(means) - 1)
    before = min(int(position), len(means) - 2)
    return means[before] + (means[before + 1] - means[before]) * (position - before)


def show_cost(cases: list[dict], results: Results) -> None:
    """
    CPU time and memory of each run, by seed, and their medians as shares of the first run's. On a machine that does
    other work too, the fastest steps scatter less than the median ones.
    """
    print("| run | median step, CPU s | of TRL's | fastest step, CPU s | of TRL's | MB | of TRL's |")
    print("|---|---|---|---|---|---|---|")
    first = {}
    for name in RUNS:
        cells = []
        for key, digits in (("seconds", 3), ("fastest", 3), ("megabytes", 0)):
            own = [results.median(case, key) for case in cases if case["run"] == name and results.count(case)]
            median = statistics.median(own)
            share = median / first.setdefault(key, median)
            cells += [" ".join(f"{value:.{digits}f}" for value in own), f"{share:.2f}"]
        print(f"| {name} | {' | '.join(cells)} |")


def show(cases: list[dict], results: Results) -> None:
    steps = cases[0]["steps"]
    samples = [BATCH * steps * point // POINTS for point in range(POINTS + 1)]
    done = {name: [case for case in cases if case["run"] == name and results.count(case)] for name in RUNS}
    done = {name: [results.runs[results.key(case)][0] for case in own] for name, own in done.items() if own}
    budget = steps * min(statistics.median(run["seconds"] for run in runs) for runs in done.values())
    counts = " | ".join(f"{count} samples" for count in samples)
    print(f"| run | {counts} | last, by seed | CPU s per step | after {budget:.0f} CPU s | MB |")
    print("|---|" + "---|" * (len(samples) + 4))
    for name, runs in done.items():
        means = [statistics.fmean(run["kl"][point] for run in runs) for point in range(len(samples))]
        last = " ".join(f"{run['kl'][-1]:.3f}" for run in runs)
        seconds, megabytes = (statistics.median(run[key] for run in runs) for key in ("seconds", "megabytes"))
        equal = kl_after(means, steps // POINTS, seconds, budget)
        cells = " | ".join(f"{kl:.3f}" for kl in means)
        print(f"| {name} | {cells} | {last} | {seconds:.2f} | {equal:.3f} | {megabytes:.0f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--assets", type=Path, help="folder made by fetch_stories.py")
    parser.add_argument("--model", help="causal language model, folder or Hub id (default: stories260K of the assets)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[10, 11, 12])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--cost", action="store_true", help="measure CPU time and memory only")
    parser.add_argument("--json", type=Path, help="keep the results in this file, and continue from it")
    options = parser.parse_args()
    if options.run:
        run_once(json.loads(options.run))
        return
    if options.assets is None:
        parser.error("--assets is required")
    cases = [
        {"run": name, "seed": seed, "steps": options.steps, "assets": str(options.assets)}
        for seed in options.seeds
        for name in RUNS
    ]
    if options.model is not None:
        cases = [case | {"model": options.model} for case in cases]
    if options.cost:
        cases = [case | {"cost": True} for case in cases]
    results = Results(options.json)
    with stoppable():
        take_turns(__file__, [cases], results, 1, lambda case: sys.executable)
    (show_cost if options.cost else show)(cases, results)


if __name__ == "__main__":
    main()
