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
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback
from trl.models.utils import disable_gradient_checkpointing

from ..checkpoints.integrity import check_checkpoints
from ..checkpoints.mixin import KLXCheckpointMixin
from ..control.exact_kl import Head, check_lm_head, check_trains_through_head, lm_head
from ..control.forward_pass import (
    CAN_SKIP_LM_HEAD,
    captured_hidden,
    has_dropout,
    narrow_tiles,
    no_lm_head,
    without_dropout,
)
from ..control.kl_control import KLControl
from ..control.metrics import Sums, read_metrics
from ..control.placements import Batch, Placement
from ..control.rollout import Rollout, Scored, TokenKL
from ..controllers.drift import DriftMonitor
from ..maths.estimators import estimate_full_kl, estimate_kl, kl_totals
from ..references.base import KLReference
from ..references.building import resolve_reference
from .completions_table import CompletionKLs
from .config import KLXConfigMixin
from .ignored_tokens import ignored_token_ids
from .launch_check import check_launch
from .model_card import add_kl_section, describe_kl


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


class _FollowPolicy(TrainerCallback):
    def __init__(self, reference: KLReference):
        self.reference = reference

    def on_step_end(self, args, state, control, **kwargs):
        self.reference.follow(state.global_step)


class KLXCoreMixin(KLXCheckpointMixin):
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
    kl_control: KLControl | None = None
    # The batch that TRL is generating, and who looks at the policy's forward passes that TRL makes.
    _klx_rollout: Rollout | None = None
    _klx_watcher: Callable[[Scored], None] | None = None
    _klx_update_passed = False

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
        # The sums of one optimizer step, for `kl_update_target`.
        self._klx_update_sums = Sums()
        # The last rollout of each mode: micro-batches of it may still be measured in the loss.
        self._klx_rollouts: dict[str, Rollout] = {}
        self._klx_placement = Placement(self.args, self.accelerator)
        if not self.args.kl_enabled:
            return
        check_checkpoints(self.args)
        self.kl_control = self._klx_build_control(policy, ref_model)
        if self.args.kl_penalty_enabled:
            self._klx_placement = self.args.placement_class(self.args, self.accelerator)
        self._klx_lm_head_checked = False
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

    @property
    def _klx_active(self) -> bool:
        """Whether we have anything to do with a batch."""
        return self.kl_control is not None or self.args.kl_update_target is not None

    def _klx_reduce(self, totals: torch.Tensor) -> torch.Tensor:
        return self.accelerator.reduce(totals, reduction="sum")

    # ---- Forward passes ----

    @contextmanager
    def _klx_watching(self, watcher: Callable[[Scored], None]) -> Iterator[None]:
        """Let `watcher` see the policy's forward passes that TRL makes."""
        self._klx_watcher = watcher
        try:
            yield
        finally:
            self._klx_watcher = None

    @contextmanager
    def _klx_asked(self, coef: float) -> Iterator[None]:
        """Make TRL ask for the reference's log-probs, and use our coefficient as its `beta`."""
        beta, ref_model = self.beta, self.ref_model
        self.beta, self.ref_model = coef, self.kl_reference
        try:
            yield
        finally:
            self.beta, self.ref_model = beta, ref_model

    def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
        if self.kl_control is not None and model is self.kl_reference:
            return self._klx_answer(args, kwargs), None, None
        watcher, self._klx_watcher = self._klx_watcher, None  # the watcher may make passes itself
        try:
            output, scored = self._klx_forward(model, args, kwargs)
            if watcher is not None:
                watcher(scored)
        finally:
            self._klx_watcher = watcher
        return output

    def _klx_forward(self, model, args: tuple, kwargs: dict, check: bool = True) -> tuple[tuple, Scored]:
        """
        TRL's log-prob method, with the hidden states where the exact KL needs them. The first of those are checked to be
        what the log-probs come from.
        """
        if self.kl_control is None or not self.args.kl_needs_full:
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
        """One more forward of the policy, without dropout."""
        plain_forward = disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs)
        with plain_forward, narrow_tiles(self.accelerator.device), without_dropout(self.model):
            return self._klx_forward(self.model, args, kwargs)[1].detach()

    @torch.no_grad()
    def _klx_score_reference(self, args: tuple, kwargs: dict) -> Scored:
        """The reference's forward. It ends before the LM head where the exact KL goes through it anyway."""
        skip = not self._klx_placement.needs_reference_logps and self.args.kl_needs_full and CAN_SKIP_LM_HEAD
        head = no_lm_head() if skip else narrow_tiles(self.accelerator.device)
        with self.kl_reference.active() as model, head:
            # Not our own `_klx_forward`: a subclass may add to it what only the policy has.
            scored = KLXCoreMixin._klx_forward(self, model, args, kwargs, check=not skip)[1].detach()
        return Scored(None, scored.hidden) if skip else scored

    def _klx_forward_arguments(self, batch: Batch) -> tuple[tuple, dict]:
        """Arguments of TRL's log-prob method for a whole generation batch, in chunks of TRL's own size."""
        input_ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        attention_mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        train = self._klx_mode == "train"
        kwargs = {key: batch[key] for key in FORWARD_KEYS if key in batch}
        kwargs["batch_size"] = self.args.per_device_train_batch_size if train else self.args.per_device_eval_batch_size
        return (input_ids, attention_mask, batch["completion_ids"].size(1)), kwargs

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

    def _klx_heads(self) -> tuple[Head, Head] | None:
        """LM heads of policy and reference, for the exact KL."""
        if not self.args.kl_needs_full:
            return None
        policy_head = lm_head(self.accelerator.unwrap_model(self.model), self.temperature)
        with self.kl_reference.active() as model:
            return policy_head, lm_head(self.accelerator.unwrap_model(model), self.temperature)

    def _klx_clean_pass(self, rollout: Rollout, args: tuple, kwargs: dict) -> Scored:
        """The pass of the policy that may be measured; made if TRL has made none, or one with dropout."""
        if rollout.clean is None:
            rollout.clean = self._klx_score_policy(args, kwargs)
        return rollout.clean

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

    @torch.no_grad()
    def _klx_measure_sampler(self, batch: Batch) -> None:
        """Log how far the policy is from the sampler that drew the tokens, where TRL has the log-probs of both."""
        if "sampling_per_token_logps" not in batch or "old_per_token_logps" not in batch:
            return
        sampler, policy, mask = (
            batch["sampling_per_token_logps"],
            batch["old_per_token_logps"],
            self._klx_generated(batch),
        )
        mask = mask & ~sampler.isnan()  # tokens that vLLM could not score
        per = mask.any(dim=1).sum() if self.args.kl_target_unit == "sequence" else mask.sum()
        window = self._klx_window[self._klx_mode]
        for name, kind in (("sampler_kl", "k3"), ("sampler_kl_k1", "k1")):
            window.add(f"klx/{name}", kl_totals(estimate_kl(sampler, policy, kind), mask)[0], per)
        log_weights = torch.where(mask, policy - sampler, -torch.inf)
        weights = log_weights.clamp(max=20.0).exp()
        window.add("klx/sampler_ess", weights.sum(), weights.square().sum(), mask.sum())
        largest = torch.where(mask, (policy - sampler).abs(), 0.0).max()
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

    @torch.no_grad()
    def _klx_measure_update(self, inputs: Batch, policy: Scored) -> None:
        """Measure KL(policy of the rollout || policy), where TRL has the log-probs of the rollout's policy."""
        old_logps = inputs.get("old_per_token_logps", inputs.get("klx_old_logps"))
        if old_logps is None or self._klx_mode == "eval":
            return
        total, tokens, sequences = kl_totals(
            estimate_kl(old_logps, policy.logps.detach(), "k3"), self._klx_generated(inputs)
        )
        sums = (total, sequences if self.args.kl_target_unit == "sequence" else tokens)
        self._klx_window["train"].add("klx/kl_update", *sums)
        if self.args.kl_update_target is not None:
            self._klx_update_sums.add("kl", *sums)

    def training_step(self, model, inputs, num_items_in_batch):
        target = self.args.kl_update_target
        if target is None:
            return super().training_step(model, inputs, num_items_in_batch)
        if self._step % (self.args.steps_per_generation * self.num_iterations) == 0:
            self._klx_update_passed = False
        if self._klx_update_passed:
            # Without gradients the optimizer leaves weights and moments as they are.
            self._step += 1
            loss = torch.zeros((), device=self.accelerator.device)
        else:
            loss = super().training_step(model, inputs, num_items_in_batch)
        if self.accelerator.sync_gradients:
            if not self._klx_update_passed:
                total, count = self._klx_update_sums.pop(self._klx_reduce)["kl"]
                self._klx_update_passed = total > target * count
                if self._klx_update_passed:
                    self.optimizer.zero_grad(set_to_none=True)
            self._metrics["train"]["klx/update_stopped"].append(float(self._klx_update_passed))
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
