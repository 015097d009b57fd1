"""Build the KL control of a trainer from its config."""

from typing import TYPE_CHECKING, Any

from accelerate import Accelerator
from accelerate.logging import get_logger
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..control.kl_control import KLControl
from ..controllers.advice import KLAdviser
from ..controllers.drift import DriftMonitor
from ..controllers.stall import StallMonitor
from ..references.base import KLReference
from ..references.building import resolve_reference
from .tracker_alerts import TrackerAlerts


if TYPE_CHECKING:
    from .config import KLXGRPOConfig, KLXRLOOConfig


LOGGER = get_logger(KLControl.__module__)  # speaks on the main process alone


class CountSteps(TrainerCallback):
    """
    Counts the optimizer steps and their learning rates for the controller, lets it scale them where it guards them,
    and sums up the run when it ends.
    """

    def __init__(self, control: KLControl):
        self.kl_control = control
        self._scheduled: list[float] = []

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # The trackers stand before us in the list of callbacks, so their runs have begun.
        if isinstance(self.kl_control.alert, TrackerAlerts):
            self.kl_control.alert.flush()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        groups = kwargs["optimizer"].param_groups
        rate = float(groups[0]["lr"])
        factor = self.kl_control.controller.lr_factor(rate) if self.kl_control.guards_lr else 1.0
        self.kl_control.clock.tick(rate * factor, factor)
        if self.kl_control.guards_lr:
            self._scheduled = [group["lr"] for group in groups]
            for group in groups:
                group["lr"] = group["lr"] * factor

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # The scheduler and the log know nothing of the guard.
        for group, rate in zip(kwargs["optimizer"].param_groups, self._scheduled, strict=False):
            group["lr"] = rate

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.kl_control.sum_up()


class FollowPolicy(TrainerCallback):
    """Tells a moving reference that an optimizer step was made."""

    def __init__(self, reference: KLReference):
        self.reference = reference

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.reference.follow(state.global_step)


def build_kl_control(
    args: "KLXGRPOConfig | KLXRLOOConfig",
    policy: nn.Module,
    accelerator: Accelerator,
    ref_model: nn.Module | None,
    temperature: float,
    ignored: tuple[int, ...],
    tokenizer: Any = None,
) -> KLControl:
    """
    Build controller, reference, statistic and drift diagnostics.

    Args:
        args ([`KLXConfigMixin`]):
            Config.
        policy (`torch.nn.Module`):
            Policy, unwrapped.
        accelerator ([`~accelerate.Accelerator`]):
            Accelerator of the trainer.
        ref_model (`torch.nn.Module`, *optional*):
            Reference that the user passed to the trainer.
        temperature (`float`):
            Sampling temperature.
        ignored (`tuple[int, ...]`):
            Tokens whose KL is neither measured nor penalised.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`], *optional*):
            Tokenizer of the policy.
    """
    assert args.kl_estimator is not None  # the config has filled it in
    if args.kl_controller is None and args.kl_controller_name == "hold" and args.kl_penalty_coef is not None:
        LOGGER.warning_once(
            f"`kl_controller` is unset: 'hold' holds `kl_target={args.kl_target}`. In trl-klx 0.1 it was 'adaptive'; "
            "set `kl_controller='adaptive'` for that rule, or leave `kl_penalty_coef` unset too: 'hold' finds its own "
            "start."
        )
    drift = adviser = None
    if args.kl_target is not None and args.kl_warn_window > 0:
        drift = DriftMonitor(args.kl_target, args.kl_warn_window, args.kl_target_unit, args.kl_controller_name)
        if args.kl_penalty_enabled:
            adviser = KLAdviser(args.kl_target, args.kl_controller_name, args.kl_coef_max, args.kl_lr_guard)
    patience = args.kl_ref_reset_patience
    return KLControl(
        args.build_kl_controller(),
        resolve_reference(args, policy, accelerator, ref_model, temperature, tokenizer),
        estimator=args.kl_estimator,
        statistic=args.kl_statistic_name,
        # The exact KL that is penalised is there to be measured too.
        statistic_is_default=args.kl_statistic is None and args.kl_estimator != "full",
        unit=args.kl_target_unit,
        target=args.kl_target,
        drift=drift,
        adviser=adviser,
        penalises=args.kl_penalty_enabled,
        guards_lr=args.kl_lr_guard,
        name=args.kl_controller_name,
        ignored=ignored,
        stall=None if patience is None else StallMonitor(patience, args.kl_target),
        logger=LOGGER,
        alert=TrackerAlerts(args),
    )
