"""
KL, mask and coefficient in; advantages out.

The KL penalty acts on advantages as `coef * (mean - kl_t)`: tokens that drifted more than the average lose, tokens
that drifted less gain, and the sum over the set that `mean` was taken over is zero. Masked positions may hold
anything, NaN included, in every argument except the advantages themselves.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F

from .estimators import check_same_shape, wide_dtype


# Positions per block of `discounted_suffix_sum`: large enough that the pass over block totals is negligible, small
# enough that the quadratic work inside a block is.
_BLOCK = 16

# Numbers per thread that [`by_rows`] takes at a time: 2 MB in fp32. Fewer would cost more calls than memory saves.
_CHUNK = 2**19


def _float(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _zero_masked(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    # Not a product: 0 * NaN is NaN.
    return torch.where(mask.bool(), _float(values), 0.0)


def selector(mask: torch.Tensor, values: torch.Tensor) -> torch.Tensor | None:
    """
    The mask as bool, for [`select`]. On CPU it is `None` if nothing is masked; on a device the answer would be waited for.
    """
    mask = mask.bool()
    if values.device.type == "cpu" and mask.numel() and mask.view(torch.uint8).amin() == 1:
        return None
    return mask


def select(values: torch.Tensor, mask: torch.Tensor | None, out: torch.Tensor | None = None) -> torch.Tensor:
    """0 where masked, whatever is there. `mask` is a [`selector`]; gradients do not flow."""
    if mask is None:
        return values
    if values.device.type != "cpu" or values.dtype != torch.float32:
        return torch.where(mask, values, values.new_zeros(()), out=out)
    # A product of bits, by 0 or 1: 0 also for NaN, and twice as fast as `torch.where` on CPU.
    bits = torch.mul(values.view(torch.int32), mask, out=None if out is None else out.view(torch.int32))
    return bits.view(torch.float32)


def _check_discount(discount: float) -> None:
    if not 0.0 <= discount <= 1.0:
        raise ValueError(f"`discount` must lie in [0, 1], but got {discount}.")


def by_rows(function: Callable[..., None], *tensors: torch.Tensor, outputs: int = 1) -> list[torch.Tensor]:
    """
    Apply a function that treats each row for itself, on CPU to a few rows at a time. A chain of cheap operations on large
    tensors spends its time on memory, not on arithmetic. Gradients stop here.

    Args:
        function (`Callable`):
            Takes `outputs` tensors to write to, fp32 and of shape `(b, T)`, and then rows of each of `tensors`.
        tensors (`torch.Tensor`):
            All of shape `(B, T)`.
        outputs (`int`, *optional*, defaults to `1`):
            Number of results.

    Returns:
        `list[torch.Tensor]`: What was written, for all rows; fp32 (fp64 if the first tensor is), shape `(B, T)`.
    """
    first = tensors[0]
    batch, length = first.shape
    dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
    results = [torch.empty(batch, length, dtype=dtype, device=first.device) for _ in range(outputs)]
    rows = max(1, _CHUNK * torch.get_num_threads() // max(1, length)) if first.device.type == "cpu" else max(1, batch)
    with torch.no_grad():
        for start in range(0, batch, rows):
            function(*(tensor[start : start + rows] for tensor in (*results, *tensors)))
    return results


@functools.lru_cache(maxsize=64)
def _block_weights(discount: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    # (K, K) with `discount^(s - t)` at [s, t]. Kept, so that a device is not sent the same numbers at every step.
    # Powers are made on the host in fp64, where 0.999 ** 16 keeps its digits, and rounded once.
    with torch.inference_mode(False):
        steps = torch.arange(_BLOCK, dtype=torch.float64)
        powers = torch.pow(discount, (steps[:, None] - steps[None, :]).clamp(min=0)).tril()
        return powers.to(dtype=dtype, device=device)


def _suffix_sum(values: torch.Tensor, discount: float, out: torch.Tensor | None = None) -> torch.Tensor:
    values = values.contiguous()
    batch, length = values.shape
    n_blocks = -(-length // _BLOCK)
    if n_blocks * _BLOCK != length:
        values = F.pad(values, (0, n_blocks * _BLOCK - length))
    blocks, weights = values.view(-1, _BLOCK), _block_weights(discount, values.dtype, values.device)
    fits = out is not None and out.numel() == values.numel()
    sums = torch.mm(blocks, weights, out=out.view(-1, _BLOCK)) if out is not None and fits else blocks @ weights
    if n_blocks > 1:
        # What a block passes to the one before it is again a discounted suffix sum, over block totals.
        starts = _suffix_sum(sums[:, 0].view(batch, n_blocks), discount**_BLOCK)  # (B, N)
        carry = F.pad(starts[:, 1:], (0, 1)).view(-1, 1)  # (B * N, 1)
        sums.addcmul_(carry, weights[-1:] * discount)
    sums = sums.view(batch, n_blocks * _BLOCK)[:, :length]
    return sums if out is None or fits else out.copy_(sums)


def suffix_sum(values: torch.Tensor, discount: float, out: torch.Tensor | None = None) -> torch.Tensor:
    """[`discounted_suffix_sum`] of fp32 or fp64 `values`, into `out` if that is given; with discount 0, `values` itself."""
    if discount == 0.0:
        return values if out is None else out.copy_(values)
    if values.device.type == "cpu":
        with torch.autocast("cpu", enabled=False):
            return _suffix_sum(values, discount, out)
    # Matrix products follow global settings that trade digits for speed. TF32 on CUDA does not touch fp64, and
    # autocast is switched off.
    with torch.autocast(values.device.type, enabled=False):
        sums = _suffix_sum(values.to(wide_dtype(values.device)), discount)
    return sums.to(values.dtype) if out is None else out.copy_(sums)


def discounted_suffix_sum(values: torch.Tensor, discount: float) -> torch.Tensor:
    r"""
    Discounted sum of this and all later positions: `y_t = sum_{s >= t} discount^(s - t) * values_s`.

    The recursion `y_t = values_t + discount * y_{t+1}` is evaluated as one small triangular matrix product inside
    blocks of positions and the same operation over the block totals, so that there is no loop over tokens.

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
    values = _float(values)
    return values.clone() if discount == 0.0 else suffix_sum(values, discount)


def discount_kl(per_token_kl: torch.Tensor, mask: torch.Tensor, discount: float) -> torch.Tensor:
    r"""
    Discounted KL-to-go: `sum_{s >= t} discount^(s - t) * kl_s` within each sequence.

    Masked tokens add nothing and get 0. They do keep their place: the exponent counts positions.

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
        suffix_sum(select(_float(kl), chosen), discount, result)
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
    Token-weighted mean of each sequence's group: sum over the group's tokens divided by their number.

    It takes sums rather than tokens so that sequences of one group may come from different processes.

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
    # Number the groups from 0 on. Not by `torch.unique`, whose result has a size that a device would be waited for.
    ordered, order = group_ids.sort()
    numbers = F.pad((ordered[1:] != ordered[:-1]).long(), (1, 0)).cumsum(0) if len(order) else order
    index = torch.empty_like(order).scatter_(0, order, numbers)
    totals = torch.zeros(len(order), dtype=dtype, device=sums.device)
    group_sums = totals.index_add(0, index, sums.to(dtype))
    group_counts = totals.index_add(0, index, counts.to(dtype))
    return (group_sums / group_counts.clamp(min=1.0))[index].to(_float(sums).dtype)


def kl_adjustment(
    per_token_kl: torch.Tensor, mask: torch.Tensor, coef: float | torch.Tensor, mean: float | torch.Tensor
) -> torch.Tensor:
    r"""
    What the KL penalty adds to the advantage of each token: `coef * (mean - kl_t)` on unmasked tokens, 0 elsewhere.

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
    kl = _float(per_token_kl.detach())
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

    `mean` is the mean of `kl_t` over the whole mask, so the penalty moves credit between tokens and leaves its total
    as it was. With `discount > 0` each `kl_t` is first replaced by its KL-to-go, see [`discount_kl`].

    Args:
        advantages (`torch.Tensor`):
            Shape `(B,)`, one per sequence, or `(B, T)`. Gradients flow to it. Masked positions are left as they are.
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
    advantages = _float(advantages if advantages.ndim == 2 else advantages.unsqueeze(1))
    kl = discount_kl(per_token_kl.detach(), mask, discount)
    return advantages + kl_adjustment(kl, mask, coef, masked_mean(kl, mask))


def masked_moments(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """
    Count, sum and sum of squares over the unmasked positions, to be added over processes before whitening.

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
    Scale to unit variance, with moments that may come from more than these values: `(v - mean) / sqrt(var + eps)`.

    Args:
        values (`torch.Tensor`):
            Any shape. Gradients flow to it, not through the moments.
        mask (`torch.Tensor`):
            The same shape, 1 = counts.
        moments (`torch.Tensor`):
            [`masked_moments`], summed over everything that should count, shape `(3,)`. The variance is the biased one.
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
    # In the dtype of the moments: a large mean rounded to fp32 would shift every value.
    whitened = (kept.to(moments.dtype) - mean) * torch.rsqrt(variance + eps)
    if not shift_mean:
        whitened = whitened + mean
    return _zero_masked(whitened.to(kept.dtype), mask)
