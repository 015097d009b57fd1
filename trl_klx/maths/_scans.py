"""
Fast paths for the formulas in [`advantages`] and [`gae`]: masking, work on a few rows at a time, blocked suffix sums.

None of them changes what a formula means. Each function says what it saves.
"""

import functools
import math
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F

from ._tensors import wide_dtype


# Positions per block of [`suffix_sum`]: large enough that the pass over block totals is negligible, small enough that
# the quadratic work inside a block is.
_BLOCK = 16

# Numbers per thread that [`by_rows`] processes at a time: 2 MB in fp32. A smaller chunk would add more calls than it
# saves memory traffic.
_CHUNK = 2**19


def at_least_fp32(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in fp32, or unchanged if it is fp64."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def selector(mask: torch.Tensor, values: torch.Tensor) -> torch.Tensor | None:
    """
    The mask as bool, for [`select`]. On CPU it is `None` if nothing is masked; on other devices this is not checked,
    because the check would wait for the device.
    """
    mask = mask.bool()
    if values.device.type == "cpu" and mask.numel() and mask.view(torch.uint8).amin() == 1:
        return None
    return mask


def select(values: torch.Tensor, mask: torch.Tensor | None, out: torch.Tensor | None = None) -> torch.Tensor:
    """
    `values` with 0 at masked positions, even where they hold NaN. `mask` is a [`selector`]; gradients do not flow.
    """
    if mask is None:
        return values
    if values.device.type != "cpu" or values.dtype != torch.float32:
        return torch.where(mask, values, values.new_zeros(()), out=out)
    # Multiplying the bits by 0 or 1 also turns NaN into 0, and is twice as fast as `torch.where` on CPU.
    bits = torch.mul(values.view(torch.int32), mask, out=None if out is None else out.view(torch.int32))
    return bits.view(torch.float32)


def by_rows(function: Callable[..., None], *tensors: torch.Tensor, outputs: int = 1) -> list[torch.Tensor]:
    """
    Apply a function that treats every row independently; on CPU, to a few rows at a time. A chain of cheap operations
    on large tensors is bound by memory traffic, and a few rows fit into the cache. Gradients stop here.

    Args:
        function (`Callable`):
            Takes `outputs` tensors to write to, fp32 and of shape `(b, T)`, and then rows of each of `tensors`.
        tensors (`torch.Tensor`):
            All of shape `(B, T)`.
        outputs (`int`, *optional*, defaults to `1`):
            Number of results.

    Returns:
        `list[torch.Tensor]`: The results for all rows; fp32 (fp64 if the first tensor is), shape `(B, T)`.
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


def has_no_holes(chosen: torch.Tensor | None) -> bool:
    """
    Whether every row of a [`selector`] is ones followed by zeros, so that [`packing_slots`] would move nothing.
    Checked on CPU only: on other devices the answer is `False`, because the check would wait for the device and moving
    is cheap there.
    """
    if chosen is None:
        return True
    if chosen.device.type != "cpu":
        return False
    steps = chosen.view(torch.int8).diff(dim=1)
    return not steps.numel() or bool(steps.amax() <= 0)


def packing_slots(mask: torch.Tensor) -> torch.Tensor:
    """
    The column to which each token moves when the unmasked tokens of a row are packed to its left, in order. All masked
    tokens share the last column, which is free in every row with a masked token.
    """
    return mask.cumsum(1).sub_(1).masked_fill_(~mask, mask.shape[1] - 1)


@functools.lru_cache(maxsize=64)
def _block_weights(discount: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    # (K, K) with `discount^(s - t)` at [s, t]. Cached, so that the same numbers are not sent to a device at every
    # step. The powers are computed on the host in fp64, where 0.999 ** 16 keeps its digits, and rounded once.
    with torch.inference_mode(False):
        steps = torch.arange(_BLOCK, dtype=torch.float64)
        powers = torch.pow(discount, (steps[:, None] - steps[None, :]).clamp(min=0)).tril()
        return powers.to(dtype=dtype, device=device)


def _blocked_suffix_sum(values: torch.Tensor, discount: float, out: torch.Tensor | None = None) -> torch.Tensor:
    values = values.contiguous()
    batch, length = values.shape
    n_blocks = -(-length // _BLOCK)
    if n_blocks * _BLOCK != length:
        values = F.pad(values, (0, n_blocks * _BLOCK - length))
    blocks, weights = values.view(-1, _BLOCK), _block_weights(discount, values.dtype, values.device)
    fits = out is not None and out.numel() == values.numel()
    sums = torch.mm(blocks, weights, out=out.view(-1, _BLOCK)) if out is not None and fits else blocks @ weights
    if n_blocks > 1:
        # What a block passes to the block before it is again a discounted suffix sum, this time over block totals.
        starts = _blocked_suffix_sum(sums[:, 0].view(batch, n_blocks), discount**_BLOCK)  # (B, N)
        carry = F.pad(starts[:, 1:], (0, 1)).view(-1, 1)  # (B * N, 1)
        sums.addcmul_(carry, weights[-1:] * discount)
    sums = sums.view(batch, n_blocks * _BLOCK)[:, :length]
    return sums if out is None or fits else out.copy_(sums)


def suffix_sum(values: torch.Tensor, discount: float, out: torch.Tensor | None = None) -> torch.Tensor:
    """
    `y_t = sum_{s >= t} discount^(s - t) * values_s` of fp32 or fp64 `values`, written to `out` if given. With discount
    0 the result is `values` itself.

    The recursion `y_t = values_t + discount * y_{t+1}` is evaluated as one small triangular matrix product inside
    blocks of positions, followed by the same operation over the block totals. No loop runs over tokens.
    """
    if discount == 0.0:
        return values if out is None else out.copy_(values)
    if values.device.type == "cpu":
        with torch.autocast("cpu", enabled=False):
            return _blocked_suffix_sum(values, discount, out)
    # Global settings may let matrix products trade digits for speed. TF32 on CUDA does not apply to fp64, and autocast
    # is disabled here.
    with torch.autocast(values.device.type, enabled=False):
        sums = _blocked_suffix_sum(values.to(wide_dtype(values.device)), discount)
    return sums.to(values.dtype) if out is None else out.copy_(sums)


def can_scan_over_holes(values: torch.Tensor, discount: float) -> bool:
    """
    Whether [`suffix_sum_over_holes`] works for `values`: on little-endian CPUs, as it reads bytes as bits, and where
    its weights are neither too large for fp32 (up to `discount^-16`) nor too small for fp64 (down to `discount^T`).
    """
    if values.device.type != "cpu" or sys.byteorder != "little" or discount < 0.5:
        return False
    return -math.log2(discount) * values.shape[1] <= 1000.0


@functools.lru_cache(maxsize=2)
def _pattern_weights(discount: float) -> tuple[torch.Tensor, torch.Tensor]:
    # For each of the 2^K patterns of a block's mask, where bit t is the mask of position t: (2^K, K) with
    # `discount^-(holes before t)`, infinite at holes, and (2^K,) with the log2 of `discount^tokens`. Together 4.5 MB.
    with torch.inference_mode(False):
        tokens = (torch.arange(2**_BLOCK)[:, None] >> torch.arange(_BLOCK)) & 1
        holes_before = (1 - tokens).cumsum(1) - (1 - tokens)
        powers = torch.pow(discount, -torch.arange(_BLOCK, dtype=torch.float64)).float()
        weights = torch.where(tokens.bool(), powers[holes_before], math.inf)
        return weights, tokens.sum(1).double() * math.log2(discount)


def _block_patterns(mask: torch.Tensor) -> torch.Tensor:
    """The mask of each block of a `(B, N * K)` mask as one number of K bits, shape `(B * N,)`."""
    # Eight bools are an int64 with bytes of 0 or 1. The product collects them as the bits of its highest byte, and two
    # such bytes make a block of 16. The mask is copied, because its storage may not be aligned to eight bytes.
    eights = mask.clone(memory_format=torch.contiguous_format).view(torch.int64) * 0x0102040810204080
    return eights.view(-1, 1).view(torch.uint8)[:, 7].contiguous().view(torch.int16).int() & 0xFFFF


def suffix_sum_over_holes(values: torch.Tensor, mask: torch.Tensor, discount: float) -> torch.Tensor:
    """
    [`suffix_sum`] of the unmasked tokens, as if the masked ones had been deleted; 0 where masked. It needs
    [`can_scan_over_holes`] and overwrites fp32 `values`, which may hold anything where masked.

    It saves moving the tokens together and back. `discount^(s - t)` counts holes as well. With `h_t` holes before `t`
    in its block, the right factor is that one times `discount^-h_s`, divided by `discount^-h_t`: weights before and
    after a sum that knows nothing of holes. They are looked up by the pattern of the block's mask. The weights of
    holes are infinite, so that dividing by them leaves 0.
    """
    batch, length = values.shape
    padding = -length % _BLOCK
    if padding:
        values, mask = F.pad(values, (0, padding)), F.pad(mask, (0, padding))
    patterns, (weights_of, logs_of) = _block_patterns(mask), _pattern_weights(discount)
    weights = weights_of.index_select(0, patterns)  # (B * N, K)
    values.view(-1, _BLOCK).mul_(weights)
    powers = _block_weights(discount, values.dtype, values.device)
    with torch.autocast("cpu", enabled=False):
        sums = select(values, mask, values).view(-1, _BLOCK) @ powers
    # The same over block totals, where a weight is `discount^(tokens before the block)`. The range of fp64 is wide
    # enough to weight a whole row at once.
    logs = logs_of.index_select(0, patterns).view(batch, -1)  # (B, N)
    scales = (logs.cumsum(1) - logs).exp2_()
    totals = (sums[:, 0].view(batch, -1) * scales).flip(1).cumsum(1).flip(1)
    carry = (F.pad(totals[:, 1:], (0, 1)) / scales).to(values.dtype)
    # What comes from later blocks is discounted to the start of this block, which is t positions too far.
    sums.addcmul_(carry.view(-1, 1), powers[:, 0].reciprocal())
    return sums.div_(weights).view(batch, -1)[:, :length]
