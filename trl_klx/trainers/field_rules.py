"""What a sound value of a config field is, and what to set instead of one that is not."""

from collections.abc import Collection

from ..controllers.setting_rules import SETTING_RULES, FieldRule, number
from ..maths.estimators import KL_ESTIMATORS, KL_UNITS


KL_CENTERINGS = ("batch", "microbatch", "group", "sequence", "none")
KL_STATISTICS = ("k3", "full")
KL_REF_DTYPES = ("float32", "bfloat16", "float16")
KL_REF_QUANTIZATIONS = ("4bit", "8bit")


def one_of(choices: Collection[str], remedy: str = "Set it to one of them.") -> FieldRule:
    """One of some names."""
    listed = ", ".join(repr(choice) for choice in choices)
    return FieldRule(lambda value: isinstance(value, str) and value in choices, f"one of {listed}", remedy)


def doubt_target(target: float, unit: str) -> str | None:
    """What to say of a target that looks as if it were meant in the other unit; `None` of any other."""
    words = {"sequence": "a sum per completion", "token": "a mean per token"}
    if unit == "token" and target >= 1.0:
        looks = words["sequence"]
    elif unit == "sequence" and target <= 0.1:
        looks = words["token"]
    else:
        return None
    return (
        f"looks like {looks}, but is taken as {words[unit]}. Usual targets are 0.01 to 0.2 nats per token and 1 to 10 "
        "nats per sequence; as a rule of thumb, tokens x 0.1 = nats per sequence."
    )


# The controller settings, by the config field that carries each.
FIELDS_OF_SETTINGS = {
    "init_coef": "kl_penalty_coef",
    "target": "kl_target",
    "horizon": "kl_horizon",
    "min_coef": "kl_coef_min",
    "max_coef": "kl_coef_max",
}
_PATH = FieldRule(
    lambda value: isinstance(value, str) and value != "",
    "a non-empty path",
    "Leave it unset for another reference.",
)
# Fields that default to None may also be None.
KL_RULES = {
    **{field: SETTING_RULES[setting] for setting, field in FIELDS_OF_SETTINGS.items()},
    "kl_penalty_reference_step": number(
        ">= 0",
        0,
        "Set it to 0 for the initial policy, to N for `checkpoint-N` in `output_dir`, or leave it unset.",
        kind=int,
    ),
    "kl_ref_adapter_path": _PATH,
    "kl_ref_model_path": _PATH,
    "kl_ref_dtype": one_of(KL_REF_DTYPES, "Leave it unset for the policy's."),
    "kl_ref_quantization": one_of(KL_REF_QUANTIZATIONS, "Leave it unset to keep the weights whole."),
    "kl_ref_lag": number(">= 1", 1, "Leave it unset for a fixed reference.", kind=int),
    "kl_ref_sync_steps": number(">= 1", 1, "Leave it unset for a fixed reference.", kind=int),
    "kl_ref_mixup_alpha": number("in (0, 1]", 0.0, "Leave it unset to copy at each refresh.", 1.0, above=True),
    "kl_ref_reset_patience": number(">= 2", 2, "Leave it unset to keep the reference.", kind=int),
    "kl_ref_reset_optimizer": FieldRule(
        lambda value: isinstance(value, bool), "True or False", "Set it to True to clear the optimizer's state."
    ),
    "kl_estimator": one_of(KL_ESTIMATORS),
    "kl_centering": one_of(KL_CENTERINGS),
    "kl_discount": number("in [0, 1]", 0.0, "Set it to 0.0 so that each token pays for its own KL.", 1.0),
    "kl_statistic": one_of(KL_STATISTICS),
    "kl_ignore_tokens": FieldRule(
        lambda value: isinstance(value, list) and value != [] and all(type(token) in (int, str) for token in value),
        "a list of token ids or strings",
        'Write it as ["eos"], or leave it unset so that every token counts.',
    ),
    "kl_update_target": number("> 0 (nats)", 0.0, "Leave it unset to make every pass.", above=True),
    "kl_target_unit": one_of(KL_UNITS),
    "kl_controller_kwargs": FieldRule(
        lambda value: isinstance(value, dict),
        "a dict or a JSON object",
        """Write it as '{"clip": 0.2}' on the command line, or leave it unset.""",
    ),
    "kl_monitor": FieldRule(
        lambda value: isinstance(value, bool), "True or False", "Set it to True to measure the KL."
    ),
    "kl_lr_guard": FieldRule(
        lambda value: isinstance(value, bool), "True or False", "Set it to True to guard the learning rate."
    ),
    "kl_warn_window": number(">= 0", 0, "Set it to 0 to switch the drift diagnostics off.", kind=int),
}
