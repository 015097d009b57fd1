"""A fresh start for a run that has stalled: the policy becomes the reference."""

from typing import Any

from .forward_passes import ForwardPassMixin


class ReferenceResetsMixin(ForwardPassMixin):
    """Resets the reference, when asked to and with `kl_ref_reset_patience`."""

    def reset_kl_reference(self, reset_optimizer: bool = False) -> None:
        """
        Make the policy, as it is now, the reference. Controller, drift window and stall window begin again. With
        several processes, all of them must call this at the same step.

        A batch that was scored against the earlier reference is trained on as it is, and teaches the controller
        nothing.

        Args:
            reset_optimizer (`bool`, *optional*, defaults to `False`):
                Whether to clear the optimizer's state too: that of the policy and, in PPO, of the value function.
        """
        if self.kl_control is None:
            raise ValueError("There is no KL reference to reset: KL control is off. Set `kl_target`.")
        reference = self.kl_control.reference
        if not reference.resettable:
            raise ValueError(
                f"The KL reference {reference.identity} cannot be reset: it is not a copy of the policy that could be "
                "overwritten by a later one. Set `kl_ref_reset_patience`, or `kl_penalty_reference_step=0` to start "
                "from a copy, and no other reference."
            )
        self.kl_control.reset_reference()
        if reset_optimizer and self.optimizer is not None:
            clear_state(self.optimizer)
        said = f"The KL reference is now the policy of step {self.state.global_step} (reset {reference.resets})."
        self.kl_control.logger.info(said)
        self.kl_control.send_alert(said)

    def _klx_reset_if_stalled(self) -> None:
        # Between two rollouts: no batch is then scored by one reference and trained against another.
        if self.kl_control is not None and self.kl_control.reset_due:
            self.reset_kl_reference(self.args.kl_ref_reset_optimizer)


def clear_state(optimizer: Any) -> None:
    """Clear the state of an optimizer, which creates it again at its next step."""
    # Accelerate and DeepSpeed wrap the optimizer that has the state.
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    optimizer.state.clear()
