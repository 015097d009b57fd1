"""Loss terms that TRL's trainers do not have: log-probs in, per-token terms out."""

import torch

from .estimators import MAX_LOG_RATIO, check_same_shape, estimate_kl


def clipped_surrogate(
    logps: torch.Tensor,
    old_logps: torch.Tensor,
    advantages: torch.Tensor,
    epsilon_low: float,
    epsilon_high: float,
) -> torch.Tensor:
    """
    PPO's clipped surrogate per token, `min(r A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A)` with
    `r = exp(logps - old_logps)` (Schulman et al. 2017, equation 7). Maximise it. On policy, its gradient is `A` times
    the gradient of `logps`.

    Args:
        logps (`torch.Tensor` of shape `(B, T)`):
            Log-probs of the current policy. Gradients flow only through these.
        old_logps (`torch.Tensor` of shape `(B, T)`):
            Log-probs of the policy that sampled the tokens.
        advantages (`torch.Tensor` of shape `(B, T)`):
            Per-token advantages.
        epsilon_low (`float`):
            Lower clipping range.
        epsilon_high (`float`):
            Upper clipping range.

    Returns:
        `torch.Tensor` of shape `(B, T)`: Surrogate of each token.
    """
    if not logps.shape == old_logps.shape == advantages.shape:
        raise ValueError(
            f"`logps` {tuple(logps.shape)}, `old_logps` {tuple(old_logps.shape)} and `advantages` "
            f"{tuple(advantages.shape)} must have the same shape."
        )
    ratio = torch.exp(logps - old_logps.detach())
    clipped = ratio.clamp(1.0 - epsilon_low, 1.0 + epsilon_high)
    advantages = advantages.detach()
    return torch.minimum(ratio * advantages, clipped * advantages)


def kl_loss_terms(
    logps: torch.Tensor, old_logps: torch.Tensor | None, ref_logps: torch.Tensor, kind: str
) -> torch.Tensor:
    r"""
    Per-token KL loss whose expected gradient is that of KL(policy || reference) at the states of the rollout.

    With `lr = logps - ref_logps` and `r = exp(logps - old_logps)`:

    - `"k2"`: `stop_gradient(r) * lr^2 / 2`. The gradient of `lr^2 / 2` is `lr` times that of `logps`, and the ratio
      moves the expectation from the rollout's policy to the current one.
    - `"k3"`: `r * (exp(-lr) - 1 + lr)`. The gradient of the ratio is needed even where the ratio is 1: without it the
      term follows the forward KL(reference || policy).

    Neither form works for `"k1"`: its gradient is that of `logps`, which is zero in expectation.

    Args:
        logps (`torch.Tensor` of shape `(B, T)`):
            Log-probs of the current policy. Gradients flow only through these.
        old_logps (`torch.Tensor` of shape `(B, T)`, *optional*):
            Log-probs of the policy that sampled the tokens. If unset, the current policy.
        ref_logps (`torch.Tensor` of shape `(B, T)`):
            Log-probs of the reference.
        kind (`str`):
            `"k2"` or `"k3"`.

    Returns:
        `torch.Tensor` of shape `(B, T)`: Term of each token, fp32, to be minimised.
    """
    if kind not in ("k2", "k3"):
        raise ValueError(f"A KL term in the loss must be 'k2' or 'k3', but got {kind!r}.")
    old_logps = logps.detach() if old_logps is None else old_logps.detach()
    check_same_shape(logps=logps, old_logps=old_logps, ref_logps=ref_logps)
    ratio = torch.exp((logps.float() - old_logps.float()).clamp(max=MAX_LOG_RATIO))
    return (ratio.detach() if kind == "k2" else ratio) * estimate_kl(logps, ref_logps.detach(), kind)


def grpo_token_weights(
    mask: torch.Tensor, loss_type: str, max_completion_length: int, tokens_per_step: torch.Tensor, accumulation: float
) -> torch.Tensor:
    """
    Weight of each token in TRL's GRPO loss: `loss = (weights * per_token_loss).sum()`.

    Args:
        mask (`torch.Tensor` of shape `(B, T)`):
            1 = counts.
        loss_type (`str`):
            TRL's `loss_type`.
        max_completion_length (`int`):
            TRL's `max_completion_length`, by which `"dr_grpo"` divides.
        tokens_per_step (`torch.Tensor`):
            0-dim: tokens of one optimizer step per process, by which `"dapo"`, `"cispo"` and `"vespo"` divide.
        accumulation (`float`):
            Micro-batches per optimizer step, by which the others divide their mean.

    Returns:
        `torch.Tensor` of shape `(B, T)`: fp32, 0 where masked.
    """
    mask = mask.float()
    if loss_type in ("grpo", "sapo"):
        return mask / mask.sum(-1, keepdim=True).clamp(min=1.0) / (mask.size(0) * accumulation)
    if loss_type == "bnpo":
        return mask / (mask.sum().clamp(min=1.0) * accumulation)
    if loss_type == "dr_grpo":
        return mask / (mask.size(0) * max_completion_length * accumulation)
    if loss_type == "luspo":
        return mask / (mask.size(0) * accumulation)
    if loss_type in ("dapo", "cispo", "vespo"):
        return mask / tokens_per_step
    raise ValueError(f"Unknown loss type {loss_type!r}.")
