"""What a checkpoint of a KLX trainer holds beyond TRL's, and how it comes back."""

import os
import shutil
import warnings

from peft import PeftModel, set_peft_model_state_dict
from safetensors.torch import load_file
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..references.adapter_files import WEIGHTS_FILE
from ..references.loading import saved_steps
from ..references.moving import Weights
from ..references.peft_adapters import only_trained_adapter, trained_adapter
from .integrity import choose_checkpoint, mark_unfinished
from .kl_state import check_kl_reference, read_kl_reference, read_kl_state, write_kl_state


class KLXCheckpointMixin:
    """
    Saves controller, drift window and reference identity in every checkpoint and restores them on resume; keeps the
    reference adapter out of what is saved, and the reference checkpoint out of what `save_total_limit` deletes.
    """

    # The limit that `_save_checkpoint` has taken over from the host, while it runs.
    _klx_save_total_limit = None

    def train(self, resume_from_checkpoint=None, *args, **kwargs):
        if self.kl_reference is not None and resume_from_checkpoint:
            sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
            resume_from_checkpoint = choose_checkpoint(self.args.output_dir, resume_from_checkpoint, sharded)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _save(self, output_dir=None, state_dict=None):
        if self.kl_reference is None:
            return super()._save(output_dir, state_dict)
        # The arguments that are saved along with the model must say what the user said.
        hidden, self.args.save_total_limit = (
            self.args.save_total_limit,
            self._klx_save_total_limit or self.args.save_total_limit,
        )
        try:
            with only_trained_adapter(self.accelerator.unwrap_model(self.model)):
                super()._save(output_dir, state_dict)
        finally:
            self.args.save_total_limit = hidden

    def _save_checkpoint(self, model, trial):
        if self.kl_reference is None:
            return super()._save_checkpoint(model, trial)
        run_dir = self._get_output_dir(trial=trial)
        folder = os.path.join(run_dir, f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        protected = self.args.kl_penalty_reference_step
        if protected and protected == self.state.global_step:
            warnings.warn(
                f"No checkpoint is saved at step {protected}: {folder!r}, of an earlier run, is the KL reference and must "
                "not be written over. Use another `output_dir` and `kl_ref_adapter_path` to save it.",
                stacklevel=2,
            )
            return
        # Before the host's files: a checkpoint that the host holds for complete then has this state too.
        reference = self.kl_reference.state()  # on every process, because each may hold a part of it
        if self.args.should_save:
            mark_unfinished(folder)
            write_kl_state(folder, self.kl_control.state_dict(), reference)
        if not protected or not self.args.save_total_limit:
            return super()._save_checkpoint(model, trial)
        # The host's rotation knows one checkpoint to spare, the best one; ours spares the reference as well.
        limit = self._klx_save_total_limit = self.args.save_total_limit
        self.args.save_total_limit = None
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit, self._klx_save_total_limit = limit, None
        if self.args.should_save:
            self._klx_rotate_checkpoints(run_dir, limit, protected)

    def _klx_rotate_checkpoints(self, run_dir: str, limit: int, protected: int) -> None:
        """Keep `limit` checkpoints, among them the newest and the best as the host does, and besides the reference."""
        newest = self.state.global_step
        # Steps beyond the present one are of an earlier run in the same folder, and so are older.
        steps = sorted((step <= newest, step) for step in saved_steps(run_dir) if step != protected)
        folders = [f"{PREFIX_CHECKPOINT_DIR}-{step}" for _, step in steps]
        spared = {f"{PREFIX_CHECKPOINT_DIR}-{newest}", os.path.basename(self.state.best_model_checkpoint or "")}
        for folder in [folder for folder in folders if folder not in spared]:
            if len(folders) > limit:
                shutil.rmtree(os.path.join(run_dir, folder), ignore_errors=True)
                folders.remove(folder)

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        policy = self.accelerator.unwrap_model(self.model if model is None else model)
        weights = os.path.join(resume_from_checkpoint, WEIGHTS_FILE)
        if self.kl_reference is None or not isinstance(policy, PeftModel) or not os.path.isfile(weights):
            return
        # A checkpoint with a second adapter in a subfolder makes the host load that one and leave the trained adapter,
        # which lies at the top, at its initial weights.
        folders = (entry.path for entry in os.scandir(resume_from_checkpoint) if entry.is_dir())
        if any(os.path.isfile(os.path.join(folder, WEIGHTS_FILE)) for folder in folders):
            set_peft_model_state_dict(policy, load_file(weights), adapter_name=trained_adapter(policy))

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        if self.kl_reference is None or checkpoint is None:
            return
        state = read_kl_state(checkpoint)
        if state is None:
            warnings.warn(
                f"The checkpoint {checkpoint!r} holds no KL-control state: the coefficient starts from "
                f"`kl_penalty_coef={self.args.kl_penalty_coef}`, the drift window is empty, and a moving reference starts "
                "from the policy as it is now.",
                stacklevel=2,
            )
            if self.kl_reference.mover is not None:
                self.kl_reference.restart()
            return
        self._klx_check_reference(state["reference"], checkpoint)
        self._klx_load_reference(state["reference"], checkpoint)
        self.kl_control.load_state_dict(state, checkpoint)

    def _klx_load_reference(self, saved: dict, checkpoint: str) -> None:
        if self.kl_reference.mover is not None:
            self.kl_reference.load_state(self._klx_reference_weights(checkpoint))
        elif self.kl_reference.initial_adapter and saved.get("hash") != self.kl_reference.identity["hash"]:
            # A new adapter starts from noise, which need not have been seeded. The run's own start is in the checkpoint.
            self.kl_reference.load_state(self._klx_reference_weights(checkpoint))
            self.kl_reference.identity["hash"] = saved.get("hash")

    def _klx_reference_weights(self, checkpoint: str) -> Weights:
        """The weights of the reference in a checkpoint, which fit it."""
        # ZeRO-3 leaves no more of a weight's own shape than zero.
        shapes = {name: tuple(getattr(w, "ds_shape", w.shape)) for name, w in self.kl_reference.weights().items()}
        weights = read_kl_reference(checkpoint)
        check_kl_reference(checkpoint, weights, shapes)
        return weights

    def _klx_check_reference(self, saved: dict, checkpoint: str) -> None:
        # A reference may have moved to another folder; its kind and its weights must be the same.
        free = {"path", "hash"} if self.kl_reference.initial_adapter else {"path"}
        now = {key: value for key, value in self.kl_reference.identity.items() if key not in free}
        then = {key: value for key, value in saved.items() if key not in free}
        if now != then:
            raise ValueError(
                f"The KL reference is not the one that the checkpoint {checkpoint!r} was trained against: it was "
                f"{saved}, and now is {self.kl_reference.identity}. Set the reference fields as they were, or start a "
                "new run from this checkpoint's weights."
            )
