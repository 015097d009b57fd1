"""Doing something on the main process alone, and telling the others how it ended."""

from collections.abc import Callable
from typing import Any, TypeVar

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list


Value = TypeVar("Value")


def on_main_process(accelerator: Accelerator, function: Callable[[], Value]) -> Value:
    """
    Call a function on the main process. Every process must call this, and gets the result or raises the error.

    Args:
        accelerator ([`~accelerate.Accelerator`]):
            Accelerator of the trainer.
        function (`Callable`):
            Function without arguments. Its result must be picklable.
    """
    if accelerator.num_processes == 1:
        return function()
    box: list[Any] = [None, None]
    failure: Exception | None = None
    if accelerator.is_main_process:
        try:
            box[0] = function()
        except Exception as error:
            failure, box[1] = error, str(error)
    broadcast_object_list(box)  # in place
    if failure is not None:
        raise failure
    if box[1] is not None:
        raise ValueError(box[1])
    result: Value = box[0]
    return result
