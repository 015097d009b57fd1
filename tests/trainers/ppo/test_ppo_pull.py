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
        self.pulls.append((pull, kl, mask.clone(), rollout.coef))
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


@pytest.mark.parametrize("statistic", ["k3", "full"])
@pytest.mark.parametrize("fields", [{}, ONE_PASS], ids=["two epochs", "one pass"])
def test_drive_less_the_drag_is_what_the_policy_is_trained_on(fields, statistic, tmp_path):
    trainer = train(tmp_path, whiten_advantages=False, kl_statistic=statistic, **fields)
    moved = 0
    for (pull, kl, mask, coef), batch in zip(trainer.pulls, trainer.batches, strict=True):
        whole = torch.where(mask, batch["advantages"], 0.0)
        whole = torch.where(mask, whole - whole.sum() / mask.sum(), 0.0)
        expected = pull.advantages - coef * pull.charged
        assert torch.allclose(expected, whole, atol=1e-4)
        moved += bool((kl.k1 * mask).abs().max() > 1e-3)
    assert moved > 0


@pytest.mark.parametrize(
    ("fields", "later"),
    [
        ({"kl_statistic": "full"}, "statistic"),
        ({"kl_statistic": "k3"}, "penalised"),
        ({"kl_statistic": "full", "kl_estimator": "importance"}, "penalised"),
        ({"kl_statistic": "full", "kl_ignore_tokens": [5]}, "penalised"),
    ],
    ids=str,
)
def test_a_token_pays_what_was_sampled_and_for_later_ones_what_was_to_be_expected(fields, later, tmp_path):
    trainer = train(tmp_path, gamma=1.0, lam=1.0, **fields)
    for pull, kl, mask, _ in trainer.pulls:
        own, after = (torch.where(mask, part, 0.0) for part in (kl.penalised, getattr(kl, later)))
        to_go = after.flip(1).cumsum(1).flip(1) - after  # of the tokens after each
        difference = (pull.charged - own - to_go)[mask]
        assert torch.allclose(difference, difference.mean(), atol=1e-5)  # it is centered
    assert any((kl.penalised - kl.statistic)[mask].abs().max() > 1e-3 for _, kl, mask, _ in trainer.pulls)


def test_whitened_rewards_are_those_that_were_sampled(tmp_path):
    by_k3, exact = (
        train(tmp_path / statistic, whiten_rewards=True, kl_statistic=statistic) for statistic in ("k3", "full")
    )
    for one, other in zip(by_k3.batches, exact.batches, strict=True):
        assert torch.allclose(one["advantages"], other["advantages"], atol=1e-4)


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
