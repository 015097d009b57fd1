"""What a user can change when the KL is not where it should be."""


def how_to_lower_kl(controller: str, guarded: bool = False) -> str:
    """
    What to change when the KL stays above its target.

    Args:
        controller (`str`):
            Name of the controller in use.
        guarded (`bool`, *optional*, defaults to `False`):
            Whether `kl_lr_guard` is on.
    """
    if controller == "hold":
        guard = "" if guarded else ", or set `kl_lr_guard=True`"
        return f"Lower `learning_rate` or the optimizer steps per rollout{guard}."
    if controller == "fixed":
        return "Raise `kl_penalty_coef`, or set `kl_controller='hold'`, which needs no tuning."
    return f"`kl_controller={controller!r}` did not hold it; `kl_controller='hold'` needs no tuning."


def how_to_raise_kl(controller: str) -> str:
    """
    What to change when the KL stays below its target.

    Args:
        controller (`str`):
            Name of the controller in use.
    """
    if controller == "hold":
        return "Train longer, raise `learning_rate`, or lower `kl_target` to what the reward asks for."
    if controller == "fixed":
        return "Lower `kl_penalty_coef`, or set `kl_controller='hold'`."
    return "Lower `kl_penalty_coef` and `kl_coef_min`, or set `kl_controller='hold'`."
