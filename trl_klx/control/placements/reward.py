"""The penalty in the rewards: of a completion, or in PPO of each token."""

import warnings
from typing import Any

import torch

from ...maths.totals import sum_kl_per_sequence
from ..rollout import Rollout, TokenKL
from .base import Batch, ScorePlacement, register_placement


class SequenceRewardPlacement(ScorePlacement):
    """The KL of a completion is subtracted from its reward, before TRL's baseline."""

    asks_at_generation = True

    @classmethod
    def check(cls, args: Any) -> None:
        if args.num_generations == 1:
            raise ValueError(
                "`num_generations=1` cannot be used with `kl_placement='reward'`: the penalty of a completion counts "
                "by comparison with the others of its prompt. Set `num_generations` to 2 or more, or `kl_placement` "
                "to 'advantage' or 'loss'."
            )

    @property
    def needs_reference_logps(self) -> bool:
        return True  # so that the penalty does not depend on which statistic is measured


@register_placement("reward", "grpo")
class GRPOReward(SequenceRewardPlacement):
    """A reward function named `kl_penalty`, so that TRL's own baseline and scaling apply."""

    @classmethod
    def check(cls, args: Any) -> None:
        super().check(args)
        if args.multi_objective_aggregation == "normalize_then_sum":
            raise ValueError(
                "`kl_placement='reward'` cannot be used with `multi_objective_aggregation='normalize_then_sum'`, "
                "which would divide the penalty by its own standard deviation, so that `kl_penalty_coef` had no "
                "effect. Set `multi_objective_aggregation='sum_then_normalize'`, or `kl_placement='advantage'`."
            )
        if args.scale_rewards == "group":
            warnings.warn(
                "`kl_placement='reward'` with `scale_rewards='group'`: each group is divided by the standard "
                "deviation of rewards and penalties together, so that in a group whose rewards are equal the "
                "coefficient has no effect. Set `scale_rewards='none'` or 'batch', or `kl_placement='advantage'`.",
                stacklevel=5,
            )

    def answer(self, rollout: Rollout, kl: TokenKL, mask: torch.Tensor) -> torch.Tensor:
        rollout.charged_kls = sum_kl_per_sequence(kl.penalised, mask)
        return kl.penalised  # TRL asks for log-probs and, its own term being off in the loss, does not read them


@register_placement("reward", "rloo")
class RLOOReward(SequenceRewardPlacement):
    """TRL's own subtraction of the sequence's KL from its reward, with our reference and our coefficient as `beta`."""

    def answer(self, rollout: Rollout, kl: TokenKL, mask: torch.Tensor) -> torch.Tensor:
        assert rollout.policy is not None and rollout.policy.logps is not None
        rollout.charged_kls = sum_kl_per_sequence(kl.penalised, mask)
        # TRL subtracts `beta` times the sum of policy minus reference, so this makes it subtract what was measured.
        return rollout.policy.logps - torch.where(mask, kl.penalised, 0.0)


@register_placement("reward", "ppo")
class PPOReward(ScorePlacement):
    """
    A reward of `-coef * kl_t` for each token, before the advantages are estimated. A token pays for what follows it
    too. Where the mean of what a later token pays is known, it takes the place of what was sampled, which scatters
    more.
    """

    in_token_rewards = True

    def charge(self, batch: Batch, kl: TokenKL, mask: torch.Tensor) -> torch.Tensor:
        return torch.where(mask.unsqueeze(-1), torch.stack([kl.penalised, kl.expected], dim=-1), 0.0)  # (B, T, 2)

    def apply(self, batch: Batch, charge: torch.Tensor, coef: float) -> None:
        batch["klx_penalty"], batch["klx_expected"] = (coef * charge).unbind(-1)
