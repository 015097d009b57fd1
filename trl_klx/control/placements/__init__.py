"""
Where the penalty enters training: one class per placement, see [`Placement`].
"""

from .advantage import AdvantagePlacement, GRPOAdvantage
from .base import (
    ALGORITHMS,
    Batch,
    Placement,
    ScorePlacement,
    get_placement,
    list_placements,
    register_placement,
)
from .loss import LossPlacement
from .reward import GRPOReward


__all__ = [
    "ALGORITHMS",
    "AdvantagePlacement",
    "Batch",
    "GRPOAdvantage",
    "GRPOReward",
    "LossPlacement",
    "Placement",
    "ScorePlacement",
    "get_placement",
    "list_placements",
    "register_placement",
]
