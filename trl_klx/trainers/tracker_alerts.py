"""Warnings of KL control as alerts of the run's tracker, where it has them."""

import importlib
from collections.abc import Callable

from transformers import TrainingArguments


TITLE = "KL control"


def _alert_trackio(text: str) -> bool:
    trackio = importlib.import_module("trackio")
    try:
        trackio.alert(title=TITLE, text=text)
    except RuntimeError:  # its run has not begun
        return False
    return True


def _alert_wandb(text: str) -> bool:
    wandb = importlib.import_module("wandb")
    if wandb.run is None:
        return False
    wandb.run.alert(title=TITLE, text=text, level="WARN")
    return True


# Each sends one alert, and returns whether there is a run that took it.
SENDERS: dict[str, Callable[[str], bool]] = {"trackio": _alert_trackio, "wandb": _alert_wandb}


class TrackerAlerts:
    """
    Sends warnings to those trackers in `report_to` that have alerts: trackio and Weights & Biases.

    A warning from before the tracker's run has begun, such as that of a resume, waits for [`~TrackerAlerts.flush`].

    Args:
        args ([`~transformers.TrainingArguments`]):
            Config of the trainer.
    """

    def __init__(self, args: TrainingArguments):
        # Trackers run on the main process alone.
        names = list(args.report_to or ()) if args.process_index == 0 else []
        self._waiting: dict[str, list[str]] = {name: [] for name in names if name in SENDERS}

    def __call__(self, text: str) -> None:
        for texts in self._waiting.values():
            texts.append(text)
        self.flush()

    def flush(self) -> None:
        """Send what has waited for a run to begin."""
        for name, texts in self._waiting.items():
            while texts and SENDERS[name](texts[0]):
                texts.pop(0)
