"""Moving references: how the reference's weights follow the policy's, step by step."""

import torch


Weights = dict[str, torch.Tensor]


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
        """Let the reference follow after optimizer step `step`."""
        if step % self.every == 0:
            for name, weight in reference.items():
                if self.alpha == 1.0:
                    weight.copy_(policy[name])
                else:
                    weight.lerp_(policy[name].to(weight.dtype), self.alpha)

    def state(self, reference: Weights) -> Weights:
        """What a resumed run needs to go on as if nothing had happened."""
        return dict(reference)

    @torch.no_grad()
    def load_state(self, state: Weights, reference: Weights) -> None:
        for name, weight in reference.items():
            weight.copy_(state[name])


class LaggedReference:
    """
    The policy as it was `lag` optimizer steps ago, and the initial policy until then.

    The steps in between are kept in host memory: `lag` copies of the weights that are trained.

    Args:
        lag (`int`):
            Distance between policy and reference in optimizer steps.
    """

    def __init__(self, lag: int):
        self.lag = lag
        self.history: dict[int, Weights] = {}

    @property
    def identity(self) -> dict[str, float]:
        return {"lag": self.lag}

    @torch.no_grad()
    def step(self, step: int, policy: Weights, reference: Weights) -> None:
        """Let the reference follow after optimizer step `step`."""
        self.history[step] = {name: policy[name].detach().to("cpu", copy=True) for name in reference}
        due = self.history.pop(step - self.lag, None)
        if due is not None:
            for name, weight in reference.items():
                weight.copy_(due[name])

    def state(self, reference: Weights) -> Weights:
        """What a resumed run needs to go on as if nothing had happened."""
        state = {f"reference|{name}": weight for name, weight in reference.items()}
        for step, weights in self.history.items():
            state |= {f"{step}|{name}": weight for name, weight in weights.items()}
        return state

    @torch.no_grad()
    def load_state(self, state: Weights, reference: Weights) -> None:
        history: dict[int, Weights] = {}
        for key, weight in state.items():
            owner, name = key.split("|", 1)
            if owner == "reference":
                reference[name].copy_(weight)
            else:
                history.setdefault(int(owner), {})[name] = weight
        self.history = history
