"""
Where the penalty enters training.

A placement is one class: which estimators it can use, which settings it refuses, what it does with a batch whose KL has
been measured, and what it adds to the loss. [`register_placement`] gives it a name in `kl_placement`.
"""

import warnings
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch
from accelerate import Accelerator

from ..maths.advantages import discount_kl, group_means, kl_adjustment, sequence_means
from ..maths.estimators import sum_kl_per_sequence
from ..maths.losses import clipped_surrogate, kl_loss_terms
from .rollout import Rollout, Scored, TokenKL


Batch = dict[str, Any]
ALGORITHMS = ("grpo", "rloo", "ppo")
# TRL's losses that clip a ratio of each token, so that the same surrogate can stand next to them.
CLIPPED_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")


class Placement:
    """
    Base of all placements. It does nothing, and so serves a run that only measures the KL.

    Class attributes:

    - `estimators` (`tuple[str, ...]`): the estimators that may be penalised here, the default first.
    - `centers` (`bool`): whether `kl_centering` and `kl_discount` act here.
    - `asks_at_generation` (`bool`): whether TRL must ask for the reference's log-probs while it generates.
    - `in_loss` (`bool`): whether `loss_term` needs the reference's forward pass.

    Args:
        args ([`KLXConfigMixin`]):
            Config.
        accelerator ([`~accelerate.Accelerator`]):
            Accelerator of the trainer.
    """

    estimators: ClassVar[tuple[str, ...]] = ("k1",)
    centers: ClassVar[bool] = False
    asks_at_generation: ClassVar[bool] = False
    in_loss: ClassVar[bool] = False

    def __init__(self, args: Any, accelerator: Accelerator):
        self.args = args
        self.accelerator = accelerator

    @classmethod
    def check(cls, args: Any) -> None:
        """Refuse settings of the trainer's config under which the penalty would not do what it says."""

    @classmethod
    def why_not(cls, estimator: str) -> str:
        """Why an estimator cannot be penalised here, for the error."""
        return "it is not known there"

    @property
    def needs_reference_logps(self) -> bool:
        """Whether the reference's log-probs are read, and not only what is measured from its pass."""
        return False

    @property
    def groups(self) -> bool:
        """Whether `klx_group` is read."""
        return False

    @property
    def per_microbatch(self) -> bool:
        """Whether a micro-batch is all that is looked at together, so that applying must wait for the loss."""
        return False

    @property
    def per_batch(self) -> bool:
        """Whether the whole generation batch is looked at together, so that its KL is needed before the first loss."""
        return False

    def answer(self, rollout: Rollout, kl: TokenKL, mask: torch.Tensor) -> torch.Tensor:
        """With `asks_at_generation`: the log-probs that TRL gets for the reference."""
        raise NotImplementedError

    def apply(self, batch: Batch, kl: TokenKL, mask: torch.Tensor, coef: float) -> torch.Tensor | None:
        """
        Enter the penalty of a measured batch. Returns the adjustment of the advantages, if it is one.
        """
        return None

    def loss_term(
        self,
        batch: Batch,
        policy: Scored,
        coef: float,
        exact: Callable[[Scored, Scored], torch.Tensor],
    ) -> torch.Tensor | None:
        """
        What each token adds to the loss, `(B, T)`, before TRL's weights. `policy` is the loss's forward pass; `exact`
        computes the exact KL of two passes.
        """
        return None


PlacementClass = TypeVar("PlacementClass", bound=type[Placement])
_PLACEMENTS: dict[tuple[str, str], type[Placement]] = {}


def register_placement(name: str, *algorithms: str) -> Callable[[PlacementClass], PlacementClass]:
    """
    Make a placement available as `kl_placement=name`.

    Args:
        name (`str`):
            Value of `kl_placement`.
        *algorithms (`str`):
            `"grpo"`, `"rloo"`, `"ppo"`: the trainers that can use it.
    """
    unknown = [algorithm for algorithm in algorithms if algorithm not in ALGORITHMS]
    if unknown or not algorithms:
        raise ValueError(f"Algorithms of a placement must be of {', '.join(ALGORITHMS)}, but got {algorithms!r}.")

    def register(cls: PlacementClass) -> PlacementClass:
        for algorithm in algorithms:
            _PLACEMENTS[algorithm, name] = cls
        return cls

    return register


def list_placements(algorithm: str) -> tuple[str, ...]:
    """The values of `kl_placement` that the trainer of an algorithm knows."""
    return tuple(name for known, name in _PLACEMENTS if known == algorithm)


def get_placement(algorithm: str, name: str) -> type[Placement]:
    """The class of a placement."""
    return _PLACEMENTS[algorithm, name]


class ScorePlacement(Placement):
    """
    Base of the placements that act through the policy gradient. It pushes a token down in proportion to what the token
    pays. That restrains the policy only if a token that it favours over the reference pays more than one that it does not:
    the estimator must rise with the log-ratio.
    """

    estimators = ("k1", "importance")

    @classmethod
    def why_not(cls, estimator: str) -> str:
        if estimator == "full":
            return "it is the same whatever token is sampled, so that a policy gradient cannot tell tokens apart by it"
        return (
            "it charges tokens that the policy samples less than the reference does, and so pushes them further away"
        )


# ---- Advantages ----


class AdvantagePlacement(ScorePlacement):
    """`coef * (mean - kl_t)` per token, where `mean` is over the centering set."""

    centers = True

    @classmethod
    def check(cls, args: Any) -> None:
        if args.kl_estimator == "importance" and args.kl_centering == "sequence":
            raise ValueError(
                "`kl_estimator='importance'` cannot be used with `kl_centering='sequence'`: a larger coefficient would not "
                "mean a smaller KL. Set `kl_estimator='k1'`, or another `kl_centering`."
            )

    @property
    def groups(self) -> bool:
        return self.args.kl_centering == "group"

    @property
    def per_microbatch(self) -> bool:
        return self.args.kl_centering == "microbatch"

    @property
    def per_batch(self) -> bool:
        return self.args.kl_centering in ("batch", "group")

    def apply(self, batch: Batch, kl: TokenKL, mask: torch.Tensor, coef: float) -> torch.Tensor:
        to_go = discount_kl(kl.penalised, mask, self.args.kl_discount)
        adjustment = kl_adjustment(to_go, mask, coef, self._mean(to_go, mask, batch))
        self._enter(batch, adjustment)
        return adjustment

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
    return -_weighted(batch, clipped_surrogate(policy.logps, old_logps, batch["klx_adjustment"], low, high))


def _weighted(batch: Batch, term: torch.Tensor) -> torch.Tensor:
    """Correct a term for tokens that a sampler other than the policy drew, as TRL corrects its own loss."""
    ratio = batch.get("importance_sampling_ratio")
    return term if ratio is None else term * ratio


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
                "tokens of a sequence then share what each of them pays, which already is the KL of the whole sequence. "
                "Set `kl_discount=0.0`."
            )
        if args.loss_type == "vespo":
            raise ValueError(
                "`loss_type='vespo'` cannot be used with `kl_placement='advantage'`: it weighs a sequence by the sign of "
                "its advantage, and would weigh each token by its own. Set `kl_placement='reward'` or 'loss'."
            )
        option = cls._deciding_option(args)
        if option is not None and (by_sequence or args.loss_type not in CLIPPED_LOSSES):
            raise ValueError(
                f"`{option}={getattr(args, option)!r}` can be used with `kl_placement='advantage'` only where TRL clips a "
                f"ratio per token, got `loss_type={args.loss_type!r}` and "
                f"`importance_sampling_level={args.importance_sampling_level!r}`. Set `kl_placement='reward'` or 'loss'."
            )

    @staticmethod
    def _deciding_option(args: Any) -> str | None:
        if args.off_policy_mask_threshold is not None:
            return "off_policy_mask_threshold"
        return "top_entropy_quantile" if args.top_entropy_quantile < 1.0 else None

    def _enter(self, batch: Batch, adjustment: torch.Tensor) -> None:
        if self._deciding_option(self.args) is None:
            batch["advantages"] = batch["advantages"].unsqueeze(1) + adjustment  # (B, T)
        else:
            batch["klx_adjustment"] = adjustment

    def loss_term(
        self, batch: Batch, policy: Scored, coef: float, exact: Callable[[Scored, Scored], torch.Tensor]
    ) -> torch.Tensor | None:
        if "klx_adjustment" not in batch:
            return None
        high = self.args.epsilon if self.args.epsilon_high is None else self.args.epsilon_high
        return _surrogate_term(batch, policy, self.args.epsilon, high)


@register_placement("advantage", "rloo")
class RLOOAdvantage(AdvantagePlacement):
    """RLOO's loss has one ratio and one advantage per sequence, so the adjustment is a loss term next to it."""

    def loss_term(
        self, batch: Batch, policy: Scored, coef: float, exact: Callable[[Scored, Scored], torch.Tensor]
    ) -> torch.Tensor | None:
        high = self.args.epsilon if self.args.epsilon_high is None else self.args.epsilon_high
        return _surrogate_term(batch, policy, self.args.epsilon, high)


@register_placement("advantage", "ppo")
class PPOAdvantage(AdvantagePlacement):
    """The adjustment is added to PPO's advantages once they have been estimated."""

    @classmethod
    def check(cls, args: Any) -> None:
        super().check(args)
        if args.kl_centering == "group" and args.num_generations == 1:
            raise ValueError(
                "`kl_centering='group'` has no groups with `num_generations=1`. Set `kl_centering='batch'`, or "
                "`num_generations` to the completions of a group."
            )


# ---- Rewards ----


class SequenceRewardPlacement(ScorePlacement):
    """The KL of a completion is subtracted from its reward, before TRL's baseline."""

    asks_at_generation = True


@register_placement("reward", "grpo")
class GRPOReward(SequenceRewardPlacement):
    """A reward function named `kl_penalty`, so that TRL's own baseline and scaling apply."""

    @classmethod
    def check(cls, args: Any) -> None:
        if args.multi_objective_aggregation == "normalize_then_sum":
            raise ValueError(
                "`kl_placement='reward'` cannot be used with `multi_objective_aggregation='normalize_then_sum'`, which "
                "would divide the penalty by its own standard deviation, so that `kl_penalty_coef` had no effect. Set "
                "`multi_objective_aggregation='sum_then_normalize'`, or `kl_placement='advantage'`."
            )
        if args.scale_rewards == "group":
            warnings.warn(
                "`kl_placement='reward'` with `scale_rewards='group'`: each group is divided by the standard deviation of "
                "rewards and penalties together, so that in a group whose rewards are equal the coefficient has no effect. "
                "Set `scale_rewards='none'` or 'batch', or `kl_placement='advantage'`.",
                stacklevel=5,
            )

    def answer(self, rollout: Rollout, kl: TokenKL, mask: torch.Tensor) -> torch.Tensor:
        rollout.penalties = rollout.coef * sum_kl_per_sequence(kl.penalised, mask)
        return kl.penalised  # TRL asks for log-probs and, its own term being off in the loss, does not read them


@register_placement("reward", "rloo")
class RLOOReward(SequenceRewardPlacement):
    """TRL's own subtraction of the sequence's KL from its reward, with our reference and our coefficient as `beta`."""

    def answer(self, rollout: Rollout, kl: TokenKL, mask: torch.Tensor) -> torch.Tensor:
        assert rollout.policy is not None and rollout.policy.logps is not None
        # TRL subtracts `beta` times the sum of policy minus reference, so this makes it subtract what was measured.
        return rollout.policy.logps - torch.where(mask, kl.penalised, 0.0)


@register_placement("reward", "ppo")
class PPOReward(ScorePlacement):
    """A reward of `-coef * kl_t` for each token, before the advantages are estimated."""

    def apply(self, batch: Batch, kl: TokenKL, mask: torch.Tensor, coef: float) -> None:
        batch["klx_penalty"] = coef * torch.where(mask, kl.penalised, 0.0)


# ---- Loss ----


@register_placement("loss", *ALGORITHMS)
class LossPlacement(Placement):
    """A KL term in the loss, with the gradient of KL(policy || reference) at the states of the rollout."""

    estimators = ("k3", "k2", "full")
    in_loss = True

    @classmethod
    def why_not(cls, estimator: str) -> str:
        if estimator == "k1":
            return "the expected gradient of its term is zero"
        return "the expected gradient of its term is not that of KL(policy || reference)"

    @classmethod
    def check(cls, args: Any) -> None:
        if getattr(args, "use_bias_correction_kl", True) is not True:
            raise ValueError(
                f"`use_bias_correction_kl={args.use_bias_correction_kl!r}` has no effect with `kl_placement='loss'`, whose "
                "term always has the gradient of KL(policy || reference). Unset it."
            )

    @property
    def needs_reference_logps(self) -> bool:
        return bool(self.args.kl_estimator != "full")

    def loss_term(
        self, batch: Batch, policy: Scored, coef: float, exact: Callable[[Scored, Scored], torch.Tensor]
    ) -> torch.Tensor:
        reference = Scored(batch.get("klx_ref_logps"), batch.get("klx_ref_hidden"))
        if self.args.kl_estimator == "full":
            term = exact(policy, reference)
        else:
            assert policy.logps is not None and reference.logps is not None
            old_logps = batch.get("old_per_token_logps", batch.get("klx_old_logps"))
            term = kl_loss_terms(policy.logps, old_logps, reference.logps, self.args.kl_estimator)
        return coef * _weighted(batch, term)
