"""How much shorter a step must be for a coefficient to hold the KL."""


def lr_guard_factor(free_speed: float | None, optimizer_steps: float = 1, most: float = 1 / 6) -> float:
    """
    Factor, at most 1, by which to scale the learning rate so that the steps of one rollout cannot move the KL by more
    than the target allows. No coefficient can make up for a step that is too long.

    Args:
        free_speed (`float`, *optional*):
            How far one optimizer step moves `sqrt(kl / target)` at the unscaled learning rate, see
            [`HoldKLController.free_speed`]. `None` before the first move: the factor is 1.
        optimizer_steps (`float`, *optional*, defaults to `1`):
            Optimizer steps per rollout.
        most (`float`, *optional*, defaults to `1/6`):
            Greatest move of `sqrt(kl / target)` in one rollout. A sixth is a third of the target in KL, at the target.
    """
    if free_speed is None or free_speed <= 0.0 or optimizer_steps <= 0:
        return 1.0
    return min(1.0, most / (free_speed * optimizer_steps))
