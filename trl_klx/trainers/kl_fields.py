"""The config fields of KL control, and what follows from their values."""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from ..control.placements import Placement, get_placement
from ..controllers.base import KLController
from ..controllers.registry import get_kl_controller, get_kl_controller_class, list_kl_controllers
from ..maths.estimators import KL_UNITS
from .field_rules import KL_CENTERINGS, KL_REF_DTYPES, KL_REF_QUANTIZATIONS, KL_STATISTICS


def _kl_field(default: Any, help: str, choices: Iterable[str] = ()) -> Any:
    choices = list(choices)
    return field(default=default, metadata={"help": help} | ({"choices": choices} if choices else {}))


def get_kl_controller_class_or_raise(name: str) -> type[KLController]:
    """The controller class of that name, or an error that names the config field and the valid choices."""
    # Installed packages are only asked about a name that nobody has registered: that takes longer than all else here.
    if name not in list_kl_controllers(installed=False) and name not in list_kl_controllers():
        valid = ", ".join(repr(known) for known in list_kl_controllers())
        raise ValueError(
            f"`kl_controller` must be one of {valid}, got {name!r}. Register your own with `@register_kl_controller` "
            "before the config is built."
        )
    return get_kl_controller_class(name)


@dataclass
class KLFields:
    r"""
    KL-control fields, flat so that [`~trl.TrlParser`] reads them from YAML and from flags. With every field at its
    default, a KLX config trains exactly as its TRL parent does.

    Parameters:
        kl_target (`float`, *optional*):
            The KL to hold, in nats. It switches KL control on by itself.
        kl_penalty_coef (`float`, *optional*):
            Strength of the KL penalty: constant without `kl_target`, the controller's starting value with it. If
            unset, the default controller finds its own start, and without `kl_target` there is no penalty. `0.0`
            switches the penalty off.
        kl_penalty_reference_step (`int`, *optional*):
            Reference: the policy as saved at this step. `0` is the initial policy, `N` is `checkpoint-N` in
            `output_dir`. If unset (and no other reference is chosen), the reference is the base model with the adapter
            disabled, or the initial weights in full fine-tuning.
        kl_ref_adapter_path (`str`, *optional*):
            Reference: the LoRA adapter in this directory (or Hub repository), on the base model shared with the
            policy.
        kl_ref_model_path (`str`, *optional*):
            Reference: the model in this directory (or Hub repository). It must have the policy's vocabulary.
        kl_ref_dtype (`str`, *optional*):
            With `kl_ref_model_path`: dtype of the reference, `"float32"`, `"bfloat16"` or `"float16"`. If unset, the
            policy's.
        kl_ref_quantization (`str`, *optional*):
            With `kl_ref_model_path`: load the reference in `"4bit"` (NF4) or `"8bit"`, by bitsandbytes. If unset, its
            weights stay whole.
        kl_ref_lag (`int`, *optional*):
            Moving reference: the policy as it was this many optimizer steps ago.
        kl_ref_sync_steps (`int`, *optional*):
            Moving reference: a copy of the policy, refreshed every this many optimizer steps.
        kl_ref_mixup_alpha (`float`, *optional*):
            With `kl_ref_sync_steps`: weight of the policy in each refresh, `ref = (1 - alpha) * ref + alpha * policy`.
            If unset, each refresh is a plain copy.
        kl_ref_reset_patience (`int`, *optional*):
            Make the policy the reference whenever, over this many generation batches, the reward has not risen and the
            KL was at its target. The controller then begins again. If unset, the reference stays.
        kl_ref_reset_optimizer (`bool`, *optional*, defaults to `False`):
            With `kl_ref_reset_patience`: clear the optimizer's state at each reset.
        kl_placement (`str`, *optional*, defaults to `"advantage"`):
            Where the penalty acts: `"advantage"` (zero-mean adjustment of per-token advantages), `"reward"` (the KL is
            subtracted from the reward: a sequence's, or in PPO each token's) or `"loss"` (a KL term in the loss).
        kl_estimator (`str`, *optional*):
            Per-token estimator that is penalised: `"k1"` or `"importance"`, and with `kl_placement="loss"` `"k3"`,
            `"k2"` or `"full"`. If unset, the first of them.
        kl_centering (`str`, *optional*):
            With `kl_placement="advantage"`: the set of tokens over which the adjustment has zero mean: `"batch"` (the
            whole generation batch on all processes), `"microbatch"`, `"group"`, `"sequence"` or `"none"`. If unset,
            `"batch"`.
        kl_discount (`float`, *optional*, defaults to `0.0`):
            With `kl_placement="advantage"`: `0.0` lets each token pay for its own KL, a value in (0, 1] for the
            discounted KL from this token on.
        kl_statistic (`str`, *optional*):
            Estimator of the KL that is logged and that drives the controller: `"k3"`, or `"full"`, which is exact for
            each visited state and so less noisy. If unset, `"full"` with the controller `"hold"` (`"k3"` for models
            whose exact KL cannot be computed, with a warning) and with `kl_estimator="full"`, else `"k3"`. With
            `"full"`, a penalty in PPO's rewards charges a token the exact KL for those after it, which is less noisy.
        kl_ignore_tokens (`list`, *optional*):
            Tokens whose KL is neither measured nor penalised: ids, single tokens as strings, or `"eos"` for every
            token that ends a completion.
        kl_update_target (`float`, *optional*):
            With several optimizer steps per rollout: skip the rest of them once the policy has moved this far, in
            nats, from where it was when the rollout was sampled.
        kl_controller (`str`, *optional*):
            Name of the controller in the registry. If unset, `"hold"` with `kl_target` (`"adaptive"` if `kl_horizon`
            was changed too), else `"fixed"`.
        kl_lr_guard (`bool`, *optional*, defaults to `False`):
            Scale the learning rate down while the steps of one rollout move the KL by more than the target allows,
            which no coefficient can prevent.
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

    # The algorithm whose placements `kl_placement` chooses from.
    _algorithm: ClassVar[str]
    # The coefficient of a run that sets neither `kl_penalty_coef` nor `kl_target`.
    _default_coef: ClassVar[float] = 0.0
    # Whether an advantage is what sets a completion apart from the others of its prompt.
    _compares_completions: ClassVar[bool] = True
    # Whether something has built its controller from this config. Not annotated, so that it is no field.
    _has_taker = False

    kl_target: float | None = _kl_field(None, "The KL to hold, in nats. It switches KL control on by itself.")
    kl_penalty_coef: float | None = _kl_field(
        None,
        "Strength of the KL penalty: constant without `kl_target`, the controller's starting value with it. If unset, "
        "the default controller finds its own start, and without `kl_target` there is no penalty.",
    )
    kl_penalty_reference_step: int | None = _kl_field(
        None,
        "Reference: the policy as saved at this step. 0 is the initial policy, N is `checkpoint-N` in `output_dir`. "
        "If unset, the base model with the adapter disabled, or the initial weights in full fine-tuning.",
    )
    kl_ref_adapter_path: str | None = _kl_field(
        None, "Reference: the LoRA adapter in this directory, on the base model shared with the policy."
    )
    kl_ref_model_path: str | None = _kl_field(
        None, "Reference: the model in this directory (or Hub repository). It must have the policy's vocabulary."
    )
    kl_ref_dtype: str | None = _kl_field(
        None, "With `kl_ref_model_path`: dtype of the reference. If unset, the policy's.", KL_REF_DTYPES
    )
    kl_ref_quantization: str | None = _kl_field(
        None,
        "With `kl_ref_model_path`: load the reference in 4 or 8 bits, by bitsandbytes. If unset, its weights stay "
        "whole.",
        KL_REF_QUANTIZATIONS,
    )
    kl_ref_lag: int | None = _kl_field(None, "Moving reference: the policy as it was this many optimizer steps ago.")
    kl_ref_sync_steps: int | None = _kl_field(
        None, "Moving reference: a copy of the policy, refreshed every this many optimizer steps."
    )
    kl_ref_mixup_alpha: float | None = _kl_field(
        None,
        "With `kl_ref_sync_steps`: weight of the policy in each refresh, `ref = (1 - alpha) * ref + alpha * policy`. "
        "If unset, each refresh is a plain copy.",
    )
    kl_ref_reset_patience: int | None = _kl_field(
        None,
        "Make the policy the reference whenever, over this many generation batches, the reward has not risen and the "
        "KL was at its target. The controller then begins again.",
    )
    kl_ref_reset_optimizer: bool = _kl_field(
        False, "With `kl_ref_reset_patience`: clear the optimizer's state at each reset."
    )
    kl_placement: str = _kl_field(
        "advantage",
        "Where the penalty acts: 'advantage' (zero-mean adjustment of per-token advantages), 'reward' (the KL is "
        "subtracted from the reward: a sequence's, or in PPO each token's), 'loss' (a KL term in the loss), or one of "
        "your own.",
    )
    kl_estimator: str | None = _kl_field(
        None,
        "Per-token estimator that is penalised: 'k1' or 'importance', and with `kl_placement='loss'` 'k3', 'k2' or "
        "'full', or one of your own. If unset, the first that the placement can penalise.",
    )
    kl_centering: str | None = _kl_field(
        None,
        "With `kl_placement='advantage'`: set of tokens over which the adjustment has zero mean: 'batch' (the whole "
        "generation batch on all processes), 'microbatch', 'group', 'sequence' or 'none'. If unset, 'batch'.",
        KL_CENTERINGS,
    )
    kl_discount: float = _kl_field(
        0.0,
        "With `kl_placement='advantage'`: 0.0 lets each token pay for its own KL, a value in (0, 1] for the "
        "discounted KL from this token on.",
    )
    kl_statistic: str | None = _kl_field(
        None,
        "Estimator of the KL that is logged and that drives the controller: 'k3', or 'full', which is exact for each "
        "visited state and so less noisy. If unset, 'full' with the controller 'hold' ('k3' for models whose exact KL "
        "cannot be computed, with a warning) and with `kl_estimator='full'`, else 'k3'. With 'full', a penalty in "
        "PPO's rewards charges a token the exact KL for those after it, which is less noisy.",
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
        "Name of the controller in the registry: 'hold', 'fixed', 'adaptive', 'exponential', 'pid' or one of your "
        "own. If unset, 'hold' with `kl_target` ('adaptive' if `kl_horizon` was changed too), else 'fixed'.",
    )
    kl_lr_guard: bool = _kl_field(
        False,
        "Scale the learning rate down while the steps of one rollout move the KL by more than the target allows.",
    )
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

    @property
    def kl_penalty_enabled(self) -> bool:
        """Whether the KL is penalised."""
        return self.kl_init_coef is None or self.kl_init_coef > 0.0

    @property
    def kl_init_coef(self) -> float | None:
        """The first coefficient, with the default resolved; `None` if the controller finds its own."""
        if self.kl_penalty_coef is not None:
            return float(self.kl_penalty_coef)
        if self.kl_target is not None and not self.kl_monitor:
            if not get_kl_controller_class_or_raise(self._rule_for_target).needs_start:
                return None
        return self._default_coef

    @property
    def kl_enabled(self) -> bool:
        """Whether the KL is measured at all."""
        return self.kl_penalty_enabled or self.kl_monitor

    @property
    def kl_statistic_name(self) -> str:
        """The statistic, with the default resolved. `kl_control.statistic` of a trainer knows its model too."""
        if self.kl_statistic is not None:
            return self.kl_statistic
        # What answers every batch gains most from a KL with little noise. The other rules average over many.
        answers_every_batch = self.kl_penalty_enabled and self.kl_controller_name == "hold"
        return "full" if answers_every_batch or self.kl_estimator == "full" else "k3"

    @property
    def kl_controller_name(self) -> str:
        """Name of the controller, with the default resolved."""
        if not self.kl_penalty_enabled:
            return "fixed"  # nothing is steered
        if self.kl_controller is not None:
            return self.kl_controller
        return "fixed" if self.kl_target is None else self._rule_for_target

    @property
    def _rule_for_target(self) -> str:
        # A horizon is the setting of Ziegler's rule alone: whoever sets one means that rule.
        return self.kl_controller or ("hold" if self.kl_horizon == KLFields.kl_horizon else "adaptive")

    @property
    def placement_class(self) -> type[Placement]:
        """The class behind `kl_placement`."""
        return get_placement(self._algorithm, self.kl_placement)

    def build_kl_controller(self) -> KLController:
        """
        Build the controller these fields describe. A trainer with KL control does so when it is built, by which the
        config knows that its KL fields are read.
        """
        self._has_taker = True
        return self._new_kl_controller()

    def _new_kl_controller(self) -> KLController:
        kwargs = (self.kl_controller_kwargs if self.kl_penalty_enabled else None) or {}
        assert not isinstance(kwargs, str)  # JSON is parsed when the config is built
        return get_kl_controller(
            self.kl_controller_name,
            init_coef=self.kl_init_coef,
            target=self.kl_target,
            horizon=self.kl_horizon,
            min_coef=self.kl_coef_min,
            max_coef=self.kl_coef_max,
            **kwargs,
        )

    def _own_defaults(self) -> dict[str, Any]:
        """The defaults of this package's config, by which a field that a subclass sets is switched off again."""
        ours = next(base for base in type(self).__mro__ if base.__module__.startswith("trl_klx."))
        return {known.name: known.default for known in fields(ours)}

    def _placement_defaults(self) -> dict[str, str]:
        placement = self.placement_class
        return {
            "kl_estimator": placement.estimators[0],
            "kl_centering": "batch" if placement.centers else "none",
        }
