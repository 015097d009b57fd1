"""Micro-batches and processes do not matter: the same generation batch gives the same numbers however it is split."""

import json

import pytest

from support.batchings import CASES, run_case
from support.launch import torchrun


pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("distributed")]


@pytest.fixture(scope="module")
def in_one_process(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    return {name: run_case(case, str(folder / name), 1, 1) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def in_two_processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    torchrun("spread_over_processes.py", str(folder))
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def advantages(*results: dict) -> list:
    rows = [row for result in results for row in result["rows"]]
    return sorted(json.loads(json.dumps(rows)))


def check(case: str, one: dict, *others: dict) -> None:
    """The combined results of all processes match those of one process with one micro-batch."""
    expected, found = advantages(one), advantages(*others)
    assert [key for key, _ in found] == [key for key, _ in expected] and len(expected) == 24
    for (key, values), (_, reference) in zip(found, expected, strict=True):
        assert values == pytest.approx(reference, abs=1e-5), key
    for other in others:
        for name in ("kl", "k1", "coef", "adjustment"):
            assert other[name] == pytest.approx(one[name], abs=1e-5), name
        assert other["controller"] == pytest.approx(one["controller"], abs=1e-4)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
    # The check is not vacuous. Away from its reference, `hold` waits for the second batch; the others move with every
    # batch.
    changes = {"grpo-hold": 2, "grpo-reward-hold": 3, "rloo-reward-hold": 3}.get(case, 4)
    assert min(one["kl"]) > 1e-2 and len(set(one["coef"])) == changes
    assert (one["controller"].get("drag", 0.0) > 0) == case.endswith("hold")


@pytest.mark.parametrize("case", CASES)
def test_micro_batches(case, in_one_process, tmp_path):
    check(case, in_one_process[case], run_case(CASES[case], str(tmp_path), micro_batches=4, processes=1))


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_processes(case, micro_batches, in_one_process, in_two_processes):
    results = [rank[f"{case}/{micro_batches}"] for rank in in_two_processes]
    for result in results:
        assert result["num_processes"] == 2
        assert result["distributed_type"] == "DistributedType.MULTI_CPU"
    check(case, in_one_process[case], *results)
