"""A step whose loss or gradient is not finite is not taken, is named, and never reaches a checkpoint."""

import json
import math
import re

import pytest
import torch
from transformers import TrainerCallback

from support.launch import torchrun
from support.snapshots import train_with_snapshots
from support.tiny import (
    assert_same_weights,
    build_model,
    build_trainer,
    history,
    logged,
    reward_even_tokens,
    weights,
)
from support.tiny_ppo import build_ppo, build_scorer
from trl_klx import KLXGRPOTrainer, KLXRLOOTrainer
from trl_klx.checkpoints.integrity import checkpoint_fault
from trl_klx.control.metrics import Sums
from trl_klx.ppo.value_function import ReturnScale
from trl_klx.trainers.forward_passes import ForwardPassMixin


KL = {"kl_penalty_coef": 0.1, "max_steps": 4}
TRAINERS = pytest.mark.parametrize("kind", ["GRPO", "RLOO", "PPO"])
PLACEMENTS = pytest.mark.parametrize("placement", ["advantage", "reward", "loss"])
# The first two take a flag on the device, the others are looked at by the host.
OPTIMIZERS = pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch", "sgd", "adafactor"])


def build(kind: str, folder, **overrides):
    """A trainer of which every step has its own rollout."""
    fields = KL | overrides
    if kind == "PPO":
        return build_ppo(folder, **({"num_ppo_epochs": 1} | fields))
    if kind == "GRPO":
        fields = {"scale_rewards": "none"} | fields
    return build_trainer(KLXGRPOTrainer if kind == "GRPO" else KLXRLOOTrainer, folder, **fields)


@pytest.fixture
def spoil(monkeypatch):
    """Replaces one log-prob of the reference in the batches before some steps, or a hidden state if it has none."""
    score = ForwardPassMixin._klx_score_reference

    def spoil(value: float, *steps: int) -> None:
        def spoiled(self, args, kwargs):
            scored = score(self, args, kwargs)
            if self.state.global_step + 1 in steps and self.model.training:
                (scored.hidden if scored.logps is None else scored.logps)[0, 0] = value
            return scored

        monkeypatch.setattr(ForwardPassMixin, "_klx_score_reference", spoiled)

    return spoil


def messages(caplog) -> list[str]:
    return [record.message for record in caplog.records if record.name == "trl_klx.trainers.finite_steps"]


# ---- One bad log-prob of the reference ----


@pytest.mark.filterwarnings("ignore:.*got a KL of nan:RuntimeWarning")
@TRAINERS
@PLACEMENTS
def test_nan_in_the_reference(kind, placement, spoil, caplog, tmp_path):
    spoil(math.nan, 2)
    trainer = build(kind, tmp_path, kl_placement=placement, save_strategy="steps", save_steps=1)
    snapshots = train_with_snapshots(trainer)
    assert trainer.state.global_step == 4
    assert all(weight.isfinite().all() for weight in weights(trainer).values())
    assert all(checkpoint_fault(str(tmp_path / f"checkpoint-{step}")) is None for step in (1, 2, 3, 4))
    json.dumps(trainer.kl_control.state_dict(), allow_nan=False)
    if placement == "reward" and kind != "PPO":
        # Only the completion whose KL is unknown is left out.
        assert snapshots.moved() == [True, True, True] and messages(caplog) == []
        return
    assert snapshots.moved() == [False, True, True]
    (message,) = messages(caplog)
    assert "Step 2 was not taken" in message and "log-probs of the reference (1)" in message
    assert math.isnan(logged(trainer, "grad_norm")[1])


@TRAINERS
@PLACEMENTS
def test_token_that_the_reference_rules_out(kind, placement, spoil, caplog, tmp_path):
    spoil(-math.inf, 2, 3)
    trainer = build(kind, tmp_path, kl_placement=placement)
    snapshots = train_with_snapshots(trainer)
    # Its KL is bounded, so the step is taken.
    assert snapshots.moved() == [True, True, True]
    assert all(weight.isfinite().all() for weight in weights(trainer).values())
    assert all(math.isfinite(kl) for kl in logged(trainer, "klx/kl"))
    (message,) = messages(caplog)
    assert "The batch of step 2 has 1 tokens to which the reference gives no probability" in message


@pytest.mark.filterwarnings("ignore:.*got a KL of nan:RuntimeWarning")
@OPTIMIZERS
def test_nothing_of_the_step_is_left(optim, spoil, tmp_path):
    spoil(math.nan, 2)
    trainer = build("GRPO", tmp_path, optim=optim)
    snapshots = train_with_snapshots(trainer)
    assert snapshots.moved() == [False, True, True]
    first, second = snapshots.moments[:2]
    assert len(first) == len(second) and all(map(torch.equal, first, second))  # moments, and Adam's count of steps
    assert not hasattr(trainer.optimizer.optimizer, "found_inf")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*got a KL of nan:RuntimeWarning")
@TRAINERS
def test_several_in_a_row_stop_the_run(kind, spoil, tmp_path):
    spoil(math.nan, *range(3, 20))
    fields = {"kl_placement": "advantage", "max_steps": 12, "save_strategy": "steps", "save_steps": 1}
    trainer = build(kind, tmp_path, **fields)
    message = "stops at step 5: 3 generation batches in a row .* log-probs of the reference.* Look at the reference"
    with pytest.raises(FloatingPointError, match=message):
        trainer.train()
    assert all(weight.isfinite().all() for weight in weights(trainer).values())
    # With a sound reference the run goes on.
    spoil(math.nan)
    again = build(kind, tmp_path, **fields)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 12 and all(weight.isfinite().all() for weight in weights(again).values())


@pytest.mark.filterwarnings("ignore:.*got a KL of nan:RuntimeWarning")
def test_two_at_a_time_do_not(spoil, caplog, tmp_path):
    spoil(math.nan, 2, 3, 5, 6, 8, 9)
    snapshots = train_with_snapshots(build("GRPO", tmp_path, max_steps=10))
    assert snapshots.moved() == [False, False, True, False, False, True, False, False, True]
    assert len(messages(caplog)) == 6


@pytest.mark.filterwarnings("ignore:.*got a KL of nan:RuntimeWarning")
def test_one_batch_of_many_steps_is_one_batch(spoil, caplog, tmp_path):
    spoil(math.nan, 5)
    snapshots = train_with_snapshots(build("PPO", tmp_path, num_ppo_epochs=4, max_steps=12))
    assert snapshots.moved() == [True] * 3 + [False] * 4 + [True] * 4
    (message,) = messages(caplog)
    assert "The steps 5 to 8 were not taken" in message


@pytest.mark.filterwarnings("ignore:.*got a KL of nan:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:.*got a KL of nan:RuntimeWarning")
@TRAINERS
def test_a_controller_does_not_count_steps_that_were_not_taken(kind, spoil, tmp_path):
    """Neither with the batch that follows, nor from a checkpoint that was written before it."""
    trainer = build(kind, tmp_path, kl_target=0.5, max_steps=5, save_strategy="steps", save_steps=1)
    seen, learn = [], trainer.kl_control.learn

    def watch(batch):
        seen.append((batch.optimizer_steps, batch.learning_rate))
        learn(batch)

    trainer.kl_control.learn = watch
    spoil(math.nan, 2)
    train_with_snapshots(trainer)
    # The KL of the second batch is not a number, so that the first step counts with the third batch; the second was
    # not taken. Which of the two it was is not known, so that they share their learning rate.
    rates = logged(trainer, "learning_rate")
    assert seen[:2] == [(0.0, None), (0.0, None)]
    assert seen[2] == (1.0, pytest.approx((rates[0] + rates[1]) / 2))
    assert seen[3:] == [(1.0, pytest.approx(rates[2])), (1.0, pytest.approx(rates[3]))]
    states = [json.loads((tmp_path / f"checkpoint-{step}" / "kl_state.json").read_text()) for step in range(1, 6)]
    assert [state["clock"]["steps"] for state in states] == [1, 1, 1, 1, 1]


def test_the_last_step_is_told_too(spoil, caplog, tmp_path):
    spoil(math.nan, 4)
    train_with_snapshots(build("GRPO", tmp_path, logging_steps=3))
    (message,) = messages(caplog)
    assert "Step 4 was not taken" in message


@pytest.mark.filterwarnings("ignore:.*got a KL of nan:RuntimeWarning")
def test_reference_that_overflows(tmp_path):
    """Its weights are finite, but not what it computes."""
    reference = build_model()
    trainer = build("GRPO", tmp_path / "run", max_steps=8, extras={"ref_model": reference})
    with torch.no_grad():  # only now, since such weights are refused
        reference.model.norm.weight.fill_(1e25)
        reference.lm_head.weight.mul_(1e20)
    with pytest.raises(FloatingPointError, match="3 generation batches in a row .* Look at the reference: weights"):
        trainer.train()
    assert all(weight.isfinite().all() for weight in weights(trainer).values())


# ---- Other sources ----


def huge(completion_ids, **kwargs):
    return [1e30 * share for share in reward_even_tokens(completion_ids)]


def test_huge_rewards_in_ppo(caplog, tmp_path):
    # The value head learns the scale of the returns from the first batch.
    trainer = build("PPO", tmp_path, rewards=huge, max_steps=6)
    snapshots = train_with_snapshots(trainer)
    assert snapshots.moved()[1:] == [True] * 4
    (message,) = messages(caplog)
    assert "Step 1 was not taken" in message and "losses" in message
    assert all(math.isfinite(loss) for loss in logged(trainer, "ppo/value_loss")[1:])


@pytest.mark.parametrize("fields", [{}, {"kl_penalty_coef": 0.0}], ids=["on", "off"])
def test_huge_rewards_of_a_value_model(fields, tmp_path):
    # A value model predicts the returns as they are. This holds without KL control too, since TRL has no such trainer.
    extras = {"value_model": build_scorer(seed=3)}
    trainer = build("PPO", tmp_path, rewards=huge, max_steps=6, extras=extras, **fields)
    with pytest.raises(FloatingPointError, match="3 generation batches in a row .* Bound the rewards"):
        trainer.train()


def test_huge_rewards_in_rloo(tmp_path):
    with pytest.raises(FloatingPointError, match="the gradient alone.* Bound the rewards"):
        build("RLOO", tmp_path, rewards=huge, max_steps=6).train()


def test_return_scale_ignores_what_is_not_finite():
    scale = ReturnScale()
    scale.observe(torch.tensor([4.0, math.nan, math.inf], dtype=torch.float64))
    scale.advance()
    assert float(scale.mean) == 0.0 and float(scale.std) == 1.0
    scale.observe(torch.tensor([2.0, 4e30, 2 * 4e60 + 2e60], dtype=torch.float64))
    scale.advance()
    before = float(scale.mean), float(scale.std)
    assert before == (pytest.approx(2e30), pytest.approx(1e30))
    scale.observe(torch.tensor([2.0, math.nan, 1.0], dtype=torch.float64))
    scale.advance()
    assert (float(scale.mean), float(scale.std)) == before


class Spoil(TrainerCallback):
    """Makes one weight NaN after a step."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == 3:
            with torch.no_grad():
                model.lm_head.weight[5, 5] = math.nan


@TRAINERS
def test_no_checkpoint_of_weights_that_are_not_finite(kind, tmp_path):
    trainer = build(kind, tmp_path, save_strategy="steps", save_steps=1)
    trainer.add_callback(Spoil())
    with pytest.raises(FloatingPointError, match="No checkpoint is written at step 3: 1 of the trained weights"):
        trainer.train()
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]


# ---- A sound run ----


@OPTIMIZERS
@TRAINERS
def test_a_sound_run_is_left_alone(kind, optim, monkeypatch, tmp_path):
    guarded = build(kind, tmp_path / "guarded", optim=optim)
    guarded.train()
    plain = build(kind, tmp_path / "plain", optim=optim)
    monkeypatch.setattr(plain, "_klx_watch_loss", lambda loss, *others: loss)
    monkeypatch.setattr(
        plain.accelerator, "clip_grad_norm_", type(plain.accelerator).clip_grad_norm_.__get__(plain.accelerator)
    )
    if kind == "PPO":
        unguarded, clip = plain.accelerator.clip_grad_norm_, plain._ppo_clip_gradients
        monkeypatch.setattr(plain.accelerator, "clip_grad_norm_", lambda *args: clip(unguarded, *args))
    plain.train()
    assert history(guarded)[:-1] == history(plain)[:-1]
    assert_same_weights(weights(guarded), weights(plain))


def test_merged_sums():
    one, other = Sums(), Sums()
    one.add("a", torch.tensor(1.0))
    other.add("a", torch.tensor(2.0))
    other.add("b", torch.tensor(3.0), torch.tensor(4.0))
    one.merge(other)
    assert other.pop(lambda totals: totals) == {}
    assert one.pop(lambda totals: totals) == {"a": [3.0], "b": [3.0, 4.0]}


# ---- Several processes ----


@pytest.mark.slow
def test_two_processes_decide_alike(tmp_path):
    torchrun("finite_in_group.py", str(tmp_path))
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    for name in ranks[0]:
        one, other = (rank[name] for rank in ranks)
        assert one["moved"] == other["moved"] == [False, True, True]
        assert_same_weights(one["weights"], other["weights"])
        assert all(weight.isfinite().all() for weight in one["weights"].values())
        assert len(one["messages"]) == 1 and re.search(r"Step 2 .*reference \(1\)", one["messages"][0])
        assert one["stopped"] == other["stopped"] and "3 generation batches in a row" in one["stopped"]
