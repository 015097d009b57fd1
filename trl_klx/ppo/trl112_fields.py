"""Fields that only scripts written for TRL 1.12's PPO still set."""

import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..controllers.setting_rules import number
from ..trainers.field_rules import one_of


if TYPE_CHECKING:
    from ..trainers.config import KLXGRPOConfig

    # The fields are only ever combined with that config, so they may use its attributes.
    _Host = KLXGRPOConfig
else:
    _Host = object


# Fields of TRL 1.12's PPOConfig that have another name today.
RENAMED = {
    "kl_coef": "kl_penalty_coef",
    "response_length": "max_completion_length",
}
# Fields of TRL 1.12's PPOConfig that its trainer computed, and how.
COMPUTED = {
    "world_size": "the number of processes that are launched",
    "num_total_batches": "`total_episodes` divided by the completions of a rollout",
    "batch_size": "`per_device_train_batch_size * gradient_accumulation_steps`, times the number of processes",
    "local_batch_size": "`per_device_train_batch_size * gradient_accumulation_steps`",
    "micro_batch_size": "`per_device_train_batch_size`, times the number of processes",
    "mini_batch_size": "the completions of a rollout divided by `num_mini_batches`",
    "local_mini_batch_size": "the completions of a rollout on one process divided by `num_mini_batches`",
}

TRL112_RULES = {
    "stop_token": one_of(("eos",), "EOS always ends a completion. To end it elsewhere, set `stop_strings`."),
    "num_sample_generations": number(">= 0", 0, "Set `log_completions=True` instead.", kind=int),
    "dataset_num_proc": number(">= 1", 1, "Leave it unset for one process.", kind=int),
}


@dataclass
class TRL112Fields(_Host):
    r"""
    The fields of TRL 1.12's `PPOConfig` that new scripts do not need. [`KLXPPOConfig`] accepts them, so that old
    scripts run unchanged.

    Parameters:
        stop_token (`str`, *optional*):
            `"eos"`, which always ends a completion.
        model_adapter_name (`str`, *optional*):
            Name of the adapter to train, if the policy is a `PeftModel`.
        ref_adapter_name (`str`, *optional*):
            Name of the adapter that is the reference, if the policy is a `PeftModel`.
        sft_model_path (`str`, *optional*):
            Policy to load when no `model` is passed.
        reward_model_path (`str`, *optional*):
            Reward model to load when no reward is passed.
        num_sample_generations (`int`, *optional*):
            A positive number switches `log_completions` on.
        dataset_num_proc (`int`, *optional*):
            Number of processes that turn tokenized data (`input_ids`) into prompts.
        kl_coef (`float`, *optional*):
            Former name of `kl_penalty_coef`.
        response_length (`int`, *optional*):
            Former name of `max_completion_length`.
    """

    stop_token: str | None = field(
        default=None, metadata={"help": "'eos', which always ends a completion.", "choices": ["eos"]}
    )
    model_adapter_name: str | None = field(
        default=None, metadata={"help": "Name of the adapter to train, if the policy is a `PeftModel`."}
    )
    ref_adapter_name: str | None = field(
        default=None, metadata={"help": "Name of the adapter that is the reference, if the policy is a `PeftModel`."}
    )
    sft_model_path: str | None = field(default=None, metadata={"help": "Policy to load when no `model` is passed."})
    reward_model_path: str | None = field(
        default=None, metadata={"help": "Reward model to load when no reward is passed."}
    )
    num_sample_generations: int | None = field(
        default=None, metadata={"help": "A positive number switches `log_completions` on."}
    )
    dataset_num_proc: int | None = field(
        default=None, metadata={"help": "Number of processes that turn tokenized data into prompts."}
    )
    kl_coef: float | None = field(default=None, metadata={"help": "Former name of `kl_penalty_coef`."})
    response_length: int | None = field(default=None, metadata={"help": "Former name of `max_completion_length`."})

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        for name in COMPUTED.keys() & kwargs.keys():
            raise ValueError(f"`{name}={kwargs[name]!r}` cannot be set: it is {COMPUTED[name]}. Leave it out.")
        return super().__new__(cls)

    def _default(self, name: str) -> Any:
        return self.__dataclass_fields__[name].default

    def _map_former_fields(self) -> None:
        """
        Move values set under a former name to today's name. Call this from `__post_init__`, so that the warnings point
        to the user's code.
        """
        for old, new in RENAMED.items():
            value = getattr(self, old)
            if value is None:
                continue
            if getattr(self, new) not in (self._default(new), value):
                raise ValueError(
                    f"`{old}={value!r}` is the former name of `{new}`, which is set to {getattr(self, new)!r}. Set "
                    f"only `{new}`."
                )
            warnings.warn(f"`{old}` is now called `{new}`.", FutureWarning, stacklevel=4)
            setattr(self, new, value)
        if self.num_sample_generations:
            warnings.warn("`num_sample_generations` is now `log_completions=True`.", FutureWarning, stacklevel=4)
            self.log_completions = True

    def _validate_adapters(self) -> None:
        name = self.ref_adapter_name
        if name is None:
            return
        if not self.kl_enabled:
            raise ValueError(
                f"`ref_adapter_name={name!r}` has no effect while `kl_penalty_coef=0.0`. Unset it, or set "
                "`kl_monitor=True` to only measure the KL."
            )
        if name == self.model_adapter_name:
            raise ValueError(
                f"`ref_adapter_name={name!r}` is the adapter that is trained (`model_adapter_name`): the KL would "
                "always be 0. Choose another adapter."
            )
