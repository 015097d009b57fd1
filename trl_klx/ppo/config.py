"""Config of PPO."""

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

from trl import GRPOConfig

from ..controllers.setting_rules import FieldRule, number
from ..trainers.config import KLXGRPOConfig
from ..trainers.field_rules import one_of
from .trl112_fields import TRL112_RULES, TRL112Fields


REWARD_SCALINGS = ("none", "running", "ref")
LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo")

# Fields that default to None may also be None.
PPO_RULES = {
    "num_generations": number(">= 1", 1, "Set it to 1: PPO needs no group.", kind=int),
    "num_ppo_epochs": number(">= 1", 1, "The default is 4.", kind=int),
    "num_mini_batches": number(">= 1", 1, "Set it to 1 for one optimizer step per rollout and epoch.", kind=int),
    "gamma": number("in [0, 1]", 0.0, "Set it to 1.0 for no discount.", 1.0),
    "lam": number("in [0, 1]", 0.0, "The default is 0.95.", 1.0),
    "cliprange": number("> 0", 0.0, "The default is 0.2.", above=True),
    "cliprange_value": number("> 0", 0.0, "Set it to a large number such as 1e6 to disable clipping.", above=True),
    "vf_coef": number(">= 0", 0.0, "Set it to 0.0 to leave the value function untrained."),
    "value_learning_rate": number(
        "> 0", 0.0, "Leave it unset, or set `vf_coef=0.0` to leave the value function untrained.", above=True
    ),
    "num_value_layers": number(">= 0", 0, "Set it to 0 for a head on the policy's last hidden states.", kind=int),
    "value_head_detached": FieldRule(
        lambda value: isinstance(value, bool),
        "True or False",
        "Set it to False to let the value loss train the policy's backbone.",
    ),
    "missing_eos_penalty": number(">= 0", 0.0, "It is subtracted. Leave it unset for no penalty."),
    "reward_scaling": one_of(REWARD_SCALINGS),
    "cliprange_reward": number("> 0", 0.0, "Leave it unset to disable clipping.", above=True),
    "num_layers_unfrozen": number(">= 1", 1, "Leave it unset to train all layers.", kind=int),
    "stop_strings": FieldRule(
        lambda value: isinstance(value, list) and value != [] and all(isinstance(s, str) and s for s in value),
        "a list of non-empty strings",
        'Write it as ["Human:"], or leave it unset.',
    ),
    "local_rollout_forward_batch_size": number(
        ">= 1", 1, "Leave it unset for `per_device_train_batch_size`.", kind=int
    ),
    "total_episodes": number(">= 1", 1, "Leave it unset and set `max_steps` or `num_train_epochs`.", kind=int),
    "stop_token_id": number(">= 0", 0, "Leave it unset to end at EOS only.", kind=int),
    "loss_type": one_of(LOSS_TYPES, "Set it to one of them: they are PPO's clipped loss, averaged differently."),
    **TRL112_RULES,
}

# Fields of GRPO that nothing in PPO reads, and what to set instead.
_INERT = {
    "scale_rewards": "Set `reward_scaling` and `whiten_advantages` instead.",
    "multi_objective_aggregation": "The score is the weighted sum of the rewards: set `reward_weights`.",
    "beta": "Set `kl_penalty_coef`, and `kl_placement='loss'` for a KL term in the loss.",
    "sync_ref_model": "Set `kl_ref_sync_steps` instead.",
    "ref_model_sync_steps": "Set `kl_ref_sync_steps` instead.",
    "ref_model_mixup_alpha": "Set `kl_ref_mixup_alpha` instead.",
    "sapo_temperature_neg": "It belongs to `loss_type='sapo'`: unset it.",
    "sapo_temperature_pos": "It belongs to `loss_type='sapo'`: unset it.",
    "vespo_k_pos": "It belongs to `loss_type='vespo'`: unset it.",
    "vespo_lambda_pos": "It belongs to `loss_type='vespo'`: unset it.",
    "vespo_k_neg": "It belongs to `loss_type='vespo'`: unset it.",
    "vespo_lambda_neg": "It belongs to `loss_type='vespo'`: unset it.",
}

# Fields of GRPO that treat a sequence as a whole.
_PER_SEQUENCE = {
    "importance_sampling_level": "Set it to 'token'.",
    "off_policy_mask_threshold": "Unset it; `kl_update_target` limits how far the policy moves on one rollout.",
}


@dataclass
class KLXPPOConfig(TRL112Fields, KLXGRPOConfig):
    r"""
    PPO on TRL's GRPO machinery, with the KL-control fields of [`KLXConfigMixin`]. Generation, reward functions, tools,
    vLLM and logging are configured as in [`~trl.GRPOConfig`]. The other fields of TRL 1.12's `PPOConfig` are in
    [`TRL112Fields`].

    One rollout is `per_device_train_batch_size * gradient_accumulation_steps` completions per process. It is split
    into `num_mini_batches` mini-batches with one optimizer step each, and used for `num_ppo_epochs` epochs.

    Parameters:
        num_ppo_epochs (`int`, *optional*, defaults to `4`):
            Number of epochs over each rollout; TRL's `num_iterations`.
        num_mini_batches (`int`, *optional*, defaults to `1`):
            Optimizer steps per rollout and epoch.
        gamma (`float`, *optional*, defaults to `1.0`):
            Discount factor.
        lam (`float`, *optional*, defaults to `0.95`):
            Lambda of generalized advantage estimation.
        cliprange (`float`, *optional*, defaults to `0.2`):
            Clipping range of the probability ratio; TRL's `epsilon`.
        cliprange_value (`float`, *optional*, defaults to `0.2`):
            Clipping range of the values; for a value head, in standard deviations of the returns.
        vf_coef (`float`, *optional*, defaults to `0.1`):
            Weight of the value loss.
        value_learning_rate (`float`, *optional*):
            Learning rate of the value function; it follows the schedule of `learning_rate`. If unset, `learning_rate`,
            but at least `min(5e-3, 0.3 / hidden_size)` for a detached value head.
        num_value_layers (`int`, *optional*, defaults to `2`):
            Number of layers in the value head, which start as copies of the policy's top layers. With 0, the head is a
            small network on the policy's last hidden states, which costs next to nothing but explains less variance.
        value_head_detached (`bool`, *optional*, defaults to `True`):
            Whether gradients of the value loss stop at the value head. If `False`, they also train the policy's
            backbone.
        whiten_advantages (`bool`, *optional*, defaults to `True`):
            Normalise the advantages of a rollout to zero mean and unit variance over the real tokens of all processes.
        whiten_rewards (`bool`, *optional*, defaults to `False`):
            Normalise the per-token rewards of a rollout to unit variance.
        missing_eos_penalty (`float`, *optional*):
            Penalty for a completion that was cut off, so that it ends neither in an EOS token nor with one of the
            `stop_strings`. It is subtracted from the score after scaling and clipping.
        reward_scaling (`str`, *optional*, defaults to `"none"`):
            What the scores are divided by: their running standard deviation (`"running"`), the standard deviation of
            the first rollout whose scores differ (`"ref"`), or nothing (`"none"`).
        cliprange_reward (`float`, *optional*):
            Clip the scaled scores to `[-cliprange_reward, cliprange_reward]`.
        num_layers_unfrozen (`int`, *optional*):
            Train only this many top layers. The reference then shares the frozen layers with the policy.
        stop_strings (`list[str]`, *optional*):
            Texts that end a completion, in addition to the EOS token. They stay in the completion, and TRL's metrics
            count such a completion as clipped.
        local_rollout_forward_batch_size (`int`, *optional*):
            Completions per forward pass outside the loss. If unset, `per_device_train_batch_size`.
        total_episodes (`int`, *optional*):
            Length of the training in completions over all processes, rounded up to whole rollouts; sets `max_steps`.
        stop_token_id (`int`, *optional*):
            Token that ends a completion, in addition to the EOS token.
    """

    _algorithm: ClassVar[str] = "ppo"
    _default_coef: ClassVar[float] = 0.05
    _compares_completions: ClassVar[bool] = False

    # Defaults of PPO where they differ from GRPO's.
    learning_rate: float = field(default=3e-6, metadata={"help": "The initial learning rate for AdamW."})
    num_generations: int = field(default=1, metadata={"help": "Number of completions per prompt."})
    temperature: float = field(default=0.7, metadata={"help": "Temperature for sampling."})
    max_completion_length: int = field(default=53, metadata={"help": "Maximum length of the completion, in tokens."})
    disable_dropout: bool = field(default=True, metadata={"help": "Whether to disable dropout in the model."})
    kl_penalty_coef: float | None = field(
        default=None,
        metadata={
            "help": "Strength of the KL penalty: constant without `kl_target`, the controller's starting value with "
            "it. If unset, the default controller finds its own start, and without `kl_target` it is 0.05."
        },
    )
    kl_placement: str = field(
        default="reward",
        metadata={
            "help": "Where the penalty acts: 'reward' (per-token reward of -coef * KL), 'advantage' (zero-mean "
            "adjustment of per-token advantages) or 'loss' (a KL term in the loss).",
        },
    )

    num_ppo_epochs: int = field(default=4, metadata={"help": "Number of epochs over each rollout."})
    num_mini_batches: int = field(default=1, metadata={"help": "Optimizer steps per rollout and epoch."})
    gamma: float = field(default=1.0, metadata={"help": "Discount factor."})
    lam: float = field(default=0.95, metadata={"help": "Lambda of generalized advantage estimation."})
    cliprange: float = field(default=0.2, metadata={"help": "Clipping range of the probability ratio."})
    cliprange_value: float = field(default=0.2, metadata={"help": "Clipping range of the values."})
    vf_coef: float = field(default=0.1, metadata={"help": "Weight of the value loss."})
    value_learning_rate: float | None = field(
        default=None,
        metadata={
            "help": "Learning rate of the value function. If unset, `learning_rate`, but at least min(5e-3, 0.3 / "
            "hidden_size) for a detached value head."
        },
    )
    num_value_layers: int = field(
        default=2, metadata={"help": "Layers of the value head, which start as copies of the policy's top layers."}
    )
    value_head_detached: bool = field(
        default=True,
        metadata={
            "help": "Whether gradients of the value loss stop at the value head. If not, they also train the policy's "
            "backbone."
        },
    )
    whiten_advantages: bool = field(
        default=True, metadata={"help": "Normalise the advantages of a rollout to zero mean and unit variance."}
    )
    whiten_rewards: bool = field(
        default=False, metadata={"help": "Normalise the per-token rewards of a rollout to unit variance."}
    )
    missing_eos_penalty: float | None = field(
        default=None, metadata={"help": "Penalty subtracted from the score of a completion that was cut off."}
    )
    reward_scaling: str = field(
        default="none",
        metadata={
            "help": "What the scores are divided by: their running standard deviation ('running'), the standard "
            "deviation of the first rollout whose scores differ ('ref'), or nothing ('none').",
            "choices": list(REWARD_SCALINGS),
        },
    )
    cliprange_reward: float | None = field(
        default=None, metadata={"help": "Clip the scaled scores to [-cliprange_reward, cliprange_reward]."}
    )
    num_layers_unfrozen: int | None = field(
        default=None,
        metadata={
            "help": "Train only this many top layers. The reference then shares the frozen layers with the policy."
        },
    )
    stop_strings: list[str] | None = field(
        default=None, metadata={"help": "Texts that end a completion, in addition to the EOS token."}
    )
    local_rollout_forward_batch_size: int | None = field(
        default=None,
        metadata={"help": "Completions per forward pass outside the loss. If unset, `per_device_train_batch_size`."},
    )
    total_episodes: int | None = field(
        default=None,
        metadata={"help": "Length of the training in completions over all processes; sets `max_steps`."},
    )
    stop_token_id: int | None = field(
        default=None, metadata={"help": "Token that ends a completion, in addition to the EOS token."}
    )

    def __post_init__(self) -> None:
        self._validate_ppo_values()
        self._map_former_fields()
        self._validate_ppo_combinations()
        self.num_iterations = self.num_ppo_epochs
        self.epsilon = self.cliprange
        self._split_rollout()
        parent: Any = super()
        parent.__post_init__()
        assert self.generation_batch_size is not None and self.steps_per_generation is not None
        self._validate_scoring()
        if self.total_episodes is not None:
            rollouts = math.ceil(self.total_episodes / self.generation_batch_size)
            micro_batches = rollouts * self.num_ppo_epochs * self.steps_per_generation
            self.max_steps = math.ceil(micro_batches / self.gradient_accumulation_steps)

    def _split_rollout(self) -> None:
        """Turn the number of mini-batches into TRL's terms: micro-batches per rollout and per optimizer step."""
        if self.num_mini_batches == 1:
            return
        for name in ("steps_per_generation", "generation_batch_size"):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"`num_mini_batches={self.num_mini_batches}` and `{name}={getattr(self, name)!r}` both set how "
                    "the rollout is split. Set one or the other."
                )
        rollout = self.per_device_train_batch_size * self.gradient_accumulation_steps
        if rollout % self.num_mini_batches:
            raise ValueError(
                f"`num_mini_batches={self.num_mini_batches}` must divide the rollout of {rollout} completions per "
                "process (`per_device_train_batch_size * gradient_accumulation_steps`). Change one of the three."
            )
        mini_batch = rollout // self.num_mini_batches
        micro_batch = math.gcd(mini_batch, self.per_device_train_batch_size)
        self.per_device_train_batch_size = micro_batch
        self.gradient_accumulation_steps = mini_batch // micro_batch
        self.steps_per_generation = rollout // micro_batch

    @property
    def in_one_pass(self) -> bool:
        """Whether a whole rollout goes through the loss at once and only once."""
        return self.steps_per_generation == self.num_ppo_epochs == 1

    def _validate_scoring(self) -> None:
        size = self.local_rollout_forward_batch_size
        if size is not None and self.in_one_pass and not self.kl_enabled and not self.use_vllm:
            raise ValueError(
                f"`local_rollout_forward_batch_size={size}` has no effect: with one epoch over one micro-batch and no "
                "KL control, nothing is scored outside the loss. Unset it."
            )

    def _validate_ppo_values(self) -> None:
        for name, rule in PPO_RULES.items():
            value = getattr(self, name)
            if value is not None or self._default(name) is not None:
                rule.check(name, value)

    def _validate_ppo_combinations(self) -> None:
        if self.total_episodes is not None and self.max_steps > 0:
            raise ValueError(
                f"`total_episodes={self.total_episodes}` and `max_steps={self.max_steps}` both set the length of the "
                "training. Set one of them."
            )
        # GRPO's names for settings that have another name in PPO.
        for theirs, ours in (("epsilon", "cliprange"), ("num_iterations", "num_ppo_epochs")):
            if getattr(self, theirs) not in (self._default(theirs), getattr(self, ours)):
                raise ValueError(f"`{theirs}={getattr(self, theirs)!r}` is called `{ours}` in PPO. Set `{ours}`.")
        inert = dict(_INERT)
        if self.kl_placement != "loss" or not self.kl_penalty_enabled:
            inert["use_bias_correction_kl"] = "It corrects the KL term of `kl_placement='loss'`: unset it."
        for name, remedy in inert.items():
            if getattr(self, name) != GRPOConfig.__dataclass_fields__[name].default:
                raise ValueError(f"`{name}={getattr(self, name)!r}` has no effect in PPO. {remedy}")
        for name, remedy in _PER_SEQUENCE.items():
            if getattr(self, name) != GRPOConfig.__dataclass_fields__[name].default:
                raise ValueError(
                    f"`{name}={getattr(self, name)!r}` cannot be used in PPO, whose advantages differ between tokens. "
                    f"{remedy}"
                )
        for name in ("value_learning_rate", "num_value_layers", "value_head_detached"):
            if self.vf_coef == 0.0 and getattr(self, name) != self._default(name):
                raise ValueError(
                    f"`{name}={getattr(self, name)!r}` has no effect while `vf_coef=0.0`, which leaves the value "
                    f"function untrained. Unset `{name}`, or raise `vf_coef`."
                )
        self._validate_adapters()
        self._validate_ppo_stops()

    def _validate_ppo_stops(self) -> None:
        for name, vllm_name in (("stop_strings", "stop"), ("stop_token_id", "stop_token_ids")):
            value = getattr(self, name)
            if value is not None and self.use_vllm:
                value = value if isinstance(value, list) else [value]
                raise ValueError(
                    f"`{name}={getattr(self, name)!r}` does not reach vLLM. Set `generation_kwargs={{{vllm_name!r}: "
                    f"{value!r}}}` instead."
                )
        if self.stop_strings and (self.use_transformers_continuous_batching or self.use_transformers_paged):
            raise ValueError(
                f"`stop_strings={self.stop_strings}` cannot be used with `use_transformers_continuous_batching=True`, "
                "which ends completions at tokens only. Set `stop_token_id`, or switch continuous batching off."
            )
        if self.stop_strings and self.mask_truncated_completions:
            raise ValueError(
                f"`stop_strings={self.stop_strings}` cannot be used with `mask_truncated_completions=True`, which "
                "would mask every completion that ends with one of them. Set `missing_eos_penalty` instead."
            )
