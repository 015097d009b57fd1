"""
What a reference in bf16 does to the KL, measured on a model that is its own reference, so that the KL is 0 and only
rounding is measured; and on a copy with noise on its weights, where the KL in fp32 is the right one.

The model needs no training loop: completions are sampled from the fp32 policy, and both models score them as the
trainers do, in fp32 log-probs.

The model is any causal language model, a folder or a Hub id. The figures in the docs come from `stories260K`, see
`benchmarks/stories.py`.

```bash
python benchmarks/reference_dtype.py --model stories260K
```
"""

import argparse
import os


os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import AutoModelForCausalLM

from trl_klx import estimate_kl


COMPLETIONS, LENGTH, BATCH = 256, 48, 64
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@torch.no_grad()
def sample(model, start: int) -> torch.Tensor:
    torch.manual_seed(0)
    prompt = torch.full((COMPLETIONS, 1), start)
    batches = [
        model.generate(
            chunk,
            attention_mask=torch.ones_like(chunk),
            max_new_tokens=LENGTH,
            min_new_tokens=LENGTH,
            do_sample=True,
            top_k=0,
            pad_token_id=0,
        )
        for chunk in prompt.split(BATCH)
    ]
    return torch.cat(batches)


@torch.no_grad()
def distributions(model, ids: torch.Tensor) -> torch.Tensor:
    logits = torch.cat([model(chunk).logits[:, :-1].float() for chunk in ids.split(BATCH)])
    return torch.log_softmax(logits, dim=-1)


def measure(policy: torch.Tensor, reference: torch.Tensor, ids: torch.Tensor) -> dict[str, float]:
    """Nats per sequence, mean over completions."""
    tokens = ids[:, 1:].unsqueeze(-1)
    logps, ref_logps = policy.gather(-1, tokens).squeeze(-1), reference.gather(-1, tokens).squeeze(-1)
    found = {kind: estimate_kl(logps, ref_logps, kind).sum(1).mean().item() for kind in ("k1", "k3")}
    return found | {"full": (policy.exp() * (policy - reference)).sum((1, 2)).mean().item()}


def moved(model, scale: float):
    """A copy of the model with noise on its weights, in proportion to each."""
    other = type(model)(model.config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for target, weight in zip(other.parameters(), model.parameters(), strict=True):
            target.copy_(weight + scale * weight.std() * torch.randn(weight.shape, generator=generator))
    return other.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a causal language model: a folder or a Hub id")
    options = parser.parse_args()
    policy = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    ids = sample(policy, policy.config.bos_token_id)
    ours = distributions(policy, ids)
    print(f"{'reference':28}{'k1':>12}{'k3':>12}{'full':>12}   nats per {LENGTH} tokens")
    for what, reference in (("the policy itself", policy), ("noise 0.05", moved(policy, 0.05))):
        state = {name: weight.clone() for name, weight in reference.state_dict().items()}
        for name, dtype in DTYPES.items():
            reference.load_state_dict(state)
            found = measure(ours, distributions(reference.to(dtype), ids), ids)
            reference.float()
            print(f"{what + ', ' + name:28}" + "".join(f"{found[kind]:>12.5f}" for kind in ("k1", "k3", "full")))
        reference.load_state_dict(state)


if __name__ == "__main__":
    main()
