"""GRPO with KL control."""

from contextlib import nullcontext

import torch
from trl import GRPOTrainer
from trl.trainer.utils import get_config_model_id

from ..maths.estimators import sum_kl_per_sequence
from .config import KLXGRPOConfig
from .mixin import KLXTrainerMixin


class KLXGRPOTrainer(KLXTrainerMixin, GRPOTrainer):
    """
    [`~trl.GRPOTrainer`] with KL control; takes the same arguments, with a [`KLXGRPOConfig`] as `args`.

    - `kl_placement="advantage"`: `advantages` become `(B, T)`, which every `loss_type` of TRL takes as they are.
    - `kl_placement="loss"`: TRL's own KL term, with our reference and the controller's coefficient as `beta`.
    - `kl_placement="reward"`: a reward function named `kl_penalty`, so that TRL's own baseline and scaling apply.
    """

    _tag_names = ["trl", "grpo", "trl-klx"]
    _config_class = KLXGRPOConfig
    _klx_host_placements = ("loss", "reward")
    # Set for `kl_placement="reward"` only: the penalty of each completion of the batch that is being generated.
    _klx_penalties: torch.Tensor | None = None
    _klx_tool_masks: list[list[int]] | None = None

    def __init__(self, model, reward_funcs=None, args=None, *positional, **kwargs):
        if args is None:
            model_name = model if isinstance(model, str) else get_config_model_id(model.config)
            args = KLXGRPOConfig(f"{model_name.split('/')[-1]}-GRPO")
        super().__init__(model, reward_funcs, args, *positional, **kwargs)
        if self.args.kl_penalty_enabled and self.args.kl_placement == "reward":
            self._klx_add_reward_func()

    # ---- kl_placement="advantage" ----

    def _klx_apply(self, batch: dict, adjustment: torch.Tensor) -> None:
        batch["advantages"] = batch["advantages"].unsqueeze(1) + adjustment  # (B, T)

    # ---- kl_placement="loss", and any KL that is measured in the loss ----

    def _klx_answer_host(self, args: tuple, kwargs: dict) -> torch.Tensor:
        rollout = self._klx_rollouts[self._klx_mode]
        rollout.reference = self._klx_score_reference(args, kwargs)
        if self._klx_penalises == "reward":
            # TRL computes the advantages before the loss, so the penalty cannot wait for the loss's forward.
            if rollout.policy is None:
                rollout.policy = self._klx_score_policy(args, kwargs)
            per_token_kl = self._klx_per_token_kl(rollout.policy, rollout.reference)[0]
            mask = self._klx_generation_mask(attention_mask=args[1], logits_to_keep=args[2])
            self._klx_penalties = rollout.coef * sum_kl_per_sequence(per_token_kl, mask)
        return rollout.reference.logps

    def _compute_loss(self, model, inputs):
        inputs = dict(inputs)  # TRL may use the buffered batch again, with its own advantages
        host_term = nullcontext()
        if self._klx_penalises == "loss":
            host_term = self._klx_host_term(self._klx_rollouts[self._klx_mode].coef)
        with self._klx_tapped(lambda scored: self._klx_measure_in_loss(inputs, scored)), host_term:
            return super()._compute_loss(model, inputs)

    # ---- kl_placement="reward" ----

    def _klx_add_reward_func(self) -> None:
        def kl_penalty(completions, **kwargs) -> list[float]:
            # With a coefficient of 0 TRL does not ask for the reference.
            return [0.0] * len(completions) if self._klx_penalties is None else (-self._klx_penalties).tolist()

        # New lists, since TRL keeps those that the user passed.
        self.reward_funcs = [*self.reward_funcs, kl_penalty]
        self.reward_func_names = [*self.reward_func_names, "kl_penalty"]
        self.reward_processing_classes = [*self.reward_processing_classes, None]
        self.reward_weights = torch.cat([self.reward_weights, self.reward_weights.new_ones(1)])

    def _generate(self, *args, **kwargs):
        output = super()._generate(*args, **kwargs)
        self._klx_tool_masks = output[2]
        return output

    def _klx_generation_mask(self, attention_mask: torch.Tensor, logits_to_keep: int) -> torch.Tensor:
        """The mask of the batch that is being generated, before TRL has put it together."""
        mask = attention_mask[:, -logits_to_keep:].clone()
        for row, tool_mask in zip(mask, self._klx_tool_masks or [], strict=bool(self._klx_tool_masks)):
            row[: len(tool_mask)] *= torch.tensor(tool_mask, device=mask.device, dtype=mask.dtype)
        return mask

    def _calculate_rewards(self, *args, **kwargs):
        rewards = super()._calculate_rewards(*args, **kwargs)
        if self._klx_penalties is not None:
            # A completion that no reward function could score must stay unscorable.
            unscorable = torch.isnan(rewards[:, :-1]).all(dim=1)
            rewards[:, -1] = rewards[:, -1].masked_fill(unscorable, torch.nan)
            self._klx_penalties = None
        return rewards
