"""Every config field with its default and another valid value, and builders of configs."""

import pytest

from trl_klx import KLXGRPOConfig, KLXRLOOConfig


CONFIGS = [KLXGRPOConfig, KLXRLOOConfig]
BARE = {"output_dir": "out", "use_cpu": True, "bf16": False, "report_to": []}
# Every field with its default, and another value that is valid on its own.
FIELDS = {
    "kl_penalty_coef": (None, 0.1),
    "kl_penalty_reference_step": (None, 3),
    "kl_ref_adapter_path": (None, "some/adapter"),
    "kl_ref_model_path": (None, "some/model"),
    "kl_ref_dtype": (None, "bfloat16"),
    "kl_ref_quantization": (None, "4bit"),
    "kl_ref_lag": (None, 2),
    "kl_ref_sync_steps": (None, 4),
    "kl_ref_mixup_alpha": (None, 0.5),
    "kl_ref_reset_patience": (None, 20),
    "kl_ref_reset_optimizer": (False, True),
    "kl_placement": ("advantage", "reward"),
    "kl_estimator": ("k1", "importance"),
    "kl_centering": ("batch", "group"),
    "kl_discount": (0.0, 0.9),
    "kl_statistic": (None, "full"),
    "kl_ignore_tokens": (None, ["eos", 5]),
    "kl_update_target": (None, 0.5),
    "kl_controller": (None, "fixed"),
    "kl_target": (None, 6.0),
    "kl_target_unit": ("sequence", "token"),
    "kl_horizon": (10000, 500),
    "kl_coef_min": (1e-4, 1e-3),
    "kl_coef_max": (10.0, 2.0),
    "kl_controller_kwargs": (None, {"clip": 0.3}),
    "kl_monitor": (False, True),
    "kl_warn_window": (100, 20),
    "kl_lr_guard": (False, True),
}
ESTIMATORS = ["k1", "k2", "k3", "abs", "full", "trlx", "importance"]
# The estimators that each placement can penalise, its default first.
PENALISED = {"advantage": ["k1", "importance"], "reward": ["k1", "importance"], "loss": ["k3", "k2", "full"]}
CENTERINGS = ["batch", "microbatch", "group", "sequence", "none"]
REFERENCES = {
    "kl_penalty_reference_step": 0,
    "kl_ref_adapter_path": "some/adapter",
    "kl_ref_model_path": "some/model",
    "kl_ref_lag": 1,
    "kl_ref_sync_steps": 4,
}
# Several optimizer steps per rollout, without which `kl_update_target` has nothing to skip.
SEVERAL_STEPS = {"num_iterations": 2}
# A run that reads every controller setting.
ADAPTIVE = {"kl_penalty_coef": 0.1, "kl_target": 6.0, "kl_controller": "adaptive"}
both_configs = pytest.mark.parametrize("config_class", CONFIGS)


def build(config_class=KLXGRPOConfig, **fields):
    return config_class(**BARE, **fields)


def refusal(config_class=KLXGRPOConfig, **fields) -> str:
    with pytest.raises(ValueError) as caught:
        build(config_class, **fields)
    return str(caught.value)


def kl_fields(config) -> dict:
    return {name: value for name, value in config.to_dict().items() if name.startswith("kl_")}
