"""On-policy distillation: the reference is a teacher, with a reward next to it or none at all."""

import math

import pytest
import torch
from trl import GRPOTrainer

from support.tiny import (
    build_dataset,
    build_model,
    build_trainer,
    history,
    logged,
    lora,
    reward_even_tokens,
    trained_lora,
)
from trl_klx import KLXGRPOTrainer, KLXPPOTrainer, KLXRLOOTrainer, KLXTrainerMixin


pytestmark = pytest.mark.slow


TRAINERS = {"grpo": KLXGRPOTrainer, "rloo": KLXRLOOTrainer, "ppo": KLXPPOTrainer}
every_trainer = pytest.mark.parametrize("kind", TRAINERS)
# Reverse KL at coefficient 1, not centered: the return of a completion is minus its KL to the teacher.
TEACHING = {"kl_penalty_coef": 1.0, "kl_placement": "advantage", "kl_centering": "none", "kl_statistic": "full"}
PLACEMENTS = {
    "advantage": TEACHING,
    "loss": {"kl_penalty_coef": 1.0, "kl_placement": "loss", "kl_estimator": "full"},
}
# Enough to learn from a teacher that has nothing in common with the policy.
LONG = {"per_device_train_batch_size": 16, "learning_rate": 1e-2, "lr_scheduler_type": "constant", "max_steps": 20}


def run(output_dir, kind="grpo", train=True, **settings):
    fields = {"num_generations": 1, "num_ppo_epochs": 1} if kind == "ppo" else {}
    fields |= {"rewards": None, "extras": {"ref_model": build_model(seed=3)}} | TEACHING | settings
    trainer = build_trainer(TRAINERS[kind], output_dir, **fields)
    if train:
        trainer.train()
    return trainer


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_the_kl_alone_trains(kind, placement, tmp_path):
    # None and an empty list mean the same.
    trainer = run(tmp_path, kind, rewards=[] if placement == "loss" else None, **LONG, **PLACEMENTS[placement])
    kls = logged(trainer, "klx/kl")
    assert sum(kls[-3:]) < 0.8 * sum(kls[:3])
    assert set(logged(trainer, "reward")) == {0.0} and set(logged(trainer, "klx/coef")) == {1.0}


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_one_completion_per_prompt_is_enough_without_a_reward(kind, placement, tmp_path):
    # A batch that no group of two would fill. The scores of single tokens are noisy, so it takes more steps.
    steps = 60 if placement == "advantage" else 20
    fields = LONG | PLACEMENTS[placement] | {"max_steps": steps, "per_device_train_batch_size": 15}
    extras = {"ref_model": build_model(seed=3), "eval_dataset": build_dataset(5)}
    trainer = run(tmp_path, kind, extras=extras, num_generations=1, per_device_eval_batch_size=5, **fields)
    assert len(set(trainer._logs["prompt"])) == 15
    kls = logged(trainer, "klx/kl")
    assert sum(kls[-3:]) < 0.8 * sum(kls[:3])
    trainer.evaluate()
    values = [value for name in ("loss", "grad_norm", "eval_loss", "eval_klx/kl") for value in logged(trainer, name)]
    assert len(values) == 2 * steps + 2 and all(math.isfinite(value) for value in values)
    assert set(logged(trainer, "reward_std")) == {0.0}


@pytest.mark.parametrize("fields", [{}, {"num_iterations": 2, "gradient_accumulation_steps": 2}], ids=str)
@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_the_pass_that_is_saved_would_have_added_nothing(kind, fields, tmp_path):
    def train(place: str, saved: bool):
        trainer = run(tmp_path / place, kind, train=False, **PLACEMENTS["loss"], **fields)
        assert trainer._klx_only_exact_kl
        trainer._klx_rewarded = not saved
        trainer.train()
        return trainer

    one, other = train("saved", True), train("whole", False)
    for name, weight in one.model.named_parameters():
        assert torch.equal(weight, other.model.get_parameter(name)), name
    assert history(one) == history(other)


class ImitatingTrainer(GRPOTrainer):
    """A loss with a term that needs the gradient of the sampled tokens."""

    def _compute_loss(self, model, inputs):
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        kept = inputs["completion_ids"].size(1)
        logps = self._get_per_token_logps_and_entropies(model, ids, mask, kept, compute_entropy=True)[0]
        return -(logps * inputs["completion_mask"]).mean()


class KLXImitatingTrainer(KLXTrainerMixin, ImitatingTrainer):
    pass


def test_a_loss_of_your_own_keeps_its_gradient(tmp_path):
    extras = {"ref_model": build_model(seed=0)}  # the policy itself, so that the KL has no gradient at first
    trainer = build_trainer(KLXImitatingTrainer, tmp_path, rewards=None, extras=extras, **PLACEMENTS["loss"])
    trainer.train()
    assert not trainer._klx_only_exact_kl
    assert logged(trainer, "grad_norm")[0] > 1e-3


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
@pytest.mark.parametrize("rewards", [reward_even_tokens, [reward_even_tokens]], ids=["one", "list"])
def test_one_completion_per_prompt_is_refused_with_a_reward(kind, rewards, tmp_path):
    with pytest.raises(ValueError, match="`num_generations=1` cannot be used with a reward.*to 2 or more"):
        run(tmp_path, kind, rewards=rewards, num_generations=1, train=False)


def test_ppo_trains_by_the_kl_too(tmp_path):
    kls = logged(run(tmp_path, "ppo", **LONG, kl_placement="reward", kl_centering=None), "klx/kl")
    assert sum(kls[-3:]) < 0.8 * sum(kls[:3])


def reward_length(completion_ids, **kwargs) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


@every_trainer
def test_a_teacher_next_to_a_reward(kind, tmp_path):
    def train(place: str, coef: float, *weights: float):
        rewards = [reward_even_tokens, reward_length]
        return run(tmp_path / place, kind, rewards=rewards, reward_weights=list(weights), kl_penalty_coef=coef)

    both = train("both", 1.0, 2.0, 0.5)
    assert set(logged(both, "rewards/reward_even_tokens/weight")) == {2.0}
    assert set(logged(both, "rewards/reward_length/weight")) == {0.5}
    assert set(logged(both, "klx/coef")) == {1.0}
    # Each of them moves the policy: with less of either one, it ends up elsewhere.
    for other in (train("less reward", 1.0, 0.1, 0.5), train("less teacher", 0.1, 2.0, 0.5)):
        assert not torch.equal(both.model.lm_head.weight, other.model.lm_head.weight)


def test_weights_are_logged_for_a_teacher_only(tmp_path):
    trainer = run(tmp_path, rewards=reward_even_tokens, extras={}, kl_centering="batch")
    assert not logged(trainer, "rewards/reward_even_tokens/weight")


def test_an_adapter_can_be_the_teacher(tmp_path):
    trained_lora(2, scale=0.1).save_pretrained(tmp_path / "adapter")
    trainer = run(tmp_path, extras={"peft_config": lora()}, kl_ref_adapter_path=str(tmp_path / "adapter"))
    assert logged(trainer, "klx/kl")[0] > 1e-3 and max(logged(trainer, "grad_norm")) > 0


@every_trainer
@pytest.mark.parametrize("fields", [{}, {"kl_penalty_reference_step": 0}, {"kl_ref_lag": 1}], ids=str)
def test_a_policy_is_not_its_own_teacher(kind, fields, tmp_path):
    with pytest.raises(ValueError, match="Without reward functions only the KL trains") as caught:
        run(tmp_path, kind, extras={}, **fields, train=False)
    for name, value in fields.items():
        assert f"`{name}={value!r}`" in str(caught.value)


@every_trainer
def test_nothing_holds_a_target_without_a_reward(kind, tmp_path):
    with pytest.raises(ValueError, match="`kl_target=6.0` cannot be held without reward functions"):
        run(tmp_path, kind, kl_target=6.0, train=False)


def test_nothing_stalls_without_a_reward(tmp_path):
    build_model(seed=3).save_pretrained(tmp_path / "checkpoint-1")
    fields = {"extras": {}, "kl_penalty_reference_step": 1, "kl_ref_reset_patience": 2}
    with pytest.raises(ValueError, match="`kl_ref_reset_patience=2` cannot be used without reward functions"):
        run(tmp_path, **fields, train=False)


def test_without_a_penalty_trl_asks_for_a_reward(tmp_path):
    with pytest.raises(ValueError, match="No reward source"):
        build_trainer(KLXGRPOTrainer, tmp_path, rewards=None, kl_monitor=True, extras={"ref_model": build_model(3)})
