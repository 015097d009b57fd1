"""
Per-token estimates of KL(policy || reference).

Every function takes tensors and returns new tensors. The sign is the same everywhere: the log-ratio is policy minus
reference, so on tokens sampled from the policy it is positive on average.

To add an estimator, write one function of the log-ratio and decorate it with [`register_kl_estimator`].
"""

from collections.abc import Callable, KeysView

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from ._tensors import check_same_shape as check_same_shape
from ._tensors import wide_dtype as wide_dtype
from .totals import kl_totals as kl_totals
from .totals import sum_kl_per_sequence as sum_kl_per_sequence


KLEstimator = Callable[[torch.Tensor], torch.Tensor]

_ESTIMATORS: dict[str, KLEstimator] = {}
# Names of all registered estimators, in the order of registration. This view also shows those registered later.
KL_ESTIMATORS: KeysView[str] = _ESTIMATORS.keys()
KL_UNITS: tuple[str, ...] = ("sequence", "token")

# exp(20) = 4.9e8 exceeds any KL that matters in practice, and a sum of such values over a whole batch still fits fp32.
MAX_LOG_RATIO = 20.0

# Bound of the log-ratio itself, for tokens to which one of the two models gives probability 0. Its square (1e10, in
# `k2`) is finite, and no log-ratio of two finite log-probs of a language model comes near it.
MAX_ABS_LOG_RATIO = 1e5


def _upcast(tensor: torch.Tensor) -> torch.Tensor:
    upcast = tensor.float()
    if tensor.dtype == torch.float16 and upcast.requires_grad:
        # A gradient such as exp(15) is finite here, but becomes inf when autograd casts it back to fp16.
        largest = torch.finfo(torch.float16).max
        upcast.register_hook(lambda grad: grad.clamp(-largest, largest))  # type: ignore[no-untyped-call]
    return upcast


def _log_ratio(logps: torch.Tensor, ref_logps: torch.Tensor) -> torch.Tensor:
    logps, ref_logps = _upcast(logps), _upcast(ref_logps)
    # Two equal infinities mean that both models rule the token out, so there is no drift. Only this case is replaced:
    # a NaN in an input must stay visible to the caller.
    same_inf = torch.isinf(logps) & (logps == ref_logps)
    log_ratio = torch.where(same_inf, 0.0, logps - ref_logps)
    return log_ratio.clamp(-MAX_ABS_LOG_RATIO, MAX_ABS_LOG_RATIO)


def register_kl_estimator(name: str) -> Callable[[KLEstimator], KLEstimator]:
    """
    Function decorator that makes an estimator available by name.

    The function maps the log-ratio `log pi(token) - log pi_ref(token)`, in fp32 and of shape `(B, T)`, to the KL of
    each token. The log-ratio lies within `±MAX_ABS_LOG_RATIO`; a function that takes its exponential
    should limit it to `MAX_LOG_RATIO` first.

    Args:
        name (`str`):
            Name for [`estimate_kl`], and for `kl_estimator` in a config.

    Example:

    ```python
    >>> import torch
    >>> from trl_klx.maths.estimators import estimate_kl, register_kl_estimator


    >>> @register_kl_estimator("huber")
    ... def huber(log_ratio):
    ...     return torch.where(log_ratio.abs() < 1, 0.5 * log_ratio.square(), log_ratio.abs() - 0.5)


    >>> estimate_kl(torch.tensor([[-1.0, -1.0]]), torch.tensor([[-3.0, -1.5]]), "huber")
    tensor([[1.5000, 0.1250]])
    ```
    """

    def register(function: KLEstimator) -> KLEstimator:
        known = _ESTIMATORS.get(name, function)
        taken, ours = (f"{each.__module__}.{each.__qualname__}" for each in (known, function))
        # Running a notebook cell again defines the same function again. Only a different function is a conflict.
        if taken != ours:
            raise ValueError(f"KL estimator name {name!r} is taken by {taken}. Choose another name for {ours}.")
        _ESTIMATORS[name] = function
        return function

    return register


@register_kl_estimator("k1")
def _k1(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio


@register_kl_estimator("k2")
def _k2(log_ratio: torch.Tensor) -> torch.Tensor:
    return 0.5 * log_ratio.square()


# The exponential estimators limit every occurrence of the log-ratio, not only the one inside `exp`: beyond the limit,
# an unlimited linear term alone would have a gradient of the wrong sign. `expm1` keeps the digits that `exp(x) - 1`
# loses near 0, where training spends most of its time, and the last clamp removes negative rounding errors.


@register_kl_estimator("k3")
def _k3(log_ratio: torch.Tensor) -> torch.Tensor:
    log_ratio = log_ratio.clamp(min=-MAX_LOG_RATIO)
    return (torch.expm1(-log_ratio) + log_ratio).clamp(min=0.0)


@register_kl_estimator("abs")
def _abs(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.abs()


@register_kl_estimator("full")
def _full(log_ratio: torch.Tensor) -> torch.Tensor:
    raise ValueError(
        "KL estimator 'full' needs the whole distributions, not the log-probs of the sampled tokens. Use "
        "`estimate_full_kl`."
    )


@register_kl_estimator("trlx")
def _trlx(log_ratio: torch.Tensor) -> torch.Tensor:
    log_ratio = log_ratio.clamp(max=MAX_LOG_RATIO)
    return (torch.expm1(log_ratio) - log_ratio).clamp(min=0.0)


@register_kl_estimator("importance")
def _importance(log_ratio: torch.Tensor) -> torch.Tensor:
    log_ratio = log_ratio.clamp(max=MAX_LOG_RATIO)
    return log_ratio.exp() * log_ratio


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

    The computation is in fp32. `lr` is limited to `±MAX_ABS_LOG_RATIO`, and to `MAX_LOG_RATIO` on the side where its
    exponential grows. Inside these limits values are exact; beyond them the value is the one at the limit and the
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
    if kind not in _ESTIMATORS:
        raise ValueError(f"Unknown KL estimator {kind!r}. Choose one of {', '.join(KL_ESTIMATORS)}.")
    return _ESTIMATORS[kind](_log_ratio(logps, ref_logps))


def center_log_ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    r"""
    `1 - exp(-max(lr, -2))`, which tells how a change of the policy moves the KL.

    To first order it is the log-ratio itself. But its mean over the policy's samples is 0 in every state where `lr`
    stays above -2, because that of `exp(-lr)` is the sum of the reference's probabilities. So it does not correlate
    with what is the same for all tokens of a state: the error of a baseline, or a KL that differs between prompts.
    Without the limit a few rare tokens would outweigh all others.

    Args:
        log_ratio (`torch.Tensor`):
            `lr = logps - ref_logps` of sampled tokens, of any shape.
    """
    return -torch.expm1(-log_ratio.clamp(min=-2.0))


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
    # Names are reused and deleted so that at most three (n, V) tensors are alive at once.
    log_ratio = logps - ref_logps
    del ref_logps
    probs = logps.exp()
    del logps
    # 0 * log 0 is 0. Filling the log-ratio instead of the product also keeps NaN out of the gradient.
    log_ratio = log_ratio.masked_fill_(probs == 0, 0.0).clamp_(max=MAX_ABS_LOG_RATIO)
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
    `chunk_size` at a time, so that no tensor of shape `(B, T, V)` exists. For the same reason, the backward pass
    computes a chunk's logits again.

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
    [`estimate_full_kl`], together with the log-probs of the sampled tokens, which the same logits provide.

    Args:
        tokens (`torch.Tensor` or `None`):
            Token sampled at each position, shape `hidden.shape[:-1]`.
        hidden, ref_hidden, head, ref_head, chunk_size:
            See [`estimate_full_kl`].

    Returns:
        `tuple[torch.Tensor, ...]`: The KL and, if `tokens` are given, their log-probs under policy and reference; all
        fp32 and of shape `hidden.shape[:-1]`.
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

    flat, ref_flat = hidden.reshape(-1, hidden.shape[-1]), ref_hidden.reshape(-1, ref_hidden.shape[-1])
    # Written to as the chunks are done. A list of small results would lie between the large tensors of the chunks, and
    # the memory of a CPU process would grow by one of those with every chunk.
    results = torch.empty(1 if tokens is None else 3, shape.numel(), device=hidden.device)
    for start in range(0, shape.numel(), chunk_size):
        rows = slice(start, start + chunk_size)
        arguments = (flat[rows], ref_flat[rows], head, ref_head, None if tokens is None else tokens.reshape(-1)[rows])
        if torch.is_grad_enabled():
            chunk = checkpoint(_full_kl_chunk, *arguments, use_reentrant=False, preserve_rng_state=False)
        else:
            chunk = _full_kl_chunk(*arguments)
        for index, part in enumerate(chunk):
            results[index, rows] = part
    return tuple(results.reshape(-1, *shape))
