"""
KLs to other policies than the reference: to the sampler that drew the tokens, and to the policy that a rollout began
with, which may end the rollout's steps (`kl_update_target`).
"""

from typing import Any

import torch
from torch import nn

from ..control.metrics import Sums
from ..control.other_kls import UpdateLimit, add_sampler_kl, update_kl_sums
from ..control.placements import Batch
from ..control.rollout import Scored
from .forward_passes import ForwardPassMixin


class OtherKLsMixin(ForwardPassMixin):
    """
    Measures the KL to the sampler, and to the policy that a rollout began with, and skips the rollout's steps from the
    limit on.
    """

    _klx_has_dropout: bool
    _klx_update: UpdateLimit
    _klx_window: dict[str, Sums]

    def _klx_measure_sampler(self, batch: Batch) -> None:
        """Log how far the policy is from the sampler that drew the tokens, where TRL has the log-probs of both."""
        if "sampling_per_token_logps" not in batch or "old_per_token_logps" not in batch:
            return
        sampler, policy = batch["sampling_per_token_logps"], batch["old_per_token_logps"]
        window, mask = self._klx_window[self._klx_mode], self._klx_generated(batch)
        largest = add_sampler_kl(window, sampler, policy, mask, self.args.kl_target_unit)
        self._metrics[self._klx_mode]["klx/sampler_max"].append(self.accelerator.gather(largest).max().item())

    def _klx_measure_update(self, inputs: Batch, policy: Scored) -> None:
        """Measure the KL to the rollout's policy, where TRL has its log-probs."""
        old_logps = inputs.get("old_per_token_logps", inputs.get("klx_old_logps"))
        if old_logps is None or self._klx_steps_per_rollout <= 1 or self._klx_has_dropout or self._klx_mode == "eval":
            return  # the policy is still the rollout's, or dropout would be taken for a move
        assert policy.logps is not None
        sums = update_kl_sums(old_logps, policy.logps, self._klx_generated(inputs), self.args.kl_target_unit)
        self._klx_window["train"].add("klx/kl_update", *sums)
        self._klx_update.add(*sums)

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        if self.args.kl_update_target is None:
            return super().training_step(model, inputs, num_items_in_batch)
        if self._step % (self._klx_steps_per_generation * self.num_iterations) == 0:
            self._klx_update.begin()
        if self._klx_update.passed:
            # Without gradients the optimizer leaves weights and moments as they are.
            self._step += 1
            loss = torch.zeros((), device=self.accelerator.device)
        else:
            loss = super().training_step(model, inputs, num_items_in_batch)
        if self.accelerator.sync_gradients:
            if self._klx_update.passes(self._klx_reduce):
                assert self.optimizer is not None
                self.optimizer.zero_grad(set_to_none=True)
            self._metrics["train"]["klx/update_stopped"].append(float(self._klx_update.passed))
        return loss
