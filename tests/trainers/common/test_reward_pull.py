"""What a controller sees of GRPO and RLOO where the penalty is part of the rewards."""

import pytest
import torch

from support.batchings import uneven_reward
from support.tiny import lora, reward_even_tokens, train
from trl_klx import KLXGRPOTrainer, KLXRLOOTrainer


COEF = 0.3
GENERATIONS = 4


def equal_reward(completion_ids, **kwargs) -> list[float]:
    return [0.1] * len(completion_ids)


def pulls_of(trainer_class):
    """A trainer that keeps what the controller is shown, beside the advantages that it is trained on."""

    class Pulls(trainer_class):
        def __init__(self, *args, **kwargs):
            self.seen = []
            super().__init__(*args, **kwargs)

        def _klx_pull(self, batch, rollout, kl, mask):
            pull = super()._klx_pull(batch, rollout, kl, mask)
            self.seen.append((pull, batch["advantages"], rollout.rewards, rollout.charged_kls))
            return pull

    Pulls.__name__ = trainer_class.__name__
    return Pulls


def run(trainer_class, tmp_path, rewards=reward_even_tokens, **fields):
    settings = {"kl_placement": "reward", "kl_penalty_coef": COEF, "num_generations": GENERATIONS, "max_steps": 4}
    settings |= {"per_device_train_batch_size": 8, "learning_rate": 1e-2} | fields
    trainer = train(pulls_of(trainer_class), tmp_path, rewards=rewards, extras={"peft_config": lora()}, **settings)
    assert len(trainer.seen) == 4
    return trainer.seen


# The baseline of RLOO weighs a group by how many of its completions have a reward.
ONE_SCALE = [
    (KLXGRPOTrainer, {"scale_rewards": "none", "rewards": uneven_reward}),
    (KLXGRPOTrainer, {"scale_rewards": "batch", "rewards": uneven_reward}),
    (KLXRLOOTrainer, {"normalize_advantages": False}),
    (KLXRLOOTrainer, {"normalize_advantages": True}),
]
BY_GROUP = pytest.param(
    KLXGRPOTrainer, {"scale_rewards": "group"}, marks=pytest.mark.filterwarnings("ignore:`kl_placement")
)


@pytest.mark.parametrize(("trainer_class", "fields"), ONE_SCALE)
def test_drive_less_the_drag_is_what_the_policy_is_trained_on(trainer_class, fields, tmp_path):
    charged = 0.0
    for pull, advantages, _, _ in run(trainer_class, tmp_path, **fields):
        torch.testing.assert_close((pull.advantages - COEF * pull.charged).float(), advantages, atol=1e-5, rtol=1e-5)
        charged = max(charged, pull.charged.abs().max().item())
    assert charged > 1e-2, "the policy never left the reference, so nothing was checked"


@pytest.mark.parametrize(
    ("trainer_class", "fields", "factor"),
    [
        (KLXGRPOTrainer, {"scale_rewards": "none"}, 1.0),
        (KLXRLOOTrainer, {"normalize_advantages": False}, GENERATIONS / (GENERATIONS - 1)),
    ],
)
def test_rewards_and_kls_are_compared_within_a_prompt(trainer_class, fields, factor, tmp_path):
    """RLOO's baseline leaves the completion itself out, and so the difference is larger."""
    for pull, _, rewards, kls in run(trainer_class, tmp_path, **fields):
        for found, values in ((pull.advantages, rewards[:, 0]), (pull.charged, kls)):
            groups = values.view(-1, GENERATIONS)
            expected = factor * (groups - groups.mean(dim=1, keepdim=True)).view(-1)
            torch.testing.assert_close(found.float(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("trainer_class", "fields"), [(KLXGRPOTrainer, {"scale_rewards": "none"}), BY_GROUP, *ONE_SCALE[2:]]
)
def test_rewards_that_do_not_differ_drive_nothing(trainer_class, fields, tmp_path):
    """The advantages are then those of the penalty alone, which TRL may scale up without limit."""
    for pull, *_ in run(trainer_class, tmp_path, rewards=equal_reward, **fields):
        assert pull.advantages.abs().max().item() == 0.0


def test_rewards_beyond_the_clip_range_are_seen_clipped(tmp_path):
    fields = {"normalize_advantages": False, "reward_clip_range": (0.4, 0.5)}
    for pull, advantages, _, _ in run(KLXRLOOTrainer, tmp_path, **fields):
        torch.testing.assert_close((pull.advantages - COEF * pull.charged).float(), advantages, atol=1e-5, rtol=1e-5)
        assert pull.advantages.abs().max().item() <= 0.1 * GENERATIONS / (GENERATIONS - 1) + 1e-5
