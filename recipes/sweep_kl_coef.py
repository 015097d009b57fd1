"""
Sweep `kl_penalty_coef`: nine values from 0.0001 to 1.0, evenly spaced in logs, against the policy at step 0, 20 steps
each. Ends with the frontier of reward against KL as a figure and a CSV file, to pick a coefficient or a target from.

The default setup is that of `ppo_hh.py`: tiny models that the recipe trains first, offline, on a CPU.

```bash
accelerate launch recipes/sweep_kl_coef.py
accelerate launch recipes/sweep_kl_coef.py --coefs 0.01 0.1 1.0 --seeds 0 1 2 --max_steps 100
accelerate launch recipes/sweep_kl_coef.py --config my_grpo.yaml \
    --model_name_or_path Qwen/Qwen2.5-0.5B --dataset_name prompts.jsonl --reward my_rewards.score
```

Every run is recorded in `output_dir`, so the same command continues after an interruption.
"""

import csv
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from accelerate import PartialState

from hh.report import load_pyplot
from kl_lab import (
    LabArguments,
    Setting,
    by_label,
    parse,
    run_all,
    with_defaults,
)
from ppo_hh import exit_on_user_error, say


DEFAULT_CONFIG = Path(__file__).with_name("sweep_kl_coef.yaml")
COEFS = [float(f"{10 ** (-4 + power / 2):.3g}") for power in range(9)]
COLUMNS = ("coef", "kl", "kl_min", "kl_max", "reward", "reward_min", "reward_max", "perplexity", "seeds")


@dataclass
class SweepArguments(LabArguments):
    """
    Arguments of this script.

    Args:
        coefs (`list[float]`, *optional*, defaults to nine values from 0.0001 to 1.0):
            Values of `kl_penalty_coef`.
        last (`int`, *optional*, defaults to `5`):
            Number of batches at the end of a run to average KL and reward over.
    """

    coefs: list[float] = field(default_factory=lambda: list(COEFS), metadata={"help": "Values of kl_penalty_coef."})
    last: int = field(default=5, metadata={"help": "Number of batches at the end of a run to average over."})


def summarise(coef: float, records: list[dict], last: int) -> dict[str, float | int | None]:
    """One row of the frontier: means and extremes over the seeds."""
    kls, rewards = ([fmean(record[name][-last:]) for record in records] for name in ("kl", "reward"))
    perplexities = [record["perplexity"][-1][1] for record in records if record["perplexity"]]
    means = fmean(kls), min(kls), max(kls), fmean(rewards), min(rewards), max(rewards)
    row = (coef, *means, fmean(perplexities) if perplexities else None, len(records))
    return dict(zip(COLUMNS, row, strict=True))


def draw(rows: list[dict], path: Path) -> bool:
    pyplot = load_pyplot()
    if pyplot is None:
        return False
    figure, (frontier, response) = pyplot.subplots(1, 2, figsize=(11, 4.5), constrained_layout=True)
    kls, rewards, coefs = ([row[name] for row in rows] for name in ("kl", "reward", "coef"))

    def spread(name: str) -> list[list[float]]:
        return [[row[name] - row[f"{name}_min"] for row in rows], [row[f"{name}_max"] - row[name] for row in rows]]

    frontier.errorbar(kls, rewards, xerr=spread("kl"), yerr=spread("reward"), fmt="o-", capsize=2)
    for row in rows:
        frontier.annotate(
            f"{row['coef']:.2g}", (row["kl"], row["reward"]), fontsize=8, xytext=(3, 3), textcoords="offset points"
        )
    frontier.set(
        title="reward against KL, by coefficient", xlabel="KL to the policy at step 0 (nats)", ylabel="reward"
    )
    response.errorbar(coefs, kls, yerr=spread("kl"), fmt="o-", capsize=2)
    response.set(title="KL by coefficient", xlabel="kl_penalty_coef", ylabel="KL (nats)", xscale="log")
    for axis in (frontier, response):
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True


def main(arguments: list[str]) -> None:
    arguments = with_defaults(arguments, DEFAULT_CONFIG)
    script_args, training_args, _ = parse([*arguments, "--kl_penalty_coef", "1"], SweepArguments)
    if not script_args.coefs or min(script_args.coefs) <= 0 or len(set(script_args.coefs)) < len(script_args.coefs):
        raise ValueError(f"--coefs must be positive and different, got {script_args.coefs}.")
    if script_args.last < 1:
        raise ValueError(f"--last must be at least 1, got {script_args.last}.")
    settings = [Setting(f"{coef:g}", ("--kl_penalty_coef", repr(coef))) for coef in sorted(script_args.coefs)]
    folder = Path(training_args.output_dir)
    groups = by_label(run_all(arguments, settings, folder / "runs", SweepArguments))
    if not PartialState().is_main_process:
        return
    rows = [summarise(float(label), records, script_args.last) for label, records in groups.items()]
    with (folder / "frontier.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    say(f"\n{'coefficient':>12}{'KL':>10}{'reward':>10}{'perplexity':>12}")
    for row in rows:
        perplexity = "-" if row["perplexity"] is None else f"{row['perplexity']:.3f}"
        say(f"{row['coef']:>12.4g}{row['kl']:>10.4f}{row['reward']:>10.3f}{perplexity:>12}")
    say(f"\nFrontier: {folder / 'frontier.csv'}")
    if draw(rows, folder / "frontier.png"):
        say(f"Figure: {folder / 'frontier.png'}")


if __name__ == "__main__":
    exit_on_user_error(main)
