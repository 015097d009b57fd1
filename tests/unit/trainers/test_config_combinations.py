"""Combinations of config fields: what is refused, and that nothing is accepted and then ignored."""

import dataclasses
import json
import math
import pickle
import re
import warnings
from itertools import combinations

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from support.config_fields import (
    ADAPTIVE,
    BARE,
    CENTERINGS,
    CONFIGS,
    ESTIMATORS,
    FIELDS,
    PENALISED,
    REFERENCES,
    SEVERAL_STEPS,
    both_configs,
    build,
    kl_fields,
    refusal,
)
from trl_klx import (
    HoldKLController,
    KLController,
    KLXGRPOConfig,
    KLXPPOConfig,
    KLXRLOOConfig,
    register_kl_controller,
)


# ---- Combinations ----


@pytest.mark.parametrize(("one", "other"), list(combinations(REFERENCES, 2)))
@pytest.mark.parametrize("enabled", [{"kl_penalty_coef": 0.1}, {"kl_monitor": True}], ids=["penalty", "monitor"])
@both_configs
def test_two_references_are_refused(config_class, one, other, enabled):
    message = refusal(config_class, **enabled, **{one: REFERENCES[one], other: REFERENCES[other]})
    assert "Only one reference can be chosen" in message
    assert f"`{one}={REFERENCES[one]!r}`" in message and f"`{other}={REFERENCES[other]!r}`" in message
    assert "Keep one of them and unset the others" in message


@pytest.mark.parametrize("reference", [None, "kl_penalty_reference_step", "kl_ref_adapter_path", "kl_ref_lag"])
def test_mixup_alpha_without_sync_is_refused(reference):
    fields = {} if reference is None else {reference: REFERENCES[reference]}
    message = refusal(kl_penalty_coef=0.1, kl_ref_mixup_alpha=0.5, **fields)
    assert "`kl_ref_mixup_alpha=0.5` has no effect without `kl_ref_sync_steps`" in message
    assert "Set `kl_ref_sync_steps` to the number of steps" in message


RESETTABLE = {"kl_penalty_reference_step"}


@both_configs
@pytest.mark.parametrize("reference", [None, *REFERENCES])
@pytest.mark.parametrize("steered", [{"kl_target": 6.0}, {"kl_penalty_coef": 0.1}], ids=["target", "coefficient"])
def test_only_an_earlier_policy_can_be_reset(config_class, reference, steered):
    fields = {} if reference is None else {reference: REFERENCES[reference]}
    fields |= {**steered, "kl_ref_reset_patience": 20, "kl_ref_reset_optimizer": True}
    if reference is None or reference in RESETTABLE:
        assert build(config_class, **fields).kl_ref_reset_patience == 20
        return
    message = refusal(config_class, **fields)
    assert f"`kl_ref_reset_patience=20` cannot be used with `{reference}={REFERENCES[reference]!r}`" in message
    assert f"Unset `{reference}`, set `kl_penalty_reference_step` instead" in message


def test_clearing_the_optimizer_without_resets_is_refused():
    message = refusal(kl_target=6.0, kl_ref_reset_optimizer=True)
    assert "`kl_ref_reset_optimizer=True` has no effect without `kl_ref_reset_patience`" in message


@pytest.mark.parametrize("reference", [None, *(name for name in REFERENCES if name != "kl_ref_model_path")])
def test_dtype_without_a_model_is_refused(reference):
    fields = {} if reference is None else {reference: REFERENCES[reference]}
    message = refusal(kl_penalty_coef=0.1, kl_ref_dtype="bfloat16", **fields)
    assert "`kl_ref_dtype='bfloat16'` has no effect without `kl_ref_model_path`" in message
    assert "Set `kl_ref_model_path`, or unset `kl_ref_dtype`" in message


@pytest.mark.parametrize("beta", [0.04, -0.1, math.nan])
@both_configs
def test_two_penalties_are_refused(config_class, beta):
    message = refusal(config_class, kl_penalty_coef=0.1, beta=beta)
    assert f"`beta={beta!r}` together with `kl_penalty_coef=0.1` would penalise the KL twice" in message
    assert "Set `beta=0.0`" in message and "`kl_placement='loss'`" in message


@both_configs
def test_the_hosts_penalty_is_accepted_without_ours(config_class):
    assert build(config_class, beta=0.04).beta == 0.04
    assert build(config_class, beta=0.04, kl_monitor=True).beta == 0.04


@both_configs
def test_the_hosts_moving_reference_is_refused_with_the_penalty(config_class):
    message = refusal(config_class, kl_penalty_coef=0.1, sync_ref_model=True)
    assert "`sync_ref_model=True`" in message and "`kl_penalty_coef=0.1`" in message
    assert "Set `sync_ref_model=False` and `kl_ref_sync_steps`" in message
    assert build(config_class, beta=0.04, sync_ref_model=True).sync_ref_model


@pytest.mark.parametrize("placement", ["reward", "loss"])
@both_configs
def test_centering_and_discount_need_the_advantage_placement(config_class, placement):
    for centering in CENTERINGS[:-1]:
        message = refusal(config_class, kl_penalty_coef=0.1, kl_placement=placement, kl_centering=centering)
        assert f"`kl_centering={centering!r}` has no effect with `kl_placement={placement!r}`" in message
        assert "Unset it, or set `kl_placement='advantage'`" in message
    message = refusal(config_class, kl_penalty_coef=0.1, kl_placement=placement, kl_discount=0.5)
    assert f"`kl_discount=0.5` has no effect with `kl_placement={placement!r}`" in message
    assert "Set it to 0.0, or set `kl_placement='advantage'`" in message
    config = build(config_class, kl_penalty_coef=0.1, kl_placement=placement, kl_centering="none", kl_discount=0.0)
    assert config.kl_centering == "none"


PUSHES_AWAY = "it charges tokens that the policy samples less than the reference does, and so pushes them further away"
REASONS = {
    ("advantage", "k2"): PUSHES_AWAY,
    ("advantage", "k3"): PUSHES_AWAY,
    ("reward", "abs"): PUSHES_AWAY,
    ("reward", "trlx"): PUSHES_AWAY,
    ("advantage", "full"): "it is the same whatever token is sampled",
    ("reward", "full"): "it is the same whatever token is sampled",
    ("loss", "k1"): "the expected gradient of its term is zero",
    ("loss", "importance"): "the expected gradient of its term is not that of KL(policy || reference)",
    ("loss", "trlx"): "the expected gradient of its term is not that of KL(policy || reference)",
    ("loss", "abs"): "the expected gradient of its term is not that of KL(policy || reference)",
}


@pytest.mark.parametrize(("placement", "estimator"), REASONS)
@pytest.mark.parametrize("config_class", [*CONFIGS, KLXPPOConfig])
def test_refused_estimators_are_given_a_reason(config_class, placement, estimator):
    message = refusal(config_class, kl_penalty_coef=0.1, kl_placement=placement, kl_estimator=estimator)
    assert f"`kl_placement={placement!r}`: {REASONS[placement, estimator]}" in message and ". Use one of " in message


@pytest.mark.parametrize("config_class", [*CONFIGS, KLXPPOConfig])
def test_importance_is_not_centered_in_its_own_sequence(config_class):
    fields = {"kl_penalty_coef": 0.1, "kl_placement": "advantage", "kl_estimator": "importance"}
    message = refusal(config_class, **fields, kl_centering="sequence")
    assert "`kl_estimator='importance'` cannot be used with `kl_centering='sequence'`" in message
    others = [name for name in CENTERINGS if name != "sequence"]
    for centering in others if config_class is not KLXPPOConfig else [name for name in others if name != "group"]:
        assert build(config_class, **fields, kl_centering=centering).kl_centering == centering


def test_ppo_has_no_groups_with_one_completion_per_prompt():
    fields = {"kl_placement": "advantage", "kl_centering": "group"}
    message = refusal(KLXPPOConfig, **fields)
    assert "`kl_centering='group'` has no groups with `num_generations=1`" in message
    assert "Set `kl_centering='batch'`" in message
    assert build(KLXPPOConfig, **fields, num_generations=2).kl_centering == "group"


# ---- One completion per prompt ----

one_per_prompt = pytest.mark.parametrize("config_class", [KLXGRPOConfig, KLXRLOOConfig])


@one_per_prompt
@pytest.mark.parametrize("fields", [{}, {"kl_centering": "none"}, {"kl_placement": "loss", "kl_estimator": "full"}])
def test_one_completion_per_prompt_is_taken_with_a_constant_penalty(config_class, fields):
    config = build(config_class, num_generations=1, kl_penalty_coef=1.0, per_device_train_batch_size=3, **fields)
    assert type(config.num_generations) is int and config.num_generations == 1
    assert config.generation_batch_size == 3


@one_per_prompt
@pytest.mark.parametrize("fields", [{}, {"kl_monitor": True}, {"kl_target": 6.0}, {"kl_penalty_coef": 0.0}], ids=str)
def test_trl_refuses_one_completion_per_prompt_where_a_reward_must_train(config_class, fields):
    assert "requires at least 2 generations per prompt" in refusal(config_class, num_generations=1, **fields)


@one_per_prompt
@pytest.mark.parametrize("number", [0, -1])
def test_less_than_one_completion_per_prompt_is_refused(config_class, number):
    with pytest.raises((ValueError, ZeroDivisionError)):
        build(config_class, num_generations=number, kl_penalty_coef=1.0)


@one_per_prompt
def test_what_compares_completions_needs_several(config_class):
    message = refusal(config_class, num_generations=1, kl_penalty_coef=1.0, kl_placement="reward")
    assert "`num_generations=1` cannot be used with `kl_placement='reward'`" in message
    assert "Set `num_generations` to 2 or more" in message
    message = refusal(config_class, num_generations=1, kl_penalty_coef=1.0, kl_centering="group")
    assert "`kl_centering='group'` has no groups with `num_generations=1`" in message


# ---- TRL options that change the effect of a penalty ----


def test_vespo_weighs_sequences_by_their_advantage():
    message = refusal(kl_penalty_coef=0.1, loss_type="vespo")
    assert "`loss_type='vespo'` cannot be used with `kl_placement='advantage'`" in message
    assert "Set `kl_placement='reward'` or 'loss'" in message
    for placement in ("reward", "loss"):
        assert build(kl_penalty_coef=0.1, loss_type="vespo", kl_placement=placement).kl_placement == placement
    assert build(kl_monitor=True, loss_type="vespo").kl_enabled


def test_bias_correction_is_not_for_our_term():
    message = refusal(kl_penalty_coef=0.1, kl_placement="loss", use_bias_correction_kl=False)
    assert "`use_bias_correction_kl=False` has no effect with `kl_placement='loss'`" in message
    assert "Unset it" in message


@pytest.mark.parametrize("discount", [0.5, 1.0])
def test_one_ratio_per_sequence_shares_what_each_token_pays(discount):
    fields = {"kl_penalty_coef": 0.1, "importance_sampling_level": "sequence", "kl_discount": discount}
    message = refusal(**fields)
    assert f"`kl_discount={discount!r}` cannot be used with `importance_sampling_level='sequence'`" in message
    assert "Set `kl_discount=0.0`" in message
    assert build(**(fields | {"importance_sampling_level": "token"})).kl_discount == discount


@pytest.mark.parametrize(
    ("option", "value"), [("off_policy_mask_threshold", 0.5), ("top_entropy_quantile", 0.2)], ids=str
)
@pytest.mark.parametrize(
    "other", [{"importance_sampling_level": "sequence"}, {"loss_type": "cispo"}, {"loss_type": "sapo"}], ids=str
)
def test_options_that_decide_by_the_advantage_need_a_clipped_ratio_per_token(option, value, other):
    fields = {"kl_penalty_coef": 0.1, option: value}
    message = refusal(**fields, **other)
    assert f"`{option}={value!r}` can be used with `kl_placement='advantage'` only where TRL clips a ratio" in message
    assert "Set `kl_placement='reward'` or 'loss'" in message
    for name, setting in other.items():
        assert f"`{name}={setting!r}`" in message
    assert getattr(build(**fields), option) == value
    for placement in ("reward", "loss"):
        assert getattr(build(**fields, **other, kl_placement=placement), option) == value


@pytest.mark.parametrize("controller", ["adaptive", "exponential", "pid"])
@both_configs
def test_adaptive_controllers_need_a_target(config_class, controller):
    message = refusal(config_class, kl_penalty_coef=0.1, kl_controller=controller)
    assert f"`kl_controller={controller!r}` needs `kl_target`, got None" in message
    assert "Set `kl_target` to the KL to hold" in message and "`kl_controller='fixed'`" in message


@pytest.mark.parametrize("controller", ["adaptive", "exponential", "pid"])
@pytest.mark.parametrize("target", [None, 6.0])
@pytest.mark.parametrize("monitor", [False, True])
@both_configs
def test_adaptive_controllers_cannot_leave_zero(config_class, controller, target, monitor):
    message = refusal(config_class, kl_controller=controller, kl_target=target, kl_monitor=monitor)
    assert f"`kl_controller={controller!r}` cannot start from a coefficient of 0.0" in message
    assert "a multiplicative rule cannot leave 0" in message and "Set `kl_penalty_coef` to a positive value" in message


@both_configs
def test_a_target_alone_switches_control_on(config_class):
    config = build(config_class, kl_target=6.0)
    assert config.kl_penalty_enabled and config.kl_controller_name == "hold"
    assert config.kl_penalty_coef is None and config.kl_init_coef is None
    controller = config.build_kl_controller()
    assert isinstance(controller, HoldKLController) and controller.target == 6.0 and controller.value > 0
    assert config.beta == 0.0


@both_configs
def test_a_horizon_means_zieglers_rule(config_class):
    assert build(config_class, kl_penalty_coef=0.1, kl_target=6.0, kl_horizon=500).kl_controller_name == "adaptive"
    assert build(config_class, kl_penalty_coef=0.1, kl_target=6.0).kl_controller_name == "hold"
    message = refusal(config_class, kl_target=6.0, kl_horizon=500)
    assert "`kl_horizon=500`" in message and "Set `kl_target` to the KL to hold, or `kl_penalty_coef`" in message


@both_configs
def test_a_target_without_effect_is_refused(config_class):
    message = refusal(config_class, kl_target=6.0, kl_penalty_coef=0.0)
    assert "`kl_target=6.0` has no effect without a KL penalty" in message
    assert "leave it unset" in message and "`kl_monitor=True`" in message


@both_configs
def test_the_guard_of_the_learning_rate(config_class):
    assert build(config_class, kl_target=6.0, kl_lr_guard=True).kl_lr_guard
    message = refusal(config_class, kl_penalty_coef=0.1, kl_lr_guard=True)
    assert "`kl_lr_guard=True` has no effect with `kl_controller='fixed'`" in message
    message = refusal(config_class, kl_penalty_coef=0.1, kl_target=6.0, kl_controller="pid", kl_lr_guard=True)
    assert "`kl_lr_guard=True` has no effect with `kl_controller='pid'`" in message
    assert "`kl_lr_guard=True` has no effect without a KL penalty" in refusal(config_class, kl_lr_guard=True)


@pytest.mark.parametrize(
    ("controller", "name", "value"),
    [
        ("fixed", "kl_horizon", 500),
        ("fixed", "kl_coef_min", 1e-3),
        ("fixed", "kl_coef_max", 2.0),
        ("exponential", "kl_horizon", 500),
        ("pid", "kl_horizon", 500),
    ],
)
@both_configs
def test_settings_that_the_controller_does_not_use_are_refused(config_class, controller, name, value):
    message = refusal(config_class, **(ADAPTIVE | {"kl_controller": controller, name: value}))
    assert f"`{name}={value!r}` has no effect with `kl_controller={controller!r}`" in message
    assert "Unset it, or choose a controller that uses it" in message


def test_settings_without_a_target_are_refused_because_the_controller_is_then_fixed():
    message = refusal(kl_penalty_coef=0.1, kl_horizon=500)
    assert "`kl_horizon=500` has no effect with `kl_controller='fixed'`" in message


@pytest.mark.parametrize("controller", [None, "adaptive", "exponential", "pid"])
@pytest.mark.parametrize("coef", [5e-5, 11.0])
def test_coefficient_outside_of_its_bounds_is_refused(controller, coef):
    message = refusal(kl_penalty_coef=coef, kl_target=6.0, kl_controller=controller)
    assert f"`kl_penalty_coef={coef!r}` lies outside [`kl_coef_min`, `kl_coef_max`] = [0.0001, 10.0]" in message
    assert "Start inside the bounds, or widen them" in message


def test_bounds_do_not_concern_a_fixed_coefficient():
    assert build(kl_penalty_coef=11.0).build_kl_controller().value == 11.0
    assert build(kl_penalty_coef=5e-5, kl_target=6.0, kl_controller="fixed").build_kl_controller().value == 5e-5
    # The bounds themselves are allowed.
    assert build(kl_penalty_coef=10.0, kl_target=6.0).build_kl_controller().value == 10.0


@pytest.mark.parametrize("enabled", [{"kl_penalty_coef": 0.1}, {"kl_monitor": True}], ids=["penalty", "monitor"])
@both_configs
def test_warn_window_needs_a_target(config_class, enabled):
    message = refusal(config_class, **enabled, kl_warn_window=20)
    assert "`kl_warn_window=20` has no effect without `kl_target`" in message
    assert "Set `kl_target`, or unset `kl_warn_window`" in message
    assert build(config_class, **enabled, kl_warn_window=20, kl_target=6.0).kl_warn_window == 20
    assert build(config_class, **enabled, kl_warn_window=0).kl_warn_window == 0


def test_normalised_rewards_would_undo_a_penalty_in_the_reward():
    fields = {"kl_penalty_coef": 0.1, "multi_objective_aggregation": "normalize_then_sum"}
    message = refusal(**fields, kl_placement="reward")
    assert "`kl_placement='reward'` cannot be used with `multi_objective_aggregation='normalize_then_sum'`" in message
    assert "Set `multi_objective_aggregation='sum_then_normalize'`, or `kl_placement='advantage'`" in message
    for placement in ("advantage", "loss"):
        assert build(**fields, kl_placement=placement).kl_placement == placement


def test_rewards_scaled_by_group_hide_a_penalty_in_the_reward():
    fields = {"kl_penalty_coef": 0.1, "kl_placement": "reward"}
    with pytest.warns(UserWarning, match="`kl_placement='reward'` with `scale_rewards='group'`"):
        build(**fields)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*scale_rewards.*")
        build(**fields, scale_rewards="none")
        build(KLXRLOOConfig, **fields)
        build(KLXPPOConfig, **fields)


def test_one_ratio_per_sequence_would_undo_an_adjustment_centered_in_it():
    fields = {"kl_penalty_coef": 0.1, "importance_sampling_level": "sequence"}
    assert "`kl_centering='sequence'` has no effect with" in refusal(**fields, kl_centering="sequence")
    assert build(**fields, kl_centering="batch").kl_centering == "batch"


@pytest.mark.parametrize(
    "best",
    [
        {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2},
        {"metric_for_best_model": "eval_reward", "save_total_limit": 1},
    ],
)
def test_the_reference_must_not_be_taken_for_the_best_checkpoint(best):
    fields = {"kl_penalty_coef": 0.1, "save_strategy": "steps"} | best
    assert "might be taken for the best one, or deleted" in refusal(**fields, kl_penalty_reference_step=200)
    build(**fields, kl_penalty_reference_step=0)
    build(**(fields | {"load_best_model_at_end": False, "save_total_limit": 2}), kl_penalty_reference_step=200)


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({"slack": 1}, "takes no argument 'slack'"),
        ({"clip": -0.1}, "`clip` must be a positive finite number"),
        ({"clip": "0.1"}, "`clip` must be a positive finite number"),
        ({"init_coef": 0.3}, "init_coef"),
        ({"target": 3.0}, "target"),
        ({3: 4}, "3"),
    ],
    ids=str,
)
def test_controller_kwargs_that_the_controller_refuses(kwargs, reason):
    message = refusal(**ADAPTIVE, kl_controller_kwargs=kwargs)
    assert message.startswith(f"`kl_controller='adaptive'` with `kl_controller_kwargs={kwargs!r}` cannot be built: ")
    assert reason in message


def test_a_controller_of_the_users_own():
    @register_kl_controller("test-configs-own")
    class Own(KLController):
        multiplicative = False
        uses = frozenset({"max_coef"})

        def __init__(self, init_coef, *, slope=1.0, **kwargs):
            super().__init__(init_coef, **kwargs)
            self.slope = slope

        def _next(self, kl, n_steps):
            return self.value + self.slope

    own = {"kl_penalty_coef": 0.1, "kl_controller": "test-configs-own"}
    controller = build(**own, kl_coef_max=2.0, kl_controller_kwargs={"slope": 3.0}).build_kl_controller()
    assert isinstance(controller, Own) and (controller.slope, controller.max_coef) == (3.0, 2.0)
    assert "`kl_coef_min=0.01` has no effect" in refusal(**own, kl_coef_min=0.01)
    assert "'test-configs-own'" in refusal(**(own | {"kl_controller": "another"}))


# ---- Nothing is accepted and then ignored ----


MEANINGFUL_WITH_MONITOR = {
    "kl_penalty_reference_step": {},
    "kl_ref_adapter_path": {},
    "kl_ref_model_path": {},
    "kl_ref_dtype": {"kl_ref_model_path": "some/model"},
    "kl_ref_quantization": {"kl_ref_model_path": "some/model"},
    "kl_ref_lag": {},
    "kl_ref_sync_steps": {},
    "kl_ref_mixup_alpha": {"kl_ref_sync_steps": 4},
    "kl_statistic": {},
    "kl_ignore_tokens": {},
    "kl_target": {},
    "kl_target_unit": {},
    "kl_warn_window": {"kl_target": 6.0},
}
# These have an effect while the penalty is off.
SWITCHES = {"kl_penalty_coef", "kl_monitor", "kl_update_target"}


@both_configs
@pytest.mark.parametrize("name", sorted(FIELDS.keys() - SWITCHES))
def test_every_field_is_refused_while_the_penalty_is_off(config_class, name):
    value = FIELDS[name][1]
    message = refusal(config_class, **{name: value}, kl_penalty_coef=0.0)
    assert f"`{name}={value!r}` has no effect without a KL penalty" in message
    assert "Set `kl_penalty_coef` to a positive value such as 0.05" in message
    if name != "kl_target":
        assert "Set `kl_target` to the KL to hold" in refusal(config_class, **{name: value})
    assert ("`kl_monitor=True`" in message) == (name in MEANINGFUL_WITH_MONITOR)


@both_configs
@pytest.mark.parametrize("name", sorted(FIELDS.keys() - SWITCHES))
def test_kl_monitor_accepts_what_it_reads_and_nothing_else(config_class, name):
    value = FIELDS[name][1]
    if name in MEANINGFUL_WITH_MONITOR:
        config = build(config_class, kl_monitor=True, **{name: value}, **MEANINGFUL_WITH_MONITOR[name])
        assert getattr(config, name) == value and config.kl_enabled and not config.kl_penalty_enabled
    else:
        message = refusal(config_class, kl_monitor=True, **{name: value})
        assert f"`{name}={value!r}` has no effect without a KL penalty" in message
        assert "kl_monitor" not in message


@both_configs
@pytest.mark.parametrize(
    ("fields", "statistic"),
    [
        ({}, "k3"),
        ({"kl_penalty_coef": 0.1}, "k3"),
        ({"kl_target": 4.0}, "full"),
        ({"kl_target": 4.0, "kl_penalty_coef": 0.1}, "full"),
        ({"kl_target": 4.0, "kl_placement": "loss"}, "full"),
        ({"kl_target": 4.0, "kl_statistic": "k3"}, "k3"),
        # Rules of published recipes keep the KL that they had.
        ({"kl_target": 4.0, "kl_horizon": 100, "kl_penalty_coef": 0.1}, "k3"),
        ({"kl_target": 4.0, "kl_controller": "pid", "kl_penalty_coef": 0.1}, "k3"),
        ({"kl_target": 4.0, "kl_monitor": True, "kl_penalty_coef": 0.0}, "k3"),
    ],
    ids=str,
)
def test_a_target_is_held_by_the_exact_kl_unless_another_rule_is_named(config_class, fields, statistic):
    config = build(config_class, **fields)
    assert config.kl_statistic_name == statistic
    assert config.kl_statistic == fields.get("kl_statistic")  # so that a copy of the config can change the rest


def test_kl_monitor_can_measure_the_full_kl_but_no_other_estimator():
    assert build(kl_monitor=True, kl_estimator="full").kl_statistic_name == "full"
    assert build(kl_monitor=True, kl_statistic="full").kl_statistic_name == "full"
    assert "`kl_statistic='full'` has no effect without a KL penalty" in refusal(kl_statistic="full")
    # With a named statistic, the estimator has no effect.
    assert "`kl_estimator='full'` has no effect" in refusal(kl_monitor=True, kl_estimator="full", kl_statistic="k3")
    for estimator in ("k2", "k3", "abs", "trlx", "importance"):
        assert f"`kl_estimator={estimator!r}` has no effect" in refusal(kl_monitor=True, kl_estimator=estimator)


def test_several_fields_without_effect_are_all_named():
    message = refusal(kl_horizon=500, kl_ref_lag=2, kl_placement="loss")
    for setting in ("`kl_horizon=500`", "`kl_ref_lag=2`", "`kl_placement='loss'`"):
        assert setting in message


# ---- The whole space of fields ----


numbers = st.one_of(
    st.sampled_from([0, 0.0, 1e-5, 1e-4, 0.05, 0.1, 0.5, 1, 1.0, 6.0, 10.0, 11.0, 500]),
    st.floats(),
    st.integers(-2, 20),
    st.booleans(),
    st.sampled_from(["0.1", None]),
)


def names(*valid):
    return st.sampled_from([*valid, "k9", None, 3])


# The coefficient is usually on, so that later checks are reached.
COEFFICIENTS = st.one_of(st.sampled_from([0.05, 0.1, 1.0]), numbers)
OTHERS = {
    "kl_penalty_reference_step": numbers,
    "kl_ref_adapter_path": st.sampled_from(["some/adapter", "", 3, None]),
    "kl_ref_model_path": st.sampled_from(["some/model", "", 3, None]),
    "kl_ref_dtype": names("float32", "bfloat16", "float16"),
    "kl_ref_quantization": names("4bit", "8bit"),
    "kl_ref_lag": numbers,
    "kl_ref_sync_steps": numbers,
    "kl_ref_mixup_alpha": numbers,
    "kl_ref_reset_patience": numbers,
    "kl_ref_reset_optimizer": st.sampled_from([True, False, None, 1]),
    "kl_placement": names("advantage", "reward", "loss"),
    "kl_estimator": names(*ESTIMATORS),
    "kl_centering": names(*CENTERINGS),
    "kl_discount": numbers,
    "kl_statistic": names("k3", "full"),
    "kl_ignore_tokens": st.sampled_from([None, ["eos"], [5, "w3"], ["7"], [], [None], "eos"]),
    "kl_update_target": numbers,
    "kl_controller": names("hold", "fixed", "adaptive", "exponential", "pid"),
    "kl_target": numbers,
    "kl_target_unit": names("sequence", "token"),
    "kl_horizon": numbers,
    "kl_coef_min": numbers,
    "kl_coef_max": numbers,
    "kl_controller_kwargs": st.sampled_from(
        [
            None,
            {},
            {"clip": 0.3},
            {"rate": 0.2},
            {"kp": 1},
            '{"clip": 1}',
            "{",
            {"constants": {"release": 0.5}},
            {"constants": 1},
        ]
    ),
    "kl_monitor": st.sampled_from([True, False, "yes"]),
    "kl_warn_window": numbers,
    "kl_lr_guard": st.sampled_from([True, False, "yes"]),
    "beta": st.sampled_from([0.0, 0.04]),
    "num_iterations": st.sampled_from([1, 4]),
    "top_p": st.sampled_from([1.0, 0.9]),
    "sync_ref_model": st.booleans(),
}
SPACE = st.fixed_dictionaries({"kl_penalty_coef": COEFFICIENTS}, optional=OTHERS)
NAMED = re.compile(r"`(kl_\w+|beta|sync_ref_model|multi_objective_aggregation)[=`]")


def test_space_covers_every_field():
    assert OTHERS.keys() | {"kl_penalty_coef"} >= FIELDS.keys()


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(fields=SPACE, config_class=st.sampled_from(CONFIGS), data=st.data())
def test_any_config_is_refused_by_name_or_has_a_working_controller(fields, config_class, data):
    # Only a few random fields, because all of them at once are hardly ever valid.
    kept = data.draw(st.sets(st.sampled_from(sorted(fields)), max_size=5)) | {"kl_penalty_coef"}
    fields = {name: value for name, value in fields.items() if name in kept}
    try:
        config = build(config_class, **fields)
    except ValueError as error:
        event("refused")
        assert NAMED.search(str(error)), str(error)
        return
    event("accepted")
    controller = config.build_kl_controller()
    assert controller.value == (controller.init_coef if config.kl_init_coef is None else config.kl_init_coef)
    assert math.isfinite(controller.update(3.0, 8))
    again = config_class(**BARE, **kl_fields(config), num_iterations=config.num_iterations)
    assert kl_fields(again) == kl_fields(config)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(fields=SPACE, config_class=st.sampled_from(CONFIGS))
def test_any_config_with_every_field_drawn_is_refused_by_name_or_sound(fields, config_class):
    try:
        config = build(config_class, **fields)
    except ValueError as error:
        assert NAMED.search(str(error)), str(error)
    else:
        assert math.isfinite(config.build_kl_controller().update(3.0, 8))


# ---- Copies ----


SOUND = [
    {},
    {"kl_monitor": True, "kl_target": 6.0, "kl_warn_window": 5},
    {"kl_penalty_coef": 0.1},
    {"kl_penalty_coef": 0.1, "kl_placement": "loss", "kl_penalty_reference_step": 3},
    {"kl_penalty_coef": 0.1, "kl_placement": "reward", "kl_statistic": "full", "kl_ref_adapter_path": "some/adapter"},
    {"kl_penalty_coef": 0.1, "kl_placement": "loss", "kl_estimator": "full", "kl_ignore_tokens": ["eos", 5]},
    {"kl_update_target": 0.5, **SEVERAL_STEPS},
    {**ADAPTIVE, "kl_ref_sync_steps": 4, "kl_ref_mixup_alpha": 0.5, "kl_controller_kwargs": '{"clip": 0.3}'},
    {**ADAPTIVE, "kl_controller": "pid", "kl_centering": "group", "kl_discount": 0.9, "kl_target_unit": "token"},
]


@both_configs
@pytest.mark.parametrize("fields", SOUND, ids=str)
def test_round_trip(config_class, fields):
    config = build(config_class, **fields)
    again = config_class(**BARE, **kl_fields(config), num_iterations=config.num_iterations)
    assert kl_fields(again) == kl_fields(config)
    assert json.loads(json.dumps(kl_fields(config))) == kl_fields(config)


@both_configs
@pytest.mark.parametrize("fields", SOUND, ids=str)
def test_pickling(config_class, fields):
    config = build(config_class, **fields)
    again = pickle.loads(pickle.dumps(config))
    assert again == config and kl_fields(again) == kl_fields(config)


@both_configs
@pytest.mark.parametrize("fields", SOUND, ids=str)
def test_replace(config_class, fields):
    config = build(config_class, **fields)
    assert kl_fields(dataclasses.replace(config, generation_batch_size=None)) == kl_fields(config)
    changed = dataclasses.replace(config, generation_batch_size=None, learning_rate=0.5)
    assert changed.learning_rate == 0.5 and kl_fields(changed) == kl_fields(config)


def test_replace_validates():
    config = build(**ADAPTIVE)
    assert dataclasses.replace(config, generation_batch_size=None, kl_target=3.0).kl_target == 3.0
    with pytest.raises(ValueError, match="`kl_target` must be"):
        dataclasses.replace(config, generation_batch_size=None, kl_target=-1.0)


@pytest.mark.parametrize("placement", PENALISED)
def test_accepted_estimators_do_not_warn(placement):
    for estimator in PENALISED[placement]:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            build(kl_penalty_coef=0.05, kl_placement=placement, kl_estimator=estimator, scale_rewards="none")
