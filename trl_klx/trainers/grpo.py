"""GRPO with KL control."""

import torch
from trl import GRPOTrainer
from trl.trainer.utils import get_config_model_id

from ..control.placements import Batch, GRPOReward
from ..maths.losses import grpo_token_weights
from .config import KLXGRPOConfig
from .mixin import KLXCoreMixin


class KLXTrainerMixin(KLXCoreMixin):
    """
    KL control for [`~trl.GRPOTrainer`] and its subclasses: `class Mine(KLXTrainerMixin, MyGRPOTrainer)`.

    It overrides two more methods of TRL's: `_generate`, to see which tokens a tool wrote, and `_calculate_rewards`, to
    keep completions that no reward function could score unscored, both for `kl_placement="reward"`.
    """

    _config_class = KLXGRPOConfig

    def __init__(self, model, reward_funcs=None, args=None, *positional, **kwargs):
        super().__init__(model, reward_funcs, args, *positional, **kwargs)
        if isinstance(self._klx_placement, GRPOReward):
            self._klx_add_reward_func()

    def _klx_aggregate(self, per_token_term: torch.Tensor, inputs: Batch) -> torch.Tensor:
        accumulation, tokens = 1.0, inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes
        if self._klx_mode == "train":
            accumulation = self.current_gradient_accumulation_steps
            tokens = tokens * accumulation / self.args.steps_per_generation
        weights = grpo_token_weights(
            self._klx_generated(inputs), self.loss_type, self.max_completion_length, tokens, accumulation
        )
        return (weights * per_token_term).sum()

    # ---- kl_placement="reward" ----

    def _klx_add_reward_func(self) -> None:
        def kl_penalty(completions, **kwargs) -> list[float]:
            # With a coefficient of 0 TRL does not ask for the reference.
            penalties = self._klx_rollout.penalties
            return [0.0] * len(completions) if penalties is None else (-penalties).tolist()

        # New lists, since TRL keeps those that the user passed.
        self.reward_funcs = [*self.reward_funcs, kl_penalty]
        self.reward_func_names = [*self.reward_func_names, "kl_penalty"]
        self.reward_processing_classes = [*self.reward_processing_classes, None]
        self.reward_weights = torch.cat([self.reward_weights, self.reward_weights.new_ones(1)])

    def _generate(self, *args, **kwargs):
        output = super()._generate(*args, **kwargs)
        if self._klx_rollout is not None:
            self._klx_rollout.tool_masks = output[2]
        return output

    def _calculate_rewards(self, *args, **kwargs):
        rewards = super()._calculate_rewards(*args, **kwargs)
        if self._klx_rollout is not None and self._klx_rollout.penalties is not None:
            # A completion that no reward function could score must stay unscorable.
            unscorable = torch.isnan(rewards[:, :-1]).all(dim=1)
            rewards[:, -1] = rewards[:, -1].masked_fill(unscorable, torch.nan)
        return rewards


class KLXGRPOTrainer(KLXTrainerMixin, GRPOTrainer):
    """
    [`~trl.GRPOTrainer`] with KL control; takes the same arguments, with a [`KLXGRPOConfig`] as `args`.

    - `kl_placement="advantage"`: `advantages` become `(B, T)`, which TRL's losses take as they are.
    - `kl_placement="loss"`: a KL term in the loss, weighted as TRL weighs its tokens.
    - `kl_placement="reward"`: a reward function named `kl_penalty`, so that TRL's own baseline and scaling apply.
    """

    _tag_names = ["trl", "grpo", "trl-klx"]

    def __init__(self, model, reward_funcs=None, args=None, *positional, **kwargs):
        if args is None:
            model_name = model if isinstance(model, str) else get_config_model_id(model.config)
            args = KLXGRPOConfig(f"{model_name.split('/')[-1]}-GRPO")
        super().__init__(model, reward_funcs, args, *positional, **kwargs)
