"""Saving and restoring what a KLX trainer adds to TRL's checkpoints."""

import copy
import functools
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from peft import PeftModel, set_peft_model_state_dict
from safetensors.torch import load_file
from torch import nn
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..references.adapter_files import WEIGHTS_FILE
from ..references.base import KLReference
from ..references.loading import saved_steps
from ..references.moving import LaggedReference, Weights
from ..references.peft_adapters import only_trained_adapter, trained_adapter
from ..references.sharding import whole_shape
from .checksums import write_checksums
from .integrity import choose_checkpoint, mark_unfinished, saved_step
from .kl_state import STATE_FILE, check_kl_reference, read_kl_reference, read_kl_state, write_kl_state
from .main_process import on_main_process
from .run_lock import RunLock


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
    reference adapter out of the saved files, and other runs out of the folder while it trains. It protects the
    reference checkpoint from `save_total_limit`.
    """

    if TYPE_CHECKING:
        args: KLXGRPOConfig | KLXRLOOConfig
        kl_control: KLControl | None

    # The user's limit, while `_save_checkpoint` hides it from transformers.
    _klx_save_total_limit: int | None = None
    _klx_lock: RunLock | None = None

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> "TrainOutput":
        if self.kl_control is None:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        with self._klx_locked():
            if resume_from_checkpoint:
                resume_from_checkpoint = self._klx_choose_checkpoint(resume_from_checkpoint)
            return super().train(resume_from_checkpoint, *args, **kwargs)

    @contextmanager
    def _klx_locked(self) -> Iterator[None]:
        """Keep other runs out of the folder."""
        lock = RunLock(self._get_output_dir(None))
        on_main_process(self.accelerator, lock.acquire)
        self._klx_lock = lock
        try:
            yield
        finally:
            self._klx_lock = None
            lock.release()

    def _klx_choose_checkpoint(self, asked: str | bool) -> str | bool:
        """The checkpoint to resume from, the same on every process."""
        sharded = bool(self.is_fsdp_enabled or self.is_deepspeed_enabled)
        # Before an engine has sharded the policy, its weights may have other names.
        restore = functools.partial(self._klx_try_restore, weights=not sharded)
        # The main process reads all files once. A process for each device of a machine would read them many times.
        return on_main_process(
            self.accelerator, lambda: choose_checkpoint(self._get_output_dir(None), asked, sharded, restore)
        )

    def _klx_try_restore(self, checkpoint: str, weights: bool = True) -> None:
        """
        Raise a `ValueError` if the state in a checkpoint is damaged. Nothing is changed; a subclass adds its own.

        Args:
            checkpoint (`str`):
                Checkpoint folder.
            weights (`bool`, *optional*, defaults to `True`):
                Whether to look at the reference's weights too.
        """
        assert self.kl_control is not None
        state = read_kl_state(checkpoint)
        if state is None:
            return
        trial = copy.copy(self.kl_control)
        for name in ("controller", "drift", "adviser", "clock", "stall"):
            setattr(trial, name, copy.deepcopy(getattr(trial, name)))  # all of them are plain numbers
        trial.alert = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they come when the state is restored
            _load_control(trial, state, checkpoint)
        reference = self.kl_control.reference
        if weights and _identity_fault(reference, state["reference"]) is None:
            _needed_weights(reference, state["reference"], checkpoint)

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
            if self._klx_lock is not None:
                self._klx_lock.check()
            mark_unfinished(folder)
            write_kl_state(folder, self._klx_state(), reference)
        self._klx_save_and_rotate(model, trial, run_dir)
        # Other processes may still be writing their random states.
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            write_checksums(folder)

    def _klx_state(self) -> dict[str, Any]:
        """The KL-control state, and to what it belongs."""
        assert self.kl_control is not None
        state = self.kl_control.state_dict() | {"step": self.state.global_step, "measured": _measured(self.kl_control)}
        # Processes on other machines may write their random states into folders that are not seen here.
        if os.environ.get("LOCAL_WORLD_SIZE", "1") == str(self.args.world_size):
            state["processes"] = self.args.world_size
        return state

    def _klx_save_and_rotate(self, model: nn.Module, trial: Any, run_dir: str) -> None:
        protected = self.args.kl_penalty_reference_step
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
        fault = _identity_fault(reference, state["reference"]) or _resets_fault(reference, state["reference"])
        if fault is not None:
            raise ValueError(
                f"The KL reference is not the one that the checkpoint {checkpoint!r} was trained against: {fault}. "
                "Set the reference fields as they were, or start a new run from this checkpoint's weights."
            )
        weights = _needed_weights(reference, state["reference"], checkpoint)
        _load_control(self.kl_control, state, checkpoint)
        if weights is not None:
            reference.load_state(weights)
        reference.resets = state["reference"].get("resets", 0)
        if reference.initial_adapter:
            reference.identity["hash"] = state["reference"].get("hash")


def _measured(control: "KLControl") -> dict[str, str]:
    """What the numbers in the state are: a state in another unit or of another statistic means something else."""
    return {"kl_target_unit": control.unit, "kl_statistic": control.statistic}


def _load_control(control: "KLControl", state: dict[str, Any], checkpoint: str) -> None:
    now, then = _measured(control), state.get("measured")
    if control.statistic_is_default and then in [now | {"kl_statistic": known} for known in ("k3", "full")]:
        control.statistic = then["kl_statistic"]  # the run began with it, and nobody has chosen another one since
        now = then
    if then not in (None, now):
        warnings.warn(
            f"The KL is measured otherwise than in the checkpoint {checkpoint!r} ({then} then, {now} now): controller "
            "and drift window start from the config.",
            stacklevel=3,
        )
        return
    try:
        control.load_state_dict(state, checkpoint)
    except (ArithmeticError, LookupError, TypeError, AttributeError, RecursionError) as error:
        path = os.path.join(checkpoint, STATE_FILE)
        raise ValueError(
            f"Cannot resume: the state in {path!r} is not valid ({type(error).__name__}: {error}). Resume from "
            "another checkpoint, or delete the file to start KL control from the config."
        ) from error


def _identity_fault(reference: KLReference, saved: dict[str, Any]) -> str | None:
    # The reference's folder may have moved, but its kind and its weights must be the same.
    free = {"path", "hash", "resets"} if reference.initial_adapter else {"path", "resets"}
    now = {key: value for key, value in reference.identity.items() if key not in free}
    then = {key: value for key, value in saved.items() if key not in free}
    return None if now == then else f"it was {saved}, and is now {reference.identity}"


def _resets_fault(reference: KLReference, saved: dict[str, Any]) -> str | None:
    resets = saved.get("resets", 0)
    if type(resets) is not int or resets < 0:
        return f"it was reset {resets!r} times"
    if resets and not reference.resettable:
        return f"it was reset {resets} times, and cannot be reset now"
    if reference.resets and not resets:
        return "this trainer has reset it since. Build a new trainer to resume from this checkpoint"
    return None


def _needed_weights(reference: KLReference, saved: dict[str, Any], checkpoint: str) -> Weights | None:
    """The weights of the reference that only the checkpoint has, or `None` if the reference has them already."""
    # A new adapter is initialised with random weights, possibly unseeded. The original ones are in the checkpoint.
    drawn_anew = reference.initial_adapter and saved.get("hash") != reference.identity["hash"]
    needed = reference.mover is not None or drawn_anew or saved.get("resets")
    return _fitting_weights(reference, checkpoint) if needed else None


def _fitting_weights(reference: KLReference, checkpoint: str) -> Weights:
    """Read the reference's weights from a checkpoint, and check that they fit it."""
    shapes = {name: whole_shape(weight) for name, weight in reference.weights().items()}
    weights = read_kl_reference(checkpoint)
    lag = reference.mover.lag if isinstance(reference.mover, LaggedReference) else None
    check_kl_reference(checkpoint, weights, shapes, lag, saved_step(checkpoint))
    return weights
