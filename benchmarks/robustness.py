"""
Whether `hold` really needs no tuning: it is given only a target, across units, targets, batches, learning rates,
placements, optimizer steps per rollout and starting values. `pid` and the best of four Ziegler horizons run for
comparison.

    python benchmarks/robustness.py             # the whole table
    python benchmarks/robustness.py hold        # only the default controller, in a few minutes

Hundreds of real trainings would take days, so the policy here is small: a sequence of 16 tokens from a vocabulary of
64, whose logits are linear in shared features. It is trained by the real policy gradient (groups of four, normalised
advantages, clipped ratios, Adam, clipped gradients), and its KL is measured from samples. `benchmarks/controllers.py`
trains language models.
"""

import argparse
import math
import sys
from dataclasses import dataclass
from functools import cache
from statistics import fmean

import numpy as np

from trl_klx import BatchMeasurement, get_kl_controller
from trl_klx.controllers.tracking_error import relative_rms_error


TOKENS, SYMBOLS, FEATURES, GROUP, SEEDS = 16, 64, 8, 4, 3
HORIZONS = (100, 300, 1000, 10000)
START = 0.05  # for the controllers that need one
ARRIVED = 0.9


@dataclass(frozen=True)
class Case:
    """
    One setting.

    Attributes:
        start (`float`, *optional*):
            First coefficient.
        steps (`int`):
            Optimizer steps per rollout.
        rollouts (`int`):
            Rollouts per optimizer step.
        dead (`int`):
            Batches without reward at the start.
        equal (`int`):
            One of this many groups has equal rewards; 0: none has.
        distance (`float`):
            KL of the initial policy divided by the target.
    """

    batch: int = 64
    learning_rate: float = 0.1
    target: float = 4.0
    unit: str = "sequence"
    placement: str = "advantage"
    statistic: str = "k3"
    start: float | None = None
    steps: int = 1
    rollouts: int = 1
    dead: int = 0
    equal: int = 0
    distance: float = 0.0
    batches: int = 150

    @property
    def scale(self) -> int:
        return TOKENS if self.unit == "token" else 1


CASES = {
    "default": Case(),
    "exact KL": Case(statistic="full"),
    "per token": Case(unit="token", target=0.25),
    "target x 0.4": Case(target=1.6),
    "target x 2.5": Case(target=10.0),
    "batch 16": Case(batch=16),
    "batch 256": Case(batch=256),
    "learning rate / 30": Case(learning_rate=0.0033, batches=900),
    "learning rate / 3": Case(learning_rate=0.033),
    "learning rate x 3": Case(learning_rate=0.3),
    "in the reward": Case(placement="reward"),
    "in the reward, a third of the groups equal": Case(placement="reward", equal=3),
    "in the loss": Case(placement="loss"),
    "start / 10": Case(start=START / 10),
    "start x 10": Case(start=START * 10),
    "4 steps per rollout": Case(steps=4),
    "8 steps per rollout": Case(steps=8),
    "8 steps, learning rate / 3": Case(steps=8, learning_rate=0.033),
    "4 rollouts per step": Case(rollouts=4, batch=16),
    "200 batches without reward": Case(dead=200, batches=350),
    "start at 10 x target": Case(distance=10.0, batches=400),
    "start at 10 x target, exact KL": Case(distance=10.0, batches=400, statistic="full"),
}


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@dataclass
class Rollout:
    """A sampled batch: inputs of the loss, the measurement that a controller sees, and the policy's exact KL."""

    tokens: np.ndarray  # (B, T)
    advantages: np.ndarray  # (B,)
    log_ratios: np.ndarray  # (B, T)
    logps: np.ndarray  # (B, T)
    coef: float
    measured: BatchMeasurement
    exact: float


class Policy:
    """A policy with its reference, a reward for each token at each position, and its own Adam."""

    def __init__(self, seed: int, case: Case):
        self.rng, self.case = np.random.default_rng(seed), case
        self.features = self.rng.normal(size=(TOKENS, FEATURES)) / math.sqrt(FEATURES)
        self.base = self.rng.normal(size=(TOKENS, SYMBOLS)) * 1.5
        self.rewards = self.rng.normal(size=(TOKENS, SYMBOLS))
        self.weights = np.zeros((FEATURES, SYMBOLS))
        self.first, self.second, self.step = 0.0, 0.0, 0
        self.has_reward = True
        if case.distance:
            self._move_away(case.distance * case.target * case.scale)

    def _move_away(self, kl: float) -> None:
        direction, low, high = self.rng.normal(size=self.weights.shape), 0.0, 20.0
        for _ in range(40):
            middle = (low + high) / 2
            self.weights = direction * middle
            low, high = (middle, high) if self.exact_kl() < kl else (low, middle)

    def logps(self) -> np.ndarray:
        return log_softmax(self.base + self.features @ self.weights)  # (T, V)

    def exact_kl(self) -> float:
        logps = self.logps()
        return float((np.exp(logps) * (logps - log_softmax(self.base))).sum())

    def sample(self, coef: float, steps: int) -> Rollout:
        """
        Sample a rollout, `steps` optimizer steps after the previous one. The coefficient acts on its rewards; in other
        placements it can still be changed.
        """
        case, places = self.case, np.arange(TOKENS)[None]
        logps, reference = self.logps(), log_softmax(self.base)
        uniform, sums = self.rng.random((case.batch, TOKENS)), np.exp(logps).cumsum(-1)
        tokens = np.stack([np.searchsorted(sums[t], uniform[:, t]) for t in range(TOKENS)], 1).clip(max=SYMBOLS - 1)
        ratio = logps[places, tokens] - reference[places, tokens]  # (B, T)
        total = ratio.sum(1)
        reward = self.rewards[places, tokens].sum(1) * self.has_reward
        groups = np.stack([reward, total]).reshape(2, -1, GROUP)
        if case.equal:
            groups[0, :: case.equal] = 0.0
        centered, paid = groups - groups.mean(-1, keepdims=True)
        compared = centered - coef * paid if case.placement == "reward" else centered
        advantages = compared / (compared.std(1, keepdims=True) + 1e-4)
        given, charged = advantages, ratio
        if case.placement == "reward":  # see `split_group_advantages`
            scale = (advantages * compared).sum() / max((compared**2).sum(), 1e-30)
            given, charged = scale * centered, scale * paid.reshape(-1, 1)
        along = -np.expm1(-ratio.clip(min=-2.0))  # see `center_log_ratio`
        drives = given.reshape(-1) * along.sum(1)
        exact, k3 = self.exact_kl(), (np.exp(-ratio) - 1 + ratio).sum(1)
        measured = BatchMeasurement(
            kl=(exact if case.statistic == "full" else float(k3.mean())) / case.scale,
            completions=case.batch,
            optimizer_steps=steps,
            learning_rate=case.learning_rate,
            standard_error=(0.0 if case.statistic == "full" else float(k3.std()) / math.sqrt(case.batch)) / case.scale,
            applied=coef if case.placement == "reward" else None,
            drive=float(drives.mean()),
            drag=float((charged * along).sum(1).mean()),
            drive_error=float(drives.std()) / math.sqrt(case.batch),
        )
        return Rollout(tokens, advantages.reshape(-1), ratio, logps[places, tokens], coef, measured, exact)

    def learn(self, rollouts: list[Rollout]) -> None:
        for _ in range(self.case.steps):
            gradients = [self._gradient(rollout) for rollout in rollouts]
            self._ascend(self.features.T @ (sum(gradients) / len(gradients)))

    def _gradient(self, rollout: Rollout) -> np.ndarray:
        logps, places = self.logps(), np.arange(TOKENS)[None]
        probabilities, advantages = np.exp(logps), rollout.advantages[:, None]  # (B, 1)
        if self.case.placement == "advantage":
            advantages = advantages + rollout.coef * (rollout.log_ratios.mean() - rollout.log_ratios)
        ratio = np.exp(logps[places, rollout.tokens] - rollout.logps)
        clipped = ((advantages > 0) & (ratio > 1.2)) | ((advantages < 0) & (ratio < 0.8))
        weights = np.where(clipped, 0.0, ratio * advantages)
        gradient = np.zeros((TOKENS, SYMBOLS))
        np.add.at(gradient, (np.broadcast_to(places, rollout.tokens.shape), rollout.tokens), weights)
        gradient = (gradient - weights.sum(0)[:, None] * probabilities) / rollout.tokens.size
        if self.case.placement == "loss":
            log_ratio = logps - log_softmax(self.base)
            exact = (probabilities * log_ratio).sum(-1, keepdims=True)
            gradient -= rollout.coef * probabilities * (log_ratio - exact) / TOKENS
        return gradient

    def _ascend(self, gradient: np.ndarray) -> None:
        gradient = gradient * min(1.0, 1.0 / (np.linalg.norm(gradient) + 1e-9))
        self.step += 1
        self.first = 0.9 * self.first + 0.1 * gradient
        self.second = 0.999 * self.second + 0.001 * gradient**2
        direction = self.first / (1 - 0.9**self.step)
        scale = np.sqrt(self.second / (1 - 0.999**self.step)) + 1e-8
        self.weights = self.weights + self.case.learning_rate * direction / scale


def follow(name: str, seed: int, case: Case, **settings) -> list[float]:
    """Exact KL divided by the target over one training, once per optimizer step or rollout."""
    start = case.start or (None if name == "hold" else START)
    if name == "free":
        name, start, settings = "fixed", 0.0, {}
    controller = get_kl_controller(name, init_coef=start, target=case.target, **settings)
    policy, shares, steps = Policy(seed, case), [], 0
    for batch in range(case.batches):
        policy.has_reward = batch >= case.dead
        rollouts = []
        for _ in range(case.rollouts):
            rollout = policy.sample(controller.value, steps)
            controller.observe(rollout.measured)
            if controller.acts_at_once and rollout.measured.applied is None:
                rollout.coef = controller.value
            rollouts.append(rollout)
            steps = 0
        shares.append(rollouts[0].exact / case.scale / case.target)
        policy.learn(rollouts)
        steps = case.steps
    return shares


def arrival(shares: list[float], case: Case) -> float:
    """Number of batches with reward before the KL reaches the target, from below or from above."""
    for batch, share in enumerate(shares):
        if (share <= 1 / ARRIVED) if case.distance else (share >= ARRIVED):
            return max(batch - case.dead, 1)
    return math.nan


@cache
def free_arrival(seed: int, case: Case) -> float:
    return arrival(follow("free", seed, case), case)


def judge(name: str, case: Case, **settings) -> dict[str, float]:
    """Judge one controller: means over the seeds, and the worst seed for error and peak."""
    runs = [follow(name, seed, case, **settings) for seed in range(SEEDS)]
    half = case.dead + (case.batches - case.dead) // 2
    errors = [relative_rms_error(run[half:], 1.0) for run in runs]
    # If the run starts far above its target, the way down is not a peak.
    peaks = [max(run[half:] if case.distance else run) for run in runs]
    arrivals = [arrival(run, case) for run in runs]
    free = [1.0 if case.distance else free_arrival(seed, case) for seed in range(SEEDS)]
    return {
        "mean": fmean(fmean(run[half:]) for run in runs),
        "error": fmean(errors),
        "worst error": max(errors),
        "peak": fmean(peaks),
        "worst peak": max(peaks),
        "arrival": fmean(one / other for one, other in zip(arrivals, free, strict=True)),
    }


def cells(one: dict[str, float]) -> str:
    arrived = "never" if math.isnan(one["arrival"]) else f"{one['arrival']:.1f}"
    return f"{one['error']:.2f} ({one['worst error']:.2f}) | {one['peak']:.2f} ({one['worst peak']:.2f}) | {arrived}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("controllers", nargs="*", default=["hold", "pid", "adaptive"], help="default: all three")
    names = parser.parse_args().controllers
    print("Means over the seeds, with the worst seed in brackets. Arrival is relative to an unpenalised run, or in")
    print("batches if the run starts above its target.\n")
    print("| case |" + "".join(f" `{name}`: error | peak | arrival |" for name in names))
    print("|---|" + "---|---|---|" * len(names))
    for number, (label, case) in enumerate(CASES.items(), 1):
        print(f"\r{number}/{len(CASES)} {label}", end="\033[K", file=sys.stderr, flush=True)
        row = []
        for name in names:
            if name == "adaptive":
                tried = [judge(name, case, horizon=horizon) for horizon in HORIZONS]
                row.append(cells(min(tried, key=lambda one: one["error"])))
            else:
                row.append(cells(judge(name, case)))
        print(f"\r| {label} | {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
