"""Building PPO's critic, and training it separately from the policy."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from trl.trainer.utils import disable_dropout_in_model

from ..references.peft_adapters import causal_lm
from .inputs import split_off
from .policy_layers import copy_top_layers
from .value_function import ValueFunction, ValueHead, ValueModel


if TYPE_CHECKING:
    from transformers import Trainer

    from .config import KLXPPOConfig

    # The mixin is only ever combined with a trainer, so it may use the trainer's attributes.
    _Host = Trainer
else:
    _Host = object


class CriticMixin(_Host):
    """Gives the value function its own learning rate and its own gradient clipping."""

    value_function: ValueFunction
    if TYPE_CHECKING:
        args: KLXPPOConfig

    def _ppo_value_module(self, policy: nn.Module, value_model: nn.Module | None) -> ValueHead | ValueModel:
        if value_model is not None:
            for name in ("num_value_layers", "value_head_detached"):
                if getattr(self.args, name) != self.args._default(name):
                    raise ValueError(
                        f"`{name}={getattr(self.args, name)!r}` has no effect with a `value_model`, which shares "
                        "nothing with the policy. Unset one of them."
                    )
            disable_dropout_in_model(value_model)
            return ValueModel(value_model.to(self.accelerator.device))
        trained = next(parameter for parameter in policy.parameters() if parameter.requires_grad)
        hidden_size = causal_lm(policy).config.get_text_config().hidden_size
        # FSDP requires the same dtype for all parameters that it shards together.
        dtype = trained.dtype if self.is_fsdp_enabled else torch.float32
        # An untrained value function needs no layers.
        layers = copy_top_layers(policy, self.args.num_value_layers if self.args.vf_coef > 0.0 else 0)
        return ValueHead(hidden_size, dtype, trained.device, self.args.seed, layers, self.args.value_head_detached)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        theirs = self.optimizer
        optimizer = super().create_optimizer(*args, **kwargs)
        if theirs is None:
            split_off(optimizer, self.value_function.module, self._ppo_value_learning_rate())
        return optimizer

    def _ppo_value_learning_rate(self) -> float:
        module, rate = self.value_function.module, self.args.value_learning_rate
        if rate is None and isinstance(module, ValueHead) and module.detached:
            # A new head needs a higher rate than a pretrained policy. One Adam step changes a layer's output by about
            # the learning rate times the layer's width.
            rate = max(self.args.learning_rate, min(5e-3, 0.3 / module.inner.in_features))
        return self.args.learning_rate if rate is None else rate

    def _ppo_clip_gradients(
        self, clip: Callable[..., Any], parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2.0
    ) -> Any:
        """
        Clip the policy and the value function by their own norms, so that neither drowns out the other. Returns the
        policy's norm, or that of both if it is not finite, so that the log shows it.
        """
        parameters = list(parameters)
        # DeepSpeed does its own clipping. Elsewhere, with an infinite limit, this only unscales fp16 gradients.
        both = clip(parameters, float("inf"), norm_type)
        if self.is_deepspeed_enabled:
            return both
        value = {id(parameter) for parameter in self.value_function.module.parameters()}
        for part in (
            [parameter for parameter in parameters if id(parameter) in value],
            [parameter for parameter in parameters if id(parameter) not in value],
        ):
            norm = nn.utils.clip_grad_norm_(part, max_norm, norm_type)
        norm, both = (part.full_tensor() if hasattr(part, "full_tensor") else part for part in (norm, both))
        return torch.where(both.isfinite(), norm, both)
