"""The maths package needs only torch, and an estimator is one function."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import trl_klx.maths
from trl_klx.maths import estimators
from trl_klx.maths.estimators import KL_ESTIMATORS, estimate_kl, register_kl_estimator


MODULES = sorted(file.stem for file in Path(trl_klx.maths.__file__).parent.glob("*.py") if file.stem != "__init__")

IMPORT_ALL = """
import importlib, sys
# Importing a module whose entry is None fails.
sys.modules |= dict.fromkeys(["accelerate", "datasets", "peft", "safetensors", "transformers", "trl"])
for name in sys.argv[1:]:
    importlib.import_module(f"trl_klx.maths.{name}")
"""


def test_the_room_imports_torch_alone():
    assert {"advantages", "estimators", "gae", "losses"} <= set(MODULES)
    root = Path(trl_klx.maths.__file__).parents[2]
    run = subprocess.run([sys.executable, "-c", IMPORT_ALL, *MODULES], cwd=root, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.fixture
def registry():
    """The registry, restored after the test."""
    before = dict(estimators._ESTIMATORS)
    yield
    estimators._ESTIMATORS.clear()
    estimators._ESTIMATORS.update(before)


def test_one_function_adds_an_estimator(registry):
    @register_kl_estimator("quartic")
    def quartic(log_ratio):
        return log_ratio**4

    assert "quartic" in KL_ESTIMATORS
    # 2^4 = 16 and (-1)^4 = 1
    kl = estimate_kl(torch.tensor([[-1.0, -3.0]]), torch.tensor([[-3.0, -2.0]]), "quartic")
    assert kl.tolist() == [[16.0, 1.0]]
    with pytest.raises(ValueError, match="Unknown KL estimator 'quintic'.*k1, .*quartic"):
        estimate_kl(torch.zeros(1, 1), torch.zeros(1, 1), "quintic")


def test_a_name_is_taken_once(registry):
    def square(log_ratio):
        return log_ratio.square()

    register_kl_estimator("square")(square)
    assert register_kl_estimator("square")(square) is square
    with pytest.raises(
        ValueError, match="'k1' is taken by trl_klx.maths.estimators._k1. Choose another name for .*square"
    ):
        register_kl_estimator("k1")(square)
