"""KL control for TRL's reinforcement-learning trainers."""

from .advantages import center_kl_advantages
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
