"""The interface of a reference: a frozen policy that the KL is measured against."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .moving import Mover, Weights
from .sharding import cut_part, join_parts, local_part, use_written_parts, whole_shape


class KLReference:
    """
    A frozen policy behind a small interface: `active()` provides a model that computes the reference's log-probs.

    Subclasses implement `active`, `weights` and `policy_weights`.

    Attributes:
        identity (`dict`):
            Kind, step or path, and hash of the weights. A resumed run must have the same identity.
        mover ([`Mover`] or `None`):
            How the weights follow the policy; `None` if the reference does not move.
        initial_adapter (`bool`):
            Whether the reference is the run's initial adapter. Only this package's checkpoints hold its weights, and a
            new run may draw different ones.
        resettable (`bool`):
            Whether [`~KLReference.reset`] can make the policy the reference.
        resets (`int`):
            How often it has done so.
    """

    resettable = False
    resets = 0

    def __init__(self, identity: dict[str, Any], mover: Mover | None = None, initial_adapter: bool = False):
        self.mover = mover
        self.identity = identity | (mover.identity if mover is not None else {})
        self.initial_adapter = initial_adapter

    @property
    def description(self) -> dict[str, Any]:
        """What the reference was at first, and how often it has been reset since."""
        return self.identity | ({"resets": self.resets} if self.resets else {})

    @contextmanager
    def active(self) -> Iterator[nn.Module]:
        """The model that computes the reference's log-probs."""
        raise NotImplementedError

    def weights(self) -> Weights:
        """The weights that belong to the reference alone, keyed by the names of the policy's weights."""
        raise NotImplementedError

    def policy_weights(self) -> Weights:
        """The policy's weights that correspond to `weights()`."""
        raise NotImplementedError

    def keep_from_vllm(self, generation: Any) -> None:
        """
        Make TRL send vLLM the policy's weights only. Most references need nothing for this.

        Args:
            generation ([`~trl.generation.vllm_generation.VLLMGeneration`]):
                Object that sends the weights.
        """

    def follow(self, step: int) -> None:
        """Let a moving reference follow the policy after optimizer step `step`."""
        if self.mover is not None:
            reference = self.weights()
            # Policy and reference are sharded in the same way, so each process moves the parts that it holds.
            self.mover.step(step, _local_parts(self.policy_weights()), _local_parts(reference))
            use_written_parts(reference.values())

    def state(self) -> Weights:
        """
        The weights that a checkpoint must hold because no other file does: those of a moving reference, of one that
        was reset, and of an initial adapter. They are joined; if they are sharded, every process must call this.
        """
        if self.mover is None:
            return self.whole_weights() if self.initial_adapter or self.resets else {}
        reference = self.weights()
        parts = self.mover.state(_local_parts(reference))
        return {key: join_parts(reference[_weight_name(key)], part) for key, part in parts.items()}

    def load_state(self, state: Weights) -> None:
        """Load the weights that `state()` returned."""
        if self.mover is None:
            self.load_weights(state)
            return
        reference = self.weights()
        parts = {
            key: cut_part(reference[_weight_name(key)], whole) if _weight_name(key) in reference else whole
            for key, whole in state.items()
        }
        self.mover.load_state(parts, _local_parts(reference))
        use_written_parts(reference.values())

    @torch.no_grad()
    def restart(self) -> None:
        """Copy the policy's current weights to the reference."""
        reference, policy = self.weights(), self.policy_weights()
        for name, weight in _local_parts(reference).items():
            weight.copy_(local_part(policy[name]))
        use_written_parts(reference.values())

    def reset(self) -> None:
        """Make the policy, as it is now, the reference from now on."""
        self.restart()
        self.resets += 1

    def fits_policy(self) -> bool:
        """Whether the reference has weights for the policy's to be copied to."""
        reference, policy = self.weights(), self.policy_weights()
        shapes = {name: whole_shape(weight) for name, weight in policy.items()}
        return bool(reference) and all(shapes.get(name) == whole_shape(weight) for name, weight in reference.items())

    def whole_weights(self) -> Weights:
        """The result of `weights()`, joined. If the weights are sharded, every process must call this."""
        return {name: join_parts(weight) for name, weight in self.weights().items()}

    @torch.no_grad()
    def load_weights(self, whole: Weights) -> None:
        """Load the weights that `whole_weights()` returned."""
        reference = self.weights()
        for name, weight in reference.items():
            local_part(weight).copy_(cut_part(weight, whole[name]))
        use_written_parts(reference.values())


def _local_parts(weights: Weights) -> Weights:
    return {name: local_part(weight) for name, weight in weights.items()}


def _weight_name(key: str) -> str:
    """The weight's name in a key of a mover's state, which may start with the weight's step and a `|`."""
    return key.rsplit("|", 1)[-1]
