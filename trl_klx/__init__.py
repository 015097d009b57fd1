"""KL control for TRL's reinforcement-learning trainers."""

from importlib import import_module
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from .advantages import center_kl_advantages
    from .callbacks import KLXCallback
    from .configs import KLXGRPOConfig, KLXRLOOConfig
    from .controllers import (
        AdaptiveKLController,
        ExponentialKLController,
        FixedKLController,
        KLController,
        PIDKLController,
    )
    from .estimators import estimate_kl
    from .registry import get_kl_controller, register_kl_controller
    from .trainers.grpo import KLXGRPOTrainer
    from .trainers.ppo import KLXPPOTrainer
    from .trainers.ppo_config import KLXPPOConfig
    from .trainers.rloo import KLXRLOOTrainer


__version__ = "0.1.0"

__all__ = [
    "AdaptiveKLController",
    "ExponentialKLController",
    "FixedKLController",
    "KLController",
    "KLXCallback",
    "KLXGRPOConfig",
    "KLXGRPOTrainer",
    "KLXPPOConfig",
    "KLXPPOTrainer",
    "KLXRLOOConfig",
    "KLXRLOOTrainer",
    "PIDKLController",
    "center_kl_advantages",
    "estimate_kl",
    "get_kl_controller",
    "register_kl_controller",
]

# Where each public name lives. Imported on first use: a trainer brings torch and TRL with it, which takes seconds that
# controllers and the `trl-klx` command do not need.
_MODULES = {
    "AdaptiveKLController": ".controllers",
    "ExponentialKLController": ".controllers",
    "FixedKLController": ".controllers",
    "KLController": ".controllers",
    "KLXCallback": ".callbacks",
    "KLXGRPOConfig": ".configs",
    "KLXGRPOTrainer": ".trainers.grpo",
    "KLXPPOConfig": ".trainers.ppo_config",
    "KLXPPOTrainer": ".trainers.ppo",
    "KLXRLOOConfig": ".configs",
    "KLXRLOOTrainer": ".trainers.rloo",
    "PIDKLController": ".controllers",
    "center_kl_advantages": ".advantages",
    "estimate_kl": ".estimators",
    "get_kl_controller": ".registry",
    "register_kl_controller": ".registry",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
