"""The adapters of a PEFT model: find their weights, switch between them, and hide all but the trained one."""

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from accelerate.utils import extract_model_from_parallel
from peft import PeftModel
from torch import nn


# Weak on both sides, so that no model is kept alive.
_UNWRAPPED: WeakKeyDictionary[nn.Module, "ref[nn.Module]"] = WeakKeyDictionary()


def unwrapped(model: nn.Module) -> nn.Module:
    """
    The model without the wrappers of engines. Accelerate reads the metadata of installed packages each time that it is
    asked, which takes milliseconds, so it is asked once per model.
    """
    known = _UNWRAPPED.get(model)
    plain: nn.Module | None = None if known is None else known()
    if plain is None:
        plain = extract_model_from_parallel(model)
        _UNWRAPPED[model] = ref(plain)
    return plain


def causal_lm(model: Any) -> Any:
    """The model without the wrappers of PEFT, whose layers are inside it, and of `torch.compile`."""
    model = getattr(model, "_orig_mod", model)
    return model.get_base_model() if isinstance(model, PeftModel) else model


def trained_adapter(model: PeftModel) -> str:
    """Name of the adapter that is trained."""
    active = list(model.active_adapters)
    if len(active) != 1:
        raise ValueError(
            f"The policy must have one active adapter, got {active}. Call `set_adapter` with one of them."
        )
    return active[0]


def adapter_tensors(model: PeftModel, name: str, as_name: str | None = None) -> dict[str, torch.Tensor]:
    """The parameters of one adapter, keyed by parameter name with the adapter's name replaced by `as_name`."""
    as_name = name if as_name is None else as_name
    found: dict[str, torch.Tensor] = {}
    for key, parameter in model.named_parameters():
        parts = key.split(".")
        if name in parts:
            found[".".join(as_name if part == name else part for part in parts)] = parameter
    return found


@contextmanager
def adapter_active(model: PeftModel, name: str | None) -> Iterator[None]:
    """
    Run with another adapter active, or with none if `name` is `None`. Every `requires_grad` flag is restored, because
    PEFT's switch makes the adapter it activates trainable.
    """
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        if name is None:
            with model.disable_adapter():
                yield
        else:
            previous = model.active_adapters
            tuner: Any = model.base_model
            tuner.set_adapter(name, inference_mode=True)
            try:
                yield
            finally:
                tuner.set_adapter(previous)
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


@contextmanager
def only_trained_adapter(model: nn.Module) -> Iterator[None]:
    """
    Make `save_pretrained` write only the trained adapter. If a checkpoint held a second one, the host would restore
    the wrong weights.
    """
    if not isinstance(model, PeftModel):
        yield
        return
    attributes = vars(model)
    before = attributes.get("save_pretrained")
    adapters = list(model.active_adapters)
    attributes["save_pretrained"] = functools.partial(model.save_pretrained, selected_adapters=adapters)
    try:
        yield
    finally:
        del attributes["save_pretrained"]
        if before is not None:
            attributes["save_pretrained"] = before


def save_without(model: PeftModel, name: str) -> None:
    """
    Make the model's `save_pretrained` and `push_to_hub` leave an adapter out, unless the caller selects it.

    Args:
        model ([`~peft.PeftModel`]):
            Model with the adapter.
        name (`str`):
            Name of the adapter.
    """
    # On this model alone: PEFT's class stays as it is. A partial is copied and pickled together with the model.
    vars(model)["save_pretrained"] = functools.partial(_save_selected, model, name)


def _save_selected(model: PeftModel, left_out: str, save_directory: str, *args: Any, **kwargs: Any) -> None:
    save = functools.partial(type(model).save_pretrained, model, save_directory)
    bound = inspect.signature(save).bind_partial(*args, **kwargs)
    if bound.arguments.get("selected_adapters") is None:
        bound.arguments["selected_adapters"] = [name for name in model.peft_config if name != left_out]
    save(*bound.args, **bound.kwargs)


@contextmanager
def only_trained_modules(model: PeftModel) -> Iterator[None]:
    """Temporarily remove the modules that adapters other than the trained one save whole (`modules_to_save`)."""
    trained = trained_adapter(model)
    found = [module._modules.get("modules_to_save") for module in model.modules()]
    places = [place for place in found if isinstance(place, nn.ModuleDict)]
    whole = [dict(place) for place in places]
    try:
        for place in places:
            for name in [name for name in place if name != trained]:
                del place[name]
        yield
    finally:
        for place, modules in zip(places, whole, strict=True):
            # Removing and adding all of them keeps their order.
            place.clear()
            place.update(modules)


@contextmanager
def rng_kept(model: nn.Module) -> Iterator[None]:
    """Restore the random state afterwards: new adapters draw random weights, and seeded rollouts must not change."""
    with torch.random.fork_rng({parameter.device for parameter in model.parameters() if parameter.is_cuda}):
        yield
