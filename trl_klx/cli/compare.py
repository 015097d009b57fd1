"""
Compare runs in a table.

  final reward   last reward that was logged
  last quarter   mean reward over the last quarter of the run
  KL             mean over the last quarter of the run, in the target's unit
  RMS error      root mean square of KL / target - 1 over the last quarter
  peak/target    highest KL of the whole run, divided by the target
  coefficient    last coefficient that was applied

A target counts as held when the mean KL of the last quarter is within 20% of it. A run that cannot be read is passed
over, and the exit code is then 1.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass

from ..controllers.tracking_error import SETTLED_BAND, relative_rms_error
from .console import number, passed_over, say, table
from .runs import TRL_KL_KEYS, Run, last_quarter, mean, read_readable_runs


@dataclass(frozen=True)
class Summary:
    """
    The numbers in a run's row of the table.

    Attributes:
        run (`Run`):
            The run.
        reward, late_reward (`float` or `None`):
            Last reward, and mean reward of the last quarter.
        kl, target (`float` or `None`):
            Mean KL of the last quarter, and its target.
        rms_error, peak (`float` or `None`):
            Root mean square error and highest KL, relative to the target.
        coef (`float` or `None`):
            Last coefficient.
        saturated (`bool`):
            Whether the coefficient was at a bound for most of the last quarter.
    """

    run: Run
    reward: float | None
    late_reward: float | None
    kl: float | None
    target: float | None
    rms_error: float | None
    peak: float | None
    coef: float | None
    saturated: bool

    @property
    def verdict(self) -> str:
        """Whether the run held its target, in a few words."""
        unfinished = "" if self.run.done else f" (step {self.run.step} of {self.run.max_steps})"
        if self.kl is None:
            return "no KL was logged" + unfinished
        if self.target is None:
            return "no target" + unfinished
        if self.target <= 0:
            return f"a target of {number(self.target)} cannot be held" + unfinished
        off = self.kl / self.target - 1.0
        if abs(off) <= SETTLED_BAND:
            return f"held ({off:+.0%})" + unfinished
        words = f"{'above' if off > 0 else 'below'} target ({off:+.0%})"
        if self.saturated:
            words += f", coefficient at its bound: {'raise kl_coef_max' if off > 0 else 'lower kl_coef_min'}"
        return words + unfinished


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run_dir", nargs="+", help="`output_dir` of a run, or one of its checkpoints")


def run(args: Namespace) -> int:
    runs, problems = read_readable_runs(args.run_dir)
    for one in runs:
        if one.note:
            say(one.note, error=True)
    summaries = [summarise(one) for one in runs]
    say(format_summaries(summaries))
    say(f"\n{overall(summaries)}")
    passed_over("compare", problems)
    return 1 if problems else 0


def summarise(one: Run) -> Summary:
    """Compute the numbers of a run's row."""
    rewards, coefs = one.values("reward"), one.values("klx/coef")
    kls, target = one.values(one.kl_key) if one.kl_key else [], one.target
    late = last_quarter(kls) if kls else []
    return Summary(
        run=one,
        reward=rewards[-1] if rewards else None,
        late_reward=mean(last_quarter(rewards)) if rewards else None,
        kl=mean(late),
        target=target,
        rms_error=relative_rms_error(late, target) if late and target and target > 0 else None,
        peak=max(kls) / target if kls and target and target > 0 else None,
        coef=coefs[-1] if coefs else None,
        saturated=(mean(last_quarter(one.values("klx/saturated"))) or 0.0) > 0.5,
    )


def format_summaries(summaries: Sequence[Summary]) -> str:
    header = ["run", "steps", "final reward", "last quarter", "KL", "target", "RMS error", "peak/target"]
    rows = []
    for one in summaries:
        starred = "*" if one.run.kl_key in TRL_KL_KEYS else ""
        rows.append(
            [
                one.run.name,
                str(one.run.step),
                number(one.reward),
                number(one.late_reward),
                number(one.kl) + starred,
                number(one.target),
                number(one.rms_error, ".1%"),
                number(one.peak, ".3g"),
                number(one.coef),
                one.verdict,
            ]
        )
    text = table([*header, "coefficient", "verdict"], rows)
    if any(one.run.kl_key in TRL_KL_KEYS for one in summaries):
        text += "\n* TRL's own KL, in TRL's unit, cannot be compared with the others"
    return text


def overall(summaries: Sequence[Summary]) -> str:
    """Return the verdict on all runs together."""
    if len(summaries) == 1:
        return f"verdict: {summaries[0].run.name}: {summaries[0].verdict}"
    parts = []
    aimed = [one for one in summaries if one.rms_error is not None]
    if aimed:
        best = min(aimed, key=lambda one: one.rms_error or 0.0)
        held = sum(one.verdict.startswith("held") for one in aimed)
        parts.append(f"{held} of {len(aimed)} held their target, closest {best.run.name} ({best.rms_error:.1%} off)")
    rewarded = [one for one in summaries if one.late_reward is not None]
    if rewarded:
        best = max(rewarded, key=lambda one: one.late_reward or 0.0)
        at = f" at a KL of {best.kl:.4g}" if best.kl is not None else ""
        parts.append(f"highest reward over the last quarter {best.run.name} ({best.late_reward:.4g}{at})")
    return "verdict: " + ("; ".join(parts) if parts else "the runs logged neither a reward nor a KL with a target")
