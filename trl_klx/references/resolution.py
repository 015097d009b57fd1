"""The reference: which frozen policy the KL is measured against, and how to run it."""

import copy
import functools
import os
import re
import types
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import fsdp2_prepare_model, is_peft_model
from torch import nn
from trl.models.utils import prepare_deepspeed, prepare_fsdp
from trl.trainer import utils as trl_utils

from .moving import LaggedReference, SyncedReference, Weights
from .peft_io import (
    PLAIN_INITS,
    REFERENCE_ADAPTER,
    WEIGHTS_FILE,
    adapter_active,
    adapter_tensors,
    copy_trained_adapter,
    hash_tensors,
    load_reference_adapter,
    only_trained_modules,
    rng_kept,
    trained_adapter,
)
from .sharding import cut_part, is_sharded, join_parts, local_part, shard_again, use_written_parts, value_of_main


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Run without dropout: a frozen reference gives one answer, and draws no random numbers."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


class KLReference:
    """
    A frozen policy, seen through one small interface: inside `active()` there is a model whose log-probs are the
    reference's.

    Attributes:
        identity (`dict`):
            Kind, step or path, and hash of the weights: what must not change between a run and its resumption.
        mover ([`SyncedReference`] or [`LaggedReference`] or `None`):
            How the weights follow the policy; `None` for a reference that stands still.
    """

    def __init__(self, identity: dict[str, Any], mover: SyncedReference | LaggedReference | None = None):
        self.mover = mover
        self.identity = identity | (mover.identity if mover is not None else {})

    @contextmanager
    def active(self) -> Iterator[nn.Module]:
        """The model to run for the reference's log-probs."""
        raise NotImplementedError

    def weights(self) -> Weights:
        """The reference's own weights, keyed by the names of the policy's."""
        raise NotImplementedError

    def policy_weights(self) -> Weights:
        """The policy's weights that correspond to `weights()`."""
        raise NotImplementedError

    def follow(self, step: int) -> None:
        """Let a moving reference follow the policy after optimizer step `step`."""
        if self.mover is not None:
            reference = self.weights()
            # Policy and reference are sharded alike, so each process moves the parts that it holds.
            self.mover.step(step, _local_parts(self.policy_weights()), _local_parts(reference))
            use_written_parts(reference.values())

    def state(self) -> Weights:
        """
        Weights that a checkpoint must carry, whole: those of a moving reference, since no other file has them. Where they
        are sharded, every process must call this.
        """
        if self.mover is None:
            return {}
        reference = self.weights()
        parts = self.mover.state(_local_parts(reference))
        return {key: join_parts(reference[_weight_name(key)], part) for key, part in parts.items()}

    def load_state(self, state: Weights) -> None:
        if self.mover is not None:
            reference = self.weights()
            parts = {
                key: cut_part(reference[_weight_name(key)], whole) if _weight_name(key) in reference else whole
                for key, whole in state.items()
            }
            self.mover.load_state(parts, _local_parts(reference))
            use_written_parts(reference.values())

    @torch.no_grad()
    def restart(self) -> None:
        """Let a moving reference begin with the policy as it is now."""
        reference, policy = self.weights(), self.policy_weights()
        for name, weight in _local_parts(reference).items():
            weight.copy_(local_part(policy[name]))
        use_written_parts(reference.values())

    def whole_weights(self) -> Weights:
        """The reference's own weights, joined. Where they are sharded, every process must call this."""
        return {name: join_parts(weight) for name, weight in self.weights().items()}

    @torch.no_grad()
    def load_weights(self, whole: Weights) -> None:
        """Load what [`~KLReference.whole_weights`] returned."""
        reference = self.weights()
        for name, weight in reference.items():
            local_part(weight).copy_(cut_part(weight, whole[name]))
        use_written_parts(reference.values())


def _local_parts(weights: Weights) -> Weights:
    return {name: local_part(weight) for name, weight in weights.items()}


def _weight_name(key: str) -> str:
    """The name of the weight in a key of a mover's state, which may say before it when it was that of the policy."""
    return key.rsplit("|", 1)[-1]


class AdapterReference(KLReference):
    """
    A reference on the policy's own base weights: another adapter, or none.

    Args:
        policy ([`~peft.PeftModel`]):
            Policy.
        adapter (`str` or `None`):
            Adapter that is the reference; `None` for the base model.
        identity (`dict`):
            What the reference is.
        mover ([`SyncedReference`] or [`LaggedReference`], *optional*):
            How the adapter follows the policy's.
    """

    def __init__(self, policy: nn.Module, adapter: str | None, identity: dict[str, Any], mover=None):
        super().__init__(identity, mover)
        self.policy = policy
        self.adapter = adapter

    @contextmanager
    def active(self) -> Iterator[nn.Module]:
        with _evaluating(self.policy), adapter_active(self.policy, self.adapter):
            yield self.policy

    def weights(self) -> Weights:
        shard_again(self.policy)
        trained = trained_adapter(self.policy)
        return {} if self.adapter is None else adapter_tensors(self.policy, self.adapter, as_name=trained)

    def policy_weights(self) -> Weights:
        shard_again(self.policy)
        return adapter_tensors(self.policy, trained_adapter(self.policy))

    def keep_from_vllm(self, generation: Any) -> None:
        """
        Let TRL send vLLM the weights of the policy alone. It leaves out the factors of every adapter, but not the modules
        that one saves whole.

        Args:
            generation ([`~trl.generation.vllm_generation.VLLMGeneration`]):
                What sends them.
        """
        generation.sync_weights = functools.partial(self._call_hidden, generation.sync_weights)

    def _call_hidden(self, method: Callable[[], None]) -> None:
        with only_trained_modules(self.policy):
            method()


class ModelReference(KLReference):
    """
    A reference with weights of its own, for full fine-tuning.

    Args:
        policy (`nn.Module`):
            Policy.
        model (`nn.Module`):
            Frozen model.
        identity (`dict`):
            What the reference is.
        accelerator ([`~accelerate.Accelerator`]):
            Places and shards the model as it does the policy.
        mover ([`SyncedReference`] or [`LaggedReference`], *optional*):
            How the model follows the policy.
    """

    def __init__(
        self, policy: nn.Module, model: nn.Module, identity: dict[str, Any], accelerator: Accelerator, mover=None
    ):
        super().__init__(identity, mover)
        self.policy = policy
        self._unwrap = accelerator.unwrap_model
        shared = {id(parameter) for parameter in policy.parameters()}
        self._own = {name for name, parameter in model.named_parameters() if id(parameter) not in shared}
        fsdp_plugin = getattr(accelerator.state, "fsdp_plugin", None)
        if getattr(accelerator.state, "deepspeed_plugin", None) is not None:
            self.model = prepare_deepspeed(model, accelerator)
        elif fsdp_plugin is not None and fsdp_plugin.fsdp_version == 2:
            # Layer by layer as the policy, and from the main process where it alone has loaded the weights. TRL's own way
            # of doing it joins the whole model at once, and takes each process's weights for loaded.
            self.model = fsdp2_prepare_model(accelerator, model).requires_grad_(False).eval()
        elif fsdp_plugin is not None:
            self.model = prepare_fsdp(model, accelerator)
        else:
            self.model = accelerator.prepare_model(model, evaluation_mode=True)

    @contextmanager
    def active(self) -> Iterator[nn.Module]:
        yield self.model

    def weights(self) -> Weights:
        shard_again(self.model)
        return {name: weight for name, weight in self._unwrap(self.model).named_parameters() if name in self._own}

    def policy_weights(self) -> Weights:
        shard_again(self.policy)
        return dict(self._unwrap(self.policy).named_parameters())


def resolve_reference(args, policy, accelerator, ref_model=None, temperature=1.0) -> KLReference:
    """
    Build the reference that the config asks for.

    Args:
        args ([`KLXConfigMixin`]):
            Config.
        policy (`nn.Module`):
            The policy as it is before the first step.
        accelerator ([`~accelerate.Accelerator`]):
            Accelerator of the trainer.
    """
    name = getattr(args, "ref_adapter_name", None)
    if name is not None:
        if not is_peft_model(policy) or name not in policy.peft_config:
            known = list(policy.peft_config) if is_peft_model(policy) else []
            raise ValueError(
                f"`ref_adapter_name={name!r}` is not an adapter of the policy, which has {known}. Load it into the "
                "policy, or give its folder as `kl_ref_adapter_path`."
            )
        if name == trained_adapter(policy):
            raise ValueError(
                f"`ref_adapter_name={name!r}` is the adapter that is trained: the KL would always be 0. Set "
                "`model_adapter_name` to the one to train, or choose another reference."
            )
        identity = {"kind": "adapter", "path": name, "hash": hash_tensors(adapter_tensors(policy, name))}
        return AdapterReference(policy, name, identity)
    if ref_model is not None:
        model = ref_model.requires_grad_(False).eval()
        add_trl_lm_head(model, temperature, args.cast_lm_head_to_fp32)
        return ModelReference(policy, model, {"kind": "model", "hash": fingerprint(model)}, accelerator)
    if args.kl_ref_lag is not None:
        kind, mover = "lag", LaggedReference(args.kl_ref_lag, args.output_dir)
    elif args.kl_ref_sync_steps is not None:
        alpha = 1.0 if args.kl_ref_mixup_alpha is None else args.kl_ref_mixup_alpha
        kind, mover = "sync", SyncedReference(args.kl_ref_sync_steps, alpha)
    else:
        kind, mover = None, None
    _check_engine(args, accelerator, policy, moving=mover is not None)
    step, path = args.kl_penalty_reference_step, args.kl_ref_adapter_path
    checkpoint = _checkpoint_folder(args.output_dir, step) if step else None

    if is_peft_model(policy):
        own = {id(weight) for name in policy.peft_config for weight in adapter_tensors(policy, name).values()}
        _check_base_is_frozen(policy, own)
        if mover is not None:
            copy_trained_adapter(policy)
            return AdapterReference(policy, REFERENCE_ADAPTER, {"kind": kind}, mover)
        if step is None:
            _check_base_is_whole(policy)
        if path is not None:
            try:
                identity = {"kind": "adapter", "path": path, "hash": load_reference_adapter(policy, path)}
            except ValueError as error:
                raise ValueError(f"`kl_ref_adapter_path` cannot be served. {error}") from error
        elif checkpoint is not None:
            identity = {"kind": "step", "step": step, "hash": _load_adapter(policy, checkpoint)}
        elif step == 0:
            identity = {"kind": "step", "step": 0, "hash": copy_trained_adapter(policy)}
        else:
            identity = {"kind": "base", "hash": fingerprint(policy.get_base_model(), without=own)}
            return AdapterReference(policy, None, identity)
        return AdapterReference(policy, REFERENCE_ADAPTER, identity)

    if path is not None:
        raise ValueError(
            f"`kl_ref_adapter_path={path!r}` needs a PEFT policy, whose base model the adapter shares, got "
            f"{type(policy).__name__}. Pass a `peft_config` or a `PeftModel`, or choose the reference by "
            "`kl_penalty_reference_step`."
        )
    # A checkpoint is loaded over the copy, which must then share nothing with the policy.
    model = _frozen_copy(policy, share=checkpoint is None)
    if mover is not None:
        return ModelReference(policy, model, {"kind": kind}, accelerator, mover)
    if checkpoint is not None:
        _load_weights(model, checkpoint)
    # Unset and 0 are the same reference here: the initial weights.
    identity = {"kind": "step", "step": step or 0, "hash": fingerprint(model)}
    return ModelReference(policy, model, identity, accelerator)


def _check_engine(args, accelerator: Accelerator, policy: nn.Module, moving: bool) -> None:
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is None or plugin.fsdp_version != 1:
        return
    if is_peft_model(policy):
        raise ValueError(
            "The KL reference of a PEFT policy cannot be served by FSDP version 1, which joins the weights only inside its "
            "own forward, with the adapter that is trained. Set `fsdp_version: 2` in the config file of `accelerate launch`."
        )
    exact = next((name for name in ("kl_estimator", "kl_statistic") if getattr(args, name) == "full"), None)
    if moving or exact:
        name = "kl_ref_lag" if args.kl_ref_lag is not None else exact or "kl_ref_sync_steps"
        raise ValueError(
            f"`{name}={getattr(args, name)!r}` cannot be used with FSDP version 1, which flattens the weights that it needs "
            "one by one. Set `fsdp_version: 2` in the config file of `accelerate launch`, or "
            + (f"choose `{name}='k3'`." if name == exact else "choose a reference that stands still.")
        )


def saved_steps(output_dir: str) -> list[int]:
    """The steps N for which there is a `checkpoint-N` in `output_dir`."""
    if not os.path.isdir(output_dir):
        return []
    matches = (re.fullmatch(r"checkpoint-(\d+)", entry.name) for entry in os.scandir(output_dir) if entry.is_dir())
    return sorted(int(match.group(1)) for match in matches if match)


def fingerprint(model: nn.Module, without: Collection[int] = ()) -> str:
    """
    A hash of a sample of every weight but those whose `id` is in `without`: cheap for any size, and different for
    models that were trained apart.
    """
    sample = {}
    for name, weight in model.named_parameters():
        if id(weight) in without:
            continue
        flat = join_parts(weight).detach().reshape(-1)
        stride = max(1, flat.numel() // 256)
        sample[name] = flat[::stride][:256].float()
    return value_of_main(hash_tensors(sample))


def _checkpoint_folder(output_dir: str, step: int) -> str:
    folder = os.path.join(output_dir, f"checkpoint-{step}")
    if not os.path.isdir(folder):
        steps = saved_steps(output_dir)
        there = ", ".join(str(saved) for saved in steps) if steps else "none"
        raise ValueError(
            f"`kl_penalty_reference_step={step}` was never saved: there is no `checkpoint-{step}` in {output_dir!r}. "
            f"Saved steps: {there}. Choose one of them, 0 for the initial policy, or leave the field unset."
        )
    return folder


def _check_base_is_frozen(policy: nn.Module, own: Collection[int]) -> None:
    trained = [name for name, weight in policy.named_parameters() if weight.requires_grad and id(weight) not in own]
    if trained:
        raise ValueError(
            f"The policy trains {trained[0]!r}, a weight of the base model, which the KL reference shares and which would "
            "move it. Train with `bias='none'` and through `modules_to_save`, or without an adapter."
        )


def _check_base_is_whole(policy: nn.Module) -> None:
    init = getattr(policy.peft_config[trained_adapter(policy)], "init_lora_weights", True)
    if init not in PLAIN_INITS:
        raise ValueError(
            f"The policy's adapter was initialised with `init_lora_weights={init!r}`, which takes a part of the base weights "
            "into the adapter: without it they are not the base model any more, so that neither the base model nor an "
            "adapter of another run can be the KL reference. Set `kl_penalty_reference_step=0` for the policy as it starts, "
            "or initialise the adapter otherwise."
        )


def _load_adapter(policy: nn.Module, checkpoint: str) -> str:
    # PEFT saves an adapter of any other name than "default" into a folder of that name.
    folder = os.path.join(checkpoint, trained_adapter(policy))
    return load_reference_adapter(policy, folder if os.path.isdir(folder) else checkpoint)


def add_trl_lm_head(model: nn.Module, temperature: float, cast_lm_head_to_fp32: bool) -> None:
    """Give a model that TRL has not seen the LM head through which TRL computes log-probs, where it has one."""
    add_fused_lm_head = getattr(trl_utils, "add_fused_lm_head", None)
    if add_fused_lm_head is not None:
        add_fused_lm_head(model, temperature=temperature, cast_lm_head_to_fp32=cast_lm_head_to_fp32)


def _frozen_copy(policy: nn.Module, share: bool) -> nn.Module:
    """A frozen copy of the policy as it is now. Weights that are not trained never change, and can be shared."""
    memo: dict[int, Any] = {}
    for parameter in policy.parameters():
        if is_sharded(parameter):
            # As `from_pretrained` leaves them under ZeRO-3. In host memory, until the copy is sharded in its turn.
            memo[id(parameter)] = nn.Parameter(join_parts(parameter).detach().cpu(), requires_grad=False)
        elif share and not parameter.requires_grad:
            memo[id(parameter)] = parameter
    model = copy.deepcopy(policy, memo).requires_grad_(False).eval()
    for module in model.modules():
        if "forward" in vars(module):
            module.forward = _rebind(module.forward, memo)
    return model


def _rebind(value: Any, memo: dict[int, Any]) -> Any:
    """
    What `value` is for the copy that `memo` knows of. TRL patches forwards with closures over the policy, which a deep
    copy would go on reading, since to `copy` a function is a constant.
    """
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, functools.partial):
        arguments = (_rebind(argument, memo) for argument in value.args)
        return functools.partial(_rebind(value.func, memo), *arguments, **value.keywords)
    if isinstance(value, types.MethodType):
        return types.MethodType(_rebind(value.__func__, memo), _rebind(value.__self__, memo))
    if not isinstance(value, types.FunctionType) or value.__closure__ is None:
        return value
    cells = tuple(types.CellType() for _ in value.__closure__)
    rebound = types.FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
    rebound.__kwdefaults__ = value.__kwdefaults__
    rebound.__dict__.update(value.__dict__)
    memo[id(value)] = rebound
    for cell, original in zip(cells, value.__closure__, strict=True):
        cell.cell_contents = _rebind(original.cell_contents, memo)
    return rebound


def _load_weights(model: nn.Module, folder: str) -> None:
    names = os.listdir(folder)
    if not any(re.fullmatch(r"model(-\d+-of-\d+)?\.safetensors", name) for name in names):
        hint = " It holds an adapter, but the policy has none." if WEIGHTS_FILE in names else ""
        raise ValueError(f"Cannot use {folder!r} as KL reference: it has no `model.safetensors`.{hint}")
    # Lossless also where TRL keeps the LM head in a higher precision than the rest.
    dtypes = {weight.dtype for weight in model.parameters()}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    try:
        with rng_kept(model):
            # The class's own loader, because the names in the file need not be those of the modules.
            loaded, info = type(model).from_pretrained(
                folder, config=model.config, dtype=dtype, use_safetensors=True, output_loading_info=True
            )
        misfits = [*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]]
        if misfits:
            raise ValueError(f"{sorted(map(str, misfits))[0]!r} is missing, or has no place in the model")
        model.load_state_dict({name: join_parts(w) for name, w in loaded.state_dict(keep_vars=True).items()})
    except Exception as error:
        raise ValueError(f"Cannot use {folder!r} as KL reference: its weights cannot be loaded ({error}).") from error
    if not all(torch.isfinite(weight).all() for weight in model.parameters()):
        raise ValueError(f"Cannot use {folder!r} as KL reference: its weights hold NaN or infinite values.")
