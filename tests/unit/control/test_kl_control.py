"""KL control without a trainer, placements as objects, and user-defined placements and trainers."""

import json
import math
import warnings
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from accelerate import Accelerator, PartialState
from trl import GRPOTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

from support.config_fields import build
from support.grpo_checks import LORA, check_advantages, check_statistic
from support.oracle import FORMULAS, centered, centering_sets, counting, discounted, kl_of_tokens
from support.tiny import Recorder, TotalRecorder, build_model, build_trainer, logged, scripted_rollout, train, weights
from trl_klx import (
    FixedKLController,
    KLXGRPOConfig,
    KLXGRPOTrainer,
    KLXPPOConfig,
    KLXRLOOConfig,
    KLXTrainerMixin,
    get_kl_controller,
)
from trl_klx.control.kl_control import KLControl
from trl_klx.control.placements import Placement, base, get_placement, list_placements, register_placement
from trl_klx.control.rollout import Pull, Rollout, Scored, TokenKL
from trl_klx.controllers.drift import DriftMonitor
from trl_klx.controllers.stall import StallMonitor
from trl_klx.references.base import KLReference
from trl_klx.trainers.config import KLXConfigMixin


CONFIGS = {"grpo": KLXGRPOConfig, "rloo": KLXRLOOConfig, "ppo": KLXPPOConfig}


@pytest.fixture(autouse=True)
def accelerate_is_there():
    # Warnings are logged through accelerate, which must be initialised in a process without a trainer.
    PartialState(cpu=True)


def one_process(sums: torch.Tensor) -> torch.Tensor:
    return sums


def build_control(controller="adaptive", coef=0.2, **settings) -> KLControl:
    options = {"target": 0.5, "horizon": 100, "min_coef": 1e-4, "max_coef": 10.0}
    return KLControl(
        get_kl_controller(controller, init_coef=coef, **options),
        KLReference({"kind": "test"}),
        **({"name": controller, "target": 0.5} | settings),
    )


def two_passes(rows: int = 4, length: int = 5, seed: int = 0) -> tuple[Scored, Scored, torch.Tensor]:
    """Log-probs of policy and reference, and a mask of completions of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    policy, reference = (-2 * torch.rand(rows, length, generator=generator) for _ in range(2))
    mask = torch.arange(length) < torch.randint(1, length + 1, (rows, 1), generator=generator)
    return Scored(policy), Scored(reference), mask


def part(scored: Scored, rows: slice) -> Scored:
    return Scored(scored.logps[rows])


def totals(policy: Scored, reference: Scored, mask: torch.Tensor, kind: str) -> float:
    rows = zip(policy.logps.tolist(), reference.logps.tolist(), mask.tolist(), strict=True)
    return sum(FORMULAS[kind](p - r) for row in rows for p, r, counts in zip(*row, strict=True) if counts)


# ---- One batch ----


def test_numbers():
    # Two completions of two tokens and one. Log-ratios 1, -1 and 0.5: k1 sums to 0.5; k3 is exp(-1) = 0.367879, then
    # exp(1) - 2 = 0.718282, then exp(-0.5) - 0.5 = 0.106531, together 1.192692.
    policy = Scored(torch.tensor([[-1.0, -2.0], [-0.5, -7.0]]))
    reference = Scored(torch.tensor([[-2.0, -1.0], [-1.0, -1.0]]))
    mask = torch.tensor([[True, True], [True, False]])
    control = build_control("fixed", unit="sequence")
    rollout = control.begin()
    control.add(rollout, control.measure(policy, reference), mask)
    metrics = control.finish(rollout, one_process, train=True)
    expected = {"kl": 0.596346, "kl_k1": 0.25, "kl_per_token": 0.397564, "coef": 0.2, "target": 0.5}
    expected |= {"error": 0.192692, "saturated": 0.0}
    assert metrics == pytest.approx(expected, abs=1e-5)


class SeeingController(FixedKLController):
    """Keeps what it is shown."""

    def observe(self, batch):
        self.seen = batch
        return super().observe(batch)


def seen_by_the_controller(kl: TokenKL, mask: torch.Tensor, pull: Pull):
    control = KLControl(SeeingController(0.2), KLReference({"kind": "test"}), unit="sequence")
    rollout = control.begin()
    control.add(rollout, kl, mask, None, pull)
    control.finish(rollout, one_process, train=True)
    return control.controller.seen


def test_drive_and_drag():
    # Log-ratios ln 2, -ln 2 | ln 2, masked: 1 - exp(-lr) is 1/2, -1 | 1/2. With advantages 1 | -1 the drives are -1/2
    # and -1/2: mean -1/2, error 0. The drags are ln 2 (1/2 + 1) and ln 2 / 2: mean ln 2.
    k1 = math.log(2) * torch.tensor([[1.0, -1.0], [1.0, -9.0]])
    mask = torch.tensor([[True, True], [True, False]])
    seen = seen_by_the_controller(TokenKL(k1, k1.abs(), k1, k1), mask, Pull(torch.tensor([1.0, -1.0])))
    assert (seen.drive, seen.drag) == pytest.approx((-0.5, math.log(2)), abs=1e-6)
    assert seen.drive_error == pytest.approx(0.0, abs=1e-6)


def test_a_baseline_that_is_wrong_drives_nothing():
    """Two prompts at different distances from the reference, every token as often as it is sampled."""
    policy = torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.25, 0.5]])
    reference = torch.tensor([[0.4, 0.3, 0.3], [0.5, 0.3, 0.2]])
    tokens = [[0, 0, 1, 2], [0, 1, 2, 2]]
    k1 = torch.stack([(p.log() - r.log())[row] for p, r, row in zip(policy, reference, tokens, strict=True)])
    k1, offset = k1.reshape(-1, 1), torch.tensor([[3.0], [-1.0]]).expand(2, 4).reshape(-1, 1)
    advantages = torch.linspace(-1.0, 1.0, 8).unsqueeze(1)
    plain, shifted = (
        seen_by_the_controller(TokenKL(k1, k1.abs(), k1, k1), torch.ones(8, 1).bool(), Pull(one, k1 + two))
        for one, two in ((advantages, 0.0), (advantages + offset, offset))
    )
    assert (shifted.drive, shifted.drag) == pytest.approx((plain.drive, plain.drag), abs=1e-6)


@pytest.mark.parametrize("estimator", sorted(FORMULAS))
@pytest.mark.parametrize("statistic", ["k3", "k2"])
def test_measure_gives_penalty_statistic_k1_and_expectation(estimator, statistic):
    policy, reference, _ = two_passes()
    kl = build_control(estimator=estimator, statistic=statistic).measure(policy, reference)
    for tensor, kind in zip(kl, (estimator, statistic, "k1", estimator), strict=True):
        rows = zip(policy.logps.tolist(), reference.logps.tolist(), strict=True)
        expected = [[FORMULAS[kind](p - r) for p, r in zip(*row, strict=True)] for row in rows]
        torch.testing.assert_close(tensor, torch.tensor(expected), rtol=1e-5, atol=1e-6)
        assert tensor.dtype == torch.float32 and not tensor.requires_grad


@pytest.mark.parametrize("with_logps", [True, False], ids=["log-probs", "hidden states alone"])
def test_measure_of_the_exact_kl(with_logps):
    generator = torch.Generator().manual_seed(1)
    hidden, ref_hidden = (torch.randn(3, 4, 6, generator=generator) for _ in range(2))
    weight, ref_weight = (torch.randn(11, 6, generator=generator) for _ in range(2))
    tokens = torch.randint(0, 11, (3, 4), generator=generator)
    p, q = (torch.log_softmax((h @ w.T).double(), dim=-1) for h, w in ((hidden, weight), (ref_hidden, ref_weight)))
    logps, ref_logps = (table.gather(2, tokens.unsqueeze(2)).squeeze(2) for table in (p, q))
    control = build_control(estimator="k1", statistic="full")
    kl = control.measure(
        Scored(logps.float(), hidden),
        Scored(ref_logps.float() if with_logps else None, ref_hidden),
        (lambda x: x @ weight.T, lambda x: x @ ref_weight.T),
        tokens,
    )
    torch.testing.assert_close(kl.statistic, (p.exp() * (p - q)).sum(2).float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(kl.k1, (logps - ref_logps).float(), rtol=1e-4, atol=1e-5)
    assert torch.equal(kl.penalised, kl.k1)


@pytest.mark.parametrize("unit", ["sequence", "token"])
@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_micro_batches_add_up_to_the_whole(micro_batches, unit):
    policy, reference, mask = two_passes()
    mask[3] = False  # a completion that does not count
    control = build_control(unit=unit)
    rollout, size = control.begin(), 4 // micro_batches
    for start in range(0, 4, size):
        rows = slice(start, start + size)
        charge = torch.full(mask[rows].shape, -2.5) * mask[rows]
        control.add(rollout, control.measure(part(policy, rows), part(reference, rows)), mask[rows], charge)
    metrics = control.finish(rollout, one_process, train=True)
    tokens = int(mask.sum())
    k1, k3 = (totals(policy, reference, mask, kind) for kind in ("k1", "k3"))
    per = 3 if unit == "sequence" else tokens
    assert metrics["kl"] == pytest.approx(k3 / per, rel=1e-5)
    assert metrics["kl_k1"] == pytest.approx(k1 / per, rel=1e-5)
    assert metrics["kl_per_token"] == pytest.approx(k3 / tokens, rel=1e-5)
    assert metrics["adjustment_abs_mean"] == pytest.approx(0.2 * 2.5)
    # Ziegler's rule counts all completions of the batch, masked ones included.
    error = min(max(metrics["kl"] / 0.5 - 1, -0.2), 0.2)
    assert control.controller.value == pytest.approx(0.2 * (1 + error * 4 / 100), rel=1e-9)


def test_sums_are_taken_over_all_processes():
    policy, reference, mask = two_passes()
    other_policy, other_reference, other_mask = two_passes(seed=5)
    whole, here, there = build_control(), build_control(), build_control()
    together = whole.begin()
    for passes in ((policy, reference, mask), (other_policy, other_reference, other_mask)):
        whole.add(together, whole.measure(*passes[:2]), passes[2])
    expected = whole.finish(together, one_process, train=True)

    sent = []
    elsewhere = there.begin()
    there.add(elsewhere, there.measure(other_policy, other_reference), other_mask)
    there.finish(elsewhere, lambda sums: sent.append(sums.clone()) or sums, train=False)
    rollout = here.begin()
    here.add(rollout, here.measure(policy, reference), mask)
    assert here.finish(rollout, lambda sums: sums + sent[0], train=True) == pytest.approx(expected, rel=1e-9)
    assert len(sent) == 1  # one reduction per batch
    assert here.controller.value == pytest.approx(whole.controller.value, rel=1e-12)


def test_evaluation_and_monitoring_leave_the_controller_alone():
    for settings, train_ in (({}, False), ({"penalises": False}, True)):
        control = build_control(**settings)
        policy, reference, mask = two_passes()
        rollout = control.begin()
        control.add(rollout, control.measure(policy, reference), mask)
        before = control.controller.state_dict()
        metrics = control.finish(rollout, one_process, train=train_)
        assert control.controller.state_dict() == before
        assert ("saturated" in metrics) == control.penalises


def test_a_batch_keeps_its_coefficient():
    control = build_control()
    first, second = control.begin(), control.begin()
    policy, reference, mask = two_passes()
    for rollout in (first, second):
        control.add(rollout, control.measure(policy, reference), mask)
    assert control.finish(first, one_process, train=True)["coef"] == 0.2
    assert control.controller.value != 0.2
    assert control.finish(second, one_process, train=True)["coef"] == 0.2
    assert control.begin().coef == control.controller.value


def test_a_batch_without_any_token_changes_nothing(caplog):
    control = build_control(drift=DriftMonitor(target=0.5, window=2))
    policy, reference, mask = two_passes()
    before, rollout = control.state_dict(), control.begin()
    control.add(rollout, control.measure(policy, reference), torch.zeros_like(mask))
    assert control.finish(rollout, one_process, train=True) == {}
    assert control.state_dict() == before


@pytest.mark.parametrize("warns", ["masked", "drift"])
def test_nothing_of_accelerate_is_needed_to_warn(warns, monkeypatch):
    monkeypatch.setattr(PartialState, "_shared_state", {})  # as in a process without a trainer
    control = build_control(drift=DriftMonitor(target=1e-6, window=1))
    policy, reference, mask = two_passes()
    rollout = control.begin()
    control.add(rollout, control.measure(policy, reference), torch.zeros_like(mask) if warns == "masked" else mask)
    assert bool(control.finish(rollout, one_process, train=True)) == (warns == "drift")


@pytest.mark.parametrize("unit", ["sequence", "token"])
def test_ignored_tokens(unit):
    tokens = torch.tensor([[5, 1, 7, 1], [1, 1, 9, 5]])
    mask = torch.tensor([[True, True, True, False], [True, True, False, False]])
    assert build_control().mask(mask, tokens) is mask
    found = build_control(ignored=(1, 9)).mask(mask, tokens)
    assert found.tolist() == [[True, False, True, False], [False, False, False, False]]
    # The mean leaves out ignored tokens, and a completion that has no others.
    control = build_control(ignored=(1, 9), unit=unit)
    policy, reference, _ = two_passes(rows=2, length=4)
    rollout = control.begin()
    control.add(rollout, control.measure(policy, reference), found)
    metrics = control.finish(rollout, one_process, train=True)
    per = 1 if unit == "sequence" else 2
    assert metrics["kl"] == pytest.approx(totals(policy, reference, found, "k3") / per, rel=1e-5)


# ---- State ----


def used_control(**settings) -> KLControl:
    drift = DriftMonitor(target=0.5, window=3)
    control = build_control(**({"controller": "pid", "drift": drift} | settings))
    for seed in range(4):
        policy, reference, mask = two_passes(seed=seed)
        rollout = control.begin()
        control.add(rollout, control.measure(policy, reference), mask)
        control.finish(rollout, one_process, train=True)
    return control


def test_state_goes_through_json_and_goes_on_the_same():
    control, fresh = used_control(), build_control("pid", drift=DriftMonitor(target=0.5, window=3))
    state = json.loads(json.dumps(control.state_dict(), allow_nan=False))
    assert state == control.state_dict() and state["reference"] == {"kind": "test"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fresh.load_state_dict(state, "checkpoint-4")
    assert fresh.state_dict() == control.state_dict()
    for each in (control, fresh):
        policy, reference, mask = two_passes(seed=9)
        rollout = each.begin()
        each.add(rollout, each.measure(policy, reference), mask)
        each.finish(rollout, one_process, train=True)
    assert fresh.state_dict() == control.state_dict() and fresh.controller.value != state["controller"]["init_coef"]


@pytest.mark.parametrize("change", [{"controller": "exponential"}, {"coef": 0.3}], ids=str)
def test_another_controller_starts_from_the_config(change):
    fresh = build_control(**({"controller": "pid"} | change))
    before = fresh.controller.state_dict()
    with pytest.warns(UserWarning, match="The KL controller was changed since the checkpoint 'checkpoint-4'"):
        fresh.load_state_dict(used_control().state_dict(), "checkpoint-4")
    assert fresh.controller.state_dict() == before


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("controller", "state"), None, "the controller state in 'checkpoint-4' is not valid"),
        (("controller", "state"), {"value": "much"}, "the controller state in 'checkpoint-4' is not valid"),
        (("drift", "values"), [math.nan], "the drift window in 'checkpoint-4' is not valid"),
    ],
)
def test_damaged_state_is_refused(place, value, message):
    state = json.loads(json.dumps(used_control().state_dict()))
    state[place[0]][place[1]] = value
    fresh = build_control("pid", drift=DriftMonitor(target=0.5, window=3))
    with pytest.raises(ValueError, match=f"Cannot resume: {message}"):
        fresh.load_state_dict(state, "checkpoint-4")


def resetting_control(patience: int = 2) -> KLControl:
    """Control over a reference that only counts its resets."""
    control = build_control("pid", drift=DriftMonitor(target=0.5, window=3), stall=StallMonitor(patience))
    control.reference.restart = lambda: None
    return control


def one_batch(control: KLControl, reward: float, seed: int = 0, reduce=one_process, train: bool = True) -> dict:
    policy, reference, mask = two_passes(seed=seed)
    rollout = control.begin()
    control.add(rollout, control.measure(policy, reference), mask)
    control.add_reward(rollout, reward, mask.device)
    return control.finish(rollout, reduce, train=train)


def test_a_reset_starts_over():
    control = resetting_control()
    first = control.state_dict()
    for seed, reward in enumerate([1.0, 0.5]):
        assert not control.reset_due
        assert one_batch(control, reward, seed)["reference_resets"] == 0.0
        control.clock.tick(0.1)
    assert control.reset_due and control.state_dict() != first
    control.reset_reference()
    assert not control.reset_due and control.state_dict() == first | {"reference": {"kind": "test", "resets": 1}}
    assert one_batch(control, 0.0)["reference_resets"] == 1.0


def test_evaluation_never_brings_a_reset_about():
    control = resetting_control()
    for _ in range(3):
        one_batch(control, 1.0, train=False)
    assert not control.reset_due and control.stall.state_dict() == {"rewards": [], "kls": []}


def test_processes_decide_by_the_mean_of_their_rewards():
    control = resetting_control()

    def with_another_process(sums: torch.Tensor) -> torch.Tensor:
        other = sums.clone()
        other[-2] += 1.0  # its reward; the count of processes comes last
        return sums + other

    one_batch(control, 1.0, reduce=with_another_process)
    assert control.stall.state_dict()["rewards"] == [1.5]


def test_a_batch_against_an_earlier_reference_is_measured_and_not_learned_from():
    control = resetting_control()
    policy, reference, mask = two_passes()
    rollout = control.begin()
    control.reset_reference()
    before = control.state_dict()
    control.add(rollout, control.measure(policy, reference), mask)
    control.add_reward(rollout, 1.0, mask.device)
    assert control.finish(rollout, one_process, train=True)["kl"] > 0
    assert control.state_dict() == before


def test_the_window_of_a_stall_is_restored():
    control, fresh = resetting_control(), resetting_control()
    one_batch(control, 1.0)
    fresh.load_state_dict(json.loads(json.dumps(control.state_dict())), "checkpoint-4")
    one_batch(fresh, 1.0)
    assert fresh.reset_due
    state = control.state_dict() | {"stall": {"rewards": "many"}}
    with pytest.raises(ValueError, match="Cannot resume: the last batches in 'checkpoint-4' are not valid"):
        fresh.load_state_dict(state, "checkpoint-4")


def test_a_state_without_drift_loads():
    state = used_control(drift=None).state_dict()
    assert state["drift"] is None
    fresh = build_control("pid", drift=DriftMonitor(target=0.5, window=3))
    fresh.load_state_dict(state, "checkpoint-4")
    assert fresh.controller.state_dict() == state["controller"]["state"]


# ---- Placements ----


def place(algorithm: str, placement: str, **fields) -> Placement:
    settings = {"kl_penalty_coef": 0.3, "kl_placement": placement, "num_generations": 2}
    if algorithm == "grpo":
        settings["scale_rewards"] = "none"
    args = build(CONFIGS[algorithm], **(settings | fields))
    assert args.placement_class is get_placement(algorithm, placement)
    return args.placement_class(args, Accelerator(cpu=True))  # after the config, which resets accelerate's state


def measured(estimator: str = "k1") -> tuple[dict, TokenKL, torch.Tensor, list[list[float]], list[list[int]]]:
    """A batch of two groups of two, its KL, and the same KL in plain lists."""
    policy, reference, mask = two_passes()
    kl = build_control(estimator=estimator).measure(policy, reference)
    batch = {"advantages": torch.tensor([0.5, -0.5, 1.0, -1.0]), "klx_group": torch.tensor([0, 0, 1, 1])}
    counts = mask.long().tolist()
    plain = [
        [v if c else 0.0 for v, c in zip(*row, strict=True)] for row in zip(kl.penalised.tolist(), counts, strict=True)
    ]
    return batch, kl, mask, plain, counts


CENTERINGS = ["batch", "microbatch", "group", "sequence", "none"]


@pytest.mark.parametrize("discount", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("centering", CENTERINGS)
@pytest.mark.parametrize("estimator", ["k1", "importance"])
@pytest.mark.parametrize("algorithm", CONFIGS)
def test_advantage_placement(algorithm, estimator, centering, discount):
    if (estimator, centering) == ("importance", "sequence"):
        with pytest.raises(
            ValueError, match="`kl_estimator='importance'` cannot be used with `kl_centering='sequence'`"
        ):
            place(algorithm, "advantage", kl_estimator=estimator, kl_centering=centering)
        return
    fields = {"kl_estimator": estimator, "kl_centering": centering, "kl_discount": discount}
    placement = place(algorithm, "advantage", **fields)
    batch, kl, mask, plain, counts = measured(estimator)
    advantages = batch["advantages"].clone()
    charge = placement.charge(batch, kl, mask)
    placement.apply(batch, charge, 0.3)
    adjustment = -0.3 * charge
    sets = centering_sets(centering, 4, 2, [0, 1, 2, 3])
    torch.testing.assert_close(
        adjustment, centered(discounted(plain, counts, discount), counts, 0.3, sets), rtol=1e-5, atol=1e-6
    )
    if algorithm == "grpo":
        assert torch.equal(batch["advantages"], advantages.unsqueeze(1) + adjustment)
        assert "klx_adjustment" not in batch
    else:
        assert torch.equal(batch["advantages"], advantages) and torch.equal(batch["klx_adjustment"], adjustment)
    # The centering determines when the batch must be measured.
    assert placement.per_microbatch == (centering == "microbatch")
    assert placement.per_batch == (centering in ("batch", "group"))
    assert placement.groups == (centering == "group")
    assert not placement.in_loss and not placement.asks_at_generation


@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
@pytest.mark.parametrize("estimator", ["k1", "importance"])
def test_reward_placement_of_sequences(algorithm, estimator):
    placement = place(algorithm, "reward", kl_estimator=estimator)
    assert placement.asks_at_generation and not placement.in_loss
    _, kl, mask, plain, _ = measured(estimator)
    policy = two_passes()[0]
    rollout = Rollout(coef=0.3, policy=policy)
    answer = placement.answer(rollout, kl, mask)
    torch.testing.assert_close(rollout.charged_kls, torch.tensor([sum(row) for row in plain]))
    if algorithm == "rloo":
        # TRL subtracts `beta`, our coefficient, times the summed difference of policy and reference log-probs.
        subtracted = ((policy.logps - answer) * mask).sum(1)
        torch.testing.assert_close(subtracted, torch.tensor([sum(row) for row in plain]), rtol=1e-5, atol=1e-5)
    assert answer.shape == mask.shape


@pytest.mark.parametrize("estimator", ["k1", "importance"])
def test_reward_placement_of_tokens(estimator):
    placement = place("ppo", "reward", kl_estimator=estimator)
    batch, kl, mask, plain, _ = measured(estimator)
    placement.apply(batch, placement.charge(batch, kl, mask), 0.3)
    for name in ("klx_penalty", "klx_expected"):
        torch.testing.assert_close(batch[name], 0.3 * torch.tensor(plain))


@pytest.mark.parametrize("old", [None, "old_per_token_logps", "klx_old_logps"])
@pytest.mark.parametrize("sampler", [False, True], ids=["policy", "another sampler"])
@pytest.mark.parametrize("estimator", ["k2", "k3"])
@pytest.mark.parametrize("algorithm", CONFIGS)
def test_loss_placement(algorithm, estimator, sampler, old):
    placement = place(algorithm, "loss", kl_estimator=estimator)
    assert placement.in_loss and placement.needs_reference_logps
    policy, reference, _ = two_passes()
    logps = policy.logps.requires_grad_()
    batch = {"klx_ref_logps": reference.logps}
    old_logps = logps.detach() if old is None else logps.detach() - 0.3
    if old is not None:
        batch[old] = old_logps
    if sampler:
        batch["importance_sampling_ratio"] = torch.full((4, 1), 1.5)
    term = placement.loss_term(batch, Scored(logps), 0.3, None)
    drift, ratio = logps - reference.logps, torch.exp(logps - old_logps)
    expected = ratio.detach() * drift**2 / 2 if estimator == "k2" else ratio * (torch.exp(-drift) - 1 + drift)
    expected = 0.3 * expected * (1.5 if sampler else 1.0)
    torch.testing.assert_close(term, expected, rtol=1e-5, atol=1e-6)
    gradients = [torch.autograd.grad(value.sum(), logps)[0] for value in (term, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("algorithm", CONFIGS)
def test_exact_loss_placement_asks_for_the_exact_kl(algorithm):
    placement = place(algorithm, "loss", kl_estimator="full")
    assert not placement.needs_reference_logps
    policy, hidden = Scored(torch.zeros(2, 3), torch.ones(2, 3, 4)), torch.full((2, 3, 4), 2.0)
    asked = []

    def exact(one, other):
        asked.append((one, other))
        return torch.full((2, 3), 5.0)

    term = placement.loss_term({"klx_ref_hidden": hidden}, policy, 0.3, exact)
    assert torch.equal(term, torch.full((2, 3), 0.3 * 5.0))
    ((one, other),) = asked
    assert one is policy and other.hidden is hidden and other.logps is None


def test_a_run_that_only_measures_has_a_placement_that_does_nothing():
    placement = Placement(build(kl_monitor=True), Accelerator(cpu=True))
    batch, kl, mask, *_ = measured()
    before = dict(batch)
    assert placement.charge(batch, kl, mask) is None and batch == before
    assert placement.loss_term(batch, Scored(None), 0.3, None) is None
    assert not (placement.in_loss or placement.asks_at_generation or placement.per_batch or placement.per_microbatch)


# ---- A user-defined placement ----


@pytest.fixture
def toy_placement():
    @register_placement("toy", "grpo")
    class Toy(Placement):
        """Every token pays only for its own KL."""

        estimators = ("k2", "k1")

        @classmethod
        def check(cls, args):
            if args.kl_penalty_coef > 5.0:
                raise ValueError(f"`kl_penalty_coef={args.kl_penalty_coef!r}` is too much for a toy.")

        def charge(self, batch, kl, mask):
            return torch.where(mask, kl.penalised, 0.0)

        def apply(self, batch, charge, coef):
            batch["advantages"] = batch["advantages"].unsqueeze(1) - coef * charge

    yield Toy
    del base._PLACEMENTS["grpo", "toy"]


def test_a_placement_without_a_charge_is_refused():
    with pytest.raises(TypeError, match="Silent defines `apply` but not `charge`"):

        @register_placement("silent", "grpo")
        class Silent(Placement):
            def apply(self, batch, charge, coef):
                batch["advantages"] = batch["advantages"] - coef

    assert "silent" not in list_placements("grpo")


class RecordingGRPOTrainer(TotalRecorder, KLXTrainerMixin, Recorder, GRPOTrainer):
    pass


@pytest.mark.parametrize("estimator", [None, "k1"])
def test_a_placement_of_the_users_own_trains(toy_placement, estimator, tmp_path):
    assert "toy" in list_placements("grpo") and "toy" not in list_placements("rloo")
    assert get_placement("grpo", "toy") is toy_placement
    fields = {"kl_penalty_coef": 0.3, "kl_placement": "toy", "kl_estimator": estimator, "extras": LORA}
    trainer = train(RecordingGRPOTrainer, tmp_path, **fields)
    assert trainer.args.kl_estimator == (estimator or "k2") and trainer.args.kl_centering == "none"
    check_advantages(trainer, build_model(), estimator or "k2")
    check_statistic(trainer, trainer.generated, "k3")
    assert len(logged(trainer, "klx/adjustment_abs_mean")) == 3
    plain = train(KLXGRPOTrainer, tmp_path, extras=LORA)
    assert any(not torch.equal(weights(plain)[name], weight) for name, weight in weights(trainer).items())


def test_a_placement_of_the_users_own_is_checked(toy_placement):
    with pytest.raises(ValueError, match="is too much for a toy"):
        build(kl_penalty_coef=6.0, kl_placement="toy")
    with pytest.raises(ValueError, match="`kl_estimator='k3'` cannot be used with `kl_placement='toy'`.*'k2', 'k1'"):
        build(kl_penalty_coef=0.1, kl_placement="toy", kl_estimator="k3")
    with pytest.raises(ValueError, match="`kl_placement` must be one of .*, got 'toy'"):
        build(KLXRLOOConfig, kl_penalty_coef=0.1, kl_placement="toy")


@pytest.mark.parametrize("algorithms", [(), ("dpo",), ("grpo", "dpo")])
def test_a_placement_needs_algorithms_that_are_there(algorithms):
    with pytest.raises(ValueError, match="Algorithms of a placement must be of grpo, rloo, ppo"):
        register_placement("nowhere", *algorithms)
    assert "nowhere" not in list_placements("grpo")


# ---- A user-defined trainer ----


class MyGRPOTrainer(GRPOTrainer):
    """A user's trainer that doubles TRL's loss, and counts its calls."""

    def __init__(self, *args, factor: float = 2.0, **kwargs):
        self.factor, self.computed = factor, 0
        super().__init__(*args, **kwargs)

    def _compute_loss(self, model, inputs):
        self.computed += 1
        return self.factor * super()._compute_loss(model, inputs)


class Mine(TotalRecorder, KLXTrainerMixin, Recorder, MyGRPOTrainer):
    pass


@pytest.mark.parametrize("placement", ["advantage", "reward", "loss"])
def test_a_subclass_of_the_users_own(placement, tmp_path):
    fields = {"kl_penalty_coef": 0.3, "kl_placement": placement, "scale_rewards": "none", "loss_type": "grpo"}
    trainer = train(Mine, tmp_path, extras={"factor": 3.0, **LORA}, **fields)
    assert trainer.computed == 3 and trainer.factor == 3.0
    check_statistic(trainer, trainer.generated, "k3")
    if placement == "advantage":
        # A loss other than TRL's own may not accept per-token advantages.
        check_advantages(trainer, build_model(), apart=True)
    for loss in trainer.losses:
        assert loss["loss"].item() == pytest.approx(-3.0 * loss["advantages"].mean().item(), abs=1e-5)
        assert (loss["total"] - loss["loss"]).item() == pytest.approx(added_term(trainer, loss), rel=1e-4, abs=1e-6)


def added_term(trainer, loss) -> float:
    """Our expected part of the loss on policy, where `loss_type="grpo"` averages over tokens, then sequences."""
    rollout, coef = trainer.generated[loss["rollout"]], logged(trainer, "klx/coef")[loss["rollout"]]
    counts = counting(rollout)
    if trainer.args.kl_placement == "reward":
        return 0.0
    if trainer.args.kl_placement == "loss":
        kl = kl_of_tokens(rollout["policy"], build_model(), rollout, "k3")
        rows = [[coef * value for value in row] for row in kl]
    else:
        kl = kl_of_tokens(rollout["policy"], build_model(), rollout)
        rows = (-centered(kl, counts, coef, [list(range(len(kl)))])).tolist()
    return sum(sum(row) / sum(c) for row, c in zip(rows, counts, strict=True)) / len(rows)


@dataclass
class KLXGMPOConfig(KLXConfigMixin, GMPOConfig):
    _algorithm: ClassVar[str] = "grpo"


class KLXGMPOTrainer(TotalRecorder, KLXTrainerMixin, Recorder, GMPOTrainer):
    _config_class = KLXGMPOConfig


@pytest.mark.parametrize("placement", ["advantage", "reward", "loss"])
def test_gmpo(placement, tmp_path):
    fields = {"kl_penalty_coef": 0.3, "kl_placement": placement, "scale_rewards": "none", "loss_type": "grpo"}
    fields |= {"num_iterations": 2, "max_steps": 6, "kl_target": 0.05, "kl_horizon": 100}
    trainer = train(KLXGMPOTrainer, tmp_path, extras={"rollout_func": scripted_rollout, **LORA}, **fields)
    assert trainer.args.epsilon == 0.4  # GMPO's own default
    check_statistic(trainer, trainer.generated, "k3")
    coefs = logged(trainer, "klx/coef")
    assert len(coefs) == 3 and len(set(coefs)) == 3
    assert all(math.isfinite(value) for value in logged(trainer, "loss") + logged(trainer, "grad_norm"))
    for loss in trainer.losses[::2]:  # on policy, where every ratio is 1
        assert loss["loss"].item() == pytest.approx(-loss["advantages"].mean().item(), abs=1e-5)
        # GMPO averages over the tokens of each sequence, then over sequences, like `loss_type="grpo"`.
        assert (loss["total"] - loss["loss"]).item() == pytest.approx(added_term(trainer, loss), rel=1e-4, abs=1e-6)
    if placement == "advantage":
        # GMPO's loss has one advantage per sequence.
        check_advantages(trainer, build_model(), apart=True)
    if placement == "reward":
        assert min(logged(trainer, "rewards/kl_penalty/mean")) < -1e-4


def test_gmpo_without_kl_control_is_trls(tmp_path):
    fields = {"max_steps": 3, "extras": LORA}
    args = {"output_dir": str(tmp_path)}
    ours = train(type("Plain", (KLXTrainerMixin, GMPOTrainer), {"_config_class": KLXGMPOConfig}), tmp_path, **fields)
    theirs = build_trainer(type("Theirs", (GMPOTrainer,), {"_config_class": GMPOConfig}), args["output_dir"], **fields)
    theirs.train()
    assert logged(ours, "loss") == logged(theirs, "loss")
    assert all(torch.equal(weights(theirs)[name], weight) for name, weight in weights(ours).items())


@pytest.mark.parametrize(("host", "folds"), [(GRPOTrainer, True), (MyGRPOTrainer, False), (GMPOTrainer, False)])
def test_only_trls_own_loss_is_given_advantages_per_token(host, folds, tmp_path):
    trainer_class = type("Host", (KLXTrainerMixin, host), {"_config_class": KLXGRPOConfig})
    trainer = build_trainer(trainer_class, tmp_path, kl_penalty_coef=0.3)
    assert trainer._klx_placement.folds is folds


def test_a_mixin_above_ours_does_not_change_where_the_adjustment_enters(tmp_path):
    class Counting:
        """Inspects the loss that we return, and adds none."""

        computed = 0

        def _compute_loss(self, model, inputs):
            self.computed += 1
            return super()._compute_loss(model, inputs)

    fields = {"kl_penalty_coef": 0.3, "extras": LORA}
    plain = train(KLXGRPOTrainer, tmp_path, **fields)
    watched = train(type("Watched", (Counting, KLXGRPOTrainer), {}), tmp_path, **fields)
    assert watched.computed == 3
    assert logged(watched, "loss") == logged(plain, "loss")
    assert all(torch.equal(weights(plain)[name], weight) for name, weight in weights(watched).items())
