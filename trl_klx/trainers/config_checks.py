"""Which combinations of KL fields are refused, and with what advice."""

import json
import os
import warnings
from dataclasses import MISSING
from typing import TYPE_CHECKING, Any

from ..control.placements import list_placements
from ..controllers.base import KLController
from ..controllers.setting_rules import check_settings
from ..references.kinds import REFERENCE_FIELDS, chosen_reference_fields, resettable_reference_fields
from .field_rules import FIELDS_OF_SETTINGS, KL_RULES, doubt_target, one_of
from .kl_fields import KLFields, get_kl_controller_class_or_raise
from .launch_check import find_overwritten


if TYPE_CHECKING:
    # The fields are only ever combined with a TRL config, so the checks may use its attributes.
    from .trl_hosts import TRLConfig as _Host
else:
    _Host = object


# The fields that still mean something when the KL is only measured.
MONITOR_FIELDS = {
    *REFERENCE_FIELDS,
    "kl_ignore_tokens",
    "kl_ref_dtype",
    "kl_ref_quantization",
    "kl_ref_mixup_alpha",
    "kl_statistic",
    "kl_target",
    "kl_target_unit",
    "kl_warn_window",
}


class KLConfigChecks(KLFields, _Host):
    """The checks of the KL fields, by themselves and together with TRL's."""

    def _validate_kl_values(self) -> None:
        for name in ("kl_ref_adapter_path", "kl_ref_model_path"):
            if isinstance(getattr(self, name), os.PathLike):
                setattr(self, name, os.fspath(getattr(self, name)))
        if isinstance(self.kl_ignore_tokens, list):
            # A command line gives ids as strings.
            tokens: list[Any] = self.kl_ignore_tokens
            tokens = [int(token) if isinstance(token, str) and token.isdecimal() else token for token in tokens]
            self.kl_ignore_tokens = tokens
        if isinstance(self.kl_controller_kwargs, str):
            try:
                self.kl_controller_kwargs = json.loads(self.kl_controller_kwargs)
            except ValueError:
                pass  # a string is refused below
        defaults = self._own_defaults()
        for name, rule in KL_RULES.items():
            value = getattr(self, name)
            if value is not None or defaults[name] is not None:
                rule.check(name, value)
        one_of(list_placements(self._algorithm)).check("kl_placement", self.kl_placement)

    def _validate_kl_combinations(self) -> None:
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
        if self.kl_ref_dtype is not None and self.kl_ref_model_path is None:
            raise ValueError(
                f"`kl_ref_dtype={self.kl_ref_dtype!r}` has no effect without `kl_ref_model_path`: every other "
                "reference has the dtype of the policy, and a `ref_model` the one that you loaded it in. Set "
                "`kl_ref_model_path`, or unset `kl_ref_dtype`."
            )
        if self.kl_ref_quantization is not None and self.kl_ref_model_path is None:
            raise ValueError(
                f"`kl_ref_quantization={self.kl_ref_quantization!r}` has no effect without `kl_ref_model_path`. Set "
                "that, or unset `kl_ref_quantization`. A `ref_model` may be quantized when you load it."
            )
        self._validate_resets(chosen)
        if self.kl_penalty_enabled and getattr(self, "beta", 0.0) != 0.0:
            raise ValueError(
                f"`beta={self.beta!r}` together with {self._switched_on_by} would penalise the KL twice. "
                " Set `beta=0.0`; for TRL's own KL term with a controller, use `kl_placement='loss'`."
            )
        if self.kl_penalty_enabled and getattr(self, "sync_ref_model", False):
            raise ValueError(
                f"`sync_ref_model=True` moves TRL's reference, which {self._switched_on_by} does not use. Set "
                "`sync_ref_model=False` and `kl_ref_sync_steps` (with `kl_ref_mixup_alpha`) instead."
            )
        if self.kl_penalty_reference_step and (
            self.load_best_model_at_end or (self.metric_for_best_model is not None and self.save_total_limit == 1)
        ):
            raise ValueError(
                f"`kl_penalty_reference_step={self.kl_penalty_reference_step!r}` cannot be used with "
                "`load_best_model_at_end=True`, or with `metric_for_best_model` and `save_total_limit=1`: in the end "
                "the checkpoint of the earlier run, which is the reference, might be taken for the best one, or "
                "deleted. Unset them, or set `save_total_limit=2`."
            )
        self._validate_kl_placement()
        self._validate_update_target()
        if self.kl_enabled:
            self._warn_of_truncated_sampling()
            self._warn_of_the_other_unit()
            self._warn_of_overwriting()
        self._validate_kl_controller()

    def _validate_resets(self, chosen: dict[str, Any]) -> None:
        if self.kl_ref_reset_patience is None:
            if self.kl_ref_reset_optimizer:
                raise ValueError(
                    "`kl_ref_reset_optimizer=True` has no effect without `kl_ref_reset_patience`. Set that to the "
                    "number of batches to judge by, or unset `kl_ref_reset_optimizer`. A call of "
                    "`reset_kl_reference` has its own argument for it."
                )
            return
        resettable = resettable_reference_fields()
        for name, value in chosen.items():
            if name not in resettable:
                known = " or ".join(f"`{field}`" for field in resettable if field in vars(self))
                raise ValueError(
                    f"`kl_ref_reset_patience={self.kl_ref_reset_patience!r}` cannot be used with `{name}={value!r}`: "
                    "only a reference that is an earlier state of the policy and stays can be replaced by a later "
                    f"one. Unset `{name}`, set {known} instead, or unset `kl_ref_reset_patience`."
                )

    def _validate_kl_placement(self) -> None:
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
        assert self.kl_estimator is not None  # the placement's default was filled in
        if self.kl_estimator not in placement.estimators and self.kl_penalty_enabled:
            known = ", ".join(repr(name) for name in placement.estimators)
            raise ValueError(
                f"`kl_estimator={self.kl_estimator!r}` cannot be used with `kl_placement={self.kl_placement!r}`: "
                f"{placement.why_not(self.kl_estimator)}. Use one of {known}, or another `kl_placement`; to measure "
                "the exact KL, set `kl_statistic='full'`."
            )
        if self.kl_penalty_enabled:
            placement.check(self)

    def _validate_update_target(self) -> None:
        if self.kl_update_target is None:
            return
        assert self.steps_per_generation is not None  # TRL has filled it in
        steps = self.steps_per_generation * self.num_iterations / self.gradient_accumulation_steps
        if steps <= 1:
            raise ValueError(
                f"`kl_update_target={self.kl_update_target!r}` has no effect with one optimizer step per rollout: "
                "there is no further step to skip. Set `num_iterations` (`num_ppo_epochs` in PPO) above 1, or unset "
                "it."
            )
        if self.kl_penalty_enabled and self.kl_centering == "microbatch":
            raise ValueError(
                f"`kl_update_target={self.kl_update_target!r}` cannot be used with `kl_centering='microbatch'`, whose "
                "KL is counted as each micro-batch is trained on: that of the skipped ones would be lost. Set "
                "`kl_centering='batch'`."
            )
        if self.fp16 or self.deepspeed:
            raise ValueError(
                f"`kl_update_target={self.kl_update_target!r}` cannot be used with "
                f"{'`fp16`' if self.fp16 else 'DeepSpeed'}, whose optimizer cannot skip a step. Unset it, or use "
                f"{'`bf16`' if self.fp16 else 'FSDP2'}."
            )

    def _warn_of_truncated_sampling(self) -> None:
        # By now transformers has parsed JSON. Any other string is for TRL to refuse.
        further = self.generation_kwargs if isinstance(self.generation_kwargs, dict) else {}
        sampling = {"top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p} | further
        cut = {name: sampling[name] for name in ("top_k", "top_p", "min_p")}
        unset = {"top_k": (0, None), "top_p": (1.0, None), "min_p": (0.0, None)}
        given = [f"`{name}={value!r}`" for name, value in cut.items() if value not in unset[name]]
        if given:
            remedy = " `kl_statistic='full'` measures the whole distributions on the states that are visited."
            remedy = "" if self.kl_statistic_name == "full" else remedy
            warnings.warn(
                f"{' and '.join(given)} cut unlikely tokens from what is sampled, but not from the distributions "
                "whose KL is measured: on such samples the sampled KL is too low, may be negative with 'k1', and "
                f"tokens that are never sampled are not held.{remedy}",
                stacklevel=5,
            )

    def _warn_of_the_other_unit(self) -> None:
        doubt = None if self.kl_target is None else doubt_target(self.kl_target, self.kl_target_unit)
        if doubt is not None:
            other = "sequence" if self.kl_target_unit == "token" else "token"
            warnings.warn(
                f"`kl_target={self.kl_target!r}` {doubt} Set `kl_target_unit={other!r}`, or another `kl_target`.",
                stacklevel=5,
            )

    def _warn_of_overwriting(self) -> None:
        """Warn if a run that takes its reference from an earlier run will overwrite the rest of that run."""
        step = self.kl_penalty_reference_step
        if not step or self.save_strategy == "no" or self.output_dir is None:
            return
        every = int(self.save_steps) if self.save_strategy == "steps" and self.save_steps >= 1 else None
        deletes = self.save_total_limit is not None
        lost = find_overwritten(self.output_dir, step, every, self.max_steps, deletes)
        if lost:
            names = ", ".join(f"checkpoint-{number}" for number in lost)
            warnings.warn(
                f"`kl_penalty_reference_step={step!r}` trains in {self.output_dir!r}, the folder of the earlier run, "
                f"and {'overwrites or deletes' if deletes else 'overwrites'} what it left there: {names}. Only "
                f"checkpoint-{step}, the reference, is spared. To keep them, set another `output_dir`, and for a LoRA "
                f"reference `kl_ref_adapter_path={os.path.join(self.output_dir, f'checkpoint-{step}')!r}`.",
                stacklevel=5,
            )

    def get_warmup_steps(self, num_training_steps: int) -> int:
        # Every trainer of transformers asks for this when it begins to train, and so gives itself away.
        if self.kl_enabled and not self._has_taker:
            switched_on = self._switched_on_by if self.kl_penalty_enabled else "`kl_monitor=True`"
            raise TypeError(
                f"The trainer does not read the KL fields of `{type(self).__name__}`, so {switched_on} would have no "
                f"effect. Use `KLX{self._algorithm.upper()}Trainer` of `trl_klx` instead of TRL's trainer, or add "
                "`KLXTrainerMixin` or `KLXRLOOMixin` to your own."
            )
        return int(super().get_warmup_steps(num_training_steps))

    def _is_default(self, name: str) -> bool:
        """Whether a field has the default of its class, or the one by which a subclass's is switched off."""
        field = type(self).__dataclass_fields__[name]
        default = field.default if field.default_factory is MISSING else field.default_factory()
        return getattr(self, name) in (default, self._own_defaults()[name])

    def _refuse_inert_fields(self) -> None:
        """Refuse every field that was set but that nothing would read."""
        if self.kl_penalty_enabled:
            return
        filled_in = self._placement_defaults()  # these were not set
        readable = {"kl_monitor", "kl_penalty_coef", "kl_update_target"}
        if self.kl_monitor:
            readable |= MONITOR_FIELDS
            # The estimator is read where it decides the statistic.
            if self.kl_estimator == self.kl_statistic_name == "full":
                readable.add("kl_estimator")
        inert = [
            name
            for name in (*KL_RULES, "kl_placement", "kl_controller")
            if name not in readable and not self._is_default(name) and getattr(self, name) != filled_in.get(name)
        ]
        if not inert:
            return
        given = ", ".join(f"`{name}={getattr(self, name)!r}`" for name in inert)
        if self.kl_controller is not None and get_kl_controller_class_or_raise(self.kl_controller).needs_target:
            raise ValueError(
                f"`kl_controller={self.kl_controller!r}` cannot start from a coefficient of {self.kl_init_coef!r}: a "
                "multiplicative rule cannot leave 0. Set `kl_penalty_coef` to a positive value such as 0.05, or set "
                "`kl_target` alone: its default controller finds its own start."
            )
        if self.kl_penalty_coef is None:
            remedy = "Set `kl_target` to the KL to hold, or `kl_penalty_coef` to a positive value such as 0.05"
        else:
            remedy = "Set `kl_penalty_coef` to a positive value such as 0.05"
            remedy += ", or leave it unset" if "kl_target" in inert else ", or leave it unset and set `kl_target`"
        if not self.kl_monitor and MONITOR_FIELDS.issuperset(inert):
            remedy += ", or set `kl_monitor=True` to only measure the KL"
        raise ValueError(f"{given} has no effect without a KL penalty. {remedy}.")

    @property
    def _switched_on_by(self) -> str:
        """The field that switched the penalty on, for messages."""
        name = "kl_target" if self.kl_penalty_coef is None and self.kl_target is not None else "kl_penalty_coef"
        value = self.kl_target if name == "kl_target" else self.kl_init_coef
        return f"`{name}={value!r}`"

    def _validate_kl_controller(self) -> None:
        name = self.kl_controller_name
        controller_class = get_kl_controller_class_or_raise(name)
        settings = {setting: getattr(self, field) for setting, field in FIELDS_OF_SETTINGS.items()}
        settings["init_coef"] = self.kl_init_coef
        check_settings(controller_class, f"`kl_controller={name!r}`", settings, FIELDS_OF_SETTINGS)
        for setting, field_name in FIELDS_OF_SETTINGS.items():
            if setting in ("init_coef", "target"):
                continue  # every controller reads the first, and the diagnostics read the second
            if not self._is_default(field_name) and setting not in controller_class.uses:
                given = f"`{field_name}={getattr(self, field_name)!r}`"
                raise ValueError(
                    f"{given} has no effect with `kl_controller={name!r}`. Unset it, or choose a controller that uses "
                    "it."
                )
        if self.kl_lr_guard:
            self._validate_lr_guard(controller_class)
        if self.kl_target is None and self.kl_warn_window != 0 and not self._is_default("kl_warn_window"):
            raise ValueError(
                f"`kl_warn_window={self.kl_warn_window!r}` has no effect without `kl_target`: there is nothing to "
                "drift from. Set `kl_target`, or unset `kl_warn_window`."
            )
        try:
            self._new_kl_controller()
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"`kl_controller={name!r}` with `kl_controller_kwargs={self.kl_controller_kwargs!r}` cannot be built: "
                f"{error}"
            ) from error

    def _validate_lr_guard(self, controller_class: type[KLController]) -> None:
        if controller_class.lr_factor is KLController.lr_factor:
            raise ValueError(
                f"`kl_lr_guard=True` has no effect with `kl_controller={self.kl_controller_name!r}`, which does not "
                "know how far a step moves the KL. Set `kl_controller='hold'` and `kl_target`, or unset `kl_lr_guard`."
            )
        if self.deepspeed:
            raise ValueError(
                "`kl_lr_guard=True` cannot be used with DeepSpeed, which makes its optimizer step before the learning "
                "rate can be scaled. Lower `learning_rate` instead, or use FSDP2."
            )
