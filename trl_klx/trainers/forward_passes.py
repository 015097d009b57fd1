"""The forward passes of policy and reference, made through TRL's own method."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from trl.models.utils import disable_gradient_checkpointing

from ..control.exact_kl import (
    LARGEST_HEAD_ERROR,
    ExactPass,
    exact_kl_of_passes,
    lm_head,
    lm_head_error,
    trains_head,
)
from ..control.forward_pass import CAN_SKIP_LM_HEAD, captured_hidden, narrow_tiles, no_lm_head
from ..control.kl_control import KLControl
from ..control.placements import Batch, Placement
from ..control.rollout import Head, Rollout, Scored
from ..controllers.base import KLController
from ..references.adapter import without_dropout
from ..references.base import KLReference
from ..references.peft_adapters import causal_lm, unwrapped


if TYPE_CHECKING:
    # The mixin is only ever combined with a TRL trainer, so it may use the trainer's attributes.
    from .trl_hosts import TRLTrainer as _Host
else:
    _Host = object


# Arguments of TRL's log-prob method after the model: input ids, attention mask and number of completion tokens, then
# those passed by keyword.
PassArgs = tuple[Any, ...]
PassKwargs = dict[str, Any]


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


class ForwardPassMixin(_Host):
    """Watches the passes of the policy that TRL makes, and makes those that TRL does not."""

    # Class-level, because TRL's generation must also run on trainers that were never initialised.
    kl_control: KLControl | None = None
    # Who looks at the policy's forward passes that TRL makes.
    _klx_watcher: Callable[[Scored], None] | None = None
    # Models whose LM heads were found to give TRL's log-probs, by their configs: an adapter shares that of the policy.
    _klx_checked_heads: frozenset[int] = frozenset()
    _klx_placement: Placement
    # Whether there are reward functions.
    _klx_rewarded = True

    @property
    def kl_controller(self) -> KLController | None:
        return None if self.kl_control is None else self.kl_control.controller

    @property
    def kl_reference(self) -> KLReference | None:
        return None if self.kl_control is None else self.kl_control.reference

    @property
    def _klx_control(self) -> KLControl:
        """`kl_control`, for code that runs only while it is on."""
        assert self.kl_control is not None
        return self.kl_control

    @property
    def _klx_loss_host(self) -> type:
        """The class whose loss is trained on: TRL's trainer, or a subclass of it with its own loss."""
        order = type(self).__mro__
        return next(cls for cls in order[order.index(ForwardPassMixin) + 1 :] if "_compute_loss" in vars(cls))

    @property
    def _klx_only_exact_kl(self) -> bool:
        """Whether the exact KL is all of the loss: without a reward, the completions of a prompt compare as equals."""
        exact = self._klx_placement.in_loss and self.args.kl_estimator == "full"
        equal = not self._klx_rewarded and self.args._compares_completions
        return exact and equal and self._klx_loss_host.__module__.startswith("trl.trainer.")

    @property
    def _klx_mode(self) -> str:
        return "train" if self.model.training else "eval"

    @property
    def _klx_steps_per_generation(self) -> int:
        assert self.args.steps_per_generation is not None  # TRL has filled it in
        return self.args.steps_per_generation

    @property
    def _klx_steps_per_rollout(self) -> int:
        """Optimizer steps per rollout."""
        return self._klx_steps_per_generation * self.num_iterations // self.args.gradient_accumulation_steps

    def _klx_reduce(self, totals: torch.Tensor) -> torch.Tensor:
        reduced: torch.Tensor = self.accelerator.reduce(totals, reduction="sum")
        return reduced

    @staticmethod
    def _klx_generated(batch: Batch) -> torch.Tensor:
        """Boolean mask of the tokens the policy generated; padding and tool output are excluded."""
        mask: torch.Tensor = batch["completion_mask"].bool()
        return mask & batch["tool_mask"].bool() if "tool_mask" in batch else mask

    @staticmethod
    def _klx_tokens(batch: Batch) -> torch.Tensor:
        """The completion tokens, 0 where masked: the id of the padding may lie outside the vocabulary."""
        tokens: torch.Tensor = batch["completion_ids"] * batch["completion_mask"]
        return tokens

    def _klx_group_ids(self, batch: Batch) -> torch.Tensor:
        """Which prompt of the generation batch each completion on this process belongs to."""
        size = batch["completion_ids"].size(0)
        generations = self.num_generations if self._klx_mode == "train" else self.num_generations_eval
        assert generations is not None  # TRL has filled it in
        first: int = self.accelerator.process_index * size
        return (torch.arange(size, device=batch["completion_ids"].device) + first) // generations

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

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        if self.kl_control is not None and model is self.kl_control.reference:
            return self._klx_answer(args, kwargs), None, None
        watcher, self._klx_watcher = self._klx_watcher, None  # the watcher may make passes itself
        # The log-probs of the sampled tokens are then for the log alone: no gradient flows through them.
        only_logged = watcher is not None and self._klx_only_exact_kl
        try:
            with narrow_tiles(self.accelerator.device) if only_logged else nullcontext():
                output, scored = self._klx_forward(model, args, kwargs)
            if watcher is not None:
                watcher(scored)
        finally:
            self._klx_watcher = watcher
        if only_logged:
            output = (output[0].detach(), *output[1:])  # which saves their way back through the LM head
        return output

    def _klx_forward(
        self, model: Any, args: PassArgs, kwargs: PassKwargs, check: bool = True
    ) -> tuple[tuple[Any, ...], Scored]:
        """
        TRL's log-prob method, and the hidden states if the exact KL needs them. The first hidden states of policy and
        reference are checked: TRL's log-probs must follow from them.
        """
        if self.kl_control is None or not self.kl_control.needs_full:
            output = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
            return output, Scored(output[0])
        input_ids, logits_to_keep = args[0], args[2]
        with captured_hidden(unwrapped(model), logits_to_keep) as hidden:
            output = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        name = self._klx_class(model).__name__
        if not hidden:
            self.kl_control.measure_by_k3(f"{name}, whose forward pass goes around its backbone")
            return output, Scored(output[0])
        scored = Scored(output[0], torch.cat(hidden))
        if check and self._klx_config_id(model) not in self._klx_checked_heads:
            tokens, mask = input_ids[:, -logits_to_keep:], args[1][:, -logits_to_keep:]
            error = lm_head_error(unwrapped(model), self.temperature, scored.detach(), tokens, mask)
            if error is not None and error > LARGEST_HEAD_ERROR:
                obstacle = f"{name}: the logits rebuilt from its hidden states are off by {error:.3g} nats"
                self.kl_control.measure_by_k3(obstacle)
                return output, Scored(output[0])
            if error is not None:
                self._klx_checked_heads |= {self._klx_config_id(model)}
        return output, scored

    def _klx_class(self, model: Any) -> type:
        """The architecture of a model."""
        return type(causal_lm(unwrapped(model)))

    def _klx_config_id(self, model: Any) -> int:
        return id(causal_lm(unwrapped(model)).config)

    @torch.no_grad()
    def _klx_score_policy(self, args: PassArgs, kwargs: PassKwargs) -> Scored:
        """One more forward of the policy, without dropout."""
        checkpointing = cast("dict[str, Any] | None", self.args.gradient_checkpointing_kwargs)  # JSON is parsed by now
        plain_forward = disable_gradient_checkpointing(self.model, checkpointing)
        with plain_forward, narrow_tiles(self.accelerator.device), without_dropout(self.model):
            return self._klx_forward(self.model, args, kwargs)[1].detach()

    @torch.no_grad()
    def _klx_score_reference(self, args: PassArgs, kwargs: PassKwargs) -> Scored:
        """The reference's forward. It ends before the LM head where the exact KL goes through it anyway."""
        control = self._klx_control
        with control.reference.active() as model:
            head = self._klx_config_id(model)
            # Only the logits of a head that was checked can be rebuilt. Otherwise `k3` may need these log-probs.
            spared = self._klx_class(model) is self._klx_class(self.model) and control.needs_full and CAN_SKIP_LM_HEAD
            spared &= not self._klx_placement.needs_reference_logps
            # If the exact KL was asked for, the check of the policy's own pass is enough for a state of the policy: a
            # failure ends the run.
            asked_for = control.reference.identity["kind"] != "model" and not control.statistic_is_default
            skip = spared and (asked_for or head in self._klx_checked_heads)
            with no_lm_head() if skip else narrow_tiles(self.accelerator.device):
                # Not our own `_klx_forward`: a subclass may add to it what only the policy has.
                scored = ForwardPassMixin._klx_forward(self, model, args, kwargs, check=not skip)[1].detach()
        # The first pass, in which the head is checked, counts like the following ones: a resumed run is then the same.
        unused = skip or (spared and head in self._klx_checked_heads)
        return Scored(None, scored.hidden) if unused else scored

    def _klx_forward_arguments(self, batch: Batch) -> tuple[PassArgs, PassKwargs]:
        """Arguments of TRL's log-prob method for a whole generation batch, in chunks of TRL's own size."""
        input_ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        attention_mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        train = self._klx_mode == "train"
        kwargs = {key: batch[key] for key in FORWARD_KEYS if key in batch}
        kwargs["batch_size"] = self.args.per_device_train_batch_size if train else self.args.per_device_eval_batch_size
        return (input_ids, attention_mask, batch["completion_ids"].size(1)), kwargs

    def _klx_heads(self, rollout: Rollout) -> tuple[Head, Head] | None:
        """
        LM heads of policy and reference, for the exact KL. A head that is sharded is joined once per generation batch,
        unless it is trained: the policy's then changes with every step.
        """
        if not self._klx_control.needs_full:
            return None
        policy = unwrapped(self.model)
        if rollout.policy_head is None or trains_head(policy):
            rollout.policy_head = lm_head(policy, self.temperature)
        if rollout.reference_head is None:
            reference = self._klx_control.reference
            # Its hidden states are those of the rollout, so its head must not follow the policy between two steps.
            copied = reference.mover is not None and self._klx_steps_per_rollout > 1 and trains_head(policy)
            with reference.active() as model:
                rollout.reference_head = lm_head(unwrapped(model), self.temperature, copied)
        return rollout.policy_head, rollout.reference_head

    def _klx_exact_kl(self, inputs: Batch, rollout: Rollout, policy: Scored, reference: Scored) -> ExactPass:
        """The exact KL of the loss's own pass, with its gradient. Measurement and loss share it."""
        if "klx_exact_kl" not in inputs:
            heads = self._klx_heads(rollout)
            assert heads is not None
            inputs["klx_exact_kl"] = exact_kl_of_passes(policy, reference, heads, self._klx_tokens(inputs))
        exact: ExactPass = inputs["klx_exact_kl"]
        return exact

    def _klx_clean_pass(self, rollout: Rollout, args: PassArgs, kwargs: PassKwargs) -> Scored:
        """The pass of the policy that may be measured; made if TRL has made none, or one with dropout."""
        if rollout.clean is None:
            rollout.clean = self._klx_score_policy(args, kwargs)
        return rollout.clean

    def _klx_answer(self, args: PassArgs, kwargs: PassKwargs) -> torch.Tensor:
        """The log-probs that TRL gets for the reference while it generates."""
        raise NotImplementedError
