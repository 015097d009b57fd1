"""Launching a training command: check as much as possible, then hand over to accelerate."""

import difflib
import os
import subprocess
from argparse import ArgumentParser
from typing import Any

from accelerate.commands.launch import launch_command, launch_command_parser
from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments
from trl.cli.accelerate_config import resolve_accelerate_config_argument
from trl.cli.commands.training import _subtract_subsequence

from .algorithms import GroupedParser, make_parser
from .console import CLIError, one_line, say


SCRIPT = "trl_klx.cli.script"


def run(name: str, argv: list[str]) -> int:
    """
    Launch a training.

    Args:
        name (`str`):
            Command: `"grpo"`, `"rloo"` or `"ppo"`.
        argv (`list[str]`):
            Flags of the trainer, of the script and of the launcher, in any order.
    """
    argv = _split_assignments(argv)
    _check_config_file(argv)
    # The training processes check the batch sizes, because only they know how many processes there are.
    parser, launcher = make_parser(name, resolve=False), launch_command_parser()
    try:
        script_args, training_args, model_args, dataset_args, from_config, from_flags = parser.parse_args_and_config(
            argv, return_remaining_strings=True, separate_remaining_strings=True
        )
        training_args._validate_kl_values()
    except Exception as error:
        # Only the user's settings can be refused here.
        raise CLIError(one_line(error), code=2) from error
    check_inputs(script_args, training_args, model_args, dataset_args)
    launch_args = _accelerate_config(_without_booleans(launcher, from_config) + from_flags)
    _check_launch_flags(parser, launcher, launch_args)
    forwarded = [name, *_subtract_subsequence(argv, from_flags)]
    # Launched as a module, because a script's folder would come before the user's modules in `sys.path`.
    launch = launcher.parse_args([*launch_args, "--module", SCRIPT, *forwarded])
    if launch.training_script != SCRIPT:
        raise CLIError(f"unexpected argument {launch.training_script!r}. Pass fields as `--field value`.", code=2)
    try:
        launch_command(launch)
    except subprocess.CalledProcessError as error:
        # With exit code 2, the process has already printed which field it refused.
        return 2 if error.returncode == 2 else _failed(name, error.returncode)
    except Exception as error:
        # With torch's launcher, the processes have already printed what went wrong.
        if type(error).__name__ not in ("ChildFailedError", "SignalException"):
            raise CLIError(f"the launcher failed: {one_line(error)}") from error
        return _failed(name, None)
    return 0


def _failed(name: str, code: int | None) -> int:
    say(f"trl-klx {name}: the training failed" + (f" (exit code {code})" if code else ""), error=True)
    return 1


def check_inputs(
    script_args: ScriptArguments, training_args: Any, model_args: ModelConfig, dataset_args: DatasetMixtureConfig
) -> None:
    """Refuse a run without a model, data or a reward, and settings that would be ignored."""
    # PPO also accepts two of them under the names that TRL's former PPO trainer used.
    former_model = getattr(training_args, "sft_model_path", None)
    former_reward = getattr(training_args, "reward_model_path", None)
    if not model_args.model_name_or_path and not former_model:
        raise CLIError(
            "there is no model. Set --model_name_or_path to a name on the Hub or to a local folder.", code=2
        )
    if model_args.model_name_or_path and former_model:
        raise CLIError("--model_name_or_path and --sft_model_path mean the same. Set one of them.", code=2)
    if not script_args.dataset_name and not dataset_args.datasets:
        raise CLIError("there are no prompts. Set --dataset_name, or `datasets` in the config file.", code=2)
    given = [f"--{name}" for name in ("reward_model_name_or_path", "reward_funcs") if getattr(script_args, name, None)]
    if not given and not former_reward:
        raise CLIError("there is no reward. Set --reward_model_name_or_path or --reward_funcs.", code=2)
    if given and former_reward:
        raise CLIError(
            f"--reward_model_path is ignored if {given[0]} is set. Set --reward_model_name_or_path instead.",
            code=2,
        )


def _split_assignments(argv: list[str]) -> list[str]:
    """Split `--config=x` into two words, because TRL's parser does not accept it as one."""
    words: list[str] = []
    for word in argv:
        flag, equals, value = word.partition("=")
        words += [flag, value] if equals and flag in ("--config", "--accelerate_config") else [word]
    return words


def _check_config_file(argv: list[str]) -> None:
    for flag in ("--config", "--accelerate_config"):
        if flag in argv[-1:]:
            raise CLIError(f"{flag} needs a value.", code=2)
    if "--config" in argv:
        path = argv[argv.index("--config") + 1]
        if not os.path.isfile(path):
            raise CLIError(f"the config file {path!r} does not exist.", code=2)


def _accelerate_config(launch_args: list[str]) -> list[str]:
    try:
        return resolve_accelerate_config_argument(launch_args)
    except ValueError as error:
        raise CLIError(one_line(error), code=2) from error


def _without_booleans(launcher: ArgumentParser, words: list[str]) -> list[str]:
    """Turn flags from a YAML file into flags of the launcher. Its switches take no value."""
    result: list[str] = []
    for flag, value in zip(words[::2], words[1::2], strict=True):
        action = launcher._option_string_actions.get(flag)
        if action is None or action.nargs != 0:
            result += [flag, value]
        elif value == "True":
            result.append(flag)
    return result


def _check_launch_flags(parser: GroupedParser, launcher: ArgumentParser, words: list[str]) -> None:
    ours, theirs = parser._option_string_actions, launcher._option_string_actions
    for word in words:
        flag = word.partition("=")[0]
        if flag.startswith("--") and flag not in theirs:
            close = difflib.get_close_matches(flag, [*ours, *theirs], n=1)
            hint = f" Did you mean {close[0]}?" if close else ""
            raise CLIError(f"unknown field {flag!r}.{hint} See `{parser.prog} --help`.", code=2)
