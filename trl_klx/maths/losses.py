"""Loss terms that TRL's trainers do not have: log-probs in, per-token terms out."""

import torch


def clipped_surrogate(
    logps: torch.Tensor,
    old_logps: torch.Tensor,
    advantages: torch.Tensor,
    epsilon_low: float,
    epsilon_high: float,
) -> torch.Tensor:
    """
    PPO's clipped surrogate per token, `min(r A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A)` with
    `r = exp(logps - old_logps)` (Schulman et al. 2017, equation 7). Its value is to be maximised; on policy its gradient
    is `A` times that of `logps`.

    Args:
        logps (`torch.Tensor` of shape `(B, T)`):
            Log-probs of the current policy; gradients flow through these alone.
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
