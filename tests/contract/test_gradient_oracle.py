"""Every accepted penalty follows the gradient that the docs name, on policy and one step off it."""

import runpy
import types
from pathlib import Path

import pytest
import torch

from support.gradient_oracle import (
    EOS,
    LENGTH,
    PROMPT,
    REFERENCE,
    ROWS,
    Exact,
    build_policy,
    cosine_and_scale,
    population,
    recorded_steps,
)
from support.penalty_cases import CASES, TOKENS, TRAINERS, is_accepted, promised
from trl_klx import KLXGRPOTrainer


@pytest.mark.parametrize("case", CASES, ids=str)
def test_follows_what_the_docs_name(case, tmp_path):
    if not is_accepted(case, tmp_path):
        pytest.skip("refused by the config")
    trainer_class, settings = TRAINERS[case.trainer]
    steps = recorded_steps(trainer_class, tmp_path, max_steps=2, **settings, **case.fields)
    assert len(steps) == 2
    for step in steps:
        exact = Exact(step.weight, steps[0].weight)
        promise = promised(case, exact)
        cosine, scale = cosine_and_scale(step.gradient, exact.gradient(promise.objective))
        assert cosine == pytest.approx(1.0, abs=1e-6)
        assert scale == pytest.approx(promise.factor, rel=1e-4)


@pytest.mark.parametrize("fields", [{}, {"kl_ignore_tokens": ["eos"]}, {"kl_estimator": "importance"}], ids=str)
def test_what_later_tokens_were_expected_to_pay_leaves_the_gradient_as_it_is(fields, tmp_path):
    trainer_class, settings = TRAINERS["PPO"]
    fields = {"kl_penalty_coef": 1.0, "max_steps": 2, "lam": 0.7} | settings | fields
    sampled, expected = (
        recorded_steps(trainer_class, tmp_path / statistic, kl_statistic=statistic, **fields)
        for statistic in ("k3", "full")
    )
    for one, other in zip(sampled, expected, strict=True):
        cosine, scale = cosine_and_scale(other.gradient, one.gradient)
        assert cosine == pytest.approx(1.0, abs=1e-6)
        assert scale == pytest.approx(1.0, rel=1e-4)


def test_on_policy_a_charge_has_the_gradient_of_the_kl_it_is_named_after():
    weight = build_policy().lm_head.weight.detach().double()
    exact = Exact(weight, weight)
    token_kl, whole_kl = exact.gradient(exact.token_kl()), exact.gradient(exact.reverse_kl())
    torch.testing.assert_close(exact.gradient(exact.charged_by_token()), token_kl)
    for whole in (exact.charged_to_go(1.0), exact.charged_by_sequence(), exact.charged_by_mean_ratio("completions")):
        torch.testing.assert_close(exact.gradient(whole), whole_kl)
    # They do differ here, from each other and from the forward KL.
    others = [whole_kl, exact.gradient(exact.forward_token_kl()), exact.gradient(exact.charged_within())]
    assert all(cosine_and_scale(token_kl, other)[0] < 0.99 for other in others)


# ---- The same with further settings ----


def follows_token_kl(steps, factor, rollout=None) -> None:
    exact = Exact(steps[-1].weight, steps[0].weight if rollout is None else rollout)
    cosine, scale = cosine_and_scale(steps[-1].gradient, exact.gradient(exact.token_kl()))
    assert cosine == pytest.approx(1.0, abs=1e-6)
    assert scale == pytest.approx(factor, rel=1e-4)


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("placement", ["advantage", "loss"])
def test_ignored_tokens_neither_count_nor_pay(trainer, placement, tmp_path):
    if (trainer, placement) == ("GRPO by sequence", "advantage"):
        pytest.skip("all tokens of a completion share what one token pays")
    trainer_class, settings = TRAINERS[trainer]
    fields = {"kl_penalty_coef": 1.0, "kl_placement": placement, "kl_ignore_tokens": ["eos"]}
    if placement == "advantage":
        fields["kl_centering"] = "none"  # a mean over the paying tokens is no baseline
    [step] = recorded_steps(trainer_class, tmp_path, **settings, **fields)
    exact = Exact(step.weight, step.weight)
    # If a token does not pay, only the other tokens of its state do.
    charged = exact.charged(lambda path, t: 0.0 if path[t][1] == EOS else exact._drift(path[t]))
    if placement == "loss":
        charged = exact.expected(
            lambda path: sum(
                exact._ratio(step) * k3(exact.logps[step] - exact.ref[step]) for step in path if step[1] != EOS
            )
        )
    cosine, scale = cosine_and_scale(step.gradient, exact.gradient(charged))
    assert cosine == pytest.approx(1.0, abs=1e-6)
    assert scale == pytest.approx(1.0 if trainer == "RLOO" else ROWS / TOKENS, rel=1e-4)


def k3(log_ratio: torch.Tensor) -> torch.Tensor:
    return (-log_ratio).exp() - 1.0 + log_ratio


@pytest.mark.parametrize("estimator", ["k2", "k3", "full"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_sampler_other_than_the_policy_is_corrected_for(level, estimator, tmp_path):
    """TRL's importance ratio for vLLM also weighs our term. The test needs no vLLM."""
    sampler = build_policy().lm_head.weight.detach().clone()

    def sample_elsewhere(trainer):
        trainer.use_vllm, trainer._last_loaded_step = True, -1
        trainer.vllm_generation = types.SimpleNamespace(sync_weights=lambda: None)
        with torch.no_grad():
            trainer.model.lm_head.weight.add_(
                0.1 * torch.randn(sampler.shape, generator=torch.Generator().manual_seed(0))
            )

    def rollout(prompts, trainer):
        batch = population(prompts, trainer)
        table = Exact._table(sampler.double())
        paths = [list(zip([PROMPT, *ids[:-1]], ids, strict=True)) for ids in batch["completion_ids"]]
        return batch | {"logprobs": [[table[step].item() for step in path] for path in paths]}

    [step] = recorded_steps(
        KLXGRPOTrainer,
        tmp_path,
        extras={"rollout_func": rollout},
        prepare=sample_elsewhere,
        kl_penalty_coef=1.0,
        kl_placement="loss",
        kl_estimator=estimator,
        importance_sampling_level=level,
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_max=100.0,
        vllm_importance_sampling_clip_min=0.0,
    )
    follows_token_kl([step], ROWS / TOKENS, rollout=sampler.double())


@pytest.mark.parametrize("options", [{"top_entropy_quantile": 0.2}, {"off_policy_mask_threshold": 1e-9}], ids=str)
def test_options_of_trl_that_read_the_advantages_do_not_touch_the_penalty(options, tmp_path):
    fields = {"kl_penalty_coef": 1.0, "num_iterations": 2, "epsilon": 0.9}
    plain = recorded_steps(KLXGRPOTrainer, tmp_path / "plain", max_steps=2, **fields)
    with_option = recorded_steps(KLXGRPOTrainer, tmp_path / "option", max_steps=2, **fields, **options)
    for one, other in zip(plain, with_option, strict=True):
        torch.testing.assert_close(one.gradient, other.gradient, rtol=1e-4, atol=1e-6)


# ---- A larger coefficient means a smaller KL ----


def settled_kl(coef: float, charge, style: str, rewards: torch.Tensor) -> float:
    """KL(policy || reference) after the exact policy gradient of reward and penalty has converged."""
    paths = Exact.all_paths()
    lengths = torch.tensor([len(path) for path in paths])
    ref = Exact._table(build_policy(REFERENCE).lm_head.weight.detach().double())
    logits = ref.clone().requires_grad_(True)
    optimizer = torch.optim.Adam([logits], lr=0.05)
    last, token = (
        torch.tensor([[step[i] for step in path] + [0] * (LENGTH - len(path)) for path in paths]) for i in (0, 1)
    )
    mask = torch.arange(LENGTH) < lengths[:, None]
    for _ in range(250):
        table = torch.log_softmax(logits, dim=-1)
        logps = torch.where(mask, table[last, token], 0.0)
        drift = torch.where(mask, table[last, token] - ref[last, token], 0.0).detach()
        pays = charge(drift) * mask
        if style == "whole":
            pays = pays.sum(1, keepdim=True) * mask
        elif style == "within":
            pays = (pays - pays.sum(1, keepdim=True) / lengths[:, None]) * mask
        weights = logps.sum(1).exp().detach()
        objective = (weights[:, None] * logps * (rewards[:, None] - coef * pays)).sum()
        optimizer.zero_grad()
        (-objective).backward()
        optimizer.step()
    return (weights * drift.sum(1)).sum().item()


CHARGED = {"k1": lambda x: x, "importance": lambda x: x.exp() * x}


# "importance" within a sequence is refused: it does not fall.
@pytest.mark.parametrize(
    ("charge", "style"),
    [("k1", "by token"), ("k1", "whole"), ("k1", "within"), ("importance", "by token"), ("importance", "whole")],
)
def test_a_larger_coefficient_means_a_smaller_kl(charge, style):
    for seed in range(2):
        rewards = torch.randn(len(Exact.all_paths()), generator=torch.Generator().manual_seed(seed)).double()
        kls = [settled_kl(coef, CHARGED[charge], style, rewards) for coef in (0.1, 1.0, 10.0)]
        assert kls == sorted(kls, reverse=True), (seed, kls)
        assert kls[-1] < 0.1 * kls[0]


def test_what_is_refused_would_not_restrain():
    """With k3 charged to tokens, the largest coefficient ends further away than a small one with k1."""
    rewards = torch.randn(len(Exact.all_paths()), generator=torch.Generator().manual_seed(0)).double()
    kls = [settled_kl(coef, k3, "by token", rewards) for coef in (0.1, 10.0)]
    assert kls[1] > settled_kl(0.3, lambda x: x, "by token", rewards)


def test_the_table_of_the_docs_is_what_is_tested_here():
    penalty_table = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "penalty_table.py"))
    assert penalty_table["penalty_table"]() in penalty_table["PAGE"].read_text()
