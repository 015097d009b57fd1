"""How much shorter a step must be for a coefficient to hold the KL."""

import math


def lr_guard_factor(way: float, random_way: float = 0.0, most: float = 1 / 6) -> float:
    """
    Factor, at most 1, by which to scale the learning rate so that the steps of one rollout cannot move the KL by more
    than the target allows. No coefficient can make up for a step that is too long.

    Args:
        way (`float`):
            How far the steps of one rollout move `sqrt(kl / target)` at the unscaled learning rate, by what they
            follow.
        random_way (`float`, *optional*, defaults to `0.0`):
            Length of the random part of those steps. It has no direction, so that at the target it adds half of its
            square.
        most (`float`, *optional*, defaults to `1/6`):
            Greatest move of `sqrt(kl / target)` in one rollout. A sixth is a third of the target in KL, at the target.
    """
    if way + 0.5 * random_way**2 <= most:
        return 1.0
    # The positive root of way * factor + random_way^2 / 2 * factor^2 = most.
    return 2.0 * most / (way + math.sqrt(way**2 + 2.0 * random_way**2 * most))
