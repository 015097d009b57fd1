"""
What is known of one generation batch, and where it is kept.

A [`Rollout`] lives from the generation of a batch to the update of the controller. What belongs to single completions
must follow them through TRL's shuffling and splitting, so it travels in TRL's batch, under these keys:

| key | shape | what |
|---|---|---|
| `klx_ref_logps` | `(B, T)` | log-probs of the reference, for the loss |
| `klx_ref_hidden` | `(B, T, H)` | hidden states of the reference, for the exact KL in the loss |
| `klx_old_logps` | `(B, T)` | RLOO: log-probs of the policy that sampled; TRL keeps only their sum |
| `klx_measured` | `(B, T, 4)` | the measured [`TokenKL`], until a micro-batch can be centered |
| `klx_group` | `(B,)` | number of the completion's group |
| `klx_adjustment` | `(B, T)` | what the penalty adds to the advantages, where it is not added there |
| `klx_penalty` | `(B, T)` | PPO: coefficient times KL, until rewards are shaped |
| `klx_expected` | `(B, T)` | PPO: the same, as it was to be expected before the token was sampled |
| `klx_row` | `(B,)` | row in the table of completions |
| `klx_exact_kl` | three `(B, T)` | exact KL and log-probs of the loss's own pass; only within the loss |
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from .metrics import Sums


# From hidden states to logits.
Head = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class Scored:
    """
    What one forward pass says about the completion tokens.

    Attributes:
        logps (`torch.Tensor` of shape `(B, T)` or `None`):
            Log-probs of the tokens, in fp32; `None` if the pass ended before the LM head.
        hidden (`torch.Tensor` of shape `(B, T, H)` or `None`):
            Hidden states that predict the tokens, kept only for the exact KL.
        values (`torch.Tensor` of shape `(B, T)` or `None`):
            Value before each token, from PPO's value function.
    """

    logps: torch.Tensor | None
    hidden: torch.Tensor | None = None
    values: torch.Tensor | None = None

    def detach(self) -> "Scored":
        logps, hidden, values = (None if t is None else t.detach() for t in (self.logps, self.hidden, self.values))
        return Scored(None if logps is None else logps.float(), hidden, values)


class Pull(NamedTuple):
    """
    What moves the policy along the KL, from which controllers see how a coefficient will act.

    Attributes:
        advantages (`torch.Tensor` of shape `(B,)` or `(B, T)`):
            Centered advantages without the penalty.
        charged (`torch.Tensor` of shape `(B,)` or `(B, T)`, *optional*):
            What one unit of coefficient takes off the advantage of each token. If unset, the token's own `k1`.
    """

    advantages: torch.Tensor
    charged: torch.Tensor | None = None


class TokenKL(NamedTuple):
    """
    The KL of each token, `(B, T)`, four ways: by the estimator that is penalised, by that of the statistic, by `k1`,
    and as the mean of what is penalised over all tokens that might have been sampled there. Where that mean is not
    known, the last one is what is penalised.
    """

    penalised: torch.Tensor
    statistic: torch.Tensor
    k1: torch.Tensor
    expected: torch.Tensor


@dataclass
class Rollout:
    """
    One generation batch on this process.

    Attributes:
        coef (`float`):
            Coefficient applied to the whole batch. It is the one before this batch's update, unless `undecided`.
        undecided (`bool`):
            Whether the batch will get the coefficient that follows from its own KL, once that is measured.
        sums ([`Sums`]):
            What was measured so far.
        totals (`dict[str, list[float]]`):
            The sums over all processes, once the batch is closed.
        deferred (`bool`):
            Whether the KL is measured in the loss, micro-batch by micro-batch.
        pending (`int`):
            Micro-batches whose KL is still to be measured.
        policy ([`Scored`], *optional*):
            TRL's own pass over the policy at generation, if it made one.
        clean ([`Scored`], *optional*):
            A pass over the policy without dropout: `policy` itself where the policy has no dropout.
        reference ([`Scored`], *optional*):
            The pass over the reference.
        policy_head (`Callable`, *optional*), reference_head (`Callable`, *optional*):
            Their LM heads, for the exact KL.
        prompt_ids (`list[list[int]]`, *optional*):
            Tokens of each prompt, before TRL has padded them.
        completion_ids (`list[list[int]]`, *optional*):
            Tokens of each completion, those of tools among them, before TRL has padded them.
        tool_masks (`list[list[int]]`, *optional*):
            Which tokens of each completion the policy wrote itself, before TRL has padded them.
        charged_kls (`torch.Tensor` of shape `(B,)`, *optional*):
            KL of each completion, where it is subtracted from the completion's reward.
        rewards (`torch.Tensor` of shape `(N, F)`, *optional*):
            The rewards of all processes, by reward function, without the penalty.
        resets (`int`):
            How often the reference had been reset when the batch was begun.
    """

    coef: float = 0.0
    undecided: bool = False
    sums: Sums = field(default_factory=Sums)
    totals: dict[str, list[float]] = field(default_factory=dict)
    deferred: bool = False
    pending: int = 0
    policy: Scored | None = None
    clean: Scored | None = None
    reference: Scored | None = None
    policy_head: Head | None = None
    reference_head: Head | None = None
    prompt_ids: list[list[int]] | None = None
    completion_ids: list[list[int]] | None = None
    tool_masks: list[list[int]] | None = None
    charged_kls: torch.Tensor | None = None
    rewards: torch.Tensor | None = None
    resets: int = 0

    def forget_passes(self) -> None:
        """Let go of the forward passes and of the tokens: what the loss needs is in TRL's batch by now."""
        self.policy = self.clean = self.reference = None
        self.prompt_ids = self.completion_ids = self.tool_masks = None
        self.charged_kls = self.rewards = None
