"""KL control as a mixin over TRL's trainers: measure, adjust, update, log."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from accelerate.logging import get_logger
from accelerate.utils import gather
from torch import nn
from transformers import TrainerCallback
from trl.models.utils import disable_gradient_checkpointing

from ..checkpoints.integrity import check_checkpoints
from ..checkpoints.mixin import KLXCheckpointMixin
from ..control.logps import (
    CAN_SKIP_LM_HEAD,
    Scored,
    captured_hidden,
    check_lm_head,
    lm_head,
    measure_kl,
    narrow_tiles,
    no_lm_head,
)
from ..controllers.drift import DriftMonitor
from ..maths.advantages import discount_kl, group_means, kl_adjustment, sequence_means
from ..maths.estimators import kl_totals, wide_dtype
from ..references.resolution import AdapterReference, KLReference, resolve_reference
from .completions_table import CompletionKLs
from .config import KLXConfigMixin
from .launch_check import check_launch
from .model_card import add_kl_section, describe_kl


logger = get_logger(__name__)

# Keys of TRL's batch that a second forward pass over it must be given, where they are there.
FORWARD_KEYS = (
    "pixel_values",
    "image_grid_thw",
    "num_images",
    "pixel_attention_mask",
    "spatial_shapes",
    "num_tiles",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)


@dataclass
class Rollout:
    """
    One generation batch, from its generation to the update of the controller.

    Attributes:
        coef (`float`):
            Coefficient applied to the whole batch: the one before this batch's update.
        pending (`int`):
            Micro-batches whose KL is still to be measured.
        totals (`torch.Tensor` of shape `(6,)`, *optional*):
            Sums over what was measured so far on this process: KL, tokens, completions with tokens, k1, absolute
            adjustment, completions.
        policy ([`Scored`], *optional*):
            The policy's forward over the batch, where TRL made one at generation.
        reference ([`Scored`], *optional*):
            The reference's forward over the batch.
    """

    coef: float
    pending: int = 0
    totals: torch.Tensor | None = None
    policy: Scored | None = None
    reference: Scored | None = None


class _FollowPolicy(TrainerCallback):
    def __init__(self, reference: KLReference):
        self.reference = reference

    def on_step_end(self, args, state, control, **kwargs):
        self.reference.follow(state.global_step)


class KLXTrainerMixin(KLXCheckpointMixin):
    """
    Adds KL control to a TRL trainer whose batches come from `_generate_and_score_completions`.

    The reference is scored once per generation batch. The policy's log-probs are those that TRL computes anyway: at
    generation where TRL needs them there, else in the loss, before TRL reads the advantages. Only an adjustment that is
    centered over several micro-batches costs one more forward of the policy.

    Attributes:
        kl_controller ([`KLController`] or `None`):
            Maps the measured KL to the next coefficient; `None` while KL control is off.
        kl_reference ([`KLReference`] or `None`):
            The frozen policy the KL is measured against; `None` while KL control is off.
    """

    # Placements for which TRL itself asks for the reference's log-probs while it generates.
    _klx_host_placements: tuple[str, ...]
    _config_class: type[KLXConfigMixin]
    # Class-level, because TRL's generation must also run on trainers that were never initialised.
    _klx_tap: Callable[[Scored], None] | None = None

    def __init__(self, model, reward_funcs=None, args=None, *positional, **kwargs):
        if not isinstance(args, self._config_class):
            raise TypeError(
                f"`args` of {type(self).__name__} must be a `{self._config_class.__name__}`, which has the KL fields, "
                f"got `{type(args).__name__}`."
            )
        super().__init__(model, reward_funcs, args, *positional, **kwargs)
        check_launch(self.accelerator)
        self._klx_prepare_policy(self.accelerator.unwrap_model(self.model))
        if not self.args.kl_enabled:
            return
        check_checkpoints(self.args)
        self.kl_controller = self.args.build_kl_controller()
        self.kl_reference = self._klx_build_reference(self.accelerator.unwrap_model(self.model))
        self._klx_rollouts: dict[str, Rollout] = {}
        self._klx_lm_head_checked = False
        self._klx_completions = CompletionKLs(self._logs["extra"], self.accelerator)
        if self.args.kl_needs_full:
            lm_head(self.accelerator.unwrap_model(self.model), self.temperature)  # refuses a head it cannot do
        if self.args.kl_target is not None and self.args.kl_warn_window > 0:
            self._klx_drift = DriftMonitor(
                target=self.args.kl_target, window=self.args.kl_warn_window, unit=self.args.kl_target_unit
            )
        if self.kl_reference.mover is not None:
            self.add_callback(_FollowPolicy(self.kl_reference))
        if self.use_vllm and isinstance(self.kl_reference, AdapterReference):
            self.kl_reference.keep_from_vllm(self.vllm_generation)

    def _klx_prepare_policy(self, policy: nn.Module) -> None:
        """What is to be done to the policy before a reference is made of it."""

    def _klx_build_reference(self, policy: nn.Module) -> KLReference:
        return resolve_reference(self.args, policy, self.accelerator)

    @property
    def _klx_mode(self) -> str:
        return "train" if self.model.training else "eval"

    @property
    def _klx_penalises(self) -> str | None:
        """The placement of the penalty; `None` while the KL is only measured."""
        return self.args.kl_placement if self.args.kl_penalty_enabled else None

    # ---- Forward passes ----

    @contextmanager
    def _klx_tapped(self, tap: Callable[[Scored], None]) -> Iterator[None]:
        """Let `tap` see the policy's forward passes that TRL makes meanwhile."""
        self._klx_tap = tap
        try:
            yield
        finally:
            self._klx_tap = None

    @contextmanager
    def _klx_host_term(self, coef: float) -> Iterator[None]:
        """Switch on TRL's own KL term, with our coefficient and our reference."""
        beta, ref_model = self.beta, self.ref_model
        self.beta, self.ref_model = coef, self.kl_reference
        try:
            yield
        finally:
            self.beta, self.ref_model = beta, ref_model

    def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
        if self.kl_reference is not None and model is self.kl_reference:
            return self._klx_answer_host(args, kwargs), None, None
        # Put down while it runs, so that the tap may make passes of its own.
        tap, self._klx_tap = self._klx_tap, None
        try:
            output, scored = self._klx_forward(model, args, kwargs)
            if tap is not None:
                tap(scored)
        finally:
            self._klx_tap = tap
        return output

    def _klx_forward(self, model, args: tuple, kwargs: dict, check: bool = True) -> tuple[tuple, Scored]:
        """
        TRL's log-prob method, with the hidden states where the estimator needs them. The first of those are checked to be
        what the log-probs come from.
        """
        if self.kl_reference is None or not self.args.kl_needs_full:
            output = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
            return output, Scored(output[0])
        input_ids, logits_to_keep = args[0], args[2]
        with captured_hidden(self.accelerator.unwrap_model(model), logits_to_keep) as hidden:
            output = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        scored = Scored(output[0], torch.cat(hidden))
        if check and not self._klx_lm_head_checked:
            mask = args[1][:, -logits_to_keep:]
            with torch.no_grad():
                model = self.accelerator.unwrap_model(model)
                tokens = input_ids[:, -logits_to_keep:]
                self._klx_lm_head_checked = check_lm_head(model, self.temperature, scored.detach(), tokens, mask)
        return output, scored

    @torch.no_grad()
    def _klx_score_policy(self, args: tuple, kwargs: dict) -> Scored:
        """One more forward of the policy."""
        plain_forward = disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs)
        with plain_forward, narrow_tiles(self.accelerator.device):
            return self._klx_forward(self.model, args, kwargs)[1].detach()

    @torch.no_grad()
    def _klx_score_reference(self, args: tuple, kwargs: dict, logps: bool = True) -> Scored:
        """The reference's forward. Without `logps` it ends before the LM head, where the exact KL goes through it anyway."""
        skip = not logps and self.args.kl_needs_full and CAN_SKIP_LM_HEAD
        head = no_lm_head() if skip else narrow_tiles(self.accelerator.device)
        with self.kl_reference.active() as model, head:
            scored = self._klx_forward(model, args, kwargs, check=not skip)[1].detach()
        return Scored(None, scored.hidden) if skip else scored

    def _klx_forward_arguments(self, batch: dict) -> tuple[tuple, dict]:
        """Arguments of TRL's log-prob method for a whole generation batch, in chunks of TRL's own size."""
        input_ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        attention_mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        train = self._klx_mode == "train"
        kwargs = {key: batch[key] for key in FORWARD_KEYS if key in batch}
        kwargs["batch_size"] = self.args.per_device_train_batch_size if train else self.args.per_device_eval_batch_size
        return (input_ids, attention_mask, batch["completion_ids"].size(1)), kwargs

    def _klx_answer_host(self, args: tuple, kwargs: dict) -> torch.Tensor:
        """The log-probs that TRL's own KL term gets for the reference."""
        raise NotImplementedError

    # ---- One generation batch ----

    @staticmethod
    def _klx_mask(batch: dict) -> torch.Tensor:
        """Completion tokens that the policy itself produced. As bool, which all that is done with it asks for."""
        mask = batch["completion_mask"].bool()
        return mask & batch["tool_mask"].bool() if "tool_mask" in batch else mask

    @staticmethod
    def _klx_tokens(batch: dict) -> torch.Tensor:
        """Completion tokens, with 0 for padding, whose id need not be one of the vocabulary's."""
        return batch["completion_ids"].masked_fill(batch["completion_mask"] == 0, 0)

    def _generate_and_score_completions(self, inputs):
        if self.kl_reference is None:
            return super()._generate_and_score_completions(inputs)
        rollout = self._klx_rollouts[self._klx_mode] = Rollout(self.kl_controller.value)

        def remember(scored: Scored) -> None:
            # TRL scores the policy, where it does, before a reference of its own.
            if rollout.policy is None:
                rollout.policy = scored.detach()

        host_asks = self._klx_penalises in self._klx_host_placements
        with self._klx_tapped(remember), self._klx_host_term(rollout.coef) if host_asks else nullcontext():
            batch = super()._generate_and_score_completions(inputs)
        if self.beta != 0.0 and "old_per_token_logps" not in batch and "old_logps" not in batch:
            rollout.policy = None  # the pass seen was that of TRL's own reference
        self._klx_completions.add(batch)
        self._klx_score_batch(batch, rollout)
        # What the loss needs is in the batch now.
        rollout.policy = rollout.reference = None
        return batch

    def _klx_score_batch(self, batch: dict, rollout: Rollout) -> None:
        """Measure the KL of a generation batch, or leave with it what the loss needs to do so."""
        arguments = self._klx_forward_arguments(batch)
        if rollout.reference is None:
            rollout.reference = self._klx_score_reference(*arguments, logps=self._klx_penalises == "loss")
        policy, reference = rollout.policy, rollout.reference
        micro_batches = self.args.steps_per_generation if self._klx_mode == "train" else 1
        centering = self.args.kl_centering if self._klx_penalises == "advantage" else "none"
        if policy is None and micro_batches > 1 and centering in ("batch", "group"):
            policy = self._klx_score_policy(*arguments)
        if centering == "group":
            batch["klx_group"] = self._klx_group_ids(batch)
        if policy is not None:
            measured = self._klx_per_token_kl(policy, reference, self._klx_tokens(batch))
            if centering != "microbatch":
                self._klx_measure(batch, rollout, measured)
                self._klx_finish(rollout)
                return
            # Its mean is that of a micro-batch, which is not known before the loss.
            batch["klx_measured"] = torch.stack(measured, dim=-1)  # (B, T, 3)
        else:
            batch |= {
                f"klx_reference_{name}": tensor for name, tensor in vars(reference).items() if tensor is not None
            }
        rollout.pending = micro_batches

    def _klx_measure_in_loss(self, batch: dict, policy: Scored) -> None:
        """Measure a micro-batch that generation left unmeasured. `policy` is its forward in the loss."""
        if "klx_measured" in batch:
            measured = batch["klx_measured"].unbind(-1)
        elif "klx_reference_logps" in batch or "klx_reference_hidden" in batch:
            reference = Scored(batch.get("klx_reference_logps"), batch.get("klx_reference_hidden"))
            measured = self._klx_per_token_kl(policy.detach(), reference, self._klx_tokens(batch))
        else:
            return
        rollout = self._klx_rollouts[self._klx_mode]
        self._klx_measure(batch, rollout, measured)
        if rollout.pending > 0:
            rollout.pending -= 1
            if rollout.pending == 0:
                self._klx_finish(rollout)

    @torch.no_grad()
    def _klx_measure(self, batch: dict, rollout: Rollout, measured: tuple[torch.Tensor, ...]) -> None:
        """Add a batch to the rollout's totals and, with the penalty in the advantages, adjust them."""
        mask = self._klx_mask(batch)
        per_token_kl, statistic, k1 = measured
        adjustment = self._klx_penalise(batch, per_token_kl, mask, rollout.coef)
        self._klx_add_totals(rollout, batch, statistic, k1, mask, adjustment)

    def _klx_penalise(
        self, batch: dict, per_token_kl: torch.Tensor, mask: torch.Tensor, coef: float
    ) -> torch.Tensor | None:
        """Bring the penalty of a measured batch into it. Returns the adjustment of the advantages, if it is one."""
        if self._klx_penalises != "advantage":
            return None
        per_token_kl = discount_kl(per_token_kl, mask, self.args.kl_discount)
        mean = self._klx_center(per_token_kl, mask, batch)
        adjustment = kl_adjustment(per_token_kl, mask, coef, mean)
        self._klx_apply(batch, adjustment)
        return adjustment

    @torch.no_grad()
    def _klx_per_token_kl(
        self, policy: Scored, reference: Scored, tokens: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        """The KL of each token three ways, see [`measure_kl`]."""
        policy_head = reference_head = None
        if self.args.kl_needs_full:
            policy_head = lm_head(self.accelerator.unwrap_model(self.model), self.temperature)
            with self.kl_reference.active() as model:
                reference_head = lm_head(self.accelerator.unwrap_model(model), self.temperature)
        return measure_kl(
            policy, reference, self.args.kl_estimator, self.args.kl_statistic, policy_head, reference_head, tokens
        )

    def _klx_add_totals(self, rollout: Rollout, batch: dict, statistic, k1, mask, adjustment=None) -> None:
        if rollout.totals is not None and rollout.pending == 0:
            return  # a second pass over micro-batches that were measured in the first
        if self.log_completions:
            self._klx_completions.fill(batch, statistic, mask)
        dtype = wide_dtype(mask.device)
        zero = torch.zeros((), dtype=dtype, device=mask.device)
        totals = torch.stack(
            [
                *kl_totals(statistic, mask),
                kl_totals(k1, mask)[0],
                zero if adjustment is None else adjustment.abs().sum(dtype=dtype),
                zero + mask.size(0),
            ]
        )
        rollout.totals = totals if rollout.totals is None else rollout.totals + totals

    def _klx_center(self, per_token_kl: torch.Tensor, mask: torch.Tensor, batch: dict) -> torch.Tensor | float:
        """Mean of the per-token KL over the centering set, in a shape that broadcasts over `(B, T)`."""
        centering = self.args.kl_centering
        if centering == "none":
            return 0.0
        if centering == "sequence":
            return sequence_means(per_token_kl, mask)  # (B, 1)
        if centering == "group":
            # A group's completions may lie on several processes.
            local = torch.stack([(per_token_kl * mask).sum(1), mask.sum(1).float(), batch["klx_group"].float()], dim=1)
            sums, counts, groups = gather(local).unbind(1)
            means = group_means(sums, counts, groups.long())
            start = self.accelerator.process_index * mask.size(0)
            return means[start : start + mask.size(0)].unsqueeze(1)  # (B, 1)
        totals = torch.stack([(per_token_kl * mask).sum(), mask.sum().float()])
        if centering == "batch":
            totals = self.accelerator.reduce(totals, reduction="sum")
        return totals[0] / totals[1].clamp(min=1.0)

    def _klx_group_ids(self, batch: dict) -> torch.Tensor:
        size = batch["completion_ids"].size(0)
        generations = self.num_generations if self._klx_mode == "train" else self.num_generations_eval
        rows = torch.arange(size, device=batch["completion_ids"].device) + self.accelerator.process_index * size
        return rows // generations

    def _klx_apply(self, batch: dict, adjustment: torch.Tensor) -> None:
        """Bring the per-token adjustment of the advantages into the batch."""
        raise NotImplementedError

    # ---- Statistic, controller, metrics ----

    def _klx_finish(self, rollout: Rollout) -> None:
        """Close a generation batch: reduce its totals over all processes, log, and update the controller."""
        mode = self._klx_mode
        # The one synchronisation with the device per generation batch.
        totals = self.accelerator.reduce(rollout.totals, reduction="sum").tolist()
        kl_sum, tokens, sequences, k1_sum, adjustment, completions = totals
        if tokens == 0:
            logger.warning("Every completion of the batch is masked: there is no KL to measure.")
            return
        per = sequences if self.args.kl_target_unit == "sequence" else tokens
        kl = kl_sum / per
        metrics = {
            "kl": kl,
            "kl_k1": k1_sum / per,
            "kl_per_token": kl_sum / tokens,
            "coef": rollout.coef,
        }
        if self.args.kl_target is not None:
            metrics |= {"target": self.args.kl_target, "error": kl / self.args.kl_target - 1.0}
        if self._klx_penalises is not None:
            metrics["saturated"] = float(self.kl_controller.saturated)
        if self._klx_penalises == "advantage":
            metrics["adjustment_abs_mean"] = adjustment / tokens
        for name, value in metrics.items():
            self._metrics[mode][f"klx/{name}"].append(value)
        if mode == "train":
            if self._klx_penalises is not None:
                self.kl_controller.update(kl, int(completions))
            warning = None if self._klx_drift is None else self._klx_drift.update(kl)
            if warning is not None:
                logger.warning(warning)

    def create_model_card(self, *args, **kwargs):
        super().create_model_card(*args, **kwargs)
        if self.kl_reference is not None and self.is_world_process_zero():
            section = describe_kl(self.args, self.kl_reference.identity, self.state.log_history)
            add_kl_section(os.path.join(self.args.output_dir, "README.md"), section)
