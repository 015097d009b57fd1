"""The configs of our trainers: TRL's, with KL control."""

from dataclasses import dataclass, field
from typing import ClassVar

from trl import GRPOConfig, RLOOConfig

from .config_checks import KLConfigChecks


class _OneGeneration(int):
    """
    A 1 that passes TRL's check `num_generations < 2`, which is in the middle of a long `__post_init__` and which no
    setting disables. A 2 would be worse: TRL and our own checks would refuse odd batches and accept
    `kl_centering="group"`. So only `<` lies, and only until `__post_init__` puts the plain number back.
    """

    def __lt__(self, other: object) -> bool:
        return False


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
        if self.num_generations == 1 and self._takes_one_generation:
            self.num_generations = _OneGeneration(1)
        super().__post_init__()
        if isinstance(self.num_generations, _OneGeneration):
            self.num_generations = 1
        self._validate_kl_combinations()

    @property
    def _takes_one_generation(self) -> bool:
        """
        Whether one completion per prompt is enough. Where completions are compared, it is if the KL alone trains.
        The trainer knows whether there is a reward; a target says that there will be one.
        """
        return not self._compares_completions or (self.kl_penalty_enabled and self.kl_target is None)

    def _resolve_kl_defaults(self) -> None:
        for name, default in self._placement_defaults().items():
            if getattr(self, name) is None:
                setattr(self, name, default)


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
