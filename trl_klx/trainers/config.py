"""The configs of our trainers: TRL's, with KL control."""

from dataclasses import dataclass, field
from typing import ClassVar

from trl import GRPOConfig, RLOOConfig

from .config_checks import KLConfigChecks


@dataclass
class KLXConfigMixin(KLConfigChecks):
    """
    KL control for any TRL config: the fields of [`KLFields`] and their checks. To add it to a config of your own,
    derive from this class first and from that config second, and set `_algorithm`.
    """

    def __post_init__(self) -> None:
        self._validate_kl_values()
        # After the values are known to be sound, and before the parent reads `beta`.
        self._resolve_kl_defaults()
        super().__post_init__()
        self._validate_kl_combinations()

    def _resolve_kl_defaults(self) -> None:
        for name, default in self._placement_defaults().items():
            if getattr(self, name) is None:
                setattr(self, name, default)
        if self.kl_statistic is None:
            self.kl_statistic = "full" if self.kl_estimator == "full" else "k3"


@dataclass
class KLXGRPOConfig(KLXConfigMixin, GRPOConfig):
    """
    [`~trl.GRPOConfig`] with the KL-control fields of [`KLFields`].
    """

    _algorithm: ClassVar[str] = "grpo"


@dataclass
class KLXRLOOConfig(KLXConfigMixin, RLOOConfig):
    """
    [`~trl.RLOOConfig`] with the KL-control fields of [`KLFields`]. TRL penalises the KL in RLOO by default; with
    `kl_target` or `kl_penalty_coef` a `beta` that was not given is 0, so that the KL is penalised once.
    """

    _algorithm: ClassVar[str] = "rloo"

    # TRL's field cannot be None, and neither can ours once `_resolve_kl_defaults` has run.
    beta: float | None = field(  # type: ignore[assignment]
        default=None,
        metadata={
            "help": "TRL's KL coefficient. If unset, TRL's default, and 0.0 with `kl_target` or `kl_penalty_coef`, "
            "which take its place."
        },
    )

    def _resolve_kl_defaults(self) -> None:
        super()._resolve_kl_defaults()
        if self.beta is None:
            self.beta = 0.0 if self.kl_penalty_enabled else RLOOConfig.beta
