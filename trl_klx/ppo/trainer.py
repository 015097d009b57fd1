"""PPO on today's TRL, with KL control."""

import functools
import textwrap
import warnings
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather, is_peft_model
from torch import nn
from trl.trainer.utils import get_config_model_id

from ..checkpoints.integrity import check_checkpoints
from ..control.forward_pass import narrow_tiles
from ..control.placements import Batch
from ..control.rollout import Rollout, Scored
from ..maths.advantages import masked_moments, sequence_means
from ..maths.gae import clipped_value_loss, compute_gae, shape_rewards
from ..trainers.grpo import KLXGRPOTrainer
from .checkpoint import PPOCheckpointMixin
from .completion_scores import ScoringMixin
from .config import KLXPPOConfig
from .critic import CriticMixin
from .inputs import (
    activate_adapter,
    check_prompts,
    collect_rewards,
    train_with_optimizer,
    used_ref_model,
    with_prompts,
)
from .padding import mask_padding, skip_padding_in_other_models, skip_padding_in_policy
from .policy_layers import freeze_bottom_layers
from .pull import PPOPullMixin
from .reward_scaling import RewardScaler
from .trl112_methods import TRL112Methods
from .value_function import ValueFunction, ValueHead, call_without_value


class KLXPPOTrainer(PPOCheckpointMixin, CriticMixin, PPOPullMixin, ScoringMixin, TRL112Methods, KLXGRPOTrainer):
    """
    Proximal Policy Optimization on TRL's GRPO machinery: text and conversational prompts, reward functions and reward
    models, PEFT, tools, vLLM and continuous batching as in [`~trl.GRPOTrainer`], with a value function, generalized
    advantage estimation and the KL control of this package.

    The positional arguments are those of TRL 1.12's `PPOTrainer`, in the same order. `reward_funcs` and all other
    arguments of [`~trl.GRPOTrainer`] are keyword-only.

    Args:
        args ([`KLXPPOConfig`], *optional*):
            Config.
        processing_class ([`~transformers.PreTrainedTokenizerBase`] or [`~transformers.ProcessorMixin`], *optional*):
            Tokenizer or processor of the policy.
        model (`str` or [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`], *optional*):
            Policy. If unset, `args.sft_model_path`.
        ref_model ([`~transformers.PreTrainedModel`], *optional*):
            Reference. If unset, the config chooses it: by default the initial policy, or the base model under PEFT.
        reward_model (`str` or [`~transformers.PreTrainedModel`], *optional*):
            Reward model, added to `reward_funcs`. A model object reads the token ids of the rollout, so it must share
            the policy's tokenizer; otherwise pass it in `reward_funcs`, and its tokenizer in
            `reward_processing_classes`. A model loaded from a path has its own tokenizer and reads the text.
        train_dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`], *optional*):
            Dataset with a `prompt` column, or with tokenized prompts in `input_ids`.
        value_model ([`~transformers.PreTrainedModel`], *optional*):
            Sequence-classification model with one label. If unset, the value function is a head on the policy's
            backbone.
        data_collator (*optional*):
            Not used: the trainer pads the prompts.
        eval_dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`] or `dict`, *optional*):
            Dataset for evaluation.
        optimizers (`tuple`, *optional*, defaults to `(None, None)`):
            Optimizer and scheduler.
        callbacks (`list` of [`~transformers.TrainerCallback`], *optional*):
            Callbacks.
        peft_config ([`~peft.PeftConfig`], *optional*):
            PEFT configuration of the policy.
        reward_funcs (*optional*):
            Reward functions and reward models, as in [`~trl.GRPOTrainer`].
        kwargs:
            Further arguments of [`~trl.GRPOTrainer`].
    """

    _tag_names = ["trl", "ppo", "trl-klx"]
    _name = "PPO"
    _paper = {
        "title": "Proximal Policy Optimization Algorithms",
        "id": "1707.06347",
        # docstyle-ignore
        "citation": textwrap.dedent("""\
            @article{schulman2017proximal,
                title        = {{Proximal Policy Optimization Algorithms}},
                author       = {John Schulman and Filip Wolski and Prafulla Dhariwal and Alec Radford and Oleg Klimov},
                year         = 2017,
                eprint       = {arXiv:1707.06347}
            }"""),
    }
    _config_class: type[KLXPPOConfig] = KLXPPOConfig
    if TYPE_CHECKING:
        args: KLXPPOConfig
        value_function: ValueFunction
        reward_funcs: Any
        reward_func_names: Any
        reward_processing_classes: Any
        reward_weights: Any
        _logs: Any
        _metrics: Any
    # PPO processes every batch, even if the KL is not measured.
    _klx_active = True

    def __init__(
        self,
        args: KLXPPOConfig | None = None,
        processing_class: Any = None,
        model: Any = None,
        ref_model: nn.Module | None = None,
        reward_model: Any = None,
        train_dataset: Any = None,
        value_model: nn.Module | None = None,
        data_collator: Any = None,
        eval_dataset: Any = None,
        optimizers: Any = (None, None),
        callbacks: Any = None,
        peft_config: Any = None,
        *,
        reward_funcs: Any = None,
        reward_processing_classes: Any = None,
        **kwargs: Any,
    ):
        if args is not None and not isinstance(args, KLXPPOConfig):
            raise TypeError(f"`args` must be a `KLXPPOConfig`, got `{type(args).__name__}`.")
        model = (args.sft_model_path if args is not None else None) if model is None else model
        if model is None:
            raise ValueError("`model` is required. Pass a policy, or set `sft_model_path` in the config.")
        if args is None:
            model_name = model if isinstance(model, str) else get_config_model_id(model.config)
            args = KLXPPOConfig(f"{model_name.split('/')[-1]}-PPO")
        if data_collator is not None:
            warnings.warn("`data_collator` is not used: the trainer pads the prompts itself.", stacklevel=2)
        ref_model = used_ref_model(args, ref_model)
        reward_funcs, reward_processing_classes = collect_rewards(
            args,
            reward_model,
            reward_funcs,
            reward_processing_classes,
            processing_class,
            value_model,
            lambda: self._klx_rollout,
        )
        activate_adapter(model, peft_config, args.model_adapter_name)
        parent: Any = super()
        parent.__init__(
            model,
            reward_funcs,
            args,
            train_dataset=with_prompts(train_dataset, processing_class, args.dataset_num_proc),
            eval_dataset=with_prompts(eval_dataset, processing_class, args.dataset_num_proc),
            processing_class=processing_class,
            reward_processing_classes=reward_processing_classes,
            callbacks=callbacks,
            optimizers=optimizers,
            peft_config=peft_config,
            ref_model=ref_model,
            **kwargs,
        )
        check_prompts(self.args, self.train_dataset)
        if not self.args.kl_enabled:
            check_checkpoints(self.args)
        policy = self.accelerator.unwrap_model(self.model)
        skip_padding_in_other_models(self, value_model)
        self.value_function = ValueFunction(policy, self._ppo_value_module(policy, value_model))
        if self.optimizer is not None:
            rate = self.args.value_learning_rate
            train_with_optimizer(self.optimizer, self.lr_scheduler, self.value_function.module, rate)
        self._ppo_scaler = RewardScaler(self.args.reward_scaling, self.args.cliprange_reward)
        self._ppo_stop_at_strings(policy)
        accelerator: Any = self.accelerator
        accelerator.clip_grad_norm_ = functools.partial(self._ppo_clip_gradients, accelerator.clip_grad_norm_)
        if self.use_vllm:
            # TRL sends vLLM every parameter of the policy, and vLLM has no place for a value function.
            engine: Any = self.vllm_generation
            engine.sync_weights = functools.partial(call_without_value, policy, engine.sync_weights)

    # ---- Construction ----

    def _klx_prepare_policy(self, policy: nn.Module) -> None:
        self._ppo_stop_at_token()  # before KL control reads which tokens end a completion
        self._ppo_masks_padding = skip_padding_in_policy(policy, self._tokenizer.pad_token_id)
        if self.args.num_layers_unfrozen is None:
            return
        if is_peft_model(policy):
            raise ValueError(
                f"`num_layers_unfrozen={self.args.num_layers_unfrozen}` cannot be used with PEFT, which already "
                "freezes the base model. Set `layers_to_transform` in the `LoraConfig` instead."
            )
        freeze_bottom_layers(policy, self.args.num_layers_unfrozen)

    # ---- Forward passes ----

    def _klx_forward(
        self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], check: bool = True
    ) -> tuple[Any, Scored]:
        args = mask_padding(*args) if self._ppo_masks_padding else args
        if not torch.is_grad_enabled() and self.args.local_rollout_forward_batch_size is not None:
            kwargs = kwargs | {"batch_size": self.args.local_rollout_forward_batch_size}
        with narrow_tiles(self.accelerator.device), self.value_function.recording(logits_to_keep=args[2]) as values:
            output, scored = super()._klx_forward(model, args, kwargs, check)
        if not values:
            raise ValueError(
                "The value function got no forward pass, because TRL did not call the policy as a whole. TRL before "
                "1.15 does this with `use_liger_kernel=True`: set it to False."
            )
        scored.values = torch.cat(values)  # (B, T)
        return output, scored

    def _klx_forward_arguments(self, batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = super()._klx_forward_arguments(batch)
        args = mask_padding(*args) if self._ppo_masks_padding else args
        size = self.args.local_rollout_forward_batch_size
        return args, kwargs if size is None else kwargs | {"batch_size": size}

    # ---- One rollout ----

    @property
    def _ppo_in_one_pass(self) -> bool:
        """
        Whether the whole rollout goes through the loss at once and only once. That forward pass then provides the old
        log-probs, the values and the KL, which would otherwise be computed at generation.
        """
        return self._klx_mode == "eval" or self.args.in_one_pass

    def _generate_and_score_completions(self, inputs: Any) -> Batch:
        if self._klx_mode == "train":
            self.value_function.scale.advance()
        parent: Any = super()
        batch: Batch = parent._generate_and_score_completions(inputs)
        return batch

    def _klx_score_batch(self, batch: Batch, rollout: Rollout) -> None:
        if rollout.policy is None and not self._ppo_in_one_pass:
            rollout.policy = rollout.clean = self._klx_score_policy(*self._klx_forward_arguments(batch))
        assert rollout.rewards is not None
        scores, scorable = self._ppo_score(batch, rollout.rewards)
        # TRL shuffles the batch before the loss, so each completion keeps its row number.
        rows = torch.arange(len(scores), device=scores.device)
        batch |= {"ppo_scores": scores, "ppo_scorable": scorable, "ppo_rows": rows}
        super()._klx_score_batch(batch, rollout)
        if rollout.policy is not None:
            assert rollout.policy.values is not None
            self._ppo_estimate(batch, rollout.policy.values)

    @torch.no_grad()
    def _ppo_estimate(self, batch: Batch, values: torch.Tensor) -> None:
        """Add a rollout's rewards, advantages and returns to the batch and the metrics."""
        mode, args = self._klx_mode, self.args
        scores, scorable, rows = batch.pop("ppo_scores"), batch.pop("ppo_scorable"), batch.pop("ppo_rows")
        mask = self._klx_generated(batch) & scorable.unsqueeze(1)
        penalty = batch.pop("klx_penalty", torch.zeros_like(values))
        expected = batch.pop("klx_expected", penalty)
        non_score = -(penalty * mask).sum(1)
        if args.whiten_rewards:
            expected = penalty  # rewards are whitened as they were sampled
        rewards = shape_rewards(scores, expected, mask, 1.0)  # (B, T)
        if args.whiten_rewards:
            rewards = self._ppo_whiten(rewards, mask, shift_mean=False)
        advantages, returns = compute_gae(rewards, values, mask, args.gamma, args.lam)
        advantages = advantages + (expected - penalty) * mask  # each token pays for itself what was sampled
        if args.whiten_advantages:
            advantages = self._ppo_whiten(advantages, mask)
        if "klx_adjustment" in batch:
            advantages = advantages + batch.pop("klx_adjustment") * mask
        batch |= {"advantages": advantages, "ppo_values": values, "ppo_returns": returns, "ppo_mask": mask}
        window, count = self._klx_window[mode], scorable.sum()
        window.add("ppo/score", (scores * scorable).sum(), count)
        window.add("ppo/non_score_reward", (non_score * scorable).sum(), count)
        moments = masked_moments(returns, mask)
        window.add("ppo/explained_variance", *moments, *masked_moments(returns - values, mask))
        if mode == "train" and isinstance(self.value_function.module, ValueHead):
            self.value_function.scale.observe(self._klx_reduce(moments))
        self._ppo_correct_logs(mode, sequence_means(advantages, mask).squeeze(1)[rows.argsort()])

    def _ppo_correct_logs(self, mode: str, advantages: torch.Tensor) -> None:
        """Replace the group advantages in TRL's logs by PPO's, averaged over each completion."""
        # The fraction of groups without spread means nothing in PPO.
        self._metrics[mode].pop("frac_reward_zero_std", None)
        if self.log_completions:
            means = gather(advantages).tolist()
            logged = self._logs["advantages"]
            for _ in range(min(len(means), len(logged))):
                logged.pop()
            logged.extend(means)

    # ---- Loss ----

    def _klx_before_advantages(self, inputs: Batch, policy: Scored) -> None:
        assert policy.values is not None
        in_one_pass = "ppo_mask" not in inputs
        rollout = self._klx_rollouts[self._klx_mode]
        if in_one_pass:
            rollout.policy = policy.detach()  # the controller is shown its values
        super()._klx_before_advantages(inputs, policy)
        rollout.forget_passes()
        if in_one_pass:
            self._ppo_estimate(inputs, policy.values.detach())
        elif "klx_adjustment" in inputs:
            inputs["advantages"] = inputs["advantages"] + inputs.pop("klx_adjustment") * inputs["ppo_mask"]

    def _klx_after_loss(self, loss: torch.Tensor, inputs: Batch, policy: Scored) -> torch.Tensor:
        loss = super()._klx_after_loss(loss, inputs, policy)
        assert policy.values is not None
        mode, mask = self._klx_mode, inputs["ppo_mask"]
        scale = self.value_function.scale.std
        value_loss, clipped = clipped_value_loss(
            policy.values / scale,
            inputs["ppo_values"] / scale,
            inputs["ppo_returns"] / scale,
            mask,
            self.args.cliprange_value,
        )
        tokens = mask.sum()
        # All tokens of an optimizer step have the same weight, whatever their micro-batch and process: the mean over
        # this micro-batch is weighted by its share of the step's tokens.
        normalizer = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes
        steps = 1.0
        if mode == "train":
            steps = self.current_gradient_accumulation_steps
            normalizer = normalizer * steps / self.args.steps_per_generation
        window = self._klx_window[mode]
        window.add("ppo/policy_loss", loss * steps, torch.ones_like(tokens))
        window.add("ppo/value_loss", value_loss * tokens, tokens)
        window.add("ppo/value_clip_ratio", clipped * tokens, tokens)
        total: torch.Tensor = loss + self.args.vf_coef * value_loss * tokens / normalizer
        return total
