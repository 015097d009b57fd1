"""The LM head as a function of hidden states, for the exact KL over the whole vocabulary."""

import torch
from accelerate import Accelerator
from accelerate.utils import gather
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.nn import functional

from ..maths.estimators import estimate_full_kl, full_kl_and_logps
from ..references.base import KLReference
from ..references.peft_adapters import causal_lm, unwrapped
from ..references.sharding import is_sharded, join_parts
from .rollout import Head, Scored


LARGEST_HEAD_ERROR = 0.05  # nats; rounding in bf16 stays well below it

# The exact KL of each token, and the log-probs of the sampled tokens under policy and reference.
ExactPass = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]


def lm_head(model: nn.Module, temperature: float, copied: bool = False) -> Head:
    """
    The map from hidden states to fp32 logits at the sampling temperature. It keeps the weights that the head has now,
    because an adapter may bring its own head, which is there only while the adapter is active. Gradients reach the
    head's weights unless they are sharded. With `copied`, later changes to the weights do not reach the map, nor do
    gradients reach them.
    """
    base = causal_lm(model)
    config = base.config.get_text_config()
    head = base.get_output_embeddings()
    weight, bias = join_parts(head.weight), getattr(head, "bias", None)
    bias = None if bias is None else join_parts(bias)
    if copied:
        weight, bias = weight.detach().clone(), None if bias is None else bias.detach().clone()
    cap = getattr(config, "final_logit_softcapping", None)

    def project(hidden: torch.Tensor) -> torch.Tensor:
        logits = functional.linear(hidden.to(weight.dtype), weight, bias).float()
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits.div_(temperature)

    return project


def head_obstacle(model: nn.Module) -> str | None:
    """What about a model keeps its logits from being rebuilt from its hidden states, as far as its modules show it."""
    base = causal_lm(model)
    head = base.get_output_embeddings()
    if isinstance(head, BaseTunerLayer):
        return "an adapter on the LM head (`target_modules`), which changes logits beyond the head's weights"
    if base.base_model is base:
        return f"{type(base).__name__}, which has no backbone apart from its LM head"
    weight = getattr(head, "weight", None)
    if weight is None or not weight.is_floating_point():
        return f"the LM head of {type(base).__name__}, which has no plain weights"
    return None


def exact_kl_obstacle(policy: nn.Module, reference: KLReference, accelerator: Accelerator) -> str | None:
    """What keeps a run from computing the exact KL, as far as it is known before the first forward pass."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None and plugin.fsdp_version == 1:
        return "FSDP version 1, which flattens the weights that it needs one by one"
    with reference.active() as model:
        return head_obstacle(policy) or head_obstacle(unwrapped(model))


def trains_head(model: nn.Module) -> bool:
    """Whether the LM head's weights are trained."""
    trained: bool = causal_lm(model).get_output_embeddings().weight.requires_grad
    return trained


def check_trains_through_head(model: nn.Module) -> None:
    """Refuse an exact KL in the loss where no gradient would reach the LM head that is trained."""
    if trains_head(model) and is_sharded(causal_lm(model).get_output_embeddings().weight):
        raise ValueError(
            "`kl_estimator='full'` cannot be used with `kl_placement='loss'` while FSDP2 or ZeRO-3 shards an LM head "
            "that is trained: the term would put no gradient on it. Use 'k3', or train an adapter."
        )


@torch.no_grad()
def lm_head_error(
    model: nn.Module, temperature: float, scored: Scored, tokens: torch.Tensor, mask: torch.Tensor
) -> float | None:
    """
    How far the log-probs that [`lm_head`] gives for one completion are from those of the trainer, in nats; `None` if
    no process has a completion. Some architectures scale their logits; one that is not known here must not be measured
    wrongly. All processes get the same answer.
    """
    assert scored.hidden is not None and scored.logps is not None
    # First what every process must take part in where the head is sharded.
    project = lm_head(model, temperature)
    rows = mask.bool().any(dim=1).nonzero().flatten()[:1]
    error = torch.full((1,), -1.0, device=mask.device)
    if len(rows):
        logps = torch.log_softmax(project(scored.hidden[rows]), dim=-1)
        logps = logps.gather(-1, tokens[rows].unsqueeze(-1)).squeeze(-1)  # (1, T)
        error[0] = (logps - scored.logps[rows]).abs()[mask[rows].bool()].median()
    error = torch.where(error.isfinite(), error, -1.0)  # a NaN proves nothing
    largest = float(gather(error).max())
    return None if largest < 0.0 else largest


def exact_kl_of_passes(
    policy: Scored, reference: Scored, heads: tuple[Head, Head], tokens: torch.Tensor | None = None
) -> ExactPass:
    """
    The exact KL of two passes, and the log-probs of the sampled tokens. Where the reference's pass has none, both come
    from the same logits, so that rounding affects them alike.
    """
    assert policy.hidden is not None and reference.hidden is not None
    if reference.logps is not None:
        return estimate_full_kl(policy.hidden, reference.hidden, *heads), policy.logps, reference.logps
    full, logps, reference_logps = full_kl_and_logps(policy.hidden, reference.hidden, *heads, tokens)
    return full, logps, reference_logps
