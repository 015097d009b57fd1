"""What a controller sees of PPO: how the score drives the policy, and how one unit of coefficient drags it back."""

import pytest
import torch

from support.ppo_checks import SETTINGS
from support.tiny import build_model
from support.tiny_ppo import build_ppo
from trl_klx import KLXPPOTrainer


class PullPPOTrainer(KLXPPOTrainer):
    """Keeps what the controller is shown, and the advantages that the policy is trained on."""

    def __init__(self, *args, **kwargs):
        self.pulls, self.batches = [], []
        super().__init__(*args, **kwargs)

    def _klx_pull(self, batch, rollout, kl, mask):
        pull = super()._klx_pull(batch, rollout, kl, mask)
        self.pulls.append((pull, kl.k1.clone(), mask.clone(), rollout.coef))
        return pull

    def _ppo_estimate(self, batch, values):
        super()._ppo_estimate(batch, values)
        self.batches.append(dict(batch))


def train(tmp_path, **fields) -> PullPPOTrainer:
    settings = SETTINGS | {"num_ppo_epochs": 2, "num_mini_batches": 1, "kl_penalty_coef": 0.3} | fields
    trainer = build_ppo(tmp_path, PullPPOTrainer, **settings)
    trainer.train()
    return trainer


ONE_PASS = {"num_ppo_epochs": 1, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}


@pytest.mark.parametrize("fields", [{}, ONE_PASS], ids=["two epochs", "one pass"])
def test_drive_less_the_drag_is_what_the_policy_is_trained_on(fields, tmp_path):
    trainer = train(tmp_path, whiten_advantages=False, **fields)
    moved = 0
    for (pull, k1, mask, coef), batch in zip(trainer.pulls, trainer.batches, strict=True):
        whole = torch.where(mask, batch["advantages"], 0.0)
        whole = torch.where(mask, whole - whole.sum() / mask.sum(), 0.0)
        expected = pull.advantages - coef * pull.charged
        assert torch.allclose(expected, whole, atol=1e-4)
        moved += bool((k1 * mask).abs().max() > 1e-3)
    assert moved > 0


def test_dropout_is_no_reason_to_show_nothing(tmp_path):
    """The KL is then measured on a pass of its own, which has values too."""
    trainer = train(tmp_path, model=build_model(attention_dropout=0.1), **ONE_PASS)
    assert all(pull is not None for pull, *_ in trainer.pulls)


@pytest.mark.parametrize("placement", ["advantage", "loss"])
def test_elsewhere_a_token_is_charged_its_own_kl(placement, tmp_path):
    trainer = train(tmp_path, kl_placement=placement)
    for pull, _, mask, _ in trainer.pulls:
        assert pull.charged is None
        kept = pull.advantages[mask]
        assert float(kept.mean()) == pytest.approx(0.0, abs=1e-5) and float(kept.std()) == pytest.approx(1.0, abs=0.1)
