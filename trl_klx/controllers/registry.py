"""The registry of controllers: by name, from this package, from a user's decorator or from an entry point."""

import inspect
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from .base import SETTINGS, KLController
from .hold import HoldKLController
from .pid import PIDKLController
from .rules import AdaptiveKLController, ExponentialKLController, FixedKLController


ENTRY_POINT_GROUP = "trl_klx.kl_controllers"

_ControllerClass = TypeVar("_ControllerClass", bound=type[KLController])
_REGISTRY: dict[str, type[KLController]] = {
    "adaptive": AdaptiveKLController,
    "exponential": ExponentialKLController,
    "fixed": FixedKLController,
    "hold": HoldKLController,
    "pid": PIDKLController,
}


def _check_class(name: str, cls: object) -> None:
    if not (isinstance(cls, type) and issubclass(cls, KLController)):
        raise TypeError(f"KL controller {name!r} must be a subclass of `KLController`, but got {cls!r}.")


def register_kl_controller(name: str) -> Callable[[_ControllerClass], _ControllerClass]:
    """
    Class decorator that makes a controller available by name.

    Args:
        name (`str`):
            Name for `kl_controller` in a config.

    Example:

    ```python
    >>> from trl_klx import KLController, get_kl_controller, register_kl_controller


    >>> @register_kl_controller("step")
    ... class StepKLController(KLController):
    ...     needs_target = True
    ...
    ...     def _next(self, kl, n_steps):
    ...         return self.value * (1.1 if kl > self.target else 0.9)


    >>> get_kl_controller("step", init_coef=0.1, target=6.0).update(kl=8.0, n_steps=64)
    0.11000000000000001
    ```
    """

    def register(cls: _ControllerClass) -> _ControllerClass:
        _check_class(name, cls)
        known = _REGISTRY.get(name)
        # Running a notebook cell again redefines the same class; only a different class is a conflict.
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(
                f"KL controller name {name!r} is taken by {known.__module__}.{known.__qualname__}. Choose another "
                f"name for {cls.__module__}.{cls.__qualname__}."
            )
        _REGISTRY[name] = cls
        return cls

    return register


def _find_entry_points() -> dict[str, EntryPoint]:
    # Looked up each time: calls are rare, and packages may be installed while a notebook runs.
    return {entry_point.name: entry_point for entry_point in entry_points(group=ENTRY_POINT_GROUP)}


def list_kl_controllers(installed: bool = True) -> list[str]:
    """
    Names that [`get_kl_controller`] knows.

    Args:
        installed (`bool`, *optional*, defaults to `True`):
            Whether to include those of installed packages that are not imported yet. Listing does not import them.
    """
    return sorted({*_REGISTRY, *(_find_entry_points() if installed else ())})


def get_kl_controller_class(name: str) -> type[KLController]:
    """
    Look a controller class up by name, without building it.

    Args:
        name (`str`):
            A registered name, or that of an entry point in the group `trl_klx.kl_controllers`.

    Returns:
        `type[KLController]`: The class.
    """
    if name in _REGISTRY:
        return _REGISTRY[name]
    entry_point = _find_entry_points().get(name)
    if entry_point is None:
        raise ValueError(f"Unknown KL controller {name!r}. Choose one of {', '.join(list_kl_controllers())}.")
    try:
        cls = entry_point.load()
    except Exception as error:
        raise ImportError(
            f"KL controller {name!r} comes from the entry point {entry_point.value!r}, which failed to load: "
            f"{error!r}. Repair or uninstall the package that provides it."
        ) from error
    _check_class(name, cls)
    return _REGISTRY.setdefault(name, cls)


def _accepted_keywords(cls: type[KLController]) -> set[str]:
    # `**kwargs` means "and whatever the next class takes", so the walk ends at the first `__init__` without it.
    names: set[str] = set()
    for base in cls.__mro__:
        if "__init__" not in vars(base):
            continue
        parameters = list(inspect.signature(vars(base)["__init__"]).parameters.values())[1:]
        names.update(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
        if all(p.kind is not p.VAR_KEYWORD for p in parameters):
            break
    return names


def get_kl_controller(
    name: str,
    init_coef: float | None = None,
    target: float | None = None,
    horizon: float = 10000,
    min_coef: float = 1e-4,
    max_coef: float = 10.0,
    **kwargs: Any,
) -> KLController:
    """
    Build a controller by name.

    Args:
        name (`str`):
            A registered name, or that of an entry point in the group `trl_klx.kl_controllers`.
        init_coef (`float`, *optional*):
            First coefficient. Only `"hold"` can do without.
        target (`float`, *optional*):
            KL to hold, in nats.
        horizon (`float`, *optional*, defaults to `10000`):
            Horizon in episodes.
        min_coef (`float`, *optional*, defaults to `1e-4`):
            Lower bound of an adaptive coefficient.
        max_coef (`float`, *optional*, defaults to `10.0`):
            Upper bound of an adaptive coefficient.
        **kwargs:
            Further arguments of the controller's class.

    Returns:
        [`KLController`]: The controller.
    """
    cls = get_kl_controller_class(name)
    accepted = _accepted_keywords(cls)
    defaults = inspect.signature(get_kl_controller).parameters
    settings = {"target": target, "horizon": horizon, "min_coef": min_coef, "max_coef": max_coef}
    for key, value in settings.items():
        # A class with a narrow `__init__` still works at the defaults; a setting it would ignore is refused.
        if key in accepted or value != defaults[key].default:
            kwargs[key] = value
    for key in kwargs:
        if key not in accepted:
            own = sorted(accepted - {"init_coef", *SETTINGS})
            raise ValueError(
                f"KL controller {name!r} ({cls.__name__}) takes no argument {key!r} (value {kwargs[key]!r}). Besides "
                f"the common settings it takes: {', '.join(own) or 'none'}."
            )
    return cls(init_coef=init_coef, **kwargs)  # type: ignore[arg-type]
