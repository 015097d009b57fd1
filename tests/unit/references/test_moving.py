"""The lagging reference keeps its weights on disk, and leaves nothing there afterwards."""

import signal
import subprocess
import sys

import pytest
import torch

from support.tiny import build_trainer, trained_lora
from trl_klx import KLXGRPOTrainer
from trl_klx.references.moving import LaggedReference


def weights_at(step: int) -> dict[str, torch.Tensor]:
    """Types and sizes that need alignment, and a weight of which this process holds no part."""
    generator = torch.Generator().manual_seed(step)
    return {
        "half": torch.randn(3, generator=generator).bfloat16(),
        "single": torch.randn(5, 7, generator=generator),
        "none": torch.empty(0, 4),
        "number": torch.randn((), generator=generator),
        "double": torch.randn(2, 2, 2, generator=generator, dtype=torch.float64).transpose(0, 2),
    }


def assert_equal(one, other):
    assert list(one) == list(other)
    for name in one:
        assert one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]), name


@pytest.mark.parametrize("lag", [1, 2, 5])
def test_every_bit_comes_back(lag, tmp_path):
    lagged, reference = LaggedReference(lag, str(tmp_path)), weights_at(0)
    for step in range(1, 9):
        lagged.step(step, weights_at(step), reference)
        assert_equal(reference, weights_at(max(0, step - lag)))
        assert lagged.kept_steps == list(range(max(1, step - lag + 1), step + 1))


def test_state_is_that_of_every_step_in_between(tmp_path):
    lagged, reference = LaggedReference(2, str(tmp_path)), weights_at(0)
    for step in range(1, 6):
        lagged.step(step, weights_at(step), reference)
    expected = {
        f"{owner}|{name}": weight
        for owner, step in (("reference", 3), ("4", 4), ("5", 5))
        for name, weight in weights_at(step).items()
    }
    assert_equal(lagged.state(reference), expected)


def test_the_reference_keeps_its_type(tmp_path):
    lagged, reference = LaggedReference(1, str(tmp_path)), {"a": torch.zeros(2)}
    lagged.step(1, {"a": torch.tensor([1.5, 2.5], dtype=torch.float64)}, reference)
    lagged.step(2, {"a": torch.zeros(2, dtype=torch.float64)}, reference)
    assert reference["a"].dtype == torch.float32 and reference["a"].tolist() == [1.5, 2.5]


def test_a_second_run_does_not_take_the_steps_of_the_first(tmp_path):
    lagged, reference = LaggedReference(2, str(tmp_path)), weights_at(0)
    for step in (1, 2, 3, 4):
        lagged.step(step, weights_at(step), reference)
    for step in (1, 2):
        lagged.step(step, weights_at(10 + step), reference)
        assert_equal(reference, weights_at(2))
    lagged.step(3, weights_at(13), reference)
    assert_equal(reference, weights_at(11))


def test_nothing_is_left_on_disk(tmp_path):
    trainer = build_trainer(KLXGRPOTrainer, tmp_path, model=trained_lora(1), kl_penalty_coef=0.1, kl_ref_lag=2)
    trainer.train()
    assert trainer.kl_reference.mover.kept_steps == [2, 3]
    assert list(tmp_path.iterdir()) == []


KILLED = """
import os, resource, signal, sys, torch
from trl_klx.references.moving import LaggedReference
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
policy = {str(index): torch.rand(2**18) for index in range(16)}
reference = {name: weight.clone() for name, weight in policy.items()}
lagged = LaggedReference(8, sys.argv[1])
before = peak()
for step in range(1, 13):
    lagged.step(step, policy, reference)
print((peak() - before) / 2**24, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="`ru_maxrss` has other units elsewhere")
def test_memory_of_a_process_and_what_is_left_when_it_is_killed(tmp_path):
    result = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True)
    assert result.returncode == -signal.SIGKILL, result.stderr[-2000:]
    # In units of adapters, besides the reference itself: with 8 copies in memory it would be 8.
    assert float(result.stdout) <= 1.25
    assert list(tmp_path.iterdir()) == []
