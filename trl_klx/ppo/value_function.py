"""PPO's value function: a branch of the policy's backbone, or a separate model."""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from ..maths._tensors import wide_dtype
from ..references.peft_adapters import causal_lm
from ..references.sharding import join_parts
from .policy_layers import top_layers


# The value function is a submodule of the policy with this name, so that optimizer, DDP, FSDP and DeepSpeed see it.
VALUE_MODULE = "klx_value"

# Arguments of one call to a layer.
Call = tuple[tuple[Any, ...], dict[str, Any]]


class ValueHead(nn.Module):
    """
    Copies of the policy's top layers with a two-layer head on top. Maps the policy's hidden states to values in units
    of the returns (see [`ReturnScale`]). The head's last layer starts at zero, so the first advantages use no baseline
    rather than a random one.

    Args:
        hidden_size (`int`):
            Width of the hidden states.
        dtype (`torch.dtype`):
            Dtype of the parameters.
        device (`torch.device`):
            Device of the parameters.
        seed (`int`):
            Seed of the initialisation, so that all processes start with the same weights.
        layers (`Iterable[nn.Module]`, *optional*, defaults to `()`):
            Layers that the hidden states pass through first; see [`~policy_layers.copy_top_layers`].
        detached (`bool`, *optional*, defaults to `True`):
            Whether gradients stop at the policy's hidden states, so that the value loss does not move the policy.
    """

    def __init__(
        self,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
        layers: Iterable[nn.Module] = (),
        detached: bool = True,
    ):
        super().__init__()
        self.detached = detached
        self.layers = nn.ModuleList(layers)
        # Creating a value head must not change the rollouts of a seeded run.
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.norm = nn.LayerNorm(hidden_size)
            self.inner = nn.Linear(hidden_size, 2 * hidden_size)
            self.outer = nn.Linear(2 * hidden_size, 1)
        nn.init.zeros_(self.outer.weight)
        nn.init.zeros_(self.outer.bias)
        self.to(device=device, dtype=dtype).requires_grad_(True)

    def forward(self, hidden: torch.Tensor, calls: list[Call], keep: slice) -> torch.Tensor:
        """
        Args:
            hidden (`torch.Tensor`):
                Input of the first of the policy's layers that `layers` copy, shape `(B, L, H)`; the policy's last
                hidden states if `layers` is empty.
            calls (`list` of `tuple`):
                Other arguments with which the policy calls each of those layers.
            keep (`slice`):
                Positions to compute values for.

        Returns:
            `torch.Tensor`: Values, shape `(B, T)`.
        """
        kind, dtype = hidden.device.type, hidden.dtype
        if self.detached:
            # A leaf that requires a gradient, because a checkpointed layer may need such an input.
            hidden = hidden.detach().requires_grad_(torch.is_grad_enabled())
        # Attention kernels may support only the policy's dtype.
        with nullcontext() if dtype == torch.float32 else torch.autocast(kind, dtype=dtype):
            for layer, (args, kwargs) in zip(self.layers, calls, strict=True):
                hidden = layer(hidden.to(self.inner.weight.dtype), *args, **kwargs)
                hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        # Autocast would compute the values in bf16, but regression needs fp32.
        with torch.autocast(kind, enabled=False):
            hidden = self.norm(hidden[:, keep].to(self.inner.weight.dtype))
            values: torch.Tensor = self.outer(torch.relu(self.inner(hidden))).squeeze(-1)
        return values


class ValueModel(nn.Module):
    """
    A sequence-classification model with one label, read at every position.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            Model with a backbone and a `score` layer.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        labels = getattr(model.config, "num_labels", None)
        if not hasattr(model, "score") or labels != 1:
            raise ValueError(
                f"`value_model` must be a sequence-classification model with `num_labels=1` and a `score` layer, got "
                f"{type(model).__name__} with `num_labels={labels}`."
            )
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Map `(B, L)` tokens to `(B, L)` values."""
        model = causal_lm(self.model)  # without PEFT's wrapper; the adapter's layers are inside the model
        inputs = {"attention_mask": attention_mask, **_positions(model.base_model, attention_mask)}
        hidden = model.base_model(input_ids, use_cache=False, **inputs).last_hidden_state
        values: torch.Tensor = model.score(hidden).squeeze(-1)
        return values


def _positions(backbone: nn.Module, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """
    Positions that begin at the first token of each prompt, for a backbone that takes them. Many models count from the
    left edge otherwise, so that the padding before a prompt would change the values.
    """
    if "position_ids" not in inspect.signature(backbone.forward).parameters:
        return {}
    return {"position_ids": (attention_mask.long().cumsum(dim=-1) - 1).clamp(min=0)}


class ReturnScale:
    """
    Mean and standard deviation of recent returns. The value head predicts returns in these units, so the size of the
    value loss does not depend on the scale of the rewards and the penalty.

    A rollout changes the scale only from the next rollout on, so that values before and after an update can be
    compared.
    """

    DECAY = 0.9  # of a rollout's weight, with each later rollout

    def __init__(self) -> None:
        # Count, sum and sum of squares: those in use, and those for the next rollout.
        self._moments: torch.Tensor | None = None
        self._next: torch.Tensor | None = None

    def observe(self, moments: torch.Tensor) -> None:
        """Add the moments of a rollout's returns, summed over all processes, unless they are not finite."""
        before = torch.zeros_like(moments) if self._moments is None else self._moments
        self._next = torch.where(moments.isfinite().all(), self.DECAY * before + moments, before)

    def advance(self) -> None:
        """Begin a rollout, with the scale observed so far."""
        self._moments = self._next

    @property
    def mean(self) -> torch.Tensor | float:
        return 0.0 if self._moments is None else (self._moments[1] / self._moments[0].clamp(min=1.0)).float()

    @property
    def std(self) -> torch.Tensor | float:
        """Standard deviation of the returns, or 1 if they do not vary."""
        if self._moments is None:
            return 1.0
        count, total, squares = (self._moments / self._moments[0].clamp(min=1.0)).unbind()
        variance = squares - total.square()
        # In fp32 only at the end: the square of a large reward would overflow.
        return torch.where(variance > 1e-12 * squares, variance, 1.0).sqrt().float()

    def state_dict(self) -> dict[str, list[float] | None]:
        moments = {"in_use": self._moments, "next": self._next}
        return {name: None if tensor is None else tensor.tolist() for name, tensor in moments.items()}

    def load_state_dict(self, state: dict[str, list[float] | None] | None, device: torch.device) -> None:
        """Load the result of [`~ReturnScale.state_dict`]; `None` resets the scale."""
        self._moments, self._next = (self._read((state or {}).get(name), device) for name in ("in_use", "next"))

    @staticmethod
    def _read(moments: list[float] | None, device: torch.device) -> torch.Tensor | None:
        if moments is None:
            return None
        if not (len(moments) == 3 and all(math.isfinite(number) for number in moments)):
            raise ValueError(
                f"Cannot resume: the moments of the returns are {moments!r}, expected three finite numbers."
            )
        return torch.tensor(moments, dtype=wide_dtype(device), device=device)


class ValueFunction:
    """
    Attaches a value module to the policy and records its values during the policy's own forward passes. This avoids a
    second pass, and starts the graph inside the wrapped forward, where DDP looks for the parameters in use.

    Args:
        policy (`nn.Module`):
            Policy.
        module ([`ValueHead`] or [`ValueModel`]):
            Module that computes the values.
    """

    def __init__(self, policy: Any, module: "ValueHead | ValueModel"):
        self.policy = policy
        self.module = module
        self.scale = ReturnScale()
        self._keep: int | None = None
        self._current: torch.Tensor | None = None
        self._recorded: list[torch.Tensor] = []
        self._calls: list[Call] = []
        policy.add_module(VALUE_MODULE, module)
        if isinstance(module, ValueHead):
            for layer in top_layers(policy, len(module.layers)):
                layer.register_forward_pre_hook(self._before_layer, with_kwargs=True)
            causal_lm(policy).base_model.register_forward_hook(self._after_backbone)
        policy.register_forward_hook(self._after_policy, with_kwargs=True)
        # Users may save the policy without the trainer. With a partial, a copy of the policy saves itself; a closure
        # would still save the original.
        policy.save_pretrained = functools.partial(call_without_value, policy, policy.save_pretrained)

    def _before_layer(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # The backward pass calls checkpointed layers again, when nothing is being recorded.
        if self._keep is not None:
            self._calls.append((args, kwargs))

    def _after_backbone(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._keep is None:
            return
        assert isinstance(self.module, ValueHead)
        calls, self._calls = [_split_hidden(*call) for call in self._calls], []
        hidden = calls[0][0] if calls else output.last_hidden_state
        if len(calls) != len(self.module.layers) or hidden.dim() != 3:
            raise ValueError(
                f"`num_value_layers={len(self.module.layers)}` does not fit this policy: its top layers are called "
                f"{len(calls)} times per forward pass, with hidden states of shape {tuple(hidden.shape)}. Set "
                "`num_value_layers=0`, or pass a `value_model`."
            )
        # A token's value is computed at the position that predicts the token.
        values = self.module(hidden, [call[1:] for call in calls], slice(-self._keep - 1, -1)).float()
        self._current = self.scale.mean + self.scale.std * values

    def _after_policy(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if self._keep is None:
            return None
        if isinstance(self.module, ValueModel):
            values = self.module(kwargs["input_ids"], kwargs["attention_mask"])
            self._current = values[:, -self._keep - 1 : -1].float()
        values, self._current = self._current, None
        assert values is not None
        self._recorded.append(values)
        # DDP treats parameters as unused unless an output depends on them.
        output_class: Any = type(output)
        return _class_with_values(output_class)(**output, klx_values=values)

    @contextmanager
    def recording(self, logits_to_keep: int) -> Iterator[list[torch.Tensor]]:
        """Collect the values before each of the last `logits_to_keep` tokens, one tensor per forward pass."""
        self._keep, self._recorded = logits_to_keep, []
        try:
            yield self._recorded
        finally:
            self._keep, self._recorded, self._calls = None, [], []

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The complete weights, on the CPU. If they are sharded, every process must call this."""
        named = self.module.state_dict(keep_vars=True).items()
        return {name: join_parts(weight).detach().cpu().contiguous() for name, weight in named}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Load the result of [`~ValueFunction.state_dict`]. Each process takes its shard."""
        own, slots = dict(state), self.module.state_dict()
        saved, expected = _count_layers(own), _count_layers(slots)
        if isinstance(self.module, ValueHead) and saved != expected and "outer.weight" in own:
            raise ValueError(f"it has {saved} copied layers, but this trainer's has {expected}")
        for name, slot in slots.items():
            if name in own and hasattr(slot, "full_tensor"):
                from torch.distributed.tensor import distribute_tensor

                own[name] = distribute_tensor(own[name].to(slot.device), slot.device_mesh, slot.placements)
        self.module.load_state_dict(own)

    def hidden(self) -> AbstractContextManager[None]:
        """Remove the value function from the policy while the policy's weights are saved, loaded or sent elsewhere."""
        return _without_value(self.policy)


def _split_hidden(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.Tensor, tuple[Any, ...], dict[str, Any]]:
    """Split a layer's arguments into the hidden states and the others."""
    if args:
        return args[0], args[1:], kwargs
    return kwargs["hidden_states"], (), {name: value for name, value in kwargs.items() if name != "hidden_states"}


def _count_layers(state: dict[str, torch.Tensor]) -> int:
    return len({name.split(".")[1] for name in state if name.startswith("layers.")})


@functools.cache
def _class_with_values(output_class: Any) -> Any:
    """A model's output class with one more field. DDP rebuilds outputs, and only from the fields of their class."""
    field = ("klx_values", torch.Tensor | None, dataclasses.field(default=None))
    return dataclasses.make_dataclass(f"{output_class.__name__}WithValues", [field], bases=(output_class,))


@contextmanager
def _without_value(policy: nn.Module) -> Iterator[None]:
    # Put back the module that was removed, because sharding may have wrapped it.
    module = policy._modules.pop(VALUE_MODULE, None)
    try:
        yield
    finally:
        if module is not None:
            policy._modules[VALUE_MODULE] = module


def call_without_value(policy: nn.Module, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a method that reads all of the policy's parameters, with the value function removed."""
    with _without_value(policy):
        return method(*args, **kwargs)
