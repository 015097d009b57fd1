"""
KL control as a mixin over TRL's trainers.

What it overrides in TRL, and what it relies on there:

| method | what we do | what we rely on |
|---|---|---|
| `__init__` | build [`KLControl`] and the placement | TRL has prepared `self.model`, `self.accelerator`, `self.args` |
| `_generate_and_score_completions` | score and measure the batch that TRL returns | one call per generation batch, in training and evaluation; extra `(B, ...)` tensors survive shuffling and splitting |
| `_get_per_token_logps_and_entropies` | look at the pass; answer for the reference | TRL scores the policy before its reference; arguments `(model, input_ids, attention_mask, logits_to_keep)` are positional |
| `_compute_loss` | measure what generation left unmeasured; add the placement's term | TRL makes one forward pass, then reads `inputs["advantages"]` |
| `training_step` | skip steps of a rollout that has moved far enough (`kl_update_target`) | `self._step` counts micro-batches; generation happens where it is a multiple of `steps_per_generation * num_iterations` |
| `log` | log the window's sums | every process calls it |
| `create_model_card` | add a section | TRL writes `README.md` |
| `train`, `_save`, `_save_checkpoint`, `_load_from_checkpoint`, `_load_optimizer_and_scheduler` | see [`KLXCheckpointMixin`] | |

A subclass of TRL's GRPO trainer gets KL control from [`KLXTrainerMixin`], one of its RLOO trainer from
[`KLXRLOOMixin`].
"""

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from ..checkpoints.integrity import check_checkpoints
from ..checkpoints.mixin import KLXCheckpointMixin
from ..control.exact_kl import check_trains_through_head, lm_head
from ..control.forward_pass import has_dropout
from ..control.kl_control import KLControl
from ..control.metrics import Sums, read_metrics
from ..control.other_kls import UpdateLimit, add_sampler_kl, update_kl_sums
from ..control.placements import Batch, Placement
from ..control.rollout import Rollout, Scored, TokenKL
from ..controllers.drift import DriftMonitor
from ..maths.estimators import estimate_full_kl
from ..references.base import KLReference
from ..references.building import resolve_reference
from .completions_table import CompletionKLs
from .config import KLXConfigMixin
from .forward_passes import ForwardPassMixin
from .ignored_tokens import ignored_token_ids
from .launch_check import check_launch
from .model_card import add_kl_section, describe_kl


class _FollowPolicy(TrainerCallback):
    def __init__(self, reference: KLReference):
        self.reference = reference

    def on_step_end(self, args, state, control, **kwargs):
        self.reference.follow(state.global_step)


class KLXCoreMixin(ForwardPassMixin, KLXCheckpointMixin):
    """
    Adds KL control to a TRL trainer whose batches come from `_generate_and_score_completions`.

    The reference is scored once per generation batch. The policy's log-probs are those that TRL computes anyway: at
    generation where TRL needs them there, else in the loss, before TRL reads the advantages. One more forward of the
    policy is made only where the adjustment is centered over several micro-batches, or where the policy has dropout, which
    the KL must not see.

    Attributes:
        kl_control ([`KLControl`] or `None`):
            Controller, reference, statistic and drift; `None` while KL control is off.
        kl_controller ([`KLController`] or `None`):
            Maps the measured KL to the next coefficient.
        kl_reference ([`KLReference`] or `None`):
            The frozen policy the KL is measured against.
    """

    _config_class: type[KLXConfigMixin]
    # Class-level, because TRL's generation must also run on trainers that were never initialised.
    _klx_active = False  # whether we have anything to do with a batch
    _klx_rollout: Rollout | None = None  # the batch that TRL is generating

    def __init__(self, model, reward_funcs=None, args=None, *positional, **kwargs):
        if not isinstance(args, self._config_class):
            raise TypeError(
                f"`args` of {type(self).__name__} must be a `{self._config_class.__name__}`, which has the KL fields, "
                f"got `{type(args).__name__}`."
            )
        ref_model = kwargs.pop("ref_model", None)
        super().__init__(model, reward_funcs, args, *positional, **kwargs)
        check_launch(self.accelerator)
        policy = self.accelerator.unwrap_model(self.model)
        self._klx_prepare_policy(policy)
        self._klx_window = {"train": Sums(), "eval": Sums()}
        self._klx_update = UpdateLimit(self.args.kl_update_target)
        # The last rollout of each mode: micro-batches of it may still be measured in the loss.
        self._klx_rollouts: dict[str, Rollout] = {}
        self._klx_placement = Placement(self.args, self.accelerator)
        self._klx_active |= self.args.kl_enabled or self.args.kl_update_target is not None
        if not self.args.kl_enabled:
            return
        check_checkpoints(self.args)
        self.kl_control = self._klx_build_control(policy, ref_model)
        if self.args.kl_penalty_enabled:
            self._klx_placement = self.args.placement_class(self.args, self.accelerator)
        self._klx_has_dropout = has_dropout(policy)
        self._klx_completions = CompletionKLs(self._logs["extra"], self.accelerator)
        if self.args.kl_needs_full:
            lm_head(policy, self.temperature)  # refuses a head it cannot do
            if self._klx_placement.in_loss and self.args.kl_estimator == "full":
                check_trains_through_head(policy)
        if self.kl_reference.mover is not None:
            self.add_callback(_FollowPolicy(self.kl_reference))
        if self.use_vllm:
            self.kl_reference.keep_from_vllm(self.vllm_generation)

    def _klx_build_control(self, policy: nn.Module, ref_model: nn.Module | None) -> KLControl:
        args = self.args
        drift = None
        if args.kl_target is not None and args.kl_warn_window > 0:
            drift = DriftMonitor(target=args.kl_target, window=args.kl_warn_window, unit=args.kl_target_unit)
        return KLControl(
            args.build_kl_controller(),
            resolve_reference(args, policy, self.accelerator, ref_model, self.temperature),
            estimator=args.kl_estimator,
            statistic=args.kl_statistic,
            unit=args.kl_target_unit,
            target=args.kl_target,
            drift=drift,
            penalises=args.kl_penalty_enabled,
            name=args.kl_controller_name,
            ignored=ignored_token_ids(args.kl_ignore_tokens, self._tokenizer, self.eos_token_ids),
        )

    def _klx_prepare_policy(self, policy: nn.Module) -> None:
        """What is to be done to the policy before a reference is made of it."""

    @property
    def kl_controller(self):
        return None if self.kl_control is None else self.kl_control.controller

    @property
    def kl_reference(self):
        return None if self.kl_control is None else self.kl_control.reference

    @property
    def _klx_mode(self) -> str:
        return "train" if self.model.training else "eval"

    def _klx_reduce(self, totals: torch.Tensor) -> torch.Tensor:
        return self.accelerator.reduce(totals, reduction="sum")

    # ---- Measuring ----

    @staticmethod
    def _klx_generated(batch: Batch) -> torch.Tensor:
        """Boolean mask of the tokens the policy generated; padding and tool output are excluded."""
        mask = batch["completion_mask"].bool()
        return mask & batch["tool_mask"].bool() if "tool_mask" in batch else mask

    @staticmethod
    def _klx_tokens(batch: Batch) -> torch.Tensor:
        """The completion tokens, 0 where masked: padding may have an id that the vocabulary has not."""
        return batch["completion_ids"] * batch["completion_mask"]

    def _klx_answer(self, args: tuple, kwargs: dict) -> torch.Tensor:
        """The log-probs that TRL gets for the reference while it generates."""
        rollout, (input_ids, attention_mask, logits_to_keep) = self._klx_rollout, args
        rollout.reference = self._klx_score_reference(args, kwargs)
        tokens = input_ids[:, -logits_to_keep:]
        clean = self._klx_clean_pass(rollout, args, kwargs)
        kl = self.kl_control.measure(clean, rollout.reference, self._klx_heads(), tokens)
        mask = attention_mask[:, -logits_to_keep:].bool()
        for row, tool_mask in zip(mask, rollout.tool_masks or [], strict=bool(rollout.tool_masks)):
            row[: len(tool_mask)] &= torch.tensor(tool_mask, device=mask.device, dtype=torch.bool)
        return self._klx_placement.answer(rollout, kl, self.kl_control.mask(mask, tokens))

    # ---- One generation batch ----

    def _generate_and_score_completions(self, inputs):
        if not self._klx_active:
            return super()._generate_and_score_completions(inputs)
        rollout = Rollout() if self.kl_control is None else self.kl_control.begin()
        self._klx_rollouts[self._klx_mode] = rollout

        def remember(scored: Scored) -> None:
            # TRL scores the policy, where it does, before a reference.
            if rollout.policy is None:
                rollout.policy = scored.detach()
                if self._klx_mode == "eval" or self.kl_control is None or not self._klx_has_dropout:
                    rollout.clean = rollout.policy

        asked: AbstractContextManager = nullcontext()
        if self._klx_placement.asks_at_generation:
            asked = self._klx_asked(rollout.coef)
        self._klx_rollout = rollout
        try:
            with self._klx_watching(remember), asked:
                batch = super()._generate_and_score_completions(inputs)
        finally:
            self._klx_rollout = None
        if self.beta != 0.0 and "old_per_token_logps" not in batch and "old_logps" not in batch:
            rollout.policy = rollout.clean = None  # the pass seen was that of TRL's own reference
        self._klx_score_batch(batch, rollout)
        self._klx_measure_sampler(batch)
        rollout.forget_passes()
        return batch

    def _klx_score_batch(self, batch: Batch, rollout: Rollout) -> None:
        """Measure the KL of a generation batch, or leave with it what the loss needs to do so."""
        if self.kl_control is None:
            return
        self._klx_completions.add(batch)
        arguments, placement = self._klx_forward_arguments(batch), self._klx_placement
        if rollout.reference is None:
            rollout.reference = self._klx_score_reference(*arguments)
        train = self._klx_mode == "train"
        micro_batches = self.args.steps_per_generation if train else 1
        if rollout.clean is None and (
            (placement.per_batch and micro_batches > 1) or (train and self._klx_has_dropout)
        ):
            self._klx_clean_pass(rollout, *arguments)
        if placement.groups:
            batch["klx_group"] = self._klx_group_ids(batch)
        kl = None
        if rollout.clean is not None:
            kl = self.kl_control.measure(rollout.clean, rollout.reference, self._klx_heads(), self._klx_tokens(batch))
        if kl is None or placement.in_loss:
            names = {"klx_ref_logps": rollout.reference.logps, "klx_ref_hidden": rollout.reference.hidden}
            batch |= {name: tensor for name, tensor in names.items() if tensor is not None}
        if kl is not None and not placement.per_microbatch:
            self._klx_apply(batch, rollout, kl)
            self._klx_finish(rollout)
            return
        if kl is not None:
            batch["klx_measured"] = torch.stack(kl, dim=-1)  # (B, T, 3)
        rollout.deferred, rollout.pending = True, micro_batches

    def _klx_group_ids(self, batch: Batch) -> torch.Tensor:
        size = batch["completion_ids"].size(0)
        generations = self.num_generations if self._klx_mode == "train" else self.num_generations_eval
        rows = torch.arange(size, device=batch["completion_ids"].device) + self.accelerator.process_index * size
        return rows // generations

    @torch.no_grad()
    def _klx_apply(self, batch: Batch, rollout: Rollout, kl: TokenKL) -> None:
        """Enter the penalty of a measured batch, and count the batch."""
        mask = self.kl_control.mask(self._klx_generated(batch), batch["completion_ids"])
        adjustment = self._klx_placement.apply(batch, kl, mask, rollout.coef)
        if rollout.deferred and rollout.pending == 0:
            return  # a second pass over micro-batches that were counted in the first
        if self.log_completions:
            self._klx_completions.fill(batch, kl.statistic, mask)
        self.kl_control.add(rollout, kl, mask, adjustment)

    def _klx_finish(self, rollout: Rollout) -> None:
        mode = self._klx_mode
        metrics = self.kl_control.finish(rollout, self._klx_reduce, train=mode == "train")
        for name, value in metrics.items():
            self._metrics[mode][f"klx/{name}"].append(value)

    def _klx_measure_sampler(self, batch: Batch) -> None:
        """Log how far the policy is from the sampler that drew the tokens, where TRL has the log-probs of both."""
        if "sampling_per_token_logps" not in batch or "old_per_token_logps" not in batch:
            return
        sampler, policy = batch["sampling_per_token_logps"], batch["old_per_token_logps"]
        window, mask = self._klx_window[self._klx_mode], self._klx_generated(batch)
        largest = add_sampler_kl(window, sampler, policy, mask, self.args.kl_target_unit)
        self._metrics[self._klx_mode]["klx/sampler_max"].append(self.accelerator.gather(largest).max().item())

    # ---- Loss ----

    def _compute_loss(self, model, inputs):
        if not self._klx_active:
            return super()._compute_loss(model, inputs)
        inputs = dict(inputs)  # TRL may use the buffered batch again, with its own advantages
        passes: list[Scored] = []

        def look(scored: Scored) -> None:
            passes.append(scored)
            self._klx_before_advantages(inputs, scored)

        with self._klx_watching(look):
            loss = super()._compute_loss(model, inputs)
        return self._klx_after_loss(loss, inputs, passes[0])

    def _klx_before_advantages(self, inputs: Batch, policy: Scored) -> None:
        """Complete a micro-batch after TRL's forward pass, and before TRL reads its advantages."""
        self._klx_measure_update(inputs, policy)
        rollout = self._klx_rollouts[self._klx_mode]
        if not rollout.deferred:
            return
        if "klx_measured" in inputs:
            kl = TokenKL(*inputs["klx_measured"].unbind(-1))
        else:
            reference = Scored(inputs.get("klx_ref_logps"), inputs.get("klx_ref_hidden"))
            kl = self.kl_control.measure(policy.detach(), reference, self._klx_heads(), self._klx_tokens(inputs))
        self._klx_apply(inputs, rollout, kl)
        if rollout.pending > 0:
            rollout.pending -= 1
            if rollout.pending == 0:
                self._klx_finish(rollout)

    def _klx_after_loss(self, loss: torch.Tensor, inputs: Batch, policy: Scored) -> torch.Tensor:
        """Add the placement's term to TRL's loss."""
        coef = self._klx_rollouts[self._klx_mode].coef
        term = self._klx_placement.loss_term(inputs, policy, coef, self._klx_exact_kl)
        if term is None:
            return loss
        mask = self.kl_control.mask(self._klx_generated(inputs), inputs["completion_ids"])
        return loss + self._klx_aggregate(torch.where(mask, term, 0.0), inputs)

    def _klx_exact_kl(self, policy: Scored, reference: Scored) -> torch.Tensor:
        """The exact KL of each token, with gradients."""
        return estimate_full_kl(policy.hidden, reference.hidden, *self._klx_heads())

    def _klx_aggregate(self, per_token_term: torch.Tensor, inputs: Batch) -> torch.Tensor:
        """Weigh the terms of the tokens as TRL's loss does, and sum them."""
        raise NotImplementedError

    # ---- How far the policy has moved since the rollout ----

    def _klx_measure_update(self, inputs: Batch, policy: Scored) -> None:
        """Measure the KL to the rollout's policy, where TRL has its log-probs."""
        old_logps = inputs.get("old_per_token_logps", inputs.get("klx_old_logps"))
        if old_logps is None or self._klx_mode == "eval":
            return
        sums = update_kl_sums(old_logps, policy.logps, self._klx_generated(inputs), self.args.kl_target_unit)
        self._klx_window["train"].add("klx/kl_update", *sums)
        self._klx_update.add(*sums)

    def training_step(self, model, inputs, num_items_in_batch):
        if self.args.kl_update_target is None:
            return super().training_step(model, inputs, num_items_in_batch)
        if self._step % (self.args.steps_per_generation * self.num_iterations) == 0:
            self._klx_update.begin()
        if self._klx_update.passed:
            # Without gradients the optimizer leaves weights and moments as they are.
            self._step += 1
            loss = torch.zeros((), device=self.accelerator.device)
        else:
            loss = super().training_step(model, inputs, num_items_in_batch)
        if self.accelerator.sync_gradients:
            if self._klx_update.passes(self._klx_reduce):
                self.optimizer.zero_grad(set_to_none=True)
            self._metrics["train"]["klx/update_stopped"].append(float(self._klx_update.passed))
        return loss

    # ---- Metrics ----

    def log(self, logs, start_time=None):
        mode = self._klx_mode
        for name, value in self._klx_read_window(mode).items():
            self._metrics[mode][name].append(value)
        super().log(logs, start_time)

    def _klx_read_window(self, mode: str) -> dict[str, float]:
        return read_metrics(self._klx_window[mode].pop(self._klx_reduce))

    def create_model_card(self, *args: Any, **kwargs: Any):
        super().create_model_card(*args, **kwargs)
        if self.kl_reference is not None and self.is_world_process_zero():
            section = describe_kl(self.args, self.kl_reference.identity, self.state.log_history)
            add_kl_section(os.path.join(self.args.output_dir, "README.md"), section)
