"""
The command line of the recipes: TRL's parser, with a short `--help` (the recipe's fields, KL control, and what is set
most often) and a long `--help-all`, both in groups; and what `--quick` stands for.
"""

import copy
import sys
from argparse import SUPPRESS, Action
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from transformers import TrainingArguments
from trl import ModelConfig, ScriptArguments, TrlParser

from trl_klx import KLXConfigMixin


# What is set most often of the fields that neither the recipe nor KL control adds.
USUAL = (
    "model_name_or_path use_peft reward_model_path dataset_name output_dir max_steps num_train_epochs learning_rate "
    "per_device_train_batch_size gradient_accumulation_steps num_generations max_completion_length temperature "
    "logging_steps save_steps report_to seed use_cpu bf16 resume_from_checkpoint"
).split()
# A run of about a minute. Flags on the command line still override them.
QUICK = {"max_steps": "8", "per_device_train_batch_size": "16", "eval_prompts": "16", "logging_steps": "1"}


class _HelpAll(Action):
    def __init__(self, option_strings: Sequence[str], dest: str, **settings: Any):
        super().__init__(option_strings, dest=SUPPRESS, default=SUPPRESS, nargs=0, **settings)

    def __call__(self, parser: Any, *arguments: Any) -> None:
        print(parser.format_groups(parser.groups()))
        parser.exit()


class RecipeParser(TrlParser):
    """
    The parser of a recipe.

    Args:
        script_class (`type[ScriptArguments]`):
            Fields of the recipe.
        config_class (`type`):
            Config of its trainer.
    """

    def __init__(self, script_class: type[ScriptArguments], config_class: type):
        self.script_class, self.config_class = script_class, config_class
        # The first paragraph of the script.
        text = (sys.modules[script_class.__module__].__doc__ or "").strip().partition("\n\n")[0]
        super().__init__((script_class, config_class, ModelConfig), description=text, allow_abbrev=False)
        self.usage = "%(prog)s [--config FILE] [--field value ...]"
        self.add_argument("--help-all", action=_HelpAll, help="show every field and exit")

    def groups(self) -> dict[str, list[str]]:
        """All fields by the title of their group. A field is in the first group that has it."""
        algorithm = self.config_class._algorithm.upper()
        host = next(base for base in self.config_class.__mro__ if base.__module__.startswith("trl."))
        of_host = {field.name for field in fields(host)}
        of_training = {field.name for field in fields(TrainingArguments)}
        added = _names(self.config_class, without=of_host)
        listed = {
            "this recipe": _names(self.script_class, without=_names(ScriptArguments)),
            "KL control": _names(KLXConfigMixin),
            algorithm: [name for name in added if name in self.config_class.__annotations__],
            "set most often": USUAL,
            f"{algorithm}, under the names of TRL 1.12": added,
            "data": _names(ScriptArguments),
            "model": _names(ModelConfig),
            f"sampling and loss (TRL's {host.__name__})": _names(host, without=of_training),
            "training (transformers)": _names(TrainingArguments),
        }
        known, seen = {action.dest for action in self._actions}, set()
        found = {}
        for title, names in listed.items():
            if own := [name for name in names if name in known and name not in seen]:
                found[title] = own
                seen.update(own)
        return found

    def format_help(self) -> str:
        groups = self.groups()
        shown = {title: groups[title] for title in list(groups)[: list(groups).index("set most often") + 1]}
        few, all_ = (sum(map(len, part.values())) for part in (shown, groups))
        return (
            f"{self.format_groups(shown)}\nThese are {few} of {all_} fields: --help-all shows the others, of data, "
            "model, sampling and training.\nFields also come from a YAML file (--config); flags override it.\n"
        )

    def format_groups(self, groups: dict[str, list[str]]) -> str:
        """The help of these groups of fields."""
        actions: dict[str, Action] = {}
        for action in self._actions:
            actions.setdefault(action.dest, action)  # `--no_field` comes second
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, [], [])
        formatter.add_text(self.description)
        for title, names in groups.items():
            formatter.start_section(title)
            formatter.add_arguments([_spelled_once(actions[name]) for name in names])
            formatter.end_section()
        return formatter.format_help()


def _names(cls: type, without: Sequence[str] | set[str] = ()) -> list[str]:
    return [field.name for field in fields(cls) if field.name not in without]


def _spelled_once(action: Action) -> Action:
    """The action without its second spelling, with hyphens."""
    action = copy.copy(action)
    action.option_strings = action.option_strings[:1]
    return action


def with_quick(arguments: Sequence[str], **further: str) -> list[str]:
    """
    Put what `--quick` stands for after the config and before the other arguments, which override it.

    Args:
        arguments (`Sequence[str]`):
            Command line.
        further (`str`):
            Fields that only this recipe has.
    """
    arguments = list(arguments)
    index = next((i for i, word in enumerate(arguments) if word.partition("=")[0] == "--quick"), None)
    if index is None:
        return arguments
    value = arguments[index].partition("=")[2] or (arguments[index + 1 : index + 2] or [""])[0]
    if value.lower() in ("false", "0", "no"):
        return arguments
    flags = [word for name, value in (QUICK | further).items() for word in (f"--{name}", value)]
    start = 2 if arguments[0] == "--config" else 0
    return [*arguments[:start], *flags, *arguments[start:]]
