"""Adapters that the tests save, change and inspect."""

import json
from contextlib import contextmanager
from pathlib import Path

import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from support.tiny import build_model, lora
from trl_klx.references.adapter_loading import REFERENCE_ADAPTER
from trl_klx.references.fingerprint import hash_tensors
from trl_klx.references.peft_adapters import adapter_active


IDS = torch.arange(4, 28).reshape(2, 12)
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def make(seed: int, *, name: str = "default", config=None, model=None, **overrides) -> PeftModel:
    """A policy in which no trainable weight is zero."""
    model = build_model() if model is None else model
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        policy = get_peft_model(model, config or lora(**overrides), adapter_name=name).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
    return policy


def save(path: Path, policy: PeftModel | None = None, **settings_) -> Path:
    (make(1) if policy is None else policy).save_pretrained(path, **settings_)
    return path


def change_config(path: Path, **changes) -> Path:
    file = path / CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return path


def change_weights(path: Path, change) -> Path:
    weights = load_file(path / WEIGHTS)
    save_file(change(weights), path / WEIGHTS)
    return path


@torch.no_grad()
def logps(model, adapter: str | None = None) -> torch.Tensor:
    return torch.log_softmax(model(input_ids=IDS).logits.float(), dim=-1)


def reference_logps(policy: PeftModel) -> torch.Tensor:
    with adapter_active(policy, REFERENCE_ADAPTER):
        return logps(policy)


def flags(model) -> dict[str, bool]:
    return {name: parameter.requires_grad for name, parameter in model.named_parameters()}


def picture(model: PeftModel) -> dict:
    """Everything that a refused adapter must leave unchanged."""
    return {
        "modules": [(name, type(module)) for name, module in model.named_modules()],
        "parameters": [(name, id(parameter)) for name, parameter in model.named_parameters()],
        "flags": flags(model),
        "configs": {name: config.to_dict() for name, config in model.peft_config.items()},
        "active": list(model.active_adapters),
        "weights": hash_tensors(model.state_dict()),
        "logps": logps(model).numpy().tobytes(),
        "training": [module.training for module in model.modules()],
        "rng": torch.get_rng_state().numpy().tobytes(),
    }


@contextmanager
def untouched(model: PeftModel):
    before = picture(model)
    yield
    after = picture(model)
    for part in before:
        assert after[part] == before[part], f"{part} changed"
