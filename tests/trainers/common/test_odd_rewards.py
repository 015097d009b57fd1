"""Infinite rewards, masked completions, and which reward is logged when the penalty is part of it."""

import math
import warnings

import pytest
import torch
from trl import GRPOTrainer, RLOOTrainer

from support.tiny import (
    assert_same_weights,
    build_dataset,
    build_trainer,
    history,
    logged,
    recording,
    reward_even_tokens,
    scripted_rollout,
    train,
    weights,
)
from support.tiny_ppo import build_ppo
from trl_klx import KLXGRPOTrainer, KLXRLOOTrainer


TRAINERS = {"GRPO": KLXGRPOTrainer, "RLOO": KLXRLOOTrainer}
KINDS = pytest.mark.parametrize("kind", ["GRPO", "RLOO", "PPO"])


def build(kind: str, folder, **fields):
    fields = {"kl_penalty_coef": 0.1, "max_steps": 4} | fields
    if kind == "PPO":
        return build_ppo(folder, num_ppo_epochs=1, **fields)
    return build_trainer(TRAINERS[kind], folder, **fields)


def sometimes(value: float | None):
    """A reward function whose first reward of the second batch is `value`."""

    def reward(completion_ids, trainer_state, **kwargs):
        rewards = reward_even_tokens(completion_ids)
        return [value, *rewards[1:]] if trainer_state.global_step == 1 else rewards

    return reward


# ---- Infinite rewards ----


@KINDS
@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_infinite_reward_is_like_none(kind, value, tmp_path):
    infinite = build(kind, tmp_path, rewards=sometimes(value))
    with pytest.warns(UserWarning, match="Infinite rewards are ignored"):
        infinite.train()
    left_out = build(kind, tmp_path, rewards=sometimes(None))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        left_out.train()
    assert history(infinite)[:-1] == history(left_out)[:-1]
    assert_same_weights(weights(infinite), weights(left_out))


def test_infinite_reward_without_kl_control_in_ppo(tmp_path):
    trainer = build("PPO", tmp_path, kl_penalty_coef=0.0, rewards=sometimes(math.inf))
    with pytest.warns(UserWarning, match="Infinite rewards are ignored"):
        trainer.train()
    assert all(weight.isfinite().all() for weight in weights(trainer).values())
    assert not any(name.startswith("infinite") for entry in trainer.state.log_history for name in entry)


@pytest.mark.parametrize("ours, theirs", [(KLXGRPOTrainer, GRPOTrainer), (KLXRLOOTrainer, RLOOTrainer)])
def test_switched_off_an_infinite_reward_is_that_of_trl(ours, theirs, tmp_path):
    fields = {"beta": 0.0, "max_steps": 2, "rewards": sometimes(-math.inf)}
    runs = [train(cls, tmp_path / cls.__name__, **fields) for cls in (ours, theirs)]
    # Compared as text, in which NaN equals NaN.
    assert str(history(runs[0])[:-1]) == str(history(runs[1])[:-1])
    assert torch.equal(*(torch.cat([w.flatten() for w in weights(run).values()]).nan_to_num() for run in runs))


# ---- The reward that is logged ----


def build_evaluated(kind: str, folder, placement: str):
    fields = {"kl_placement": placement, "kl_penalty_coef": 5.0, "eval_strategy": "steps", "eval_steps": 2}
    if kind == "GRPO":
        fields |= {"scale_rewards": "none", "extras": {"eval_dataset": build_dataset(4)}}
    else:
        fields |= {"extras": {"eval_dataset": build_dataset(4)}}
    return build(kind, folder, per_device_eval_batch_size=4, **fields)


@KINDS
@pytest.mark.parametrize("placement", ["advantage", "reward"])
def test_logged_reward_is_the_one_given(kind, placement, tmp_path):
    trainer = build_evaluated(kind, tmp_path, placement)
    trainer.train()
    name = reward_even_tokens.__name__
    for prefix in ("", "eval_"):
        for value in ("", "_std"):
            one = logged(trainer, f"{prefix}reward{value}")
            other = logged(trainer, f"{prefix}rewards/{name}/{value.lstrip('_') or 'mean'}")
            assert len(one) == len(other) == (2 if prefix else 4)
            assert one == pytest.approx(other, abs=1e-6)
    assert max(logged(trainer, "klx/kl")) > 1e-3  # there was something to pay
    if (kind, placement) == ("GRPO", "reward"):
        assert min(logged(trainer, "rewards/kl_penalty/mean")) < -1e-3


def test_best_model_is_chosen_by_the_reward_given(tmp_path):
    fields = {"kl_placement": "reward", "kl_penalty_coef": 5.0, "scale_rewards": "none", "max_steps": 4}
    fields |= {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    trainer = build(
        "GRPO",
        tmp_path,
        metric_for_best_model="eval_reward",
        greater_is_better=True,
        load_best_model_at_end=True,
        per_device_eval_batch_size=4,
        extras={"eval_dataset": build_dataset(4)},
        **fields,
    )
    trainer.train()
    given = logged(trainer, f"eval_rewards/{reward_even_tokens.__name__}/mean")
    assert trainer.state.best_metric == pytest.approx(max(given))


def test_several_reward_functions_with_weights(tmp_path):
    def length(completion_ids, **kwargs):
        return [None if len(ids) == 6 else float(len(ids)) for ids in completion_ids]

    fields = {"kl_placement": "reward", "scale_rewards": "none", "reward_weights": [2.0, 0.5]}
    trainer_class = recording(KLXGRPOTrainer)
    trainer = build_trainer(
        trainer_class,
        tmp_path,
        rewards=[reward_even_tokens, length],
        kl_penalty_coef=5.0,
        extras={"rollout_func": scripted_rollout},
        **fields,
    )
    trainer.train()
    for reward, batch in zip(logged(trainer, "reward"), trainer.generated, strict=True):
        rows = zip(batch["completion_ids"], batch["completion_mask"], strict=True)
        completions = [ids[mask.bool()].tolist() for ids, mask in rows]
        shares = reward_even_tokens(completions)
        lengths = [0.0 if value is None else value for value in length(completions)]
        expected = [2.0 * share + 0.5 * number for share, number in zip(shares, lengths, strict=True)]
        assert reward == pytest.approx(sum(expected) / len(expected), abs=1e-5)


# ---- Masked completions ----


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_masked_completion_pays_nothing(kind, tmp_path):
    """As in TRL, its reward stays in the baseline of its group; it neither pays nor trains."""
    fields = {"kl_placement": "reward", "mask_truncated_completions": True, "kl_penalty_coef": 5.0, "max_steps": 4}
    fields |= {"scale_rewards": "none"} if kind == "GRPO" else {"normalize_advantages": False}
    trainer = build_trainer(recording(TRAINERS[kind]), tmp_path, **fields)
    trainer.train()
    checked = 0
    for batch in trainer.generated[1:]:
        masked = batch["completion_mask"].sum(1) == 0
        group = masked.view(-1, 2)
        rows = zip(batch["completion_ids"], batch["completion_mask"], strict=True)
        rewards = reward_even_tokens(
            [ids.tolist() if not mask.any() else ids[mask.bool()].tolist() for ids, mask in rows]
        )
        for index, (pair, given) in enumerate(zip(group, torch.tensor(rewards).view(-1, 2), strict=True)):
            if pair.all():
                # Nothing was charged, so the advantages are those of the rewards alone.
                mean = given.mean() if kind == "GRPO" else given.flip(0)
                advantages = batch["advantages"][2 * index : 2 * index + 2].flatten()
                assert torch.allclose(advantages, given - mean, atol=1e-5)
                checked += 1
    assert checked > 0
