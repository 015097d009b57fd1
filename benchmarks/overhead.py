"""
What KL control costs: KLX trainers against TRL's own, in CPU time per step and in peak memory.

Each run is a process of its own, and those that are compared take turns. What is printed are ratios of medians, and
whether they reach the goal. Timings of the first step are left out.

```bash
python benchmarks/overhead.py                                # a few minutes, on a tiny model
python benchmarks/overhead.py --full --json overhead.json    # hours; can be stopped, and goes on with the same file
python benchmarks/overhead.py --full --json overhead.json --tokens 64 256 --vocabulary 32000 --accumulation 1
```

With `--json` there is also a figure beside the file, of how the cost grows with the length.
"""

import argparse
import itertools
import json
import tempfile
from pathlib import Path

from measuring import Results, Stopwatch, build_tokenizer, llama_config, take_turns


OFF, BETA, ON = {"beta": 0.0}, {"beta": 0.04}, {"beta": 0.0, "kl_penalty_coef": 0.04}
LORA = {"lora": True}
# TRL's side, and by name what is compared with it. TRL's `beta` is the equal of a penalty that is on.
GROUPS = {
    "off": (OFF, {"off": OFF}),
    "on": (BETA, {"on": ON, "on, lag 4": ON | {"kl_ref_lag": 4}}),
    "on, LoRA": (
        BETA | LORA,
        {
            "on, LoRA": ON | LORA,
            "on, LoRA, adapter": ON | LORA | {"kl_ref_adapter_path": "adapter"},
            "on, LoRA, lag 4": ON | LORA | {"kl_ref_lag": 4},
        },
    ),
}
FULL_SIZE, SMALL_SIZE = {"hidden": 288, "layers": 6, "steps": 4}, {"hidden": 192, "layers": 4, "steps": 4}


def run_once(case: dict) -> None:
    """One training run in this process; prints its measurements."""
    import torch
    import trl
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM, TrainerCallback

    import trl_klx

    torch.set_num_threads(1)
    torch.manual_seed(0)
    fields = dict(case)
    name, ours, lora = fields.pop("trainer"), fields.pop("ours"), fields.pop("lora", False)
    tokens, vocabulary, steps = fields.pop("tokens"), fields.pop("vocabulary"), fields.pop("steps")
    hidden, layers, accumulation = fields.pop("hidden"), fields.pop("layers"), fields.pop("accumulation")
    home, prefix = (trl_klx, "KLX") if ours else (trl, "")
    watch = Stopwatch()

    class Clock(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            watch.stamp()

        def on_train_end(self, args, state, control, **kwargs):
            watch.stamp()

    def reward(completion_ids, **kwargs):
        return [sum(token % 2 for token in ids) / len(ids) for ids in completion_ids]

    def lora_config():
        return LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")

    with tempfile.TemporaryDirectory() as folder:
        # TRL builds its reference from the path of the policy.
        LlamaForCausalLM(llama_config(hidden, layers, vocabulary)).save_pretrained(f"{folder}/policy")
        if fields.get("kl_ref_adapter_path"):
            fields["kl_ref_adapter_path"] = f"{folder}/adapter"
            model = get_peft_model(LlamaForCausalLM.from_pretrained(f"{folder}/policy"), lora_config())
            model.save_pretrained(f"{folder}/adapter")
            del model
        args = getattr(home, f"{prefix}{name}Config")(
            output_dir=f"{folder}/out",
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
        trainer = getattr(home, f"{prefix}{name}Trainer")(
            f"{folder}/policy",
            reward_funcs=reward,
            args=args,
            train_dataset=Dataset.from_dict({"prompt": [f"w{5 + index} w{7 + index}" for index in range(256)]}),
            processing_class=build_tokenizer(vocabulary),
            callbacks=[Clock()],
            peft_config=lora_config() if lora else None,
        )
        watch.watch(trainer.model)
        trainer.train()
        trained = [weight for weight in trainer.model.parameters() if weight.requires_grad]
        watch.report(trained_megabytes=sum(weight.nbytes for weight in trained) / 2**20)


def goals(name: str, case: dict) -> tuple[float, float]:
    """The largest ratios of time and memory that are good enough."""
    if name == "off":
        return 1.01, 1.01
    # Centered over several micro-batches, GRPO's policy is scored once more; RLOO's is scored anyway.
    return (1.16 if case["trainer"] == "GRPO" and case["accumulation"] > 1 else 1.02), 1.02


def verdict(name: str, ours: dict, theirs: dict, results: Results) -> str:
    time_goal, memory_goal = goals(name, ours)
    misses = []
    if results.ratio(ours, theirs, "seconds") > time_goal:
        misses.append(f"time > {time_goal}")
    more = results.median(ours, "megabytes") - results.median(theirs, "megabytes")
    # A reference that TRL does not have may take twice what is trained; where TRL has its equal, nothing.
    allowed = (memory_goal - 1) * results.median(theirs, "megabytes")
    if "adapter" in name or "lag" in name:
        allowed = max(allowed, 2 * results.median(ours, "trained_megabytes"))
    if more > allowed:
        misses.append(f"memory + {more:.0f} MB > {allowed:.0f} MB")
    return ", ".join(misses) or "reached"


def show(rows: list[tuple[str, dict, dict]], results: Results) -> None:
    header = f"{'':28}{'tokens':>7}{'vocab':>8}{'accum':>6}{'TRL s':>9}{'KLX s':>9}{'time':>8}{'memory':>8}  goal"
    print(header)
    for name, ours, theirs in rows:
        print(
            f"{ours['trainer'] + ' ' + name:28}{ours['tokens']:>7}{ours['vocabulary']:>8}{ours['accumulation']:>6}"
            f"{results.median(theirs, 'seconds'):>9.3f}{results.median(ours, 'seconds'):>9.3f}"
            f"{results.ratio(ours, theirs, 'seconds'):>8.3f}{results.ratio(ours, theirs, 'megabytes'):>8.3f}  "
            f"{verdict(name, ours, theirs, results)}"
        )


def show_prediction(rows: list[tuple[str, dict, dict]], results: Results) -> None:
    """
    The formulas of docs/costs.md against what was measured: the penalty adds one forward. Without generation, a step of
    full fine-tuning is a forward and a backward of twice its cost; so the forward is a third of it.
    """
    by_shape = {}
    for name, ours, _ in rows:
        if ours["trainer"] == "GRPO" and ours["accumulation"] == 1 and name in ("off", "on"):
            by_shape.setdefault((ours["vocabulary"], ours["tokens"]), {})[name] = ours
    pairs = {shape: cases for shape, cases in sorted(by_shape.items()) if len(cases) == 2}
    if not pairs:
        return
    print("\nGRPO, penalty on: predicted from the run with the penalty off (docs/costs.md)")
    print(f"{'vocab':>8}{'tokens':>8}{'off s':>9}{'predicted s':>13}{'measured s':>12}{'error':>8}", end="")
    print(f"{'reference MB':>14}{'measured MB':>13}")
    for (vocabulary, tokens), cases in pairs.items():
        off, generation = results.median(cases["off"], "seconds"), results.median(cases["off"], "generation")
        measured, predicted = results.median(cases["on"], "seconds"), off + (off - generation) / 3
        more = results.median(cases["on"], "megabytes") - results.median(cases["off"], "megabytes")
        print(
            f"{vocabulary:>8}{tokens:>8}{off:>9.3f}{predicted:>13.3f}{measured:>12.3f}{measured / predicted - 1:>+8.1%}"
            f"{results.median(cases['on'], 'trained_megabytes'):>14.0f}{more:>13.0f}"
        )


def plot(rows: list[tuple[str, dict, dict]], results: Results, path: Path) -> None:
    try:
        from matplotlib import pyplot
    except ImportError:
        print("No figure: matplotlib is not installed.")
        return
    shapes = sorted({(ours["vocabulary"], ours["accumulation"]) for _, ours, _ in rows})
    figure, axes = pyplot.subplots(2, len(shapes), figsize=(5 * len(shapes), 8), squeeze=False, sharex=True)
    for column, shape in enumerate(shapes):
        lines: dict[str, list[tuple[dict, dict]]] = {}
        for name, ours, theirs in rows:
            if (ours["vocabulary"], ours["accumulation"]) == shape:
                lines.setdefault(f"{ours['trainer']} {name}", []).append((ours, theirs))
        for row, (key, label) in enumerate((("seconds", "time"), ("megabytes", "peak memory"))):
            panel = axes[row][column]
            for name, pairs in lines.items():
                pairs = sorted(pairs, key=lambda pair: pair[0]["tokens"])
                ratios = [results.ratio(ours, theirs, key) for ours, theirs in pairs]
                panel.plot([ours["tokens"] for ours, _ in pairs], ratios, marker="o", label=name)
            panel.axhline(1.0, color="black", linewidth=0.5)
            panel.set_ylabel(f"{label}, KLX / TRL")
        axes[0][column].set_title(f"vocabulary {shape[0]}, accumulation {shape[1]}")
        axes[1][column].set_xlabel("completion tokens")
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print(f"figure: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--full", action="store_true", help="the 15M model and the whole grid")
    parser.add_argument("--repeats", type=int, help="runs of each case (default 3, with --full 5)")
    parser.add_argument("--json", type=Path, help="keep the results in this file, and go on from what it has")
    parser.add_argument("--trainers", nargs="+", choices=["GRPO", "RLOO"], default=["GRPO", "RLOO"])
    parser.add_argument("--groups", nargs="+", choices=list(GROUPS), default=list(GROUPS))
    parser.add_argument("--tokens", nargs="+", type=int, help="lengths (default 32, with --full 64 256 512)")
    parser.add_argument("--vocabulary", nargs="+", type=int, help="(default 4000, with --full 32000 128000)")
    parser.add_argument("--accumulation", nargs="+", type=int, help="(default 1, with --full 1 4)")
    options = parser.parse_args()
    if options.run:
        run_once(json.loads(options.run))
        return
    full = options.full
    lengths = options.tokens or ([64, 256, 512] if full else [32])
    vocabularies = options.vocabulary or ([32000, 128000] if full else [4000])
    accumulations = options.accumulation or ([1, 4] if full else [1])
    rows, groups = [], []
    # The cheapest first, so that a run that is stopped has something to show.
    for accumulation, vocabulary, tokens in itertools.product(accumulations, vocabularies, lengths):
        shape = {"tokens": tokens, "vocabulary": vocabulary, "accumulation": accumulation}
        shape |= FULL_SIZE if full else SMALL_SIZE
        for trainer, group in itertools.product(options.trainers, options.groups):
            fields, compared = GROUPS[group]
            theirs = {"trainer": trainer, "ours": False, **fields, **shape}
            cases = {name: {"trainer": trainer, "ours": True, **case, **shape} for name, case in compared.items()}
            groups.append([theirs, *cases.values()])
            rows += [(name, case, theirs) for name, case in cases.items()]
    results = Results(options.json)
    try:
        take_turns(__file__, groups, results, options.repeats or (5 if full else 3))
    except KeyboardInterrupt:
        print("\nstopped; what is there:")
    rows = [row for row in rows if results.count(row[1]) and results.count(row[2])]
    show(rows, results)
    show_prediction(rows, results)
    if options.json and rows:
        plot(rows, results, options.json.with_suffix(".png"))


if __name__ == "__main__":
    main()
