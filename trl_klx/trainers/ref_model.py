"""The `ref_model` argument of the trainers."""

from typing import Any

from torch import nn

from ..references.kinds import chosen_reference_fields
from .config import KLXConfigMixin


def check_ref_model(args: KLXConfigMixin, model: Any, ref_model: Any) -> None:
    """
    Refuse a reference model that is no model, that is the policy itself, that is not the only reference, or that
    nothing would use.

    Args:
        args ([`KLXConfigMixin`]):
            Config of the trainer.
        model (`str` or `nn.Module`):
            Policy.
        ref_model (`nn.Module`, *optional*):
            Reference that the user passed to the trainer.
    """
    if ref_model is None:
        return
    for name, value in chosen_reference_fields(args).items():
        raise ValueError(
            f"Only one reference can be chosen, got a `ref_model` and `{name}={value!r}`. Keep one of them and unset "
            "the other."
        )
    if args.kl_ref_reset_patience is not None:
        raise ValueError(
            f"`kl_ref_reset_patience={args.kl_ref_reset_patience!r}` cannot be used with a `ref_model`: only a "
            "reference that is an earlier state of the policy can be replaced by a later one. Pass no `ref_model`, or "
            "unset `kl_ref_reset_patience`."
        )
    if not isinstance(ref_model, nn.Module):
        raise TypeError(
            f"`ref_model` must be a model, got {ref_model!r}. To load one from a folder or from the Hub, set "
            "`kl_ref_model_path` in the config."
        )
    if ref_model is model:
        raise ValueError("`ref_model` must not be the policy itself. Pass a copy, or leave it unset.")
    if not args.kl_enabled:
        raise ValueError(
            "`ref_model` has no effect without a KL penalty. Set `kl_target` to the KL to hold, `kl_penalty_coef` to "
            "a positive value such as 0.05, or `kl_monitor=True` to only measure the KL."
        )
