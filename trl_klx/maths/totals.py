"""Sums of the per-token KL, from which the KL statistic is computed."""

import torch

from ._tensors import check_same_shape, wide_dtype


def sum_kl_per_sequence(per_token_kl: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """
    Sum the KL over the unmasked tokens of each sequence.

    Args:
        per_token_kl (`torch.Tensor`):
            KL per token, shape `(B, T)`. Masked positions may hold anything, including NaN. Gradients flow to it.
        mask (`torch.Tensor`):
            Shape `(B, T)`, 1 = counts.

    Returns:
        `torch.Tensor`: KL per sequence in nats, fp32, shape `(B,)`; 0 for a sequence without unmasked tokens.
    """
    check_same_shape(2, per_token_kl=per_token_kl, mask=mask)
    return torch.where(mask.bool(), per_token_kl.float(), 0.0).sum(dim=1)


def kl_totals(per_token_kl: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """
    The three sums that give the mean KL per sequence and per token.

    They are sums, not means, so that adding them over micro-batches and processes gives the totals of the whole batch,
    even if the sequences in each part differ in length.

    Args:
        per_token_kl (`torch.Tensor`):
            KL per token, shape `(B, T)`. Masked positions may hold anything. Gradients stop here.
        mask (`torch.Tensor`):
            Shape `(B, T)`, 1 = counts.

    Returns:
        `torch.Tensor`: fp64, shape `(3,)`: KL summed over unmasked tokens, number of unmasked tokens, number of
        sequences with at least one unmasked token.
    """
    check_same_shape(2, per_token_kl=per_token_kl, mask=mask)
    dtype = wide_dtype(per_token_kl.device)
    mask = mask.bool()
    total = torch.where(mask, per_token_kl.detach().float(), 0.0).sum(dtype=dtype)
    return torch.stack([total, mask.sum(dtype=dtype), mask.any(dim=1).sum(dtype=dtype)])
