"""What accelerate runs on every process: TRL's own training script, with a trainer of ours in the place of TRL's."""

import os
import sys
from importlib import import_module
from pathlib import Path

from trl.scripts.utils import DatasetConfig

from .algorithms import ALGORITHMS, Algorithm, make_parser
from .console import one_line
from .live import LiveStateCallback


LOADERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}


def main(name: str, argv: list[str]) -> int:
    """
    Train.

    Args:
        name (`str`):
            Key of [`ALGORITHMS`].
        argv (`list[str]`):
            Fields, as checked by the command that launched this.
    """
    live, parsed = LiveStateCallback(), None
    try:
        parsed = make_parser(name).parse_args_and_config(argv, fail_with_unknown_args=False)
        train(ALGORITHMS[name], live, *parsed)
    except (ValueError, TypeError, OSError, ImportError, AttributeError, LookupError) as error:
        # Before the first step it is about what the user gave: models, data, reward, settings, the checkpoint.
        if live.started or os.environ.get("TRL_KLX_TRACEBACK") == "1":
            raise
        print(f"trl-klx {name}: error: {one_line(error)} (TRL_KLX_TRACEBACK=1 shows where)", file=sys.stderr)
        return 2 if parsed is None else 1
    return 0


def train(algorithm: Algorithm, live: LiveStateCallback, script_args, training_args, model_args, dataset_args) -> None:
    """Run TRL's script. It takes its trainer's class from TRL's top level, where it finds our function for once."""
    use_local_file(script_args, dataset_args)
    trl, name = import_module("trl"), algorithm.host_trainer
    theirs = getattr(trl, name)
    built = False

    def build(**kwargs):
        nonlocal built
        setattr(trl, name, theirs)
        # PPO takes the reward model from its config where it is given none.
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
        raise RuntimeError(f"The script of this version of TRL does not build its trainer as `trl.{name}`.")


def use_local_file(script_args, dataset_args) -> None:
    """Let `dataset_name` be a file. To TRL it is a folder, or a name on the Hub."""
    path = script_args.dataset_name
    if not path or not os.path.isfile(path) or dataset_args.datasets:
        return
    loader = LOADERS.get(Path(path.removesuffix(".gz")).suffix)
    if loader is None:
        raise ValueError(f"`dataset_name={path!r}` is a file of an unknown type. Known are {', '.join(LOADERS)}.")
    dataset_args.datasets = [DatasetConfig(path=loader, data_files=path)]
    script_args.dataset_name = None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
