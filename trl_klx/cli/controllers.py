"""
List the registered KL controllers with their rules, settings and defaults. The list includes those of installed
packages (entry points in the group `trl_klx.kl_controllers`). Such a package is imported only if its controller is
named.

With --simulate, plot how each controller would have changed the coefficient, given the KL that a run recorded. This is
an open loop: unlike in training, the recorded KL does not react to the simulated coefficient. The plot shows how fast
and how strongly a controller reacts, not which KL it would have reached.
"""

import inspect
import json
import warnings
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from ..controllers.base import KLController
from ..controllers.registry import ENTRY_POINT_GROUP, get_kl_controller, get_kl_controller_class, list_kl_controllers
from .console import CLIError, number, one_line, say, single_line, table
from .plot import check_format, check_matplotlib, drawable, plain, save
from .runs import Run, read_run


# Options of the simulation, which are refused without --simulate because they would be ignored.
SIMULATION = ("target", "coef", "horizon", "coef_min", "coef_max", "completions", "controllers", "kwargs", "output")


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("name", nargs="*", help="describe only these, and import them if needed (default: all)")
    parser.add_argument("--simulate", metavar="RUN_DIR", help="run whose recorded KL is fed to the controllers")
    group = parser.add_argument_group("with --simulate", argument_default=SUPPRESS)
    group.add_argument("--target", type=float, help="KL to hold, in nats (default: the run's target)")
    group.add_argument("--coef", type=float, help="first coefficient (default: the run's first one, or 0.05)")
    group.add_argument("--horizon", type=float, help="horizon in completions (default: 10000)")
    group.add_argument("--coef_min", type=float, help="lower bound of the coefficient (default: 1e-4)")
    group.add_argument("--coef_max", type=float, help="upper bound of the coefficient (default: 10)")
    group.add_argument(
        "--completions",
        type=int,
        help="completions per generation batch, over all processes (default: the run's batch size on one device)",
    )
    group.add_argument("--controllers", nargs="+", metavar="NAME", help="simulate these (default: the built-in ones)")
    group.add_argument("--kwargs", metavar="JSON", help="further settings, if --controllers names one controller")
    group.add_argument(
        "--output", metavar="FILE", help="figure to write (default: controllers.png in the run's folder)"
    )


def run(args: Namespace) -> int:
    if args.simulate is None:
        given = [name for name in SIMULATION if hasattr(args, name)]
        if given:
            raise CLIError(f"--{given[0]} has no effect without --simulate RUN_DIR.", code=2)
        say(describe(args.name))
        return 0
    if args.name:
        raise CLIError(f"{args.name[0]!r} has no effect with --simulate: use --controllers.", code=2)
    return simulate(args)


# ---- List ----


def describe(asked: Sequence[str] = ()) -> str:
    """
    Describe registered controllers with their rules and settings.

    Args:
        asked (`Sequence[str]`, *optional*):
            Names. If empty, all of them, and no package is imported to know more.
    """
    sources = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    _check_names(asked)
    imported = {*list_kl_controllers(installed=False), *asked}
    blocks = []
    for name in asked or list_kl_controllers():
        if name not in imported:
            source = f"{sources[name].value} ({_provider(sources[name])}, not imported)"
            blocks.append(f"{name}\n  class     {source}\n  more      trl-klx controllers {name}")
            continue
        try:
            cls = get_kl_controller_class(name)
        except Exception as error:
            blocks.append(f"{name}\n  cannot be used: {one_line(error)}")
            continue
        # Built-in controllers take precedence over entry points of the same name.
        point = None if cls.__module__.startswith("trl_klx.") else sources.get(name)
        source = "built in" if point is None else _provider(point)
        settings = ", ".join(
            f"{key}={format(value, 'g') if isinstance(value, float) else value}" for key, value in defaults(cls)
        )
        lines = [
            name,
            f"  class     {cls.__module__}.{cls.__qualname__} ({source})",
            f"  next      {cls.formula}",
            f"  needs     {'kl_target' if cls.needs_target else 'no target'}",
            f"  defaults  {settings or 'no settings'}",
        ]
        blocks.append("\n".join(lines))
    return (
        "\n\n".join(blocks)
        + "\n\nUse one with `kl_controller: NAME`. Its extra settings go into `kl_controller_kwargs`."
    )


def _provider(point: EntryPoint) -> str:
    return f"entry point of {point.dist.name}" if point.dist is not None else "entry point"


def _check_names(names: Sequence[str]) -> None:
    known = list_kl_controllers()
    for name in names:
        if name not in known:
            raise CLIError(f"unknown controller {name!r}. Choose from {', '.join(known)}.", code=2)


def defaults(cls: type[KLController]) -> list[tuple[str, object]]:
    """Return a controller's settings and their defaults: first its extra ones, then the common ones that it uses."""
    found: dict[str, object] = {}
    for base in cls.__mro__:
        if base is object or "__init__" not in vars(base):
            continue
        parameters = list(inspect.signature(vars(base)["__init__"]).parameters.values())[1:]
        for parameter in parameters:
            common = base is KLController
            if parameter.default is not parameter.empty and (not common or parameter.name in cls.uses - {"target"}):
                found.setdefault(parameter.name, parameter.default)
        # With `**kwargs`, the next class in the MRO takes further settings.
        if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters):
            break
    return list(found.items())


# ---- Simulation ----


def simulate(args: Namespace) -> int:
    check_matplotlib("controllers --simulate")
    recorded = read_run(args.simulate)
    key = recorded.kl_key
    if key is None:
        raise CLIError(f"{str(recorded.file)!r} has no KL. Train with `kl_monitor: true`, or with a penalty.")
    steps, kls = recorded.series(key)
    target = getattr(args, "target", recorded.target)
    if target is None:
        raise CLIError("the run has no target. Set --target to the KL to hold, in nats.", code=2)
    # The path may be a `trainer_state.json` or a folder.
    folder = recorded.file.parent if Path(args.simulate).is_file() else Path(args.simulate)
    output = Path(getattr(args, "output", folder / "controllers.png"))
    check_format(output)
    completions, assumed = _completions(args, recorded)
    coefs = recorded.values("klx/coef")
    settings = {
        "init_coef": getattr(args, "coef", coefs[0] if coefs and coefs[0] > 0 else 0.05),
        "target": target,
        "horizon": getattr(args, "horizon", 10000),
        "min_coef": getattr(args, "coef_min", 1e-4),
        "max_coef": getattr(args, "coef_max", 10.0),
    }
    curves = {name: play(name, kls, completions, settings | kwargs) for name, kwargs in _chosen(args).items()}
    say(f"recorded: {key} of {recorded.name}, {len(kls)} rows, one update each, target {number(target)} nats")
    say(f"completions per update: {completions}" + (f" ({assumed})" if assumed else ""))
    say("open loop: the recorded KL does not react to the simulated coefficients\n")
    rows = [
        [name, number(curve[0]), number(min(curve)), number(max(curve)), number(curve[-1])]
        for name, curve in curves.items()
    ]
    say(table(["controller", "first", "lowest", "highest", "last"], rows))
    draw(output, recorded, key, steps, kls, target, curves)
    say(f"\n{single_line(output)}")
    return 0


def _completions(args: Namespace, recorded: Run) -> tuple[int, str | None]:
    given = getattr(args, "completions", None)
    if given is not None:
        if given < 1:
            raise CLIError(f"--completions must be at least 1, got {given}.", code=2)
        return given, None
    if not isinstance(recorded.batch_size, int) or recorded.batch_size < 1:
        raise CLIError("the run does not say how many completions it took per batch. Set --completions.", code=2)
    return recorded.batch_size, (
        "the batch size on one device; set --completions if the run had several devices or accumulated gradients"
    )


def _chosen(args: Namespace) -> dict[str, dict[str, Any]]:
    """Return the controllers to simulate, each with its extra settings."""
    names = list(dict.fromkeys(getattr(args, "controllers", list_kl_controllers(installed=False))))
    _check_names(names)
    if not hasattr(args, "kwargs"):
        return {name: {} for name in names}
    if not hasattr(args, "controllers") or len(names) != 1:
        raise CLIError("--kwargs is for one controller: name it with --controllers.", code=2)
    try:
        kwargs = json.loads(args.kwargs)
    except ValueError as error:
        raise CLIError(f"--kwargs is not JSON: {error}.", code=2) from error
    if not isinstance(kwargs, dict):
        raise CLIError(f"""--kwargs must be a JSON object such as '{{"kp": 1.0}}', got {args.kwargs}.""", code=2)
    return {names[0]: kwargs}


def play(name: str, kls: Sequence[float], completions: int, settings: dict[str, Any]) -> list[float]:
    """Return the coefficients that a controller would have applied to the recorded batches."""
    try:
        controller = get_kl_controller(name, **settings)
        curve = []
        with warnings.catch_warnings():
            # A k1 statistic may be negative. The controller skips such values with a warning, which is noise here.
            warnings.simplefilter("ignore", RuntimeWarning)
            for kl in kls:
                curve.append(controller.value)
                controller.update(kl, completions)
    except (TypeError, ValueError, ImportError) as error:
        raise CLIError(f"{name}: {one_line(error)}", code=2) from error
    return curve


def draw(
    output: Path,
    recorded: Run,
    key: str,
    steps: Sequence[int],
    kls: Sequence[float],
    target: float,
    curves: dict[str, list[float]],
) -> None:
    """Plot the recorded KL, and below it the coefficients that it would have led to."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 6.5), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True)
    top.plot(*drawable(steps, kls), color="0.2", linewidth=1.2)
    top.axhline(target, color="tab:red", linestyle="--", linewidth=1.0, label=f"target {number(target)}")
    top.axhspan(0.8 * target, 1.2 * target, color="tab:red", alpha=0.1, linewidth=0)
    top.set_title(plain(f"{key} of {recorded.name}, as recorded (it does not react)"))
    top.legend(fontsize="small")
    for name, curve in curves.items():
        bottom.plot(steps, curve, linewidth=1.2, label=plain(name))
    own = recorded.series("klx/coef")
    if own[0]:
        bottom.plot(*drawable(*own), color="0.2", linestyle=":", linewidth=1.2, label="as recorded")
    bottom.set_yscale("log" if all(value > 0 for curve in curves.values() for value in curve) else "linear")
    bottom.set_title("coefficient that each controller would have applied")
    bottom.set_xlabel("step")
    bottom.legend(fontsize="small")
    for axis in (top, bottom):
        axis.grid(alpha=0.3)
    save(figure, output)
