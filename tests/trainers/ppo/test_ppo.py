"""KLXPPOTrainer: rollouts, losses and metrics of real runs, against PPO in plain loops."""

import math
import statistics

import pytest
import torch

from support.oracle import centered, kl_of_tokens, sampled_logps
from support.ppo_checks import SETTINGS, check_losses, check_rollout, plain_scores, record, scripted
from support.tiny import build_model, logged, lora, reward_even_tokens, weights
from support.tiny_ppo import (
    EOS,
    RecordingPPOTrainer,
    advantages_by_hand,
    as_tensor,
    build_ppo,
    build_scorer,
    completion_of,
    counting,
    kl_by_hand,
    losses_by_hand,
    rollout_with_tools,
    train_ppo,
    values_by_hand,
)


pytestmark = pytest.mark.slow


# ---- Rollouts and losses ----


@pytest.mark.parametrize("whiten", [True, False], ids=["whitened", "plain"])
@pytest.mark.parametrize("owner", ["head", "model"])
@pytest.mark.parametrize("adapter", ["full", "lora"])
def test_advantages_returns_and_losses(adapter, owner, whiten, tmp_path):
    extras = {} if adapter == "full" else {"peft_config": lora()}
    value_model = build_scorer(seed=3) if owner == "model" else None
    trainer = record(
        tmp_path, whiten_advantages=whiten, cliprange_value=0.05, extras=extras | {"value_model": value_model}
    )
    assert len(trainer.rollouts) == 2 and len(trainer.losses) == 16
    check_losses(trainer, build_model(), value_model=build_scorer() if owner == "model" else None)
    # Something was clipped and the policy had left the reference, or the checks would prove little.
    assert max(logged(trainer, "ppo/value_clip_ratio")) > 0.0
    assert max(logged(trainer, "clip_ratio/region_mean")) > 0.0
    assert logged(trainer, "klx/kl")[-1] > 1e-3


@pytest.mark.parametrize("owner", ["head", "model"])
def test_tool_tokens_carry_nothing(owner, tmp_path):
    value_model = build_scorer(seed=3) if owner == "model" else None
    trainer = record(tmp_path, extras={"rollout_func": rollout_with_tools, "value_model": value_model})
    check_losses(trainer, build_model(), value_model=build_scorer() if owner == "model" else None)
    rollout = trainer.rollouts[-1]
    tools = (rollout["completion_mask"] * (1 - rollout["tool_mask"])).bool()
    assert tools.any()
    assert not rollout["advantages"][tools].any() and not rollout["ppo_returns"][tools].any()
    # The score is on the policy's last token, even if tool tokens follow it.
    tool_last = [
        row
        for row, (mask, real) in enumerate(
            zip(tools.tolist(), rollout["completion_mask"].sum(1).tolist(), strict=True)
        )
        if mask[real - 1]
    ]
    assert tool_last


def test_what_tools_write_does_not_change_the_estimates(tmp_path):
    """A tool token at the end changes no values, returns or advantages."""

    def tool_at_the_end(prompts, trainer):
        answers = [completion_of(prompt) for prompt in prompts]
        return {
            "prompt_ids": trainer.processing_class(prompts)["input_ids"],
            "completion_ids": [[*ids, 9] for ids in answers],
            "logprobs": None,
            "env_mask": [[1] * len(ids) + [0] for ids in answers],
        }

    def reward(prompts, **kwargs):
        return [float(len(prompt)) for prompt in prompts]

    settings = SETTINGS | {"max_steps": 1, "num_mini_batches": 1, "num_ppo_epochs": 1, "whiten_advantages": False}
    with_tool, without = (
        train_ppo(tmp_path, RecordingPPOTrainer, rewards=reward, extras={"rollout_func": func}, **settings).rollouts[0]
        for func in (tool_at_the_end, scripted)
    )
    length = without["completion_ids"].size(1)
    for name in ("advantages", "ppo_returns"):
        torch.testing.assert_close(with_tool[name][:, :length], without[name], atol=1e-6, rtol=0)
        assert not with_tool[name][:, length:].any()


def test_truncated_completions_can_be_masked(tmp_path):
    trainer = record(tmp_path, mask_truncated_completions=True, extras={"rollout_func": scripted})
    check_losses(trainer, build_model())
    for batch in trainer.rollouts:
        cut_off = [EOS not in row for row in batch["completion_ids"].tolist()]
        assert any(cut_off) and not all(cut_off)
        assert not batch["ppo_mask"][torch.tensor(cut_off)].any()


def test_a_batch_with_every_completion_masked_trains_nothing_and_does_not_fail(tmp_path):
    def endless(prompts, trainer):
        return {
            "prompt_ids": trainer.processing_class(prompts)["input_ids"],
            "completion_ids": [[5, 6, 7]] * len(prompts),
            "logprobs": None,
        }

    trainer = build_ppo(
        tmp_path, mask_truncated_completions=True, max_steps=2, extras={"rollout_func": endless}, weight_decay=0.0
    )
    before = {name: weight.clone() for name, weight in weights(trainer).items()}
    trainer.train()
    assert all(torch.equal(before[name], weight) for name, weight in weights(trainer).items())
    assert all(loss == 0.0 for loss in logged(trainer, "loss"))


def test_completions_without_a_score_do_not_train(tmp_path):
    trainer = record(tmp_path, rewards=some_unscored)
    check_losses(trainer, build_model())
    for batch in trainer.rollouts:
        unscored = torch.tensor([score is None for score in plain_scores(batch)])
        assert unscored.any() and not unscored.all()
        assert not batch["ppo_mask"][unscored].any() and not batch["advantages"][unscored].any()
    scores = [score for score in plain_scores(trainer.rollouts[0]) if score is not None]
    assert logged(trainer, "ppo/score")[0] == pytest.approx(statistics.fmean(scores), abs=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "importance"])
def test_every_estimator_is_what_the_reward_pays(estimator, tmp_path):
    trainer = record(tmp_path, kl_estimator=estimator, whiten_advantages=False)
    reference = build_model().eval()
    for rollout in trainer.rollouts:
        kl = kl_of_tokens(rollout["policy"], reference, rollout, estimator, trainer.args.temperature)
        values = values_by_hand(rollout["value"], rollout["policy"], rollout)
        settings = {"coef": rollout["coef"], "gamma": trainer.args.gamma, "lam": trainer.args.lam}
        advantages, _ = advantages_by_hand(rollout, kl, values, plain_scores(rollout), **settings)
        expected = as_tensor(advantages, rollout["completion_ids"].size(1)).float()
        torch.testing.assert_close(rollout["advantages"], expected, atol=1e-5, rtol=1e-5)


def test_rewards_can_be_whitened(tmp_path):
    trainer = record(tmp_path, whiten_rewards=True, whiten_advantages=False)
    args = trainer.args
    for rollout in trainer.rollouts:
        kl = kl_by_hand(rollout, build_model().eval(), args.temperature)
        scores, rewards = plain_scores(rollout), []
        for row, positions in enumerate(counting(rollout)):
            rewards.append({t: -rollout["coef"] * float(kl[row][t]) for t in positions})
            rewards[row][positions[-1]] += scores[row]
        numbers = [reward for row in rewards for reward in row.values()]
        mean, scale = statistics.fmean(numbers), math.sqrt(statistics.pvariance(numbers) + 1e-8)
        values = values_by_hand(rollout["value"], rollout["policy"], rollout)
        # Unit variance and an unchanged mean: passed on as a KL of -reward without a score.
        shaped = [{t: -((reward - mean) / scale + mean) for t, reward in row.items()} for row in rewards]
        _, returns = advantages_by_hand(
            rollout, shaped, values, [0.0] * len(shaped), coef=1.0, gamma=args.gamma, lam=args.lam
        )
        expected = as_tensor(returns, rollout["completion_ids"].size(1)).float()
        torch.testing.assert_close(rollout["ppo_returns"], expected, atol=1e-5, rtol=0)


# ---- Gradients ----


def test_policy_gradient_is_reinforce_with_kl_shaped_returns(tmp_path):
    """
    With gamma = lam = 1, a zero value function and no whitening, the loss is
    `-mean_t(log pi_t * (sum_{s>=t} -coef kl_s + score))`.
    """
    torch.manual_seed(5)
    reference = build_model(seed=1)
    trainer = train_ppo(
        tmp_path,
        RecordingPPOTrainer,
        gamma=1.0,
        lam=1.0,
        vf_coef=0.0,
        whiten_advantages=False,
        num_ppo_epochs=1,
        kl_penalty_coef=0.3,
        per_device_train_batch_size=8,
        max_steps=1,
        extras={"ref_model": build_model(seed=1)},
    )
    (rollout,), (gradients,) = trainer.rollouts, trainer.gradients
    assert not rollout["ppo_values"].any()
    kl, scores = kl_by_hand(rollout, reference, 0.7), plain_scores(rollout)
    policy = build_model()
    logps = sampled_logps(policy, rollout, 0.7)
    loss, tokens = 0.0, 0
    for row, positions in enumerate(counting(rollout)):
        for t in positions:
            to_go = sum(-0.3 * float(kl[row, s]) for s in positions if s >= t) + scores[row]
            loss, tokens = loss - logps[row, t] * to_go, tokens + 1
    (loss / tokens).backward()
    expected = {name: parameter.grad for name, parameter in policy.named_parameters()}
    assert max(gradient.abs().max() for gradient in expected.values()) > 0.1
    assert {name for name in gradients if "klx_value" not in name} == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(
            gradients[name], gradient, atol=1e-5, rtol=0, msg=lambda text, n=name: f"{n}: {text}"
        )
    assert all(not gradient.any() for name, gradient in gradients.items() if "klx_value" in name)


@pytest.mark.parametrize("owner", ["head", "model"])
def test_value_gradient_is_that_of_the_squared_error(owner, tmp_path):
    """Without clipping, the value function's gradient is that of half the mean squared error to its returns."""
    value_model = build_scorer(seed=3) if owner == "model" else None
    trainer = train_ppo(
        tmp_path,
        RecordingPPOTrainer,
        vf_coef=0.6,
        num_ppo_epochs=1,
        cliprange_value=1e6,
        per_device_train_batch_size=8,
        max_steps=1,
        extras={"value_model": value_model},
    )
    (rollout,), (gradients,) = trainer.rollouts, trainer.gradients
    tensors = {name: weight for name, weight in rollout["value"].items() if isinstance(weight, torch.Tensor)}
    state = {name: weight.clone().requires_grad_() for name, weight in tensors.items()}
    if owner == "model":
        module = build_scorer(seed=3)
        ids = torch.cat([rollout["prompt_ids"], rollout["completion_ids"]], dim=1)
        mask = torch.cat([rollout["prompt_mask"], rollout["completion_mask"]], dim=1)
        values = module.score(module.model(input_ids=ids, attention_mask=mask).last_hidden_state)
        values = values[:, -rollout["completion_ids"].size(1) - 1 : -1, 0]
        state = {f"model.{name}": parameter for name, parameter in module.named_parameters()}
    else:
        # The first rollout: no returns have been seen, so the unit of the values is 1.
        values = values_by_hand.__wrapped__(state | {"mean": 0.0, "std": 1.0}, rollout["policy"], rollout)
    real = rollout["ppo_mask"].bool()
    (0.6 * 0.5 * (values - rollout["ppo_returns"])[real].square().mean()).backward()
    for name, parameter in state.items():
        torch.testing.assert_close(gradients[f"klx_value.{name}"], parameter.grad, atol=1e-5, rtol=0)
    assert max(parameter.grad.abs().max() for parameter in state.values()) > 1e-2


@pytest.mark.parametrize("mini_batches", [1, 2])
@pytest.mark.parametrize("owner", ["head", "model"])
def test_micro_batches_do_not_matter(owner, mini_batches, tmp_path):
    runs = []
    for batch, accumulation in ((8, 1), (2, 4)):
        trainer = build_ppo(
            tmp_path,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulation,
            num_mini_batches=mini_batches,
            num_ppo_epochs=2,
            max_steps=4 * mini_batches,
            vf_coef=0.7,
            # Adam would turn the rounding of a gradient near zero into a step.
            optim="sgd",
            learning_rate=0.1,
            extras={
                "rollout_func": scripted,
                "value_model": build_scorer(seed=3, initializer_range=0.05) if owner == "model" else None,
            },
        )
        assert trainer.args.generation_batch_size == 8
        trainer.train()
        runs.append(trainer)
    whole, cut = runs
    assert (whole.args.steps_per_generation, cut.args.steps_per_generation) == (mini_batches, 4)
    initial = build_model().state_dict()
    assert max((weights(whole)[name] - weight).abs().max() for name, weight in initial.items()) > 5e-3
    for name, weight in weights(whole).items():
        torch.testing.assert_close(weights(cut)[name], weight, atol=1e-5, rtol=0)
    for name in ("loss", "ppo/policy_loss", "ppo/value_loss", "ppo/explained_variance", "klx/kl"):
        # Relative to large values, within fp32: an explained variance may be far below zero.
        assert logged(cut, name) == pytest.approx(logged(whole, name), abs=1e-5, rel=1e-6), name
    # Not 1e-5 in absolute terms: the norms are around 20, and fp32 has only six digits.
    assert logged(cut, "grad_norm") == pytest.approx(logged(whole, "grad_norm"), rel=1e-5)


def test_forward_batch_size_outside_the_loss_does_not_matter(tmp_path):
    one, other = (
        train_ppo(
            tmp_path, max_steps=4, num_ppo_epochs=2, extras={"rollout_func": scripted}, optim="sgd",
            local_rollout_forward_batch_size=size,
        )
        for size in (None, 3)
    )  # fmt: skip
    for name, weight in weights(one).items():
        torch.testing.assert_close(weights(other)[name], weight, atol=1e-6, rtol=0)


# ---- Placements, controllers, penalty off ----


def some_unscored(completion_ids, **kwargs):
    return [None if ids[0] % 3 == 0 else float(ids[0] % 5) for ids in completion_ids]


@pytest.mark.parametrize(
    ("centering", "rewards"),
    [(centering, reward_even_tokens) for centering in ("batch", "microbatch", "group", "sequence", "none")]
    # A completion without a score counts in the mean but gets no adjustment.
    + [(centering, some_unscored) for centering in ("batch", "microbatch")],
)
def test_placement_advantage_adds_the_adjustment_to_whitened_advantages(centering, rewards, tmp_path):
    trainer = record(tmp_path, kl_placement="advantage", kl_centering=centering, num_generations=2, rewards=rewards)
    reference, args, largest = build_model().eval(), trainer.args, 0.0
    worked_out = [check_rollout(trainer, rollout, reference) for rollout in trainer.rollouts]
    for micro in trainer.losses:
        rollout, (advantages, returns) = trainer.rollouts[micro["rollout"]], worked_out[micro["rollout"]]
        rows, everything = micro["row"].tolist(), list(range(len(advantages)))
        kl = kl_by_hand(rollout, reference, args.temperature)
        real = [[int(t in positions) for t in range(kl.size(1))] for positions in counting(rollout)]
        kl = [[float(v) if r else 0.0 for v, r in zip(*pair, strict=True)] for pair in zip(kl, real, strict=True)]
        sets = {
            "none": None,
            "sequence": [[row] for row in everything],
            "group": [everything[start : start + 2] for start in everything[::2]],
            "batch": [everything],
            "microbatch": [rows, [row for row in everything if row not in rows]],
        }[centering]
        adjustment = centered(kl, real, rollout["coef"], sets)
        adjusted = [{t: a + float(adjustment[row, t]) for t, a in advantages[row].items()} for row in everything]
        policy_loss, value_loss = losses_by_hand(
            micro,
            rollout,
            adjusted,
            returns,
            values_by_hand(micro["value"], micro["policy"], micro),
            temperature=args.temperature,
            clip=args.cliprange,
            value_clip=args.cliprange_value,
        )
        tokens = sum(len(row) for row in counting(rollout)) / args.num_mini_batches
        assert float(micro["loss"]) == pytest.approx((policy_loss + args.vf_coef * value_loss) / tokens, abs=1e-5)
        largest = max(largest, float(adjustment.abs().max()))
    assert largest > 1e-3
    if rewards is some_unscored:
        assert any(score is None for score in plain_scores(trainer.rollouts[1]))


@pytest.mark.parametrize("estimator", ["k3", "k2", "full"])
def test_placement_loss_adds_the_controller_s_coefficient_times_the_kl(estimator, tmp_path):
    """`coef * ratio * kl` of each token for the sampled estimators, `coef * kl` for the exact one."""
    trainer = record(
        tmp_path, kl_placement="loss", kl_estimator=estimator, kl_target=0.5, kl_horizon=20, learning_rate=1e-2
    )
    reference, args, ratios = build_model().eval(), trainer.args, []
    assert trainer.rollouts[0]["coef"] != trainer.rollouts[1]["coef"]

    def term(micro, rollout):
        kl = kl_of_tokens(micro["policy"], reference, micro, estimator, args.temperature)
        with torch.no_grad():
            logps, old_logps = (
                sampled_logps(policy, micro, args.temperature) for policy in (micro["policy"], rollout["policy"])
            )
        total = 0.0
        for row, positions in enumerate(counting(micro)):
            for t in positions:
                ratios.append(math.exp(float(logps[row, t] - old_logps[row, t])))
                total += kl[row][t] * (1.0 if estimator == "full" else ratios[-1])
        return rollout["coef"] * total

    check_losses(trainer, reference, term=term)
    # The ratio matters here.
    assert max(ratios) > 1.1 and min(ratios) < 0.9


@pytest.mark.parametrize("placement", ["reward", "advantage", "loss"])
@pytest.mark.parametrize(
    "controller",
    [
        {"kl_controller": "fixed"},
        {"kl_controller": "adaptive", "kl_target": 0.01, "kl_horizon": 40},
        {"kl_controller": "exponential", "kl_target": 0.01},
        {"kl_controller": "pid", "kl_target": 0.01},
    ],
    ids=lambda fields: fields["kl_controller"],
)
def test_controllers_drive_every_placement(controller, placement, tmp_path):
    trainer = train_ppo(
        tmp_path, kl_placement=placement, num_ppo_epochs=2, max_steps=8, per_device_train_batch_size=8, **controller
    )
    coefs, kls = logged(trainer, "klx/coef"), logged(trainer, "klx/kl")
    assert len(coefs) == len(kls) == 4 and coefs[0] == 0.05  # one update per rollout, not per step
    assert kls[0] == pytest.approx(0.0, abs=1e-6) and kls[-1] > 0.1
    if controller["kl_controller"] == "fixed":
        assert coefs == [0.05] * 4
    else:
        # Too little KL in the first rollout lowers the coefficient, far too much raises it.
        assert coefs[1] < coefs[0] and coefs[-1] > coefs[1]
    # The applied coefficient is the one from before the batch's update.
    replay = trainer.args.build_kl_controller()
    for coef, kl in zip(coefs, kls, strict=True):
        assert coef == pytest.approx(replay.value, rel=1e-9)
        replay.update(kl, 8)


def test_without_a_penalty_it_is_plain_ppo(tmp_path):
    trainer = record(tmp_path, kl_penalty_coef=0.0)
    assert trainer.kl_reference is None and trainer.kl_controller is None and trainer.ref_model is None
    names = {name for entry in trainer.state.log_history for name in entry if name.startswith("klx/")}
    assert names == {"klx/kl_update"}  # how far a rollout's steps move the policy, which needs no reference
    updates = logged(trainer, "klx/kl_update")
    assert len(updates) == 8 and updates[0] == pytest.approx(0.0, abs=1e-6) and max(updates) > 1e-3
    assert logged(trainer, "ppo/non_score_reward") == [0.0, 0.0]
    check_losses(trainer, build_model())


def test_without_a_penalty_and_with_one_epoch(tmp_path):
    # TRL needs no policy log-probs before the loss, but we need the values.
    trainer = record(tmp_path, kl_penalty_coef=0.0, num_ppo_epochs=1, num_mini_batches=1, max_steps=2)
    check_losses(trainer, build_model())


def test_kl_can_be_measured_without_a_penalty(tmp_path):
    trainer = record(tmp_path, kl_penalty_coef=0.0, kl_monitor=True)
    plain = record(tmp_path, kl_penalty_coef=0.0)
    assert trainer.kl_reference is not None
    assert logged(trainer, "klx/kl")[-1] > 1e-3 and logged(trainer, "klx/coef") == [0.0, 0.0]
    assert logged(trainer, "loss") == logged(plain, "loss")
    for name, weight in weights(plain).items():
        assert torch.equal(weights(trainer)[name], weight)


def test_one_update_of_the_controller_per_rollout_counts_its_completions(tmp_path):
    trainer = record(tmp_path, kl_target=0.01, kl_horizon=100, kl_placement="advantage", kl_centering="microbatch")
    coefs, kls = logged(trainer, "klx/coef"), logged(trainer, "klx/kl")
    change = min(max(kls[0] / 0.01 - 1, -0.2), 0.2) * 8 / 100
    assert coefs == pytest.approx([0.2, 0.2 * (1 + change)], rel=1e-6)


def test_kl_metrics_of_a_run(tmp_path):
    trainer = record(tmp_path)
    rollout, reference = trainer.rollouts[1], build_model().eval()
    kl = kl_by_hand(rollout, reference, trainer.args.temperature)
    k3 = [
        sum(math.exp(-float(kl[row, t])) - 1 + float(kl[row, t]) for t in p) for row, p in enumerate(counting(rollout))
    ]
    k1 = [sum(float(kl[row, t]) for t in p) for row, p in enumerate(counting(rollout))]
    assert logged(trainer, "klx/kl")[1] == pytest.approx(statistics.fmean(k3), abs=1e-5)
    assert logged(trainer, "klx/kl_k1")[1] == pytest.approx(statistics.fmean(k1), abs=1e-5)
    assert logged(trainer, "ppo/non_score_reward")[1] == pytest.approx(-0.2 * statistics.fmean(k1), abs=1e-5)
