"""
Run one setup under several KL settings and record each run as a JSON file. Shared by `compare_controllers.py`,
`sweep_kl_coef.py` and `benchmarks/controllers.py`. A recorded run is not repeated.
"""

import gc
import hashlib
import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from accelerate import PartialState
from datasets import Dataset
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PrinterCallback, ProgressCallback
from trl import ModelConfig, ScriptArguments, get_peft_config

from hh.bootstrap import prepare_default_for_launch
from hh.measures import heldout_perplexity
from hh.report import PerplexityCallback
from ppo_hh import (
    load_dialogues,
    load_reward_model,
    load_tokenizer,
    make_reward,
    model_settings,
    source_of,
    truncate_prompts,
)
from recipe_parser import RecipeParser, with_quick
from trl_klx import KLXGRPOConfig, KLXGRPOTrainer, KLXPPOConfig, KLXPPOTrainer, KLXRLOOConfig, KLXRLOOTrainer


ALGORITHMS = {
    "grpo": (KLXGRPOConfig, KLXGRPOTrainer),
    "rloo": (KLXRLOOConfig, KLXRLOOTrainer),
    "ppo": (KLXPPOConfig, KLXPPOTrainer),
}
SERIES = {"kl": "klx/kl", "coef": "klx/coef"}


@dataclass
class LabArguments(ScriptArguments):
    """
    Arguments of the scripts that make several runs.

    Args:
        algorithm (`str`, *optional*, defaults to `"grpo"`):
            Trainer: `"grpo"`, `"rloo"` or `"ppo"`.
        reward (`str`, *optional*):
            A reward model (path or Hub name), or a reward function as `module.function`. Required with your own model.
        seeds (`list[int]`, *optional*, defaults to `[0]`):
            Seeds to run every setting with.
        eval_prompts (`int`, *optional*, defaults to `128`):
            Number of held-out rows. The perplexity of their `chosen` answers is measured.
        max_prompt_length (`int`, *optional*, defaults to `256`):
            Longest prompt in tokens; a longer one loses its beginning.
        cache_dir (`str`, *optional*, defaults to `"outputs/hh_default"`):
            Where to keep the tiny models of the default setup.
        quick (`bool`, *optional*, defaults to `False`):
            Try the script: a few steps per run, and weaker tiny models in the default setup.
    """

    dataset_name: str | None = field(
        default=None, metadata={"help": "Dataset with `prompt`, and `chosen` for perplexity."}
    )
    algorithm: str = field(
        default="grpo", metadata={"help": "Trainer: grpo, rloo or ppo.", "choices": list(ALGORITHMS)}
    )
    reward: str | None = field(default=None, metadata={"help": "Reward model, or reward function as module.function."})
    seeds: list[int] = field(default_factory=lambda: [0], metadata={"help": "Seeds to run every setting with."})
    eval_prompts: int = field(default=128, metadata={"help": "Held-out rows for the perplexity."})
    max_prompt_length: int = field(default=256, metadata={"help": "Longest prompt in tokens."})
    cache_dir: str = field(default="outputs/hh_default", metadata={"help": "Folder of the default tiny models."})
    quick: bool = field(
        default=False, metadata={"help": "Try the script: a few steps per run, on weaker tiny models."}
    )


def _value_of(flag: str, arguments: Sequence[str]) -> str | None:
    """The value of a flag on a command line, or `None` without the flag."""
    for argument, following in zip(arguments, [*arguments[1:], None], strict=True):
        name, _, value = argument.partition("=")
        if name == flag:
            return value or following
    return None


def _without(flags: Container[str], arguments: Sequence[str]) -> list[str]:
    """A command line without some flags and their values."""
    kept, drops = [], False
    for argument in arguments:
        if argument.startswith("--"):
            drops = argument.partition("=")[0] in flags
        if not drops:
            kept.append(argument)
    return kept


def _config_text(arguments: Sequence[str]) -> str:
    """The text of the config file on a command line, empty without one."""
    path = _value_of("--config", arguments)
    return Path(path).read_text() if path is not None and os.path.isfile(path) else ""


def parse(arguments: Sequence[str], script_class: type[LabArguments] = LabArguments) -> tuple:
    """Parse script, training and model arguments, with the config class of the chosen algorithm."""
    algorithm = _value_of("--algorithm", arguments)
    if algorithm is None:
        algorithm = (yaml.safe_load(_config_text(arguments)) or {}).get("algorithm", "grpo")
    if algorithm not in ALGORITHMS:
        raise ValueError(f"--algorithm must be one of {', '.join(ALGORITHMS)}, got {algorithm!r}.")
    return RecipeParser(script_class, ALGORITHMS[algorithm][0]).parse_args_and_config(with_quick(arguments))


def with_defaults(arguments: Sequence[str], config: Path) -> list[str]:
    """Prepend a recipe's default config, unless the arguments name a config or a model."""
    if any(argument.split("=")[0] in ("--config", "--model_name_or_path") for argument in arguments):
        return list(arguments)
    return ["--config", str(config), *arguments]


@dataclass
class Setup:
    """What all runs share: model, data and reward."""

    model_path: str
    tokenizer: Any
    rows: list[dict]
    heldout: list[dict]
    reward: Callable[..., list[float]]


def _load_reward(name: str, device) -> Callable[..., list[float]]:
    if not os.path.exists(name) and "/" not in name and "." in name:
        module, function = name.rsplit(".", 1)
        # Python puts the script's folder on the path, but not the working directory.
        sys.path.append(os.getcwd())
        return getattr(importlib.import_module(module), function)
    model, tokenizer = load_reward_model(name, None, device)
    return make_reward(model, tokenizer, [], delta=False)[1]


def _parse_row(row: dict) -> dict:
    if not isinstance(row.get("prompt"), str):
        raise ValueError(f"The dataset needs a column `prompt` with text. Its columns are {sorted(row)}.")
    return dict(row)


def load_setup(script_args: LabArguments, training_args, model_args: ModelConfig) -> Setup:
    """Load what the arguments name, or build the default: dialogues, a tiny policy and a tiny reward model."""
    path, reward = model_args.model_name_or_path, script_args.reward
    if (path is None) != (reward is None):
        raise ValueError("Set --model_name_or_path and --reward together, or neither for the default setup.")
    if path is None:
        assets = prepare_default_for_launch(script_args.cache_dir, quick=script_args.quick)
        path, reward, rows, heldout = assets.sft_path, assets.reward_path, assets.train_rows, assets.heldout_rows
    elif script_args.dataset_name is None:
        raise ValueError("Set --dataset_name: your own model needs your own prompts.")
    if script_args.dataset_name is not None:
        rows, heldout = load_dialogues(script_args, _parse_row)
    tokenizer = load_tokenizer(str(path), **source_of(model_args, training_args))
    return Setup(
        model_path=str(path),
        tokenizer=tokenizer,
        rows=truncate_prompts(rows, tokenizer, script_args.max_prompt_length),
        heldout=truncate_prompts(heldout[: script_args.eval_prompts], tokenizer, script_args.max_prompt_length),
        reward=_load_reward(str(reward), training_args.device),
    )


@dataclass(frozen=True)
class Setting:
    """A setting to compare: its label and its flags."""

    label: str
    flags: tuple[str, ...]


def train(setup: Setup, script_args: LabArguments, training_args, model_args: ModelConfig) -> dict[str, Any]:
    """Train once. Returns series per generation batch, and the held-out perplexity over the steps."""
    model = AutoModelForCausalLM.from_pretrained(setup.model_path, **model_settings(model_args, training_args))
    trainer = ALGORITHMS[script_args.algorithm][1](
        args=training_args,
        processing_class=setup.tokenizer,
        model=model,
        reward_funcs=setup.reward,
        train_dataset=Dataset.from_list(setup.rows),
        peft_config=get_peft_config(model_args),
    )
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    policy = trainer.accelerator.unwrap_model(trainer.model)
    length = script_args.max_prompt_length + training_args.max_completion_length
    perplexity = PerplexityCallback(
        lambda: heldout_perplexity(policy, setup.tokenizer, setup.heldout, max_length=length), times=5
    )
    if all(isinstance(row.get("chosen"), str) for row in setup.heldout):
        trainer.add_callback(perplexity)
    trainer.train()
    history = [row for row in trainer.state.log_history if "klx/kl" in row]
    series = {name: [row[key] for row in history] for name, key in SERIES.items()}
    # The score alone: with the penalty in the reward, `reward` would include it.
    score = f"rewards/{setup.reward.__name__}/mean"
    return series | {
        "step": [row["step"] for row in history],
        "reward": [row[score] for row in history],
        "perplexity": perplexity.curve,
        "target": training_args.kl_target,
        "unit": training_args.kl_target_unit,
    }


def run_all(
    arguments: Sequence[str],
    settings: Sequence[Setting],
    folder: Path,
    script_class: type[LabArguments] = LabArguments,
    share: tuple[int, int] = (0, 1),
) -> list[dict[str, Any]]:
    """
    Run every setting with every seed and return the records, in that order.

    Args:
        arguments (`Sequence[str]`):
            Command line shared by all runs.
        settings (`Sequence[Setting]`):
            Settings to compare.
        folder (`Path`):
            Where to keep the records. Runs already recorded for the same command line are not repeated.
        script_class (`type[LabArguments]`, *optional*):
            Class of the script arguments.
        share (`tuple[int, int]`, *optional*, defaults to `(0, 1)`):
            Index and number of shares: make and return only the runs of this share.
    """
    folder.mkdir(parents=True, exist_ok=True)
    common = parse([*arguments, *settings[0].flags], script_class)
    jobs = [(setting, seed) for setting in settings for seed in common[0].seeds][share[0] :: share[1]]
    # Every command line is parsed before the first run, so that a mistake in the last one shows at once.
    parsed = {
        job: parse([*arguments, *job[0].flags, "--seed", str(job[1]), "--output_dir", str(folder)], script_class)
        for job in jobs
    }
    # Which runs to make changes none of them: adding a seed or a setting keeps the records of the others.
    lists = {"seeds"} | {own.name for own in fields(script_class)} - {own.name for own in fields(LabArguments)}
    shared = [_without({f"--{name}" for name in lists}, arguments), _config_text(arguments)]
    setup, records = None, []
    for setting, seed in tqdm(jobs, desc="runs", unit="run", disable=not PartialState().is_main_process):
        mark = hashlib.sha256(json.dumps([*shared, list(setting.flags), seed]).encode()).hexdigest()[:16]
        name = re.sub(r"[^\w.-]+", "_", setting.label)
        file = folder / f"{name}-seed{seed}.json"
        if file.exists() and (record := json.loads(file.read_text())).get("mark") == mark:
            records.append(record)
            continue
        script_args, training_args, model_args = parsed[setting, seed]
        setup = setup or load_setup(script_args, training_args, model_args)
        record = {"label": setting.label, "seed": seed, "mark": mark}
        record |= train(setup, script_args, training_args, model_args)
        records.append(record)
        if PartialState().is_main_process:
            part = file.with_suffix(".part")
            part.write_text(json.dumps(record))
            part.replace(file)
        gc.collect()
    return records


def tail(values: Sequence[float]) -> Sequence[float]:
    """The second half of a series, which is past the initial phase in a run of sensible length."""
    return values[len(values) // 2 :]


def average(records: Sequence[dict], name: str) -> float:
    """Mean of a series over the second half of the run, averaged over the seeds."""
    return fmean(fmean(tail(record[name])) for record in records)


def by_label(records: Sequence[dict]) -> dict[str, list[dict]]:
    """The records of each setting, in the order of the settings."""
    groups: dict[str, list[dict]] = {}
    for record in records:
        groups.setdefault(record["label"], []).append(record)
    return groups
