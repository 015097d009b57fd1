"""Moving references: how the reference's weights follow the policy's after each optimizer step."""

import mmap
import os
import tempfile
from typing import IO, Protocol

import torch


Weights = dict[str, torch.Tensor]


class Mover(Protocol):
    """How the weights of a reference follow those of the policy."""

    @property
    def identity(self) -> dict[str, float]:
        """The settings, which a resumed run must not change."""

    def step(self, step: int, policy: Weights, reference: Weights) -> None:
        """Update the reference after optimizer step `step`."""

    def state(self, reference: Weights) -> Weights:
        """Everything that a resumed run needs to continue exactly. Valid until the next step."""

    def load_state(self, state: Weights, reference: Weights) -> None:
        """Restore the result of `state()`."""


class SyncedReference:
    """
    A copy, or an exponential moving average, of the policy, refreshed every `every` optimizer steps:
    `ref = (1 - alpha) * ref + alpha * policy`.

    Args:
        every (`int`):
            Optimizer steps between two refreshes.
        alpha (`float`, *optional*, defaults to `1.0`):
            Weight of the policy in each refresh; `1.0` copies it.
    """

    def __init__(self, every: int, alpha: float = 1.0):
        self.every = every
        self.alpha = alpha

    @property
    def identity(self) -> dict[str, float]:
        return {"sync_steps": self.every, "mixup_alpha": self.alpha}

    @torch.no_grad()
    def step(self, step: int, policy: Weights, reference: Weights) -> None:
        """Update the reference after optimizer step `step`."""
        if step % self.every == 0:
            for name, weight in reference.items():
                if self.alpha == 1.0:
                    weight.copy_(policy[name])
                else:
                    weight.lerp_(policy[name].to(weight.dtype), self.alpha)

    def state(self, reference: Weights) -> Weights:
        """Everything that a resumed run needs to continue exactly."""
        return dict(reference)

    @torch.no_grad()
    def load_state(self, state: Weights, reference: Weights) -> None:
        """Restore the result of `state()`."""
        for name, weight in reference.items():
            weight.copy_(state[name])


class _Snapshots:
    """
    Copies of a set of weights in an unnamed file, which the system removes even if the process is killed.

    Args:
        folder (`str`):
            Folder of the file, created if needed. The system's temporary folder is often in memory.
    """

    def __init__(self, folder: str):
        self.folder = folder
        self._file: IO[bytes] | None = None
        self._size = 0

    def write(self, slot: int, weights: Weights, like: Weights) -> None:
        """
        Write a copy of `weights` to a slot, in the dtypes of `like`, whose names, shapes and order must never change.
        """
        if self._file is None:
            os.makedirs(self.folder, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=self.folder, prefix="_kl_ref_lag")
            self._size = sum(weight.nbytes for weight in like.values())
        self._file.seek(slot * self._size)
        for name, weight in like.items():
            # Copying one weight at a time keeps memory low. NumPy has no bfloat16, so the copy is written as bytes.
            copy = weights[name].detach().to("cpu", weight.dtype).contiguous()
            self._file.write(copy.view(-1).view(torch.uint8).numpy().data)
        self._file.flush()

    def read(self, slot: int, like: Weights) -> Weights:
        """The copy in a slot, mapped into memory. It is valid until the slot is written again."""
        assert self._file is not None
        mapped = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_COPY) if self._size else bytearray()
        copies, offset = {}, slot * self._size
        for name, weight in like.items():
            if not weight.nbytes:  # a process may hold no part of a weight
                copies[name] = torch.empty_like(weight, device="cpu")
                continue
            raw = torch.frombuffer(mapped, dtype=torch.uint8, count=weight.nbytes, offset=offset)
            # The weight starts where the previous one ends, which may not be aligned for its dtype.
            raw = raw if raw.data_ptr() % weight.element_size() == 0 else raw.clone()
            copies[name] = raw.view(weight.dtype).view(weight.shape)
            offset += weight.nbytes
        return copies


class LaggedReference:
    """
    The policy as it was `lag` optimizer steps ago, and the initial policy until then.

    The policies of the steps in between are on disk, as `lag` copies of the weights that this process trains. Memory
    holds the reference only.

    Args:
        lag (`int`):
            Distance between policy and reference in optimizer steps.
        folder (`str`):
            Folder on a disk with enough space for the copies.
    """

    def __init__(self, lag: int, folder: str):
        self.lag = lag
        self._snapshots = _Snapshots(folder)
        # The step whose weights are in each slot.
        self._slots: dict[int, int] = {}

    @property
    def identity(self) -> dict[str, float]:
        return {"lag": self.lag}

    @property
    def kept_steps(self) -> list[int]:
        """The steps whose weights are kept until they become the reference."""
        return sorted(self._slots.values())

    @torch.no_grad()
    def step(self, step: int, policy: Weights, reference: Weights) -> None:
        """Update the reference after optimizer step `step`."""
        slot = step % self.lag
        if self._slots.get(slot) == step - self.lag:
            for name, weight in self._snapshots.read(slot, like=reference).items():
                reference[name].copy_(weight)
        self._snapshots.write(slot, policy, like=reference)
        self._slots[slot] = step

    def state(self, reference: Weights) -> Weights:
        """Everything that a resumed run needs to continue exactly. Valid until the next step."""
        state = {f"reference|{name}": weight for name, weight in reference.items()}
        for step in self.kept_steps:
            weights = self._snapshots.read(step % self.lag, like=reference)
            state |= {f"{step}|{name}": weight for name, weight in weights.items()}
        return state

    @torch.no_grad()
    def load_state(self, state: Weights, reference: Weights) -> None:
        """Restore the result of `state()`."""
        history: dict[int, Weights] = {}
        for key, weight in state.items():
            owner, name = key.split("|", 1)
            if owner == "reference":
                reference[name].copy_(weight)
            else:
                history.setdefault(int(owner), {})[name] = weight
        self._slots = {}
        for step, weights in history.items():
            self._snapshots.write(step % self.lag, weights, like=reference)
            self._slots[step % self.lag] = step
