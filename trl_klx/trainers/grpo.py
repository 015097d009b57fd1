"""GRPO with KL control."""

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from trl import GRPOTrainer
from trl.trainer.utils import get_config_model_id, nanstd

from ..control.placements import Batch, GRPOAdvantage, GRPOReward
from ..control.rollout import Rollout
from ..maths.losses import grpo_token_weights
from .config import KLXConfigMixin, KLXGRPOConfig
from .mixin import KLXCoreMixin
from .pull import sum_rewards


if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    # The mixin is only ever combined with this trainer, so it may use the trainer's attributes.
    _Host = GRPOTrainer
else:
    _Host = object


class KLXTrainerMixin(KLXCoreMixin, _Host):
    """
    KL control for [`~trl.GRPOTrainer`] and its subclasses: `class Mine(KLXTrainerMixin, MyGRPOTrainer)`.

    It overrides two more methods of TRL's, both for `kl_placement="reward"`: `_generate`, to see which tokens a tool
    wrote, and `_calculate_rewards`, so that a completion that no reward function could score stays without a score.
    """

    _config_class = KLXGRPOConfig
    # For a subclass to set if its own loss takes advantages of shape `(B, T)`, as TRL's does.
    takes_token_advantages = False

    def __init__(
        self,
        model: "str | PreTrainedModel | PeftModel",
        reward_funcs: Any = None,
        args: KLXConfigMixin | None = None,
        *positional: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(model, reward_funcs, args, *positional, **kwargs)
        if isinstance(self._klx_placement, GRPOReward):
            self._klx_add_reward_func()
        if isinstance(self._klx_placement, GRPOAdvantage):
            host = self._klx_loss_host
            folds = host is GRPOTrainer or self.takes_token_advantages
            self._klx_placement.folds = folds
            if not folds:
                self._klx_placement.check_apart(self.args, f"The loss of {host.__name__}")

    def _klx_aggregate(self, per_token_term: torch.Tensor, inputs: Batch) -> torch.Tensor:
        accumulation, tokens = 1.0, inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes
        if self._klx_mode == "train":
            accumulation = self.current_gradient_accumulation_steps
            tokens = tokens * accumulation / self._klx_steps_per_generation
        # It may be None, except with "dr_grpo", which divides by it in TRL's loss too.
        length = cast("int", self.max_completion_length)
        weights = grpo_token_weights(self._klx_generated(inputs), self.loss_type, length, tokens, accumulation)
        return (weights * per_token_term).sum()

    # ---- kl_placement="reward" ----

    def _klx_add_reward_func(self) -> None:
        def kl_penalty(completions: list[Any], **kwargs: Any) -> list[float | None]:
            assert self._klx_rollout is not None
            rollout = self._klx_rollout
            # With a coefficient of 0 TRL does not ask for the reference.
            if rollout.charged_kls is None:
                return [0.0] * len(completions)
            kls = torch.where(rollout.charged_kls.isfinite(), rollout.charged_kls, torch.nan)
            return (-rollout.coef * kls).tolist()

        no_tokenizer: Any = None
        # New lists, since TRL keeps those that the user passed.
        self.reward_funcs = [*self.reward_funcs, kl_penalty]
        self.reward_func_names = [*self.reward_func_names, "kl_penalty"]
        self.reward_processing_classes = [*self.reward_processing_classes, no_tokenizer]
        self.reward_weights = torch.cat([self.reward_weights, self.reward_weights.new_ones(1)])

    def _generate(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        output: tuple[Any, ...] = super()._generate(*args, **kwargs)
        if self._klx_rollout is not None:
            rollout = self._klx_rollout
            rollout.prompt_ids, rollout.completion_ids, rollout.tool_masks = output[:3]
        return output

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        rewards: torch.Tensor = super()._calculate_rewards(*args, **kwargs)
        if self._klx_rollout is not None and self._klx_rollout.charged_kls is not None:
            # A completion that no reward function could score must stay unscorable, and one whose KL could not be
            # measured must not get away without a penalty.
            unscorable = torch.isnan(rewards[:, :-1]).all(dim=1) | torch.isnan(rewards[:, -1])
            self._klx_rollout.rewards = rewards[:, :-1].clone()
            rewards[unscorable] = torch.nan
        return rewards

    def _klx_score_batch(self, batch: Batch, rollout: Rollout) -> None:
        if rollout.rewards is not None and isinstance(self._klx_placement, GRPOReward):
            self._klx_log_given_rewards(self._klx_given_rewards(rollout.rewards))
        super()._klx_score_batch(batch, rollout)

    def _klx_given_rewards(self, rewards: torch.Tensor) -> torch.Tensor:
        return sum_rewards(rewards, self.reward_weights[:-1])  # the last one is that of the penalty

    def _klx_log_given_rewards(self, given: torch.Tensor) -> None:
        """
        Log the reward without the penalty, as in the other placements. With it, `metric_for_best_model="eval_reward"`
        would choose the checkpoint that stayed near the reference.
        """
        mean, std = torch.stack([given.nanmean(), nanstd(given)]).tolist()
        for name, value in (("reward", mean), ("reward_std", std)):
            self._metrics[self._klx_mode][name][-1] = value


class KLXGRPOTrainer(KLXTrainerMixin, GRPOTrainer):
    """
    [`~trl.GRPOTrainer`] with KL control; takes the same arguments, with a [`KLXGRPOConfig`] as `args`.

    - `kl_placement="advantage"`: `advantages` become `(B, T)`, which TRL's losses take as they are.
    - `kl_placement="loss"`: a KL term in the loss, weighted as TRL weighs its tokens.
    - `kl_placement="reward"`: a reward function named `kl_penalty`, so that TRL's own baseline and scaling apply.

    One argument is added: `ref_model` (`nn.Module`, *optional*, keyword-only), a model with the policy's vocabulary
    that is the reference. It is frozen. To load one by its path, set `kl_ref_model_path` in the config.
    """

    _tag_names = ["trl", "grpo", "trl-klx"]

    def __init__(
        self,
        model: "str | PreTrainedModel | PeftModel",
        reward_funcs: Any = None,
        args: KLXGRPOConfig | None = None,
        *positional: Any,
        ref_model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        if args is None:
            model_name = model if isinstance(model, str) else get_config_model_id(model.config)
            args = KLXGRPOConfig(f"{model_name.split('/')[-1]}-GRPO")
        super().__init__(model, reward_funcs, args, *positional, ref_model=ref_model, **kwargs)
