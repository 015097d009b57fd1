"""A reward function that hangs ends the run with an error that names it."""

import asyncio
import functools
import inspect
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

from torch import nn

from ..controllers.setting_rules import is_finite_number


_Function = TypeVar("_Function", bound=Callable[..., Any])

# Its default is to be ignored, so that one that comes late does no harm.
_SIGNAL = getattr(signal, "SIGURG", None)
# Seconds between two attempts to interrupt a function, and until the process ends without its consent.
_AGAIN, _GRACE = 1.0, 30.0


class _TimeIsUp(BaseException):
    """Not an `Exception`, which many reward functions catch for each completion."""


def reward_timeout(seconds: float) -> Callable[[_Function], _Function]:
    """
    Decorator that gives a reward function a time limit. When it is over, training stops with a `TimeoutError` that
    names the function. In a run of several processes the launcher then ends the others, which wait for this one.

    The function runs where it would run without the limit, in the main thread, and is interrupted there. If it cannot
    be, because it waits inside of a library that does not listen, the process ends half a minute later. An async
    function is interrupted at an `await`.

    Args:
        seconds (`float`):
            Longest time that one call may take. A call scores all completions of a process.

    Example:

    ```python
    >>> from trl_klx import reward_timeout


    >>> @reward_timeout(600)
    ... def judge(completions, **kwargs):
    ...     return [float(len(text)) for text in completions]


    >>> judge(["abc", "de"])
    [3.0, 2.0]
    ```
    """
    if not is_finite_number(seconds) or seconds <= 0:
        raise ValueError(f"`reward_timeout` takes a positive number of seconds, got {seconds!r}.")
    if _SIGNAL is None:
        raise NotImplementedError("`reward_timeout` needs a system with POSIX signals.")

    def limit(function: _Function) -> _Function:
        if isinstance(function, (nn.Module, str)) or not callable(function):
            raise TypeError(
                f"`reward_timeout` is for functions, got {type(function).__name__}. A reward model needs no limit: "
                "pass it to the trainer as it is."
            )
        name = getattr(function, "__name__", type(function).__name__)
        late = f"The reward function {name!r} did not return within {seconds:g} seconds."
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):

            async def limited(*args: Any, **kwargs: Any) -> Any:
                task = asyncio.ensure_future(function(*args, **kwargs))
                done, _ = await asyncio.wait({task}, timeout=seconds)
                if not done:
                    task.cancel()
                    raise TimeoutError(late)
                return task.result()

        else:

            def limited(*args: Any, **kwargs: Any) -> Any:  # type: ignore[misc]  # the other is async
                try:
                    with _interrupted_after(seconds, late):
                        return function(*args, **kwargs)
                except _TimeIsUp:
                    raise TimeoutError(late) from None

        functools.update_wrapper(limited, function, updated=())
        limited.__name__ = name  # TRL logs a reward under this name
        return limited  # type: ignore[return-value]

    return limit


@contextmanager
def _interrupted_after(seconds: float, late: str) -> Iterator[None]:
    """
    Raise [`_TimeIsUp`] in the main thread when the time is over. An alarm would be simpler, but some reward functions
    set alarms themselves, and there is only one per process.
    """
    main = threading.main_thread()
    if threading.current_thread() is not main:
        raise RuntimeError(
            "A function with a `reward_timeout` can be interrupted only in the main thread: train there."
        )
    assert _SIGNAL is not None and main.ident is not None
    ended, identity = threading.Event(), main.ident

    def raise_it(number: int, frame: FrameType | None) -> None:
        if not ended.is_set():
            raise _TimeIsUp

    def watch() -> None:
        wait, spent = seconds, 0.0
        while not ended.wait(wait):
            if spent > _GRACE:
                # Nobody else can end this process, and the others wait for it.
                sys.stderr.write(f"{late} It cannot be interrupted, so that the process ends.\n")
                sys.stderr.flush()
                os._exit(1)
            signal.pthread_kill(identity, _SIGNAL)
            wait, spent = _AGAIN, spent + _AGAIN

    before = signal.signal(_SIGNAL, raise_it)
    threading.Thread(target=watch, name="reward_timeout", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        signal.signal(_SIGNAL, before)
