"""Tiny real models, tokenizers and datasets that the tests build themselves, offline."""

import os


os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Two threads are slower than one on models this small.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import gc

import pytest
import torch

from support.tiny import build_model, build_tokenizer


torch.set_num_threads(1)
# Stable TRL features that it calls experimental.
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")


def pytest_configure(config):
    # Known to pytest-xdist alone, which need not be there.
    config.addinivalue_line("markers", "xdist_group(name): tests that share an expensive fixture, for one worker")


@pytest.fixture(scope="session", autouse=True)
def keep_imports_out_of_garbage_collection():
    # Each training run collects garbage, which with everything imported takes longer than its steps.
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def tokenizer():
    return build_tokenizer()


@pytest.fixture
def model():
    return build_model()
