"""Datasets in local files, which TRL's `dataset_name` does not accept."""

import os
from pathlib import Path

from trl import DatasetMixtureConfig, ScriptArguments
from trl.scripts.utils import DatasetConfig


LOADERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}


def use_local_file(script_args: ScriptArguments, dataset_args: DatasetMixtureConfig) -> None:
    """Allow `dataset_name` to be a file. TRL expects a folder or a name on the Hub."""
    path = script_args.dataset_name
    if not path or not os.path.isfile(path) or dataset_args.datasets:
        return
    loader = LOADERS.get(Path(path.removesuffix(".gz")).suffix)
    if loader is None:
        raise ValueError(f"`dataset_name={path!r}` is a file of an unknown type. Use one of {', '.join(LOADERS)}.")
    dataset_args.datasets = [DatasetConfig(path=loader, data_files=path)]
    script_args.dataset_name = None
