"""The training commands: which script of TRL each runs, with which config and trainer of ours, and its parser."""

from dataclasses import dataclass, fields
from importlib import import_module

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
            Name of TRL's script, and so the prefix of the classes in it.
        config_name, trainer_name (`str`):
            Public names of our classes.
    """

    title: str
    host: str
    config_name: str
    trainer_name: str

    @property
    def script(self):
        return import_module(f"trl.scripts.{self.host}")

    @property
    def script_arguments(self) -> type:
        return getattr(self.script, f"{self.host.upper()}ScriptArguments")

    @property
    def host_trainer(self) -> str:
        return f"{self.host.upper()}Trainer"

    @property
    def config(self) -> type:
        return getattr(import_module(package), self.config_name)

    @property
    def trainer(self) -> type:
        return getattr(import_module(package), self.trainer_name)


ALGORITHMS = {
    "grpo": Algorithm("GRPO", "grpo", "KLXGRPOConfig", "KLXGRPOTrainer"),
    "rloo": Algorithm("RLOO", "rloo", "KLXRLOOConfig", "KLXRLOOTrainer"),
    # TRL has no script for PPO any more. Ours takes what GRPO's trainer takes, so GRPO's script serves.
    "ppo": Algorithm("PPO", "grpo", "KLXPPOConfig", "KLXPPOTrainer"),
}

LAUNCHER_HELP = """\
launcher:
  --accelerate_config FILE
                        a config file of accelerate, or the name of one that comes with TRL: single_gpu, multi_gpu,
                        fsdp1, fsdp2, zero1, zero2, zero3
  every flag of `accelerate launch`, for instance --num_processes 4 (see `accelerate launch --help`)
"""


class GroupedParser(TrlParser):
    """
    TRL's parser, whose help shows the fields by the class that they come from, those of KL control first.

    Args:
        algorithm ([`Algorithm`]):
            What is to be trained.
        resolve (`bool`):
            Whether the config is to check and complete itself, which depends on how many processes there are.
        kwargs:
            Arguments of [`~trl.TrlParser`].
    """

    def __init__(self, algorithm: Algorithm, resolve: bool, **kwargs):
        self.algorithm = algorithm
        config = algorithm.config
        if not resolve:
            config = type(config.__name__, (config,), {"__post_init__": lambda self: None})
        types = (algorithm.script_arguments, config, ModelConfig, DatasetMixtureConfig)
        super().__init__(types, allow_abbrev=False, **kwargs)

    def groups(self) -> dict[str, set[str]]:
        """Title of each group, and the fields that belong to it and to no group before it."""
        from ..trainers.config import KLXConfigMixin

        config, host = self.algorithm.config, self.algorithm.host.upper()
        bases = [base for base in config.__mro__ if base.__name__ == f"{host}Config"]
        listed = {
            "KL control": KLXConfigMixin,
            "data and rewards": self.algorithm.script_arguments,
            "model": ModelConfig,
            "mixture of datasets": DatasetMixtureConfig,
            # Last the widest class: each group is what the narrower ones before it have not.
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
    """The parser of a training command. Without `resolve`, the config that it returns is as it was written."""
    algorithm = ALGORITHMS[name]
    return GroupedParser(
        algorithm,
        resolve,
        prog=f"trl-klx {name}",
        usage=f"trl-klx {name} [--config recipe.yaml] [--field value ...] [launcher flags]",
        description=(
            f"Train with {algorithm.title} and KL control, through accelerate's launcher. Fields are read from the YAML "
            "file, and flags override it. The run's log is kept in `trainer_state.json` in the output directory while it "
            "trains: see `trl-klx plot --follow`."
        ),
    )
