"""PPO learns, and the controllers hold the KL: full runs on a task that any policy can learn."""

import statistics

import pytest
from transformers import TrainerCallback

from support.tiny import build_dataset, logged, lora
from support.tiny_ppo import build_scorer, train_ppo


TOKEN = 10
CHANCE = 1 / 32  # the vocabulary


def share_of_token(completion_ids, **kwargs) -> list[float]:
    return [sum(token == TOKEN for token in ids) / len(ids) for ids in completion_ids]


class StopOnceLearned(TrainerCallback):
    def __init__(self):
        self.reward = self.explained = 0.0

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "reward" in logs:
            self.reward = logs["reward"]
            self.explained = max(self.explained, logs["ppo/explained_variance"])
            control.should_training_stop = self.reward > 0.9 and self.explained > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("kind", ["head", "value_model", "lora"])
def test_ppo_learns(kind, seed, tmp_path):
    extras = {
        "head": {},
        "value_model": {"value_model": build_scorer(seed=3)},
        "lora": {"peft_config": lora(r=8, target_modules="all-linear")},
    }[kind]
    learned = StopOnceLearned()
    trainer = train_ppo(
        tmp_path,
        rewards=share_of_token,
        dataset=build_dataset(64),
        extras=extras | {"callbacks": [learned]},
        seed=seed,
        per_device_train_batch_size=64,
        num_ppo_epochs=3,
        max_steps=150,
        logging_steps=6,
        max_completion_length=5,
        temperature=1.0,
        learning_rate=8e-3,
        lr_scheduler_type="constant",
        kl_penalty_coef=0.01,
        vf_coef=1.0,
        cliprange_value=0.5,
    )
    rewards = logged(trainer, "reward")
    # The first window covers two rollouts, the second of them after one update.
    assert rewards[0] < 4 * CHANCE
    assert learned.reward > 0.9, rewards
    assert learned.explained > 0.5, logged(trainer, "ppo/explained_variance")


@pytest.mark.slow
@pytest.mark.parametrize(
    "controller",
    [
        {"kl_controller": "pid", "kl_target": 6.0},
        {"kl_controller": "hold", "kl_target": 5.0},
    ],
    ids=["pid", "hold"],
)
def test_kl_is_held(controller, tmp_path):
    trainer = train_ppo(
        tmp_path,
        rewards=share_of_token,
        dataset=build_dataset(128),
        seed=1,
        per_device_train_batch_size=128,
        num_ppo_epochs=1,
        max_steps=110,
        max_completion_length=5,
        temperature=1.0,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        kl_penalty_coef=0.05,
        vf_coef=1.0,
        **controller,
    )
    kls, target = logged(trainer, "klx/kl"), controller["kl_target"]
    last_quarter = statistics.fmean(kls[-len(kls) // 4 :])
    assert last_quarter == pytest.approx(target, rel=0.2), kls
    # The controller did it: the coefficient went both ways, and the reward pulls the KL up.
    coefs = logged(trainer, "klx/coef")
    assert max(coefs) > 1.5 * min(coefs) and min(coefs) < 0.05 < max(coefs)
    assert statistics.fmean(logged(trainer, "reward")[-20:]) > 4 * CHANCE
