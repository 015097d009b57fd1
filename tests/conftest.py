"""Settings of the test session, and fixtures that all tests share."""

import os


os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Two threads are slower than one on models this small.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import functools
import gc
import importlib.metadata

import pytest
import torch

from support.tiny import build_model, build_tokenizer


torch.set_num_threads(1)
# Whenever accelerate unwraps a model, it parses the metadata of packages to see that they are installed: a tenth of a
# training run on models this small.
importlib.metadata.metadata = functools.cache(importlib.metadata.metadata)
# Silence TRL's warnings about experimental features.
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")


def pytest_configure(config):
    # A marker of pytest-xdist, which need not be installed.
    config.addinivalue_line("markers", "xdist_group(name): tests that share an expensive fixture, for one worker")


@pytest.fixture(scope="session", autouse=True)
def keep_imports_out_of_garbage_collection():
    # Each training run collects garbage, which takes longer than its steps once everything is imported.
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def tokenizer():
    return build_tokenizer()


@pytest.fixture
def model():
    return build_model()
