"""References on the policy's base weights: another adapter, or the base model alone."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from peft import PeftModel
from torch import nn

from .base import KLReference
from .moving import Mover, Weights
from .peft_adapters import adapter_active, adapter_tensors, only_trained_modules, trained_adapter
from .sharding import shard_again


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Run without dropout, so that the reference always gives the same answer and draws no random numbers."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


class AdapterReference(KLReference):
    """
    A reference that shares the policy's base weights: another adapter, or no adapter.

    Args:
        policy ([`~peft.PeftModel`]):
            Policy.
        adapter (`str` or `None`):
            Name of the adapter that is the reference; `None` for the base model.
        identity (`dict`):
            What the reference is.
        mover ([`Mover`], *optional*):
            How the adapter follows the policy's adapter.
        initial_adapter (`bool`, *optional*, defaults to `False`):
            Whether the adapter is a copy of the run's initial adapter.
        spare (`str`, *optional*):
            Name of a frozen copy of the policy's adapter, which becomes the reference when it is reset. If unset,
            `adapter` itself is overwritten.
    """

    def __init__(
        self,
        policy: PeftModel,
        adapter: str | None,
        identity: dict[str, Any],
        mover: Mover | None = None,
        initial_adapter: bool = False,
        spare: str | None = None,
    ):
        super().__init__(identity, mover, initial_adapter)
        self.policy = policy
        self._first, self._own = adapter, spare or adapter

    @property
    def adapter(self) -> str | None:
        """Name of the adapter that is the reference now; `None` for the base model."""
        return self._own if self.resets else self._first

    @contextmanager
    def active(self) -> Iterator[nn.Module]:
        with without_dropout(self.policy), adapter_active(self.policy, self.adapter):
            yield self.policy

    def weights(self) -> Weights:
        shard_again(self.policy)
        trained = trained_adapter(self.policy)
        return {} if self._own is None else adapter_tensors(self.policy, self._own, as_name=trained)

    def policy_weights(self) -> Weights:
        shard_again(self.policy)
        return adapter_tensors(self.policy, trained_adapter(self.policy))

    def keep_from_vllm(self, generation: Any) -> None:
        # TRL leaves out the LoRA factors of every adapter, but not the modules that an adapter saves whole.
        generation.sync_weights = functools.partial(self._call_hidden, generation.sync_weights)

    def _call_hidden(self, method: Callable[[], None]) -> None:
        with only_trained_modules(self.policy):
            method()
