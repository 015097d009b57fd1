"""
What KL control costs: KLX trainers against TRL's own, in CPU time per step and in peak memory.

Each run is a process of its own; the two sides of a comparison take turns on the same machine, and what is printed is
the ratio of their medians. Timings of the first step are left out.

```bash
python benchmarks/overhead.py                  # a minute or two
python benchmarks/overhead.py --full --json overhead.json
```
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


# name: (TRL's side, our side). "beta" is TRL's own KL term, the equal of a penalty that is on.
COMPARISONS = {
    "grpo off": ({"trainer": "GRPO"}, {"trainer": "KLXGRPO"}),
    "grpo on": ({"trainer": "GRPO", "beta": 0.04}, {"trainer": "KLXGRPO", "kl_penalty_coef": 0.04}),
    "grpo on, LoRA": (
        {"trainer": "GRPO", "beta": 0.04, "lora": True},
        {"trainer": "KLXGRPO", "kl_penalty_coef": 0.04, "lora": True},
    ),
    "grpo on, LoRA, step 0": (
        {"trainer": "GRPO", "beta": 0.04, "lora": True},
        {"trainer": "KLXGRPO", "kl_penalty_coef": 0.04, "lora": True, "kl_penalty_reference_step": 0},
    ),
    "grpo on, LoRA, lag 2": (
        {"trainer": "GRPO", "beta": 0.04, "lora": True},
        {"trainer": "KLXGRPO", "kl_penalty_coef": 0.04, "lora": True, "kl_ref_lag": 2},
    ),
    "rloo on": ({"trainer": "RLOO", "beta": 0.04}, {"trainer": "KLXRLOO", "kl_penalty_coef": 0.04}),
    "rloo on, LoRA": (
        {"trainer": "RLOO", "beta": 0.04, "lora": True},
        {"trainer": "KLXRLOO", "kl_penalty_coef": 0.04, "lora": True},
    ),
}
SHORT = ("grpo off", "grpo on", "grpo on, LoRA", "rloo on")


def run_once(case: dict) -> None:
    """One training run in this process; prints its measurements as JSON."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import trl
    from datasets import Dataset
    from peft import LoraConfig
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback

    import trl_klx

    torch.set_num_threads(1)
    torch.manual_seed(0)
    fields = dict(case)
    name, lora = fields.pop("trainer"), fields.pop("lora", False)
    tokens, vocabulary, steps = fields.pop("tokens"), fields.pop("vocabulary"), fields.pop("steps")
    hidden, layers, accumulation = fields.pop("hidden"), fields.pop("layers"), fields.pop("accumulation")
    home = trl_klx if name.startswith("KLX") else trl

    words = {f"w{index}": index for index in range(vocabulary)}
    backend = Tokenizer(models.WordLevel(words, unk_token="w3"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="w0", eos_token="w1", unk_token="w3")
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=6,
        max_position_embeddings=1024,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=1,
        tie_word_embeddings=True,
    )
    stamps = []

    class Clock(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            stamps.append(time.process_time())

        def on_train_end(self, args, state, control, **kwargs):
            stamps.append(time.process_time())

    def reward(completion_ids, **kwargs):
        return [sum(token % 2 for token in ids) / len(ids) for ids in completion_ids]

    with tempfile.TemporaryDirectory() as folder:
        # TRL builds its reference from the path of the policy.
        LlamaForCausalLM(config).save_pretrained(f"{folder}/policy")
        args = getattr(home, f"{name}Config")(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=accumulation,
            num_generations=4,
            max_completion_length=tokens,
            max_steps=steps,
            learning_rate=1e-5,
            # Every completion has the full length, whatever the random policy says.
            generation_kwargs={"min_new_tokens": tokens},
            model_init_kwargs={"dtype": "float32"},
            **fields,
        )
        trainer = getattr(home, f"{name}Trainer")(
            f"{folder}/policy",
            reward_funcs=reward,
            args=args,
            train_dataset=Dataset.from_dict({"prompt": [f"w{5 + index} w{7 + index}" for index in range(64)]}),
            processing_class=tokenizer,
            callbacks=[Clock()],
            peft_config=LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM") if lora else None,
        )
        trainer.train()
    per_step = [after - before for before, after in zip(stamps[1:], stamps[2:], strict=False)]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print("RESULT " + json.dumps({"seconds": statistics.median(per_step), "megabytes": peak}))


def measure(case: dict) -> dict:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, str(Path(__file__).resolve()), "--run", json.dumps(case)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    lines = [line for line in result.stdout.splitlines() if line.startswith("RESULT ")]
    if result.returncode or not lines:
        raise RuntimeError(f"{case} failed:\n{result.stderr[-2000:]}")
    return json.loads(lines[-1].removeprefix("RESULT "))


def compare(theirs: dict, ours: dict, shape: dict, repeats: int) -> dict:
    """Medians of interleaved runs, and their ratios."""
    results: dict[str, list[dict]] = {"theirs": [], "ours": []}
    for _ in range(repeats):
        for side, case in (("theirs", theirs), ("ours", ours)):
            results[side].append(measure(case | shape))
    medians = {
        side: {key: statistics.median(run[key] for run in runs) for key in ("seconds", "megabytes")}
        for side, runs in results.items()
    }
    ratios = {key: medians["ours"][key] / medians["theirs"][key] for key in ("seconds", "megabytes")}
    return {"medians": medians, "ratios": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--full", action="store_true", help="all comparisons, lengths and vocabularies")
    parser.add_argument("--repeats", type=int, help="runs of each side (default 3, with --full 5)")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    if options.run:
        run_once(json.loads(options.run))
        return
    if options.full:
        shapes = [
            {"tokens": tokens, "vocabulary": vocabulary, "accumulation": accumulation}
            for tokens, vocabulary, accumulation in (
                (64, 32000, 1),
                (256, 32000, 1),
                (512, 32000, 1),
                (64, 128000, 1),
                (64, 32000, 4),
            )
        ]
        size, names, repeats = {"hidden": 288, "layers": 6, "steps": 4}, list(COMPARISONS), options.repeats or 5
    else:
        shapes = [{"tokens": 32, "vocabulary": 4000, "accumulation": 1}]
        size, names, repeats = {"hidden": 192, "layers": 4, "steps": 5}, SHORT, options.repeats or 3
    rows = []
    total = len(shapes) * len(names)
    print(f"{'':24}{'tokens':>8}{'vocab':>8}{'accum':>7}{'TRL s':>9}{'KLX s':>9}{'time':>7}{'memory':>8}", flush=True)
    for shape in shapes:
        for name in names:
            print(f"[{len(rows) + 1}/{total}] {name} ...", end="\r", file=sys.stderr, flush=True)
            result = compare(*COMPARISONS[name], shape | size, repeats)
            rows.append({"name": name, **shape, **result})
            medians, ratios = result["medians"], result["ratios"]
            print(
                f"{name:24}{shape['tokens']:>8}{shape['vocabulary']:>8}{shape['accumulation']:>7}"
                f"{medians['theirs']['seconds']:>9.3f}{medians['ours']['seconds']:>9.3f}"
                f"{ratios['seconds']:>7.3f}{ratios['megabytes']:>8.3f}",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
