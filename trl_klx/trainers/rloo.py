"""RLOO with KL control."""

import torch
from trl import RLOOTrainer
from trl.trainer.utils import get_config_model_id

from ..control.logps import Scored
from ..maths.estimators import estimate_kl, sum_kl_per_sequence
from ..maths.losses import clipped_surrogate
from .config import KLXRLOOConfig
from .mixin import KLXTrainerMixin


class KLXRLOOTrainer(KLXTrainerMixin, RLOOTrainer):
    """
    [`~trl.RLOOTrainer`] with KL control; takes the same arguments, with a [`KLXRLOOConfig`] as `args`.

    TRL's RLOO loss is one ratio and one advantage per sequence, so what acts per token is a term of its own beside it:

    - `kl_placement="advantage"`: the clipped per-token surrogate of the adjustment, summed over each sequence. On policy
      its gradient is that of per-token advantages.
    - `kl_placement="reward"`: TRL's own subtraction of the sequence's KL from its reward, with our reference and the
      controller's coefficient as `beta`.
    - `kl_placement="loss"`: `coef * k3`, summed over each sequence.
    """

    _tag_names = ["trl", "rloo", "trl-klx"]
    _config_class = KLXRLOOConfig
    _klx_host_placements = ("reward",)

    def __init__(self, model, reward_funcs=None, args=None, *positional, **kwargs):
        if args is None:
            model_name = model if isinstance(model, str) else get_config_model_id(model.config)
            args = KLXRLOOConfig(f"{model_name.split('/')[-1]}-RLOO")
        super().__init__(model, reward_funcs, args, *positional, **kwargs)

    def _klx_answer_host(self, args: tuple, kwargs: dict) -> torch.Tensor:
        rollout = self._klx_rollouts[self._klx_mode]
        rollout.reference = self._klx_score_reference(args, kwargs)
        # TRL subtracts `beta` times the sum of policy minus reference, so this makes it subtract any estimator.
        per_token_kl = self._klx_per_token_kl(rollout.policy, rollout.reference)[0]
        return rollout.policy.logps - per_token_kl

    def _klx_score_batch(self, batch: dict, rollout) -> None:
        # TRL keeps only the sum over each sequence.
        if self._klx_penalises == "advantage":
            batch["klx_old_logps"] = rollout.policy.logps
        super()._klx_score_batch(batch, rollout)
        if self._klx_penalises == "loss":
            batch["klx_loss_ref_logps"] = rollout.reference.logps

    def _klx_apply(self, batch: dict, adjustment: torch.Tensor) -> None:
        batch["klx_adjustment"] = adjustment  # (B, T)

    def _compute_loss(self, model, inputs):
        if self.kl_reference is None:
            return super()._compute_loss(model, inputs)
        inputs = dict(inputs)
        forwards: list[Scored] = []

        def tap(scored: Scored) -> None:
            forwards.append(scored)
            self._klx_measure_in_loss(inputs, scored)

        with self._klx_tapped(tap):
            loss = super()._compute_loss(model, inputs)
        mask, logps = self._klx_mask(inputs), forwards[0].logps
        if "klx_adjustment" in inputs:
            surrogate = clipped_surrogate(
                logps, inputs["klx_old_logps"], inputs["klx_adjustment"], self.epsilon_low, self.epsilon_high
            )
            loss = loss - sum_kl_per_sequence(surrogate, mask).mean()
        if "klx_loss_ref_logps" in inputs:
            coef = self._klx_rollouts[self._klx_mode].coef
            per_token_kl = estimate_kl(logps, inputs["klx_loss_ref_logps"], "k3")
            loss = loss + coef * sum_kl_per_sequence(per_token_kl, mask).mean()
        return loss
