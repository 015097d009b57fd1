"""The training commands: TRL's script, our config, our trainer and the parser of each."""

from dataclasses import dataclass, fields
from importlib import import_module
from types import ModuleType
from typing import Any, cast

from transformers import TrainingArguments
from trl import DatasetMixtureConfig, ModelConfig, TrlParser

from .. import __name__ as package


@dataclass(frozen=True)
class Algorithm:
    """
    One training command. TRL's script does the work; only config and trainer are ours.

    Attributes:
        title (`str`):
            Name of the method.
        host (`str`):
            Name of TRL's script, which is also the prefix of the classes in it.
        config_name, trainer_name (`str`):
            Public names of our classes.
    """

    title: str
    host: str
    config_name: str
    trainer_name: str

    @property
    def script(self) -> ModuleType:
        return import_module(f"trl.scripts.{self.host}")

    @property
    def script_arguments(self) -> type[Any]:
        return cast(type[Any], getattr(self.script, f"{self.host.upper()}ScriptArguments"))

    @property
    def host_trainer(self) -> str:
        return f"{self.host.upper()}Trainer"

    @property
    def config(self) -> type[Any]:
        return cast(type[Any], getattr(import_module(package), self.config_name))

    @property
    def trainer(self) -> type[Any]:
        return cast(type[Any], getattr(import_module(package), self.trainer_name))


ALGORITHMS = {
    "grpo": Algorithm("GRPO", "grpo", "KLXGRPOConfig", "KLXGRPOTrainer"),
    "rloo": Algorithm("RLOO", "rloo", "KLXRLOOConfig", "KLXRLOOTrainer"),
    # TRL no longer has a script for PPO. Our PPO trainer takes the same arguments as GRPO's, so GRPO's script works.
    "ppo": Algorithm("PPO", "grpo", "KLXPPOConfig", "KLXPPOTrainer"),
}

LAUNCHER_HELP = """\
launcher:
  --accelerate_config FILE
                        accelerate config file, or the name of one that TRL ships: single_gpu, multi_gpu, fsdp1, fsdp2,
                        zero1, zero2, zero3
  any flag of `accelerate launch`, for example --num_processes 4 (see `accelerate launch --help`)
"""


class GroupedParser(TrlParser):
    """
    TRL's parser with a grouped help: it lists the fields by the class that they come from, starting with KL control.

    Args:
        algorithm ([`Algorithm`]):
            Training command that the parser belongs to.
        resolve (`bool`):
            Whether the config checks and completes itself. The result depends on the number of processes.
        kwargs:
            Arguments of [`~trl.TrlParser`].
    """

    def __init__(self, algorithm: Algorithm, resolve: bool, **kwargs: Any):
        self.algorithm = algorithm
        config = algorithm.config
        if not resolve:
            config = type(config.__name__, (config,), {"__post_init__": lambda self: None})
        types: Any = (algorithm.script_arguments, config, ModelConfig, DatasetMixtureConfig)
        super().__init__(types, allow_abbrev=False, **kwargs)

    def groups(self) -> dict[str, set[str]]:
        """Return the fields of each group by its title. A field belongs to the first group that has it."""
        from ..trainers.config import KLXConfigMixin

        config, host = self.algorithm.config, self.algorithm.host.upper()
        bases = [base for base in config.__mro__ if base.__name__ == f"{host}Config"]
        listed: dict[str, type[Any]] = {
            "KL control": KLXConfigMixin,
            "data and rewards": self.algorithm.script_arguments,
            "model": ModelConfig,
            "mixture of datasets": DatasetMixtureConfig,
            # The widest class comes last, because a group has only the fields that no group before it has.
            "training (transformers)": TrainingArguments,
            f"sampling and loss (TRL's {host})": bases[0],
            self.algorithm.title: config,
        }
        seen: set[str] = set()
        found = {}
        for title, cls in listed.items():
            names = {field.name for field in fields(cls)} - seen
            seen |= names
            if names:
                found[title] = names
        order = ["KL control", self.algorithm.title, "data and rewards", "model", f"sampling and loss (TRL's {host})"]
        return {title: found[title] for title in [*order, *found] if title in found}

    def format_help(self) -> str:
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        rest = list(self._actions)
        for title, names in self.groups().items():
            formatter.start_section(title)
            formatter.add_arguments([action for action in rest if action.dest in names])
            formatter.end_section()
            rest = [action for action in rest if action.dest not in names]
        formatter.start_section("options")
        formatter.add_arguments(rest)
        formatter.end_section()
        return formatter.format_help() + "\n" + LAUNCHER_HELP


def make_parser(name: str, resolve: bool = True) -> GroupedParser:
    """Build the parser of a training command. Without `resolve`, it returns the config as the user wrote it."""
    algorithm = ALGORITHMS[name]
    return GroupedParser(
        algorithm,
        resolve,
        prog=f"trl-klx {name}",
        usage=f"trl-klx {name} [--config recipe.yaml] [--field value ...] [launcher flags]",
        description=(
            f"Train with {algorithm.title} and KL control, through accelerate's launcher. Fields come from the YAML "
            "file; flags override them. While the run trains, its log is kept up to date in `trainer_state.json` in "
            "the output directory: see `trl-klx plot --follow`."
        ),
    )
