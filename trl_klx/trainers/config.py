"""Config fields of KL control, shared by every trainer, and one thin config per trainer."""

import json
import math
import os
import sys
import warnings
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from trl import GRPOConfig, RLOOConfig

from ..control.placements import Placement, get_placement, list_placements
from ..controllers.registry import get_kl_controller, get_kl_controller_class, list_kl_controllers
from ..controllers.rules import KLController
from ..maths.estimators import KL_ESTIMATORS, KL_UNITS
from ..references.kinds import REFERENCE_FIELDS, chosen_reference_fields


KL_PLACEMENTS = ("advantage", "reward", "loss")  # ours; [`register_placement`] adds to them
KL_CENTERINGS = ("batch", "microbatch", "group", "sequence", "none")
KL_STATISTICS = ("k3", "full")

# The fields that still mean something when the KL is only measured.
MONITOR_FIELDS = {
    *REFERENCE_FIELDS,
    "kl_ignore_tokens",
    "kl_ref_mixup_alpha",
    "kl_statistic",
    "kl_target",
    "kl_target_unit",
    "kl_warn_window",
}
# Controller settings by the name of the config field that carries them.
CONTROLLER_FIELDS = {"kl_horizon": "horizon", "kl_coef_min": "min_coef", "kl_coef_max": "max_coef"}


def _is_number(value: Any) -> bool:
    # The comparison leaves out NaN, infinities and integers too large for a float.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _number(interval: str, low: float, high: float = math.inf, *, above: bool = False, kind: type = float) -> tuple:
    def is_sound(value: Any) -> bool:
        sound = _is_number(value) and low <= value <= high and not (above and value == low)
        return sound and (kind is float or isinstance(value, kind))

    return is_sound, f"{'an integer' if kind is int else 'a finite number'} {interval}"


def _one_of(choices: tuple[str, ...]) -> tuple:
    listed = ", ".join(repr(choice) for choice in choices)
    return (lambda value: value in choices), f"one of {listed}", "Set it to one of them."


# By field: whether a value is sound, what a sound one is, what to set instead. Fields that default to None may be None.
_VALUES = {
    "kl_penalty_coef": (*_number(">= 0", 0.0), "0.0 switches the KL penalty off, 0.05 is a usual strength."),
    "kl_penalty_reference_step": (
        *_number(">= 0", 0, kind=int),
        "Set it to 0 for the initial policy, to N for `checkpoint-N` in `output_dir`, or leave it unset.",
    ),
    "kl_ref_adapter_path": (
        lambda value: isinstance(value, str) and value != "",
        "a non-empty path",
        "Leave it unset for another reference.",
    ),
    "kl_ref_lag": (*_number(">= 1", 1, kind=int), "Leave it unset for a fixed reference."),
    "kl_ref_sync_steps": (*_number(">= 1", 1, kind=int), "Leave it unset for a fixed reference."),
    "kl_ref_mixup_alpha": (*_number("in (0, 1]", 0.0, 1.0, above=True), "Leave it unset to copy at each refresh."),
    "kl_estimator": _one_of(KL_ESTIMATORS),
    "kl_centering": _one_of(KL_CENTERINGS),
    "kl_discount": (*_number("in [0, 1]", 0.0, 1.0), "Set it to 0.0 so that each token pays for its own KL."),
    "kl_statistic": _one_of(KL_STATISTICS),
    "kl_ignore_tokens": (
        lambda value: isinstance(value, list) and value and all(type(token) in (int, str) for token in value),
        "a list of token ids or strings",
        'Write it as ["eos"], or leave it unset so that every token counts.',
    ),
    "kl_update_target": (*_number("> 0 (nats)", 0.0, above=True), "Leave it unset to make every pass."),
    "kl_target": (*_number("> 0 (nats)", 0.0, above=True), "Leave it unset for a fixed coefficient."),
    "kl_target_unit": _one_of(KL_UNITS),
    "kl_horizon": (*_number("> 0 (completions)", 0, above=True), "The default is 10000; shorter adapts faster."),
    "kl_coef_min": (*_number("> 0", 0.0, above=True), "Set it to a small value such as 1e-4."),
    "kl_coef_max": (*_number("> 0", 0.0, above=True), "Set it to a large value such as 10.0."),
    "kl_controller_kwargs": (
        lambda value: isinstance(value, dict),
        "a dict or a JSON object",
        """Write it as '{"clip": 0.2}' on the command line, or leave it unset.""",
    ),
    "kl_monitor": (lambda value: isinstance(value, bool), "True or False", "Set it to True to measure the KL."),
    "kl_warn_window": (*_number(">= 0", 0, kind=int), "Set it to 0 to switch the drift diagnostics off."),
}


def _kl_field(default: Any, help: str, choices: tuple[str, ...] | None = None) -> Any:
    return field(default=default, metadata={"help": help} | ({"choices": list(choices)} if choices else {}))


@dataclass
class KLXConfigMixin:
    r"""
    KL-control fields, flat so that [`~trl.TrlParser`] reads them from YAML and from flags. With every field at its
    default, a KLX config trains exactly as its TRL parent does.

    Parameters:
        kl_penalty_coef (`float`, *optional*, defaults to `0.0`):
            Strength of the KL penalty, and the starting value of the controller. `0.0` switches it off.
        kl_penalty_reference_step (`int`, *optional*):
            Reference: the policy as saved at this step. `0` is the initial policy, `N` is `checkpoint-N` in
            `output_dir`. If unset (and no other reference is chosen), the reference is the base model with the adapter
            disabled, or the initial weights in full fine-tuning.
        kl_ref_adapter_path (`str`, *optional*):
            Reference: the LoRA adapter in this directory (or Hub repository), on the base model shared with the policy.
        kl_ref_lag (`int`, *optional*):
            Moving reference: the policy as it was this many optimizer steps ago.
        kl_ref_sync_steps (`int`, *optional*):
            Moving reference: a copy of the policy, refreshed every this many optimizer steps.
        kl_ref_mixup_alpha (`float`, *optional*):
            With `kl_ref_sync_steps`: weight of the policy in each refresh, `ref = (1 - alpha) * ref + alpha * policy`.
            If unset, each refresh is a plain copy.
        kl_placement (`str`, *optional*, defaults to `"advantage"`):
            Where the penalty acts: `"advantage"` (zero-mean adjustment of per-token advantages), `"reward"` (the
            KL is subtracted from the reward: a sequence's, or in PPO each token's) or `"loss"` (a KL term in the loss).
        kl_estimator (`str`, *optional*):
            Per-token estimator that is penalised: `"k1"` or `"importance"`, and with `kl_placement="loss"` `"k3"`, `"k2"`
            or `"full"`. If unset, the first of them.
        kl_centering (`str`, *optional*):
            With `kl_placement="advantage"`: the set of tokens over which the adjustment has zero mean: `"batch"` (the
            whole generation batch on all processes), `"microbatch"`, `"group"`, `"sequence"` or `"none"`. If unset,
            `"batch"`.
        kl_discount (`float`, *optional*, defaults to `0.0`):
            With `kl_placement="advantage"`: `0.0` lets each token pay for its own KL, a value in (0, 1] for the
            discounted KL from this token on.
        kl_statistic (`str`, *optional*):
            Estimator of the KL that is logged and that drives the controller: `"k3"`, or `"full"`, which is exact for
            each visited state and so less noisy. If unset, `"k3"`, and `"full"` with `kl_estimator="full"`.
        kl_ignore_tokens (`list`, *optional*):
            Tokens whose KL neither counts nor pays: ids, single tokens as strings, or `"eos"` for every token that ends a
            completion.
        kl_update_target (`float`, *optional*):
            With several optimizer steps per rollout: skip the rest of them once the policy has moved this far, in nats,
            from where it was when the rollout was sampled.
        kl_controller (`str`, *optional*):
            Name of the controller in the registry. If unset, `"adaptive"` when `kl_target` is set, else `"fixed"`.
        kl_target (`float`, *optional*):
            The KL to hold, in nats.
        kl_target_unit (`str`, *optional*, defaults to `"sequence"`):
            Whether target and KL statistic are a sum per completion (`"sequence"`) or a mean per token (`"token"`).
        kl_horizon (`int`, *optional*, defaults to `10000`):
            Horizon of the adaptive controller, in completions over all processes.
        kl_coef_min (`float`, *optional*, defaults to `1e-4`):
            Lower bound of every adaptive coefficient.
        kl_coef_max (`float`, *optional*, defaults to `10.0`):
            Upper bound of every adaptive coefficient.
        kl_controller_kwargs (`dict` or `str`, *optional*):
            Further keyword arguments of the controller; a JSON object on the command line.
        kl_monitor (`bool`, *optional*, defaults to `False`):
            Measure and log the KL although the penalty is off.
        kl_warn_window (`int`, *optional*, defaults to `100`):
            Number of generation batches over which the drift diagnostics average the KL. `0` switches them off.
    """

    # Whose placements `kl_placement` chooses from.
    _algorithm: ClassVar[str]

    kl_penalty_coef: float = _kl_field(
        0.0, "Strength of the KL penalty and starting value of the controller. 0.0 switches it off."
    )
    kl_penalty_reference_step: int | None = _kl_field(
        None,
        "Reference: the policy as saved at this step. 0 is the initial policy, N is `checkpoint-N` in `output_dir`. If "
        "unset, the base model with the adapter disabled, or the initial weights in full fine-tuning.",
    )
    kl_ref_adapter_path: str | None = _kl_field(
        None, "Reference: the LoRA adapter in this directory, on the base model shared with the policy."
    )
    kl_ref_lag: int | None = _kl_field(None, "Moving reference: the policy as it was this many optimizer steps ago.")
    kl_ref_sync_steps: int | None = _kl_field(
        None, "Moving reference: a copy of the policy, refreshed every this many optimizer steps."
    )
    kl_ref_mixup_alpha: float | None = _kl_field(
        None,
        "With `kl_ref_sync_steps`: weight of the policy in each refresh, `ref = (1 - alpha) * ref + alpha * policy`. If "
        "unset, each refresh is a plain copy.",
    )
    kl_placement: str = _kl_field(
        "advantage",
        "Where the penalty acts: 'advantage' (zero-mean adjustment of per-token advantages), 'reward' (the KL is "
        "subtracted from the reward: a sequence's, or in PPO each token's) or 'loss' (a KL term in the loss).",
        KL_PLACEMENTS,
    )
    kl_estimator: str | None = _kl_field(
        None,
        "Per-token estimator that is penalised: 'k1' or 'importance', and with `kl_placement='loss'` 'k3', 'k2' or "
        "'full'. If unset, the first of them.",
        KL_ESTIMATORS,
    )
    kl_centering: str | None = _kl_field(
        None,
        "With `kl_placement='advantage'`: set of tokens over which the adjustment has zero mean: 'batch' (the whole "
        "generation batch on all processes), 'microbatch', 'group', 'sequence' or 'none'. If unset, 'batch'.",
        KL_CENTERINGS,
    )
    kl_discount: float = _kl_field(
        0.0,
        "With `kl_placement='advantage'`: 0.0 lets each token pay for its own KL, a value in (0, 1] for the discounted "
        "KL from this token on.",
    )
    kl_statistic: str | None = _kl_field(
        None,
        "Estimator of the KL that is logged and that drives the controller: 'k3', or 'full', which is exact for each "
        "visited state and so less noisy. If unset, 'k3', and 'full' with `kl_estimator='full'`.",
        KL_STATISTICS,
    )
    kl_ignore_tokens: list[str] | None = _kl_field(
        None,
        "Tokens whose KL neither counts nor pays: ids, single tokens as strings, or 'eos' for every token that ends a "
        "completion.",
    )
    kl_update_target: float | None = _kl_field(
        None,
        "With several optimizer steps per rollout: skip the rest of them once the policy has moved this far, in nats, "
        "from where it was when the rollout was sampled.",
    )
    kl_controller: str | None = _kl_field(
        None,
        "Name of the controller in the registry: 'fixed', 'adaptive', 'exponential', 'pid' or one of your own. If "
        "unset, 'adaptive' when `kl_target` is set, else 'fixed'.",
    )
    kl_target: float | None = _kl_field(None, "The KL to hold, in nats.")
    kl_target_unit: str = _kl_field(
        "sequence",
        "Whether target and KL statistic are a sum per completion ('sequence') or a mean per token ('token').",
        KL_UNITS,
    )
    kl_horizon: int = _kl_field(10000, "Horizon of the adaptive controller, in completions over all processes.")
    kl_coef_min: float = _kl_field(1e-4, "Lower bound of every adaptive coefficient.")
    kl_coef_max: float = _kl_field(10.0, "Upper bound of every adaptive coefficient.")
    kl_controller_kwargs: dict[str, Any] | str | None = _kl_field(
        None, "Further keyword arguments of the controller; a JSON object on the command line."
    )
    kl_monitor: bool = _kl_field(False, "Measure and log the KL although the penalty is off.")
    kl_warn_window: int = _kl_field(
        100, "Number of generation batches over which the drift diagnostics average the KL. 0 switches them off."
    )

    def __post_init__(self):
        self._validate_kl_values()
        # After the values are known to be sound, and before the parent reads `beta`.
        self._resolve_kl_defaults()
        super().__post_init__()
        self._validate_kl_combinations()

    @property
    def kl_penalty_enabled(self) -> bool:
        """Whether the KL is penalised."""
        return self.kl_penalty_coef > 0.0

    @property
    def kl_enabled(self) -> bool:
        """Whether the KL is measured at all."""
        return self.kl_penalty_enabled or self.kl_monitor

    @property
    def kl_needs_full(self) -> bool:
        """Whether the KL over the whole vocabulary is computed, to be penalised or to be the statistic."""
        return self.kl_enabled and "full" in (self.kl_estimator, self.kl_statistic)

    @property
    def kl_controller_name(self) -> str:
        """Name of the controller, with the default resolved."""
        if self.kl_controller is not None:
            return self.kl_controller
        return "adaptive" if self.kl_target is not None and self.kl_penalty_enabled else "fixed"

    @property
    def placement_class(self) -> type[Placement]:
        """The class behind `kl_placement`."""
        return get_placement(self._algorithm, self.kl_placement)

    def build_kl_controller(self) -> KLController:
        """Build the controller these fields describe."""
        return get_kl_controller(
            self.kl_controller_name,
            init_coef=float(self.kl_penalty_coef),
            target=self.kl_target,
            horizon=self.kl_horizon,
            min_coef=self.kl_coef_min,
            max_coef=self.kl_coef_max,
            **(self.kl_controller_kwargs or {}),
        )

    def _placement_defaults(self) -> dict[str, str]:
        placement = self.placement_class
        return {
            "kl_estimator": placement.estimators[0],
            "kl_centering": "batch" if placement.centers else "none",
        }

    def _resolve_kl_defaults(self):
        for name, default in self._placement_defaults().items():
            if getattr(self, name) is None:
                setattr(self, name, default)
        if self.kl_statistic is None:
            self.kl_statistic = "full" if self.kl_estimator == "full" else "k3"

    def _validate_kl_values(self):
        if isinstance(self.kl_ref_adapter_path, os.PathLike):
            self.kl_ref_adapter_path = os.fspath(self.kl_ref_adapter_path)
        if isinstance(self.kl_ignore_tokens, list):
            # A command line gives ids as strings.
            self.kl_ignore_tokens = [
                int(t) if isinstance(t, str) and t.isdecimal() else t for t in self.kl_ignore_tokens
            ]
        if isinstance(self.kl_controller_kwargs, str):
            try:
                self.kl_controller_kwargs = json.loads(self.kl_controller_kwargs)
            except ValueError:
                pass  # a string is refused below
        defaults = {f.name: f.default for f in fields(self)}
        for name, (is_sound, sound, remedy) in _VALUES.items():
            value = getattr(self, name)
            if not is_sound(value) and not (value is None and defaults[name] is None):
                raise ValueError(f"`{name}` must be {sound}, got {value!r}. {remedy}")
        is_sound, sound, remedy = _one_of(list_placements(self._algorithm))
        if not is_sound(self.kl_placement):
            raise ValueError(f"`kl_placement` must be {sound}, got {self.kl_placement!r}. {remedy}")
        if self.kl_coef_min > self.kl_coef_max:
            raise ValueError(
                f"`kl_coef_min` ({self.kl_coef_min!r}) must not exceed `kl_coef_max` ({self.kl_coef_max!r}). Swap them "
                "or widen the interval."
            )

    def _validate_kl_combinations(self):
        self._refuse_inert_fields()
        chosen = chosen_reference_fields(self)
        if len(chosen) > 1:
            given = ", ".join(f"`{name}={value!r}`" for name, value in chosen.items())
            raise ValueError(f"Only one reference can be chosen, got {given}. Keep one of them and unset the others.")
        if self.kl_ref_mixup_alpha is not None and self.kl_ref_sync_steps is None:
            raise ValueError(
                f"`kl_ref_mixup_alpha={self.kl_ref_mixup_alpha!r}` has no effect without `kl_ref_sync_steps`. Set "
                "`kl_ref_sync_steps` to the number of steps between two refreshes, or unset `kl_ref_mixup_alpha`."
            )
        if self.kl_penalty_enabled and getattr(self, "beta", 0.0) != 0.0:
            raise ValueError(
                f"`beta={self.beta!r}` together with `kl_penalty_coef={self.kl_penalty_coef!r}` would penalise the KL "
                "twice. Set `beta=0.0`; for TRL's own KL term with a controller, use `kl_placement='loss'`."
            )
        if self.kl_penalty_enabled and getattr(self, "sync_ref_model", False):
            raise ValueError(
                "`sync_ref_model=True` moves TRL's reference, which `kl_penalty_coef > 0` does not use. Set "
                "`sync_ref_model=False` and `kl_ref_sync_steps` (with `kl_ref_mixup_alpha`) instead."
            )
        if self.kl_penalty_reference_step and (
            self.load_best_model_at_end or (self.metric_for_best_model is not None and self.save_total_limit == 1)
        ):
            raise ValueError(
                f"`kl_penalty_reference_step={self.kl_penalty_reference_step!r}` cannot be used with "
                "`load_best_model_at_end=True`, or with `metric_for_best_model` and `save_total_limit=1`: in the end the "
                "checkpoint of the earlier run, which is the reference, might be taken for the best one, or deleted. Unset "
                "them, or set `save_total_limit=2`."
            )
        self._validate_kl_placement()
        self._validate_update_target()
        if self.kl_enabled:
            self._warn_of_truncated_sampling()
        self._validate_kl_controller()

    def _validate_kl_placement(self):
        placement = self.placement_class
        if not placement.centers:
            if self.kl_centering != "none":
                raise ValueError(
                    f"`kl_centering={self.kl_centering!r}` has no effect with `kl_placement={self.kl_placement!r}`: "
                    "only per-token advantages are centered. Unset it, or set `kl_placement='advantage'`."
                )
            if self.kl_discount != 0.0:
                raise ValueError(
                    f"`kl_discount={self.kl_discount!r}` has no effect with `kl_placement={self.kl_placement!r}`. Set "
                    "it to 0.0, or set `kl_placement='advantage'`."
                )
        if self.kl_estimator not in placement.estimators and self.kl_penalty_enabled:
            known = ", ".join(repr(name) for name in placement.estimators)
            raise ValueError(
                f"`kl_estimator={self.kl_estimator!r}` cannot be used with `kl_placement={self.kl_placement!r}`: "
                f"{placement.why_not(self.kl_estimator)}. Use one of {known}, or another `kl_placement`; to measure the exact KL, set "
                "`kl_statistic='full'`."
            )
        if self.kl_penalty_enabled:
            placement.check(self)

    def _validate_update_target(self):
        if self.kl_update_target is None:
            return
        steps = self.steps_per_generation * self.num_iterations / self.gradient_accumulation_steps
        if steps <= 1:
            raise ValueError(
                f"`kl_update_target={self.kl_update_target!r}` has no effect with one optimizer step per rollout: there is "
                "no further step to skip. Set `num_iterations` (`num_ppo_epochs` in PPO) above 1, or unset it."
            )
        if self.fp16 or self.deepspeed:
            raise ValueError(
                f"`kl_update_target={self.kl_update_target!r}` cannot be used with "
                f"{'`fp16`' if self.fp16 else 'DeepSpeed'}, whose optimizer cannot skip a step. Unset it, or use "
                f"{'`bf16`' if self.fp16 else 'FSDP2'}."
            )

    def _warn_of_truncated_sampling(self):
        sampling = {"top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p} | (self.generation_kwargs or {})
        cut = {name: sampling[name] for name in ("top_k", "top_p", "min_p")}
        unset = {"top_k": (0, None), "top_p": (1.0, None), "min_p": (0.0, None)}
        given = [f"`{name}={value!r}`" for name, value in cut.items() if value not in unset[name]]
        if given:
            warnings.warn(
                f"{' and '.join(given)} cut unlikely tokens from what is sampled, but not from the distributions whose KL "
                "is measured: on such samples the sampled KL is too low, may be negative with 'k1', and tokens that are "
                "never sampled are not held. `kl_statistic='full'` measures the whole distributions on the states that are "
                "visited.",
                stacklevel=5,
            )

    def _refuse_inert_fields(self):
        """Refuse every field that was set but that nothing would read."""
        if self.kl_penalty_enabled:
            return
        ours = {f.name for f in fields(KLXConfigMixin)}
        defaults = {f.name: f.default for f in fields(self) if f.name in ours}
        defaults |= self._placement_defaults() | {"kl_statistic": "k3"}  # these were filled in, not set
        readable = {"kl_monitor", "kl_penalty_coef", "kl_update_target"}
        if self.kl_monitor:
            readable |= MONITOR_FIELDS
            # The estimator is read where it decides the statistic.
            if self.kl_estimator == self.kl_statistic == "full":
                readable.add("kl_estimator")
        inert = [name for name, default in defaults.items() if name not in readable and getattr(self, name) != default]
        if not inert:
            return
        given = ", ".join(f"`{name}={getattr(self, name)!r}`" for name in inert)
        if self.kl_controller is not None and get_kl_controller_class_or_raise(self.kl_controller).needs_target:
            raise ValueError(
                f"`kl_controller={self.kl_controller!r}` cannot start from `kl_penalty_coef={self.kl_penalty_coef!r}`: "
                "a multiplicative rule cannot leave 0. Set `kl_penalty_coef` to a positive value such as 0.05."
            )
        remedy = "Set `kl_penalty_coef` to a positive value such as 0.05"
        if not self.kl_monitor and MONITOR_FIELDS.issuperset(inert):
            remedy += ", or `kl_monitor=True` to only measure the KL"
        if "kl_target" in inert:
            remedy += " (an adaptive coefficient cannot leave 0)"
        raise ValueError(f"{given} has no effect while `kl_penalty_coef=0.0`. {remedy}.")

    def _validate_kl_controller(self):
        name = self.kl_controller_name
        controller_class = get_kl_controller_class_or_raise(name)
        if controller_class.needs_target and self.kl_target is None:
            raise ValueError(
                f"`kl_controller={name!r}` needs `kl_target`, got None. Set `kl_target` to the KL to hold (5-6 nats per "
                "sequence is typical), or `kl_controller='fixed'`."
            )
        defaults = {f.name: f.default for f in fields(type(self))}
        for field_name, setting in CONTROLLER_FIELDS.items():
            value = getattr(self, field_name)
            if value != defaults[field_name] and setting not in controller_class.uses:
                raise ValueError(
                    f"`{field_name}={value!r}` has no effect with `kl_controller={name!r}`. Unset it, or choose a "
                    "controller that uses it."
                )
        bounded = {"min_coef", "max_coef"} <= controller_class.uses
        if self.kl_penalty_enabled and bounded and not self.kl_coef_min <= self.kl_penalty_coef <= self.kl_coef_max:
            raise ValueError(
                f"`kl_penalty_coef={self.kl_penalty_coef!r}` lies outside [`kl_coef_min`, `kl_coef_max`] = "
                f"[{self.kl_coef_min!r}, {self.kl_coef_max!r}]. Start inside the bounds, or widen them."
            )
        if self.kl_target is None and self.kl_warn_window not in (0, defaults["kl_warn_window"]):
            raise ValueError(
                f"`kl_warn_window={self.kl_warn_window!r}` has no effect without `kl_target`: there is nothing to drift "
                "from. Set `kl_target`, or unset `kl_warn_window`."
            )
        try:
            self.build_kl_controller()
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"`kl_controller={name!r}` with `kl_controller_kwargs={self.kl_controller_kwargs!r}` cannot be built: "
                f"{error}"
            ) from error


def get_kl_controller_class_or_raise(name: str) -> type[KLController]:
    """The controller class of that name, or an error that names the config field and the valid choices."""
    if name not in list_kl_controllers():
        valid = ", ".join(repr(known) for known in list_kl_controllers())
        raise ValueError(
            f"`kl_controller` must be one of {valid}, got {name!r}. Register your own with `@register_kl_controller` "
            "before the config is built."
        )
    return get_kl_controller_class(name)


@dataclass
class KLXGRPOConfig(KLXConfigMixin, GRPOConfig):
    """
    [`~trl.GRPOConfig`] with the KL-control fields of [`KLXConfigMixin`].
    """

    _algorithm: ClassVar[str] = "grpo"


@dataclass
class KLXRLOOConfig(KLXConfigMixin, RLOOConfig):
    """
    [`~trl.RLOOConfig`] with the KL-control fields of [`KLXConfigMixin`]. TRL penalises the KL in RLOO by default; with
    `kl_penalty_coef > 0` a `beta` that was not given is 0, so that the KL is penalised once.
    """

    _algorithm: ClassVar[str] = "rloo"

    beta: float | None = field(
        default=None,
        metadata={
            "help": "TRL's KL coefficient. If unset, TRL's default, and 0.0 with `kl_penalty_coef > 0`, which takes "
            "its place."
        },
    )

    def _resolve_kl_defaults(self):
        super()._resolve_kl_defaults()
        if self.beta is None:
            self.beta = 0.0 if self.kl_penalty_enabled else RLOOConfig.__dataclass_fields__["beta"].default
