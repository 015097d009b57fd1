"""A callback that adds KL control to trainers without a KLX counterpart."""

import math
import warnings
from dataclasses import replace
from typing import Any, cast

from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..control.steering import Steering
from ..controllers.advice import KLAdviser
from ..controllers.base import BatchMeasurement, KLController
from ..controllers.registry import get_kl_controller, get_kl_controller_class
from .driven_trainers import LOGGED_KLS, REFUSED_TRAINERS, LoggedKL
from .field_rules import doubt_target
from .tracker_alerts import TrackerAlerts


# Key of our state in `trainer_state.json`. It is deliberately not a class name: transformers would build a callback
# from that, and such a callback would not know its trainer.
STATE_KEY = "klx"


class KLXCallback(TrainerCallback):
    r"""
    Drives the KL coefficient `beta` of a trainer by a controller, from the KL that the trainer already logs.

    ```python
    trainer.add_callback(KLXCallback(trainer, target=0.05))
    ```

    The KL and its unit are the trainer's, and `target` has the same unit:

    | trainer | key | KL |
    |---|---|---|
    | [`~trl.GRPOTrainer`], `GMPOTrainer` | `kl` | `k3`, mean per token |
    | [`~trl.RLOOTrainer`] | `kl` | `k1`, mean per token |
    | `OnlineDPOTrainer` | `objective/kl` | `k1`, sum per completion |

    Subclasses of these trainers are accepted too. Any other trainer is refused unless `kl_key` is given, because the
    value it logs as a KL may be something else.

    A mean of `k1` may be negative by chance; it then counts as 0. The coefficient is updated when the trainer logs, at
    most once per generation batch, and is the same on all processes. Set `logging_steps=1` for the fastest response.
    The callback adds `klx/coef`, the coefficient applied up to that log, and `klx/target` to the log.

    The state is kept in `trainer_state.json`, and a resumed run continues from it. The KL of steps that were saved but
    not yet logged is lost, just like the trainer's metrics, so make `save_steps` a multiple of `logging_steps`.

    Args:
        trainer ([`~transformers.Trainer`]):
            Trainer to which the callback is added. Its `beta` must not be 0, because TRL then has no reference.
        controller (`str` or [`KLController`], *optional*, defaults to `"hold"`):
            Registered name, or a controller that is ready for use.
        target (`float`, *optional*):
            KL to hold, in nats, in the unit of the KL that the trainer logs.
        coef (`float`, *optional*):
            First coefficient. If unset, the trainer's `beta`.
        kl_key (`str`, *optional*):
            Name of the KL in the trainer's log. If unset, the one in the table above. Set it for a trainer that is not
            in the table but logs the KL between its policy and its reference.
        **kwargs:
            Further settings of a controller that is given by name, see [`get_kl_controller`].
    """

    def __init__(
        self,
        trainer: Trainer,
        controller: str | KLController = "hold",
        target: float | None = None,
        coef: float | None = None,
        kl_key: str | None = None,
        **kwargs: Any,
    ):
        self._attribute = _find_coefficient(trainer)
        logged = _find_kl(trainer, kl_key)
        self.trainer = trainer
        beta = getattr(trainer, self._attribute)
        _check_beta(beta)
        built = _build_controller(controller, target, beta if coef is None else coef, coef is None, kwargs)
        unit = "sequence" if logged.key == "objective/kl" else "token"
        doubt = None if built.target is None or kl_key is not None else doubt_target(built.target, unit)
        if doubt is not None:
            warnings.warn(f"`target={built.target!r}` {doubt}", stacklevel=2)
        name = controller if isinstance(controller, str) else type(controller).__name__
        adviser = None if built.target is None else KLAdviser(built.target, name, built.max_coef, guarded=True)
        self._alerts = TrackerAlerts(trainer.args)
        self.steering = Steering(
            built,
            name=name,
            target=built.target,
            adviser=adviser,
            logger=get_logger(Steering.__module__),
            alert=self._alerts,
        )
        self.kl_key = logged.key
        args = trainer.args
        iterations = getattr(args, "num_iterations", 1)
        rows = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        # A batch that is trained on several times still counts once, so each step counts as a fraction of it.
        self._completions_per_step = rows * logged.completions_per_row / iterations
        micro_batches = getattr(args, "steps_per_generation", None) or args.gradient_accumulation_steps
        self._steps_per_generation = micro_batches * iterations / args.gradient_accumulation_steps
        self._step = 0  # of the last log
        self._seen_kl = False
        self._forget()

    def _forget(self) -> None:
        # Sums since the last update: KL times optimizer steps, steps with a KL, and all steps.
        self._kl_sum, self._kl_steps, self._steps = 0.0, 0, 0

    @property
    def controller(self) -> KLController:
        """The controller; `.value` is the coefficient in force."""
        return self.steering.controller

    def _apply(self) -> None:
        setattr(self.trainer, self._attribute, self.controller.value)

    # ---- Events ----

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        handler = self.trainer.callback_handler
        if state is not self.trainer.state:
            raise ValueError(
                "A `KLXCallback` was added to another trainer than the one it was built for. Build it for the trainer "
                "that it is added to: `trainer.add_callback(KLXCallback(trainer, ...))`."
            )
        if sum(isinstance(callback, KLXCallback) for callback in handler.callbacks) > 1:
            raise ValueError("The trainer has more than one `KLXCallback`, but only one coefficient. Add only one.")
        # First in line, so that trackers see what we add to the log. The list is replaced rather than changed, because
        # transformers is iterating over it.
        handler.callbacks = [self, *(callback for callback in handler.callbacks if callback is not self)]
        self._seen_kl = False
        self._step = state.global_step
        if state.global_step > 0:
            self._restore(_stored(state).get(STATE_KEY))
        self._apply()
        self._store(state)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.steering.clock.tick(float(kwargs["optimizer"].param_groups[0]["lr"]))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.steering.sum_up()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        # Only the training loop's log has the loss. It is also the only log that every process takes part in.
        if logs is None or "loss" not in logs:
            return
        if self.kl_key not in logs and not self._seen_kl:
            raise ValueError(
                f"{type(self.trainer).__name__} logs no {self.kl_key!r} from which to drive its `beta`. It logs "
                f"{', '.join(sorted(logs))}. Name its KL in `kl_key`; a trainer that logs none cannot be driven."
            )
        self._seen_kl = True
        self._alerts.flush()  # of a resume, when no tracker had begun
        added = {"klx/coef": self.controller.value}
        if self.controller.target is not None:
            added["klx/target"] = self.controller.target
        logs.update(added)
        state.log_history[-1].update(added)  # transformers has already stored a copy
        self._count(state.global_step - self._step, logs.get(self.kl_key))
        self._step = state.global_step
        self._store(state)

    # ---- Coefficient ----

    def _count(self, steps: int, kl: float | None) -> None:
        """Add the KL of the last optimizer steps, and update the coefficient after a whole generation batch."""
        # Some trainers log different values on each process, but the coefficient must be the same on all of them.
        kl = broadcast_object_list([kl])[0]
        self._steps += steps
        if kl is not None and not math.isfinite(kl):
            self.controller.update(kl, 0)  # warns, once
        elif kl is not None:
            self._kl_sum += kl * steps
            self._kl_steps += steps
        if self._kl_steps == 0 or self._steps < self._steps_per_generation:
            return
        batch = BatchMeasurement(
            max(self._kl_sum / self._kl_steps, 0.0),
            self._steps * self._completions_per_step,
            *self.steering.clock.pop(),
            applied=self.controller.value,
        )
        self.steering.learn(batch)
        self._forget()
        self._apply()

    # ---- State ----

    def _store(self, state: TrainerState) -> None:
        _stored(state)[STATE_KEY] = self.steering.state_dict() | {
            "step": self._step,
            "pending": [self._kl_sum, self._kl_steps, self._steps],
        }

    def _restore(self, saved: dict[str, Any] | None) -> None:
        if saved is None:
            warnings.warn(
                "The checkpoint holds no state of a `KLXCallback`. The coefficient starts from "
                f"{self.controller.value}.",
                stacklevel=2,
            )
            return
        self.steering.load_state_dict(saved, "trainer_state.json")
        self._step = saved["step"]
        self._kl_sum, self._kl_steps, self._steps = saved["pending"]


def _stored(state: TrainerState) -> dict[str, Any]:
    # Annotated as a list of callbacks, which transformers turns into a dict of their states.
    return cast(dict[str, Any], state.stateful_callbacks)


def _find_coefficient(trainer: Trainer) -> str:
    """Return the name of the attribute that holds the trainer's coefficient."""
    if not isinstance(trainer, Trainer):
        raise TypeError(
            f"`trainer` must be a `Trainer`, got {trainer!r}. Build the trainer first, then add the callback: "
            "`trainer.add_callback(KLXCallback(trainer, ...))`."
        )
    name = type(trainer).__name__
    if hasattr(trainer, "kl_controller"):
        raise ValueError(
            f"{name} has a KL controller of its own. Set `kl_penalty_coef`, `kl_controller` and `kl_target` in its "
            "config instead of adding a `KLXCallback`."
        )
    # In some trainers `beta` is a read-only property over `_beta`.
    shown = getattr(type(trainer), "beta", None)
    attribute = "_beta" if isinstance(shown, property) and shown.fset is None else "beta"
    if not hasattr(trainer, attribute):
        raise ValueError(f"{name} has no coefficient `beta` for a `KLXCallback` to drive. Use {_list_trainers()}.")
    return attribute


def _find_kl(trainer: Trainer, kl_key: str | None) -> LoggedKL:
    """Find out how the trainer logs the KL of its policy. A trainer that is not in the table needs a `kl_key`."""
    name = type(trainer).__name__
    # The nearest known class decides, because a trainer may derive from one whose KL it does not log.
    parents = (cls.__name__ for cls in type(trainer).__mro__)
    known = next((parent for parent in parents if parent in LOGGED_KLS or parent in REFUSED_TRAINERS), None)
    if known is not None and known in LOGGED_KLS:
        return LOGGED_KLS[known] if kl_key is None else replace(LOGGED_KLS[known], key=kl_key)
    if kl_key is not None:
        return LoggedKL(kl_key)
    kind = "" if known in (name, None) else f", a {known},"
    reason = "nothing is known about what it logs" if known is None else REFUSED_TRAINERS[known]
    raise ValueError(
        f"{name}{kind} cannot be driven by a `KLXCallback`: {reason}. Use {_list_trainers()}. If its log does hold "
        "KL(policy || reference), and `beta` is the coefficient of that KL, name the metric in `kl_key`."
    )


def _list_trainers() -> str:
    *others, last = (f"`{name}`" for name in LOGGED_KLS)
    return f"{', '.join(others)}, {last} or a subclass of one of them"


def _check_beta(beta: Any) -> None:
    if isinstance(beta, list | tuple):
        raise ValueError(f"`beta={beta!r}` is a schedule, which a controller cannot drive. Set one number.")
    if beta == 0.0:
        raise ValueError(
            f"`beta={beta!r}`: TRL then has no reference and logs no KL. Set `beta` to a positive value such as 0.05, "
            "which the controller starts from."
        )


def _build_controller(
    controller: str | KLController, target: float | None, coef: float, is_beta: bool, settings: dict[str, Any]
) -> KLController:
    if isinstance(controller, KLController):
        settings = {"target": target, "coef": None if is_beta else coef, **settings}
        ignored = {key: value for key, value in settings.items() if value is not None}
        if ignored:
            raise ValueError(
                f"{ignored} would be ignored: `controller` is a {type(controller).__name__} that already has its "
                "settings. Pass them to the controller, or pass `controller` by name."
            )
        return controller
    cls = get_kl_controller_class(controller)
    inert = [key for key in ("horizon", "min_coef", "max_coef") if key in settings and key not in cls.uses]
    if inert:
        given = ", ".join(f"`{key}={settings[key]!r}`" for key in inert)
        raise ValueError(f"{given} has no effect with `controller={controller!r}`. Choose a controller that uses it.")
    return get_kl_controller(controller, init_coef=coef, target=target, **settings)
