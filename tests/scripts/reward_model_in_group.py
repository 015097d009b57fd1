"""One of two processes of PPO with a reward model. The test checks what each process has seen."""

import os
import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pytest
import torch

from support.ppo_checks import scripted
from support.reward_model_checks import check_calls, record, sampled_rows, watched_scorer
from support.tiny import build_dataset
from support.tiny_ppo import build_scorer


def main(folder: str) -> None:
    """In each of two processes, the model reads only the rows of that process."""
    torch.set_num_threads(1)
    scorer, calls = watched_scorer()
    extras = {"reward_model": scorer, "rollout_func": scripted}
    trainer = record(folder, rewards=None, dataset=build_dataset(16), extras=extras)
    assert trainer.accelerator.num_processes == 2
    check_calls(calls, trainer.rollouts, 0)
    # The rewards of all processes contain those of these rows, in the right place.
    first, plain = 8 * trainer.accelerator.process_index, build_scorer(seed=9)
    for rollout in trainer.rollouts:
        assert rollout["rewards"].shape == (16, 1)
        with torch.no_grad():
            expected = [float(plain(input_ids=torch.tensor([row])).logits[0, 0]) for row in sampled_rows(rollout)]
        assert rollout["rewards"][first : first + 8, 0].tolist() == pytest.approx(expected, abs=1e-5)
    rows = sampled_rows(trainer.rollouts[0])
    torch.save(rows, f"{folder}/rank{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main(sys.argv[1])
