"""The registry of reference kinds: how a kind is chosen, what is refused, and user-defined kinds."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

from support.adapter_checks import make
from support.tiny import build_model, build_trainer, logged, lora
from support.tiny_ppo import build_ppo
from trl_klx import KLXGRPOConfig, KLXGRPOTrainer, KLXPPOConfig
from trl_klx.references import kinds
from trl_klx.references.adapter import AdapterReference
from trl_klx.references.building import resolve_reference
from trl_klx.references.kinds import (
    REFERENCE_FIELDS,
    ReferenceKind,
    choose_reference_kind,
    chosen_reference_fields,
    register_reference_kind,
)
from trl_klx.references.model import ModelReference
from trl_klx.references.moving import SyncedReference


@pytest.fixture(autouse=True)
def registry():
    """The registry, restored after each test."""
    before = dict(kinds._KINDS)
    yield
    kinds._KINDS.clear()
    kinds._KINDS.update(before)


def settings(tmp_path: Path, **fields) -> SimpleNamespace:
    """The config fields that references read."""
    common = {"output_dir": str(tmp_path), "kl_estimator": "k1", "kl_statistic": "k3", "kl_ref_mixup_alpha": None}
    common |= {"kl_ref_reset_patience": None, "kl_ref_quantization": None}
    return SimpleNamespace(**(common | fields))


def resolve(tmp_path: Path, policy, ref_model=None, **fields):
    return resolve_reference(settings(tmp_path, **fields), policy, Accelerator(cpu=True), ref_model)


# ---- User-defined kinds ----


class SeedKind(ReferenceKind):
    """The tiny model of a seed."""

    field = "ref_seed"
    shares_base = False

    def build(self, value, builder):
        return builder.separate_model(build_model(seed=value), {"kind": "seed", "seed": value})


@dataclass
class SeedConfig(KLXGRPOConfig):
    ref_seed: int | None = None


class SeedTrainer(KLXGRPOTrainer):
    _config_class = SeedConfig


@pytest.mark.parametrize("peft", [None, lora()], ids=["full", "lora"])
def test_one_class_adds_a_kind_to_a_trainer(tmp_path, peft):
    register_reference_kind(SeedKind)
    extras = {} if peft is None else {"peft_config": peft}
    trainer = build_trainer(SeedTrainer, tmp_path, extras=extras, kl_penalty_coef=0.1, ref_seed=5, max_steps=1)
    assert "ref_seed" in REFERENCE_FIELDS and chosen_reference_fields(trainer.args) == {"ref_seed": 5}
    reference = trainer.kl_reference
    assert reference.identity["kind"] == "seed" and reference.identity["seed"] == 5 and reference.identity["hash"]
    trainer.train()
    assert logged(trainer, "klx/kl")[0] > 0.01
    with reference.active() as model:
        weights = build_model(seed=5).state_dict()
        assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())


class OftenKind(ReferenceKind):
    field = "ref_often"
    moves = True

    def build(self, value, builder):
        return builder.copied_policy({"kind": "often"}, SyncedReference(1, value))


@pytest.mark.parametrize("policy", [build_model, lambda: make(0)], ids=["full", "lora"])
def test_a_kind_that_moves(tmp_path, policy):
    register_reference_kind(OftenKind)
    policy = policy()
    reference = resolve(tmp_path, policy, ref_often=0.5)
    assert reference.identity == {"kind": "often", "sync_steps": 1, "mixup_alpha": 0.5}
    before = {name: weight.clone() for name, weight in reference.weights().items()}
    with torch.no_grad():
        for weight in reference.policy_weights().values():
            weight.add_(1.0)
    reference.follow(1)
    assert before and all(
        torch.allclose(weight, before[name] + 0.5, atol=1e-5) for name, weight in reference.weights().items()
    )
    # The state of a moving reference is its weights.
    assert reference.state().keys() == before.keys() and not reference.initial_adapter


def test_a_kind_for_one_sort_of_policy(tmp_path):
    @register_reference_kind
    class NeitherKind(ReferenceKind):
        field = "ref_neither"

    with pytest.raises(
        ValueError, match="`ref_neither=1` cannot be used with a PEFT policy. Train without an adapter"
    ):
        resolve(tmp_path, make(0), ref_neither=1)
    with pytest.raises(
        ValueError, match="`ref_neither=1` needs a PEFT policy, got Qwen2ForCausalLM. Pass a `peft_config`"
    ):
        resolve(tmp_path, build_model(), ref_neither=1)


def test_a_field_chooses_one_kind():
    register_reference_kind(SeedKind)
    assert register_reference_kind(SeedKind) is SeedKind

    class OtherKind(ReferenceKind):
        field = "kl_ref_lag"

    with pytest.raises(
        ValueError, match="'kl_ref_lag' already chooses trl_klx.references.kinds.LaggedKind. Give .*OtherKind"
    ):
        register_reference_kind(OtherKind)


# ---- Which kind is chosen ----


def test_fields_of_the_package():
    assert tuple(REFERENCE_FIELDS) == (
        "kl_penalty_reference_step",
        "kl_ref_adapter_path",
        "kl_ref_model_path",
        "kl_ref_lag",
        "kl_ref_sync_steps",
        "ref_adapter_name",
    )
    configs = {field for cls in (KLXGRPOConfig, KLXPPOConfig) for field in cls.__dataclass_fields__}
    assert configs.issuperset(REFERENCE_FIELDS)


@pytest.mark.parametrize(
    "field, value", [("kl_penalty_reference_step", 0), ("kl_ref_lag", 2), ("ref_adapter_name", "a")]
)
def test_a_field_that_is_set_chooses(field, value):
    args = SimpleNamespace(**{field: value}, kl_ref_sync_steps=None)
    assert chosen_reference_fields(args) == {field: value}
    kind, chosen_by = choose_reference_kind(args)
    assert kind.field == field and chosen_by == value


def test_a_config_without_the_field_cannot_choose_it(tmp_path):
    args = KLXGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, kl_penalty_coef=0.1)
    assert chosen_reference_fields(args) == {}
    assert isinstance(choose_reference_kind(args)[0], kinds.StartKind)


# ---- PPO's kinds, without PPO ----


def test_model_that_is_passed(tmp_path):
    reference = resolve(tmp_path, build_model(), build_model(seed=9))
    assert isinstance(reference, ModelReference) and reference.state() == {}
    assert reference.identity.keys() == {"kind", "hash"} and reference.identity["kind"] == "model"
    assert not reference.model.training and not any(weight.requires_grad for weight in reference.model.parameters())
    weights = build_model(seed=9).state_dict()
    assert all(torch.equal(weight, weights[name]) for name, weight in reference.model.state_dict().items())


def test_adapter_that_the_policy_has(tmp_path):
    policy = make(0)
    policy.add_adapter("sft", lora())
    reference = resolve(tmp_path, policy, ref_adapter_name="sft")
    assert isinstance(reference, AdapterReference) and reference.adapter == "sft"
    assert reference.identity["kind"] == "adapter" and reference.identity["path"] == "sft"
    with pytest.raises(ValueError, match="`ref_adapter_name='default'` is the adapter that is trained"):
        resolve(tmp_path, policy, ref_adapter_name="default")
    with pytest.raises(
        ValueError, match=r"`ref_adapter_name='x'` is not an adapter of the policy, which has \['default'"
    ):
        resolve(tmp_path, policy, ref_adapter_name="x")


def test_ppo_builds_the_same_references(tmp_path):
    passed = build_ppo(tmp_path, extras={"ref_model": build_model(seed=9)}).kl_reference
    assert passed.identity == resolve(tmp_path, build_model(), build_model(seed=9)).identity


# ---- What checkpoints hold ----


def test_only_the_initial_adapter_is_in_checkpoints(tmp_path):
    policy = make(0)
    reference = resolve(tmp_path, policy, kl_penalty_reference_step=0)
    assert reference.initial_adapter and reference.state().keys() == reference.weights().keys() != set()
    saved = {name: weight + 1.0 for name, weight in reference.state().items()}
    reference.load_state(saved)
    assert all(torch.equal(weight, saved[name]) for name, weight in reference.weights().items())
    for others in (resolve(tmp_path, make(0)), resolve(tmp_path, build_model(), kl_penalty_reference_step=0)):
        assert not others.initial_adapter and others.state() == {}
