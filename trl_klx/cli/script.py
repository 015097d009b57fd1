"""The script that accelerate runs on every process: TRL's training script, with our trainer instead of TRL's."""

import os
import sys
from importlib import import_module
from typing import Any

from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments

from .algorithms import ALGORITHMS, Algorithm, make_parser
from .console import one_line, say
from .dataset_files import use_local_file
from .live import LiveStateCallback


def main(name: str, argv: list[str]) -> int:
    """
    Train.

    Args:
        name (`str`):
            Key of [`ALGORITHMS`].
        argv (`list[str]`):
            Fields, which the launching command has already checked.

    Returns:
        `int`: Exit code.
    """
    live, parsed = LiveStateCallback(), None
    try:
        parsed = make_parser(name).parse_args_and_config(argv, fail_with_unknown_args=False)
        train(ALGORITHMS[name], live, *parsed)
    except (ValueError, TypeError, OSError, ImportError, AttributeError, LookupError) as error:
        # Before the first step, the cause is the user's input: models, data, reward, settings or checkpoint.
        if live.started or os.environ.get("TRL_KLX_TRACEBACK") == "1":
            raise
        say(f"trl-klx {name}: error: {one_line(error)} (TRL_KLX_TRACEBACK=1 shows where)", error=True)
        return 2 if parsed is None else 1
    return 0


def train(
    algorithm: Algorithm,
    live: LiveStateCallback,
    script_args: ScriptArguments,
    training_args: Any,
    model_args: ModelConfig,
    dataset_args: DatasetMixtureConfig,
) -> None:
    """Run TRL's script with `trl.GRPOTrainer` temporarily replaced by a factory for our trainer."""
    use_local_file(script_args, dataset_args)
    trl, name = import_module("trl"), algorithm.host_trainer
    theirs = getattr(trl, name)
    built = False

    def build(**kwargs: Any) -> Any:
        nonlocal built
        setattr(trl, name, theirs)
        # If no reward is passed, PPO loads the reward model that its config names.
        trainer = algorithm.trainer(**{**kwargs, "reward_funcs": kwargs["reward_funcs"] or None})
        trainer.add_callback(live)
        built = True
        return trainer

    setattr(trl, name, build)
    try:
        algorithm.script.main(script_args, training_args, model_args, dataset_args)
    finally:
        setattr(trl, name, theirs)
    if not built:
        raise RuntimeError(f"The installed TRL's training script does not build its trainer as `trl.{name}`.")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
