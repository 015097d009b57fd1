"""Which values of a setting are sound, alone and together; the configs check theirs by the same rules."""

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from .base import KLController


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


def is_finite_number(value: object) -> bool:
    """Whether the value is a number that a float can hold; NaN and infinities are not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def number(
    interval: str, low: float, remedy: str, high: float = math.inf, *, above: bool = False, kind: type = float
) -> FieldRule:
    """A finite number of at least `low`, or above it, and at most `high`."""

    def is_sound(value: Any) -> bool:
        sound = is_finite_number(value) and low <= value <= high and not (above and value == low)
        return sound and (kind is float or isinstance(value, kind))

    return FieldRule(is_sound, f"{'an integer' if kind is int else 'a finite number'} {interval}", remedy)


SETTING_RULES = {
    "init_coef": number(">= 0", 0.0, "0.0 switches the KL penalty off, 0.05 is a usual strength."),
    "target": number("> 0 (nats)", 0.0, "Leave it unset for a fixed coefficient.", above=True),
    "horizon": number("> 0 (completions)", 0, "The default is 10000; shorter adapts faster.", above=True),
    "min_coef": number("> 0", 0.0, "Set it to a small value such as 1e-4.", above=True),
    "max_coef": number("> 0", 0.0, "Set it to a large value such as 10.0.", above=True),
}


def check_settings(
    cls: "type[KLController]", owner: str, settings: Mapping[str, Any], names: Mapping[str, str] | None = None
) -> None:
    """
    Refuse settings that a controller cannot work with.

    Args:
        cls (`type[KLController]`):
            Class of the controller.
        owner (`str`):
            What the user knows the controller by, for messages.
        settings (`Mapping[str, Any]`):
            `init_coef`, `target`, `horizon`, `min_coef` and `max_coef`. An `init_coef` of `None` is up to the class.
        names (`Mapping[str, str]`, *optional*):
            What the user knows each setting by. If unset, the names above.
    """
    shown = {name: (names or {}).get(name, name) for name in SETTING_RULES}
    target, start = settings["target"], settings["init_coef"]
    for name, rule in SETTING_RULES.items():
        if name != "target" and not (name == "init_coef" and start is None and not cls.needs_start):
            rule.check(shown[name], settings[name])
    if target is not None:
        SETTING_RULES["target"].check(shown["target"], target)
    elif cls.needs_target:
        raise ValueError(
            f"{owner} needs `{shown['target']}`, got None. Set `{shown['target']}` to the KL to hold (5-6 nats per "
            "sequence is typical), or use `kl_controller='fixed'`."
        )
    low, high = settings["min_coef"], settings["max_coef"]
    if low > high:
        raise ValueError(
            f"`{shown['min_coef']}` ({low!r}) must not exceed `{shown['max_coef']}` ({high!r}). Swap them or widen "
            "the interval."
        )
    if start is None:
        return
    if start == 0 and cls.multiplicative:
        raise ValueError(
            f"`{shown['init_coef']}` is {start!r}, but a multiplicative rule cannot leave 0. Set a value in [{low}, "
            f"{high}], or use `kl_controller='fixed'`."
        )
    if ("min_coef" in cls.uses and start < low) or ("max_coef" in cls.uses and start > high):
        raise ValueError(
            f"`{shown['init_coef']}={start!r}` lies outside [`{shown['min_coef']}`, `{shown['max_coef']}`] = "
            f"[{low!r}, {high!r}]. Start inside the bounds, or widen them."
        )
