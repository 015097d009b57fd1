"""What a run on dialogues did to the policy: held-out reward and perplexity, samples, a table and a figure."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProgressCallback, TrainerCallback

from hh.measures import heldout_perplexity


@dataclass
class Evaluation:
    """
    Attributes:
        reward (`float`):
            Mean score of answers sampled for held-out prompts.
        perplexity (`float`):
            Perplexity of the held-out chosen answers.
        answers (`list[str]`):
            The sampled answers.
    """

    reward: float
    perplexity: float
    answers: list[str] = field(repr=False)


def cut_at(text: str, stops: Sequence[str]) -> str:
    """The text before the first stop string in it."""
    ends = [text.find(stop) for stop in stops if stop in text]
    return text[: min(ends)] if ends else text


@torch.no_grad()
def sample_answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    max_new_tokens: int,
    temperature: float,
    stops: Sequence[str] = (),
    batch_size: int = 64,
    seed: int = 0,
) -> list[str]:
    """Sample one answer per prompt. The fixed seed is the same before and after, and does not affect training."""
    training = model.training
    model.eval()
    answers = []
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            for start in range(0, len(prompts), batch_size):
                inputs = tokenizer(
                    text=list(prompts[start : start + batch_size]),
                    return_tensors="pt",
                    padding=True,
                    padding_side="left",
                    return_token_type_ids=False,
                ).to(model.device)
                output = model.generate(
                    **inputs,
                    max_new_tokens=max_new_tokens,
                    do_sample=True,
                    temperature=temperature,
                    top_k=0,
                    pad_token_id=tokenizer.pad_token_id,
                    eos_token_id=tokenizer.eos_token_id,
                )
                texts = tokenizer.batch_decode(output[:, inputs["input_ids"].size(1) :], skip_special_tokens=True)
                answers += [cut_at(text, stops) for text in texts]
    finally:
        model.train(training)
    return answers


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[dict[str, str]],
    score: Callable[[list[str], list[str]], list[float]],
    max_length: int,
    **sampling,
) -> Evaluation:
    """Sample answers to held-out prompts, score them, and measure the perplexity of the chosen answers."""
    prompts = [row["prompt"] for row in rows]
    answers = sample_answers(model, tokenizer, prompts, **sampling)
    scores = score(prompts, answers)
    perplexity = heldout_perplexity(model, tokenizer, rows, max_length=max_length)
    return Evaluation(sum(scores) / len(scores), perplexity, answers)


class PerplexityCallback(TrainerCallback):
    """
    Measure the held-out perplexity a fixed number of times during training.

    Args:
        measure (`Callable[[], float]`):
            The measurement.
        times (`int`, *optional*, defaults to `10`):
            Number of measurements.
    """

    def __init__(self, measure: Callable[[], float], times: int = 10):
        self.measure = measure
        self.times = times
        self.curve: list[tuple[int, float]] = []

    def on_train_begin(self, args, state, control, **kwargs):
        self.curve.append((state.global_step, self.measure()))

    def on_step_end(self, args, state, control, **kwargs):
        every = max(1, state.max_steps // self.times)
        if state.global_step % every == 0:
            self.curve.append((state.global_step, self.measure()))


class BriefProgress(ProgressCallback):
    """Transformers' progress bar with only the few numbers that tell how PPO is going."""

    SHOWN = {"reward": "reward", "klx/kl": "KL", "klx/coef": "coefficient", "ppo/explained_variance": "value EV"}

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and self.training_bar is not None and logs is not None:
            known = [(label, logs[key]) for key, label in self.SHOWN.items() if logs.get(key) is not None]
            if known:
                numbers = "  ".join(f"{label} {value:.4g}" for label, value in known)
                self.training_bar.write(f"      step {state.global_step:>5}  {numbers}")


class StopAtKL(TrainerCallback):
    """End training once the logged KL is above a limit."""

    def __init__(self, limit: float):
        self.limit = limit

    def on_log(self, args, state, control, logs=None, **kwargs):
        if (logs or {}).get("klx/kl", 0.0) > self.limit:
            control.should_training_stop = True


def last_quarter_mean(history: Sequence[dict], key: str) -> float | None:
    """Mean of a logged metric over the last quarter of the run."""
    values = [entry[key] for entry in history if entry.get(key) is not None]
    tail = values[-max(1, len(values) // 4) :]
    return sum(tail) / len(tail) if tail else None


def format_report(
    before: Evaluation,
    after: Evaluation,
    history: Sequence[dict],
    target: float | None,
    rows: Sequence[dict],
    samples: int,
) -> str:
    """The final table of a run, with a few dialogues before and after."""
    kl = last_quarter_mean(history, "klx/kl")
    coefficients = [entry["klx/coef"] for entry in history if "klx/coef" in entry]
    lines = [
        "",
        f"{'':32}{'before':>12}{'after':>12}",
        f"{'held-out reward':32}{before.reward:>12.3f}{after.reward:>12.3f}",
        f"{'held-out perplexity':32}{before.perplexity:>12.3f}{after.perplexity:>12.3f}",
    ]
    if coefficients:
        lines.append(f"{'KL coefficient':32}{coefficients[0]:>12.4f}{coefficients[-1]:>12.4f}")
    if kl is not None:
        lines.append(f"{'KL, last quarter of the run':32}{0.0:>12.3f}{kl:>12.3f}")
        if target is not None:
            lines.append(f"{'KL target':32}{'':>12}{target:>12.3f}  ({100 * (kl / target - 1):+.0f}%)")
    for index in range(min(samples, len(rows))):
        lines += [
            "",
            rows[index]["prompt"].strip(),
            f"  before:{before.answers[index].rstrip()}",
            f"  after: {after.answers[index].strip()}",
        ]
    return "\n".join(lines)


def write_report(
    folder: Path,
    before: Evaluation,
    after: Evaluation,
    history: Sequence[dict],
    perplexities: Sequence[tuple[int, float]],
    free: Sequence[dict] = (),
) -> None:
    """Write the numbers behind the table and the figure as JSON."""
    content = {
        "before": asdict(before),
        "after": asdict(after),
        "perplexity": [{"step": step, "value": value} for step, value in perplexities],
        "history": list(history),
        "free_run": list(free),
    }
    (folder / "report.json").write_text(json.dumps(content, indent=2))


def load_pyplot():
    """Matplotlib's pyplot, or `None` if matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw_report(
    path: Path,
    history: Sequence[dict],
    perplexities: Sequence[tuple[int, float]],
    target: float | None,
    free: Sequence[dict] = (),
) -> bool:
    """
    Draw the curves of reward, KL and target, coefficient and perplexity, and those of a run without a penalty in grey.
    Returns `False` without matplotlib.
    """
    pyplot = load_pyplot()
    if pyplot is None:
        return False
    figure, axes = pyplot.subplots(2, 2, figsize=(10, 6.5), constrained_layout=True)
    curves = (
        (axes[0][0], "reward", "reward", "mean score of the reward model"),
        (axes[0][1], "klx/kl", "KL to the reference", "nats per completion"),
        (axes[1][0], "klx/coef", "KL coefficient", "reward per nat"),
    )
    for axis, key, title, unit in curves:
        points = [(entry["step"], entry[key]) for entry in free if entry.get(key) is not None]
        if points and key != "klx/coef":
            axis.plot(*zip(*points, strict=True), color="0.5", linestyle=":", linewidth=2, label="no penalty")
        points = [(entry["step"], entry[key]) for entry in history if entry.get(key) is not None]
        if points:
            axis.plot(*zip(*points, strict=True), color="tab:blue", label="this run")
        axis.set_title(title)
        axis.set_ylabel(unit)
    if target is not None:
        axes[0][1].axhline(target, color="tab:red", linestyle="--", label="target")
        axes[0][1].axhspan(0.8 * target, 1.2 * target, color="tab:red", alpha=0.1, label="target ± 20%")
        axes[0][1].legend()
    axes[1][0].set_yscale("log")
    if perplexities:
        axes[1][1].plot(*zip(*perplexities, strict=True), color="tab:blue", marker="o", markersize=3)
    axes[1][1].set_title("held-out perplexity")
    axes[1][1].set_ylabel("perplexity per token")
    for axis in axes.flat:
        axis.set_xlabel("optimizer step")
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True
