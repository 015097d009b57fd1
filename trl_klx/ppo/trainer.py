"""PPO on TRL's present stack, with KL control."""

import functools
import os
import textwrap
import warnings
from collections.abc import Callable

import torch
from accelerate.utils import gather, is_peft_model
from datasets import Dataset
from torch import nn
from trl.trainer.utils import disable_dropout_in_model, get_config_model_id

from ..checkpoints.integrity import check_checkpoints
from ..control.logps import Scored, causal_lm, narrow_tiles
from ..maths.advantages import masked_moments, sequence_means, whiten_with_moments
from ..maths.gae import clipped_value_loss, compute_gae, shape_rewards
from ..references.peft_io import adapter_tensors, hash_tensors, trained_adapter
from ..references.resolution import AdapterReference, KLReference, ModelReference, add_trl_lm_head, fingerprint
from ..trainers.grpo import KLXGRPOTrainer
from .checkpoint import PPOCheckpointMixin
from .config import KLXPPOConfig
from .inputs import (
    activate_adapter,
    check_prompts,
    check_ref_model,
    collect_rewards,
    split_off,
    train_with_optimizer,
    with_prompts,
)
from .metrics import PPOMetrics
from .reward_scaling import RewardScaler
from .stop_strings import generate_until, holds_text
from .value_function import (
    ValueFunction,
    ValueHead,
    ValueModel,
    call_without_value,
    copy_top_layers,
    freeze_bottom_layers,
)


class KLXPPOTrainer(PPOCheckpointMixin, KLXGRPOTrainer):
    """
    Proximal Policy Optimization on TRL's GRPO machinery: text and conversational prompts, reward functions and reward
    models, PEFT, tools, vLLM and continuous batching as in [`~trl.GRPOTrainer`], with a value function, generalized
    advantage estimation and the KL control of this package.

    The first arguments are those of TRL 1.12's `PPOTrainer`, in its order; `reward_funcs` and all other arguments of
    [`~trl.GRPOTrainer`] are taken by keyword.

    Args:
        args ([`KLXPPOConfig`], *optional*):
            Config.
        processing_class ([`~transformers.PreTrainedTokenizerBase`] or [`~transformers.ProcessorMixin`], *optional*):
            Tokenizer or processor of the policy.
        model (`str` or [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`], *optional*):
            Policy. If unset, `args.sft_model_path`.
        ref_model ([`~transformers.PreTrainedModel`], *optional*):
            Reference. If unset, the one that the config asks for: by default the initial policy, or the base model under
            PEFT.
        reward_model (`str` or [`~transformers.PreTrainedModel`], *optional*):
            Reward model; the same as one more entry of `reward_funcs`. Tokenized as the policy is.
        train_dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`], *optional*):
            Dataset with a `prompt` column, or with tokenized prompts in `input_ids`.
        value_model ([`~transformers.PreTrainedModel`], *optional*):
            Sequence-classification model with one label. If unset, the value function is a head on the policy's backbone.
        data_collator (*optional*):
            Not used: prompts are padded by the trainer.
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
    _config_class = KLXPPOConfig
    _klx_host_placements = ("loss",)
    _ppo_scores_reference = False
    # The micro-batch whose loss is being computed, with what was estimated of it.
    _ppo_batch: dict | None = None

    def __init__(
        self,
        args: KLXPPOConfig | None = None,
        processing_class=None,
        model=None,
        ref_model: nn.Module | None = None,
        reward_model=None,
        train_dataset=None,
        value_model: nn.Module | None = None,
        data_collator=None,
        eval_dataset=None,
        optimizers=(None, None),
        callbacks=None,
        peft_config=None,
        *,
        reward_funcs=None,
        reward_processing_classes=None,
        **kwargs,
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
        check_ref_model(args, model, ref_model)
        self._ppo_ref_model = ref_model
        reward_funcs, reward_processing_classes = collect_rewards(
            args, reward_model, reward_funcs, reward_processing_classes, processing_class, value_model
        )
        activate_adapter(model, peft_config, args.model_adapter_name)
        super().__init__(
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
            **kwargs,
        )
        check_prompts(self.args, self.train_dataset)
        if not self.args.kl_enabled:
            check_checkpoints(self.args)
        policy = self.accelerator.unwrap_model(self.model)
        self.value_function = ValueFunction(policy, self._ppo_value_module(policy, value_model))
        if self.optimizer is not None:
            rate = self.args.value_learning_rate
            train_with_optimizer(self.optimizer, self.lr_scheduler, self.value_function.module, rate)
        self._ppo_scaler = RewardScaler(self.args.reward_scaling, self.args.cliprange_reward)
        self._ppo_metrics = {"train": PPOMetrics(), "eval": PPOMetrics()}
        self._ppo_stop_at(policy)
        self.accelerator.clip_grad_norm_ = functools.partial(
            self._ppo_clip_gradients, self.accelerator.clip_grad_norm_
        )
        if self.use_vllm:
            # vLLM is sent every parameter of the policy, and has no place for a value function.
            sync_weights = self.vllm_generation.sync_weights
            self.vllm_generation.sync_weights = functools.partial(call_without_value, policy, sync_weights)

    # ---- Construction ----

    def _ppo_value_module(self, policy: nn.Module, value_model: nn.Module | None) -> nn.Module:
        if value_model is not None:
            for name in ("num_value_layers", "value_head_detached"):
                if getattr(self.args, name) != self.args._default(name):
                    raise ValueError(
                        f"`{name}={getattr(self.args, name)!r}` has no effect with a `value_model`, which shares nothing "
                        "with the policy. Unset one of them."
                    )
            disable_dropout_in_model(value_model)
            return ValueModel(value_model.to(self.accelerator.device))
        trained = next(parameter for parameter in policy.parameters() if parameter.requires_grad)
        hidden_size = causal_lm(policy).config.get_text_config().hidden_size
        # FSDP wants the parameters that it shards together to be of one type.
        dtype = trained.dtype if self.is_fsdp_enabled else torch.float32
        layers = copy_top_layers(policy, self.args.num_value_layers)
        return ValueHead(hidden_size, dtype, trained.device, self.args.seed, layers, self.args.value_head_detached)

    def _klx_prepare_policy(self, policy: nn.Module) -> None:
        if self.args.num_layers_unfrozen is None:
            return
        if is_peft_model(policy):
            raise ValueError(
                f"`num_layers_unfrozen={self.args.num_layers_unfrozen}` cannot be used with PEFT, which freezes the base "
                "model already. Set `layers_to_transform` of the `LoraConfig` instead."
            )
        freeze_bottom_layers(policy, self.args.num_layers_unfrozen)

    def _klx_build_reference(self, policy: nn.Module) -> KLReference:
        name = self.args.ref_adapter_name
        if name is not None:
            if not is_peft_model(policy) or name not in policy.peft_config:
                known = list(policy.peft_config) if is_peft_model(policy) else []
                raise ValueError(
                    f"`ref_adapter_name={name!r}` is not an adapter of the policy, which has {known}. Load it into the "
                    "policy, or give its folder as `kl_ref_adapter_path`."
                )
            if name == trained_adapter(policy):
                raise ValueError(
                    f"`ref_adapter_name={name!r}` is the adapter that is trained: the KL would always be 0. Set "
                    "`model_adapter_name` to the one to train, or choose another reference."
                )
            identity = {"kind": "adapter", "path": name, "hash": hash_tensors(adapter_tensors(policy, name))}
            return AdapterReference(policy, name, identity)
        if self._ppo_ref_model is None:
            return super()._klx_build_reference(policy)
        model = self._ppo_ref_model.requires_grad_(False).eval()
        add_trl_lm_head(causal_lm(model), self.temperature, self.args.cast_lm_head_to_fp32)
        return ModelReference(policy, model, {"kind": "model", "hash": fingerprint(model)}, self.accelerator)

    def _klx_add_reward_func(self) -> None:
        """PPO's penalty is a reward per token, not one more reward function."""

    def _ppo_stop_at(self, policy: nn.Module) -> None:
        """Let a token or a text of the user's end a completion, beside EOS."""
        stop = self.args.stop_token_id
        if stop is not None and stop not in self.eos_token_ids:
            # Not in place: the list may be that of the policy's own generation config.
            self.eos_token_ids = [*self.eos_token_ids, stop]
            self.generation_config.eos_token_id = self.generation_kwargs["eos_token_id"] = self.eos_token_ids
        if self.args.stop_strings:
            policy.generate = functools.partial(
                generate_until, policy.generate, self._tokenizer, self.args.stop_strings
            )

    # ---- Generation ----

    def _generate_single_turn(self, *args, **kwargs):
        completion_ids, *others = super()._generate_single_turn(*args, **kwargs)
        if self.args.stop_strings:
            # TRL ends a completion at EOS. After a text, `generate` goes on with padding up to the longest completion.
            completion_ids = [self._ppo_unpadded(ids) for ids in completion_ids]
        return completion_ids, *others

    def _ppo_unpadded(self, ids: list[int]) -> list[int]:
        end = len(ids)
        while end > 1 and ids[end - 1] == self._tokenizer.pad_token_id:
            end -= 1
        return ids[:end] if holds_text(self._tokenizer, self.args.stop_strings, ids[:end]) else ids

    # ---- Forward passes ----

    def _klx_forward(self, model, args: tuple, kwargs: dict, check: bool = True) -> tuple[tuple, Scored]:
        if not torch.is_grad_enabled() and self.args.local_rollout_forward_batch_size is not None:
            kwargs = kwargs | {"batch_size": self.args.local_rollout_forward_batch_size}
        if self._ppo_scores_reference:
            return super()._klx_forward(model, args, kwargs, check)
        tiles = narrow_tiles(self.accelerator.device)
        with tiles, self.value_function.recording(logits_to_keep=args[2]) as values:
            output = super()._klx_forward(model, args, kwargs, check)
            if not values:
                raise ValueError(
                    "The policy was not called as a whole, so that there are no values. TRL before 1.15 does so with "
                    "`use_liger_kernel=True`: set it to False."
                )
            self._ppo_values = torch.cat(values)  # (B, T)
        return output

    def _klx_score_reference(self, args: tuple, kwargs: dict, logps: bool = True) -> Scored:
        self._ppo_scores_reference = True
        try:
            return super()._klx_score_reference(args, kwargs, logps)
        finally:
            self._ppo_scores_reference = False

    # ---- One rollout ----

    def _calculate_rewards(self, *args, **kwargs):
        rewards = super()._calculate_rewards(*args, **kwargs)  # of all processes
        infinite = rewards.isinf()
        self._ppo_metrics[self._klx_mode].add_mean("infinite_rewards", infinite.sum(), infinite.new_ones(()))
        # One step on an infinite reward would leave no weight finite.
        self._ppo_rewards_per_func = rewards.masked_fill(infinite, torch.nan)
        return self._ppo_rewards_per_func

    @property
    def _ppo_in_one_pass(self) -> bool:
        """
        Whether the whole rollout goes through the loss at once and only once. Its forward then gives what would have to be
        scored at generation otherwise: old log-probs, values, and the KL.
        """
        return self._klx_mode == "eval" or self.args.in_one_pass

    def _klx_score_batch(self, batch: dict, rollout) -> None:
        if rollout.policy is None and not self._ppo_in_one_pass:
            rollout.policy = self._klx_score_policy(*self._klx_forward_arguments(batch))
        super()._klx_score_batch(batch, rollout)

    def _klx_penalise(self, batch: dict, per_token_kl: torch.Tensor, mask: torch.Tensor, coef: float):
        if self._klx_penalises == "reward":
            batch["klx_per_token_kl"] = coef * per_token_kl
        return super()._klx_penalise(batch, per_token_kl, mask, coef)

    def _klx_apply(self, batch: dict, adjustment: torch.Tensor) -> None:
        if batch["advantages"].dim() == 1:
            batch["klx_adjustment"] = adjustment  # until there are advantages
        else:
            batch["advantages"] = batch["advantages"] + adjustment * batch["ppo_mask"]

    def _generate_and_score_completions(self, inputs):
        self._ppo_values = None
        if self._klx_mode == "train":
            self.value_function.scale.advance()
        batch = super()._generate_and_score_completions(inputs)
        scores, scorable = self._ppo_score(batch)
        # TRL shuffles a batch before the loss.
        rows = torch.arange(len(scores), device=scores.device)
        batch |= {"ppo_scores": scores, "ppo_scorable": scorable, "ppo_rows": rows}
        if self._ppo_values is None and not self._ppo_in_one_pass:
            self._klx_score_policy(*self._klx_forward_arguments(batch))
        if self._ppo_values is not None:
            self._ppo_estimate(batch, self._ppo_values)
        return batch

    @torch.no_grad()
    def _ppo_estimate(self, batch: dict, values: torch.Tensor) -> None:
        """Rewards, advantages and returns of a rollout."""
        mode, args = self._klx_mode, self.args
        scores, scorable, rows = batch.pop("ppo_scores"), batch.pop("ppo_scorable"), batch.pop("ppo_rows")
        mask = self._klx_mask(batch) & scorable.unsqueeze(1)
        penalty = batch.pop("klx_per_token_kl", torch.zeros_like(values))
        rewards = shape_rewards(scores, penalty, mask, 1.0)  # (B, T)
        non_score = -(penalty * mask).sum(1)
        if args.whiten_rewards:
            rewards = self._ppo_whiten(rewards, mask, shift_mean=False)
        advantages, returns = compute_gae(rewards, values, mask, args.gamma, args.lam)
        if args.whiten_advantages:
            advantages = self._ppo_whiten(advantages, mask)
        if "klx_adjustment" in batch:
            advantages = advantages + batch.pop("klx_adjustment") * mask
        batch |= {"advantages": advantages, "ppo_values": values, "ppo_returns": returns, "ppo_mask": mask}
        metrics, count = self._ppo_metrics[mode], scorable.sum()
        metrics.add_mean("score", (scores * scorable).sum(), count)
        metrics.add_mean("non_score_reward", (non_score * scorable).sum(), count)
        metrics.add_returns(values, returns, mask)
        if mode == "train" and isinstance(self.value_function.module, ValueHead):
            moments = self.accelerator.reduce(masked_moments(returns, mask), reduction="sum")
            self.value_function.scale.observe(moments)
        self._ppo_correct_logs(mode, sequence_means(advantages, mask).squeeze(1)[rows.argsort()])

    def _ppo_correct_logs(self, mode: str, advantages: torch.Tensor) -> None:
        """Put PPO's advantages, one of each completion, in the place of those of groups in what TRL logs."""
        # How many groups have no spread says nothing about PPO.
        self._metrics[mode].pop("frac_reward_zero_std", None)
        if self.log_completions:
            means = gather(advantages).tolist()
            logged = self._logs["advantages"]
            for _ in range(min(len(means), len(logged))):
                logged.pop()
            logged.extend(means)

    def _ppo_score(self, batch: dict) -> tuple[torch.Tensor, torch.Tensor]:
        """The score of each completion of this process, and whether it has one."""
        rewards = self._ppo_rewards_per_func
        unscorable = torch.isnan(rewards).all(dim=1)
        scores = (rewards * self.reward_weights.to(rewards.device)).nansum(dim=1)
        scores = self._ppo_scaler(scores, ~unscorable, update=self._klx_mode == "train")
        size = batch["completion_ids"].size(0)
        local = slice(self.accelerator.process_index * size, (self.accelerator.process_index + 1) * size)
        scores, scorable = scores[local], ~unscorable[local]
        if self.args.missing_eos_penalty is not None:
            scores = torch.where(self._ppo_ended(batch), scores, scores - self.args.missing_eos_penalty)
        return scores, scorable

    def _ppo_ended(self, batch: dict) -> torch.Tensor:
        """Which completions came to an end of their own. With tools, an EOS token ends every turn: the last one counts."""
        ids, lengths = batch["completion_ids"], batch["completion_mask"].sum(1)
        last = ids.gather(1, (lengths - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
        ended = torch.isin(last, torch.tensor(self.eos_token_ids, device=ids.device))
        if self.args.stop_strings:
            rows = [row[:length] for row, length in zip(ids.tolist(), lengths.tolist(), strict=True)]
            stopped = [holds_text(self._tokenizer, self.args.stop_strings, row) for row in rows]
            ended = ended | torch.tensor(stopped, device=ids.device)
        return ended

    def _ppo_whiten(self, values: torch.Tensor, mask: torch.Tensor, shift_mean: bool = True) -> torch.Tensor:
        moments = self.accelerator.reduce(masked_moments(values, mask), reduction="sum")
        return whiten_with_moments(values, mask, moments, shift_mean=shift_mean)

    # ---- Loss ----

    def _klx_measure_in_loss(self, batch: dict, policy: Scored) -> None:
        super()._klx_measure_in_loss(batch, policy)
        if "ppo_mask" not in batch:
            self._ppo_estimate(batch, self._ppo_values.detach())
        self._ppo_batch = batch

    def _compute_loss(self, model, inputs):
        try:
            loss = super()._compute_loss(model, inputs)
        finally:
            inputs, self._ppo_batch = self._ppo_batch, None
        mode, mask = self._klx_mode, inputs["ppo_mask"]
        scale = self.value_function.scale.std
        value_loss, clipped = clipped_value_loss(
            self._ppo_values / scale,
            inputs["ppo_values"] / scale,
            inputs["ppo_returns"] / scale,
            mask,
            self.args.cliprange_value,
        )
        tokens = mask.sum()
        # Each token weighs the same, in whichever micro-batch and on whichever process it lies: the mean over this
        # micro-batch is weighted by its share of the tokens of one optimizer step.
        normalizer = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes
        steps = 1.0
        if mode == "train":
            steps = self.current_gradient_accumulation_steps
            normalizer = normalizer * steps / self.args.steps_per_generation
        metrics = self._ppo_metrics[mode]
        metrics.add_mean("policy_loss", loss * steps, torch.ones_like(tokens))
        metrics.add_mean("value_loss", value_loss * tokens, tokens)
        metrics.add_mean("value_clip_ratio", clipped * tokens, tokens)
        return loss + self.args.vf_coef * value_loss * tokens / normalizer

    def create_optimizer(self, *args, **kwargs):
        theirs = self.optimizer
        optimizer = super().create_optimizer(*args, **kwargs)
        if theirs is None:
            split_off(optimizer, self.value_function.module, self._ppo_value_learning_rate())
        return optimizer

    def _ppo_value_learning_rate(self) -> float:
        module, rate = self.value_function.module, self.args.value_learning_rate
        if rate is None and isinstance(module, ValueHead) and module.detached:
            # A new head cannot learn at the rate of a pretrained policy. A step of Adam changes what a layer gives by
            # about its rate times its width.
            rate = max(self.args.learning_rate, min(1e-3, 0.1 / module.inner.in_features))
        return self.args.learning_rate if rate is None else rate

    def _ppo_clip_gradients(self, clip: Callable, parameters, max_norm: float, norm_type: float = 2.0):
        """Clip policy and value function each by its own norm, so that neither silences the other. Returns the policy's."""
        parameters = list(parameters)
        # As it is where DeepSpeed clips by itself. Elsewhere this only takes the scaling of fp16 off the gradients.
        norm = clip(parameters, float("inf"), norm_type)
        if self.is_deepspeed_enabled:
            return norm
        value = {id(parameter) for parameter in self.value_function.module.parameters()}
        for part in (
            [parameter for parameter in parameters if id(parameter) in value],
            [parameter for parameter in parameters if id(parameter) not in value],
        ):
            norm = nn.utils.clip_grad_norm_(part, max_norm, norm_type)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    # ---- Metrics ----

    def log(self, logs, start_time=None):
        mode = self._klx_mode
        metrics = self._ppo_metrics[mode].pop(self.accelerator)
        # Said here, where the numbers are waited for anyway.
        if metrics.pop("infinite_rewards", 0.0) > 0:
            warnings.warn("Infinite rewards are left out, as if the reward function had returned None.", stacklevel=2)
        for name, value in metrics.items():
            self._metrics[mode][f"ppo/{name}"].append(value)
        super().log(logs, start_time)

    def generate_completions(self, sampling: bool = False) -> None:
        """
        Complete the prompts of the evaluation data and show the completions; a method of TRL 1.12's trainer, with which
        its scripts end.

        Args:
            sampling (`bool`, *optional*, defaults to `False`):
                Whether one batch is enough.
        """
        warnings.warn(
            "`generate_completions` is now `evaluate`, with `log_completions=True`.", FutureWarning, stacklevel=2
        )
        if self.eval_dataset is None:
            return
        dataset = self.eval_dataset
        if sampling and isinstance(dataset, Dataset):
            batch = self.args.per_device_eval_batch_size * self.accelerator.num_processes
            dataset = dataset.select(range(min(len(dataset), batch // self.num_generations_eval)))
        os.makedirs(os.path.join(self.args.output_dir, "completions"), exist_ok=True)
        logs, self.log_completions = self.log_completions, True
        try:
            self.evaluate(dataset)
        finally:
            self.log_completions = logs
