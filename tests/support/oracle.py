"""What KL control should do, computed independently: plain transformers, plain loops, nothing from the package."""

import math

import torch
from peft import PeftModel


def plain_model(policy, adapter: str | None = "default"):
    """The policy as a plain transformers model: the weights copied, an adapter merged by hand."""
    peft = isinstance(policy, PeftModel)
    base = policy.get_base_model() if peft else policy
    # The observed run must not be affected.
    with torch.random.fork_rng():
        plain = type(base)(base.config)
    if not peft:
        plain.load_state_dict(policy.state_dict())
        return plain.eval()
    state = base.state_dict()
    merged = {
        name.replace(".base_layer", "").replace(".original_module", ""): value.clone()
        for name, value in state.items()
        if "lora_" not in name and ".modules_to_save." not in name
    }
    if adapter is not None:
        config = policy.peft_config[adapter]
        for name in [name for name in state if f".modules_to_save.{adapter}." in name]:
            merged[name.replace(f".modules_to_save.{adapter}", "")] = state[name].clone()
        ending = f".lora_A.{adapter}.weight"
        for name in [name for name in state if name.endswith(ending)]:
            stem = name.removesuffix(ending)
            product = state[f"{stem}.lora_B.{adapter}.weight"] @ state[name]
            merged[f"{stem}.weight"] += config.lora_alpha / config.r * product
    plain.load_state_dict(merged)
    return plain.eval()


def log_distributions(model, batch: dict, temperature: float = 1.0) -> torch.Tensor:
    """Log-probs of every vocabulary token at every position of the completions, `(B, T, V)`."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    images = {name: batch[name] for name in ("pixel_values",) if name in batch}
    logits = model(input_ids=ids, attention_mask=mask, **images).logits
    length = batch["completion_ids"].size(1)
    return torch.log_softmax(logits[:, -length - 1 : -1].double() / temperature, dim=-1)


def sampled_logps(model, batch: dict, temperature: float = 1.0) -> torch.Tensor:
    """Log-probs of the completion tokens, `(B, T)`."""
    return log_distributions(model, batch, temperature).gather(2, batch["completion_ids"].unsqueeze(2)).squeeze(2)


FORMULAS = {
    "k1": lambda lr: lr,
    "k2": lambda lr: lr * lr / 2,
    "k3": lambda lr: math.exp(-lr) - 1 + lr,
    "abs": abs,
    "trlx": lambda lr: math.exp(lr) - 1 - lr,
    "importance": lambda lr: math.exp(lr) * lr,
}


@torch.no_grad()
def kl_of_tokens(policy, reference, batch: dict, estimator: str = "k1", temperature: float = 1.0) -> list[list[float]]:
    """KL of each completion token, 0 where it does not count."""
    mask = batch["completion_mask"]
    if "tool_mask" in batch:
        mask = mask * batch["tool_mask"]
    logps, ref_logps = (log_distributions(model, batch, temperature) for model in (policy, reference))
    rows = []
    for row, tokens in enumerate(batch["completion_ids"].tolist()):
        values = []
        for position, token in enumerate(tokens):
            if not mask[row, position]:
                values.append(0.0)
            elif estimator == "full":
                p, q = logps[row, position], ref_logps[row, position]
                values.append(float((p.exp() * (p - q)).sum()))
            else:
                lr = float(logps[row, position, token] - ref_logps[row, position, token])
                values.append(FORMULAS[estimator](lr))
        rows.append(values)
    return rows


def discounted(kl: list[list[float]], counts: list[list[int]], discount: float) -> list[list[float]]:
    """KL-to-go, 0 where the token does not count."""
    return [
        [
            sum(discount ** (later - now) * values[later] for later in range(now, len(values))) if row[now] else 0.0
            for now in range(len(values))
        ]
        for values, row in zip(kl, counts, strict=True)
    ]


def centered(
    kl: list[list[float]], counts: list[list[int]], coef: float, sets: list[list[int]] | None
) -> torch.Tensor:
    """`coef * (mean - kl)` on the tokens that count; `sets` are the rows that share a mean, `None` for no mean."""
    result = [[0.0] * len(row) for row in kl]
    for rows in sets if sets is not None else [[row] for row in range(len(kl))]:
        number = sum(sum(counts[row]) for row in rows)
        total = sum(sum(kl[row]) for row in rows)
        mean = total / number if sets is not None and number else 0.0
        for row in rows:
            result[row] = [coef * (mean - v) if c else 0.0 for v, c in zip(kl[row], counts[row], strict=True)]
    return torch.tensor(result)


def centering_sets(centering: str, rows: int, generations: int, micro_batch: list[int]) -> list[list[int]] | None:
    """The rows that share a mean. `micro_batch` holds the rows of one micro-batch."""
    everything = list(range(rows))
    return {
        "none": None,
        "sequence": [[row] for row in everything],
        "group": [everything[start : start + generations] for start in range(0, rows, generations)],
        "batch": [everything],
        "microbatch": [micro_batch, [row for row in everything if row not in micro_batch]],
    }[centering]


def counting(batch: dict) -> list[list[int]]:
    """Which completion tokens count."""
    mask = batch["completion_mask"]
    return (mask * batch["tool_mask"] if "tool_mask" in batch else mask).tolist()
