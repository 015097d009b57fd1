"""
What resets of the reference are worth: the reward of a run that holds a small KL target, and of the same run whose
reference becomes the policy whenever the reward has stopped rising.

Both train a small pretrained model with a sentiment reward (`stories.py`) at the same `kl_target`, for the same number
of steps. The KL to the initial model shows what the reward was bought with: resets let it grow.

```bash
python benchmarks/resets.py --assets ASSETS --json resets.json                 # half an hour; can be stopped
python benchmarks/resets.py --assets ASSETS --json resets.json --figure docs/img/resets.png
```

`ASSETS` is described in `promise.py`.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from measuring import MARK, PLAIN_RUN, Results, stoppable, take_turns


TARGET, RATE, LENGTH, PATIENCE = 1.0, 2e-4, 48, 16
# What each run adds to a `kl_target`.
RUNS = {
    "one reference": {},
    "resets": {"kl_ref_reset_patience": PATIENCE},
    "resets, optimizer too": {"kl_ref_reset_patience": PATIENCE, "kl_ref_reset_optimizer": True},
}
LAST = 20  # batches at the end over which the reward is averaged


def run_once(case: dict) -> None:
    """Train once in this process, and print KL, reward and resets of every batch."""
    import torch
    from stories import exact_kl, load_task, model_path, vader
    from transformers import AutoModelForCausalLM, set_seed

    from trl_klx import KLXGRPOConfig, KLXGRPOTrainer

    torch.set_num_threads(1)
    assets, path = Path(case["assets"]), model_path(case["assets"], case.get("model"))
    set_seed(case["seed"])
    with tempfile.TemporaryDirectory() as folder:
        tokenizer, model, dataset = load_task(assets, folder, path)
        args = KLXGRPOConfig(
            output_dir=folder,
            **PLAIN_RUN,
            lr_scheduler_type="constant",
            temperature=1.0,
            seed=case["seed"],
            max_steps=case["batches"],
            learning_rate=RATE,
            per_device_train_batch_size=32,
            num_generations=4,
            max_completion_length=LENGTH,
            kl_target=TARGET,
            **RUNS[case["run"]],
        )
        trainer = KLXGRPOTrainer(model, vader, args, dataset, processing_class=tokenizer)
        trainer.train()
    history = [entry for entry in trainer.state.log_history if "klx/kl" in entry]
    result = {name: [entry[key] for entry in history] for name, key in (("kl", "klx/kl"), ("reward", "reward"))}
    result["resets"] = [entry.get("klx/reference_resets", 0.0) for entry in history]
    start = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    kl, _ = exact_kl(trainer.model, start, trainer.processing_class, dataset[:256]["prompt"], LENGTH)
    result["kl_to_start"] = kl
    print(MARK + json.dumps(result), flush=True)


def show(cases: list[dict], results: Results) -> None:
    print(f"| run | reward, last {LAST} batches | by seed | resets | KL, second half | KL to the initial model |")
    print("|---|---|---|---|---|---|")
    for name in RUNS:
        runs = [results.runs[results.key(case)][0] for case in cases if case["run"] == name and results.count(case)]
        if not runs:
            continue
        rewards = [statistics.fmean(run["reward"][-LAST:]) for run in runs]
        columns = {
            "3f": rewards,
            "0f": [run["resets"][-1] for run in runs],
            "2f": [statistics.fmean(run["kl"][len(run["kl"]) // 2 :]) for run in runs],
            "1f": [run["kl_to_start"] for run in runs],
        }
        shown = [" ".join(f"{value:.{form}}" for value in values) for form, values in columns.items()]
        print(f"| {name} | {statistics.fmean(rewards):.3f} | {' | '.join(shown)} |")


def draw(cases: list[dict], results: Results, path: Path) -> None:
    """Reward and KL of the first seed, with and without resets."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 3.4), layout="constrained")
    axes = figure.subplots(1, 2)
    seed = cases[0]["seed"]
    for name, color in zip(RUNS, ("0.5", "tab:blue", "tab:green"), strict=True):
        case = next(case for case in cases if case["run"] == name and case["seed"] == seed)
        if not results.count(case):
            continue
        run = results.runs[results.key(case)][0]
        ends = range(10, len(run["reward"]) + 1)
        axes[0].plot(ends, [statistics.fmean(run["reward"][end - 10 : end]) for end in ends], color=color, label=name)
        axes[1].plot(run["kl"], color=color, linewidth=1.0)
    axes[0].set(xlabel="batch of 32 completions", ylabel="reward, mean of 10 batches")
    axes[1].set(xlabel="batch of 32 completions", ylabel="KL to the reference (nats per completion)")
    axes[0].legend()
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--assets", type=Path, help="folder made by fetch_stories.py")
    parser.add_argument("--model", help="causal language model, folder or Hub id (default: stories260K of the assets)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[10, 11, 12])
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=list(RUNS), metavar="RUN")
    parser.add_argument("--batches", type=int, default=120)
    parser.add_argument("--json", type=Path, help="keep the results in this file, and continue from it")
    parser.add_argument("--figure", type=Path, help="also draw the runs of the first seed")
    options = parser.parse_args()
    if options.run:
        run_once(json.loads(options.run))
        return
    if options.assets is None:
        parser.error("--assets is required")
    cases = [
        {"run": name, "seed": seed, "batches": options.batches, "assets": str(options.assets)}
        for seed in options.seeds
        for name in options.runs
    ]
    if options.model is not None:
        cases = [case | {"model": options.model} for case in cases]
    results = Results(options.json)
    with stoppable():
        take_turns(__file__, [cases], results, 1, lambda case: sys.executable)
    show(cases, results)
    if options.figure is not None:
        draw(cases, results, options.figure)


if __name__ == "__main__":
    main()
