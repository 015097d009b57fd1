"""A run that is resumed in any epoch sees the prompts that it would have seen, and is the same run to the bit."""

import warnings

import pytest
import torch
from trl import GRPOTrainer, RLOOTrainer

from support.launch import torchrun
from support.tiny import assert_same_weights, build_dataset, build_trainer, history, reward_even_tokens, weights
from support.tiny_ppo import build_ppo
from trl_klx import KLXGRPOTrainer, KLXPPOTrainer, KLXRLOOTrainer


pytestmark = pytest.mark.slow


OURS = {"GRPO": KLXGRPOTrainer, "RLOO": KLXRLOOTrainer, "PPO": KLXPPOTrainer}
KL = {"kl_penalty_coef": 0.1, "kl_target": 0.2, "kl_controller": "pid", "kl_warn_window": 3}


class Prompts:
    """A reward function that keeps the prompts of each batch, by the optimizer steps made before it."""

    __name__ = reward_even_tokens.__name__  # TRL logs rewards under it

    def __init__(self):
        self.seen: dict[int, list[str]] = {}

    def __call__(self, prompts, completion_ids, trainer_state, **kwargs):
        self.seen[trainer_state.global_step] = prompts
        return reward_even_tokens(completion_ids)


def build(trainer_class, folder, **fields):
    """Epochs of four steps, and a checkpoint after each step."""
    settings = {"max_steps": 11, "save_strategy": "steps", "save_steps": 1, "rewards": Prompts()} | fields
    if trainer_class is KLXPPOTrainer:
        settings = {"num_ppo_epochs": 1, "dataset": build_dataset(16)} | settings
        return build_ppo(folder, trainer_class, **settings)
    return build_trainer(trainer_class, folder, **({"dataset": build_dataset(8)} | settings))


def prompts(trainer) -> dict[int, list[str]]:
    return trainer.reward_funcs[0].seen


def resumed_from(step: int, trainer_class, folder, output_dir, **fields):
    trainer = build(trainer_class, output_dir, **fields)
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))
    return trainer


@pytest.fixture(scope="module", params=OURS)
def whole(request, tmp_path_factory):
    """A run of almost three epochs that nobody interrupts."""
    folder = tmp_path_factory.mktemp(request.param)
    trainer = build(OURS[request.param], folder, **KL)
    trainer.train()
    epochs = [str([prompts(trainer)[step] for step in range(first, first + 3)]) for first in (0, 4, 8)]
    assert len(set(epochs)) == 3  # each epoch has its own order
    return trainer, folder


# At the end of an epoch, and inside the first, the second and the third.
@pytest.mark.parametrize("step", [2, 4, 6, 8, 9])
def test_resumed_in_any_epoch(step, whole, tmp_path):
    trainer, folder = whole
    resumed = resumed_from(step, type(trainer), folder, tmp_path, **KL)
    assert prompts(resumed) == {at: seen for at, seen in prompts(trainer).items() if at >= step}
    assert history(resumed)[:-1] == history(trainer)[:-1]
    assert_same_weights(weights(resumed), weights(trainer))
    assert resumed.kl_control.state_dict() == trainer.kl_control.state_dict()


def test_accumulation_that_does_not_divide_the_epoch(tmp_path):
    fields = KL | {"gradient_accumulation_steps": 3, "steps_per_generation": 1, "max_steps": 5}
    trainer = build(KLXGRPOTrainer, tmp_path, **fields)
    trainer.train()  # four micro-batches are two steps
    resumed = resumed_from(3, KLXGRPOTrainer, tmp_path, tmp_path / "resumed", **fields)
    assert history(resumed)[:-1] == history(trainer)[:-1]
    assert_same_weights(weights(resumed), weights(trainer))


def test_limit_on_updates_alone(tmp_path):
    fields = {"kl_update_target": 10.0, "num_iterations": 2, "max_steps": 12}
    trainer = build(KLXGRPOTrainer, tmp_path, **fields)
    trainer.train()
    resumed = resumed_from(10, KLXGRPOTrainer, tmp_path, tmp_path / "resumed", **fields)
    assert history(resumed)[:-1] == history(trainer)[:-1]
    assert_same_weights(weights(resumed), weights(trainer))


def test_without_skipping_the_data_starts_over(whole, tmp_path):
    trainer, folder = whole
    resumed = resumed_from(8, type(trainer), folder, tmp_path, ignore_data_skip=True, **KL)
    first_epoch = [prompts(trainer)[step] for step in range(3)]
    assert [prompts(resumed)[step] for step in range(8, 11)] == first_epoch


@pytest.mark.parametrize("ours, theirs", [(KLXGRPOTrainer, GRPOTrainer), (KLXRLOOTrainer, RLOOTrainer)])
def test_switched_off_a_resumed_run_is_that_of_trl(ours, theirs, tmp_path):
    build(theirs, tmp_path / "run", beta=0.0).train()
    runs = [resumed_from(6, cls, tmp_path / "run", tmp_path / cls.__name__, beta=0.0) for cls in (ours, theirs)]
    assert prompts(runs[0]) == prompts(runs[1])
    assert history(runs[0])[:-1] == history(runs[1])[:-1]
    assert_same_weights(*(weights(run) for run in runs))


def test_iterable_dataset(tmp_path):
    dataset = build_dataset(8).to_iterable_dataset()
    trainer = build(KLXGRPOTrainer, tmp_path, dataset=dataset, **KL)
    trainer.train()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        resumed = resumed_from(2, KLXGRPOTrainer, tmp_path, tmp_path / "resumed", dataset=dataset, **KL)
    assert history(resumed)[:-1] == history(trainer)[:-1]
    # Without a length, transformers does not know where an epoch ends.
    with pytest.warns(UserWarning, match="iterable, and its first pass ended before step 8"):
        resumed_from(8, KLXGRPOTrainer, tmp_path, tmp_path / "resumed", dataset=dataset, **KL)


@pytest.mark.slow
def test_two_processes(tmp_path):
    torchrun("epochs_in_group.py", str(tmp_path))
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    for rank in ranks:
        assert set(rank) == {"GRPO", "RLOO", "PPO"}
        for run in rank.values():
            assert run["whole"]["prompts"] == run["resumed"]["prompts"]
            assert run["whole"]["history"] == run["resumed"]["history"]
            assert_same_weights(run["whole"]["weights"], run["resumed"]["weights"])
    assert ranks[0]["GRPO"]["whole"]["prompts"] != ranks[1]["GRPO"]["whole"]["prompts"]
