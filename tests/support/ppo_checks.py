"""What the tests of PPO expect of a rollout and its losses, computed independently."""

import math

import pytest
import torch

from support.tiny_ppo import (
    RecordingPPOTrainer,
    advantages_by_hand,
    as_tensor,
    completion_of,
    counting,
    kl_by_hand,
    losses_by_hand,
    train_ppo,
    values_by_hand,
    whitened,
)


# Two rollouts of 8 completions, each used for two epochs of two mini-batches with two micro-batches.
SETTINGS = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "num_mini_batches": 2,
    "num_ppo_epochs": 2,
    "max_steps": 8,
    "learning_rate": 3e-3,
    "vf_coef": 0.7,
    "gamma": 0.97,
    "lam": 0.9,
    "kl_penalty_coef": 0.2,
}


def record(output_dir, **settings) -> RecordingPPOTrainer:
    return train_ppo(output_dir, RecordingPPOTrainer, **(SETTINGS | settings))


def plain_scores(rollout: dict) -> list[float | None]:
    """The sum of the rewards, `None` where there are none."""
    rows = [[reward for reward in row if not math.isnan(reward)] for row in rollout["rewards"].tolist()]
    return [sum(row) if row else None for row in rows]


def check_rollout(trainer, rollout, reference, scores=None, value_model=None) -> tuple[list[dict], list[dict]]:
    """Values, returns and advantages match the plain loops, to 1e-5. Returns advantages and returns."""
    args, length = trainer.args, rollout["completion_ids"].size(1)
    values = values_by_hand(rollout["value"], rollout["policy"], rollout, value_model)
    kl = kl_by_hand(rollout, reference, args.temperature)
    in_reward = args.kl_placement == "reward"
    advantages, returns = advantages_by_hand(
        rollout,
        kl,
        values,
        plain_scores(rollout) if scores is None else scores,
        coef=rollout["coef"] if in_reward else 0.0,
        gamma=args.gamma,
        lam=args.lam,
    )
    advantages = whitened(advantages) if args.whiten_advantages else advantages
    real = as_tensor([dict.fromkeys(row, 1.0) for row in advantages], length).bool()
    close = {"atol": 1e-5, "rtol": 0, "check_dtype": False}
    torch.testing.assert_close(rollout["ppo_values"][real], values[real], **close)
    torch.testing.assert_close(rollout["ppo_returns"], as_tensor(returns, length), **close)
    if args.kl_placement != "advantage":
        torch.testing.assert_close(rollout["advantages"], as_tensor(advantages, length), **close)
    assert rollout["ppo_mask"].bool().equal(real)
    return advantages, returns


def check_losses(trainer, reference, scores=None, value_model=None, term=None) -> None:
    """
    Every micro-batch's loss matches the plain loops, to 1e-5. `term` returns what a micro-batch and its rollout add to
    the loss. It can be large, so part of the tolerance is then relative.
    """
    args = trainer.args
    assert trainer.losses
    worked_out = [check_rollout(trainer, rollout, reference, scores, value_model) for rollout in trainer.rollouts]
    for micro in trainer.losses:
        rollout, (advantages, returns) = trainer.rollouts[micro["rollout"]], worked_out[micro["rollout"]]
        policy_loss, value_loss = losses_by_hand(
            micro,
            rollout,
            advantages,
            returns,
            values_by_hand(micro["value"], micro["policy"], micro, value_model),
            temperature=args.temperature,
            clip=args.cliprange,
            value_clip=args.cliprange_value,
        )
        # All real tokens of the rollout, scored or not, divided over its mini-batches.
        tokens = sum(len(row) for row in counting(rollout)) / args.num_mini_batches
        total = policy_loss + args.vf_coef * value_loss + (0.0 if term is None else term(micro, rollout))
        relative = None if term is None else 1e-5
        assert float(micro["loss"]) == pytest.approx(total / tokens, abs=1e-5, rel=relative)


def scripted(prompts, trainer):
    return {
        "prompt_ids": trainer.processing_class(prompts)["input_ids"],
        "completion_ids": [completion_of(prompt) for prompt in prompts],
        "logprobs": None,
    }
