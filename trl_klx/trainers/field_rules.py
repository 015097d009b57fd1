"""What a sound value of a config field is, and what to set instead of one that is not."""

import math
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from ..maths.estimators import KL_ESTIMATORS, KL_UNITS


KL_PLACEMENTS = ("advantage", "loss", "reward")  # ours; [`register_placement`] adds to them
KL_CENTERINGS = ("batch", "microbatch", "group", "sequence", "none")
KL_STATISTICS = ("k3", "full")
KL_REF_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class FieldRule:
    """
    Attributes:
        is_sound (`Callable`):
            Whether a value is sound.
        sound (`str`):
            What a sound value is, after "must be".
        remedy (`str`):
            What to set instead.
    """

    is_sound: Callable[[Any], bool]
    sound: str
    remedy: str

    def check(self, name: str, value: Any) -> None:
        """Refuse a value of the field `name` that is not sound."""
        if not self.is_sound(value):
            raise ValueError(f"`{name}` must be {self.sound}, got {value!r}. {self.remedy}")


def is_number(value: Any) -> bool:
    """Whether the value is a number that a float can hold; NaN and infinities are not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def number(
    interval: str, low: float, remedy: str, high: float = math.inf, *, above: bool = False, kind: type = float
) -> FieldRule:
    """A finite number of at least `low`, or above it, and at most `high`."""

    def is_sound(value: Any) -> bool:
        sound = is_number(value) and low <= value <= high and not (above and value == low)
        return sound and (kind is float or isinstance(value, kind))

    return FieldRule(is_sound, f"{'an integer' if kind is int else 'a finite number'} {interval}", remedy)


def one_of(choices: Collection[str], remedy: str = "Set it to one of them.") -> FieldRule:
    """One of some names."""
    listed = ", ".join(repr(choice) for choice in choices)
    return FieldRule(lambda value: isinstance(value, str) and value in choices, f"one of {listed}", remedy)


def doubt_target(target: float, unit: str) -> str | None:
    """What to say of a target that looks as if it were meant in the other unit; `None` of any other."""
    if unit == "token" and target >= 1.0:
        other, looks = "sequence", "a sum per completion"
    elif unit == "sequence" and target <= 0.1:
        other, looks = "token", "a mean per token"
    else:
        return None
    return (
        f"`kl_target={target!r}` looks like {looks}, but `kl_target_unit={unit!r}`. Usual targets are 0.01 to 0.2 "
        "nats per token and 1 to 10 nats per sequence; as a rule of thumb, tokens x 0.1 = nats per sequence. Set "
        f"`kl_target_unit={other!r}`, or another `kl_target`."
    )


_PATH = FieldRule(
    lambda value: isinstance(value, str) and value != "",
    "a non-empty path",
    "Leave it unset for another reference.",
)
# Fields that default to None may also be None.
KL_RULES = {
    "kl_penalty_coef": number(">= 0", 0.0, "0.0 switches the KL penalty off, 0.05 is a usual strength."),
    "kl_penalty_reference_step": number(
        ">= 0",
        0,
        "Set it to 0 for the initial policy, to N for `checkpoint-N` in `output_dir`, or leave it unset.",
        kind=int,
    ),
    "kl_ref_adapter_path": _PATH,
    "kl_ref_model_path": _PATH,
    "kl_ref_dtype": one_of(KL_REF_DTYPES, "Leave it unset for the policy's."),
    "kl_ref_lag": number(">= 1", 1, "Leave it unset for a fixed reference.", kind=int),
    "kl_ref_sync_steps": number(">= 1", 1, "Leave it unset for a fixed reference.", kind=int),
    "kl_ref_mixup_alpha": number("in (0, 1]", 0.0, "Leave it unset to copy at each refresh.", 1.0, above=True),
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
    "kl_target": number("> 0 (nats)", 0.0, "Leave it unset for a fixed coefficient.", above=True),
    "kl_target_unit": one_of(KL_UNITS),
    "kl_horizon": number("> 0 (completions)", 0, "The default is 10000; shorter adapts faster.", above=True),
    "kl_coef_min": number("> 0", 0.0, "Set it to a small value such as 1e-4.", above=True),
    "kl_coef_max": number("> 0", 0.0, "Set it to a large value such as 10.0.", above=True),
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
