"""RLOO with KL control."""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from trl import RLOOTrainer
from trl.trainer.utils import get_config_model_id

from ..control.placements import Batch
from ..control.rollout import Rollout
from .config import KLXRLOOConfig
from .mixin import KLXCoreMixin
from .pull import sum_rewards


if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    # The mixin is only ever combined with this trainer, so it may use the trainer's attributes.
    _Host = RLOOTrainer
else:
    _Host = object


class KLXRLOOMixin(KLXCoreMixin, _Host):
    """KL control for [`~trl.RLOOTrainer`] and its subclasses: `class Mine(KLXRLOOMixin, MyRLOOTrainer)`."""

    _config_class = KLXRLOOConfig

    def _klx_score_batch(self, batch: Batch, rollout: Rollout) -> None:
        assert rollout.policy is not None  # TRL's RLOO always scores the policy
        # TRL keeps only the sum over each sequence.
        batch["klx_old_logps"] = rollout.policy.logps
        super()._klx_score_batch(batch, rollout)

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        rewards: torch.Tensor = super()._calculate_rewards(*args, **kwargs)
        if self._klx_rollout is not None:
            self._klx_rollout.rewards = rewards
        return rewards

    def _klx_given_rewards(self, rewards: torch.Tensor) -> torch.Tensor:
        given = sum_rewards(rewards, self.reward_weights)
        return given.clamp(*self.reward_clip_range) if self.reward_clip_range else given

    def _klx_aggregate(self, per_token_term: torch.Tensor, inputs: Batch) -> torch.Tensor:
        return per_token_term.sum(dim=1).mean()


class KLXRLOOTrainer(KLXRLOOMixin, RLOOTrainer):
    """
    [`~trl.RLOOTrainer`] with KL control; takes the same arguments, with a [`KLXRLOOConfig`] as `args`.

    TRL's RLOO loss is one ratio and one advantage per sequence, so what acts per token is a term next to it:

    - `kl_placement="advantage"`: the clipped per-token surrogate of the adjustment, summed over each sequence. On
      policy its gradient is that of per-token advantages.
    - `kl_placement="reward"`: TRL's own subtraction of the sequence's KL from its reward, with our reference and the
      controller's coefficient as `beta`.
    - `kl_placement="loss"`: a KL term, summed over each sequence.

    One argument is added: `ref_model` (`nn.Module`, *optional*, keyword-only), a model with the policy's vocabulary
    that is the reference. It is frozen. To load one by its path, set `kl_ref_model_path` in the config.
    """

    _tag_names = ["trl", "rloo", "trl-klx"]

    def __init__(
        self,
        model: "str | PreTrainedModel | PeftModel",
        reward_funcs: Any = None,
        args: KLXRLOOConfig | None = None,
        *positional: Any,
        ref_model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        if args is None:
            model_name = model if isinstance(model, str) else get_config_model_id(model.config)
            args = KLXRLOOConfig(f"{model_name.split('/')[-1]}-RLOO")
        super().__init__(model, reward_funcs, args, *positional, ref_model=ref_model, **kwargs)
