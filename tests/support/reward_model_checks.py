"""PPO with a reward model whose calls are recorded."""

import torch

from support.ppo_checks import SETTINGS
from support.tiny_ppo import build_ppo, build_scorer
from trl_klx import KLXPPOTrainer


class BatchesPPOTrainer(KLXPPOTrainer):
    """Keeps every batch and its rewards."""

    def __init__(self, *args, **kwargs):
        self.rollouts: list[dict] = []
        super().__init__(*args, **kwargs)

    def _generate_and_score_completions(self, inputs):
        self.rollouts.append({"mode": "train" if self.model.training else "eval"})
        batch = super()._generate_and_score_completions(inputs)
        self.rollouts[-1] |= batch
        return batch

    def _ppo_score(self, batch, rewards):
        self.rollouts[-1]["rewards"] = rewards.clone()
        return super()._ppo_score(batch, rewards)


def record(output_dir, **settings) -> BatchesPPOTrainer:
    trainer = build_ppo(output_dir, BatchesPPOTrainer, **(SETTINGS | settings))
    trainer.train()
    return trainer


def watched_scorer(**overrides) -> tuple[torch.nn.Module, list[dict]]:
    """A reward model, and the record of its calls."""
    scorer, calls = build_scorer(seed=9, **overrides), []

    def keep(module, args, kwargs):
        assert not args
        calls.append({name: tensor.clone() for name, tensor in kwargs.items()})

    scorer.register_forward_pre_hook(keep, with_kwargs=True)
    return scorer, calls


def sampled_rows(rollout: dict) -> list[list[int]]:
    """Prompt and completion of each row, without padding."""
    rows = []
    for row in range(len(rollout["completion_ids"])):
        parts = [rollout[f"{part}_ids"][row][rollout[f"{part}_mask"][row].bool()] for part in ("prompt", "completion")]
        rows.append(torch.cat(parts).tolist())
    return rows


def check_calls(calls: list[dict], rollouts: list[dict], pad: int) -> None:
    """The model is called once per rollout, on its rows, with only padding to their right."""
    assert len(calls) == len(rollouts) > 0
    for call, rollout in zip(calls, rollouts, strict=True):
        assert call.keys() == {"input_ids", "attention_mask"}
        rows = sampled_rows(rollout)
        length = max(len(row) for row in rows)
        assert call["input_ids"].tolist() == [row + [pad] * (length - len(row)) for row in rows]
        assert call["attention_mask"].tolist() == [[1] * len(row) + [0] * (length - len(row)) for row in rows]
