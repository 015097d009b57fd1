"""Saving and restoring what PPO adds to the checkpoints of a KLX trainer."""

import copy
import os
import warnings
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from torch import nn

from ..checkpoints.kl_state import read_finite_weights, read_json, write_json, write_weights
from .value_function import VALUE_MODULE, ValueFunction


if TYPE_CHECKING:
    from transformers import Trainer

    from .config import KLXPPOConfig
    from .reward_scaling import RewardScaler

    # The mixin is only ever combined with a trainer, so it may use the trainer's attributes.
    _Host = Trainer
else:
    _Host = object


VALUE_FILE = "value_function.safetensors"
STATE_FILE = "ppo_state.json"
RETURNS = "return_moments"


class PPOCheckpointMixin(_Host):
    """
    Saves the value function, its return scale and the state of the reward scaling in every checkpoint, and restores
    them on resume and with the best model. Keeps the value function out of the files that users load with
    `from_pretrained`.
    """

    value_function: ValueFunction
    if TYPE_CHECKING:
        args: KLXPPOConfig
        _ppo_scaler: RewardScaler

    _ppo_saving_checkpoint = False

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if state_dict is not None:
            state_dict = {key: value for key, value in state_dict.items() if not key.startswith(f"{VALUE_MODULE}.")}
        with self.value_function.hidden():
            super()._save(output_dir, state_dict)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call)
        if not self._ppo_saving_checkpoint:
            return
        assert output_dir is not None
        # Under DeepSpeed, only its own files hold the complete value function.
        values = None if self.is_deepspeed_enabled else self.value_function.state_dict()
        if self.args.should_save:
            state = self._ppo_scaler.state_dict() | {RETURNS: self.value_function.scale.state_dict()}
            write_json(os.path.join(output_dir, STATE_FILE), state)
            if values is not None:
                write_weights(os.path.join(output_dir, VALUE_FILE), values)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        # The parent decides whether and where to save, so `save_model` adds our files.
        self._ppo_saving_checkpoint = True
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._ppo_saving_checkpoint = False

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        # FSDP's own files include the value function, so the module must stay in place to receive it.
        with nullcontext() if self.is_fsdp_enabled else self.value_function.hidden():
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        self._ppo_load_value(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        assert best is not None
        with nullcontext() if self.is_fsdp_enabled or self.is_deepspeed_enabled else self.value_function.hidden():
            super()._load_best_model()
        if not self.is_deepspeed_enabled:
            self._ppo_load_value(best)
        self._ppo_load_state(best)

    def _ppo_load_value(self, checkpoint: str) -> None:
        path = os.path.join(checkpoint, VALUE_FILE)
        if not os.path.isfile(path):
            warnings.warn(
                f"The checkpoint {checkpoint!r} holds no value function: it starts from its initial weights.",
                stacklevel=3,
            )
            return
        try:
            self.value_function.load_state_dict(read_finite_weights(path))
        except Exception as error:
            # The other lines list every weight.
            reason = str(error).splitlines()[0]
            raise ValueError(
                f"Cannot resume: the value function in {path!r} cannot be loaded ({reason}). Build the trainer with "
                "the `value_model` and `num_value_layers` of that run, or delete the file to restart from the value "
                "function's initial weights."
            ) from error

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self._ppo_load_state(checkpoint)

    def _klx_try_restore(self, checkpoint: str, weights: bool = True) -> None:
        parent: Any = super()
        parent._klx_try_restore(checkpoint, weights)
        path = os.path.join(checkpoint, STATE_FILE)
        if os.path.isfile(path):
            state = read_json(path)
            copy.copy(self._ppo_scaler).load_state_dict(state)
            copy.copy(self.value_function.scale).load_state_dict(state.get(RETURNS), self.accelerator.device)

    def _ppo_load_state(self, checkpoint: str) -> None:
        path = os.path.join(checkpoint, STATE_FILE)
        if os.path.isfile(path):
            state = read_json(path)
            self._ppo_scaler.load_state_dict(state)
            self.value_function.scale.load_state_dict(state.get(RETURNS), self.accelerator.device)
        elif self.args.reward_scaling != "none":
            warnings.warn(
                f"The checkpoint {checkpoint!r} holds no state of `reward_scaling={self.args.reward_scaling!r}`: its "
                "statistics start from zero.",
                stacklevel=3,
            )
