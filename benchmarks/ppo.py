"""
KLXPPO against the PPOTrainer of TRL 1.12, TRL's last one, in CPU time per rollout and in peak memory.

Policy, reward model, prompts, lengths, epochs and batch are the same. TRL 1.12 runs in its own virtual environment,
which is created on the first run as a layer over the current one, so that all other packages are the same too. It
needs a separate value model; KLXPPO's value function is a head on the policy. Each run is its own process, and the
runs of a comparison take turns. The first rollout is not timed.

```bash
python benchmarks/ppo.py                           # a few minutes, on a tiny model
python benchmarks/ppo.py --full --json ppo.json    # hours; can be stopped and continued with the same file
```
"""

import argparse
import json
import os
import site
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

from measuring import (
    PLAIN_RUN,
    Results,
    Stopwatch,
    build_tokenizer,
    llama_config,
    lm_head_share,
    stoppable,
    take_turns,
)


OLD_TRL = "1.12.0"
BATCH = 8
VALUE_LAYERS = 2  # the default of `num_value_layers`
GOALS = {"seconds": 0.70, "megabytes": 0.33}


def old_environment(folder: Path) -> str:
    """The interpreter of an environment with TRL 1.12 and otherwise our packages. Creates it if it is missing."""
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    done = folder / f"trl-{OLD_TRL}"
    if not done.exists():
        print(f"creating {folder} with TRL {OLD_TRL} ...", file=sys.stderr)
        venv.create(folder, clear=True)
        paths = sysconfig.get_paths(vars={"base": str(folder), "platbase": str(folder)})
        packages = Path(paths["purelib"])
        # Packages that the new environment lacks come from the current one.
        (packages / "below.pth").write_text("\n".join(site.getsitepackages()) + "\n")
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", packages, f"trl=={OLD_TRL}"],
            check=True,
        )
        found = [python, "-c", "import trl; print(trl.__version__)"]
        version = subprocess.run(found, check=True, capture_output=True, text=True).stdout.strip()
        if version != OLD_TRL:
            raise RuntimeError(f"{folder} has TRL {version}, expected {OLD_TRL}.")
        done.touch()
    return str(python)


def run_once(case: dict) -> None:
    """Train once in this process, and print the measurements."""
    import torch
    from datasets import Dataset
    from transformers import LlamaForCausalLM, LlamaForSequenceClassification

    torch.set_num_threads(1)
    torch.manual_seed(0)
    fields = dict(case)
    ours, rollouts, epochs = fields.pop("ours"), fields.pop("rollouts"), fields.pop("epochs")
    tokens, vocabulary = fields.pop("tokens"), fields.pop("vocabulary")
    size = (fields.pop("hidden"), fields.pop("layers"), vocabulary)
    tokenizer = build_tokenizer(vocabulary)
    tokenizer.padding_side = "left"
    policy = LlamaForCausalLM(llama_config(*size))
    reward_model = LlamaForSequenceClassification(llama_config(*size, num_labels=1))
    prompts = [f"w{5 + index} w{7 + index} w{9 + index} w{11 + index}" for index in range(rollouts * BATCH)]
    tokenized = Dataset.from_dict({"input_ids": tokenizer(prompts)["input_ids"]})
    watch = Stopwatch()
    with tempfile.TemporaryDirectory() as folder:
        common = {
            "output_dir": folder,
            **PLAIN_RUN,
            "per_device_train_batch_size": BATCH,
            "num_ppo_epochs": epochs,
            "num_mini_batches": 1,
            "learning_rate": 1e-5,
            "temperature": 0.7,
        }
        models = {"processing_class": tokenizer, "model": policy, "reward_model": reward_model}
        if ours:
            from trl_klx import KLXPPOConfig, KLXPPOTrainer

            args = KLXPPOConfig(
                **common,
                max_completion_length=tokens,
                max_steps=rollouts * epochs,
                # An EOS that cannot be sampled: every completion has the full length, as below.
                generation_kwargs={"eos_token_id": vocabulary},
                kl_penalty_coef=0.05,
                **fields,
            )
            trainer = KLXPPOTrainer(args=args, train_dataset=tokenized, **models)
        else:
            from trl.experimental.ppo import PPOConfig, PPOTrainer

            # Without a stop token every completion has the full length.
            args = PPOConfig(
                **common,
                response_length=tokens,
                total_episodes=rollouts * BATCH,
                kl_coef=0.05,
                num_sample_generations=0,
                **fields,
            )
            trainer = PPOTrainer(
                args=args,
                ref_model=None,
                value_model=LlamaForSequenceClassification(llama_config(*size, num_labels=1)),
                train_dataset=tokenized,
                eval_dataset=tokenized.select(range(BATCH)),
                **models,
            )
        watch.watch(policy, stamps=True)
        trainer.train()
        watch.stamp()
    watch.report()


def predict(case: dict, theirs: dict, results: Results) -> float:
    """Ratio of times that the formulas of docs/costs.md predict from TRL's measured time."""
    total, generation = results.median(theirs, "seconds"), results.median(theirs, "generation")
    # Value and reward models run without the LM head.
    headless, epochs = 1.0 - lm_head_share(case["hidden"], case["layers"], case["vocabulary"]), case["epochs"]
    forward = (total - generation) / (1 + 2 * headless + 3 * epochs * (1 + headless))
    # The value function's own layers, in every pass of the policy but that of generation.
    critic = VALUE_LAYERS / case["layers"] * headless
    scored = 0 if epochs == 1 else 1
    ours = 1 + headless + (scored + 3 * epochs) * (1 + critic)
    return (generation + forward * ours) / total


def show(rows: list[tuple[str, dict, dict]], results: Results) -> None:
    print(
        f"{'':26}{'tokens':>7}{'epochs':>7}{'TRL s':>9}{'KLX s':>9}{'tok/s':>9}{'time':>7}{'by formula':>12}"
        f"{'memory':>8}  goal"
    )
    for name, ours, theirs in rows:
        seconds = results.median(ours, "seconds")
        predicted = "" if "num_layers_unfrozen" in ours else f"{predict(ours, theirs, results):.3f}"
        ratios = {key: results.ratio(ours, theirs, key) for key in GOALS}
        misses = [f"{key} > {goal}" for key, goal in GOALS.items() if ratios[key] > goal]
        print(
            f"{name:26}{ours['tokens']:>7}{ours['epochs']:>7}{results.median(theirs, 'seconds'):>9.3f}{seconds:>9.3f}"
            f"{BATCH * ours['tokens'] / seconds:>9.1f}{ratios['seconds']:>7.3f}{predicted:>12}"
            f"{ratios['megabytes']:>8.3f}  {', '.join(misses) or 'reached'}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument(
        "--full", action="store_true", help="use models of 15M to 138M, and completions of up to 512 tokens"
    )
    parser.add_argument("--repeats", type=int, default=3, help="runs per case")
    parser.add_argument("--json", type=Path, help="keep the results in this file, and continue from it")
    parser.add_argument(
        "--tokens", nargs="+", type=int, help="completion lengths (default 32, with --full 64 256 512)"
    )
    parser.add_argument("--epochs", nargs="+", type=int, help="(default 1, with --full 1 4)")
    parser.add_argument("--environment", type=Path, default=Path(sys.prefix) / f"ppo-trl-{OLD_TRL}")
    options = parser.parse_args()
    if options.run:
        run_once(json.loads(options.run))
        return
    python = old_environment(options.environment.resolve())
    tiny, small = {"hidden": 192, "layers": 4, "vocabulary": 4000}, {"hidden": 288, "layers": 6, "vocabulary": 32000}
    lengths = options.tokens or ([64, 256, 512] if options.full else [32])
    epochs = options.epochs or ([1, 4] if options.full else [1])
    shapes = [
        ("15M" if options.full else "tiny", {"tokens": tokens, "epochs": n, **(small if options.full else tiny)})
        for n in epochs
        for tokens in lengths
    ]
    if options.full:
        shapes += [
            (name, {"tokens": 64, "epochs": n, "hidden": hidden, "layers": layers, "vocabulary": 32000})
            for name, hidden, layers in (("67M", 768, 6), ("138M", 576, 30))
            for n in epochs
        ]
    rows, groups = [], []
    for index, (name, shape) in enumerate(shapes):
        shape = shape | {"rollouts": 3}
        theirs, ours = {"ours": False} | shape, {"ours": True} | shape
        group = [theirs, ours]
        rows.append((name, ours, theirs))
        if shape["tokens"] == 256 or (not options.full and index == 0):
            group.append(ours | {"num_layers_unfrozen": 2})
            rows.append((f"{name}, 2 layers unfrozen", group[-1], theirs))
        groups.append(group)
    results = Results(options.json)
    with stoppable():
        take_turns(__file__, groups, results, options.repeats, lambda case: sys.executable if case["ours"] else python)
    show([row for row in rows if results.count(row[1]) and results.count(row[2])], results)


if __name__ == "__main__":
    main()
