"""
Per-token estimates of KL(policy || reference), and the sums that turn them into one number.

Every function takes tensors and returns new tensors. The sign is the same everywhere: the log-ratio is policy minus
reference, so on tokens sampled from the policy it is positive on average.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


KL_ESTIMATORS: tuple[str, ...] = ("k1", "k2", "k3", "abs", "full", "trlx", "importance")
KL_UNITS: tuple[str, ...] = ("sequence", "token")

# exp(20) = 4.9e8 is far beyond any KL worth telling apart, and leaves fp32 room for a sum over a whole batch.
MAX_LOG_RATIO = 20.0

# Bound of the log-ratio itself, for tokens that one of the two models gives probability 0. Its square (1e10, in `k2`)
# is finite, and no log-ratio of two finite log-probs of a language model comes near it.
MAX_ABS_LOG_RATIO = 1e5


def check_same_shape(ndim: int | None = None, **tensors: torch.Tensor) -> None:
    """
    Raise if the tensors differ in shape, because broadcasting would turn a mistake into a plausible number.

    Args:
        ndim (`int`, *optional*):
            Number of dimensions that all of them must have.
        **tensors (`torch.Tensor`):
            The tensors, by the name to show in the message.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    text = ", ".join(f"`{name}` {shape}" for name, shape in shapes.items())
    if len(set(shapes.values())) > 1:
        raise ValueError(f"Shapes must be equal, but got {text}.")
    if ndim is not None and any(len(shape) != ndim for shape in shapes.values()):
        raise ValueError(f"Expected {ndim} dimensions, but got {text}.")


def wide_dtype(device: torch.device) -> torch.dtype:
    """The widest float for sums on this device: fp64, except where the backend may have none (MPS, XPU)."""
    return torch.float64 if device.type in ("cpu", "cuda") else torch.float32


def _upcast(tensor: torch.Tensor) -> torch.Tensor:
    upcast = tensor.float()
    if tensor.dtype == torch.float16 and upcast.requires_grad:
        # A gradient such as exp(15) is finite here and becomes inf when autograd casts it back to fp16.
        largest = torch.finfo(torch.float16).max
        upcast.register_hook(lambda grad: grad.clamp(-largest, largest))  # type: ignore[no-untyped-call]
    return upcast


def _log_ratio(logps: torch.Tensor, ref_logps: torch.Tensor) -> torch.Tensor:
    logps, ref_logps = _upcast(logps), _upcast(ref_logps)
    # Two equal infinities mean that both models rule the token out: no drift. Only this case is replaced, so that a
    # NaN that was already in an input stays visible to the caller.
    same_inf = torch.isinf(logps) & (logps == ref_logps)
    log_ratio = torch.where(same_inf, 0.0, logps - ref_logps)
    return log_ratio.clamp(-MAX_ABS_LOG_RATIO, MAX_ABS_LOG_RATIO)


def estimate_kl(logps: torch.Tensor, ref_logps: torch.Tensor, kind: str = "k1") -> torch.Tensor:
    r"""
    Estimate KL(policy || reference) at each sampled token, from the log-probs of the sampled tokens alone.

    With `lr = logps - ref_logps`:

    - `"k1"`: `lr`
    - `"k2"`: `lr^2 / 2`
    - `"k3"`: `exp(-lr) - 1 + lr`
    - `"abs"`: `|lr|`
    - `"trlx"`: `exp(lr) - 1 - lr`
    - `"importance"`: `exp(lr) * lr`

    On samples from the policy `k1` and `k3` are unbiased; `importance` is unbiased only on samples from the reference.
    See [Schulman (2020)](http://joschu.net/blog/kl-approx.html) for `k1`, `k2` and `k3`.

    The maths is fp32. `lr` is limited to `±MAX_ABS_LOG_RATIO`, and to `MAX_LOG_RATIO` on the side where its
    exponential grows; inside these limits values are exact, beyond them the value is the one at the limit and the
    gradient is 0. So no input yields inf, and only a NaN input yields NaN (`inf - inf` counts as no drift).

    Args:
        logps (`torch.Tensor`):
            Log-probs of the sampled tokens under the policy, shape `(B, T)`. Gradients flow to it; detach it to
            penalise through rewards or advantages.
        ref_logps (`torch.Tensor`):
            Log-probs of the same tokens under the reference, shape `(B, T)`. Gradients flow to it as well.
        kind (`str`, *optional*, defaults to `"k1"`):
            One of [`KL_ESTIMATORS`] except `"full"`, which needs [`estimate_full_kl`].

    Returns:
        `torch.Tensor`: Per-token KL in nats, fp32, shape `(B, T)`.
    """
    check_same_shape(logps=logps, ref_logps=ref_logps)
    if kind == "full":
        raise ValueError(
            "KL estimator 'full' needs the whole distributions, not the log-probs of the sampled tokens. Use "
            "`estimate_full_kl`."
        )
    if kind not in KL_ESTIMATORS:
        raise ValueError(f"Unknown KL estimator {kind!r}. Choose one of {', '.join(KL_ESTIMATORS)}.")

    log_ratio = _log_ratio(logps, ref_logps)
    if kind == "k1":
        return log_ratio
    if kind == "k2":
        return 0.5 * log_ratio.square()
    if kind == "abs":
        return log_ratio.abs()
    # In the exponential estimators every occurrence of the log-ratio is limited, not only the one inside `exp`: the
    # linear term left alone would have a gradient of the wrong sign.
    if kind == "k3":
        log_ratio = log_ratio.clamp(min=-MAX_LOG_RATIO)
        # `expm1` keeps the digits that `exp(x) - 1` loses near 0, where training spends its time. The last clamp
        # removes negative rounding residue.
        return (torch.expm1(-log_ratio) + log_ratio).clamp(min=0.0)
    log_ratio = log_ratio.clamp(max=MAX_LOG_RATIO)
    if kind == "trlx":
        return (torch.expm1(log_ratio) - log_ratio).clamp(min=0.0)
    return log_ratio.exp() * log_ratio


def _full_kl_chunk(
    hidden: torch.Tensor,
    ref_hidden: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    ref_head: Callable[[torch.Tensor], torch.Tensor],
    tokens: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    logps = F.log_softmax(head(hidden), dim=-1, dtype=torch.float32)  # (n, V)
    ref_logps = F.log_softmax(ref_head(ref_hidden), dim=-1, dtype=torch.float32)  # (n, V)
    check_same_shape(policy_logits=logps, reference_logits=ref_logps)
    sampled = (
        () if tokens is None else tuple(x.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) for x in (logps, ref_logps))
    )
    # Names are reused and dropped so that at most three (n, V) tensors are alive at once.
    log_ratio = logps - ref_logps
    del ref_logps
    probs = logps.exp()
    del logps
    # 0 * log 0 is 0. Filling the log-ratio, rather than the product, keeps NaN out of the gradient too.
    log_ratio = log_ratio.masked_fill(probs == 0, 0.0).clamp(max=MAX_ABS_LOG_RATIO)
    return (probs * log_ratio).sum(dim=-1).clamp(min=0.0), *sampled


def estimate_full_kl(
    hidden: torch.Tensor,
    ref_hidden: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    ref_head: Callable[[torch.Tensor], torch.Tensor],
    chunk_size: int = 256,
) -> torch.Tensor:
    r"""
    Exact KL(policy || reference) of the next-token distribution at each position.

    `kl = sum_v pi(v) * (log pi(v) - log ref(v))`, the expectation of `k1` over the token. Positions are processed
    `chunk_size` at a time, so that no tensor of shape `(B, T, V)` exists; with gradients enabled a chunk's logits are
    computed again in the backward pass for the same reason.

    Args:
        hidden (`torch.Tensor`):
            Last hidden states of the policy, shape `(..., H)`. Gradients flow to it and to the parameters of `head`.
        ref_hidden (`torch.Tensor`):
            Last hidden states of the reference, shape `(..., H_ref)`, with the same leading shape.
        head (`Callable`):
            Maps `(n, H)` to the policy's logits `(n, V)`, already divided by the sampling temperature. A token whose
            logit is `-inf` contributes 0.
        ref_head (`Callable`):
            The same for the reference.
        chunk_size (`int`, *optional*, defaults to `256`):
            Number of positions per chunk. Peak memory is about three fp32 tensors of `(chunk_size, V)`.

    Returns:
        `torch.Tensor`: KL in nats, fp32, never negative, shape `hidden.shape[:-1]`.
    """
    return full_kl_and_logps(hidden, ref_hidden, head, ref_head, None, chunk_size)[0]


def full_kl_and_logps(
    hidden: torch.Tensor,
    ref_hidden: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    ref_head: Callable[[torch.Tensor], torch.Tensor],
    tokens: torch.Tensor | None,
    chunk_size: int = 256,
) -> tuple[torch.Tensor, ...]:
    """
    [`estimate_full_kl`], and beside it what it has at hand: the log-probs of the tokens that were sampled.

    Args:
        tokens (`torch.Tensor` or `None`):
            Token sampled at each position, shape `hidden.shape[:-1]`.
        hidden, ref_hidden, head, ref_head, chunk_size:
            As in [`estimate_full_kl`].

    Returns:
        `tuple[torch.Tensor, ...]`: The KL and, if `tokens` are given, their log-probs under policy and reference; all fp32
        and of shape `hidden.shape[:-1]`.
    """
    if hidden.ndim == 0 or ref_hidden.ndim == 0 or hidden.shape[:-1] != ref_hidden.shape[:-1]:
        raise ValueError(
            "The leading shapes of `hidden` and `ref_hidden` must be equal, but got "
            f"`hidden` {tuple(hidden.shape)}, `ref_hidden` {tuple(ref_hidden.shape)}."
        )
    if chunk_size < 1:
        raise ValueError(f"`chunk_size` must be at least 1, but got {chunk_size}.")
    shape = hidden.shape[:-1]
    if shape.numel() == 0:
        return (hidden.new_zeros(shape, dtype=torch.float32),) * (1 if tokens is None else 3)

    flat = torch.split(hidden.reshape(-1, hidden.shape[-1]), chunk_size)
    ref_flat = torch.split(ref_hidden.reshape(-1, ref_hidden.shape[-1]), chunk_size)
    token_chunks = [None] * len(flat) if tokens is None else torch.split(tokens.reshape(-1), chunk_size)
    results: list[tuple[torch.Tensor, ...]] = []
    for chunk, ref_chunk, token_chunk in zip(flat, ref_flat, token_chunks, strict=True):
        arguments = (chunk, ref_chunk, head, ref_head, token_chunk)
        if torch.is_grad_enabled():
            results.append(checkpoint(_full_kl_chunk, *arguments, use_reentrant=False, preserve_rng_state=False))
        else:
            results.append(_full_kl_chunk(*arguments))
    return tuple(torch.cat(parts).reshape(shape) for parts in zip(*results, strict=True))


def sum_kl_per_sequence(per_token_kl: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """
    Sum the KL over the unmasked tokens of each sequence.

    Args:
        per_token_kl (`torch.Tensor`):
            KL per token, shape `(B, T)`. Masked positions may hold anything, NaN included. Gradients flow to it.
        mask (`torch.Tensor`):
            Shape `(B, T)`, 1 = counts.

    Returns:
        `torch.Tensor`: KL per sequence in nats, fp32, shape `(B,)`; 0 for a sequence without unmasked tokens.
    """
    check_same_shape(2, per_token_kl=per_token_kl, mask=mask)
    return torch.where(mask.bool(), per_token_kl.float(), 0.0).sum(dim=1)


def kl_totals(per_token_kl: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """
    The three sums from which the mean KL per sequence and per token is made.

    They are sums, not means, so that adding them over micro-batches and processes gives the totals of the whole batch
    whatever the lengths in each part.

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
