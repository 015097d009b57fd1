"""Build the reference that a config asks for."""

import os
from collections.abc import Collection
from typing import Any, Protocol, cast

import torch
from accelerate import Accelerator
from accelerate.utils import is_peft_model
from peft import PeftModel
from torch import nn

from .adapter import AdapterReference
from .adapter_files import PLAIN_INITS
from .adapter_loading import REFERENCE_ADAPTER, copy_trained_adapter, load_reference_adapter
from .base import KLReference
from .fingerprint import fingerprint, hash_tensors
from .kinds import ReferenceKind, choose_reference_kind
from .loading import checkpoint_folder, load_model_weights
from .model import ModelReference, add_trl_lm_head, frozen_copy
from .model_files import (
    UnusableModelError,
    check_finite,
    check_separate,
    check_vocabulary,
    load_reference_model,
)
from .moving import Mover
from .peft_adapters import adapter_tensors, causal_lm, trained_adapter


class ReferenceArgs(Protocol):
    """The part of a config that the built-in kinds read, in addition to the field that chooses the kind."""

    @property
    def output_dir(self) -> str | None: ...

    @property
    def kl_estimator(self) -> str | None: ...

    @property
    def kl_statistic(self) -> str | None: ...

    @property
    def kl_ref_dtype(self) -> str | None: ...

    @property
    def kl_ref_quantization(self) -> str | None: ...

    @property
    def kl_ref_mixup_alpha(self) -> float | None: ...

    @property
    def kl_ref_reset_patience(self) -> int | None: ...


def resolve_reference(
    args: ReferenceArgs,
    policy: nn.Module,
    accelerator: Accelerator,
    ref_model: nn.Module | None = None,
    temperature: float = 1.0,
    tokenizer: Any = None,
) -> KLReference:
    """
    Build the reference that the config asks for.

    Args:
        args ([`ReferenceArgs`]):
            Config.
        policy (`nn.Module`):
            Policy before the first step.
        accelerator ([`~accelerate.Accelerator`]):
            Accelerator of the trainer.
        ref_model (`nn.Module`, *optional*):
            Model passed to the trainer as the reference. No config field may choose another reference.
        temperature (`float`, *optional*, defaults to `1.0`):
            Sampling temperature of the trainer, at which the log-probs of a separate model are computed.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`], *optional*):
            Tokenizer of the policy, with which that of a loaded model is compared.
    """
    kind, value = choose_reference_kind(args, ref_model)
    builder = ReferenceBuilder(args, policy, accelerator, temperature, tokenizer)
    _check_engine(kind, value, builder)
    if builder.has_adapter and kind.shares_base:
        builder.check_base_is_frozen()
    reference = kind.build(value, builder)
    reference.resettable = kind.resettable and reference.fits_policy()
    if builder.resets and not reference.resettable:
        raise ValueError(
            f"`kl_ref_reset_patience={args.kl_ref_reset_patience!r}` cannot be used with `{kind.field}={value!r}`: "
            "the adapter there has other weights than the policy's, which could not be copied to it. Give the "
            "policy's adapter the same settings, or unset one of the fields."
        )
    return reference


class ReferenceBuilder:
    """
    Policy and config of a run, with the steps that a [`ReferenceKind`] builds its reference from.

    A step that takes an `identity` adds the hash of the weights to it, unless the reference moves.

    Args:
        args ([`ReferenceArgs`]):
            Config.
        policy (`nn.Module`):
            Policy before the first step.
        accelerator ([`~accelerate.Accelerator`]):
            Accelerator of the trainer.
        temperature (`float`, *optional*, defaults to `1.0`):
            Sampling temperature of the trainer.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`], *optional*):
            Tokenizer of the policy.
    """

    def __init__(
        self,
        args: ReferenceArgs,
        policy: nn.Module,
        accelerator: Accelerator,
        temperature: float = 1.0,
        tokenizer: Any = None,
    ):
        self.args = args
        self.policy = policy
        self.accelerator = accelerator
        self.temperature = temperature
        self.tokenizer = tokenizer

    @property
    def output_dir(self) -> str:
        """Folder of the run."""
        # Transformers fills it in when the config is built.
        return cast(str, self.args.output_dir)

    @property
    def resets(self) -> bool:
        """Whether the reference is to be reset during the run."""
        return self.args.kl_ref_reset_patience is not None

    @property
    def has_adapter(self) -> bool:
        """Whether the policy is a PEFT model."""
        return bool(is_peft_model(self.policy))

    @property
    def peft_policy(self) -> PeftModel:
        """The policy, if it is a PEFT model."""
        return cast(PeftModel, self.policy)

    @property
    def adapter_names(self) -> list[str]:
        """Names of the policy's adapters."""
        return list(self.peft_policy.peft_config) if self.has_adapter else []

    @property
    def trained_adapter(self) -> str:
        """Name of the adapter that is trained."""
        return trained_adapter(self.peft_policy)

    # ---- References of any policy ----

    def copied_policy(self, identity: dict[str, Any], mover: Mover | None = None) -> KLReference:
        """A frozen copy of the policy as it is now: of its adapter under PEFT, else of the model."""
        if self.has_adapter:
            digest = copy_trained_adapter(self.peft_policy)
            if mover is None:
                identity = identity | {"hash": digest}
            return AdapterReference(
                self.peft_policy, REFERENCE_ADAPTER, identity, mover, initial_adapter=mover is None
            )
        model = frozen_copy(self.policy, share=True)
        if mover is None:
            identity = identity | {"hash": fingerprint(model)}
        return ModelReference(self.policy, model, identity, self.accelerator, mover)

    def saved_policy(self, step: int, identity: dict[str, Any]) -> KLReference:
        """The policy as saved in `checkpoint-{step}` of `output_dir`."""
        folder = checkpoint_folder(self.output_dir, step)
        if self.has_adapter:
            # PEFT saves the adapter "default" into the checkpoint, and any other into a subfolder with its name.
            named = os.path.join(folder, self.trained_adapter)
            return self.loaded_adapter(named if os.path.isdir(named) else folder, identity)
        # The weights are loaded into the copy, so it must share none with the policy.
        model = frozen_copy(self.policy, share=False)
        load_model_weights(model, folder)
        return ModelReference(self.policy, model, identity | {"hash": fingerprint(model)}, self.accelerator)

    def loaded_model(self, path: str, dtype: str | None) -> ModelReference:
        """The model in a folder or Hub repository, in `dtype` or, if that is `None`, in the policy's."""
        torch_dtype: torch.dtype = causal_lm(self.policy).dtype if dtype is None else getattr(torch, dtype)
        folder = os.path.expanduser(path)
        # Where a folder lies on this machine is no part of what the model is.
        name = os.path.basename(os.path.abspath(folder)) if os.path.isdir(folder) else path
        identity = {"kind": "model", "path": name, "dtype": str(torch_dtype).removeprefix("torch.")}
        quantization = self.args.kl_ref_quantization
        if quantization is not None:
            self.check_not_sharded(f"kl_ref_quantization={quantization!r}")
            identity |= {"quantization": quantization}
        try:
            model = load_reference_model(
                folder, self.policy, torch_dtype, self.tokenizer, quantization, self.accelerator.device
            )
            return self._separate_model(model, identity)
        except UnusableModelError as error:
            raise ValueError(f"Cannot use the model at {path!r} as KL reference: {error}") from error

    def separate_model(self, model: nn.Module, identity: dict[str, Any]) -> ModelReference:
        """A model that was loaded separately. It is frozen, and gets TRL's LM head."""
        try:
            return self._separate_model(model, identity)
        except UnusableModelError as error:
            raise ValueError(f"Cannot use the {type(model).__name__} as KL reference: {error}") from error

    def _separate_model(self, model: nn.Module, identity: dict[str, Any]) -> ModelReference:
        base_model = causal_lm(model)
        check_vocabulary(getattr(base_model, "config", None), self.policy)
        check_separate(model, self.policy)
        check_finite(model)
        model = model.requires_grad_(False).eval()
        # RLOO's config lacks this field, and its trainer computes the head in the dtype of the model.
        cast_to_fp32 = vars(self.args).get("cast_lm_head_to_fp32", False)
        add_trl_lm_head(base_model, self.temperature, cast_to_fp32)
        return ModelReference(self.policy, model, identity | {"hash": fingerprint(model)}, self.accelerator)

    # ---- References of a PEFT policy ----

    def base_model(self) -> AdapterReference:
        """The base model, with the adapter disabled, until the reference is reset."""
        self.check_base_is_whole()
        base = self.peft_policy.get_base_model()
        identity = {"kind": "base", "hash": fingerprint(base, without=self._adapter_weights())}
        if not self.resets:
            return AdapterReference(self.peft_policy, None, identity)
        # The adapter that a reset copies the policy's to must be there before an engine shards the weights.
        copy_trained_adapter(self.peft_policy)
        return AdapterReference(self.peft_policy, None, identity, spare=REFERENCE_ADAPTER)

    def loaded_adapter(self, path: str, identity: dict[str, Any]) -> AdapterReference:
        """The adapter in a folder or Hub repository."""
        digest = load_reference_adapter(self.peft_policy, path)
        return AdapterReference(self.peft_policy, REFERENCE_ADAPTER, identity | {"hash": digest})

    def present_adapter(self, name: str, identity: dict[str, Any]) -> AdapterReference:
        """An adapter that the policy already has."""
        digest = hash_tensors(adapter_tensors(self.peft_policy, name))
        return AdapterReference(self.peft_policy, name, identity | {"hash": digest})

    def _adapter_weights(self) -> Collection[int]:
        names = self.adapter_names
        return {id(weight) for name in names for weight in adapter_tensors(self.peft_policy, name).values()}

    # ---- Checks ----

    def check_not_sharded(self, setting: str) -> None:
        """Refuse a setting whose weights FSDP and DeepSpeed could not shard."""
        state = self.accelerator.state
        if any(getattr(state, name, None) is not None for name in ("fsdp_plugin", "deepspeed_plugin")):
            raise ValueError(
                f"`{setting}` cannot be used with FSDP or DeepSpeed, which shard the reference like the policy. Unset "
                "it, or launch with DDP."
            )

    def check_base_is_frozen(self) -> None:
        """Refuse a policy that trains base weights, which would change the reference too."""
        own = self._adapter_weights()
        weights = self.policy.named_parameters()
        trained = [name for name, weight in weights if weight.requires_grad and id(weight) not in own]
        if trained:
            raise ValueError(
                f"The policy trains {trained[0]!r}, a weight of the base model. The KL reference shares this weight "
                "and would change with it. Train with `bias='none'` and through `modules_to_save`, or without an "
                "adapter."
            )

    def check_base_is_whole(self) -> None:
        """Refuse a policy whose adapter took a part of the base weights when it was initialised."""
        config = self.peft_policy.peft_config[self.trained_adapter]
        init = getattr(config, "init_lora_weights", True)
        if init not in PLAIN_INITS:
            raise ValueError(
                f"The policy's adapter was initialised with `init_lora_weights={init!r}`, which moves a part of the "
                "base weights into the adapter. What remains is no longer the base model, so neither the base model "
                "nor an adapter of another run can be the KL reference. Set `kl_penalty_reference_step=0` for the "
                "initial policy, or initialise the adapter differently."
            )


def _check_engine(kind: ReferenceKind, value: Any, builder: ReferenceBuilder) -> None:
    """Refuse what FSDP version 1 cannot do."""
    plugin = getattr(builder.accelerator.state, "fsdp_plugin", None)
    if plugin is None or plugin.fsdp_version != 1:
        return
    if builder.has_adapter and kind.shares_base:
        raise ValueError(
            "The KL reference of a PEFT policy cannot be served by FSDP version 1, which joins the weights only "
            "inside its forward pass, with the trained adapter. Set `fsdp_version: 2` in the config file of "
            "`accelerate launch`."
        )
    if kind.moves:
        choice, remedy = f"{kind.field}={value!r}", "choose a reference that does not move."
    elif builder.resets:
        choice, remedy = f"kl_ref_reset_patience={builder.args.kl_ref_reset_patience!r}", "unset it."
    elif builder.args.kl_estimator == "full":
        choice, remedy = "kl_estimator='full'", "choose `kl_estimator='k3'`."
    elif builder.args.kl_statistic == "full":
        choice, remedy = "kl_statistic='full'", "choose `kl_statistic='k3'`."
    else:
        return
    raise ValueError(
        f"`{choice}` cannot be used with FSDP version 1, which flattens the weights that it needs one by one. Set "
        f"`fsdp_version: 2` in the config file of `accelerate launch`, or {remedy}"
    )
