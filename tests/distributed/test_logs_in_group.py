"""The callback and the completion table in a group of two processes."""

import json

import pytest

from support.launch import torchrun
from support.tiny import build_trainer, scripted_rollout, trained_lora
from trl_klx import KLXGRPOTrainer, get_kl_controller


pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("logs_in_group")]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("group")
    torchrun("logs_in_group.py", str(folder))
    ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert [rank["num_processes"] for rank in ranks] == [2, 2]
    return ranks


def test_the_coefficient_is_that_of_the_main_process(ranks):
    assert ranks[0]["local_kls"] != ranks[1]["local_kls"]
    controller = get_kl_controller("adaptive", init_coef=0.1, target=0.015, horizon=8)
    expected = [0.1, *(controller.update(kl, 4) for kl in ranks[0]["local_kls"])]
    assert ranks[0]["coefs"] == ranks[1]["coefs"] == expected
    assert len(set(expected)) == 4


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_each_row_keeps_its_kl(ranks, micro_batches, tmp_path):
    alone = build_trainer(
        KLXGRPOTrainer,
        tmp_path,
        model=trained_lora(1, scale=0.1),
        extras={"rollout_func": scripted_rollout},
        kl_penalty_coef=0.1,
        log_completions=True,
        num_completions_to_print=0,
        max_steps=1,
        per_device_train_batch_size=8,
    )
    alone.train()
    logs = alone._logs
    expected = sorted(zip(logs["prompt"], logs["completion"], logs["extra"]["klx/kl"], strict=True))
    assert len({kl for _, _, kl in expected}) == 8
    for rank in ranks:
        found = sorted(map(tuple, rank[f"column-{micro_batches}"]["rows"]))
        assert [row[:2] for row in found] == [row[:2] for row in expected]
        assert [row[2] for row in found] == pytest.approx([row[2] for row in expected], abs=1e-5)
        assert sum(row[2] for row in found) / 8 == pytest.approx(rank[f"column-{micro_batches}"]["kl"][0], rel=1e-6)


def test_all_processes_fall_back_to_k3_together(ranks):
    # The second process has no completion to compare.
    assert [rank["scaled"]["statistic"] for rank in ranks] == ["k3", "k3"]
    assert ranks[0]["scaled"] == ranks[1]["scaled"] and len(ranks[0]["scaled"]["kl"]) == 2
