"""KL control for TRL's reinforcement-learning trainers."""

from importlib import import_module
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from .controllers.base import BatchMeasurement, KLController
    from .controllers.hold import HoldKLController
    from .controllers.pid import PIDKLController
    from .controllers.registry import get_kl_controller, register_kl_controller
    from .controllers.rules import AdaptiveKLController, ExponentialKLController, FixedKLController
    from .maths.advantages import center_kl_advantages
    from .maths.estimators import estimate_kl
    from .ppo.config import KLXPPOConfig
    from .ppo.trainer import KLXPPOTrainer
    from .trainers.callback import KLXCallback
    from .trainers.config import KLXGRPOConfig, KLXRLOOConfig
    from .trainers.grpo import KLXGRPOTrainer, KLXTrainerMixin
    from .trainers.rloo import KLXRLOOMixin, KLXRLOOTrainer


__version__ = "0.1.0"

__all__ = [
    "AdaptiveKLController",
    "BatchMeasurement",
    "ExponentialKLController",
    "FixedKLController",
    "HoldKLController",
    "KLController",
    "KLXCallback",
    "KLXGRPOConfig",
    "KLXGRPOTrainer",
    "KLXPPOConfig",
    "KLXPPOTrainer",
    "KLXRLOOConfig",
    "KLXRLOOMixin",
    "KLXRLOOTrainer",
    "KLXTrainerMixin",
    "PIDKLController",
    "center_kl_advantages",
    "estimate_kl",
    "get_kl_controller",
    "register_kl_controller",
]

# Where each public name lives. Imported on first use: a trainer brings torch and TRL with it, which takes seconds that
# controllers and the `trl-klx` command do not need.
_MODULES = {
    "AdaptiveKLController": ".controllers.rules",
    "BatchMeasurement": ".controllers.base",
    "ExponentialKLController": ".controllers.rules",
    "FixedKLController": ".controllers.rules",
    "HoldKLController": ".controllers.hold",
    "KLController": ".controllers.base",
    "KLXCallback": ".trainers.callback",
    "KLXGRPOConfig": ".trainers.config",
    "KLXGRPOTrainer": ".trainers.grpo",
    "KLXPPOConfig": ".ppo.config",
    "KLXPPOTrainer": ".ppo.trainer",
    "KLXRLOOConfig": ".trainers.config",
    "KLXRLOOMixin": ".trainers.rloo",
    "KLXRLOOTrainer": ".trainers.rloo",
    "KLXTrainerMixin": ".trainers.grpo",
    "PIDKLController": ".controllers.pid",
    "center_kl_advantages": ".maths.advantages",
    "estimate_kl": ".maths.estimators",
    "get_kl_controller": ".controllers.registry",
    "register_kl_controller": ".controllers.registry",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
