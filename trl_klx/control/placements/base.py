"""
Where the penalty enters training.

A placement is one class: which estimators it can use, which settings it refuses, what it does with a batch whose KL
has been measured, and what it adds to the loss. [`register_placement`] gives it a name in `kl_placement`.
"""

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch
from accelerate import Accelerator

from ..rollout import Rollout, Scored, TokenKL


Batch = dict[str, Any]
ExactKL = Callable[[Scored, Scored], torch.Tensor]
ALGORITHMS = ("grpo", "rloo", "ppo")


class Placement:
    """
    Base of all placements. It does nothing, and so serves a run that only measures the KL.

    Class attributes:

    - `estimators` (`tuple[str, ...]`): the estimators that may be penalised here, the default first.
    - `centers` (`bool`): whether `kl_centering` and `kl_discount` act here.
    - `asks_at_generation` (`bool`): whether TRL must ask for the reference's log-probs while it generates.
    - `in_loss` (`bool`): whether `loss_term` needs the reference's forward pass.
    - `in_token_rewards` (`bool`): whether the penalty is part of the rewards from which PPO estimates advantages.

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
    in_token_rewards: ClassVar[bool] = False

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
        """Whether the placement reads the reference's log-probs, in addition to the measured KL."""
        return False

    @property
    def groups(self) -> bool:
        """Whether `klx_group` is read."""
        return False

    @property
    def per_microbatch(self) -> bool:
        """Whether the placement works on one micro-batch at a time, and so must wait for the loss."""
        return False

    @property
    def per_batch(self) -> bool:
        """Whether the placement needs the KL of the whole generation batch before the first loss."""
        return False

    def answer(self, rollout: Rollout, kl: TokenKL, mask: torch.Tensor) -> torch.Tensor:
        """With `asks_at_generation`: the log-probs that TRL gets for the reference."""
        raise NotImplementedError

    def charge(self, batch: Batch, kl: TokenKL, mask: torch.Tensor) -> torch.Tensor | None:
        """
        What each token of a measured batch pays per unit of coefficient, `(B, T)`; `None` if [`~Placement.apply`] has
        nothing to enter.
        """
        return None

    def apply(self, batch: Batch, charge: torch.Tensor, coef: float) -> None:
        """Enter the penalty of a measured batch, `coef` times what [`~Placement.charge`] gave."""

    def loss_term(
        self,
        batch: Batch,
        policy: Scored,
        coef: float,
        exact: ExactKL,
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
        if cls.apply is not Placement.apply and cls.charge is Placement.charge:
            raise TypeError(
                f"{cls.__name__} defines `apply` but not `charge`, so that it would have nothing to apply. Let "
                "`charge(batch, kl, mask)` return what each token pays per unit of coefficient."
            )
        for algorithm in algorithms:
            _PLACEMENTS[algorithm, name] = cls
        return cls

    return register


def list_placements(algorithm: str) -> tuple[str, ...]:
    """The values of `kl_placement` that the trainer of an algorithm knows."""
    return tuple(sorted(name for known, name in _PLACEMENTS if known == algorithm))


def get_placement(algorithm: str, name: str) -> type[Placement]:
    """The class of a placement."""
    return _PLACEMENTS[algorithm, name]


class ScorePlacement(Placement):
    """
    Base of the placements that act through the policy gradient. It pushes a token down in proportion to what the token
    pays. That restrains the policy only if a token that it favours over the reference pays more than one that it does
    not: the estimator must rise with the log-ratio.
    """

    estimators = ("k1", "importance")

    @classmethod
    def why_not(cls, estimator: str) -> str:
        if estimator == "full":
            return "it is the same whatever token is sampled, so that a policy gradient cannot tell tokens apart by it"
        return (
            "it charges tokens that the policy samples less than the reference does, and so pushes them further away"
        )


def weigh_by_sampler(batch: Batch, term: torch.Tensor) -> torch.Tensor:
    """Correct a term for tokens that a sampler other than the policy drew, as TRL corrects its own loss."""
    ratio = batch.get("importance_sampling_ratio")
    return term if ratio is None else term * ratio
