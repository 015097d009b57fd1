"""A rollout that is used in a single pass: only the loss's forward pass scores the policy."""

from contextlib import nullcontext

import pytest
import torch
from trl.trainer import utils as trl_utils

from support.forward_counts import count_rows
from support.ppo_checks import check_losses, record, scripted
from support.tiny import build_dataset, build_model, logged, watch_projections, weights
from support.tiny_ppo import build_ppo, build_scorer, train_ppo


pytestmark = pytest.mark.slow


ONE_PASS = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "num_mini_batches": 1,
    "num_ppo_epochs": 1,
    "max_steps": 3,
}


@pytest.mark.parametrize("coef", [0.2, 0.0], ids=["penalised", "off"])
@pytest.mark.parametrize("owner", ["head", "model"])
def test_losses_are_those_of_the_plain_loops(owner, coef, tmp_path):
    value_model = build_scorer(seed=3) if owner == "model" else None
    trainer = record(tmp_path, kl_penalty_coef=coef, extras={"value_model": value_model}, **ONE_PASS)
    assert len(trainer.rollouts) == len(trainer.losses) == 3
    check_losses(trainer, build_model(), value_model=build_scorer() if owner == "model" else None)


@pytest.mark.parametrize(
    ("fields", "passes"),
    [({}, 1), ({"num_ppo_epochs": 2, "max_steps": 6}, 3), ({"gradient_accumulation_steps": 2}, 2)],
    ids=["one pass", "two epochs", "two micro-batches"],
)
def test_how_often_the_policy_is_scored(fields, passes, tmp_path):
    settings = ONE_PASS | fields
    trainer = build_ppo(tmp_path, kl_penalty_coef=0.2, extras={"rollout_func": scripted}, **settings)
    rows = count_rows(trainer)
    trainer.train()
    completions = 3 * 4 * settings["gradient_accumulation_steps"]
    assert rows == {"policy": passes * completions, "reference": completions}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"kl_placement": "advantage"},
        {"kl_placement": "advantage", "kl_centering": "microbatch"},
        {"kl_placement": "loss"},
        {"kl_controller": "hold"},
        {"kl_statistic": "full"},
        {"reward_scaling": "running", "whiten_rewards": True},
        {"kl_penalty_coef": 0.0, "kl_monitor": True},
    ],
    ids=lambda fields: "-".join(map(str, fields.values())) or "reward",
)
def test_scoring_at_generation_would_change_nothing(fields, tmp_path, monkeypatch):
    def train(folder):
        settings = ONE_PASS | {"kl_penalty_coef": 0.2, "kl_controller": "pid", "kl_target": 0.1} | fields
        if settings["kl_penalty_coef"] == 0.0:
            del settings["kl_controller"], settings["kl_target"]
        settings |= {"log_completions": True, "eval_strategy": "steps", "eval_steps": 2}
        return train_ppo(folder, extras={"eval_dataset": build_dataset()}, **settings)

    late = train(tmp_path / "late")
    monkeypatch.setattr(type(late), "_ppo_in_one_pass", False)
    early = train(tmp_path / "early")
    for name in ("loss", "klx/kl", "klx/coef", "ppo/score", "ppo/explained_variance", "eval_loss", "eval_klx/kl"):
        assert logged(late, name) == pytest.approx(logged(early, name), rel=1e-4, abs=1e-6), name
        assert logged(late, name)
    if fields.get("kl_centering") != "microbatch":  # which is logged early, without its adjustment
        assert list(late._logs["advantages"]) == pytest.approx(list(early._logs["advantages"]), abs=1e-4)
    for name, weight in weights(early).items():
        torch.testing.assert_close(weights(late)[name], weight, atol=1e-4, rtol=1e-3)


@pytest.mark.skipif(not hasattr(trl_utils, "_CHUNKED_LOGPROB_CHUNK_SIZE"), reason="this TRL's tiles have one width")
def test_tiles_of_logits_are_narrow_on_a_cpu_and_give_the_same(tmp_path, monkeypatch):
    model = build_model(vocab_size=1500)
    calls = watch_projections(monkeypatch)
    usual = trl_utils._CHUNKED_LOGPROB_CHUNK_SIZE
    narrow = train_ppo(tmp_path, model=model, kl_penalty_coef=0.2, **ONE_PASS)
    assert {args[5] for args in calls} == {512} and trl_utils._CHUNKED_LOGPROB_CHUNK_SIZE == usual
    calls.clear()
    monkeypatch.setattr("trl_klx.control.forward_pass._trl_with", lambda name, value: nullcontext())
    wide = train_ppo(tmp_path, model=build_model(vocab_size=1500), kl_penalty_coef=0.2, **ONE_PASS)
    assert {args[5] for args in calls} == {usual}
    assert logged(narrow, "loss") == pytest.approx(logged(wide, "loss"), rel=1e-4)
    assert logged(narrow, "klx/kl") == pytest.approx(logged(wide, "klx/kl"), rel=1e-3, abs=1e-6)
