"""KLXPPOConfig: defaults, parsing, mini-batches, former names, and everything it refuses."""

import dataclasses
import json
import math
import pickle
import re
import warnings

import pytest
import yaml
from trl import GRPOConfig, TrlParser

from trl_klx import KLXGRPOConfig, KLXPPOConfig
from trl_klx.ppo.trl112_fields import COMPUTED, TRL112Fields


BARE = {"output_dir": "out", "use_cpu": True, "bf16": False, "report_to": []}

# PPO's own fields: default, and another value that is valid on its own.
FIELDS = {
    "num_ppo_epochs": (4, 2),
    "num_mini_batches": (1, 2),
    "gamma": (1.0, 0.99),
    "lam": (0.95, 0.9),
    "cliprange": (0.2, 0.1),
    "cliprange_value": (0.2, 0.5),
    "vf_coef": (0.1, 1.0),
    "value_learning_rate": (None, 1e-4),
    "num_value_layers": (2, 0),
    "value_head_detached": (True, False),
    "whiten_advantages": (True, False),
    "whiten_rewards": (False, True),
    "missing_eos_penalty": (None, 1.0),
    "reward_scaling": ("none", "running"),
    "cliprange_reward": (None, 10.0),
    "num_layers_unfrozen": (None, 2),
    "stop_strings": (None, ["Human:"]),
    "local_rollout_forward_batch_size": (None, 16),
    "total_episodes": (None, 1000),
    "stop_token": (None, "eos"),
    "stop_token_id": (None, 7),
    "model_adapter_name": (None, "policy"),
    "ref_adapter_name": (None, "sft"),
    "sft_model_path": (None, "some/policy"),
    "reward_model_path": (None, "some/reward"),
    "num_sample_generations": (None, 10),
    "dataset_num_proc": (None, 2),
    "kl_coef": (None, 0.2),
    "response_length": (None, 24),
}
# Fields of GRPO, or shared by all KLX configs, whose default differs in PPO.
CHANGED_DEFAULTS = {
    "learning_rate": 3e-6,
    "num_generations": 1,
    "temperature": 0.7,
    "max_completion_length": 53,
    "disable_dropout": True,
    "kl_placement": "reward",
    # Filled in: GRPO's names for `num_ppo_epochs` and `cliprange`, and defaults that depend on the placement.
    "num_iterations": 4,
    "kl_centering": "none",
}


def build(**fields) -> KLXPPOConfig:
    return KLXPPOConfig(**(BARE | fields))


def refusal(**fields) -> str:
    with pytest.raises(ValueError) as caught:
        build(**fields)
    return str(caught.value)


def future_warnings(**fields) -> tuple[KLXPPOConfig, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = build(**fields)
    return config, [str(warning.message) for warning in caught if warning.category is FutureWarning]


# ---- Defaults ----


def test_every_own_field_is_there_with_its_default():
    own = {f.name for f in dataclasses.fields(KLXPPOConfig)} - {f.name for f in dataclasses.fields(KLXGRPOConfig)}
    assert own == FIELDS.keys()
    config = build()
    assert {name: getattr(config, name) for name in FIELDS} == {name: default for name, (default, _) in FIELDS.items()}


def test_defaults_that_differ_from_grpo_are_these_and_no_others():
    ours, theirs = build().to_dict(), KLXGRPOConfig(**BARE).to_dict()
    # The generation batch is the same whether a group has one completion or more.
    differing = {name: ours[name] for name in theirs if ours[name] != theirs[name] and name != "logging_dir"}
    assert differing == CHANGED_DEFAULTS


def test_default_penalty_is_on_in_the_reward_with_a_fixed_coefficient():
    config = build()
    assert config.kl_penalty_enabled and config.kl_estimator == "k1" and config.kl_controller_name == "fixed"


@pytest.mark.parametrize("name", FIELDS)
def test_every_own_field_has_a_help_text_and_a_line_in_the_docstring(name):
    help_text = KLXPPOConfig.__dataclass_fields__[name].metadata["help"]
    assert len(help_text) > 10 and help_text.endswith(".")
    owner = TRL112Fields if name in TRL112Fields.__dataclass_fields__ else KLXPPOConfig
    # Python 3.13 takes the indent off docstrings.
    assert re.search(rf"^ +{name} \(`.+`.*\):$", owner.__doc__, flags=re.MULTILINE)


def test_number_of_generations_is_a_plain_int_afterwards():
    assert type(build().num_generations) is int
    assert type(build(num_generations=4, per_device_train_batch_size=8).num_generations) is int


@pytest.mark.parametrize("batch_size", [1, 3, 5, 7])
def test_odd_batch_sizes_are_accepted_with_one_generation(batch_size):
    config = build(per_device_train_batch_size=batch_size)
    assert config.generation_batch_size == batch_size


def test_groups_must_still_fill_the_generation_batch():
    assert "divisible by num_generations" in refusal(per_device_train_batch_size=5, num_generations=2)


# ---- Parsing and serialising ----


# YAML and command-line values for the fields that have an effect on their own.
SINGLE = {
    name: other
    for name, (_, other) in FIELDS.items()
    if name not in ("kl_coef", "response_length", "num_sample_generations")
}


@pytest.mark.parametrize("name", SINGLE)
def test_field_from_yaml(name, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({"output_dir": "out", "use_cpu": True, "bf16": False, name: SINGLE[name]}))
    (config,) = TrlParser((KLXPPOConfig,)).parse_args_and_config(["--config", str(file)])
    assert getattr(config, name) == SINGLE[name] and type(getattr(config, name)) is type(SINGLE[name])


@pytest.mark.parametrize("name", SINGLE)
def test_field_from_flag(name):
    value = SINGLE[name]
    texts = value if isinstance(value, list) else [str(value)]
    flags = ["--output_dir", "out", "--use_cpu", "True", "--bf16", "False", f"--{name}", *texts]
    (config,) = TrlParser((KLXPPOConfig,)).parse_args_and_config(flags)
    assert getattr(config, name) == value and type(getattr(config, name)) is type(value)


def test_yaml_numbers_without_a_dot_are_numbers(tmp_path):
    # PyYAML reads 1e-3 as a string.
    file = tmp_path / "config.yaml"
    file.write_text("output_dir: out\nuse_cpu: true\nbf16: false\nvf_coef: 1e-3\nlearning_rate: 1e-5\n")
    (config,) = TrlParser((KLXPPOConfig,)).parse_args_and_config(["--config", str(file)])
    assert (config.vf_coef, config.learning_rate) == (1e-3, 1e-5)


def test_help_prints(capsys):
    with pytest.raises(SystemExit) as caught:
        TrlParser((KLXPPOConfig,)).parse_args_and_config(["--help"])
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    assert all(f"--{name}" in printed for name in FIELDS)


def test_config_pickles_and_serialises():
    config = build(num_mini_batches=2, total_episodes=100, stop_strings=["Human:"], per_device_train_batch_size=8)
    copy = pickle.loads(pickle.dumps(config))
    assert copy == config and type(copy.num_generations) is int
    plain = config.to_dict()
    assert all(name in plain for name in FIELDS)
    assert json.loads(config.to_json_string())["num_generations"] == 1


# ---- Rollouts, mini-batches, length ----


@pytest.mark.parametrize(
    ("batch", "accumulation", "mini_batches", "micro_batch", "micro_batches_per_step"),
    [
        # The rollout is batch * accumulation. It is split into mini-batches, and these into micro-batches of at most
        # the given batch size.
        (8, 1, 1, 8, 1),
        (8, 4, 1, 8, 4),
        (8, 4, 4, 8, 1),
        (8, 4, 2, 8, 2),
        (8, 1, 2, 4, 1),  # a mini-batch of 4, smaller than the batch
        (8, 1, 8, 1, 1),
        (8, 2, 8, 2, 1),  # more mini-batches than accumulation steps
        (6, 2, 3, 2, 2),  # mini-batches of 4, which 6 does not divide
        (3, 5, 5, 3, 1),
        (1, 6, 3, 1, 2),
    ],
)
def test_mini_batches_split_the_rollout(batch, accumulation, mini_batches, micro_batch, micro_batches_per_step):
    config = build(
        per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation, num_mini_batches=mini_batches
    )
    rollout = batch * accumulation
    assert config.generation_batch_size == rollout
    assert config.per_device_train_batch_size == micro_batch
    assert config.gradient_accumulation_steps == micro_batches_per_step
    assert config.steps_per_generation == rollout // micro_batch
    # The number of optimizer steps per rollout and epoch, and the completions of each.
    assert config.steps_per_generation // config.gradient_accumulation_steps == mini_batches
    assert config.per_device_train_batch_size * config.gradient_accumulation_steps == rollout // mini_batches


def test_mini_batches_must_divide_the_rollout():
    message = refusal(per_device_train_batch_size=4, gradient_accumulation_steps=2, num_mini_batches=3)
    assert (
        "`num_mini_batches=3`" in message and "8 completions" in message and "per_device_train_batch_size" in message
    )


@pytest.mark.parametrize("field", ["steps_per_generation", "generation_batch_size"])
def test_mini_batches_exclude_trl_s_own_sizing(field):
    message = refusal(num_mini_batches=2, **{field: 8})
    assert "`num_mini_batches=2`" in message and f"`{field}=8`" in message and "Set one or the other" in message


def test_trl_s_own_sizing_works_alone():
    config = build(per_device_train_batch_size=4, steps_per_generation=6, gradient_accumulation_steps=2)
    assert config.generation_batch_size == 24


@pytest.mark.parametrize(
    ("fields", "max_steps"),
    [
        # Rollouts of 8: 100 episodes are 13 of them, rounded up; each is 4 epochs of one step.
        ({}, 13 * 4),
        ({"num_mini_batches": 4}, 13 * 4 * 4),
        ({"num_ppo_epochs": 1}, 13),
        # Rollouts of 16.
        ({"gradient_accumulation_steps": 2}, 7 * 4),
        # TRL's way of splitting a rollout of 32 into 4 micro-batches, 2 per step.
        ({"steps_per_generation": 4, "gradient_accumulation_steps": 2}, 4 * 4 * 2),
        # A step over two rollouts.
        ({"steps_per_generation": 1, "gradient_accumulation_steps": 2, "num_ppo_epochs": 1}, 7),
    ],
)
def test_total_episodes_set_the_number_of_steps(fields, max_steps):
    assert build(per_device_train_batch_size=8, total_episodes=100, **fields).max_steps == max_steps


def test_total_episodes_exclude_max_steps():
    message = refusal(total_episodes=100, max_steps=5)
    assert "`total_episodes=100`" in message and "`max_steps=5`" in message and "Set one of them" in message


# ---- Former names ----


@pytest.mark.parametrize(
    ("old", "value", "new", "expected"),
    [
        ("kl_coef", 0.2, "kl_penalty_coef", 0.2),
        ("kl_coef", 0.0, "kl_penalty_coef", 0.0),
        ("response_length", 24, "max_completion_length", 24),
        ("num_sample_generations", 10, "log_completions", True),
    ],
)
def test_former_name_is_mapped_with_one_warning(old, value, new, expected):
    config, messages = future_warnings(**{old: value})
    assert getattr(config, new) == expected
    assert len(messages) == 1 and f"`{old}`" in messages[0] and new in messages[0]


def test_each_former_name_warns_for_itself():
    _, messages = future_warnings(kl_coef=0.2, response_length=24, num_sample_generations=10)
    assert len(messages) == 3


def test_today_s_names_do_not_warn():
    _, messages = future_warnings(kl_penalty_coef=0.2, max_completion_length=24, num_sample_generations=0)
    assert messages == []


def test_warning_points_at_the_script():
    with pytest.warns(FutureWarning) as caught:
        KLXPPOConfig(**BARE, kl_coef=0.2)
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("fields", "old", "new"),
    [
        ({"kl_coef": 0.2, "kl_penalty_coef": 0.1}, "kl_coef", "kl_penalty_coef"),
        ({"response_length": 24, "max_completion_length": 32}, "response_length", "max_completion_length"),
    ],
)
def test_two_names_with_two_values_are_refused(fields, old, new):
    message = refusal(**fields)
    assert f"`{old}={fields[old]!r}`" in message and repr(fields[new]) in message and f"Set only `{new}`" in message


def test_two_names_with_one_value_are_accepted():
    config, _ = future_warnings(kl_coef=0.2, kl_penalty_coef=0.2)
    assert config.kl_penalty_coef == 0.2


def test_scoring_in_batches_where_nothing_is_scored_is_refused():
    fields = {"local_rollout_forward_batch_size": 4, "num_ppo_epochs": 1, "gradient_accumulation_steps": 1}
    message = refusal(kl_penalty_coef=0.0, **fields)
    assert "`local_rollout_forward_batch_size=4` has no effect" in message and "Unset it" in message
    for scored in ({}, {"kl_penalty_coef": 0.0, "kl_monitor": True}, {"kl_penalty_coef": 0.0, "num_ppo_epochs": 2}):
        assert build(**(fields | {"kl_penalty_coef": 0.1} | scored)).local_rollout_forward_batch_size == 4


@pytest.mark.parametrize("name", COMPUTED)
def test_what_the_former_trainer_computed_cannot_be_set(name):
    message = refusal(**{name: 64})
    assert f"`{name}=64`" in message and COMPUTED[name] in message and "Leave it out" in message


# ---- Refusals ----


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_generations", 0),
        ("num_generations", None),
        ("num_ppo_epochs", 0),
        ("num_ppo_epochs", 2.5),
        ("num_mini_batches", 0),
        ("gamma", 1.1),
        ("gamma", -0.1),
        ("gamma", math.nan),
        ("gamma", "1"),
        ("lam", 1.1),
        ("lam", math.nan),
        ("cliprange", 0.0),
        ("cliprange", -0.2),
        ("cliprange", math.inf),
        ("cliprange_value", 0.0),
        ("cliprange_value", None),
        ("value_learning_rate", 0.0),
        ("value_learning_rate", -1e-3),
        ("value_learning_rate", math.nan),
        ("num_value_layers", -1),
        ("num_value_layers", 1.5),
        ("num_value_layers", None),
        ("value_head_detached", 1),
        ("value_head_detached", "no"),
        ("vf_coef", -0.1),
        ("vf_coef", math.nan),
        ("vf_coef", True),
        ("missing_eos_penalty", -1.0),
        ("reward_scaling", "batch"),
        ("reward_scaling", None),
        ("cliprange_reward", 0.0),
        ("cliprange_reward", math.inf),
        ("num_layers_unfrozen", 0),
        ("num_layers_unfrozen", -1),
        ("stop_strings", "Human:"),
        ("stop_strings", []),
        ("stop_strings", [""]),
        ("local_rollout_forward_batch_size", 0),
        ("total_episodes", 0),
        ("total_episodes", 1e4),
        ("stop_token", "pad"),
        ("stop_token_id", -1),
        ("stop_token_id", "7"),
        ("num_sample_generations", -1),
        ("dataset_num_proc", 0),
        ("loss_type", "cispo"),
        ("loss_type", "vespo"),
    ],
)
def test_invalid_value_is_refused_with_field_value_and_remedy(name, value):
    message = refusal(**{name: value})
    assert message.startswith(f"`{name}` must be ") and f"got {value!r}. " in message
    remedy = message.split(f"got {value!r}. ")[1]
    assert len(remedy) > 15 and remedy.endswith(".")


@pytest.mark.parametrize(
    ("name", "value"), [("value_learning_rate", 1e-4), ("num_value_layers", 1), ("value_head_detached", False)]
)
def test_field_of_a_value_function_that_is_not_trained_is_refused(name, value):
    message = refusal(vf_coef=0.0, **{name: value})
    assert message.startswith(f"`{name}={value!r}` has no effect while `vf_coef=0.0`") and f"Unset `{name}`" in message


@pytest.mark.parametrize("name", ["reward_scaling", "loss_type"])
def test_refused_choice_lists_the_valid_ones(name):
    valid = {"reward_scaling": ["none", "running", "ref"], "loss_type": ["grpo", "bnpo", "dr_grpo", "dapo"]}[name]
    message = refusal(**{name: "k9"})
    assert all(repr(choice) in message for choice in valid)
    for choice in valid:
        build(**{name: choice})


@pytest.mark.parametrize(
    ("theirs", "value", "ours"), [("epsilon", 0.3, "cliprange"), ("num_iterations", 2, "num_ppo_epochs")]
)
def test_grpo_s_name_for_a_field_of_ppo_is_refused(theirs, value, ours):
    message = refusal(**{theirs: value})
    assert f"`{theirs}={value!r}`" in message and f"Set `{ours}`" in message
    config = build(**{ours: value})
    assert getattr(config, theirs) == value


# Fields of GRPO that nothing reads in PPO, each with a value other than GRPO's default.
INERT = {
    "scale_rewards": "batch",
    "multi_objective_aggregation": "normalize_then_sum",
    "beta": 0.1,
    "sync_ref_model": True,
    "ref_model_sync_steps": 16,
    "ref_model_mixup_alpha": 0.3,
    "sapo_temperature_neg": 2.0,
    "sapo_temperature_pos": 2.0,
    "vespo_k_pos": 1.0,
    "vespo_lambda_pos": 1.0,
    "vespo_k_neg": 1.0,
    "vespo_lambda_neg": 1.0,
    "use_bias_correction_kl": False,
}


@pytest.mark.parametrize("name", INERT)
def test_inert_field_of_grpo_is_refused(name):
    assert INERT[name] != GRPOConfig.__dataclass_fields__[name].default
    message = refusal(**{name: INERT[name]})
    assert f"`{name}={INERT[name]!r}` has no effect in PPO. " in message
    assert message.split("in PPO. ")[1].endswith(".")


@pytest.mark.parametrize("name", ["beta", "scale_rewards"])
def test_inert_field_is_refused_without_a_penalty_too(name):
    assert f"`{name}=" in refusal(kl_penalty_coef=0.0, **{name: INERT[name]})


# Fields of GRPO that do work in PPO must not be refused.
WORKING = {
    "epsilon_high": 0.28,
    "delta": 4.0,
    "top_entropy_quantile": 0.5,
    "entropy_coef": 0.01,
    "mask_truncated_completions": True,
    "reward_weights": [1.0, 0.5],
    "num_generations_eval": 2,
    "log_completions": True,
    "shuffle_dataset": False,
    "generation_kwargs": {"suffix": "x"},
    "top_p": 0.9,
}


@pytest.mark.parametrize("name", WORKING)
def test_field_of_grpo_that_works_is_accepted(name):
    assert getattr(build(**{name: WORKING[name]}), name) == WORKING[name]


# Fields of GRPO that treat a sequence as a whole, which PPO's advantages do not.
PER_SEQUENCE = {"importance_sampling_level": "sequence", "off_policy_mask_threshold": 0.5}


@pytest.mark.parametrize("penalty", [{}, {"kl_penalty_coef": 0.0}, {"kl_placement": "loss"}], ids=str)
@pytest.mark.parametrize("name", PER_SEQUENCE)
def test_field_of_grpo_that_treats_sequences_as_a_whole_is_refused(name, penalty):
    message = refusal(**{name: PER_SEQUENCE[name]}, **penalty)
    assert message.startswith(f"`{name}={PER_SEQUENCE[name]!r}` cannot be used in PPO, whose advantages differ")
    remedy = {"importance_sampling_level": "Set it to 'token'.", "off_policy_mask_threshold": "`kl_update_target`"}
    assert remedy[name] in message
    assert build(importance_sampling_level="token", off_policy_mask_threshold=None)


@pytest.mark.parametrize(
    "fields",
    [{"kl_placement": "loss"}, {"kl_placement": "advantage"}, {"kl_placement": "loss", "kl_penalty_coef": 0.0}],
)
def test_bias_correction_of_trl_s_kl_term_is_refused_everywhere(fields):
    message = refusal(use_bias_correction_kl=False, **fields)
    assert message.startswith("`use_bias_correction_kl=False` has no effect") and message.lower().endswith("unset it.")


# Estimators that can be charged to a policy gradient, and those that can be a term of the loss.
ACCEPTED = {"reward": ["k1", "importance"], "advantage": ["k1", "importance"], "loss": ["k3", "k2", "full"]}


@pytest.mark.parametrize("placement", ACCEPTED)
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs", "full", "trlx", "importance"])
def test_estimators_of_each_placement(estimator, placement):
    fields = {"kl_placement": placement, "kl_estimator": estimator}
    if estimator in ACCEPTED[placement]:
        assert build(**fields).kl_estimator == estimator
        return
    message = refusal(**fields)
    assert message.startswith(f"`kl_estimator={estimator!r}` cannot be used with `kl_placement={placement!r}`: ")
    assert "Use one of " + ", ".join(repr(name) for name in ACCEPTED[placement]) in message


def test_reference_adapter_without_a_kl_is_refused():
    message = refusal(ref_adapter_name="sft", kl_penalty_coef=0.0)
    assert "`ref_adapter_name='sft'`" in message and "`kl_penalty_coef=0.0`" in message and "kl_monitor" in message
    assert build(ref_adapter_name="sft", kl_penalty_coef=0.0, kl_monitor=True).ref_adapter_name == "sft"


def test_reference_adapter_that_is_trained_is_refused():
    message = refusal(ref_adapter_name="sft", model_adapter_name="sft")
    assert "`ref_adapter_name='sft'`" in message and "`model_adapter_name`" in message and "another adapter" in message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kl_penalty_reference_step", 0),
        ("kl_ref_adapter_path", "some/path"),
        ("kl_ref_lag", 2),
        ("kl_ref_sync_steps", 2),
    ],
)
def test_reference_adapter_excludes_every_other_reference(name, value):
    message = refusal(ref_adapter_name="sft", **{name: value})
    assert (
        "Only one reference" in message and "`ref_adapter_name='sft'`" in message and f"`{name}={value!r}`" in message
    )


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("stop_strings", ["Human:"], "generation_kwargs={'stop': ['Human:']}"),
        ("stop_token_id", 7, "generation_kwargs={'stop_token_ids': [7]}"),
    ],
)
def test_stops_that_vllm_would_not_see_are_refused(name, value, remedy):
    message = refusal(use_vllm=True, **{name: value})
    assert f"`{name}={value!r}`" in message and remedy in message


def test_stop_strings_are_refused_with_continuous_batching():
    message = refusal(use_transformers_continuous_batching=True, stop_strings=["Human:"])
    assert "`stop_strings=['Human:']`" in message and "`stop_token_id`" in message
    build(use_transformers_continuous_batching=True, stop_token_id=7)


def test_stop_strings_are_refused_where_they_would_mask_the_completion():
    message = refusal(mask_truncated_completions=True, stop_strings=["Human:"])
    assert "`stop_strings=['Human:']`" in message and "`missing_eos_penalty`" in message


def test_kl_fields_are_checked_as_in_every_config():
    assert "`kl_penalty_coef`" in refusal(kl_penalty_coef=-1.0)
    with pytest.warns(FutureWarning):
        assert "`kl_penalty_coef`" in refusal(kl_coef=-1.0)
    assert "`kl_target`" in refusal(kl_controller="adaptive")
    assert "`kl_centering='group'`" in refusal(kl_centering="group")  # without effect in the reward
    grouped = {"kl_placement": "advantage", "kl_centering": "group"}
    message = refusal(**grouped)
    assert "`kl_centering='group'` has no groups with `num_generations=1`" in message
    assert build(**grouped, num_generations=4).kl_centering == "group"
