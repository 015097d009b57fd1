"""PPO on TRL's present stack, with KL control."""

import functools
import os
import warnings
from collections import defaultdict

import torch
from accelerate.utils import is_peft_model
from datasets import Dataset, IterableDataset
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl.trainer.utils import disable_dropout_in_model, get_config_model_id

from ..adapters import adapter_tensors, hash_tensors
from ..advantages import masked_moments, whiten_with_moments
from ..gae import clipped_value_loss, compute_gae, explained_variance, shape_rewards
from ..references import AdapterReference, KLReference, ModelReference, add_trl_lm_head, fingerprint
from ..scaling import RewardScaler
from ..scoring import Scored, causal_lm
from ..state import read_json, write_json
from ..values import VALUE_MODULE, ValueFunction, ValueHead, ValueModel, freeze_bottom_layers
from .grpo import KLXGRPOTrainer
from .ppo_config import KLXPPOConfig


VALUE_FILE = "value_function.safetensors"
STATE_FILE = "ppo_state.json"


class KLXPPOTrainer(KLXGRPOTrainer):
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
    _config_class = KLXPPOConfig
    _klx_host_placements = ("loss",)
    value_function: ValueFunction | None = None
    _ppo_scores_reference = False
    _ppo_saving_checkpoint = False

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
        model = (args.sft_model_path if args is not None else None) if model is None else model
        if model is None:
            raise ValueError("`model` is required. Pass a policy, or set `sft_model_path` in the config.")
        if args is None:
            model_name = model if isinstance(model, str) else get_config_model_id(model.config)
            args = KLXPPOConfig(f"{model_name.split('/')[-1]}-PPO")
        if ref_model is not None and ref_model is model:
            raise ValueError("`ref_model` must not be the policy itself. Pass a copy, or leave it unset.")
        if data_collator is not None:
            warnings.warn("`data_collator` is not used: the trainer pads the prompts itself.", stacklevel=2)
        self._ppo_ref_model = ref_model
        reward_funcs, reward_processing_classes = self._ppo_rewards(
            args, reward_model, reward_funcs, reward_processing_classes, processing_class
        )
        if is_peft_model(model) and args.model_adapter_name is not None:
            model.set_adapter(args.model_adapter_name)
        super().__init__(
            model,
            reward_funcs,
            args,
            train_dataset=_with_prompts(train_dataset, processing_class),
            eval_dataset=_with_prompts(eval_dataset, processing_class),
            processing_class=processing_class,
            reward_processing_classes=reward_processing_classes,
            callbacks=callbacks,
            optimizers=optimizers,
            peft_config=peft_config,
            **kwargs,
        )
        policy = self.accelerator.unwrap_model(self.model)
        self.value_function = ValueFunction(policy, self._ppo_value_module(policy, value_model))
        self._ppo_scaler = RewardScaler(self.args.reward_scaling, self.args.cliprange_reward)
        self._ppo_sums: dict[str, dict[str, torch.Tensor]] = {"train": defaultdict(float), "eval": defaultdict(float)}
        self._ppo_stop_at(policy)
        if self.use_vllm:
            # vLLM is sent every parameter of the policy, and has no place for a value function.
            self.vllm_generation.sync_weights = self._ppo_without_value(self.vllm_generation.sync_weights)

    # ---- Construction ----

    @staticmethod
    def _ppo_rewards(args, reward_model, reward_funcs, reward_processing_classes, processing_class):
        if reward_model is None and reward_funcs is None:
            reward_model = args.reward_model_path
        funcs = [] if reward_funcs is None else reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
        if reward_model is None:
            return funcs or None, reward_processing_classes
        classes = reward_processing_classes
        classes = [None] * len(funcs) if classes is None else classes if isinstance(classes, list) else [classes]
        # A reward model given by path brings its own tokenizer.
        own = None if isinstance(reward_model, str) else processing_class
        return [*funcs, reward_model], [*classes, own]

    def _ppo_value_module(self, policy: nn.Module, value_model: nn.Module | None) -> nn.Module:
        if value_model is not None:
            disable_dropout_in_model(value_model)
            return ValueModel(value_model.to(self.accelerator.device))
        trained = next(parameter for parameter in policy.parameters() if parameter.requires_grad)
        hidden_size = causal_lm(policy).config.get_text_config().hidden_size
        return ValueHead(hidden_size, trained.dtype, trained.device, self.args.seed)

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
                raise ValueError(f"`ref_adapter_name={name!r}` is not an adapter of the policy, which has {known}.")
            identity = {"kind": "adapter", "path": name, "hash": hash_tensors(adapter_tensors(policy, name))}
            return AdapterReference(policy, name, identity)
        if self._ppo_ref_model is None:
            return super()._klx_build_reference(policy)
        model = self._ppo_ref_model.requires_grad_(False).eval()
        add_trl_lm_head(model, self.temperature, self.args.cast_lm_head_to_fp32)
        return ModelReference(policy, model, {"kind": "model", "hash": fingerprint(model)}, self.accelerator)

    def _klx_add_reward_func(self) -> None:
        """PPO's penalty is a reward per token, not one more reward function."""

    def _ppo_stop_at(self, policy: nn.Module) -> None:
        """Let a token or a text of the user's end a completion, beside EOS."""
        if self.args.stop_token_id is not None and self.args.stop_token_id not in self.eos_token_ids:
            self.eos_token_ids.append(self.args.stop_token_id)
        if not self.args.stop_strings:
            return
        if self.use_vllm or self.use_transformers_continuous_batching:
            raise ValueError(
                f"`stop_strings={self.args.stop_strings}` works with plain generation only. With vLLM, set "
                "`generation_kwargs={'stop': [...]}`."
            )
        self.generation_config.stop_strings = self.args.stop_strings
        # `generate` matches texts through the tokenizer, which TRL does not hand it.
        policy.generate = functools.partial(policy.generate, tokenizer=self._tokenizer)

    # ---- Forward passes ----

    def _klx_forward(self, model, args: tuple, kwargs: dict) -> tuple[tuple, Scored]:
        if not torch.is_grad_enabled() and self.args.local_rollout_forward_batch_size is not None:
            kwargs = kwargs | {"batch_size": self.args.local_rollout_forward_batch_size}
        if self._ppo_scores_reference:
            return super()._klx_forward(model, args, kwargs)
        with self.value_function.recording(logits_to_keep=args[2]) as values:
            output = super()._klx_forward(model, args, kwargs)
            self._ppo_values = torch.cat(values)  # (B, T)
        return output

    def _klx_score_reference(self, args: tuple, kwargs: dict) -> Scored:
        self._ppo_scores_reference = True
        try:
            return super()._klx_score_reference(args, kwargs)
        finally:
            self._ppo_scores_reference = False

    # ---- One rollout ----

    def _calculate_rewards(self, *args, **kwargs):
        self._ppo_rewards_per_func = super()._calculate_rewards(*args, **kwargs)  # of all processes
        return self._ppo_rewards_per_func

    def _klx_score_batch(self, batch: dict, rollout) -> None:
        if rollout.policy is None:
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
            batch["advantages"] = batch["advantages"] + adjustment

    def _generate_and_score_completions(self, inputs):
        self._ppo_values = None
        batch = super()._generate_and_score_completions(inputs)
        if self._ppo_values is None:
            self._klx_score_policy(*self._klx_forward_arguments(batch))
        with torch.no_grad():
            self._ppo_estimate(batch, self._ppo_values)
        return batch

    def _ppo_estimate(self, batch: dict, values: torch.Tensor) -> None:
        """Scores, rewards, advantages and returns of a rollout."""
        mode, args = self._klx_mode, self.args
        scores, scorable = self._ppo_score(batch)
        mask = self._klx_mask(batch) * scorable.unsqueeze(1)
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
        count = scorable.sum()
        self._ppo_add(mode, "score", (scores * scorable).sum(), count)
        self._ppo_add(mode, "non_score_reward", (non_score * scorable).sum(), count)
        self._ppo_add(mode, "explained_variance", explained_variance(values, returns, mask), torch.ones_like(count))
        # A group of one has no spread, which says nothing about PPO.
        self._metrics[mode].pop("frac_reward_zero_std", None)

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
            eos = torch.tensor(self.eos_token_ids, device=scores.device)
            ended = (torch.isin(batch["completion_ids"], eos) & batch["completion_mask"].bool()).any(dim=1)
            scores = torch.where(ended, scores, scores - self.args.missing_eos_penalty)
        return scores, scorable

    def _ppo_whiten(self, values: torch.Tensor, mask: torch.Tensor, shift_mean: bool = True) -> torch.Tensor:
        moments = self.accelerator.reduce(masked_moments(values, mask), reduction="sum")
        return whiten_with_moments(values, mask, moments, shift_mean=shift_mean)

    # ---- Loss ----

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        mode, mask = self._klx_mode, inputs["ppo_mask"]
        value_loss, clipped = clipped_value_loss(
            self._ppo_values, inputs["ppo_values"], inputs["ppo_returns"], mask, self.args.cliprange_value
        )
        tokens = mask.sum()
        # Each token weighs the same, in whichever micro-batch and on whichever process it lies: the mean over this
        # micro-batch is weighted by its share of the tokens of one optimizer step.
        normalizer = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes
        steps = 1.0
        if mode == "train":
            steps = self.current_gradient_accumulation_steps
            normalizer = normalizer * steps / self.args.steps_per_generation
        self._ppo_add(mode, "policy_loss", loss.detach() * steps, torch.ones_like(tokens))
        self._ppo_add(mode, "value_loss", value_loss.detach() * tokens, tokens)
        self._ppo_add(mode, "value_clip_ratio", clipped * tokens, tokens)
        return loss + self.args.vf_coef * value_loss * tokens / normalizer

    # ---- Metrics ----

    def _ppo_add(self, mode: str, name: str, total: torch.Tensor, count: torch.Tensor) -> None:
        """Add to a metric without waiting for the device; `log` does."""
        self._ppo_sums[mode][name] = self._ppo_sums[mode][name] + torch.stack([total.double(), count.double()])

    def log(self, logs, start_time=None):
        mode = self._klx_mode
        sums = self._ppo_sums[mode]
        if sums:
            totals = self.accelerator.reduce(torch.stack(list(sums.values())), reduction="sum").tolist()
            for name, (total, count) in zip(sums, totals, strict=True):
                self._metrics[mode][f"ppo/{name}"].append(total / count if count else float("nan"))
            sums.clear()
        super().log(logs, start_time)

    # ---- Checkpoints ----

    def _ppo_without_value(self, function):
        @functools.wraps(function)
        def hidden(*args, **kwargs):
            with self.value_function.hidden():
                return function(*args, **kwargs)

        return hidden

    def _save(self, output_dir=None, state_dict=None):
        prefix = f"{VALUE_MODULE}."
        if state_dict is None:
            values = self.value_function.module.state_dict()
        else:
            values = {key.removeprefix(prefix): state_dict[key] for key in state_dict if key.startswith(prefix)}
            state_dict = {key: value for key, value in state_dict.items() if not key.startswith(prefix)}
        with self.value_function.hidden():
            super()._save(output_dir, state_dict)
        if self._ppo_saving_checkpoint and self.args.should_save:
            values = {name: value.detach().cpu().contiguous() for name, value in values.items()}
            save_file(values, os.path.join(output_dir, VALUE_FILE))

    def _save_checkpoint(self, model, trial):
        folder = os.path.join(self._get_output_dir(trial=trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        if self.args.should_save:
            write_json(os.path.join(folder, STATE_FILE), self._ppo_scaler.state_dict())
        self._ppo_saving_checkpoint = True
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._ppo_saving_checkpoint = False

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        with self.value_function.hidden():
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        path = os.path.join(resume_from_checkpoint, VALUE_FILE)
        if os.path.isfile(path):
            self.value_function.module.load_state_dict(load_file(path))
        else:
            warnings.warn(
                f"The checkpoint {resume_from_checkpoint!r} holds no value function: it starts anew.", stacklevel=2
            )

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and os.path.isfile(os.path.join(checkpoint, STATE_FILE)):
            self._ppo_scaler.load_state_dict(read_json(os.path.join(checkpoint, STATE_FILE)))


def _with_prompts(dataset, processing_class):
    """Give tokenized data, as TRL 1.12's PPO took it, the text prompts that TRL's trainers take today."""
    if isinstance(dataset, dict):
        return {name: _with_prompts(split, processing_class) for name, split in dataset.items()}
    if not isinstance(dataset, (Dataset, IterableDataset)):
        return dataset
    columns = dataset.column_names or list(next(iter(dataset)))
    if "prompt" in columns or "input_ids" not in columns:
        return dataset
    if processing_class is None:
        raise ValueError("Tokenized data (`input_ids`) needs a `processing_class` to read it with.")

    def decode(row):
        return {"prompt": processing_class.decode(row["input_ids"], skip_special_tokens=True)}

    return dataset.map(decode, remove_columns=[name for name in columns if name in ("input_ids", "attention_mask")])
