"""
The kinds of reference, each chosen by one config field.

To add a kind, write one subclass of [`ReferenceKind`] and decorate it with [`register_reference_kind`]. This module
imports neither PEFT nor TRL, so that a config can list the kinds.
"""

from __future__ import annotations

from collections.abc import KeysView
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from .moving import LaggedReference, SyncedReference


if TYPE_CHECKING:
    from torch import nn

    from .base import KLReference
    from .building import ReferenceBuilder


class ReferenceKind:
    """
    One kind of reference: which config field chooses it, and how it is built.

    Subclasses set `field` and implement `build_for_peft`, `build_for_model` or both. A method that is not implemented
    refuses that kind of policy.

    Attributes:
        field (`str`):
            Config field that chooses this kind if it is not `None`. A config without this field cannot choose it.
        moves (`bool`):
            Whether the reference follows the policy.
        shares_base (`bool`):
            Whether the reference of a PEFT policy runs on the policy's base weights.
        resettable (`bool`):
            Whether the policy may take the reference's place during the run.
    """

    field: ClassVar[str]
    moves: ClassVar[bool] = False
    shares_base: ClassVar[bool] = True
    resettable: ClassVar[bool] = False

    def build(self, value: Any, builder: ReferenceBuilder) -> KLReference:
        """
        Build the reference.

        Args:
            value (`Any`):
                Value of the config field.
            builder ([`ReferenceBuilder`]):
                Policy and config, and the steps that kinds have in common.
        """
        return self.build_for_peft(value, builder) if builder.has_adapter else self.build_for_model(value, builder)

    def build_for_peft(self, value: Any, builder: ReferenceBuilder) -> KLReference:
        """Build the reference of a PEFT policy."""
        raise ValueError(
            f"`{self.field}={value!r}` cannot be used with a PEFT policy. Train without an adapter, or choose another "
            "reference."
        )

    def build_for_model(self, value: Any, builder: ReferenceBuilder) -> KLReference:
        """Build the reference of a policy without an adapter, for full fine-tuning."""
        raise ValueError(
            f"`{self.field}={value!r}` needs a PEFT policy, got {type(builder.policy).__name__}. Pass a `peft_config` "
            "or a `PeftModel`, or choose another reference."
        )


_Kind = TypeVar("_Kind", bound=type[ReferenceKind])

_KINDS: dict[str, ReferenceKind] = {}
# The config fields that choose a reference: at most one of them may be set. This view also shows fields that are
# registered later, and a config need not have all of them.
REFERENCE_FIELDS: KeysView[str] = _KINDS.keys()


def register_reference_kind(cls: _Kind) -> _Kind:
    """
    Class decorator that makes a kind of reference available under its config field.

    Example:

    ```python
    >>> from dataclasses import dataclass
    >>> from trl_klx import KLXGRPOConfig
    >>> from trl_klx.references.kinds import ReferenceKind, register_reference_kind
    >>> from trl_klx.references.moving import SyncedReference


    >>> @register_reference_kind
    ... class EveryHundredStepsKind(ReferenceKind):
    ...     field = "ref_hundreds"
    ...     moves = True
    ...
    ...     def build(self, value, builder):
    ...         return builder.copied_policy({"kind": "hundreds"}, SyncedReference(100 * value))


    >>> @dataclass
    ... class MyConfig(KLXGRPOConfig):
    ...     ref_hundreds: int | None = None
    ```
    """
    known, name = _KINDS.get(cls.field), f"{cls.__module__}.{cls.__qualname__}"
    known_name = None if known is None else f"{type(known).__module__}.{type(known).__qualname__}"
    # Running a notebook cell again defines the same class again. Only a different class is a conflict.
    if known_name not in (None, name):
        raise ValueError(f"The config field {cls.field!r} already chooses {known_name}. Give {name} another field.")
    _KINDS[cls.field] = cls()
    return cls


def chosen_reference_fields(args: object) -> dict[str, Any]:
    """The fields of a config that choose a reference and are set, with their values."""
    settings = vars(args)
    return {field: settings[field] for field in REFERENCE_FIELDS if settings.get(field) is not None}


def resettable_reference_fields() -> list[str]:
    """The fields that choose a reference whose place the policy may take."""
    return [field for field, kind in _KINDS.items() if kind.resettable]


def choose_reference_kind(args: object, ref_model: nn.Module | None = None) -> tuple[ReferenceKind, Any]:
    """The kind of reference that a config or a trainer's `ref_model` argument chooses, and the value that chose it."""
    if ref_model is not None:
        return PassedModelKind(), ref_model
    for field, value in chosen_reference_fields(args).items():
        return _KINDS[field], value
    return StartKind(), None


class StartKind(ReferenceKind):
    """The reference if none is chosen: the base model under PEFT, the initial weights in full fine-tuning."""

    resettable = True

    def build_for_peft(self, value: None, builder: ReferenceBuilder) -> KLReference:
        return builder.base_model()

    def build_for_model(self, value: None, builder: ReferenceBuilder) -> KLReference:
        return builder.copied_policy({"kind": "step", "step": 0})


class PassedModelKind(ReferenceKind):
    """The model passed to the trainer as `ref_model`."""

    shares_base = False

    def build(self, value: nn.Module, builder: ReferenceBuilder) -> KLReference:
        try:
            return builder.separate_model(value, {"kind": "model"})
        except ValueError as error:
            raise ValueError(f"`ref_model` cannot be used. {error}") from error


@register_reference_kind
class SavedStepKind(ReferenceKind):
    """The policy as saved at a step: 0 is the initial policy, N is `checkpoint-N` in `output_dir`."""

    field = "kl_penalty_reference_step"
    resettable = True

    def build(self, value: int, builder: ReferenceBuilder) -> KLReference:
        identity = {"kind": "step", "step": value}
        return builder.copied_policy(identity) if value == 0 else builder.saved_policy(value, identity)


@register_reference_kind
class AdapterFolderKind(ReferenceKind):
    """The adapter in a folder or Hub repository, on the policy's base weights."""

    field = "kl_ref_adapter_path"

    def build_for_peft(self, value: str, builder: ReferenceBuilder) -> KLReference:
        builder.check_base_is_whole()
        try:
            return builder.loaded_adapter(value, {"kind": "adapter", "path": value})
        except ValueError as error:
            raise ValueError(f"`kl_ref_adapter_path` cannot be used. {error}") from error

    def build_for_model(self, value: str, builder: ReferenceBuilder) -> KLReference:
        raise ValueError(
            f"`kl_ref_adapter_path={value!r}` needs a PEFT policy, because the adapter shares its base model, but got "
            f"{type(builder.policy).__name__}. Pass a `peft_config` or a `PeftModel`, or choose the reference with "
            "`kl_penalty_reference_step`."
        )


@register_reference_kind
class ModelFolderKind(ReferenceKind):
    """Another model with the policy's vocabulary, in a folder or Hub repository."""

    field = "kl_ref_model_path"
    shares_base = False

    def build(self, value: str, builder: ReferenceBuilder) -> KLReference:
        try:
            return builder.loaded_model(value, builder.args.kl_ref_dtype)
        except ValueError as error:
            raise ValueError(f"`kl_ref_model_path` cannot be used. {error}") from error


@register_reference_kind
class LaggedKind(ReferenceKind):
    """The policy as it was some optimizer steps ago."""

    field = "kl_ref_lag"
    moves = True

    def build(self, value: int, builder: ReferenceBuilder) -> KLReference:
        return builder.copied_policy({"kind": "lag"}, LaggedReference(value, builder.output_dir))


@register_reference_kind
class SyncedKind(ReferenceKind):
    """A copy or moving average of the policy, refreshed at intervals."""

    field = "kl_ref_sync_steps"
    moves = True

    def build(self, value: int, builder: ReferenceBuilder) -> KLReference:
        alpha = builder.args.kl_ref_mixup_alpha
        return builder.copied_policy({"kind": "sync"}, SyncedReference(value, 1.0 if alpha is None else alpha))


@register_reference_kind
class NamedAdapterKind(ReferenceKind):
    """An adapter that the policy already has, by its name. Only PPO's config has this field."""

    field = "ref_adapter_name"

    def build_for_peft(self, value: str, builder: ReferenceBuilder) -> KLReference:
        if value not in builder.adapter_names:
            return self.build_for_model(value, builder)
        if value == builder.trained_adapter:
            raise ValueError(
                f"`ref_adapter_name={value!r}` is the adapter that is trained: the KL would always be 0. Set "
                "`model_adapter_name` to the adapter to train, or choose another reference."
            )
        return builder.present_adapter(value, {"kind": "adapter", "path": value})

    def build_for_model(self, value: str, builder: ReferenceBuilder) -> KLReference:
        raise ValueError(
            f"`ref_adapter_name={value!r}` is not an adapter of the policy, which has {builder.adapter_names}. Load "
            "it into the policy, or set `kl_ref_adapter_path` to its folder."
        )
