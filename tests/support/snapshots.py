"""What a training did to weights and optimizer, step by step."""

import torch
from transformers import TrainerCallback


class Snapshots(TrainerCallback):
    """The trained weights and the optimizer's state after each step."""

    def __init__(self):
        self.weights: list[dict[str, torch.Tensor]] = []
        self.moments: list[list[torch.Tensor]] = []

    def on_step_end(self, args, state, control, model=None, optimizer=None, **kwargs):
        self.weights.append({name: weight.detach().clone() for name, weight in model.named_parameters()})
        states = optimizer.state.values()
        self.moments.append([t.clone() for entry in states for t in entry.values() if isinstance(t, torch.Tensor)])

    def moved(self) -> list[bool]:
        pairs = zip(self.weights, self.weights[1:], strict=False)
        return [any(not torch.equal(one[name], other[name]) for name in one) for one, other in pairs]


def train_with_snapshots(trainer) -> Snapshots:
    snapshots = Snapshots()
    trainer.add_callback(snapshots)
    trainer.train()
    return snapshots
