"""
KL control as a mixin over TRL's trainers.

What we override in TRL and transformers, and what we rely on there:

| method | what we do | what we rely on |
|---|---|---|
| `__init__` | build the control and the placement | TRL has set `model`, `accelerator` and `args` |
| `_generate_and_score_completions` | measure the batch that TRL returns | called once per generation batch, also in |
| | | evaluation; extra `(B, ...)` tensors survive shuffling and splitting |
| `_get_per_token_logps_and_entropies` | look at the pass; answer for the reference | the policy is scored first; |
| | | model, ids, attention mask and `logits_to_keep` are positional |
| `_compute_loss` | measure what is left; add the placement's term | one forward pass, then `advantages` is read |
| `training_step` | skip the rest of a rollout (`kl_update_target`) | `_step` counts micro-batches; a rollout lasts |
| | | `steps_per_generation * num_iterations` of them |
| `accelerator.clip_grad_norm_` | skip a step that is not finite | called once before each optimizer step |
| `log` | log the window's sums | every process calls it |
| `create_model_card` | add a section | TRL writes `README.md` |
| `train`, `_save`, `_save_checkpoint`, `_load_from_checkpoint`, `_load_optimizer_and_scheduler` | | |
| | see [`KLXCheckpointMixin`] | |
| `_generate`, `_calculate_rewards` | see [`KLXTrainerMixin`], [`KLXRLOOMixin`], [`InfiniteRewardsMixin`] | |
| `_generate_single_turn`, `create_optimizer`, `save_model`, `_load_best_model` | see [`KLXPPOTrainer`] | |
"""

import os
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..checkpoints.integrity import check_checkpoints
from ..checkpoints.mixin import KLXCheckpointMixin
from ..control.exact_kl import check_trains_through_head, exact_kl_obstacle
from ..control.forward_pass import has_dropout
from ..control.metrics import Sums, read_metrics
from ..control.other_kls import UpdateLimit, check_update_target
from ..control.placements import Batch, Placement
from ..control.rollout import Rollout, Scored, TokenKL
from ..trl_versions import TRL_HAS_EOS_TOKEN_IDS
from .completions_table import CompletionKLs
from .config import KLXConfigMixin
from .control_building import CountSteps, FollowPolicy, build_kl_control
from .finite_steps import FiniteStepsMixin
from .forward_passes import PassArgs, PassKwargs
from .ignored_tokens import ignored_token_ids
from .infinite_rewards import InfiniteRewardsMixin, warn_of_infinite_rewards
from .launch_check import check_launch
from .model_card import add_kl_section, describe_kl
from .no_reward import check_groups, check_teacher, no_reward
from .other_kls import OtherKLsMixin
from .pull import PullMixin
from .ref_model import check_ref_model
from .reference_resets import ReferenceResetsMixin
from .resumed_sampler import ResumeSampler


if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


class KLXCoreMixin(
    FiniteStepsMixin, InfiniteRewardsMixin, OtherKLsMixin, PullMixin, ReferenceResetsMixin, KLXCheckpointMixin
):
    """
    Adds KL control to a TRL trainer whose batches come from `_generate_and_score_completions`.

    The reference is scored once per generation batch. The policy's log-probs are those that TRL computes anyway: at
    generation if TRL needs them there, otherwise in the loss, before TRL reads the advantages. The policy is run once
    more only if the adjustment is centered over several micro-batches, or if the policy has dropout, which the KL must
    not see.

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

    def __init__(
        self,
        model: "str | PreTrainedModel | PeftModel",
        reward_funcs: Any = None,
        args: KLXConfigMixin | None = None,
        *positional: Any,
        ref_model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(args, self._config_class):
            raise TypeError(
                f"`args` of {type(self).__name__} must be a `{self._config_class.__name__}`, which has the KL fields, "
                f"got `{type(args).__name__}`."
            )
        check_ref_model(args, model, ref_model)
        without = reward_funcs is None or reward_funcs == []
        if without and args.kl_penalty_enabled and kwargs.get("environment_factory") is None:
            check_teacher(args, ref_model)
            reward_funcs = no_reward
        else:
            check_groups(args)
        super().__init__(model, reward_funcs, args, *positional, **kwargs)
        self._klx_rewarded = reward_funcs is not no_reward
        if not TRL_HAS_EOS_TOKEN_IDS:
            self.eos_token_ids = [self._tokenizer.eos_token_id]
        check_launch(self.accelerator)
        policy = self.accelerator.unwrap_model(self.model)
        self._klx_prepare_policy(policy)
        self._klx_window = {"train": Sums(), "eval": Sums()}
        self._klx_has_dropout = has_dropout(policy)
        self._klx_update = UpdateLimit(self.args.kl_update_target)
        check_update_target(self.args.kl_update_target, self._klx_has_dropout)
        # The last rollout of each mode: micro-batches of it may still be measured in the loss.
        self._klx_rollouts: dict[str, Rollout] = {}
        self._klx_placement = Placement(self.args, self.accelerator)
        self._klx_active |= self.args.kl_enabled or self.args.kl_update_target is not None
        if self._klx_active:
            self._klx_guard_steps()
            self.add_callback(ResumeSampler())
        if not self.args.kl_enabled:
            return
        check_checkpoints(self.args)
        ignored = ignored_token_ids(self.args.kl_ignore_tokens, self._tokenizer, self.eos_token_ids)
        control = build_kl_control(
            self.args, policy, self.accelerator, ref_model, self.temperature, ignored, self._tokenizer
        )
        self.kl_control = control
        if self.args.kl_penalty_enabled:
            self._klx_placement = self.args.placement_class(self.args, self.accelerator)
        self._klx_completions = CompletionKLs(self._logs["extra"], self.accelerator)
        if control.needs_full:
            if (obstacle := exact_kl_obstacle(policy, control.reference, self.accelerator)) is not None:
                control.measure_by_k3(obstacle)
            if self._klx_placement.in_loss and self.args.kl_estimator == "full":
                check_trains_through_head(policy)
        self.add_callback(CountSteps(control))
        if control.reference.mover is not None:
            self.add_callback(FollowPolicy(control.reference))
        if self.use_vllm:
            control.reference.keep_from_vllm(self.vllm_generation)

    def _klx_prepare_policy(self, policy: nn.Module) -> None:
        """Prepare the policy before a reference is made from it; for subclasses."""

    # ---- Measuring ----

    def _klx_answer(self, args: PassArgs, kwargs: PassKwargs) -> torch.Tensor:
        """The log-probs that TRL gets for the reference while it generates."""
        control, rollout, (input_ids, attention_mask, logits_to_keep) = self._klx_control, self._klx_rollout, args
        assert rollout is not None
        rollout.reference = self._klx_score_reference(args, kwargs)
        tokens = input_ids[:, -logits_to_keep:]
        clean = self._klx_clean_pass(rollout, args, kwargs)
        kl = control.measure(clean, rollout.reference, self._klx_heads(rollout), tokens)
        mask = attention_mask[:, -logits_to_keep:].bool()
        for row, tool_mask in zip(mask, rollout.tool_masks or [], strict=bool(rollout.tool_masks)):
            row[: len(tool_mask)] &= torch.tensor(tool_mask, device=mask.device, dtype=torch.bool)
        return self._klx_placement.answer(rollout, kl, control.mask(mask, tokens))

    # ---- One generation batch ----

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Batch:
        if not self._klx_active:
            return super()._generate_and_score_completions(inputs)
        if self._klx_mode == "train":
            self._klx_reset_if_stalled()
        # With `asks_at_generation` the penalty is in the rewards before the KL of the whole batch is known.
        at_once = not self._klx_placement.asks_at_generation
        rollout = Rollout() if self.kl_control is None else self.kl_control.begin(at_once)
        self._klx_rollouts[self._klx_mode] = rollout
        if self._klx_mode == "train":
            self._klx_finite.begin(self.state.global_step + 1)

        def remember(scored: Scored) -> None:
            # TRL scores the policy, where it does, before a reference.
            if rollout.policy is None:
                rollout.policy = scored.detach()
                if self._klx_mode == "eval" or self.kl_control is None or not self._klx_has_dropout:
                    rollout.clean = rollout.policy

        asked: AbstractContextManager[None] = nullcontext()
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
        if train and self.kl_control.stall is not None:
            reward = self._metrics["train"]["reward"][-1]
            self.kl_control.add_reward(rollout, reward, batch["completion_ids"].device)
        micro_batches = self._klx_steps_per_generation if train else 1
        if rollout.clean is None and (
            (placement.per_batch and micro_batches > 1) or (train and self._klx_has_dropout)
        ):
            self._klx_clean_pass(rollout, *arguments)
        if placement.groups:
            batch["klx_group"] = self._klx_group_ids(batch)
        kl = None
        if rollout.clean is not None:
            heads, tokens = self._klx_heads(rollout), self._klx_tokens(batch)
            kl = self.kl_control.measure(rollout.clean, rollout.reference, heads, tokens)
        if kl is None or placement.in_loss:
            names = {"klx_ref_logps": rollout.reference.logps, "klx_ref_hidden": rollout.reference.hidden}
            batch |= {name: tensor for name, tensor in names.items() if tensor is not None}
        if kl is not None and not placement.per_microbatch:
            self._klx_apply(batch, rollout, kl)
            return
        if kl is not None:
            batch["klx_measured"] = torch.stack(kl, dim=-1)  # (B, T, 4)
        rollout.deferred, rollout.pending = True, micro_batches
        # Several micro-batches: the first one gets its penalty before the last one is counted.
        rollout.undecided &= micro_batches == 1

    @torch.no_grad()
    def _klx_apply(self, batch: Batch, rollout: Rollout, kl: TokenKL) -> None:
        """Count a measured batch or micro-batch, close the rollout with the last of them, and enter the penalty."""
        mask = self._klx_control.mask(self._klx_generated(batch), batch["completion_ids"])
        placement = self._klx_placement
        charge = placement.charge(batch, kl, mask)
        # Micro-batches that are passed over again were counted the first time.
        if not rollout.deferred or rollout.pending > 0:
            # Nothing is steered in evaluation.
            pull = self._klx_pull(batch, rollout, kl, mask) if self._klx_mode == "train" else None
            if self.log_completions:
                self._klx_completions.fill(batch, kl.statistic, mask)
            self._klx_control.add(rollout, kl, mask, None if placement.in_token_rewards else charge, pull)
            rollout.pending = max(rollout.pending - 1, 0)
            if rollout.pending == 0:
                self._klx_finish(rollout)
        if charge is not None:
            placement.apply(batch, charge, rollout.coef)

    def _klx_finish(self, rollout: Rollout) -> None:
        mode = self._klx_mode
        skipped = None
        if mode == "train":
            rollout.sums.merge(self._klx_finite.sums)  # read together, so that there is one wait for the device
            skipped = self._klx_finite.skipped
        metrics = self._klx_control.finish(rollout, self._klx_reduce, mode == "train", skipped)
        warn_of_infinite_rewards(rollout.totals)
        if mode == "train":
            self._klx_finite.judge(rollout.totals)
        for name, value in metrics.items():
            self._metrics[mode][f"klx/{name}"].append(value)
        if self._klx_control.reference.identity["kind"] == "model":
            # Two teachers, the reward and the model: the log shows the weight of each.
            for name, weight in zip(self.reward_func_names, self.reward_weights.tolist(), strict=True):
                self._metrics[mode][f"rewards/{name}/weight"].append(weight)
        if self._klx_placement.in_loss and metrics:
            self._metrics[mode]["kl"].append(metrics["kl_per_token"])  # TRL's name for it

    # ---- Loss ----

    def _compute_loss(self, model: nn.Module, inputs: Batch) -> torch.Tensor:
        if not self._klx_active:
            return super()._compute_loss(model, inputs)
        inputs = dict(inputs)  # TRL may use the buffered batch again, with its own advantages
        passes: list[Scored] = []

        def look(scored: Scored) -> None:
            passes.append(scored)
            self._klx_before_advantages(inputs, scored)

        with self._klx_watching(look):
            loss = super()._compute_loss(model, inputs)
        return self._klx_watch_loss(self._klx_after_loss(loss, inputs, passes[0]), inputs, passes[0])

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
            heads = exact = None
            if self._klx_placement.in_loss and self.args.kl_estimator == "full":
                exact = self._klx_exact_kl(inputs, rollout, policy, reference)
            else:
                heads = self._klx_heads(rollout)
            kl = self._klx_control.measure(policy.detach(), reference, heads, self._klx_tokens(inputs), exact)
        self._klx_apply(inputs, rollout, kl)

    def _klx_after_loss(self, loss: torch.Tensor, inputs: Batch, policy: Scored) -> torch.Tensor:
        """Add the placement's term to TRL's loss."""
        rollout = self._klx_rollouts[self._klx_mode]

        def exact_kl(policy: Scored, reference: Scored) -> torch.Tensor:
            return self._klx_exact_kl(inputs, rollout, policy, reference)[0]

        term = self._klx_placement.loss_term(inputs, policy, rollout.coef, exact_kl)
        if term is None:
            return loss
        mask = self._klx_control.mask(self._klx_generated(inputs), inputs["completion_ids"])
        return loss + self._klx_aggregate(torch.where(mask, term, 0.0), inputs)

    def _klx_aggregate(self, per_token_term: torch.Tensor, inputs: Batch) -> torch.Tensor:
        """Weigh the terms of the tokens as TRL's loss does, and sum them."""
        raise NotImplementedError

    # ---- Metrics ----

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        mode = self._klx_mode
        for name, value in self._klx_read_window(mode).items():
            self._metrics[mode][name].append(value)
        super().log(logs, start_time)

    def _klx_read_window(self, mode: str) -> dict[str, float]:
        if self.kl_control is None and self._klx_active:
            self._klx_finite.read(self._klx_reduce)  # there is no batch to close with which it could be read
        sums = self._klx_window[mode].pop(self._klx_reduce)
        warn_of_infinite_rewards(sums)
        return read_metrics(sums)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        super().create_model_card(*args, **kwargs)
        if self.kl_reference is not None and self.is_world_process_zero():
            settings = (self.args, self._klx_control.statistic, self.kl_reference.description)
            section = describe_kl(*settings, self.state.log_history)
            assert self.args.output_dir is not None  # transformers has filled it in
            add_kl_section(os.path.join(self.args.output_dir, "README.md"), section)
