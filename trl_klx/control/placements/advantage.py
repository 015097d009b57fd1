"""The penalty in the advantages: a zero-mean adjustment of each token."""

from typing import Any

import torch

from ...maths.advantages import discount_kl, group_means, kl_adjustment, sequence_means
from ...maths.losses import clipped_surrogate
from ..rollout import Scored, TokenKL
from .base import Batch, ExactKL, ScorePlacement, register_placement, weigh_by_sampler


# TRL's losses that clip a ratio of each token, so that the same surrogate can stand next to them.
CLIPPED_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")


class AdvantagePlacement(ScorePlacement):
    """`coef * (mean - kl_t)` per token, where `mean` is over the centering set."""

    centers = True

    @classmethod
    def check(cls, args: Any) -> None:
        if args.kl_estimator == "importance" and args.kl_centering == "sequence":
            raise ValueError(
                "`kl_estimator='importance'` cannot be used with `kl_centering='sequence'`: a larger coefficient "
                "would not mean a smaller KL. Set `kl_estimator='k1'`, or another `kl_centering`."
            )
        if args.kl_centering == "group" and args.num_generations == 1:
            raise ValueError(
                "`kl_centering='group'` has no groups with `num_generations=1`. Set `kl_centering='batch'`, or "
                "`num_generations` to the completions of a group."
            )

    @property
    def groups(self) -> bool:
        return bool(self.args.kl_centering == "group")

    @property
    def per_microbatch(self) -> bool:
        return bool(self.args.kl_centering == "microbatch")

    @property
    def per_batch(self) -> bool:
        return self.args.kl_centering in ("batch", "group")

    def charge(self, batch: Batch, kl: TokenKL, mask: torch.Tensor) -> torch.Tensor:
        to_go = discount_kl(kl.penalised, mask, self.args.kl_discount)
        return -kl_adjustment(to_go, mask, 1.0, self._mean(to_go, mask, batch))

    def apply(self, batch: Batch, charge: torch.Tensor, coef: float) -> None:
        # A coefficient of 0 adds nothing, even where the KL is not finite.
        self._enter(batch, -coef * charge if coef else torch.zeros_like(charge))

    def _enter(self, batch: Batch, adjustment: torch.Tensor) -> None:
        batch["klx_adjustment"] = adjustment

    def _mean(self, kl: torch.Tensor, mask: torch.Tensor, batch: Batch) -> torch.Tensor | float:
        """Mean over the centering set, in a shape that broadcasts over `(B, T)`."""
        centering = self.args.kl_centering
        if centering == "none":
            return 0.0
        if centering == "sequence":
            return sequence_means(kl, mask)  # (B, 1)
        if centering == "group":
            # A group's completions may lie on several processes.
            local = torch.stack([(kl * mask).sum(1), mask.sum(1).float(), batch["klx_group"].float()], dim=1)
            sums, counts, groups = self.accelerator.gather(local).unbind(1)
            means = group_means(sums, counts, groups.long())
            start = self.accelerator.process_index * mask.size(0)
            return means[start : start + mask.size(0)].unsqueeze(1)  # (B, 1)
        totals = torch.stack([(kl * mask).sum(), mask.sum().float()])
        if centering == "batch":
            totals = self.accelerator.reduce(totals, reduction="sum")
        return totals[0] / totals[1].clamp(min=1.0)


def _surrogate_term(batch: Batch, policy: Scored, low: float, high: float) -> torch.Tensor:
    """The loss of the adjustment, apart from that of the advantages. On policy its gradient is the same."""
    assert policy.logps is not None
    old_logps = batch.get("old_per_token_logps", batch.get("klx_old_logps"))
    old_logps = policy.logps.detach() if old_logps is None else old_logps
    return -weigh_by_sampler(batch, clipped_surrogate(policy.logps, old_logps, batch["klx_adjustment"], low, high))


@register_placement("advantage", "grpo")
class GRPOAdvantage(AdvantagePlacement):
    """
    The adjustment is added to the advantages, which become `(B, T)`. TRL's loss takes them as they are.

    Two options of TRL's decide by the advantage what becomes of a sequence or a token (`off_policy_mask_threshold`,
    `top_entropy_quantile`). With them the adjustment is a loss term next to TRL's, so that they mean what they meant.
    """

    @classmethod
    def check(cls, args: Any) -> None:
        super().check(args)
        by_sequence = args.importance_sampling_level == "sequence"
        if by_sequence and args.kl_centering == "sequence":
            raise ValueError(
                "`kl_centering='sequence'` has no effect with `importance_sampling_level='sequence'`: all tokens of a "
                "sequence then have one ratio, and an adjustment that sums to zero over them moves nothing. Set "
                "`kl_centering='batch'`."
            )
        if by_sequence and args.kl_discount != 0.0:
            raise ValueError(
                f"`kl_discount={args.kl_discount!r}` cannot be used with `importance_sampling_level='sequence'`: all "
                "tokens of a sequence then share what each of them pays, which already is the KL of the whole "
                "sequence. Set `kl_discount=0.0`."
            )
        if args.loss_type == "vespo":
            raise ValueError(
                "`loss_type='vespo'` cannot be used with `kl_placement='advantage'`: it weighs a sequence by the sign "
                "of its advantage, and would weigh each token by its own. Set `kl_placement='reward'` or 'loss'."
            )
        option = cls._deciding_option(args)
        if option is not None:
            cls.check_apart(args, f"`{option}={getattr(args, option)!r}`")

    @staticmethod
    def check_apart(args: Any, reason: str) -> None:
        """Refuse settings under which the adjustment cannot be a loss term apart from the advantages."""
        if args.importance_sampling_level == "sequence" or args.loss_type not in CLIPPED_LOSSES:
            raise ValueError(
                f"{reason} can be used with `kl_placement='advantage'` only where TRL clips a ratio per token, got "
                f"`loss_type={args.loss_type!r}` and `importance_sampling_level={args.importance_sampling_level!r}`. "
                "Set `kl_placement='reward'` or 'loss'."
            )

    @staticmethod
    def _deciding_option(args: Any) -> str | None:
        if args.off_policy_mask_threshold is not None:
            return "off_policy_mask_threshold"
        return "top_entropy_quantile" if args.top_entropy_quantile < 1.0 else None

    # Whether the loss takes advantages per token. GRPO's does; that of a subclass may not.
    folds = True

    def _enter(self, batch: Batch, adjustment: torch.Tensor) -> None:
        if self.folds and self._deciding_option(self.args) is None:
            batch["advantages"] = batch["advantages"].unsqueeze(1) + adjustment  # (B, T)
        else:
            batch["klx_adjustment"] = adjustment

    def loss_term(self, batch: Batch, policy: Scored, coef: float, exact: ExactKL) -> torch.Tensor | None:
        if "klx_adjustment" not in batch:
            return None
        high = self.args.epsilon if self.args.epsilon_high is None else self.args.epsilon_high
        return _surrogate_term(batch, policy, self.args.epsilon, high)


@register_placement("advantage", "rloo")
class RLOOAdvantage(AdvantagePlacement):
    """RLOO's loss has one ratio and one advantage per sequence, so the adjustment is a loss term next to it."""

    def loss_term(self, batch: Batch, policy: Scored, coef: float, exact: ExactKL) -> torch.Tensor | None:
        high = self.args.epsilon if self.args.epsilon_high is None else self.args.epsilon_high
        return _surrogate_term(batch, policy, self.args.epsilon, high)


@register_placement("advantage", "ppo")
class PPOAdvantage(AdvantagePlacement):
    """The adjustment is added to PPO's advantages once they have been estimated."""
