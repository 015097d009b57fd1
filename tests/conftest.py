"""Tiny real models, tokenizers and datasets that the tests build themselves, offline."""

import os


os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Two threads are slower than one on models this small.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from tiny import build_model, build_tokenizer


torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tokenizer():
    return build_tokenizer()


@pytest.fixture
def model():
    return build_model()
