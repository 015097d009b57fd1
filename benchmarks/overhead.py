"""
What KL control costs: KLX trainers against TRL's own, in CPU time per step and in peak memory.

For time, the two trainers take turns step by step in one process, so that disturbances of the machine affect both, and
the median ratio of neighbouring steps is printed. For memory, each trainer runs in its own process. The first step is
not counted.

```bash
python benchmarks/overhead.py                                # a few minutes, on a tiny model
python benchmarks/overhead.py --full --json overhead.json    # hours; can be stopped and continued with the same file
python benchmarks/overhead.py --full --json overhead.json --tokens 64 256 --vocabulary 32000 --accumulation 1
python benchmarks/overhead.py --full --json training.json --random-completions --tokens 256 1024 --batch 4
```

Generation is the same code on both sides and brings every ratio closer to 1. `--random-completions` leaves it out.

The models are random and built by the script: their weights do not change what a step costs.
"""

import argparse
import contextlib
import itertools
import json
import os
import resource
import statistics
import tempfile
import threading
import traceback
from pathlib import Path

import torch
from measuring import MARK, PLAIN_RUN, Results, Stopwatch, build_tokenizer, llama_config, stoppable, take_turns
from transformers import TrainerCallback


OFF, BETA, ON = {"beta": 0.0}, {"beta": 0.04}, {"beta": 0.0, "kl_penalty_coef": 0.04}
FULL = {"beta": 0.0, "kl_target": 4.0, "kl_statistic": "full"}
LORA = {"lora": True}
# By name: TRL's fields and ours. TRL's `beta` is the counterpart of our penalty.
CASES = {
    "off": (OFF, OFF),
    "TRL": (BETA, BETA),
    "on": (BETA, ON),
    "on, full": (BETA, FULL),
    "on, lag 4": (BETA, ON | {"kl_ref_lag": 4}),
    "on, LoRA": (BETA | LORA, ON | LORA),
    "on, LoRA, full": (BETA | LORA, FULL | LORA),
    "on, LoRA, adapter": (BETA | LORA, ON | LORA | {"kl_ref_adapter_path": "adapter"}),
    "on, LoRA, lag 4": (BETA | LORA, ON | LORA | {"kl_ref_lag": 4}),
}
FULL_SIZE, SMALL_SIZE = {"hidden": 288, "layers": 6}, {"hidden": 192, "layers": 4}


def random_completions(tokens: int, vocabulary: int):
    """A `generate` that takes no time: completions of `tokens` random words."""

    def generate(input_ids, **kwargs):
        return torch.cat([input_ids, torch.randint(4, vocabulary, (len(input_ids), tokens))], dim=1)

    return generate


class Turns(TrainerCallback):
    """
    Lets trainers in separate threads take turns, one step each, and times the steps of one of them.

    Args:
        baton (`threading.Condition`):
            Shared by all trainers. Its attribute `turn` is the number of the trainer that may run.
        number (`int`):
            Number of this trainer.
        of (`int`):
            Number of trainers.
    """

    def __init__(self, baton: threading.Condition, number: int, of: int):
        self.baton, self.number, self.of = baton, number, of
        self.watch = Stopwatch()

    def on_step_begin(self, args, state, control, **kwargs):
        with self.baton:
            self.baton.wait_for(lambda: self.baton.turn == self.number)
        self.watch.stamp()

    def on_step_end(self, args, state, control, **kwargs):
        self.watch.stamp()
        with self.baton:
            self.baton.turn = (self.number + 1) % self.of
            self.baton.notify_all()

    def steps(self) -> list[tuple[float, float]]:
        """CPU time of each step except the first, and the part spent on generation."""
        pairs = zip(self.watch.stamps[2::2], self.watch.stamps[3::2], strict=True)
        return [(after[0] - before[0], after[1] - before[1]) for before, after in pairs]


def build(case: dict, folder: str, callback: TrainerCallback):
    """Build the trainer of a case."""
    import trl
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM

    import trl_klx

    torch.manual_seed(0)
    fields = dict(case)
    name, ours, lora = fields.pop("trainer"), fields.pop("ours"), fields.pop("lora", False)
    tokens, vocabulary, steps = fields.pop("tokens"), fields.pop("vocabulary"), fields.pop("steps")
    hidden, layers, accumulation = fields.pop("hidden"), fields.pop("layers"), fields.pop("accumulation")
    batch, random = fields.pop("batch"), fields.pop("random_completions")
    home, prefix = (trl_klx, "KLX") if ours else (trl, "")

    def reward(completion_ids, **kwargs):
        return [sum(token % 2 for token in ids) / len(ids) for ids in completion_ids]

    def lora_config():
        return LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")

    # TRL builds its reference from the path of the policy.
    LlamaForCausalLM(llama_config(hidden, layers, vocabulary)).save_pretrained(f"{folder}/policy")
    if fields.get("kl_ref_adapter_path"):
        fields["kl_ref_adapter_path"] = f"{folder}/adapter"
        model = get_peft_model(LlamaForCausalLM.from_pretrained(f"{folder}/policy"), lora_config())
        model.save_pretrained(f"{folder}/adapter")
        del model
    args = getattr(home, f"{prefix}{name}Config")(
        output_dir=f"{folder}/out",
        **PLAIN_RUN,
        per_device_train_batch_size=batch // accumulation,
        gradient_accumulation_steps=accumulation,
        num_generations=4,
        max_completion_length=tokens,
        max_steps=steps,
        learning_rate=1e-5,
        # Every completion has the full length, whatever the random policy samples.
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
        peft_config=lora_config() if lora else None,
    )
    # Added last, so that the trainer's own callbacks count as part of the step.
    trainer.add_callback(callback)
    if random:
        trainer.model.generate = random_completions(tokens, vocabulary)
    callback.watch.watch(trainer.model)
    return trainer


def train_or_exit(trainer) -> None:
    try:
        trainer.train()
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # the other trainers would wait for their turn forever


def run_in_turns(cases: list[dict]) -> None:
    """Train the cases in turn, step by step, and print the measurements relative to the first case."""
    torch.set_num_threads(1)
    baton = threading.Condition()
    baton.turn = 0
    with contextlib.ExitStack() as stack:
        callbacks = [Turns(baton, number, len(cases)) for number in range(len(cases))]
        folders = [stack.enter_context(tempfile.TemporaryDirectory()) for _ in cases]
        trainers = [build(*parts) for parts in zip(cases, folders, callbacks, strict=True)]
        threads = [threading.Thread(target=train_or_exit, args=(trainer,)) for trainer in trainers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        trained = sum(weight.nbytes for weight in trainers[-1].model.parameters() if weight.requires_grad)
    theirs, ours = callbacks[0].steps(), callbacks[-1].steps()
    result = {
        "seconds": statistics.median(step for step, _ in ours),
        "their_seconds": statistics.median(step for step, _ in theirs),
        "ratio": statistics.median(own[0] / other[0] for own, other in zip(ours, theirs, strict=True)),
        "generation": statistics.median(generation for _, generation in ours),
        "megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "trained_megabytes": trained / 2**20,
    }
    print(MARK + json.dumps(result), flush=True)


def default_steps(tokens: int, vocabulary: int) -> int:
    """Fewer steps for larger cases, whose steps take longer."""
    return max(3, min(8, round(8 * 64 * 32000 / (tokens * vocabulary))))


def enough_steps(case: dict, steps: int) -> int:
    """At least `steps`, and enough for a lagging reference to move."""
    return max(steps, case["kl_ref_lag"] + 3) if "kl_ref_lag" in case else steps


def goals(name: str, case: dict) -> tuple[float, float]:
    """The largest acceptable ratios of time and memory."""
    return (1.05 if "full" in name else 1.0), 1.0


class Costs:
    """
    The measurements of one pair of cases.

    Args:
        results ([`Results`]):
            All measurements.
        ours (`dict`), theirs (`dict`):
            The cases of KLX and of TRL.
    """

    def __init__(self, results: Results, ours: dict, theirs: dict):
        together, alone = ({"steps": enough_steps(ours, steps)} for steps in (ours["steps"], 2))
        self.results, self.pair = results, {"cases": [theirs | together, ours | together]}
        self.alone = [{"cases": [case | alone]} for case in (ours, theirs)]

    @property
    def complete(self) -> bool:
        return all(self.results.count(case) for case in (self.pair, *self.alone))

    def of_pair(self, key: str) -> float:
        return self.results.median(self.pair, key)

    @property
    def time(self) -> float:
        return self.of_pair("ratio")

    @property
    def megabytes(self) -> tuple[float, float]:
        ours, theirs = (self.results.median(case, "megabytes") for case in self.alone)
        return ours, theirs

    @property
    def memory(self) -> float:
        ours, theirs = self.megabytes
        return ours / theirs


def verdict(name: str, case: dict, costs: Costs) -> str:
    time_goal, memory_goal = goals(name, case)
    misses = []
    if costs.time > time_goal:
        misses.append(f"time > {time_goal}")
    ours, theirs = costs.megabytes
    # A reference that TRL lacks may take twice the memory of the trained weights; one that TRL has too may add none.
    allowed = (memory_goal - 1) * theirs
    if "adapter" in name or "lag" in name:
        allowed = max(allowed, 2 * costs.of_pair("trained_megabytes"))
    if ours - theirs > allowed:
        misses.append(f"memory + {ours - theirs:.0f} MB > {allowed:.0f} MB")
    return ", ".join(misses) or "reached"


def show(rows: list[tuple[str, dict, Costs]]) -> None:
    print(f"{'':28}{'tokens':>7}{'vocab':>8}{'accum':>6}{'TRL s':>9}{'KLX s':>9}{'time':>8}{'memory':>8}  goal")
    for name, case, costs in rows:
        print(
            f"{case['trainer'] + ' ' + name:28}{case['tokens']:>7}{case['vocabulary']:>8}{case['accumulation']:>6}"
            f"{costs.of_pair('their_seconds'):>9.3f}{costs.of_pair('seconds'):>9.3f}"
            f"{costs.time:>8.3f}{costs.memory:>8.3f}  {verdict(name, case, costs)}"
        )


def show_prediction(rows: list[tuple[str, dict, Costs]]) -> None:
    """
    Compare the formulas of docs/costs.md with the measurements. The penalty adds one forward pass. Without generation,
    a step of full fine-tuning is a forward pass and a backward pass of twice its cost, so a forward pass is a third of
    the step. TRL's `beta` costs the same by these formulas.
    """
    by_shape = {}
    for name, case, costs in rows:
        if case["trainer"] == "GRPO" and case["accumulation"] == 1 and name in ("off", "on"):
            by_shape.setdefault((case["vocabulary"], case["tokens"]), {})[name] = costs
    pairs = {shape: costs for shape, costs in sorted(by_shape.items()) if len(costs) == 2}
    if not pairs:
        return
    print("\nGRPO, penalty on: predicted from the run with the penalty off (docs/costs.md)")
    print(
        f"{'vocab':>8}{'tokens':>8}{'off s':>9}{'predicted s':>13}{'TRL s':>9}{'error':>8}{'KLX s':>9}{'error':>8}",
        end="",
    )
    print(f"{'reference MB':>14}{'measured MB':>13}")
    for (vocabulary, tokens), costs in pairs.items():
        off, generation = costs["off"].of_pair("seconds"), costs["off"].of_pair("generation")
        ours, theirs = costs["on"].of_pair("seconds"), costs["on"].of_pair("their_seconds")
        predicted = off + (off - generation) / 3
        more = costs["on"].megabytes[0] - costs["off"].megabytes[0]
        print(
            f"{vocabulary:>8}{tokens:>8}{off:>9.3f}{predicted:>13.3f}{theirs:>9.3f}{theirs / predicted - 1:>+8.1%}"
            f"{ours:>9.3f}{ours / predicted - 1:>+8.1%}"
            f"{costs['on'].of_pair('trained_megabytes'):>14.0f}{more:>13.0f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--full", action="store_true", help="use the 15M model and the whole grid")
    parser.add_argument("--repeats", type=int, default=1, help="runs per case")
    parser.add_argument("--steps", type=int, help="steps per run; the first is not counted (default 3 to 8)")
    parser.add_argument("--json", type=Path, help="keep the results in this file, and continue from it")
    parser.add_argument("--show", action="store_true", help="measure nothing, only show the results in the file")
    parser.add_argument("--trainers", nargs="+", choices=["GRPO", "RLOO"], default=["GRPO", "RLOO"])
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument(
        "--tokens", nargs="+", type=int, help="completion lengths (default 32, with --full 64 256 512)"
    )
    parser.add_argument("--vocabulary", nargs="+", type=int, help="(default 4000, with --full 32000 128000)")
    parser.add_argument("--accumulation", nargs="+", type=int, help="(default 1, with --full 1 4)")
    parser.add_argument("--hidden", type=int, help="hidden size (default 192, with --full 288)")
    parser.add_argument("--layers", type=int, help="(default 4, with --full 6)")
    parser.add_argument("--batch", type=int, default=8, help="completions of an optimizer step")
    parser.add_argument("--random-completions", action="store_true", help="leave generation out")
    options = parser.parse_args()
    if options.run:
        run_in_turns(json.loads(options.run)["cases"])
        return
    full = options.full
    lengths = options.tokens or ([64, 256, 512] if full else [32])
    vocabularies = options.vocabulary or ([32000, 128000] if full else [4000])
    accumulations = options.accumulation or ([1, 4] if full else [1])
    size = FULL_SIZE if full else SMALL_SIZE
    size = {key: getattr(options, key) or value for key, value in size.items()}
    results = Results(options.json)
    rows, groups = [], []
    # The cheapest first, so that an interrupted run has something to show.
    for accumulation, vocabulary, tokens in itertools.product(accumulations, vocabularies, lengths):
        shape = {"tokens": tokens, "vocabulary": vocabulary, "accumulation": accumulation}
        shape |= {"steps": options.steps or default_steps(tokens, vocabulary)} | size
        shape |= {"batch": options.batch, "random_completions": options.random_completions}
        for trainer, name in itertools.product(options.trainers, options.cases):
            theirs, ours = CASES[name]
            theirs = {"trainer": trainer, "ours": False, **theirs, **shape}
            ours = {"trainer": trainer, "ours": name != "TRL", **ours, **shape}
            costs = Costs(results, ours, theirs)
            groups.append([costs.pair, *costs.alone])
            rows.append((name, ours, costs))
    with stoppable():
        take_turns(__file__, [] if options.show else groups, results, options.repeats)
    rows = [row for row in rows if row[2].complete]
    show(rows)
    show_prediction(rows)


if __name__ == "__main__":
    main()
