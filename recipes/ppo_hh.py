"""
PPO with KL control on helpful-and-harmless dialogues.

With no arguments it runs offline on a laptop CPU, with tiny models and dialogues that it makes itself:

```bash
accelerate launch recipes/ppo_hh.py
accelerate launch recipes/ppo_hh.py --quick    # a minute, to try it
```

On real models and data (see `recipes/ppo_hh_1b.yaml` and its siblings):

```bash
accelerate launch recipes/ppo_hh.py --config recipes/ppo_hh_1b.yaml --reward_model_path path/to/reward_model
accelerate launch recipes/ppo_hh.py \
    --model_name_or_path EleutherAI/pythia-1b \
    --reward_model_path path/to/reward_model \
    --dataset_name Anthropic/hh-rlhf \
    --use_peft --kl_target 6 --output_dir outputs/ppo_hh_pythia
```
"""

import contextlib
import copy
import os
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path


# Set before torch is imported: threads that spin while waiting make small models crawl on a shared machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from datasets import Dataset, DatasetDict, load_dataset, load_from_disk
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    ProgressCallback,
)
from trl import ModelConfig, ScriptArguments, get_peft_config, get_quantization_config

from hh.bootstrap import outside_of_launch, prepare_default_for_launch
from hh.measures import heldout_perplexity, score_texts
from hh.report import (
    BriefProgress,
    PerplexityCallback,
    StopAtKL,
    cut_at,
    draw_report,
    evaluate,
    format_report,
    write_report,
)
from hh.rows import parse_hh_row
from recipe_parser import RecipeParser, with_quick
from trl_klx import KLXPPOConfig, KLXPPOTrainer
from trl_klx.cli.dataset_files import LOADERS
from trl_klx.references.sharding import loaded_whole


DEFAULT_CONFIG = Path(__file__).with_name("ppo_hh.yaml")


@dataclass
class HHScriptArguments(ScriptArguments):
    """
    Arguments of the script, in addition to those of the trainer and the model. The policy is `--model_name_or_path`,
    the reward model `--reward_model_path`; without either, tiny models are trained and cached first.

    Args:
        dataset_name (`str`, *optional*):
            Name on the Hub, or local file or directory. If unset, the recipe's own dialogues are used.
        delta_reward (`bool`, *optional*, defaults to `False`):
            Subtract the reward of the chosen answer to the same prompt from the reward of the sampled one.
        max_prompt_length (`int`, *optional*, defaults to `384`):
            Longest prompt in tokens; a longer one loses its beginning.
        eval_prompts (`int`, *optional*, defaults to `128`):
            Number of held-out dialogues for the report.
        samples (`int`, *optional*, defaults to `3`):
            Number of dialogues to show before and after training.
        free_run (`bool`, *optional*, defaults to `False`):
            Also train without a penalty until the KL is at twice its target, in a second process, to draw that run
            behind this one.
        cache_dir (`str`, *optional*, defaults to `"outputs/hh_default"`):
            Where to keep the default tiny models for the next run.
        quick (`bool`, *optional*, defaults to `False`):
            Try the script in about a minute: a few steps, on tiny models too weak for their text to be shown.
    """

    delta_reward: bool = field(
        default=False, metadata={"help": "Subtract the reward of the chosen answer to the same prompt."}
    )
    max_prompt_length: int = field(
        default=384, metadata={"help": "Longest prompt in tokens; a longer one loses its beginning."}
    )
    eval_prompts: int = field(default=128, metadata={"help": "Number of held-out dialogues for the report."})
    samples: int = field(default=3, metadata={"help": "Number of dialogues to show before and after training."})
    free_run: bool = field(
        default=False, metadata={"help": "Also train without a penalty for a while, to draw that run behind this one."}
    )
    cache_dir: str = field(
        default="outputs/hh_default", metadata={"help": "Where to keep the default tiny models for the next run."}
    )
    quick: bool = field(
        default=False, metadata={"help": "Try the script in about a minute: a few steps, on weaker tiny models."}
    )


def say(text: str) -> None:
    PartialState().print(text, flush=True)


def load_dialogues(script_args: ScriptArguments, parse_row=parse_hh_row) -> tuple[list[dict], list[dict]]:
    """Load training and held-out rows from the Hub or from local files, each parsed by `parse_row`."""
    name = script_args.dataset_name
    if script_args.dataset_streaming:
        raise ValueError("--dataset_streaming cannot be used: all dialogues are read into memory.")
    try:
        if os.path.isfile(name):
            suffix = Path(name.removesuffix(".gz")).suffix
            if suffix not in LOADERS:
                raise ValueError(f"its type {suffix!r} is not one of {', '.join(LOADERS)}")
            data = load_dataset(LOADERS[suffix], data_files=name)
        elif any((Path(name) / file).exists() for file in ("dataset_dict.json", "state.json")):
            data = load_from_disk(name)
        else:
            data = load_dataset(name, script_args.dataset_config)
    except Exception as error:
        raise ValueError(f"The dataset {name!r} cannot be loaded: {error}") from error
    train, test = script_args.dataset_train_split, script_args.dataset_test_split
    if isinstance(data, Dataset):
        data = DatasetDict({train: data})
    if train not in data:
        raise ValueError(f"The dataset {name!r} has no split {train!r}, only {list(data)}. Set --dataset_train_split.")
    rows = [parse_row(row) for row in data[train]]
    if test in data and test != train:
        heldout = [parse_row(row) for row in data[test]]
    else:
        cut = max(1, len(rows) // 20)
        rows, heldout = rows[cut:], rows[:cut]
    if not rows or not heldout:
        raise ValueError(f"The dataset {name!r} is empty: {len(rows)} training and {len(heldout)} held-out dialogues.")
    return rows, heldout


def choose_dialogues(script_args: ScriptArguments, default: tuple[list[dict], list[dict]] | None):
    """Training and held-out rows: those of `--dataset_name`, else the default ones of the tiny models."""
    if script_args.dataset_name is not None:
        return load_dialogues(script_args)
    if default is None:
        raise ValueError("Set --dataset_name, for instance to Anthropic/hh-rlhf or to a local file.")
    return default


def check_tokenizer(tokenizer, model, path: str) -> None:
    weight = model.get_input_embeddings().weight
    size = getattr(weight, "ds_shape", weight.shape)[0]  # under ZeRO-3 the weight itself is empty
    if len(tokenizer) > size:
        raise ValueError(
            f"The tokenizer of {path!r} has {len(tokenizer)} tokens, but the model embeds only {size}: they do not "
            "belong together."
        )


def source_of(model_args: ModelConfig, training_args) -> dict:
    """Arguments of `from_pretrained` that say where policy and tokenizer come from."""
    return {"revision": model_args.model_revision, "trust_remote_code": training_args.trust_remote_code}


def model_settings(model_args: ModelConfig, training_args) -> dict:
    """Arguments of `from_pretrained` for the policy."""
    dtype = model_args.dtype if model_args.dtype in ("auto", None) else getattr(torch, model_args.dtype)
    settings = {"dtype": dtype, "attn_implementation": model_args.attn_implementation}
    settings |= source_of(model_args, training_args)
    quantization = get_quantization_config(model_args)
    if quantization is not None:
        settings |= {"quantization_config": quantization, "device_map": {"": PartialState().device}}
    return settings


def load_tokenizer(path: str, **source):
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left", truncation_side="left", **source)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_reward_model(path: str, dtype, device):
    labels = AutoConfig.from_pretrained(path).num_labels
    if labels != 1:
        raise ValueError(f"The reward model {path!r} has {labels} labels; a reward model must have one.")
    # Every process calls the whole reward model, however the policy is sharded.
    with loaded_whole():
        model = AutoModelForSequenceClassification.from_pretrained(path, dtype=dtype).to(device).eval()
    tokenizer = load_tokenizer(path)
    model.config.pad_token_id = tokenizer.pad_token_id
    check_tokenizer(tokenizer, model, path)
    return model, tokenizer


def make_reward(model, tokenizer, stops: list[str], delta: bool):
    """A function that scores answers to prompts, and a TRL reward function that uses it."""

    def score(prompts: list[str], answers: list[str]) -> list[float]:
        texts = [prompt + cut_at(answer, stops) for prompt, answer in zip(prompts, answers, strict=True)]
        return score_texts(model, tokenizer, texts).tolist()

    baseline: dict[str, float] = {}

    def reward_model(prompts, completions, chosen=None, **kwargs) -> list[float]:
        scores = score(prompts, completions)
        if not delta:
            return scores
        missing = {prompt: answer for prompt, answer in zip(prompts, chosen, strict=True) if prompt not in baseline}
        if missing:
            baseline.update(zip(missing, score(list(missing), list(missing.values())), strict=True))
        return [value - baseline[prompt] for value, prompt in zip(scores, prompts, strict=True)]

    return score, reward_model


def truncate_prompts(rows: list[dict], tokenizer, max_length: int) -> list[dict]:
    """Cut the beginning of prompts that are too long."""
    shortened = []
    for row in rows:
        ids = tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]
        prompt = row["prompt"] if len(ids) <= max_length else tokenizer.decode(ids[-max_length:])
        shortened.append({**row, "prompt": prompt})
    return shortened


def without_penalty(args: KLXPPOConfig) -> KLXPPOConfig:
    """The same run with the KL only measured."""
    args = copy.deepcopy(args)
    args.kl_target, args.kl_penalty_coef, args.kl_controller, args.kl_monitor = None, 0.0, None, True
    args.kl_lr_guard = False
    return args


@dataclass
class Setup:
    """
    What a run needs besides its arguments.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            Tokenizer of the policy.
        rows (`list[dict]`):
            Training dialogues.
        heldout (`list[dict]`):
            Held-out dialogues for the report.
        score (`Callable`):
            Scores answers to prompts.
        build_trainer (`Callable`):
            Builds a trainer with a fresh policy.
    """

    tokenizer: PreTrainedTokenizerBase
    rows: list[dict]
    heldout: list[dict]
    score: Callable[[list[str], list[str]], list[float]]
    build_trainer: Callable[[KLXPPOConfig], KLXPPOTrainer]


def set_up(script_args: HHScriptArguments, training_args: KLXPPOConfig, model_args: ModelConfig) -> Setup:
    """Load models and dialogues; without a model, train the tiny ones first."""
    path, reward_path = model_args.model_name_or_path, training_args.reward_model_path
    if (path is None) != (reward_path is None):
        raise ValueError("Set --model_name_or_path and --reward_model_path together, or neither for the default.")
    default = None
    if path is None:
        torch.set_num_threads(1)  # more are slower on models this small, and the run without a penalty needs a core
        say("[1/4] Dialogues, tokenizer, policy (SFT) and reward model")
        assets = prepare_default_for_launch(script_args.cache_dir, quick=script_args.quick)
        say(
            f"      reward model: {100 * assets.reward_accuracy:.1f}% of held-out preferences right; policy: held-out "
            f"perplexity {assets.sft_perplexity_before:.1f} before SFT, {assets.sft_perplexity_after:.2f} after"
        )
        path, reward_path = str(assets.sft_path), str(assets.reward_path)
        default = assets.train_rows, assets.heldout_rows
    else:
        say("[1/4] Loading models and data")
    rows, heldout = choose_dialogues(script_args, default)

    settings = model_settings(model_args, training_args)
    tokenizer = load_tokenizer(path, **source_of(model_args, training_args))
    reward_model, reward_tokenizer = load_reward_model(reward_path, settings["dtype"], training_args.device)
    stops = training_args.stop_strings or []
    score, reward_func = make_reward(reward_model, reward_tokenizer, stops, script_args.delta_reward)
    rows = truncate_prompts(rows, tokenizer, script_args.max_prompt_length)
    heldout = truncate_prompts(heldout[: script_args.eval_prompts], tokenizer, script_args.max_prompt_length)

    def build_trainer(args: KLXPPOConfig) -> KLXPPOTrainer:
        policy = AutoModelForCausalLM.from_pretrained(path, **settings)
        check_tokenizer(tokenizer, policy, path)
        trainer = KLXPPOTrainer(
            args=args,
            processing_class=tokenizer,
            model=policy,
            reward_funcs=reward_func,
            train_dataset=Dataset.from_list(rows),
            peft_config=get_peft_config(model_args),
        )
        if not args.disable_tqdm:
            trainer.remove_callback(ProgressCallback)
            trainer.add_callback(BriefProgress)
        return trainer

    return Setup(tokenizer, rows, heldout, score, build_trainer)


def free_history(script_args: HHScriptArguments, training_args: KLXPPOConfig, model_args: ModelConfig) -> list[dict]:
    """The log of the same run without a penalty, until its KL is at twice the target."""
    torch.set_num_threads(1)
    training_args.disable_tqdm = True
    training_args.output_dir = str(Path(training_args.output_dir) / "free_run")
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        trainer = set_up(script_args, training_args, model_args).build_trainer(without_penalty(training_args))
        trainer.add_callback(StopAtKL(2.0 * training_args.kl_target))
        trainer.train()
    return trainer.state.log_history


def start_free_run(*arguments) -> Future:
    """Start [`free_history`] in a process of its own, outside of the launch."""
    pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
    with outside_of_launch():
        future = pool.submit(free_history, *arguments)
    pool.shutdown(wait=False)
    return future


def main(script_args: HHScriptArguments, training_args: KLXPPOConfig, model_args: ModelConfig) -> None:
    state = PartialState()
    arguments = copy.deepcopy((script_args, training_args, model_args))
    setup = set_up(script_args, training_args, model_args)
    tokenizer, rows, heldout, score = setup.tokenizer, setup.rows, setup.heldout, setup.score
    stops = training_args.stop_strings or []
    trainer = setup.build_trainer(training_args)
    # No single process holds all weights of a sharded policy, so only a whole one is measured.
    whole = trainer.accelerator.distributed_type in (
        DistributedType.NO,
        DistributedType.MULTI_CPU,
        DistributedType.MULTI_GPU,
    )
    unwrapped = trainer.accelerator.unwrap_model(trainer.model)
    max_length = script_args.max_prompt_length + training_args.max_completion_length

    def measure():
        return evaluate(
            unwrapped,
            tokenizer,
            heldout,
            score,
            max_length,
            max_new_tokens=training_args.max_completion_length,
            temperature=training_args.temperature,
            stops=stops,
        )

    perplexity = PerplexityCallback(lambda: heldout_perplexity(unwrapped, tokenizer, heldout, max_length=max_length))
    if whole and state.is_main_process:
        say(f"[2/4] Measuring the policy on {len(heldout)} held-out dialogues")
        before = measure()
        say(f"      reward {before.reward:.3f}, perplexity {before.perplexity:.3f}")
        trainer.add_callback(perplexity)
    steps, coef = training_args.max_steps, training_args.kl_init_coef
    say(
        f"[3/4] PPO: {steps if steps > 0 else 'all'} steps on {len(rows)} dialogues, "
        f"KL controller {training_args.kl_controller_name}"
        + ("" if coef is None else f", coefficient {coef}")
        + (
            f", target {training_args.kl_target} nats per {training_args.kl_target_unit}"
            if training_args.kl_target
            else ""
        )
    )
    free_run = None
    if script_args.free_run and training_args.kl_target is not None and state.is_main_process:
        say("      beside it, the same without a penalty, until the KL is at twice its target")
        free_run = start_free_run(*arguments)
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model(training_args.output_dir)
    say(f"      policy saved in {training_args.output_dir}")

    if whole and state.is_main_process:
        say("[4/4] Measuring again")
        after = measure()
        history, target = trainer.state.log_history, training_args.kl_target
        free = free_run.result() if free_run is not None else []
        folder = Path(training_args.output_dir)
        say(format_report(before, after, history, target, heldout, script_args.samples))
        write_report(folder, before, after, history, perplexity.curve, free)
        if draw_report(folder / "report.png", history, perplexity.curve, target, free):
            say(f"\nCurves: {folder / 'report.png'}")
        else:
            say("\nNo curves: matplotlib is not installed (pip install 'trl-klx[plot]').")
        if trainer.kl_control is not None and trainer.kl_control.adviser is not None:
            say(trainer.kl_control.adviser.summary())
    state.wait_for_everyone()


def parse(arguments: list[str]) -> tuple[HHScriptArguments, KLXPPOConfig, ModelConfig]:
    parser = RecipeParser(HHScriptArguments, KLXPPOConfig)
    # Flags alone change the default config; a model or another config replaces it.
    if not any(argument.split("=")[0] in ("--config", "--model_name_or_path") for argument in arguments):
        arguments = ["--config", str(DEFAULT_CONFIG), *arguments]
    return parser.parse_args_and_config(with_quick(arguments, samples="0", free_run="False"))


def exit_on_user_error(main: Callable[[list[str]], None]) -> None:
    """Run a script. A mistake in the arguments prints one line; an error in training keeps its traceback."""
    try:
        main(sys.argv[1:])
    except ValueError as error:
        frames = traceback.extract_tb(error.__traceback__)
        if any(frame.name == "_inner_training_loop" for frame in frames) or os.environ.get("TRL_KLX_TRACEBACK") == "1":
            raise
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    exit_on_user_error(lambda arguments: main(*parse(arguments)))
