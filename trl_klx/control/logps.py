"""What one forward pass says about the completion tokens, and the exact KL between two of them."""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from accelerate.utils import is_peft_model, reduce
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.nn import functional
from trl.trainer import utils as trl_utils

from ..maths.estimators import estimate_full_kl, estimate_kl, full_kl_and_logps
from ..references.sharding import is_sharded, join_parts


# TRL's names for what projects hidden states to log-probs, and for how many words of the vocabulary it does at a time.
_PROJECTION, _TILE_WIDTH = "_ChunkedLogProbFunction", "_CHUNKED_LOGPROB_CHUNK_SIZE"
# What the projection returns after the log-probs, where its last argument asks for it.
_OPTIONAL_OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def _can_skip_lm_head() -> bool:
    """Whether this TRL projects by that name, and as [`_NoProjection`] expects."""
    if not hasattr(trl_utils, "add_fused_lm_head") or not hasattr(trl_utils, _PROJECTION):
        return False
    *_, last = inspect.signature(getattr(trl_utils, _PROJECTION).forward).parameters.values()
    return last.name == "outputs" and last.default == _OPTIONAL_OUTPUTS


CAN_SKIP_LM_HEAD = _can_skip_lm_head()


@dataclass
class Scored:
    """
    Attributes:
        logps (`torch.Tensor` of shape `(B, T)` or `None`):
            Log-probs of the completion tokens, in fp32; `None` if the pass ended before the LM head.
        hidden (`torch.Tensor` of shape `(B, T, H)` or `None`):
            Hidden states that predict the completion tokens, kept only for the `"full"` estimator.
    """

    logps: torch.Tensor | None
    hidden: torch.Tensor | None = None

    def detach(self) -> "Scored":
        hidden = None if self.hidden is None else self.hidden.detach()
        return Scored(None if self.logps is None else self.logps.detach().float(), hidden)


def causal_lm(model: nn.Module) -> nn.Module:
    return model.get_base_model() if is_peft_model(model) else model


@contextmanager
def captured_hidden(model: nn.Module, logits_to_keep: int) -> Iterator[list[torch.Tensor]]:
    """Collect the last hidden states at the positions that predict the last `logits_to_keep` tokens."""
    captured: list[torch.Tensor] = []

    def keep(module, args, output):
        hidden = output.last_hidden_state if hasattr(output, "last_hidden_state") else output[0]
        captured.append(hidden[:, -logits_to_keep - 1 : -1].detach())

    handle = causal_lm(model).base_model.register_forward_hook(keep)
    try:
        yield captured
    finally:
        handle.remove()


@contextmanager
def _trl_with(name: str, value: object) -> Iterator[None]:
    """Give a global of TRL's another value meanwhile, if it has it."""
    kept = getattr(trl_utils, name, None)
    if kept is not None:
        setattr(trl_utils, name, value)
    try:
        yield
    finally:
        if kept is not None:
            setattr(trl_utils, name, kept)


def narrow_tiles(device: torch.device) -> AbstractContextManager[None]:
    """
    Let TRL's LM head work on narrower tiles of logits meanwhile. Its own, of up to 4096 tokens and 32768 words, suit its
    kernel for GPUs. On a CPU, half a dozen tensors of such a size are most of the memory of a step, and far from any cache.
    """
    return _trl_with(_TILE_WIDTH, 512) if device.type == "cpu" else nullcontext()


class _NoProjection:
    """In the place of TRL's projection: all zeros."""

    @staticmethod
    def apply(hidden, *args):
        zeros = hidden.new_zeros(len(hidden), dtype=torch.float32)
        return zeros, *(zeros if name in args[-1] else None for name in _OPTIONAL_OUTPUTS)


def no_lm_head() -> AbstractContextManager[None]:
    """Stop TRL's forward passes at the last hidden states meanwhile; the log-probs that they return mean nothing."""
    return _trl_with(_PROJECTION, _NoProjection)


def lm_head(model: nn.Module, temperature: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """
    The map from hidden states to fp32 logits at the sampling temperature. It keeps the weights that the head has now:
    an adapter may bring a head of its own, which is there only while it is active.
    """
    model = causal_lm(model)
    config = model.config.get_text_config()
    head = model.get_output_embeddings()
    if isinstance(head, BaseTunerLayer):
        raise ValueError(
            "The 'full' KL cannot be used with an adapter on the LM head, which changes logits beyond its weights. Take "
            "the LM head out of `target_modules`, or use 'k3' (`kl_estimator`, `kl_statistic`)."
        )
    weight, bias = join_parts(head.weight), getattr(head, "bias", None)
    bias = None if bias is None else join_parts(bias)
    cap = getattr(config, "final_logit_softcapping", None)

    def project(hidden: torch.Tensor) -> torch.Tensor:
        logits = functional.linear(hidden.to(weight.dtype), weight, bias).float()
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits / temperature

    return project


def _on_any_process(model: nn.Module, count: int) -> int:
    """The sum of `count` over the processes that share the model's weights."""
    weight = causal_lm(model).get_output_embeddings().weight
    if not is_sharded(weight):
        return count
    return int(reduce(torch.tensor(float(count), device=weight.device), reduction="sum"))


def check_lm_head(
    model: nn.Module, temperature: float, scored: Scored, tokens: torch.Tensor, mask: torch.Tensor
) -> bool:
    """
    Compare the log-probs that [`lm_head`] gives for one completion with those of the trainer. Architectures scale their
    logits in ways of their own; one that is not known here must not be measured wrongly. Returns whether there was
    anything to compare.
    """
    # Before anything that may differ between processes, which must all take part where the head is sharded.
    project = lm_head(model, temperature)
    rows = mask.bool().any(dim=1).nonzero().flatten()[:1]
    found = bool(_on_any_process(model, len(rows)))
    if not len(rows):
        return found
    logps = torch.log_softmax(project(scored.hidden[rows]), dim=-1)
    logps = logps.gather(-1, tokens[rows].unsqueeze(-1)).squeeze(-1)  # (1, T)
    error = (logps - scored.logps[rows]).abs()[mask[rows].bool()].median().item()
    if error > 0.05:
        raise ValueError(
            f"The 'full' KL cannot be used with {type(causal_lm(model)).__name__}: the logits rebuilt from its hidden "
            f"states are off by {error:.3g} nats. Use 'k3' (`kl_estimator`, `kl_statistic`)."
        )
    return True


def measure_kl(
    policy: Scored,
    reference: Scored,
    estimator: str,
    statistic: str,
    policy_head: Callable[[torch.Tensor], torch.Tensor] | None = None,
    reference_head: Callable[[torch.Tensor], torch.Tensor] | None = None,
    tokens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    Per-token KL three ways, each of shape `(B, T)`: by the estimator that is penalised, by that of the statistic, and
    by `"k1"`. The heads are needed where one of them is `"full"`; `tokens` where the reference has no log-probs yet.
    """
    full, policy_logps, reference_logps = None, policy.logps, reference.logps
    if reference_logps is None:
        # Both from the same pass, so that what rounding does to one it does to the other.
        full, policy_logps, reference_logps = full_kl_and_logps(
            policy.hidden, reference.hidden, policy_head, reference_head, tokens
        )
    elif "full" in (estimator, statistic):
        full = estimate_full_kl(policy.hidden, reference.hidden, policy_head, reference_head)

    @functools.cache
    def measure(kind: str) -> torch.Tensor:
        return full if kind == "full" else estimate_kl(policy_logps, reference_logps, kind)

    return measure(estimator), measure(statistic), measure("k1")
