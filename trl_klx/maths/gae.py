"""
PPO's maths: rewards with a per-token KL penalty, generalized advantage estimation, and the value loss.

Masked positions (padding, tool outputs inside a completion) are treated as if they had been deleted, and may hold
anything.
"""

import functools

import torch

from ._scans import (
    by_rows,
    can_scan_over_holes,
    has_no_holes,
    packing_slots,
    select,
    selector,
    suffix_sum,
    suffix_sum_over_holes,
)
from ._tensors import check_same_shape
from .advantages import masked_mean


def shape_rewards(
    scores: torch.Tensor, per_token_kl: torch.Tensor, mask: torch.Tensor, coef: float | torch.Tensor
) -> torch.Tensor:
    r"""
    Per-token rewards of PPO: `-coef * kl_t` on every unmasked token, plus the score on the last one.

    See section 2.2 of [Ziegler et al. (2019)](https://huggingface.co/papers/1909.08593).

    Args:
        scores (`torch.Tensor`):
            Score of each sequence, shape `(B,)`. A sequence without unmasked tokens gets no reward.
        per_token_kl (`torch.Tensor`):
            KL per token, policy minus reference, shape `(B, T)`.
        mask (`torch.Tensor`):
            Shape `(B, T)`, 1 = counts.
        coef (`float` or `torch.Tensor`):
            Strength of the penalty, 0-dim if a tensor. With 0 the KL is not read, so it may be non-finite.

    Returns:
        `torch.Tensor`: fp32, shape `(B, T)`, 0 where masked. Rewards are constants, so gradients stop here.
    """
    check_same_shape(2, per_token_kl=per_token_kl, mask=mask)
    batch, length = mask.shape
    if scores.shape != (batch,):
        raise ValueError(
            f"`scores` must have shape ({batch},), but got {tuple(scores.shape)} for `mask` {tuple(mask.shape)}."
        )
    mask = mask.bool()
    coef = torch.as_tensor(coef, dtype=torch.float32, device=mask.device).detach()
    rewards = torch.where(mask & (coef != 0), -coef * per_token_kl.detach().float(), 0.0)
    positions = torch.arange(length, device=mask.device)
    last = torch.where(mask, positions, -1).amax(dim=1, keepdim=True) if length else positions.new_full((batch, 1), -1)
    return torch.where(positions == last, rewards + scores.detach().float().unsqueeze(1), rewards)


@torch.no_grad()
def compute_gae(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float = 1.0, lam: float = 0.95
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""
    Generalized advantage estimation ([Schulman et al., 2015](https://huggingface.co/papers/1506.02438)).

    `delta_t = r_t + gamma * V_{t+1} - V_t` and `A_t = sum_{s >= t} (gamma * lam)^(s - t) * delta_s`, where `t` counts
    unmasked tokens only: the next state of a token is the next unmasked one, and the value after the last is 0.

    Args:
        rewards (`torch.Tensor`):
            Reward received for token `t`, shape `(B, T)`.
        values (`torch.Tensor`):
            Value of the state in which token `t` is chosen, shape `(B, T)`.
        mask (`torch.Tensor`):
            Shape `(B, T)`, 1 = counts. It may have holes.
        gamma (`float`, *optional*, defaults to `1.0`):
            Discount of rewards, in [0, 1].
        lam (`float`, *optional*, defaults to `0.95`):
            Trade-off between bias (0) and variance (1), in [0, 1].

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: Advantages, and returns `A_t + V_t`; fp32, shape `(B, T)`, 0 where masked.
        Gradients stop here.
    """
    check_same_shape(2, rewards=rewards, values=values, mask=mask)
    for name, number in (("gamma", gamma), ("lam", lam)):
        if not 0.0 <= number <= 1.0:
            raise ValueError(f"`{name}` must lie in [0, 1], but got {number}.")
    function = functools.partial(_gae_of_rows, gamma=gamma, lam=lam)
    advantages, returns = by_rows(function, rewards.float(), values.float(), mask, outputs=2)
    return advantages, returns


def _gae_of_rows(
    advantages: torch.Tensor,
    returns: torch.Tensor,
    rewards: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    gamma: float,
    lam: float,
) -> None:
    """[`compute_gae`] of a few rows, written to `advantages` and `returns`."""
    chosen = selector(mask, values)
    values = select(values, chosen, advantages)
    if has_no_holes(chosen):
        _lambda_returns(rewards, values, chosen, gamma, lam, returns)
    elif lam >= 0.5 and can_scan_over_holes(values, gamma * lam):
        # `gamma * (1 - lam) * V_{t+1}` is `gamma * lam * V_{t+1}` times this share, which is at most 1. So the values
        # can be summed with the rewards of their own tokens, and that of token t, which is one too many, taken off.
        share = (1.0 - lam) / lam
        summands = torch.add(rewards, values, alpha=share, out=returns)
        sums = suffix_sum_over_holes(summands, mask.bool(), gamma * lam)
        torch.sub(sums, values, alpha=share, out=returns)
    else:
        mask = mask.bool()
        slots = packing_slots(mask)
        packed_values = torch.zeros_like(values).scatter_(1, slots, values)
        packed_rewards = torch.zeros_like(values).scatter_(1, slots, select(rewards, chosen))
        packed_returns = _lambda_returns(packed_rewards, packed_values, None, gamma, lam)
        torch.where(mask, packed_returns.gather(1, slots), values.new_zeros(()), out=returns)
    torch.sub(returns, values, out=advantages)


def _lambda_returns(
    rewards: torch.Tensor,
    values: torch.Tensor,
    chosen: torch.Tensor | None,
    gamma: float,
    lam: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Returns of rows without holes: `R_t = r_t + gamma * (1 - lam) * V_{t+1} + gamma * lam * R_{t+1}`.

    This equals `A_t + V_t` and needs one pass fewer over the data than the sum of the deltas. The values are 0 after
    the last token; `chosen` removes the rewards there.
    """
    summands = torch.empty_like(rewards, memory_format=torch.contiguous_format)
    torch.add(rewards[:, :-1], values[:, 1:], alpha=gamma * (1.0 - lam), out=summands[:, :-1])
    summands[:, -1:] = rewards[:, -1:]
    return suffix_sum(select(summands, chosen, summands), gamma * lam, out)


def clipped_value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor, cliprange: float
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""
    PPO's value loss: half the masked mean of `max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2)`.

    Args:
        values (`torch.Tensor`):
            Values under the current weights, shape `(B, T)`. Gradients flow to it, and only to it.
        old_values (`torch.Tensor`):
            Values when the batch was sampled, shape `(B, T)`.
        returns (`torch.Tensor`):
            Regression target, shape `(B, T)`.
        mask (`torch.Tensor`):
            Shape `(B, T)`, 1 = counts.
        cliprange (`float`):
            `c`, the distance a value may move per batch before moving further stops paying; must be positive.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: The loss, and the fraction of unmasked tokens whose clipped term is the
        larger one; both 0-dim fp32.
    """
    check_same_shape(2, values=values, old_values=old_values, returns=returns, mask=mask)
    if not cliprange > 0.0:
        raise ValueError(f"`cliprange` must be positive, but got {cliprange}.")
    mask = mask.bool()
    # Masked positions are zeroed before the squares, because a NaN times a zero gradient would be a NaN gradient.
    values = torch.where(mask, values.float(), 0.0)
    old_values = torch.where(mask, old_values.detach().float(), 0.0)
    returns = torch.where(mask, returns.detach().float(), 0.0)
    loss = (values - returns).square()
    clipped = torch.minimum(torch.maximum(values, old_values - cliprange), old_values + cliprange)
    clipped_loss = (clipped - returns).square()
    clip_fraction = masked_mean((clipped_loss > loss).float(), mask)
    return 0.5 * masked_mean(torch.maximum(loss, clipped_loss), mask), clip_fraction
