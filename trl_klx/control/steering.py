"""From the measured KL to the next coefficient: controller, diagnostics and their state, without a reference."""

import logging
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from ..controllers.advice import KLAdviser
from ..controllers.base import BatchMeasurement, KLController
from ..controllers.drift import DriftMonitor
from .step_clock import StepClock


class Steering:
    """
    Owns what follows from a measured KL: the controller, the drift diagnostics, the advice, and their state.

    Args:
        controller ([`KLController`]):
            Maps the measured KL to the next coefficient.
        name (`str`, *optional*, defaults to `"fixed"`):
            Name of the controller, kept in the state.
        target (`float`, *optional*):
            KL to hold, in nats.
        unit (`str`, *optional*, defaults to `"sequence"`):
            Unit of target and KL: `"sequence"` or `"token"`.
        drift ([`DriftMonitor`], *optional*):
            Drift diagnostics.
        adviser ([`KLAdviser`], *optional*):
            Advice on what the controller cannot do.
        penalises (`bool`, *optional*, defaults to `True`):
            Whether the coefficient is applied. If `False`, the KL is only measured.
        guards_lr (`bool`, *optional*, defaults to `False`):
            Whether the controller scales the learning rate too.
        logger (`logging.Logger` or `logging.LoggerAdapter`, *optional*):
            Where warnings and advice go. If unset, the logger of this module.
        alert (`Callable[[str], None]`, *optional*):
            Gets every warning of a running training too, and every reset, for the alerts of a tracker.
    """

    def __init__(
        self,
        controller: KLController,
        *,
        name: str = "fixed",
        target: float | None = None,
        unit: str = "sequence",
        drift: DriftMonitor | None = None,
        adviser: KLAdviser | None = None,
        penalises: bool = True,
        guards_lr: bool = False,
        logger: "logging.Logger | logging.LoggerAdapter[logging.Logger] | None" = None,
        alert: Callable[[str], None] | None = None,
    ):
        self.controller = controller
        self.name = name
        self.target = target
        self.unit = unit
        self.drift = drift
        self.adviser = adviser
        self.penalises = penalises
        self.guards_lr = guards_lr
        self.clock = StepClock()
        self.logger = logging.getLogger(__name__) if logger is None else logger
        self.alert = alert
        self._first_state = controller.state_dict()

    def learn(self, batch: BatchMeasurement) -> None:
        """
        Update the coefficient, and warn and advise where there is reason to.

        Args:
            batch ([`BatchMeasurement`]):
                What was measured on one generation batch.
        """
        if self.penalises:
            self.controller.observe(batch)
        coef = self.controller.value if batch.applied is None else batch.applied
        warning = None if self.drift is None else self.drift.update(batch.kl)
        advice = None if self.adviser is None else self.adviser.update(batch, coef)
        for text in (warning, advice):
            if text is not None:
                self.logger.warning(text)
                self.send_alert(text)

    def start_over(self) -> None:
        """Forget what was measured, as before the first batch. Advice that was given is not given again."""
        self.controller.load_state_dict(self._first_state)
        self.clock = StepClock()
        if self.drift is not None:
            self.drift.start_over()
        if self.adviser is not None:
            self.adviser.start_over()

    def sum_up(self) -> None:
        """Say in one line whether the target was held."""
        if self.adviser is not None:
            summary = self.adviser.summary()
            self.logger.log(logging.INFO if summary.startswith("KL held") else logging.WARNING, summary)

    def send_alert(self, text: str) -> None:
        """Send an alert to the tracker, where there is one."""
        if self.alert is not None:
            self.alert(text)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps, as plain JSON values."""
        return {
            "controller": {
                "name": self.name,
                "init_coef": self.controller.init_coef,
                "state": self.controller.state_dict(),
            },
            "drift": None if self.drift is None else self.drift.state_dict(),
            "advice": None if self.adviser is None else self.adviser.state_dict(),
            "clock": self.clock.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], source: str) -> None:
        """
        Restore what [`~Steering.state_dict`] returned.

        Args:
            state (`Mapping[str, Any]`):
                The saved state.
            source (`str`):
                Where it comes from, for messages.
        """
        self._load_controller(state["controller"], source)
        self.clock.load_state_dict(state.get("clock"), source)
        for name, part in (("drift", self.drift), ("advice", self.adviser)):
            if part is not None and state.get(name) is not None:
                try:
                    part.load_state_dict(state[name])
                except (TypeError, ValueError) as error:
                    what = "drift window" if name == "drift" else "advice"
                    raise ValueError(f"Cannot resume: the {what} in {source!r} is not valid ({error})") from error

    def _load_controller(self, saved: Mapping[str, Any], source: str) -> None:
        settings = {"name": self.name, "init_coef": self.controller.init_coef}
        changed = {key: saved.get(key) for key, value in settings.items() if saved.get(key) != value}
        if changed:
            text = (
                f"The KL controller was changed since the checkpoint {source!r} ({changed} then, {settings} now): it "
                "starts from the config."
            )
            warnings.warn(text, stacklevel=4)
            self.send_alert(text)
            return
        try:
            self.controller.load_state_dict(saved.get("state"))  # type: ignore[arg-type]
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise ValueError(f"Cannot resume: the controller state in {source!r} is not valid ({error}).") from error
