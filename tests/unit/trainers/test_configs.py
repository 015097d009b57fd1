import dataclasses
import json
import math
import re
from pathlib import Path

import pytest
import yaml
from trl import GRPOConfig, RLOOConfig, TrlParser

from support.config_fields import (
    ADAPTIVE,
    BARE,
    CENTERINGS,
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
from trl_klx import KLXGRPOConfig, KLXRLOOConfig
from trl_klx.trainers.config import KLXConfigMixin
from trl_klx.trainers.kl_fields import KLFields


def parse(config_class, tmp_path, flags=(), **content):
    """Parse flags and a YAML file. The file is plain text, so PyYAML decides what is a string."""
    file = tmp_path / "config.yaml"
    lines = [f"{name}: {value}" for name, value in ({"output_dir": "out", "use_cpu": True} | content).items()]
    file.write_text("\n".join(lines))
    (config,) = TrlParser((config_class,)).parse_args_and_config(["--config", str(file), "--bf16", "False", *flags])
    return config


# ---- Fields, defaults, help ----


@both_configs
def test_every_field_of_the_design_is_there_with_its_default(config_class):
    config = build(config_class)
    assert {f.name for f in dataclasses.fields(config) if f.name.startswith("kl_")} == FIELDS.keys()
    assert {f.name for f in dataclasses.fields(KLXConfigMixin)} == FIELDS.keys()
    assert {name: getattr(config, name) for name in FIELDS} == {name: default for name, (default, _) in FIELDS.items()}


@both_configs
@pytest.mark.parametrize("name", FIELDS)
def test_every_field_has_a_help_text_and_a_line_in_the_docstring(config_class, name):
    help_text = config_class.__dataclass_fields__[name].metadata["help"]
    assert len(help_text) > 20 and help_text.endswith(".")
    assert re.search(rf"^ +{name} \(`.+`.*\):$", KLFields.__doc__, flags=re.MULTILINE)


@both_configs
def test_default_config_equals_the_parent_in_every_field_of_the_parent(config_class):
    parent = GRPOConfig if config_class is KLXGRPOConfig else RLOOConfig
    ours, theirs = build(config_class).to_dict(), parent(**BARE).to_dict()
    # Configs that are built at different times differ in the name of their log directory.
    differs = {name for name in theirs if ours[name] != theirs[name]}
    assert differs <= {"logging_dir"}


@both_configs
def test_help_prints(config_class, capsys):
    with pytest.raises(SystemExit) as caught:
        TrlParser((config_class,)).parse_args_and_config(["--help"])
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    assert all(f"--{name}" in printed for name in FIELDS)


def test_a_fresh_config_is_off():
    config = build()
    assert not config.kl_penalty_enabled and not config.kl_enabled
    assert config.kl_controller_name == "fixed"
    assert config.build_kl_controller().value == 0.0


# ---- Defaults that depend on other fields ----


@pytest.mark.parametrize(
    ("placement", "estimator", "centering"),
    [("advantage", "k1", "batch"), ("reward", "k1", "none"), ("loss", "k3", "none")],
)
@both_configs
def test_estimator_and_centering_follow_the_placement(config_class, placement, estimator, centering):
    config = build(config_class, kl_penalty_coef=0.1, kl_placement=placement)
    assert (config.kl_estimator, config.kl_centering) == (estimator, centering)


def test_controller_holds_a_target_and_is_fixed_without():
    assert build(kl_penalty_coef=0.1).kl_controller_name == "fixed"
    assert build(kl_penalty_coef=0.1, kl_target=6.0).kl_controller_name == "hold"
    assert build(kl_penalty_coef=0.1, kl_target=6.0, kl_controller="fixed").kl_controller_name == "fixed"
    # Nothing is controlled while the KL is only measured, but it can still drift.
    assert build(kl_monitor=True, kl_target=6.0).kl_controller_name == "fixed"


def test_controller_gets_every_setting():
    settings_ = {"kl_horizon": 50, "kl_coef_min": 0.01, "kl_coef_max": 3.0, "kl_controller_kwargs": {"clip": 0.4}}
    controller = build(**ADAPTIVE, **settings_).build_kl_controller()
    got = (controller.value, controller.target, controller.horizon, controller.min_coef, controller.max_coef)
    assert got == (0.1, 6.0, 50.0, 0.01, 3.0)
    assert controller.clip == 0.4


def test_rloo_beta_that_was_not_given_is_zero_with_the_penalty_and_the_hosts_without():
    theirs = RLOOConfig(**BARE).beta
    assert theirs == 0.05
    assert build(KLXRLOOConfig).beta == theirs
    assert build(KLXRLOOConfig, kl_monitor=True).beta == theirs
    assert build(KLXRLOOConfig, kl_penalty_coef=0.1).beta == 0.0
    assert build(KLXRLOOConfig, kl_penalty_coef=0.1, beta=0.0).beta == 0.0
    assert build(KLXRLOOConfig, beta=0.2).beta == 0.2


def test_adapter_path_may_be_a_path_object():
    config = build(kl_penalty_coef=0.1, kl_ref_adapter_path=Path("some") / "adapter")
    assert config.kl_ref_adapter_path == str(Path("some") / "adapter")
    config = build(kl_penalty_coef=0.1, kl_ref_model_path=Path("some") / "model")
    assert config.kl_ref_model_path == str(Path("some") / "model")


# ---- Parsing ----


@both_configs
def test_every_field_from_yaml(config_class, tmp_path):
    content = {
        "kl_penalty_coef": "5e-2",  # PyYAML reads this as a string, because it lacks a dot
        "kl_ref_sync_steps": 4,
        "kl_ref_mixup_alpha": "5e-1",
        "kl_placement": "advantage",
        "kl_estimator": "importance",
        "kl_centering": "group",
        "kl_discount": 1,
        "kl_statistic": "full",
        "kl_ignore_tokens": '[eos, 5, "7", w3]',
        "kl_update_target": "1e-1",
        "num_iterations": 2,
        "kl_controller": "adaptive",
        "kl_target": 6,
        "kl_target_unit": "token",
        "kl_horizon": 500,
        "kl_coef_min": "1e-3",
        "kl_coef_max": "1e1",
        "kl_controller_kwargs": "{clip: 0.3}",
        "kl_monitor": "true",
        "kl_warn_window": 20,
    }
    config = parse(config_class, tmp_path, **content)
    assert isinstance(yaml.safe_load("x: 5e-2")["x"], str)
    assert kl_fields(config) == {
        "kl_penalty_coef": 0.05,
        "kl_penalty_reference_step": None,
        "kl_ref_adapter_path": None,
        "kl_ref_model_path": None,
        "kl_ref_dtype": None,
        "kl_ref_lag": None,
        "kl_ref_sync_steps": 4,
        "kl_ref_mixup_alpha": 0.5,
        "kl_placement": "advantage",
        "kl_estimator": "importance",
        "kl_centering": "group",
        "kl_discount": 1,
        "kl_statistic": "full",
        "kl_ignore_tokens": ["eos", 5, 7, "w3"],
        "kl_update_target": 0.1,
        "kl_controller": "adaptive",
        "kl_target": 6,
        "kl_target_unit": "token",
        "kl_horizon": 500,
        "kl_coef_min": 0.001,
        "kl_coef_max": 10.0,
        "kl_controller_kwargs": {"clip": 0.3},
        "kl_monitor": True,
        "kl_lr_guard": False,
        "kl_warn_window": 20,
    }


@pytest.mark.parametrize(("name", "value"), REFERENCES.items())
@both_configs
def test_every_reference_from_yaml_and_from_flags(config_class, tmp_path, name, value):
    from_file = parse(config_class, tmp_path, kl_penalty_coef=0.1, **{name: value})
    from_flags = parse(config_class, tmp_path, ["--kl_penalty_coef", "0.1", f"--{name}", str(value)])
    assert getattr(from_file, name) == getattr(from_flags, name) == value
    assert type(getattr(from_flags, name)) is type(value)


@both_configs
def test_every_field_from_flags(config_class, tmp_path):
    wanted = {
        "kl_penalty_coef": 1e-3,
        "kl_ref_sync_steps": 4,
        "kl_ref_mixup_alpha": 0.5,
        "kl_placement": "advantage",
        "kl_estimator": "importance",
        "kl_centering": "group",
        "kl_discount": 0.9,
        "kl_statistic": "full",
        "kl_ignore_tokens": ["eos", 5, "w3"],
        "kl_update_target": 0.1,
        "num_iterations": 2,
        "kl_controller": "adaptive",
        "kl_target": 6.0,
        "kl_target_unit": "token",
        "kl_horizon": 500,
        "kl_coef_min": 1e-3,
        "kl_coef_max": 5.0,
        "kl_controller_kwargs": {"clip": 0.3},
        "kl_monitor": True,
        "kl_warn_window": 20,
    }
    flags = []
    for name, value in wanted.items():
        values = value if isinstance(value, list) else [json.dumps(value) if isinstance(value, dict) else value]
        flags += [f"--{name}", *map(str, values)]
    config = parse(config_class, tmp_path, flags)
    assert {name: getattr(config, name) for name in wanted} == wanted


def test_flag_overrides_yaml(tmp_path):
    config = parse(KLXGRPOConfig, tmp_path, ["--kl_penalty_coef", "0.3"], kl_penalty_coef=0.1)
    assert config.kl_penalty_coef == 0.3


def test_rloo_beta_from_yaml(tmp_path):
    assert parse(KLXRLOOConfig, tmp_path).beta == 0.05
    assert parse(KLXRLOOConfig, tmp_path, kl_penalty_coef=0.1).beta == 0.0
    assert parse(KLXRLOOConfig, tmp_path, beta="1e-1").beta == 0.1


@both_configs
@pytest.mark.parametrize("name", ["kl_placement", "kl_estimator", "kl_centering", "kl_target_unit", "kl_controller"])
def test_invalid_choice_in_yaml_is_refused(config_class, tmp_path, name):
    # The parser lets it through, because it checks choices only for flags.
    with pytest.raises(ValueError, match=rf"`{name}` must be one of .*, got 'k9'"):
        parse(config_class, tmp_path, kl_penalty_coef=0.1, **{name: "k9"})


@pytest.mark.parametrize("name", ["kl_placement", "kl_estimator"])
def test_names_of_registries_are_checked_by_the_config(tmp_path, name):
    # Users may register their own, so the parser takes any.
    with pytest.raises(ValueError, match=rf"`{name}` must be one of .*, got 'k9'"):
        parse(KLXGRPOConfig, tmp_path, ["--kl_penalty_coef", "0.1", f"--{name}", "k9"])


@pytest.mark.parametrize("name", ["kl_centering", "kl_target_unit"])
def test_invalid_choice_in_flags_is_refused(tmp_path, capsys, name):
    with pytest.raises(SystemExit):
        parse(KLXGRPOConfig, tmp_path, [f"--{name}", "k9"])
    assert "invalid choice: 'k9'" in capsys.readouterr().err


@both_configs
def test_unknown_key_in_yaml_is_refused(config_class, tmp_path):
    with pytest.raises(ValueError, match="kl_penalty_coeff"):
        parse(config_class, tmp_path, kl_penalty_coeff=0.1)


def test_unknown_flag_is_refused(tmp_path):
    with pytest.raises(ValueError, match="kl_penalty_coeff"):
        parse(KLXGRPOConfig, tmp_path, ["--kl_penalty_coeff", "0.1"])


@pytest.mark.parametrize("text", ["clip=0.3", "{clip: 0.3}", '{"clip": 0.3', "[0.3]", "0.3", '"clip"'])
def test_controller_kwargs_that_are_no_json_object_are_refused(tmp_path, text):
    flags = ["--kl_penalty_coef", "0.1", "--kl_target", "6", "--kl_controller_kwargs", text]
    with pytest.raises(ValueError, match="`kl_controller_kwargs` must be a dict or a JSON object, got .*Write it as"):
        parse(KLXGRPOConfig, tmp_path, flags)


# ---- Values ----


NAN_AND_INFINITIES = [math.nan, math.inf, -math.inf]
NO_NUMBERS = [True, "0.1", "", [0.1], 10**400]
BAD_VALUES = {
    "kl_penalty_coef": [-0.1, -1e-12, -5, *NAN_AND_INFINITIES, *NO_NUMBERS],
    "kl_penalty_reference_step": [-1, 1.0, 0.5, True, "0", math.nan],
    "kl_ref_adapter_path": ["", 3, b"path", ["path"]],
    "kl_ref_model_path": ["", 3, b"path", ["path"]],
    "kl_ref_dtype": ["bf16", "torch.bfloat16", "auto", "", 16],
    "kl_ref_lag": [0, -1, 1.0, True, "1"],
    "kl_ref_sync_steps": [0, -1, 1.0, True, "1"],
    "kl_ref_mixup_alpha": [0.0, -0.1, 1.0001, *NAN_AND_INFINITIES, *NO_NUMBERS],
    "kl_placement": ["Advantage", "rewards", "", None, 1, ["loss"]],
    "kl_estimator": ["k9", "K1", "", 1, ["k1"]],
    "kl_centering": ["microbatches", "", 1, False],
    "kl_discount": [-0.1, 1.0001, None, *NAN_AND_INFINITIES, *NO_NUMBERS],
    "kl_statistic": ["k1", "k2", "Full", "", 1, ["k3"]],
    "kl_ignore_tokens": [[], "eos", 5, [1.5], [None], [True], ["eos", ["a"]], {"eos": 1}],
    "kl_update_target": [0, 0.0, -0.5, *NAN_AND_INFINITIES, *NO_NUMBERS],
    "kl_controller": ["pi", "Adaptive", "", 1, ["pid"]],
    "kl_target": [0, 0.0, -6.0, *NAN_AND_INFINITIES, *NO_NUMBERS],
    "kl_target_unit": ["tokens", "", None, 1],
    "kl_horizon": [0, -1, None, *NAN_AND_INFINITIES, *NO_NUMBERS],
    "kl_coef_min": [0.0, -1e-4, None, *NAN_AND_INFINITIES, *NO_NUMBERS],
    "kl_coef_max": [0.0, -10.0, None, *NAN_AND_INFINITIES, *NO_NUMBERS],
    "kl_controller_kwargs": ["clip", [1], 3, "{"],
    "kl_monitor": ["yes", 1, None, 0.0],
    "kl_lr_guard": ["yes", 1, None, 0.0],
    "kl_warn_window": [-1, 1.5, None, True, "100"],
}
REMEDIES = {
    "kl_penalty_coef": "0.0 switches the KL penalty off",
    "kl_penalty_reference_step": "Set it to 0 for the initial policy",
    "kl_ref_adapter_path": "Leave it unset",
    "kl_ref_model_path": "Leave it unset",
    "kl_ref_dtype": "Leave it unset for the policy's",
    "kl_ref_lag": "Leave it unset",
    "kl_ref_sync_steps": "Leave it unset",
    "kl_ref_mixup_alpha": "Leave it unset",
    "kl_placement": "'advantage', 'loss', 'reward'",
    "kl_estimator": ", ".join(repr(name) for name in ESTIMATORS),
    "kl_centering": ", ".join(repr(name) for name in CENTERINGS),
    "kl_discount": "Set it to 0.0",
    "kl_statistic": "'k3', 'full'",
    "kl_ignore_tokens": "leave it unset so that every token counts",
    "kl_update_target": "Leave it unset to make every pass",
    "kl_controller": "'adaptive', 'exponential', 'fixed', ",
    "kl_target": "Leave it unset",
    "kl_target_unit": "'sequence', 'token'",
    "kl_horizon": "The default is 10000",
    "kl_coef_min": "such as 1e-4",
    "kl_coef_max": "such as 10.0",
    "kl_controller_kwargs": "leave it unset",
    "kl_monitor": "Set it to True",
    "kl_lr_guard": "Set it to True to guard the learning rate",
    "kl_warn_window": "Set it to 0",
}


def test_bad_values_are_listed_for_every_field():
    assert BAD_VALUES.keys() == REMEDIES.keys() == FIELDS.keys()


@both_configs
@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD_VALUES.items() for value in values], ids=repr
)
def test_bad_value_is_refused_with_field_value_and_remedy(config_class, name, value):
    message = refusal(config_class, **(ADAPTIVE | {name: value}))
    assert message.startswith(f"`{name}` must be ")
    assert f"got {value!r}." in message
    assert REMEDIES[name] in message


@pytest.mark.parametrize("centering", CENTERINGS)
@both_configs
def test_every_centering_is_accepted(config_class, centering):
    assert build(config_class, kl_penalty_coef=0.1, kl_centering=centering).kl_centering == centering


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("placement", PENALISED)
@both_configs
def test_every_estimator_is_accepted_or_refused_by_its_placement(config_class, placement, estimator):
    fields = {"kl_penalty_coef": 0.1, "kl_placement": placement, "kl_estimator": estimator}
    if estimator in PENALISED[placement]:
        assert build(config_class, **fields).kl_estimator == estimator
        return
    message = refusal(config_class, **fields)
    assert message.startswith(f"`kl_estimator={estimator!r}` cannot be used with `kl_placement={placement!r}`: ")
    assert f"Use one of {', '.join(map(repr, PENALISED[placement]))}" in message
    assert "`kl_statistic='full'`" in message


@both_configs
def test_update_target_is_accepted_with_and_without_the_penalty(config_class):
    fields = {"kl_update_target": 0.5, **SEVERAL_STEPS}
    assert build(config_class, **fields).kl_update_target == 0.5
    assert build(config_class, kl_penalty_coef=0.1, **fields).kl_update_target == 0.5
    assert build(config_class, kl_monitor=True, **fields).kl_update_target == 0.5
    assert not build(config_class, **fields).kl_enabled


def test_bounds_in_the_wrong_order():
    message = refusal(**ADAPTIVE, kl_coef_min=2.0, kl_coef_max=1.0)
    assert message == ("`kl_coef_min` (2.0) must not exceed `kl_coef_max` (1.0). Swap them or widen the interval.")
    # One bound alone can cross the other's default.
    assert "`kl_coef_max` (10.0)" in refusal(**ADAPTIVE, kl_coef_min=20.0)
