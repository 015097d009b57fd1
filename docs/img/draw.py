"""Draw the figures of `docs/choosing.md`: python docs/img/draw.py [FOLDER]. Trains only a table of 16 x 64 logits."""

import sys
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure

from trl_klx import BatchMeasurement, center_kl_advantages, estimate_kl, get_kl_controller


POSITIONS, SYMBOLS, BATCH, STEPS, TARGET, RATE = 16, 64, 64, 240, 4.0, 0.05
CONTROLLERS = {
    "fixed, 0.1": ("fixed", {}),
    "adaptive, horizon 10000": ("adaptive", {}),
    "adaptive, horizon 1000": ("adaptive", {"horizon": 1000}),
    "exponential": ("exponential", {}),
    "hold": ("hold", {}),
}


def save(figure: Figure, path: Path) -> None:
    for axis in figure.axes:
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=100)


def draw_estimators(path: Path) -> None:
    """Plot the value at one token, and the mean over the policy's tokens against the true KL."""
    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    ratios = torch.linspace(-2.5, 2.5, 201)
    tilts = torch.linspace(0.0, 2.0, 41)
    preference = torch.linspace(-2.0, 2.0, SYMBOLS)
    reference = torch.full((SYMBOLS,), -np.log(SYMBOLS))
    policies = torch.log_softmax(tilts[:, None] * preference, dim=1)  # (tilt, symbol)
    references = reference.expand_as(policies)
    true_kl = (policies.exp() * (policies - references)).sum(1)
    # Line style, and where the label stands on the left and on the right.
    kinds = {
        "k1": ("-", (-2.3, -1.6), (1.14, 0.55)),
        "k2": ("--", (-2.9, 3.3), (1.14, 0.85)),
        "k3": ("-.", (-2.75, 5.3), (1.14, 1.12)),
        "abs": (":", (-2.95, 2.5), (1.14, 1.45)),
        "trlx": ((0, (5, 1, 1, 1, 1, 1)), (2.15, 4.6), (1.14, 2.0)),
        "importance": ((0, (1, 3)), (-0.6, 5.3), (0.42, 4.6)),
    }
    for number, (kind, (style, here, there)) in enumerate(kinds.items()):
        look = {"linestyle": style, "color": f"C{number}", "linewidth": 1.8}
        left.plot(ratios, estimate_kl(ratios, torch.zeros_like(ratios), kind), **look)
        mean = (policies.exp() * estimate_kl(policies, references, kind)).sum(1)
        right.plot(true_kl, mean, **look)
        for axis, place in ((left, here), (right, there)):
            axis.text(*place, kind, color=look["color"], fontsize="large")
    left.set(title="value at one token", xlabel="log-ratio, policy minus reference (nats)", ylabel="value (nats)")
    left.set(xlim=(-3.1, 3.1), ylim=(-2.6, 6))
    right.set(title="mean over the policy's tokens", xlabel="true KL (nats)", ylabel="mean (nats)", ylim=(0, 6))
    right.set(xlim=(0, 1.32))
    save(figure, path)


def draw_placements(path: Path) -> None:
    """Plot the advantage of every token, for one completion with a good and one with a bad reward."""
    figure = Figure(figsize=(9.0, 3.4), layout="constrained")
    kl = torch.tensor([[0.1, 0.2, 1.6, 0.1, 0.3, 0.1], [0.2, 0.1, 0.1, 0.4, 0.1, 0.3]])
    advantages, mask, coef = torch.tensor([0.5, -0.5]), torch.ones_like(kl), 0.5
    adjusted = center_kl_advantages(advantages, kl, mask, coef)
    # In the reward: each completion pays for its own KL, less the mean over the group.
    whole = advantages - coef * (kl.sum(1) - kl.sum(1).mean())
    for axis, row, title in zip(figure.subplots(1, 2, sharey=True), (0, 1), ("good", "bad"), strict=True):
        tokens = np.arange(kl.shape[1])
        axis.bar(tokens - 0.25, advantages[row].expand(6), 0.25, label="no penalty", color="0.75")
        axis.bar(tokens, adjusted[row], 0.25, label='"advantage": each token for itself', hatch="//")
        axis.bar(tokens + 0.25, whole[row].expand(6), 0.25, label='"reward": all tokens alike', hatch="..")
        axis.set_title(f"completion with a {title} reward")
        axis.set_xticks(tokens, [f"{value:.1f}" for value in kl[row]])
        axis.set_xlabel("KL of the token (nats)")
        axis.axhline(0.0, color="0.3", linewidth=0.8)
    figure.axes[0].set_ylabel("advantage of the token")
    figure.axes[1].legend(fontsize="small")
    save(figure, path)


def simulate(name: str, settings: dict, seed: int = 0) -> tuple[list[float], list[float]]:
    """Policy gradient with Adam on a table of logits, under a controller. Returns KL and coefficient of each step."""
    random = np.random.default_rng(seed)
    worth = random.normal(size=(POSITIONS, SYMBOLS)) / POSITIONS**0.5
    logits, first, second = (np.zeros((POSITIONS, SYMBOLS)) for _ in range(3))
    controller = get_kl_controller(name, init_coef=0.1, target=TARGET, **settings)
    kls, coefs, places = [], [], np.arange(POSITIONS)
    for step in range(1, STEPS + 1):
        probs = np.exp(logits - logits.max(1, keepdims=True))
        probs /= probs.sum(1, keepdims=True)
        tokens = (random.random((BATCH, POSITIONS, 1)) > probs.cumsum(1)).sum(2).clip(max=SYMBOLS - 1)
        ratio = np.log(probs[places, tokens] * SYMBOLS)  # the reference is uniform
        reward = worth[places, tokens].sum(1)
        reward = (reward - reward.mean()) / reward.std()
        totals, pulls = (np.exp(-ratio) - 1 + ratio).sum(1), reward * ratio.sum(1)
        kls.append(float(totals.mean()))
        coefs.append(controller.value)
        controller.observe(
            BatchMeasurement(
                kls[-1],
                BATCH,
                optimizer_steps=min(step - 1, 1),
                learning_rate=RATE,
                drive=float(pulls.mean()),
                drag=float((ratio**2).sum(1).mean()),
                standard_error=float(totals.std() / BATCH**0.5),
                drive_error=float(pulls.std() / BATCH**0.5),
            )
        )
        if controller.acts_at_once:
            coefs[-1] = controller.value
        advantage = reward[:, None] + coefs[-1] * (ratio.mean() - ratio)
        gradient = np.zeros_like(logits)
        np.add.at(gradient, (np.broadcast_to(places, tokens.shape), tokens), advantage)
        gradient = (gradient - advantage.sum(0)[:, None] * probs) / BATCH
        first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
        logits += RATE * (first / (1 - 0.9**step)) / (np.sqrt(second / (1 - 0.999**step)) + 1e-8)
    return kls, coefs


def draw_controllers(path: Path) -> None:
    figure = Figure(figsize=(9.0, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    styles = ("-", "--", "-.", ":", "-")
    for (label, (name, settings)), style in zip(CONTROLLERS.items(), styles, strict=True):
        kls, coefs = simulate(name, settings)
        width = 2.2 if name == "hold" else 1.2
        left.plot(kls, style, label=label, linewidth=width)
        right.plot(coefs, style, linewidth=width)
    left.axhspan(0.8 * TARGET, 1.2 * TARGET, color="0.3", alpha=0.12, linewidth=0)
    left.axhline(TARGET, color="0.3", linestyle="--", linewidth=1.0)
    left.set(
        title=f"KL, target {TARGET:g} nats per sequence",
        xlabel="step",
        ylabel="KL (nats)",
        yscale="log",
        ylim=(0.1, None),
    )
    right.set(title="coefficient", xlabel="step", ylabel="reward per nat", yscale="log")
    left.legend(fontsize="small")
    save(figure, path)


PICTURES = {"estimators": draw_estimators, "placements": draw_placements, "controllers": draw_controllers}


def main(folder: Path) -> None:
    for name, draw in PICTURES.items():
        draw(folder / f"{name}.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
