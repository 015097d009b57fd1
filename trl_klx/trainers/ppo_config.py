"""Config of PPO: today's fields, and those of TRL's former PPOConfig."""

import math
import warnings
from dataclasses import dataclass, field

from trl import GRPOConfig

from ..configs import KLXGRPOConfig


class _OneGeneration(int):
    """A 1 that passes GRPO's check for groups of two: PPO has a value function and needs no group."""

    def __lt__(self, other):
        return False


# Fields of TRL 1.12's PPOConfig that live on under another name.
RENAMED = {
    "kl_coef": "kl_penalty_coef",
    "response_length": "max_completion_length",
}
REWARD_SCALINGS = ("none", "running", "ref")
LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo")


@dataclass
class KLXPPOConfig(KLXGRPOConfig):
    r"""
    PPO on TRL's GRPO machinery, with the KL-control fields of [`KLXConfigMixin`] and the fields of TRL 1.12's
    `PPOConfig`. Generation, reward functions, tools, vLLM and logging are configured as in [`~trl.GRPOConfig`].

    One rollout is `per_device_train_batch_size * gradient_accumulation_steps` completions per process. It is split into
    `num_mini_batches` mini-batches, one optimizer step each, and gone through `num_ppo_epochs` times.

    Parameters:
        num_ppo_epochs (`int`, *optional*, defaults to `4`):
            How often each rollout is gone through; TRL's `num_iterations`.
        num_mini_batches (`int`, *optional*, defaults to `1`):
            Optimizer steps per rollout and epoch.
        gamma (`float`, *optional*, defaults to `1.0`):
            Discount factor.
        lam (`float`, *optional*, defaults to `0.95`):
            Lambda of generalized advantage estimation.
        cliprange (`float`, *optional*, defaults to `0.2`):
            Clipping range of the probability ratio; TRL's `epsilon`.
        cliprange_value (`float`, *optional*, defaults to `0.2`):
            Clipping range of the values.
        vf_coef (`float`, *optional*, defaults to `0.1`):
            Weight of the value loss.
        whiten_advantages (`bool`, *optional*, defaults to `True`):
            Normalise the advantages of a rollout to zero mean and unit variance, over the real tokens of all processes.
        whiten_rewards (`bool`, *optional*, defaults to `False`):
            Normalise the per-token rewards of a rollout to unit variance.
        missing_eos_penalty (`float`, *optional*):
            Subtracted from the score of a completion that does not end in an EOS token.
        reward_scaling (`str`, *optional*, defaults to `"none"`):
            Divide the scores by their running standard deviation (`"running"`), by that of the first rollout (`"ref"`),
            or by nothing (`"none"`).
        cliprange_reward (`float`, *optional*):
            Clip the scaled scores to `[-cliprange_reward, cliprange_reward]`.
        num_layers_unfrozen (`int`, *optional*):
            Train only the top layers, this many of them. The reference then shares the frozen layers with the policy.
        stop_strings (`list[str]`, *optional*):
            Texts that end a completion, beside the EOS token.
        local_rollout_forward_batch_size (`int`, *optional*):
            Completions per forward pass outside the loss. If unset, `per_device_train_batch_size`.
        total_episodes (`int`, *optional*):
            Length of the training in completions over all processes; sets `max_steps`.
        stop_token (`str`, *optional*):
            `"eos"`, which always ends a completion.
        stop_token_id (`int`, *optional*):
            Token that ends a completion, beside the EOS token.
        model_adapter_name (`str`, *optional*):
            Adapter of a `PeftModel` that is trained.
        ref_adapter_name (`str`, *optional*):
            Adapter of a `PeftModel` that is the reference.
        sft_model_path (`str`, *optional*):
            Policy, where the trainer is given none.
        reward_model_path (`str`, *optional*):
            Reward model, where the trainer is given no reward.
        num_sample_generations (`int`, *optional*):
            A positive number switches `log_completions` on.
        dataset_num_proc (`int`, *optional*):
            Processes for scripts that preprocess their data; the trainer itself has nothing to preprocess.
        kl_coef (`float`, *optional*):
            Former name of `kl_penalty_coef`.
        response_length (`int`, *optional*):
            Former name of `max_completion_length`.
    """

    # Defaults of PPO where they differ from GRPO's.
    learning_rate: float = field(default=3e-6, metadata={"help": "The initial learning rate for AdamW."})
    num_generations: int = field(default=1, metadata={"help": "Number of completions per prompt."})
    temperature: float = field(default=0.7, metadata={"help": "Temperature for sampling."})
    max_completion_length: int = field(default=53, metadata={"help": "Maximum length of the completion, in tokens."})
    disable_dropout: bool = field(default=True, metadata={"help": "Whether to disable dropout in the model."})
    kl_penalty_coef: float = field(
        default=0.05,
        metadata={"help": "Strength of the KL penalty and starting value of the controller. 0.0 switches it off."},
    )
    kl_placement: str = field(
        default="reward",
        metadata={
            "help": "Where the penalty acts: 'reward' (per-token reward of -coef * KL), 'advantage' (zero-mean "
            "adjustment of per-token advantages) or 'loss' (a KL term in the loss).",
            "choices": ["advantage", "reward", "loss"],
        },
    )

    num_ppo_epochs: int = field(default=4, metadata={"help": "How often each rollout is gone through."})
    num_mini_batches: int = field(default=1, metadata={"help": "Optimizer steps per rollout and epoch."})
    gamma: float = field(default=1.0, metadata={"help": "Discount factor."})
    lam: float = field(default=0.95, metadata={"help": "Lambda of generalized advantage estimation."})
    cliprange: float = field(default=0.2, metadata={"help": "Clipping range of the probability ratio."})
    cliprange_value: float = field(default=0.2, metadata={"help": "Clipping range of the values."})
    vf_coef: float = field(default=0.1, metadata={"help": "Weight of the value loss."})
    whiten_advantages: bool = field(
        default=True, metadata={"help": "Normalise the advantages of a rollout to zero mean and unit variance."}
    )
    whiten_rewards: bool = field(
        default=False, metadata={"help": "Normalise the per-token rewards of a rollout to unit variance."}
    )
    missing_eos_penalty: float | None = field(
        default=None, metadata={"help": "Subtracted from the score of a completion that does not end in an EOS token."}
    )
    reward_scaling: str = field(
        default="none",
        metadata={
            "help": "Divide the scores by their running standard deviation ('running'), by that of the first rollout "
            "('ref'), or by nothing ('none').",
            "choices": list(REWARD_SCALINGS),
        },
    )
    cliprange_reward: float | None = field(
        default=None, metadata={"help": "Clip the scaled scores to [-cliprange_reward, cliprange_reward]."}
    )
    num_layers_unfrozen: int | None = field(
        default=None,
        metadata={
            "help": "Train only the top layers, this many of them. The reference then shares the frozen layers with the "
            "policy."
        },
    )
    stop_strings: list[str] | None = field(
        default=None, metadata={"help": "Texts that end a completion, beside the EOS token."}
    )
    local_rollout_forward_batch_size: int | None = field(
        default=None,
        metadata={"help": "Completions per forward pass outside the loss. If unset, `per_device_train_batch_size`."},
    )
    total_episodes: int | None = field(
        default=None,
        metadata={"help": "Length of the training in completions over all processes; sets `max_steps`."},
    )
    stop_token: str | None = field(
        default=None, metadata={"help": "'eos', which always ends a completion.", "choices": ["eos"]}
    )
    stop_token_id: int | None = field(
        default=None, metadata={"help": "Token that ends a completion, beside the EOS token."}
    )
    model_adapter_name: str | None = field(
        default=None, metadata={"help": "Adapter of a `PeftModel` that is trained."}
    )
    ref_adapter_name: str | None = field(
        default=None, metadata={"help": "Adapter of a `PeftModel` that is the reference."}
    )
    sft_model_path: str | None = field(default=None, metadata={"help": "Policy, where the trainer is given none."})
    reward_model_path: str | None = field(
        default=None, metadata={"help": "Reward model, where the trainer is given no reward."}
    )
    num_sample_generations: int | None = field(
        default=None, metadata={"help": "A positive number switches `log_completions` on."}
    )
    dataset_num_proc: int | None = field(
        default=None, metadata={"help": "Processes for scripts that preprocess their data."}
    )
    kl_coef: float | None = field(default=None, metadata={"help": "Former name of `kl_penalty_coef`."})
    response_length: int | None = field(default=None, metadata={"help": "Former name of `max_completion_length`."})

    def __post_init__(self):
        self._map_former_fields()
        self._validate_ppo_values()
        self.num_iterations = self.num_ppo_epochs
        self.epsilon = self.cliprange
        if self.num_generations == 1:
            self.num_generations = _OneGeneration(1)
        self._split_rollout()
        super().__post_init__()
        self.num_generations = int(self.num_generations)
        if self.total_episodes is not None:
            rollouts = math.ceil(self.total_episodes / self.generation_batch_size)
            self.max_steps = rollouts * self.num_ppo_epochs * self.num_mini_batches

    def _default(self, name: str):
        return self.__dataclass_fields__[name].default

    def _map_former_fields(self):
        for old, new in RENAMED.items():
            value = getattr(self, old)
            if value is None:
                continue
            if getattr(self, new) not in (self._default(new), value):
                raise ValueError(
                    f"`{old}={value!r}` is the former name of `{new}`, which is {getattr(self, new)!r}. Set only `{new}`."
                )
            warnings.warn(f"`{old}` is now called `{new}`.", FutureWarning, stacklevel=4)
            setattr(self, new, value)
        if self.num_sample_generations:
            warnings.warn("`num_sample_generations` is now `log_completions=True`.", FutureWarning, stacklevel=4)
            self.log_completions = True

    def _split_rollout(self):
        """Turn the number of mini-batches into TRL's terms: micro-batches per rollout and per optimizer step."""
        if self.num_mini_batches == 1:
            return
        if self.steps_per_generation is not None or self.generation_batch_size is not None:
            raise ValueError(
                f"`num_mini_batches={self.num_mini_batches}` splits the rollout, which `steps_per_generation` or "
                "`generation_batch_size` sizes in TRL's way. Set one or the other."
            )
        rollout = self.per_device_train_batch_size * self.gradient_accumulation_steps
        if rollout % self.num_mini_batches:
            raise ValueError(
                f"`num_mini_batches={self.num_mini_batches}` must divide the rollout of {rollout} completions per "
                "process (`per_device_train_batch_size * gradient_accumulation_steps`)."
            )
        mini_batch = rollout // self.num_mini_batches
        micro_batch = math.gcd(mini_batch, self.per_device_train_batch_size)
        self.per_device_train_batch_size = micro_batch
        self.gradient_accumulation_steps = mini_batch // micro_batch
        self.steps_per_generation = rollout // micro_batch

    def _validate_ppo_values(self):
        for name, low, high in (("gamma", 0.0, 1.0), ("lam", 0.0, 1.0)):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not low <= value <= high:
                raise ValueError(f"`{name}` must lie in [{low:g}, {high:g}], got {value!r}.")
        for name in ("cliprange", "cliprange_value", "vf_coef", "cliprange_reward", "missing_eos_penalty"):
            value = getattr(self, name)
            optional = self._default(name) is None
            if not (optional and value is None) and not (
                isinstance(value, (int, float)) and math.isfinite(value) and value >= 0.0
            ):
                raise ValueError(f"`{name}` must be a finite number >= 0, got {value!r}.")
        for name in (
            "num_ppo_epochs",
            "num_mini_batches",
            "num_layers_unfrozen",
            "local_rollout_forward_batch_size",
            "total_episodes",
        ):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"`{name}` must be an integer >= 1, got {value!r}.")
        if self.reward_scaling not in REWARD_SCALINGS:
            raise ValueError(f"`reward_scaling` must be one of {list(REWARD_SCALINGS)}, got {self.reward_scaling!r}.")
        if self.stop_token not in (None, "eos"):
            raise ValueError(f"`stop_token` must be 'eos' or unset, got {self.stop_token!r}. See `stop_strings`.")
        if self.loss_type not in LOSS_TYPES:
            raise ValueError(f"`loss_type` of PPO must be one of {list(LOSS_TYPES)}, got {self.loss_type!r}.")
        if self.total_episodes is not None and self.max_steps > 0:
            raise ValueError(
                f"`total_episodes={self.total_episodes}` and `max_steps={self.max_steps}` both set the length of the "
                "training. Set one of them."
            )
        # GRPO's names for what PPO has a field of its own for.
        for theirs, ours in (("epsilon", "cliprange"), ("num_iterations", "num_ppo_epochs")):
            if getattr(self, theirs) not in (self._default(theirs), getattr(self, ours)):
                raise ValueError(f"`{theirs}={getattr(self, theirs)!r}` is called `{ours}` in PPO. Set `{ours}`.")
        for name, remedy in (
            ("scale_rewards", "Set `reward_scaling` and `whiten_advantages` instead"),
            ("multi_objective_aggregation", "The scores of PPO are the weighted sum of the rewards. Unset it"),
        ):
            if getattr(self, name) != GRPOConfig.__dataclass_fields__[name].default:
                raise ValueError(f"`{name}={getattr(self, name)!r}` has no effect in PPO. {remedy}.")
        if self.ref_adapter_name is not None and self.kl_penalty_coef == 0.0 and not self.kl_monitor:
            raise ValueError(
                f"`ref_adapter_name={self.ref_adapter_name!r}` has no effect while `kl_penalty_coef=0.0`. Unset it, or set "
                "`kl_monitor=True` to only measure the KL."
            )
