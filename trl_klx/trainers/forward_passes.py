"""The forward passes of policy and reference, made through TRL's own method."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from trl.models.utils import disable_gradient_checkpointing

from ..control.exact_kl import Head, check_lm_head, lm_head
from ..control.forward_pass import CAN_SKIP_LM_HEAD, captured_hidden, narrow_tiles, no_lm_head, without_dropout
from ..control.kl_control import KLControl
from ..control.placements import Batch, Placement
from ..control.rollout import Rollout, Scored


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


class ForwardPassMixin:
    """Watches the passes of the policy that TRL makes, and makes those that TRL does not."""

    # Class-level, because TRL's generation must also run on trainers that were never initialised.
    kl_control: KLControl | None = None
    # Who looks at the policy's forward passes that TRL makes.
    _klx_watcher: Callable[[Scored], None] | None = None
    _klx_lm_head_checked = False
    _klx_placement: Placement

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
            scored = ForwardPassMixin._klx_forward(self, model, args, kwargs, check=not skip)[1].detach()
        return Scored(None, scored.hidden) if skip else scored

    def _klx_forward_arguments(self, batch: Batch) -> tuple[tuple, dict]:
        """Arguments of TRL's log-prob method for a whole generation batch, in chunks of TRL's own size."""
        input_ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        attention_mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        train = self._klx_mode == "train"
        kwargs = {key: batch[key] for key in FORWARD_KEYS if key in batch}
        kwargs["batch_size"] = self.args.per_device_train_batch_size if train else self.args.per_device_eval_batch_size
        return (input_ids, attention_mask, batch["completion_ids"].size(1)), kwargs

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
        raise NotImplementedError
