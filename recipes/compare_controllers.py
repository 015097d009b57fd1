"""
Compare KL controllers on your own setup: the same model, data, reward and seeds, with one run per controller and seed.
Ends with a figure (reward, KL with its target band, coefficient, held-out perplexity) and a verdict in words.

The default setup is that of `ppo_hh.py`: tiny models that the recipe trains first, offline, on a CPU.

```bash
accelerate launch recipes/compare_controllers.py
accelerate launch recipes/compare_controllers.py --controllers fixed:0.05 adaptive:1000 pid --seeds 0 1 2
accelerate launch recipes/compare_controllers.py --config my_grpo.yaml \
    --model_name_or_path Qwen/Qwen2.5-0.5B --dataset_name prompts.jsonl --reward my_rewards.score --kl_target 6
```

A controller is written as `name`, `fixed:COEF`, `adaptive:HORIZON`, or `name:{"argument": value}`. Every run is
recorded in `output_dir`, so the same command continues after an interruption.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from accelerate import PartialState

from hh.report import load_pyplot
from kl_lab import (
    LabArguments,
    Setting,
    average,
    by_label,
    parse,
    run_all,
    tail,
    with_defaults,
)
from ppo_hh import exit_on_user_error, say
from trl_klx.controllers.registry import list_kl_controllers
from trl_klx.controllers.tracking_error import relative_rms_error, steps_to_settle


DEFAULT_CONFIG = Path(__file__).with_name("compare_controllers.yaml")
# Rewards are called similar if they differ by less than this share of the best one's gain over the first batch.
SIMILAR = 0.1


@dataclass
class CompareArguments(LabArguments):
    """
    Arguments of this script.

    Args:
        controllers (`list[str]`, *optional*, defaults to `["fixed", "adaptive:1000", "pid"]`):
            Controllers to compare. `fixed` without a coefficient uses `kl_penalty_coef`, where the others start.
    """

    controllers: list[str] = field(
        default_factory=lambda: ["fixed", "adaptive:1000", "pid"],
        metadata={"help": "Controllers: name, fixed:COEF, adaptive:HORIZON or name:{JSON arguments}."},
    )


def parse_controller(text: str) -> Setting:
    """Turn a controller as written on the command line into flags."""
    name, _, argument = text.partition(":")
    if name not in list_kl_controllers():
        raise ValueError(
            f"--controllers: unknown controller {name!r}. Choose from {', '.join(list_kl_controllers())}."
        )
    flags = ["--kl_controller", name]
    if argument.startswith("{"):
        flags += ["--kl_controller_kwargs", argument]
    elif argument:
        fields = {"fixed": "--kl_penalty_coef", "adaptive": "--kl_horizon"}
        if name not in fields:
            raise ValueError(f"--controllers: {text!r} has no short form. Write its arguments as {name}:{{...}}.")
        try:
            float(argument)
        except ValueError:
            raise ValueError(f"--controllers: {argument!r} in {text!r} is not a number.") from None
        flags += [fields[name], argument]
    return Setting(f"{name} {argument}".strip(), tuple(flags))


@dataclass
class Outcome:
    """Results of one controller, averaged over the seeds. KL, reward and error cover the second half of the run."""

    label: str
    kl: float
    reward: float
    error: float
    peak: float
    settled: int | None
    perplexity: float | None


def summarise(label: str, records: Sequence[dict]) -> Outcome:
    target = records[0]["target"]
    settled = [steps_to_settle(record["kl"], target) for record in records]
    perplexities = [record["perplexity"][-1][1] for record in records if record["perplexity"]]
    return Outcome(
        label=label,
        kl=average(records, "kl"),
        reward=average(records, "reward"),
        error=fmean(relative_rms_error(tail(record["kl"]), target) for record in records),
        peak=fmean(max(record["kl"]) / target for record in records),
        settled=None if None in settled else round(fmean(settled)),
        perplexity=fmean(perplexities) if perplexities else None,
    )


def format_table(outcomes: Sequence[Outcome], target: float) -> str:
    lines = [f"{'controller':<24}{'reward':>9}{'KL':>9}{'RMS error':>11}{'peak':>8}{'settled':>9}{'perplexity':>12}"]
    for one in outcomes:
        settled = "never" if one.settled is None else str(one.settled)
        perplexity = "-" if one.perplexity is None else f"{one.perplexity:.3f}"
        lines.append(
            f"{one.label:<24}{one.reward:>9.3f}{one.kl:>9.3f}{one.error:>11.3f}{one.peak:>7.2f}x{settled:>9}"
            f"{perplexity:>12}"
        )
    return "\n".join([*lines, f"{'target':<24}{'':>9}{target:>9.3f}"])


def judge(outcomes: Sequence[Outcome], first_reward: float, target: float) -> str:
    """The verdict: which controller held the target best, what it cost in reward, and what perplexity says."""
    closest = min(outcomes, key=lambda one: one.error)
    best = max(outcomes, key=lambda one: one.reward)
    text = (
        f"{closest.label} held the target best: its KL was off by {100 * closest.error:.0f}% (root mean square) in "
        f"the second half of the run, and peaked at {closest.peak:.2f} times the target."
    )
    if closest is best:
        text += " It also has the highest reward."
    else:
        gain = best.reward - first_reward
        similar = gain > 0 and best.reward - closest.reward <= SIMILAR * gain
        text += (
            f" Its reward of {closest.reward:.3f} is {'similar to' if similar else 'below'} the highest, "
            f"{best.reward:.3f} of {best.label}, which went to {best.kl / target:.2f} times the target KL for it."
        )
    static = [one for one in outcomes if one.label.startswith("fixed")]
    moving = [one for one in outcomes if not one.label.startswith("fixed")]
    if static and moving:
        best_static, best_moving = (min(group, key=lambda one: one.error) for group in (static, moving))
        better = best_moving.error < best_static.error
        text += (
            f" Adaptive against static: {best_moving.label} is off by {100 * best_moving.error:.0f}%, "
            f"{best_static.label} by {100 * best_static.error:.0f}%, so adapting the coefficient "
            f"{'paid' if better else 'did not pay'} here."
        )
    known = [one for one in outcomes if one.perplexity is not None]
    if len(known) == len(outcomes):
        lowest = min(known, key=lambda one: one.perplexity)
        text += f" The lowest held-out perplexity is {lowest.perplexity:.3f}, of {lowest.label}."
    if closest.error > 0.3:
        text += " None of them held it well: run longer, or start from a coefficient nearer to where they ended."
    return text


def draw(groups: dict[str, list[dict]], path: Path) -> bool:
    pyplot = load_pyplot()
    if pyplot is None:
        return False
    target = next(iter(groups.values()))[0]["target"]
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7), constrained_layout=True)
    panels = {"reward": axes[0][0], "kl": axes[0][1], "coef": axes[1][0]}
    for label, records in groups.items():
        color = None
        for name, axis in panels.items():
            curve = [fmean(values) for values in zip(*(record[name] for record in records), strict=True)]
            (line,) = axis.plot(records[0]["step"], curve, label=label, color=color)
            color = line.get_color()
            if len(records) > 1:
                low, high = zip(
                    *((min(v), max(v)) for v in zip(*(r[name] for r in records), strict=True)), strict=True
                )
                axis.fill_between(records[0]["step"], low, high, color=color, alpha=0.12)
        points = [record["perplexity"] for record in records if record["perplexity"]]
        if points:
            steps = [step for step, _ in points[0]]
            means = [fmean(value for _, value in column) for column in zip(*points, strict=True)]
            axes[1][1].plot(steps, means, color=color, marker="o", markersize=3, label=label)
    panels["kl"].axhspan(0.8 * target, 1.2 * target, color="gray", alpha=0.2, label="target ± 20%")
    panels["coef"].set_yscale("log")
    titles = ("reward", "KL to the reference (nats)", "KL coefficient", "held-out perplexity")
    for axis, title in zip(axes.flat, titles, strict=True):
        axis.set(title=title, xlabel="step")
        axis.grid(alpha=0.3)
    panels["kl"].legend(fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True


def main(arguments: list[str]) -> None:
    arguments = with_defaults(arguments, DEFAULT_CONFIG)
    script_args, training_args, _ = parse(arguments, CompareArguments)
    if training_args.kl_target is None:
        raise ValueError("Set --kl_target, the KL that the controllers should hold.")
    settings = [parse_controller(text) for text in script_args.controllers]
    if len({setting.label for setting in settings}) < len(settings):
        raise ValueError(f"--controllers lists a controller twice: {' '.join(script_args.controllers)}.")
    folder = Path(training_args.output_dir)
    records = run_all(arguments, settings, folder / "runs", CompareArguments)
    if not PartialState().is_main_process:
        return
    groups = by_label(records)
    outcomes = [summarise(label, group) for label, group in groups.items()]
    target = training_args.kl_target
    verdict = judge(outcomes, fmean(record["reward"][0] for record in records), target)
    say("\n" + format_table(outcomes, target) + "\n\n" + verdict)
    summary = {"target": target, "outcomes": [vars(one) for one in outcomes], "verdict": verdict}
    (folder / "comparison.json").write_text(json.dumps(summary, indent=2))
    if draw(groups, folder / "comparison.png"):
        say(f"\nFigure: {folder / 'comparison.png'}")
    else:
        say("\nNo figure: matplotlib is not installed (pip install 'trl-klx[plot]').")


if __name__ == "__main__":
    exit_on_user_error(main)
