"""
Plot the curves that runs have logged: KL with its target and a band of 20% around it, coefficient, reward, entropy (or
length) and loss. `--all` adds every other metric.

Runs of this package and of TRL are both read from `trainer_state.json`. A run that was started by `trl-klx grpo`,
`rloo` or `ppo` (or that has the `LiveStateCallback` of `trl_klx.cli.live`) keeps that file up to date while it trains.
Any other run writes it only with its checkpoints, so `--follow` redraws at each checkpoint.
"""

import math
import os
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..checkpoints.atomic_write import atomic_write
from ..controllers.setting_rules import is_finite_number
from .console import CLIError, passed_over, printable, progress, say, single_line
from .runs import OWN_KL_KEY, TRL_KL_KEYS, Run, read_readable_runs, read_runs, state_files


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The panels of a plain `trl-klx plot`, besides the KL of each run: the first that was logged of each line.
MAIN = (("klx/coef",), ("reward",), ("entropy", "completions/mean_length"), ("loss",))
FIRST = (OWN_KL_KEY, *TRL_KL_KEYS, *(names[0] for names in MAIN))
TITLES = {
    "klx/kl": "klx/kl: KL to the reference",
    "klx/coef": "klx/coef: KL coefficient",
    "kl": "kl: as TRL logs it",
    "objective/kl": "objective/kl: as TRL logs it",
    "entropy": "entropy of the policy",
    "completions/mean_length": "completions/mean_length",
}
UNITS = {
    **dict.fromkeys((OWN_KL_KEY, *TRL_KL_KEYS, "klx/kl_k1", "klx/kl_update", "klx/sampler_kl"), "nats"),
    "klx/kl_per_token": "nats per token",
    "entropy": "nats per token",
    "completions/mean_length": "tokens",
}
# Runs differ by their line too, for those who cannot tell the colours apart. Dashes are for targets.
STYLES = ("-", "-.", ":")
# These are not curves: a row's position, and totals over the run.
SKIPPED = {"step", "epoch", "total_flos"}
TOTALS = "train_"
# More panels than this make a figure that takes minutes to draw and that nobody can read.
MAX_PANELS = 64
# Matplotlib computes with the span of the values, which must not overflow.
MAX_DRAWN = 1e100
# The target is drawn in the KL's panel.
DRAWN_ELSEWHERE = {"klx/target"}


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run_dir", nargs="+", help="`output_dir` of a run, or one of its checkpoints")
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="figure to write (default: curves.png in the run's folder, or here if there are several runs)",
    )
    parser.add_argument("--metrics", nargs="+", metavar="NAME", help="plot these (default: the five main ones)")
    parser.add_argument("--all", action="store_true", help="plot every metric")
    parser.add_argument("--follow", action="store_true", help="redraw until the runs are done, or until Ctrl-C")
    parser.add_argument(
        "--interval",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help="with --follow: time between two checks (default: 5)",
    )


def run(args: Namespace) -> int:
    if args.all and args.metrics:
        raise CLIError("--all and --metrics exclude each other.", code=2)
    if not (math.isfinite(args.interval) and args.interval > 0):
        raise CLIError(f"--interval must be a positive number of seconds, got {args.interval}.", code=2)
    check_matplotlib("plot")
    output = Path(args.output or (Path(args.run_dir[0]) if len(args.run_dir) == 1 else Path()) / "curves.png")
    if len(args.run_dir) == 1 and not args.output and Path(args.run_dir[0]).is_file():
        output = Path(args.run_dir[0]).parent / "curves.png"
    check_format(output)
    if args.follow:
        return follow(args.run_dir, output, args.metrics, args.interval, args.all)
    runs, problems = read_readable_runs(args.run_dir)
    for one in runs:
        if one.note:
            say(one.note, error=True)
    drawn = draw(runs, output, args.metrics, args.all)
    say(single_line(output))
    logged = len(metric_names(runs))
    if logged > len(drawn) and not args.metrics:
        how = "--all draws them too" if logged <= MAX_PANELS else "name them with --metrics"
        say(f"{logged - len(drawn)} more metrics were logged; {how}", error=True)
    passed_over("plot", problems)
    return 1 if problems else 0


def follow(
    paths: Sequence[str], output: Path, metrics: Sequence[str] | None, interval: float, every: bool = False
) -> int:
    """Redraw whenever a run has logged, until every run is done. Wait for runs that have not started yet."""
    seen: list[tuple[str, int]] | None = None
    waiting: str | None = None
    try:
        while True:
            runs: list[Run] = []
            try:
                files = [file for path in paths for file in state_files(path)]
                now = sorted((str(file), os.stat(file).st_mtime_ns) for file in files)
                if now != seen:
                    runs = read_runs(paths)
                    seen = now
            except (CLIError, OSError) as error:
                # The file does not exist yet, or is being replaced.
                if str(error) != waiting:
                    waiting = str(error)
                    say(f"waiting: {waiting}", error=True)
            if any(one.rows for one in runs):
                draw(runs, output, metrics, every)
                steps = ", ".join(f"{one.name} step {one.step} of {one.max_steps}" for one in runs)
                say(f"{single_line(output)}: {steps}")
                if all(one.done for one in runs):
                    return 0
            time.sleep(interval)
    except KeyboardInterrupt:
        return 0


def metric_names(runs: Sequence[Run]) -> list[str]:
    """Return the names of the metrics that the runs have logged, the main ones first."""
    skipped = SKIPPED | DRAWN_ELSEWHERE
    names = {
        name
        for one in runs
        for row in one.rows
        if is_finite_number(row.get("step"))
        for name, value in row.items()
        if name not in skipped and not name.startswith(TOTALS) and is_finite_number(value)
    }
    return [name for name in FIRST if name in names] + sorted(names - set(FIRST))


def main_names(runs: Sequence[Run], known: Collection[str]) -> list[str]:
    """Return the names of the main metrics among those that the runs have logged."""
    kls = [name for name in known if any(one.kl_key == name for one in runs)]
    return kls + [name for names in MAIN for name in [next((n for n in names if n in known), None)] if name]


def draw(
    runs: Sequence[Run], output: Path, metrics: Sequence[str] | None = None, every: bool = False
) -> Sequence[str]:
    """
    Plot the curves of runs into one figure.

    Args:
        runs (`Sequence[Run]`):
            Runs, overlaid.
        output (`Path`):
            File to write. Its suffix decides the format.
        metrics (`Sequence[str]`, *optional*):
            Metrics to plot. If unset, the main ones.
        every (`bool`, *optional*, defaults to `False`):
            Whether to plot all metrics.

    Returns:
        `Sequence[str]`: The metrics that were plotted.
    """
    from matplotlib.figure import Figure

    known = metric_names(runs)
    unknown = [name for name in metrics or () if name not in known]
    if unknown:
        raise CLIError(f"{unknown[0]!r} was not logged. Logged metrics: {', '.join(known) or 'none'}.", code=2)
    # A run of another kind of trainer may have logged none of the main ones.
    names = list(metrics or (known if every else main_names(runs, known) or known[:MAX_PANELS]))
    if len(names) > MAX_PANELS:
        raise CLIError(
            f"{len(names)} metrics are too many for one figure, which has at most {MAX_PANELS} panels. Name those to "
            "draw with --metrics.",
            code=2,
        )
    if not names:
        raise CLIError(f"{str(runs[0].file)!r} holds no curves: nothing has been logged yet.")
    columns = len(names) if len(names) <= 4 else 3 if len(names) <= 6 else 4
    height = -(-len(names) // columns)
    figure = Figure(figsize=(4.2 * columns, 2.9 * height), layout="constrained")
    axes = figure.subplots(height, columns, squeeze=False).flatten()
    for axis, name in zip(axes, progress(names, desc="Drawing", unit="panel"), strict=False):
        has_target = _draw_panel(axis, name, runs)
        if has_target or (len(runs) > 1 and name == names[0]):
            axis.legend(fontsize="small")
    for axis in axes[len(names) :]:
        axis.remove()
    save(figure, output)
    left_out = sum(abs(value) > MAX_DRAWN for one in runs for name in names for value in one.values(name))
    if left_out:
        say(f"{left_out} values beyond {MAX_DRAWN:g} are not drawn", error=True)
    return names


def _draw_panel(axis: "Axes", name: str, runs: Sequence[Run]) -> bool:
    """Draw one metric. Returns whether a target is drawn with it."""
    for index, one in enumerate(runs):
        steps, values = drawable(*one.series(name))
        axis.plot(
            steps,
            values,
            color=f"C{index}",
            linestyle=STYLES[index % len(STYLES)],
            linewidth=1.2,
            marker="." if len(values) < 30 else None,
            label=plain(one.name) if values else None,
        )
    # Each target gets a band. If all runs have the same target, they share one grey band.
    targets = {
        index: one.target
        for index, one in enumerate(runs)
        if one.target is not None and abs(one.target) <= MAX_DRAWN and one.kl_key == name
    }
    shared = len(set(targets.values())) == 1
    for index, target in list(targets.items())[: 1 if shared else None]:
        color = "0.3" if shared else f"C{index}"
        whose = "" if shared else f" of {plain(runs[index].name)}"
        axis.axhline(target, color=color, linestyle="--", linewidth=1.0, label=f"target{whose}: {target:g} (±20%)")
        axis.axhspan(0.8 * target, 1.2 * target, color=color, alpha=0.12, linewidth=0)
    if name == "klx/coef" and all(value > 0 for one in runs for value in one.values(name)):
        axis.set_yscale("log")
    axis.set_title(plain(TITLES.get(name, name)), fontsize="medium")
    axis.set_xlabel("step")
    axis.set_ylabel(UNITS.get(name, ""))
    axis.locator_params(axis="x", integer=True)
    axis.grid(alpha=0.3)
    return bool(targets)


def drawable(steps: Sequence[int], values: Sequence[float]) -> tuple[list[int], list[float]]:
    """Leave out the points whose numbers are too large for matplotlib."""
    points = [point for point in zip(steps, values, strict=True) if max(map(abs, point)) <= MAX_DRAWN]
    return [step for step, _ in points], [value for _, value in points]


def plain(text: str) -> str:
    """Return a text for a figure, in which a dollar sign does not begin a formula."""
    return printable(text).replace("$", r"\$")


def check_matplotlib(command: str) -> None:
    """Refuse to plot if matplotlib, an optional dependency, is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise CLIError(
            f"`trl-klx {command}` needs matplotlib, which is not installed: pip install 'trl-klx[plot]'"
        ) from error


def check_format(output: Path) -> None:
    """Refuse a format that cannot be written, before any work is done."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    known = sorted(FigureCanvasAgg.get_supported_filetypes())
    if output.suffix.lstrip(".").lower() not in known:
        raise CLIError(f"cannot draw into {str(output)!r}: its suffix must be one of {', '.join(known)}.", code=2)


def save(figure: "Figure", output: Path) -> None:
    """Write a figure. A viewer that watches the file never sees a part of it."""
    try:
        with atomic_write(output) as temporary:
            figure.savefig(temporary, dpi=110, format=output.suffix.lstrip(".").lower())
    except OSError as error:
        raise CLIError(f"cannot write {str(output)!r}: {error.strerror or error}.") from error
