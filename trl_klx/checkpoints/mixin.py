"""Saving and restoring what a KLX trainer adds to TRL's checkpoints."""

import os
import shutil
import warnings
from typing import TYPE_CHECKING, Any

from peft import PeftModel, set_peft_model_state_dict
from safetensors.torch import load_file
from torch import nn
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..references.adapter_files import WEIGHTS_FILE
from ..references.base import KLReference
from ..references.loading import saved_steps
from ..references.moving import Weights
from ..references.peft_adapters import only_trained_adapter, trained_adapter
from .integrity import choose_checkpoint, mark_unfinished
from .kl_state import check_kl_reference, read_kl_reference, read_kl_state, write_kl_state


if TYPE_CHECKING:
    from transformers import Trainer
    from transformers.trainer_utils import TrainOutput

    from ..control.kl_control import KLControl
    from ..trainers.config import KLXGRPOConfig, KLXRLOOConfig

    # The mixin is only ever combined with a trainer, so it may use the trainer's attributes.
    _Host = Trainer
else:
    _Host = object


class KLXCheckpointMixin(_Host):
    """
    Saves controller, drift window and reference identity in every checkpoint and restores them on resume. It keeps the
    reference adapter out of the saved files, and protects the reference checkpoint from `save_total_limit`.
    """

    if TYPE_CHECKING:
        args: KLXGRPOConfig | KLXRLOOConfig
        kl_control: KLControl | None

    # The user's limit, while `_save_checkpoint` hides it from transformers.
    _klx_save_total_limit: int | None = None

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> "TrainOutput":
        if self.kl_control is not None and resume_from_checkpoint:
            sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
            resume_from_checkpoint = choose_checkpoint(self._get_output_dir(None), resume_from_checkpoint, sharded)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if self.kl_control is None:
            super()._save(output_dir, state_dict)
            return
        # Transformers saves `self.args` with the model, and the saved arguments must be the user's.
        hidden, self.args.save_total_limit = (
            self.args.save_total_limit,
            self._klx_save_total_limit or self.args.save_total_limit,
        )
        try:
            with only_trained_adapter(self.accelerator.unwrap_model(self.model)):
                super()._save(output_dir, state_dict)
        finally:
            self.args.save_total_limit = hidden

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        if self.kl_control is None:
            super()._save_checkpoint(model, trial)
            return
        run_dir = self._get_output_dir(trial=trial)
        folder = os.path.join(run_dir, f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        protected = self.args.kl_penalty_reference_step
        if protected and protected == self.state.global_step:
            warnings.warn(
                f"No checkpoint is saved at step {protected}: {folder!r}, from an earlier run, is the KL reference "
                "and must not be overwritten. To save this step, set another `output_dir`, and `kl_ref_adapter_path` "
                "for the reference.",
                stacklevel=2,
            )
            return
        # Our files come first, so that a checkpoint that transformers has finished always has them.
        reference = self.kl_control.reference.state()  # on every process, because each may hold a part of it
        if self.args.should_save:
            mark_unfinished(folder)
            write_kl_state(folder, self.kl_control.state_dict(), reference)
        if not protected or not self.args.save_total_limit:
            super()._save_checkpoint(model, trial)
            return
        # Transformers' rotation spares only the best checkpoint. Ours also spares the reference.
        limit = self._klx_save_total_limit = self.args.save_total_limit
        self.args.save_total_limit = None
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit, self._klx_save_total_limit = limit, None
        if self.args.should_save:
            self._klx_rotate_checkpoints(run_dir, limit, protected)

    def _klx_rotate_checkpoints(self, run_dir: str, limit: int, protected: int) -> None:
        """Keep `limit` checkpoints in addition to the reference. The newest and the best are always among them."""
        newest = self.state.global_step
        # Steps after the current one come from an earlier run in the same folder, so they are the oldest.
        steps = sorted((step <= newest, step) for step in saved_steps(run_dir) if step != protected)
        folders = [f"{PREFIX_CHECKPOINT_DIR}-{step}" for _, step in steps]
        spared = {f"{PREFIX_CHECKPOINT_DIR}-{newest}", os.path.basename(self.state.best_model_checkpoint or "")}
        for folder in [folder for folder in folders if folder not in spared]:
            if len(folders) > limit:
                shutil.rmtree(os.path.join(run_dir, folder), ignore_errors=True)
                folders.remove(folder)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        policy = self.accelerator.unwrap_model(self.model if model is None else model)
        weights = os.path.join(resume_from_checkpoint, WEIGHTS_FILE)
        if self.kl_control is None or not isinstance(policy, PeftModel) or not os.path.isfile(weights):
            return
        # If a subfolder holds a second adapter, transformers loads that one, and the trained adapter in the checkpoint
        # folder itself would stay at its initial weights.
        folders = (entry.path for entry in os.scandir(resume_from_checkpoint) if entry.is_dir())
        if any(os.path.isfile(os.path.join(folder, WEIGHTS_FILE)) for folder in folders):
            set_peft_model_state_dict(policy, load_file(weights), adapter_name=trained_adapter(policy))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if self.kl_control is None or checkpoint is None:
            return
        reference = self.kl_control.reference
        state = read_kl_state(checkpoint)
        if state is None:
            warnings.warn(
                f"The checkpoint {checkpoint!r} holds no KL-control state: the coefficient starts from "
                f"`kl_penalty_coef={self.args.kl_penalty_coef}`, the drift window is empty, and a moving reference "
                "starts from the policy as it is now.",
                stacklevel=2,
            )
            if reference.mover is not None:
                reference.restart()
            return
        _check_identity(reference, state["reference"], checkpoint)
        _load_reference(reference, state["reference"], checkpoint)
        self.kl_control.load_state_dict(state, checkpoint)


def _check_identity(reference: KLReference, saved: dict[str, Any], checkpoint: str) -> None:
    # The reference's folder may have moved, but its kind and its weights must be the same.
    free = {"path", "hash"} if reference.initial_adapter else {"path"}
    now = {key: value for key, value in reference.identity.items() if key not in free}
    then = {key: value for key, value in saved.items() if key not in free}
    if now != then:
        raise ValueError(
            f"The KL reference is not the one that the checkpoint {checkpoint!r} was trained against: it was {saved}, "
            f"and is now {reference.identity}. Set the reference fields as they were, or start a new run from this "
            "checkpoint's weights."
        )


def _load_reference(reference: KLReference, saved: dict[str, Any], checkpoint: str) -> None:
    if reference.mover is not None:
        reference.load_state(_fitting_weights(reference, checkpoint))
    elif reference.initial_adapter and saved.get("hash") != reference.identity["hash"]:
        # A new adapter is initialised with random weights, possibly unseeded. The original ones are in the checkpoint.
        reference.load_state(_fitting_weights(reference, checkpoint))
        reference.identity["hash"] = saved.get("hash")


def _fitting_weights(reference: KLReference, checkpoint: str) -> Weights:
    """Read the reference's weights from a checkpoint, and check that they fit it."""
    # Under ZeRO-3 `.shape` is (0,); the real shape is in `ds_shape`.
    shapes = {name: tuple(getattr(weight, "ds_shape", weight.shape)) for name, weight in reference.weights().items()}
    weights = read_kl_reference(checkpoint)
    check_kl_reference(checkpoint, weights, shapes)
    return weights
