"""
On-policy distillation: a small model learns from a larger one, on text that the small one writes itself.

The teacher is the KL reference, and the KL to it is all that trains, at coefficient 1. With no arguments it runs
offline on a laptop CPU: the teacher is the tiny policy of `ppo_hh.py`, the student a smaller one that has seen little.

```bash
accelerate launch recipes/distill.py
accelerate launch recipes/distill.py --kl_placement loss --kl_estimator full     # the exact KL, in the loss
accelerate launch recipes/distill.py --reward_model_path path/to/reward_model --num_generations 2   # and a reward
accelerate launch recipes/distill.py --quick    # a minute, to try it
```

On real models and data:

```bash
accelerate launch recipes/distill.py --config recipes/presets/distillation.yaml \
    --model_name_or_path Qwen/Qwen3-0.6B --kl_ref_model_path Qwen/Qwen3-8B --kl_ref_dtype bfloat16 \
    --dataset_name prompts.jsonl --num_generations 1 --output_dir outputs/distilled
```
"""

import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean


# Set before torch is imported: threads that spin while waiting make small models crawl on a shared machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from accelerate import PartialState
from accelerate.utils import DistributedType
from datasets import Dataset
from transformers import AutoModelForCausalLM, ProgressCallback
from trl import ModelConfig, ScriptArguments, get_peft_config

from hh.bootstrap import DEFAULT_SETTINGS, QUICK_SETTINGS, DefaultAssets, prepare_default_for_launch, train_policy
from hh.measures import heldout_perplexity
from hh.report import BriefProgress, PerplexityCallback, load_pyplot
from ppo_hh import (
    check_tokenizer,
    choose_dialogues,
    exit_on_user_error,
    load_reward_model,
    load_tokenizer,
    make_reward,
    model_settings,
    say,
    source_of,
    truncate_prompts,
)
from recipe_parser import RecipeParser, with_quick
from trl_klx import KLXGRPOConfig, KLXGRPOTrainer


DEFAULT_CONFIG = Path(__file__).with_name("distill.yaml")
# The student of the default: a sixth of the teacher, trained for a while on the same dialogues.
STUDENT = {"hidden_size": 64, "num_layers": 1, "sft_steps": 60}
# Logged batches at each end of the run that are averaged for the report.
ENDS = 3


@dataclass
class DistillArguments(ScriptArguments):
    """
    Arguments of the script, in addition to those of the trainer and the model. The student is `--model_name_or_path`,
    the teacher `--kl_ref_model_path`; without either, tiny models are trained and cached first.

    Args:
        dataset_name (`str`, *optional*):
            Name on the Hub, or local file or directory, of dialogues: prompts, and answers for held-out perplexity.
            If unset, the recipe's own dialogues are used.
        reward_model_path (`str`, *optional*):
            Reward model to learn from as well. If unset, the teacher alone trains.
        max_prompt_length (`int`, *optional*, defaults to `384`):
            Longest prompt in tokens; a longer one loses its beginning.
        eval_prompts (`int`, *optional*, defaults to `128`):
            Number of held-out dialogues for the perplexity.
        cache_dir (`str`, *optional*, defaults to `"outputs/hh_default"`):
            Where to keep the default tiny models for the next run.
        quick (`bool`, *optional*, defaults to `False`):
            Try the script in about a minute, on weaker tiny models.
    """

    reward_model_path: str | None = field(default=None, metadata={"help": "Reward model to learn from as well."})
    max_prompt_length: int = field(
        default=384, metadata={"help": "Longest prompt in tokens; a longer one loses its beginning."}
    )
    eval_prompts: int = field(default=128, metadata={"help": "Number of held-out dialogues for the perplexity."})
    cache_dir: str = field(
        default="outputs/hh_default", metadata={"help": "Where to keep the default tiny models for the next run."}
    )
    quick: bool = field(default=False, metadata={"help": "Try the script in about a minute, on weaker tiny models."})


def prepare_student(assets: DefaultAssets, quick: bool) -> Path:
    """Train the default's student next to its teacher, or find it there."""
    folder = assets.sft_path.with_name("student")
    if not (folder / "model.safetensors").exists():
        settings = replace(QUICK_SETTINGS if quick else DEFAULT_SETTINGS, **STUDENT)
        tokenizer = load_tokenizer(str(assets.sft_path))
        work = folder.with_name("student_trainer")
        before, after = train_policy(assets.train_rows, assets.heldout_rows, tokenizer, settings, 0, folder, work)
        say(f"      student: held-out perplexity {before:.1f} before its training, {after:.2f} after")
    return folder


def ends(history: list[dict], key: str) -> tuple[float, float]:
    """Means of a logged metric over the first and the last batches."""
    values = [entry[key] for entry in history if key in entry]
    return fmean(values[:ENDS]), fmean(values[-ENDS:])


def draw(path: Path, history: list[dict], perplexities: list[tuple[int, float]], teacher: float) -> bool:
    """Draw reverse KL and held-out perplexity over the tokens seen. Returns `False` without matplotlib."""
    pyplot = load_pyplot()
    if pyplot is None:
        return False
    rows = [entry for entry in history if "klx/kl_per_token" in entry]
    tokens = {0: 0.0} | {entry["step"]: entry["num_tokens"] for entry in rows}
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6), constrained_layout=True)
    left.plot([entry["num_tokens"] for entry in rows], [entry["klx/kl_per_token"] for entry in rows])
    left.set(ylabel="reverse KL to the teacher (nats per token)", ylim=(0, None))
    points = [(tokens[step], value) for step, value in perplexities if step in tokens]
    right.plot(*zip(*points, strict=True), marker="o", markersize=3, label="student")
    right.axhline(teacher, color="0.5", linestyle="--", label="teacher")
    right.set(ylabel="held-out perplexity")
    right.legend()
    for axis in (left, right):
        axis.set_xlabel("tokens seen")
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True


def main(script_args: DistillArguments, training_args: KLXGRPOConfig, model_args: ModelConfig) -> None:
    state = PartialState()
    embedded = model_args.model_name_or_path is None
    if embedded != (training_args.kl_ref_model_path is None):
        raise ValueError("Set --model_name_or_path and --kl_ref_model_path together, or neither for the default.")
    default = None
    if embedded:
        if state.num_processes > 1:
            raise ValueError("The default trains its models in one process. Launch one, or set both models.")
        say("[1/3] Dialogues, tokenizer, teacher and student")
        assets = prepare_default_for_launch(script_args.cache_dir, quick=script_args.quick)
        model_args.model_name_or_path = str(prepare_student(assets, script_args.quick))
        training_args.kl_ref_model_path = str(assets.sft_path)
        default = assets.train_rows, assets.heldout_rows
    else:
        say("[1/3] Loading models and data")
    rows, heldout = choose_dialogues(script_args, default)

    path, settings = model_args.model_name_or_path, model_settings(model_args, training_args)
    tokenizer = load_tokenizer(path, **source_of(model_args, training_args))
    student = AutoModelForCausalLM.from_pretrained(path, **settings)
    check_tokenizer(tokenizer, student, path)
    rows = truncate_prompts(rows, tokenizer, script_args.max_prompt_length)
    heldout = truncate_prompts(heldout[: script_args.eval_prompts], tokenizer, script_args.max_prompt_length)
    reward = None
    if script_args.reward_model_path is not None:
        scorer = load_reward_model(script_args.reward_model_path, settings["dtype"], training_args.device)
        reward = make_reward(*scorer, stops=[], delta=False)[1]
    trainer = KLXGRPOTrainer(
        student,
        reward,
        training_args,
        Dataset.from_list([{"prompt": row["prompt"]} for row in rows]),
        processing_class=tokenizer,
        peft_config=get_peft_config(model_args),
    )
    if not training_args.disable_tqdm:
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(BriefProgress)
    # No single process holds all weights of a sharded model, so only a whole one is measured.
    whole = trainer.accelerator.distributed_type in (
        DistributedType.NO,
        DistributedType.MULTI_CPU,
        DistributedType.MULTI_GPU,
    )
    unwrapped = trainer.accelerator.unwrap_model(trainer.model)
    max_length = script_args.max_prompt_length + training_args.max_completion_length
    curve = PerplexityCallback(lambda: heldout_perplexity(unwrapped, tokenizer, heldout, max_length=max_length))
    if whole and state.is_main_process:
        trainer.add_callback(curve)
    say(
        f"[2/3] Distillation: {training_args.max_steps} steps, the KL in the {training_args.kl_placement} by "
        f"{training_args.kl_estimator}, coefficient {training_args.kl_init_coef}, "
        + ("no reward" if reward is None else "and a reward")
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model(training_args.output_dir)
    if whole and state.is_main_process:
        say("[3/3] Measuring")
        with trainer.kl_reference.active() as teacher:
            teacher = trainer.accelerator.unwrap_model(teacher)
            perplexity = heldout_perplexity(teacher, tokenizer, heldout, max_length=max_length)
        history, folder = trainer.state.log_history, Path(training_args.output_dir)
        kl, (first, last) = ends(history, "klx/kl_per_token"), (curve.curve[0][1], curve.curve[-1][1])
        say(f"\n{'':42}{'before':>10}{'after':>10}{'teacher':>10}")
        say(f"{'reverse KL to the teacher, nats per token':42}{kl[0]:>10.3f}{kl[1]:>10.3f}{0.0:>10.3f}")
        say(f"{'held-out perplexity':42}{first:>10.3f}{last:>10.3f}{perplexity:>10.3f}")
        report = {"perplexity": curve.curve, "teacher_perplexity": perplexity, "history": history}
        (folder / "report.json").write_text(json.dumps(report, indent=2))
        if draw(folder / "report.png", history, curve.curve, perplexity):
            say(f"\nCurves: {folder / 'report.png'}")
        else:
            say("\nNo curves: matplotlib is not installed (pip install 'trl-klx[plot]').")
    state.wait_for_everyone()


def parse(arguments: list[str]) -> tuple[DistillArguments, KLXGRPOConfig, ModelConfig]:
    parser = RecipeParser(DistillArguments, KLXGRPOConfig)
    # Flags alone change the default config; a model or another config replaces it.
    if not any(argument.split("=")[0] in ("--config", "--model_name_or_path") for argument in arguments):
        arguments = ["--config", str(DEFAULT_CONFIG), *arguments]
    return parser.parse_args_and_config(with_quick(arguments, max_steps="20"))


if __name__ == "__main__":
    exit_on_user_error(lambda arguments: main(*parse(arguments)))
