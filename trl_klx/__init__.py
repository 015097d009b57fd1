"""KL control for TRL's reinforcement-learning trainers."""

from importlib import import_module
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from .control.kl_control import KLControl
    from .control.metrics import Sums, read_metrics
    from .control.placements import Placement, ScorePlacement, register_placement
    from .control.rollout import Rollout, Scored
    from .controllers.advice import KLAdviser
    from .controllers.base import BatchMeasurement, KLController, KLControllerState
    from .controllers.drift import DriftMonitor
    from .controllers.hold import HoldKLController
    from .controllers.pid import PIDKLController
    from .controllers.registry import get_kl_controller, list_kl_controllers, register_kl_controller
    from .controllers.rules import AdaptiveKLController, ExponentialKLController, FixedKLController
    from .controllers.tracking_error import relative_rms_error, steps_to_settle
    from .maths.advantages import center_kl_advantages
    from .maths.estimators import estimate_kl, register_kl_estimator
    from .ppo.config import KLXPPOConfig
    from .ppo.trainer import KLXPPOTrainer
    from .references.base import KLReference
    from .references.kinds import ReferenceKind, register_reference_kind
    from .references.moving import SyncedReference
    from .references.sharding import loaded_whole
    from .trainers.callback import KLXCallback
    from .trainers.config import KLXConfigMixin, KLXGRPOConfig, KLXRLOOConfig
    from .trainers.grpo import KLXGRPOTrainer, KLXTrainerMixin
    from .trainers.reward_timeout import reward_timeout
    from .trainers.rloo import KLXRLOOMixin, KLXRLOOTrainer


__version__ = "0.1.0"

__all__ = [
    "AdaptiveKLController",
    "BatchMeasurement",
    "DriftMonitor",
    "ExponentialKLController",
    "FixedKLController",
    "HoldKLController",
    "KLAdviser",
    "KLControl",
    "KLController",
    "KLControllerState",
    "KLReference",
    "KLXCallback",
    "KLXConfigMixin",
    "KLXGRPOConfig",
    "KLXGRPOTrainer",
    "KLXPPOConfig",
    "KLXPPOTrainer",
    "KLXRLOOConfig",
    "KLXRLOOMixin",
    "KLXRLOOTrainer",
    "KLXTrainerMixin",
    "PIDKLController",
    "Placement",
    "ReferenceKind",
    "Rollout",
    "ScorePlacement",
    "Scored",
    "Sums",
    "SyncedReference",
    "center_kl_advantages",
    "estimate_kl",
    "get_kl_controller",
    "list_kl_controllers",
    "loaded_whole",
    "read_metrics",
    "register_kl_controller",
    "register_kl_estimator",
    "register_placement",
    "register_reference_kind",
    "relative_rms_error",
    "steps_to_settle",
    "reward_timeout",
]

# Where each public name lives. Imported on first use: a trainer brings torch and TRL with it, which takes seconds that
# controllers and the `trl-klx` command do not need.
_MODULES = {
    "AdaptiveKLController": ".controllers.rules",
    "BatchMeasurement": ".controllers.base",
    "DriftMonitor": ".controllers.drift",
    "ExponentialKLController": ".controllers.rules",
    "FixedKLController": ".controllers.rules",
    "HoldKLController": ".controllers.hold",
    "KLAdviser": ".controllers.advice",
    "KLControl": ".control.kl_control",
    "KLController": ".controllers.base",
    "KLControllerState": ".controllers.base",
    "KLReference": ".references.base",
    "KLXCallback": ".trainers.callback",
    "reward_timeout": ".trainers.reward_timeout",
    "KLXConfigMixin": ".trainers.config",
    "KLXGRPOConfig": ".trainers.config",
    "KLXGRPOTrainer": ".trainers.grpo",
    "KLXPPOConfig": ".ppo.config",
    "KLXPPOTrainer": ".ppo.trainer",
    "KLXRLOOConfig": ".trainers.config",
    "KLXRLOOMixin": ".trainers.rloo",
    "KLXRLOOTrainer": ".trainers.rloo",
    "KLXTrainerMixin": ".trainers.grpo",
    "PIDKLController": ".controllers.pid",
    "Placement": ".control.placements",
    "ReferenceKind": ".references.kinds",
    "Rollout": ".control.rollout",
    "ScorePlacement": ".control.placements",
    "Scored": ".control.rollout",
    "Sums": ".control.metrics",
    "SyncedReference": ".references.moving",
    "center_kl_advantages": ".maths.advantages",
    "estimate_kl": ".maths.estimators",
    "get_kl_controller": ".controllers.registry",
    "list_kl_controllers": ".controllers.registry",
    "loaded_whole": ".references.sharding",
    "read_metrics": ".control.metrics",
    "register_kl_controller": ".controllers.registry",
    "register_kl_estimator": ".maths.estimators",
    "register_placement": ".control.placements",
    "register_reference_kind": ".references.kinds",
    "relative_rms_error": ".controllers.tracking_error",
    "steps_to_settle": ".controllers.tracking_error",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
