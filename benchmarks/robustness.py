"""
Whether `pid` really needs no tuning: its default gains over units, targets, batches, learning rates, placements and
starting values, beside the best of four Ziegler horizons for each of them.

    python benchmarks/robustness.py

Hundreds of real trainings would take days, so the policy here is small: a sequence of 16 tokens out of 64, whose logits
are linear in shared features. It is trained by the real policy gradient (groups of four, normalised advantages, Adam,
clipped gradients), and its KL is measured from samples by k3. `benchmarks/controllers.py` trains language models.
"""

import math
import sys
from statistics import fmean

import numpy as np

from trl_klx import get_kl_controller
from trl_klx.controllers.tracking_error import relative_rms_error, steps_to_settle


TOKENS, SYMBOLS, FEATURES, GROUP, STEPS, SEEDS = 16, 64, 8, 4, 150, 3
HORIZONS = (100, 300, 1000, 10000)
DEFAULT = {
    "batch": 64,
    "learning_rate": 0.1,
    "target": 4.0,
    "unit": "sequence",
    "placement": "advantage",
    "start": 0.05,
}
CASES = {
    "default": {},
    "per token": {"unit": "token", "target": 0.25},
    "target / 4": {"target": 1.0},
    "target x 4": {"target": 16.0},
    "batch 16": {"batch": 16},
    "batch 256": {"batch": 256},
    "learning rate / 3": {"learning_rate": 0.033},
    "learning rate x 3": {"learning_rate": 0.3},
    "in the reward": {"placement": "reward"},
    "in the loss": {"placement": "loss"},
    "start / 10": {"start": 0.005},
    "start x 10": {"start": 0.5},
}


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


class Policy:
    """A policy with a reference, a reward for each token in each place, and an Adam of its own."""

    def __init__(self, seed: int, batch: int, learning_rate: float, placement: str):
        self.rng = np.random.default_rng(seed)
        self.batch, self.learning_rate, self.placement = batch, learning_rate, placement
        self.features = self.rng.normal(size=(TOKENS, FEATURES)) / math.sqrt(FEATURES)
        self.base = self.rng.normal(size=(TOKENS, SYMBOLS)) * 1.5
        self.rewards = self.rng.normal(size=(TOKENS, SYMBOLS))
        self.weights = np.zeros((FEATURES, SYMBOLS))
        self.first, self.second, self.step = 0.0, 0.0, 0

    def train(self, coef: float) -> tuple[float, float]:
        """One step at that coefficient. Returns the KL of the batch that it sampled, measured and exact."""
        logps = log_softmax(self.base + self.features @ self.weights)  # (T, V)
        reference = log_softmax(self.base)
        probabilities = np.exp(logps)
        uniform = self.rng.random((self.batch, TOKENS))
        sums = probabilities.cumsum(-1)
        tokens = np.stack([np.searchsorted(sums[t], uniform[:, t]) for t in range(TOKENS)], 1).clip(max=SYMBOLS - 1)
        places = np.arange(TOKENS)[None]
        ratio = logps[places, tokens] - reference[places, tokens]  # (B, T)
        reward = self.rewards[places, tokens].sum(1)
        if self.placement == "reward":
            reward = reward - coef * ratio.sum(1)
        groups = reward.reshape(-1, GROUP)
        advantage = (groups - groups.mean(1, keepdims=True)) / (groups.std(1, keepdims=True) + 1e-4)
        advantage = np.repeat(advantage.reshape(-1, 1), TOKENS, 1)
        if self.placement == "advantage":
            advantage = advantage + coef * (ratio.mean() - ratio)
        gradient = np.zeros((TOKENS, SYMBOLS))
        np.add.at(gradient, (np.broadcast_to(places, tokens.shape), tokens), advantage)
        gradient = (gradient - advantage.sum(0)[:, None] * probabilities) / (self.batch * TOKENS)
        exact = (probabilities * (logps - reference)).sum(-1, keepdims=True)  # (T, 1)
        if self.placement == "loss":
            gradient -= coef * probabilities * (logps - reference - exact) / TOKENS
        self._ascend(self.features.T @ gradient)
        return float((np.exp(-ratio) - 1 + ratio).sum(1).mean()), float(exact.sum())

    def _ascend(self, gradient: np.ndarray) -> None:
        gradient = gradient * min(1.0, 1.0 / (np.linalg.norm(gradient) + 1e-9))
        self.step += 1
        self.first = 0.9 * self.first + 0.1 * gradient
        self.second = 0.999 * self.second + 0.001 * gradient**2
        direction = self.first / (1 - 0.9**self.step)
        scale = np.sqrt(self.second / (1 - 0.999**self.step)) + 1e-8
        self.weights = self.weights + self.learning_rate * direction / scale


def follow(name: str, seed: int, case: dict, **settings) -> list[float]:
    """The exact KL over one training, as a share of the target."""
    controller = get_kl_controller(name, init_coef=case["start"], target=case["target"], **settings)
    policy = Policy(seed, case["batch"], case["learning_rate"], case["placement"])
    scale = TOKENS if case["unit"] == "token" else 1
    shares = []
    for _ in range(STEPS):
        measured, exact = policy.train(controller.value)
        shares.append(exact / scale / case["target"])
        controller.update(measured / scale, case["batch"])
    return shares


def judge(name: str, case: dict, **settings) -> dict[str, float]:
    runs = [follow(name, seed, case, **settings) for seed in range(SEEDS)]
    settled = [steps_to_settle(run, 1.0) for run in runs]
    return {
        "error": fmean(relative_rms_error(run[STEPS // 2 :], 1.0) for run in runs),
        "peak": fmean(max(run) for run in runs),
        "settled": fmean(STEPS if step is None else step for step in settled),
    }


def main() -> None:
    print("| case | `pid`: error | peak | settled | best Ziegler: error | peak | settled | its horizon |")
    print("|---|---|---|---|---|---|---|---|")
    for number, (label, changes) in enumerate(CASES.items(), 1):
        print(f"\r{number}/{len(CASES)} {label}", end="\033[K", file=sys.stderr, flush=True)
        case = {**DEFAULT, **changes}
        pid = judge("pid", case)
        ziegler = {horizon: judge("adaptive", case, horizon=horizon) for horizon in HORIZONS}
        best = min(ziegler, key=lambda horizon: ziegler[horizon]["error"])
        cells = [f"{one['error']:.2f} | {one['peak']:.2f} | {one['settled']:.0f}" for one in (pid, ziegler[best])]
        print(f"\r| {label} | {cells[0]} | {cells[1]} | {best} |", flush=True)


if __name__ == "__main__":
    main()
