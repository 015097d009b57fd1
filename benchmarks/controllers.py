"""
How well each KL controller holds its target, in real training.

    python benchmarks/controllers.py                      # make the missing runs, then the table, figure and JSON
    python benchmarks/controllers.py --tasks embedded-ppo # one task only
    python benchmarks/controllers.py --controllers hold free "fixed 0.2" "fixed 0.3"     # some rows only
    python benchmarks/controllers.py --docs               # no runs: write the JSON's tables into docs/choosing.md

`hold` gets the target and nothing else. Everyone else also gets a start of 0.05. Ziegler's rule also runs with the
horizon that its authors' ratio gives (a hundredth of the run's completions), and a plain log-space PID with
anti-windup stands for what a control engineer would write first. Fixed coefficients show the reward that a KL is
worth; `free` shows when the KL arrives without any penalty.

`embedded-*` train the tiny models of `recipes/ppo_hh.py`. `stories-*` train a pretrained 260K-parameter model; they
need `--assets`, a folder made by `benchmarks/fetch_stories.py`, and PyPI's `vaderSentiment`. Every run is recorded, so
an interrupted script continues where it stopped.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean


os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # two threads are slower on models this small
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "recipes"), str(Path(__file__).parent)]

from measuring import steps_to_arrive  # noqa: E402
from stories import is_available, model_path, write_dataset  # noqa: E402

from hh.report import load_pyplot  # noqa: E402
from kl_lab import Setting, average, by_label, run_all, tail  # noqa: E402
from ppo_hh import say  # noqa: E402
from trl_klx import KLController, register_kl_controller  # noqa: E402
from trl_klx.controllers.tracking_error import relative_rms_error, steps_to_settle  # noqa: E402


START = 0.05
COMMON = (
    "--use_cpu true --bf16 false --gradient_checkpointing false --report_to none --logging_steps 1 --save_strategy no "
    "--lr_scheduler_type constant --temperature 1.0 --disable_tqdm true "
    "--kl_statistic full --eval_prompts 64"
).split()
EMBEDDED = "--max_prompt_length 16 --max_completion_length 16 --learning_rate 5e-4 --max_steps {} --kl_target 2"
STORIES = (
    "--algorithm grpo --per_device_train_batch_size 32 --num_generations 4 --max_completion_length 48 "
    "--learning_rate 2e-4 --max_steps {} --kl_target 4"
)
TASKS = {
    "stories-grpo": STORIES.format(150),
    "stories-grpo-4-steps": STORIES.format(600) + " --num_iterations 4",
    "stories-grpo-lora": STORIES.format(150) + " --use_peft --lora_r 16 --learning_rate 1e-3",
    # The tiny policy's KL varies a lot between prompts, so a batch has many of them: 32 for GRPO, 64 for PPO.
    "embedded-grpo": f"--algorithm grpo --per_device_train_batch_size 128 --num_generations 4 {EMBEDDED.format(70)}",
    "embedded-ppo": f"--algorithm ppo --per_device_train_batch_size 64 --num_ppo_epochs 1 {EMBEDDED.format(70)}",
    "embedded-ppo-4-epochs": (
        f"--algorithm ppo --per_device_train_batch_size 64 --num_ppo_epochs 4 {EMBEDDED.format(280)}"
    ),
}
COMPLETIONS = {"stories": 150 * 32, "embedded-grpo": 70 * 128, "embedded-ppo": 70 * 64}
# By the beginning of the task's name; the first that fits counts. Steps on an old rollout need more of a penalty.
FIXED = {
    "stories-grpo-4-steps": (0.3, 0.8, 1.2),
    "stories": (0.1, 0.2, 0.25, 0.3, 0.4),
    "embedded-ppo-4-epochs": (0.15, 0.8, 1.6),
    "embedded": (0.05, 0.15, 0.25, 0.4),
}


@register_kl_controller("log-pid")
class LogPIDController(KLController):
    """The textbook rule on `log(kl / target)`, with clipped errors and an integral that stops at the bounds."""

    needs_target = True
    uses = frozenset({"target", "min_coef", "max_coef"})
    KP, KI, KD = 0.5, 0.05, 1.0

    def __init__(self, init_coef: float, **kwargs):
        super().__init__(init_coef, **kwargs)
        self._integral, self._before = math.log(init_coef), None

    def _next(self, kl: float, n_steps: float) -> float:
        error = min(max(math.log(max(kl, 1e-6) / self.target), -1.0), 1.0)
        slope = 0.0 if self._before is None else error - self._before
        self._before = error
        if not self.saturated or (error > 0) != (self.value >= self.max_coef):
            self._integral += self.KI * error
        return math.exp(self._integral + self.KP * error + self.KD * slope)


def list_settings(task: str) -> list[Setting]:
    start = ("--kl_penalty_coef", str(START))
    completions = next(number for name, number in COMPLETIONS.items() if task.startswith(name))
    adaptive = [
        Setting(f"adaptive {horizon}", ("--kl_controller", "adaptive", "--kl_horizon", str(horizon), *start))
        for horizon in (completions // 100, 10000)
    ]
    coefs = next(coefs for name, coefs in FIXED.items() if task.startswith(name))
    fixed = [Setting(f"fixed {coef}", ("--kl_controller", "fixed", "--kl_penalty_coef", str(coef))) for coef in coefs]
    others = [Setting(name, ("--kl_controller", name, *start)) for name in ("pid", "log-pid")]
    free = Setting("free", ("--kl_penalty_coef", "0", "--kl_monitor", "true"))
    return [Setting("hold", ()), *others, *adaptive, *fixed, free]


def command_line(task: str, args: argparse.Namespace) -> list[str]:
    line = [*COMMON, *TASKS[task].split(), "--seeds", *map(str, args.seeds)]
    if task.startswith("stories"):
        data = write_dataset(args.assets, args.output)
        model = model_path(args.assets, args.model)
        return [*line, "--model_name_or_path", model, "--reward", "stories.vader", "--dataset_name", str(data)]
    return [*line, "--cache_dir", str(args.cache)]


def summarise(records: list[dict]) -> dict:
    """Summary of one controller: means over the seeds, and the worst seed for error and peak."""
    target, steps = records[0]["target"], len(records[0]["kl"])
    errors = [relative_rms_error(tail(record["kl"]), target) for record in records]
    peaks = [max(record["kl"]) / target for record in records]
    settled = [steps_to_settle(record["kl"], target) for record in records]
    arrivals = [steps_to_arrive(record["kl"], target) for record in records]
    return {
        "arrived_at": fmean(steps if step is None else step for step in arrivals),
        "reward_of_run": fmean(fmean(record["reward"]) for record in records),
        "rms_error": fmean(errors),
        "rms_error_worst": max(errors),
        "peak": fmean(peaks),
        "peak_worst": max(peaks),
        # A run that never settles counts with its full length, which is a lower bound.
        "settled_at": fmean(steps if step is None else step for step in settled),
        "never_settled": sum(step is None for step in settled),
        "kl": average(records, "kl"),
        "coef": math.exp(fmean(fmean(math.log(max(c, 1e-9)) for c in tail(record["coef"])) for record in records)),
        "reward": average(records, "reward"),
        "perplexity": fmean(record["perplexity"][-1][1] for record in records),
        "seeds": len(records),
        "batches": steps,
    }


def interpolate_frontier(summary: dict[str, dict], kl: float, name: str) -> float | None:
    """What fixed coefficients reach at this KL, interpolated linearly in sqrt(KL) between the two nearest."""
    points = sorted((math.sqrt(s["kl"]), s[name]) for label, s in summary.items() if label.startswith("fixed"))
    x = math.sqrt(kl)
    for (x0, y0), (x1, y1) in zip(points, points[1:], strict=False):
        if x0 <= x <= x1:
            return y0 + (y1 - y0) * (x - x0) / max(x1 - x0, 1e-9)
    return None


def format_table(summary: dict[str, dict]) -> str:
    """A Markdown table, one row per controller."""
    rows = [
        "| controller | RMS error | peak / target | arrived after | reward of the run | reward at the end | "
        "perplexity | KL | coefficient |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for label, s in summary.items():
        coef = "" if label == "free" else f"{s['coef']:.3g}"
        rows.append(
            f"| `{label}` | {s['rms_error']:.3f} | {s['peak']:.2f} | {s['arrived_at']:.0f} | {s['reward_of_run']:.3f} "
            f"| {s['reward']:.3f} | {s['perplexity']:.3f} | {s['kl']:.2f} | {coef} |"
        )
    return "\n".join(rows)


def verdict(summary: dict[str, dict]) -> list[str]:
    """The goals set for `hold`, and whether these runs meet them."""
    hold = summary["hold"]
    lines = [
        ("relative RMS error at most 0.10 on every seed", hold["rms_error_worst"], 0.10),
        ("peak at most 1.3 x target on every seed", hold["peak_worst"], 1.3),
    ]
    if "free" in summary:
        free = summary["free"]["arrived_at"]
        lines.append(("arrival at most 1.6 x that of the free run", hold["arrived_at"], 1.6 * free))
    text = [
        f"{'yes' if value <= goal else 'NO '}  {name}: {value:.3g} (goal {goal:.3g})" for name, value, goal in lines
    ]
    for name, sign in (("reward_of_run", 1), ("reward", 1), ("perplexity", -1)):
        frontier = interpolate_frontier(summary, hold["kl"], name)
        if frontier is None:
            text.append(f"?    {name} at equal KL: no fixed coefficients on both sides of {hold['kl']:.2f} nats")
            continue
        good = sign * (hold[name] - frontier) >= 0
        text.append(
            f"{'yes' if good else 'NO '}  {name} at equal KL: {hold[name]:.4g}, fixed coefficients {frontier:.4g}"
        )
    return text


def draw(results: dict[str, dict[str, list[dict]]], path: Path) -> bool:
    pyplot = load_pyplot()
    if pyplot is None:
        return False
    figure, axes = pyplot.subplots(
        len(results), 3, figsize=(15, 4 * len(results)), constrained_layout=True, squeeze=False
    )
    for row, (task, groups) in zip(axes, results.items(), strict=True):
        target = next(iter(groups.values()))[0]["target"]
        for label, records in groups.items():
            if label.startswith("fixed"):
                row[2].plot(average(records, "kl"), average(records, "reward"), "ks", markersize=5)
                row[2].annotate(label, (average(records, "kl"), average(records, "reward")), fontsize=7)
                continue
            for axis, name in ((row[0], "kl"), (row[1], "coef")):
                curve = [fmean(values) for values in zip(*(record[name] for record in records), strict=True)]
                axis.plot(curve, label=label, linewidth=2.2 if label == "hold" else 1.0)
            row[2].plot(average(records, "kl"), average(records, "reward"), "o", label=label)
        row[0].axhspan(0.8 * target, 1.2 * target, color="gray", alpha=0.2, label="target ± 20%")
        row[0].set(title=f"{task}: KL (nats per sequence)", yscale="log", ylim=(target / 20, None), xlabel="batch")
        row[1].set(title="coefficient", yscale="log", xlabel="batch")
        row[2].set(title="reward against KL (second half)", xscale="log", xlabel="KL")
        row[2].minorticks_off()
        row[0].legend(fontsize=7)
        row[2].legend(fontsize=7)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True


def write_tables(summaries: dict[str, dict], page: Path) -> None:
    """Write the table of every task between the two markers of a page."""
    start, end = "<!-- controllers -->", "<!-- /controllers -->"
    before, rest = page.read_text().split(start)
    text = "\n".join(f"`{task}`:\n\n{format_table(summary)}\n" for task, summary in summaries.items())
    page.write_text(f"{before}{start}\n{text}\n{end}{rest.split(end)[1]}")


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--controllers", nargs="+", metavar="ROW", help="only these rows of the table, and `hold`")
    parser.add_argument("--assets", type=Path, help="folder of stories260K; without it the stories tasks are skipped")
    parser.add_argument("--model", help="causal language model, folder or Hub id (default: stories260K of the assets)")
    parser.add_argument(
        "--cache", type=Path, default=ROOT / "outputs" / "hh_default", help="folder of the tiny models"
    )
    parser.add_argument(
        "--output", type=Path, default=ROOT / "outputs" / "controllers", help="records, JSON and figure"
    )
    parser.add_argument("--workers", type=int, default=1, help="parallel runs, one thread each")
    parser.add_argument("--share", type=int, nargs=2, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--docs", action="store_true", help="only write the JSON's tables into docs/choosing.md")
    args = parser.parse_args(argv)
    if args.model is not None and args.assets is None:
        parser.error("--model needs --assets, which has the prompts")
    # A record belongs to its command line, so that one folder must always be spelled alike.
    args.cache, args.output = args.cache.resolve(), args.output.resolve()
    args.assets = None if args.assets is None else args.assets.resolve()
    args.output.mkdir(parents=True, exist_ok=True)
    results_file = args.output / "controllers.json"
    if args.docs:
        summaries = json.loads(results_file.read_text())
        write_tables(summaries, ROOT / "docs" / "choosing.md")
        return
    tasks = args.tasks
    if args.assets is None or not is_available(args.assets):
        say("Skipping the stories tasks: they need --assets with stories260K, and the package vaderSentiment.")
        tasks = [task for task in tasks if not task.startswith("stories")]
    if args.workers > 1 and args.share is None:
        command = [sys.executable, __file__, *argv, "--share"]
        workers = [
            subprocess.Popen([*command, str(index), str(args.workers)], stdout=subprocess.DEVNULL)
            for index in range(args.workers)
        ]
        if max(worker.wait() for worker in workers) != 0:
            sys.exit("a worker failed")
    results = {}
    for task in tasks:
        share = tuple(args.share or (0, 1))
        settings = [
            setting
            for setting in list_settings(task)
            if args.controllers is None or setting.label in ("hold", *args.controllers)
        ]
        records = run_all(command_line(task, args), settings, args.output / task, share=share)
        results[task] = by_label(records)
    if args.share is not None:
        return
    summaries = {
        task: {label: summarise(records) for label, records in groups.items()} for task, groups in results.items()
    }
    # Keep the results of other tasks from earlier calls.
    known = (json.loads(results_file.read_text()) if results_file.exists() else {}) | summaries
    results_file.write_text(json.dumps({task: known[task] for task in TASKS if task in known}, indent=1))
    for task, summary in summaries.items():
        target, batches = results[task]["hold"][0]["target"], summary["hold"]["batches"]
        say(f"\n{task}: target {target} nats, {batches} batches")
        say(format_table(summary))
        say("\n".join(verdict(summary)))
    if draw(results, args.output / "controllers.png"):
        say(f"\nFigure: {args.output / 'controllers.png'}")
    say(f"JSON: {results_file}")


if __name__ == "__main__":
    main(sys.argv[1:])
