"""
Bias, variance and cost of every KL estimator.

    python benchmarks/estimators.py                     # the statistics, then time and memory
    python benchmarks/estimators.py --assets ASSETS     # the figures of docs/choosing.md
    python benchmarks/estimators.py --docs              # no measurement: write the JSON's tables into docs/choosing.md

Statistics: a pretrained model is fine-tuned on a few texts, and the change of its weights is scaled to several
distances. It samples completions, and every estimator is compared with the exact KL in the visited states.
Cost: scoring the reference for the sampled estimators, and for `full`.

The pretrained model is the tiny one that `recipes/ppo_hh.py` builds, or with `--assets` the one that
`benchmarks/stories.py` describes.
"""

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median


os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "recipes"), str(Path(__file__).parent)]

import torch  # noqa: E402
from measuring import llama_config, lm_head_share  # noqa: E402
from stories import model_path, write_dataset  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM  # noqa: E402
from trl.trainer.utils import add_fused_lm_head  # noqa: E402

from hh.bootstrap import prepare_default  # noqa: E402
from trl_klx.control.forward_pass import captured_hidden, no_lm_head  # noqa: E402
from trl_klx.maths.estimators import (  # noqa: E402
    KL_ESTIMATORS,
    estimate_full_kl,
    estimate_kl,
    full_kl_and_logps,
)


DISTANCES = (0.1, 0.2, 0.3, 0.5)
BATCH, BATCHES, LENGTH = 32, 24, 48
# Hidden size and layers: the vocabulary's share of the work shrinks as models grow.
SIZES = ((288, 6), (768, 12))
VOCABULARIES = (32000, 128000)
ROWS, TOKENS = 4, 128


def load_model(args):
    if args.assets is not None:
        path, data = model_path(args.assets, args.model), write_dataset(args.assets, args.output)
        rows = [json.loads(line) for line in data.read_text().splitlines()]
    else:
        assets = prepare_default(args.cache)
        path, rows = assets.sft_path, assets.train_rows
    return AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path), rows


def fine_tune(model, tokenizer, rows: list[dict], steps: int = 40) -> dict[str, torch.Tensor]:
    """Train briefly on a few texts, and return the change of the weights. The model is left as it was."""
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    texts = [row["prompt"] + row["chosen"] for row in rows[:16]]
    pad = tokenizer.pad_token or tokenizer.eos_token
    tokenizer.pad_token = pad
    inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right", return_token_type_ids=False)
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    for _ in range(steps):
        model(**inputs, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    added = {name: weight - before[name] for name, weight in model.state_dict().items()}
    model.load_state_dict(before)
    return added


@torch.no_grad()
def sample(policy, reference, tokenizer, prompts: list[str]) -> dict[str, torch.Tensor]:
    """Per-token KL by every estimator, `(B, T)` each, on completions sampled from the policy, and their mask."""
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left", return_token_type_ids=False)
    output = policy.generate(
        **inputs, do_sample=True, top_k=0, max_new_tokens=LENGTH, pad_token_id=tokenizer.pad_token_id
    )
    start = inputs["input_ids"].size(1)
    tokens = output[:, start:]
    ended = (tokens == tokenizer.eos_token_id).cumsum(1) - (tokens == tokenizer.eos_token_id).long()
    mask = (ended == 0).float()
    attention = torch.cat([inputs["attention_mask"], mask.long()], dim=1)
    states = [
        model.model(input_ids=output, attention_mask=attention).last_hidden_state[:, start - 1 : -1]
        for model in (policy, reference)
    ]
    logps = [
        model.lm_head(hidden).float().log_softmax(-1).gather(2, tokens.unsqueeze(2)).squeeze(2)
        for model, hidden in zip((policy, reference), states, strict=True)
    ]
    kls = {name: estimate_kl(*logps, name) for name in KL_ESTIMATORS if name != "full"}
    kls["full"] = estimate_full_kl(*states, policy.lm_head, reference.lm_head)
    return kls | {"mask": mask}


def compare(args) -> list[dict]:
    """One row per distance and estimator."""
    torch.manual_seed(0)
    reference, tokenizer, rows = load_model(args)
    policy, _, _ = load_model(args)
    added = fine_tune(policy, tokenizer, rows)
    base = reference.state_dict()
    prompts = [row["prompt"] for row in rows[100:]]
    table = []
    for distance in DISTANCES:
        policy.load_state_dict({name: weight + distance * added[name] for name, weight in base.items()})
        policy.eval(), reference.eval()
        batches = [
            sample(
                policy, reference, tokenizer, [prompts[(BATCH * index + row) % len(prompts)] for row in range(BATCH)]
            )
            for index in range(BATCHES)
        ]
        kept = {
            name: torch.cat([batch[name][batch["mask"].bool()] for batch in batches]).double()
            for name in KL_ESTIMATORS
        }
        means = {
            name: torch.stack([(batch[name] * batch["mask"]).sum(1).mean() for batch in batches]).double()
            for name in KL_ESTIMATORS
        }
        exact = kept["full"].mean().item()
        for name in KL_ESTIMATORS:
            error = (kept[name] - kept["full"]).mean().item()
            noise = (kept[name] - kept["full"]).std().item() / math.sqrt(len(kept[name]))
            table.append(
                {
                    "estimator": name,
                    "kl_per_sequence": means["full"].mean().item(),
                    "kl_per_token": exact,
                    "bias": error / exact,
                    "bias_error": noise / exact,
                    # Of single tokens, and of the mean over a batch of completions, which drives a controller.
                    "token_variance": (kept[name].var() / kept["k3"].var()).item(),
                    "batch_variance": (means[name].var() / means["k3"].var()).item(),
                    "batch_noise": (means[name].std() / means["full"].mean()).item(),
                }
            )
    return table


def measure_cost(hidden_size: int, layers: int, vocabulary: int, kind: str) -> dict:
    """
    CPU time and peak memory of scoring a reference: with TRL's LM head, which gives the log-probs of the tokens, and
    with `full`, which applies both LM heads itself and gets these log-probs on the way.
    """
    torch.manual_seed(0)
    model = LlamaForCausalLM(llama_config(hidden_size, layers, vocabulary)).eval()
    add_fused_lm_head(model)
    tokens = torch.randint(2, vocabulary, (ROWS, TOKENS))

    def score() -> None:
        model(input_ids=tokens, labels=tokens, fused_lm_head=True)

    def score_with_full() -> None:
        with no_lm_head(), captured_hidden(model, TOKENS - 1) as hidden:
            score()
        full_kl_and_logps(policy, hidden[0], model.lm_head, model.lm_head, tokens[:, 1:])

    ways = {"forward": score, "full": score_with_full}
    times: dict[str, list[float]] = {name: [] for name in ways}
    with torch.no_grad():
        policy = model.model(input_ids=tokens).last_hidden_state[:, :-1]
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(5 if kind == "time" else 1):
            for name, call in ways.items():
                if kind in ("time", name):
                    start = time.process_time()
                    call()
                    times[name].append(time.process_time() - start)
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return {name: median(values[1:] or values) for name, values in times.items() if values} | {"memory": peak}


def measure_costs() -> list[dict]:
    """Measure each case in its own processes, because peak memory cannot be reset."""
    table = []
    for hidden_size, layers in SIZES:
        for vocabulary in VOCABULARIES:
            results = {}
            for kind in ("time", "forward", "full"):
                case = json.dumps([hidden_size, layers, vocabulary, kind])
                command = [sys.executable, __file__, "--case", case]
                lines = subprocess.run(command, check=True, capture_output=True).stdout.splitlines()
                results[kind] = json.loads(lines[-1])  # imported packages may print too
            table.append(
                {
                    "hidden": hidden_size,
                    "layers": layers,
                    "vocabulary": vocabulary,
                    "forward_seconds": results["time"]["forward"],
                    "full_seconds": results["time"]["full"],
                    "ratio": results["time"]["full"] / results["time"]["forward"],
                    "memory_forward": results["forward"]["memory"],
                    "memory_full": results["full"]["memory"],
                    "memory_btv": ROWS * TOKENS * vocabulary * 4 / 2**20,
                }
            )
    return table


def format_statistics(table: list[dict]) -> str:
    lines = []
    distances = sorted({row["kl_per_sequence"] for row in table})
    titles = " | ".join(f"{distance:.2f} nats" for distance in distances)
    lines.append(f"| estimator | bias at {titles} | token variance / k3's | batch variance / k3's | batch noise |")
    lines.append("|---|" + "---|" * (len(distances) + 3))
    for name in KL_ESTIMATORS:
        rows = sorted((row for row in table if row["estimator"] == name), key=lambda row: row["kl_per_sequence"])
        biases = " | ".join(f"{100 * row['bias']:+.3g}% ± {100 * row['bias_error']:.2g}" for row in rows)
        cells = [median(row[key] for row in rows) for key in ("token_variance", "batch_variance", "batch_noise")]
        lines.append(f"| `{name}` | {biases} | {cells[0]:.3g} | {cells[1]:.3g} | {100 * cells[2]:.3g}% |")
    return "\n".join(lines)


def format_costs(table: list[dict]) -> str:
    lines = [
        "| hidden, layers | vocabulary | LM head's share | reference | with `full` | ratio "
        "| memory: reference | with `full` | a (B, T, V) tensor |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in table:
        lines.append(
            f"| {row['hidden']}, {row['layers']} | {row['vocabulary']} "
            f"| {lm_head_share(row['hidden'], row['layers'], row['vocabulary']):.0%} | {row['forward_seconds']:.2f} s "
            f"| {row['full_seconds']:.2f} s | {row['ratio']:.2f} | {row['memory_forward']:.0f} MB "
            f"| {row['memory_full']:.0f} MB | {row['memory_btv']:.0f} MB |"
        )
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", type=Path, help="folder of stories260K (default: the tiny model of ppo_hh.py)")
    parser.add_argument("--model", help="causal language model, folder or Hub id (default: stories260K of the assets)")
    parser.add_argument(
        "--cache", type=Path, default=ROOT / "outputs" / "hh_default", help="folder of the tiny models"
    )
    parser.add_argument("--output", type=Path, default=ROOT / "outputs" / "estimators", help="folder for the JSON")
    parser.add_argument("--no-cost", action="store_true", help="measure only the statistics")
    parser.add_argument("--docs", action="store_true", help="only write the JSON's tables into docs/choosing.md")
    parser.add_argument("--case", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.model is not None and args.assets is None:
        parser.error("--model needs --assets, which has the prompts")
    if args.case is not None:
        print(json.dumps(measure_cost(*json.loads(args.case))))
        return
    args.output.mkdir(parents=True, exist_ok=True)
    file = args.output / "estimators.json"
    results = json.loads(file.read_text()) if file.exists() else {}
    if not args.docs:
        results["statistics"] = compare(args)
        if not args.no_cost:
            results["costs"] = measure_costs()
        file.write_text(json.dumps(results, indent=1))
    text = format_statistics(results["statistics"])
    if "costs" in results:
        text += "\n\n" + format_costs(results["costs"])
    print(text)
    if args.docs:
        page = ROOT / "docs" / "choosing.md"
        start, end = "<!-- estimators -->", "<!-- /estimators -->"
        before, rest = page.read_text().split(start)
        page.write_text(f"{before}{start}\n{text}\n{end}{rest.split(end)[1]}")


if __name__ == "__main__":
    main(sys.argv[1:])
