"""
Formulas that take KL, mask and coefficient and return advantages.

The KL penalty acts on advantages as `coef * (mean - kl_t)`: tokens that drifted more than the average lose, tokens
that drifted less gain, and the adjustments sum to zero over the set whose mean is `mean`. Masked positions may hold
anything, including NaN, in every argument except the advantages themselves.
"""

import torch
import torch.nn.functional as F

from ._scans import at_least_fp32, by_rows, select, selector, suffix_sum
from ._tensors import check_same_shape, wide_dtype


def _zero_masked(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    # Not a product: 0 * NaN is NaN.
    return torch.where(mask.bool(), at_least_fp32(values), 0.0)


def _check_discount(discount: float) -> None:
    if not 0.0 <= discount <= 1.0:
        raise ValueError(f"`discount` must lie in [0, 1], but got {discount}.")


def discounted_suffix_sum(values: torch.Tensor, discount: float) -> torch.Tensor:
    r"""
    Discounted sum of this and all later positions: `y_t = sum_{s >= t} discount^(s - t) * values_s`.

    Args:
        values (`torch.Tensor`):
            Shape `(B, T)`. Must be finite: a NaN spreads to its row. Gradients flow to it.
        discount (`float`):
            Factor per position, in [0, 1].

    Returns:
        `torch.Tensor`: fp32 (fp64 for an fp64 input), shape `(B, T)`.
    """
    check_same_shape(2, values=values)
    _check_discount(discount)
    values = at_least_fp32(values)
    return values.clone() if discount == 0.0 else suffix_sum(values, discount)


def discount_kl(per_token_kl: torch.Tensor, mask: torch.Tensor, discount: float) -> torch.Tensor:
    r"""
    Discounted KL-to-go: `sum_{s >= t} discount^(s - t) * kl_s` within each sequence.

    Masked tokens add nothing and get 0. They still count as positions in the exponent.

    Args:
        per_token_kl (`torch.Tensor`):
            KL per token, shape `(B, T)`. Gradients flow to it.
        mask (`torch.Tensor`):
            Shape `(B, T)`, 1 = counts.
        discount (`float`):
            Factor per position, in [0, 1]. With 0 the result is the masked per-token KL.

    Returns:
        `torch.Tensor`: fp32, shape `(B, T)`, 0 where masked.
    """
    check_same_shape(2, per_token_kl=per_token_kl, mask=mask)
    _check_discount(discount)

    if torch.is_grad_enabled() and per_token_kl.requires_grad:
        return _zero_masked(suffix_sum(_zero_masked(per_token_kl, mask), discount), mask)

    def to_go(result: torch.Tensor, kl: torch.Tensor, mask: torch.Tensor) -> None:
        chosen = selector(mask, result)
        suffix_sum(select(at_least_fp32(kl), chosen), discount, result)
        select(result, chosen, result)

    return by_rows(to_go, per_token_kl, mask)[0]


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """
    Mean over the unmasked positions.

    Args:
        values (`torch.Tensor`):
            Any shape. Gradients flow to it.
        mask (`torch.Tensor`):
            The same shape, 1 = counts.

    Returns:
        `torch.Tensor`: 0-dim, fp32; 0 for an empty mask.
    """
    check_same_shape(values=values, mask=mask)
    kept = _zero_masked(values, mask)
    total = kept.sum(dtype=wide_dtype(kept.device))
    return (total / mask.bool().sum().clamp(min=1)).to(kept.dtype)


def sequence_means(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """
    Mean over the unmasked tokens of each sequence.

    Args:
        values (`torch.Tensor`):
            Shape `(B, T)`. Gradients flow to it.
        mask (`torch.Tensor`):
            Shape `(B, T)`, 1 = counts.

    Returns:
        `torch.Tensor`: fp32, shape `(B, 1)`; 0 for a sequence without unmasked tokens.
    """
    check_same_shape(2, values=values, mask=mask)
    return _zero_masked(values, mask).sum(1, keepdim=True) / mask.bool().sum(1, keepdim=True).clamp(min=1)


def group_means(sums: torch.Tensor, counts: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
    """
    Token-weighted mean of each sequence's group: the sum over the group's tokens divided by their number.

    It takes sums rather than tokens, so that the sequences of a group may come from different processes.

    Args:
        sums (`torch.Tensor`):
            Sum over the unmasked tokens of each sequence, shape `(N,)`.
        counts (`torch.Tensor`):
            Number of unmasked tokens of each sequence, shape `(N,)`.
        group_ids (`torch.Tensor`):
            Integer group of each sequence, shape `(N,)`. Any integers, in any order.

    Returns:
        `torch.Tensor`: The mean of the group each sequence belongs to, fp32, shape `(N,)`; 0 for a group without
        tokens.
    """
    check_same_shape(1, sums=sums, counts=counts, group_ids=group_ids)
    dtype = wide_dtype(sums.device)
    # Number the groups from 0. `torch.unique` would wait for the device, because the size of its result is not known.
    ordered, order = group_ids.sort()
    numbers = F.pad((ordered[1:] != ordered[:-1]).long(), (1, 0)).cumsum(0) if len(order) else order
    index = torch.empty_like(order).scatter_(0, order, numbers)
    totals = torch.zeros(len(order), dtype=dtype, device=sums.device)
    group_sums = totals.index_add(0, index, sums.to(dtype))
    group_counts = totals.index_add(0, index, counts.to(dtype))
    return (group_sums / group_counts.clamp(min=1.0))[index].to(at_least_fp32(sums).dtype)


def split_group_advantages(
    advantages: torch.Tensor, rewards: torch.Tensor, kls: torch.Tensor, coef: float, group_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""
    Take apart advantages that compare `rewards - coef * kls` within groups: `advantages = given - coef * charged`.

    One factor turns the centered rewards, penalty included, into advantages. It is read off the whole batch. Where
    each group was divided by its own deviation, the parts are those of an average group: a group whose rewards are
    equal would show a penalty that is divided by itself, on which the coefficient has no effect.

    Args:
        advantages (`torch.Tensor`):
            Shape `(N,)`, the completions of a group next to each other; 0 where there was nothing to compare.
        rewards (`torch.Tensor`):
            Rewards without the penalty, shape `(N,)`. NaN for a completion that has none.
        kls (`torch.Tensor`):
            KL of each completion, shape `(N,)`. One that is not finite counts as no reward.
        coef (`float`):
            Coefficient with which the KL was subtracted.
        group_size (`int`):
            Completions in a group.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: What the rewards gave, and what one unit of coefficient took off, `(N,)`.
    """
    check_same_shape(1, advantages=advantages, rewards=rewards, kls=kls)
    dtype, known = wide_dtype(rewards.device), rewards.isfinite() & kls.isfinite()

    def centered(values: torch.Tensor) -> torch.Tensor:
        grouped = torch.where(known, values.to(dtype), torch.nan).view(-1, group_size)
        return (grouped - grouped.nanmean(dim=1, keepdim=True)).nan_to_num(nan=0.0)

    given, paid = centered(rewards), centered(kls)
    compared = given - coef * paid
    squares, products = compared.square().sum(), (advantages.to(dtype).view(-1, group_size) * compared).sum()
    scale = torch.where(squares > 0, products / squares, 0.0)
    return (scale * given).view(-1), (scale * paid).view(-1)


def kl_adjustment(
    per_token_kl: torch.Tensor, mask: torch.Tensor, coef: float | torch.Tensor, mean: float | torch.Tensor
) -> torch.Tensor:
    r"""
    The adjustment that the KL penalty adds to each token's advantage: `coef * (mean - kl_t)` on unmasked tokens, 0
    elsewhere.

    It sums to zero over the set of tokens whose mean is `mean`. With `mean` 0 it is the plain penalty `-coef * kl_t`.

    Args:
        per_token_kl (`torch.Tensor`):
            KL per token, shape `(B, T)`.
        mask (`torch.Tensor`):
            Shape `(B, T)`, 1 = counts.
        coef (`float` or `torch.Tensor`):
            Strength of the penalty, 0-dim if a tensor. With 0 the adjustment is 0 even where the KL is not finite.
        mean (`float` or `torch.Tensor`):
            Mean of the centering set: 0-dim, or `(B, 1)` for one mean per sequence.

    Returns:
        `torch.Tensor`: fp32, shape `(B, T)`. Advantages are constants of the policy gradient, so gradients stop here.
    """
    check_same_shape(2, per_token_kl=per_token_kl, mask=mask)
    kl = at_least_fp32(per_token_kl.detach())
    coef = torch.as_tensor(coef, dtype=kl.dtype, device=kl.device).detach()
    mean = torch.as_tensor(mean, dtype=kl.dtype, device=kl.device).detach()
    if coef.ndim != 0:
        raise ValueError(f"`coef` must be a number or 0-dim, but got shape {tuple(coef.shape)}.")
    if mean.ndim != 0 and mean.shape != (kl.shape[0], 1):
        raise ValueError(
            f"`mean` must be a number, 0-dim or of shape ({kl.shape[0]}, 1), but got shape {tuple(mean.shape)} for "
            f"`per_token_kl` {tuple(kl.shape)}."
        )
    return torch.where(mask.bool() & (coef != 0), coef * (mean - kl), 0.0)


def center_kl_advantages(
    advantages: torch.Tensor,
    per_token_kl: torch.Tensor,
    mask: torch.Tensor,
    coef: float | torch.Tensor,
    discount: float = 0.0,
) -> torch.Tensor:
    r"""
    Add the centered KL penalty to advantages: `A_t + coef * (mean - kl_t)` on unmasked tokens.

    `mean` is the mean of `kl_t` over the whole mask, so the penalty moves credit between tokens and keeps its total
    unchanged. With `discount > 0` each `kl_t` is first replaced by its KL-to-go, see [`discount_kl`].

    Args:
        advantages (`torch.Tensor`):
            Shape `(B,)`, one per sequence, or `(B, T)`. Gradients flow to it. Masked positions are unchanged.
        per_token_kl (`torch.Tensor`):
            KL per token, policy minus reference, shape `(B, T)`. Gradients stop here.
        mask (`torch.Tensor`):
            Shape `(B, T)`, 1 = counts.
        coef (`float` or `torch.Tensor`):
            Strength of the penalty. With 0 the result is `advantages`, broadcast.
        discount (`float`, *optional*, defaults to `0.0`):
            Discount of the KL-to-go, in [0, 1]; 0 = each token pays for its own KL.

    Returns:
        `torch.Tensor`: fp32, shape `(B, T)`.

    Example:

    ```python
    >>> import torch
    >>> from trl_klx import center_kl_advantages, estimate_kl

    >>> per_token_kl = estimate_kl(torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.5]]))
    >>> center_kl_advantages(torch.tensor([1.0]), per_token_kl, torch.ones(1, 2), coef=0.1)
    tensor([[0.9500, 1.0500]])
    ```
    """
    check_same_shape(2, per_token_kl=per_token_kl, mask=mask)
    batch, length = per_token_kl.shape
    if advantages.shape not in ((batch,), (batch, length)):
        raise ValueError(
            f"`advantages` must have shape ({batch},) or ({batch}, {length}), but got {tuple(advantages.shape)} for "
            f"`per_token_kl` {tuple(per_token_kl.shape)}."
        )
    advantages = at_least_fp32(advantages if advantages.ndim == 2 else advantages.unsqueeze(1))
    kl = discount_kl(per_token_kl.detach(), mask, discount)
    return advantages + kl_adjustment(kl, mask, coef, masked_mean(kl, mask))


def masked_moments(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """
    Count, sum and sum of squares over the unmasked positions. Add them over all processes before whitening.

    Args:
        values (`torch.Tensor`):
            Any shape. Gradients stop here.
        mask (`torch.Tensor`):
            The same shape, 1 = counts.

    Returns:
        `torch.Tensor`: fp64, shape `(3,)`. In fp64 the variance survives the difference of two large numbers.
    """
    check_same_shape(values=values, mask=mask)
    dtype = wide_dtype(values.device)
    kept = _zero_masked(values.detach(), mask).to(dtype)
    return torch.stack([mask.bool().sum(dtype=dtype), kept.sum(), kept.square().sum()])


def whiten_with_moments(
    values: torch.Tensor, mask: torch.Tensor, moments: torch.Tensor, shift_mean: bool = True, eps: float = 1e-8
) -> torch.Tensor:
    r"""
    Scale to unit variance: `(v - mean) / sqrt(var + eps)`. The moments may cover more than these values.

    Args:
        values (`torch.Tensor`):
            Any shape. Gradients flow to it, not through the moments.
        mask (`torch.Tensor`):
            The same shape, 1 = counts.
        moments (`torch.Tensor`):
            [`masked_moments`], summed over everything that should count, shape `(3,)`. The variance is the biased
            estimate.
        shift_mean (`bool`, *optional*, defaults to `True`):
            Whether the result has mean 0. If `False`, the mean is added back after scaling.
        eps (`float`, *optional*, defaults to `1e-8`):
            Added to the variance.

    Returns:
        `torch.Tensor`: fp32, the shape of `values`, 0 where masked.
    """
    check_same_shape(values=values, mask=mask)
    if moments.shape != (3,):
        raise ValueError(f"`moments` must have shape (3,), but got {tuple(moments.shape)}.")
    count = moments[0].clamp(min=1.0)
    mean = moments[1] / count
    variance = (moments[2] / count - mean.square()).clamp(min=0.0)
    kept = _zero_masked(values, mask)
    # Computed in the dtype of the moments: a large mean rounded to fp32 would shift every value.
    whitened = (kept.to(moments.dtype) - mean) * torch.rsqrt(variance + eps)
    if not shift_mean:
        whitened = whitened + mean
    return _zero_masked(whitened.to(kept.dtype), mask)
