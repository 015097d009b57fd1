import copy
import gc
import itertools
import pickle
import warnings
import weakref

import pytest
import torch
from peft import IA3Config, LoHaConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from support.adapter_checks import (
    IDS,
    WEIGHTS,
    change_config,
    change_weights,
    flags,
    logps,
    make,
    reference_logps,
    save,
    untouched,
)
from support.tiny import build_model, lora, trained_lora
from trl_klx.references import peft_adapters
from trl_klx.references.adapter_loading import (
    REFERENCE_ADAPTER,
    _weightless_copy,
    copy_trained_adapter,
    load_reference_adapter,
)
from trl_klx.references.fingerprint import hash_tensors
from trl_klx.references.peft_adapters import (
    adapter_active,
    adapter_tensors,
    only_trained_adapter,
    trained_adapter,
    unwrapped,
)


# ---- Adapters that are accepted ----


POLICIES = {
    "plain": {},
    "named": {"name": "mine"},
    "named like the reference": {"name": "klx"},
    "saves lm_head": {"modules_to_save": ["lm_head"]},
    "dora": {"use_dora": True},
    "on embeddings": {"target_modules": ["q_proj", "embed_tokens"]},
}
REFERENCES = {
    "alike": {},
    "other rank": {"r": 7, "lora_alpha": 3},
    "other targets": {"target_modules": ["k_proj", "down_proj"]},
    "overlapping targets": {"target_modules": ["q_proj", "o_proj"]},
    "all linear": {"target_modules": "all-linear"},
    "by pattern": {"target_modules": r".*layers\.1\..*(up|gate)_proj"},
    "one layer": {"layers_to_transform": [1]},
    "without some": {"exclude_modules": ["model.layers.0.self_attn.q_proj"]},
    "rslora": {"use_rslora": True, "r": 8},
    "dora": {"use_dora": True},
    "rank by layer": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 1}},
    "biased": {"lora_bias": True},
    "dropout": {"lora_dropout": 0.5},
    "gaussian": {"init_lora_weights": "gaussian"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "saves lm_head": {"modules_to_save": ["lm_head"]},
    "saves norm": {"modules_to_save": ["norm"]},
    "on embeddings": {"target_modules": ["embed_tokens", "v_proj"]},
    "some tokens": {"trainable_token_indices": [5, 9, 17]},
}


def fits(policy: str, reference: str) -> bool:
    # PEFT wraps a module for only one purpose.
    return (policy, reference) != ("on embeddings", "some tokens")


@pytest.mark.parametrize(
    ("policy", "reference"), [pair for pair in itertools.product(POLICIES, REFERENCES) if fits(*pair)]
)
def test_reference_is_the_adapter_and_the_policy_does_not_notice(tmp_path, policy, reference):
    save(tmp_path, make(1, **REFERENCES[reference]))
    independent = logps(PeftModel.from_pretrained(build_model(), tmp_path).eval())
    policy = make(0, **POLICIES[policy])
    own, own_flags, active = logps(policy), flags(policy), list(policy.active_adapters)
    trainable = {id(parameter) for parameter in policy.parameters() if parameter.requires_grad}
    assert (independent - own).abs().max() > 0.01
    torch.manual_seed(11)
    rng = torch.get_rng_state()
    load_reference_adapter(policy, str(tmp_path))
    for _ in range(2):
        torch.testing.assert_close(reference_logps(policy), independent, atol=1e-5, rtol=0)
        assert torch.equal(logps(policy), own)
    assert torch.equal(torch.get_rng_state(), rng)
    assert policy.active_adapters == active == [trained_adapter(policy)]
    # The same objects are trainable, so an optimizer built before or after has the same parameters.
    assert {id(parameter) for parameter in policy.parameters() if parameter.requires_grad} == trainable
    mine = trained_adapter(policy)
    now = {name: flag for name, flag in flags(policy).items() if REFERENCE_ADAPTER not in name.split(".")}
    assert [name for name, flag in now.items() if flag] == [name for name, flag in own_flags.items() if flag]
    assert any(mine in name.split(".") for name, flag in now.items() if flag)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_in_another_precision(tmp_path, dtype):
    change_weights(save(tmp_path), lambda weights: {name: tensor.to(dtype) for name, tensor in weights.items()})
    policy = make(0)
    load_reference_adapter(policy, str(tmp_path))
    independent = logps(PeftModel.from_pretrained(build_model(), tmp_path).eval())
    torch.testing.assert_close(reference_logps(policy), independent, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_base_model_in_bf16(tmp_path, dtype):
    change_weights(save(tmp_path), lambda weights: {name: tensor.to(dtype) for name, tensor in weights.items()})
    policy = make(0, model=build_model().to(torch.bfloat16))
    own = logps(policy)
    load_reference_adapter(policy, str(tmp_path))
    independent = PeftModel.from_pretrained(build_model().to(torch.bfloat16), tmp_path).eval()
    assert torch.equal(reference_logps(policy), logps(independent))
    assert torch.equal(logps(policy), own)


def test_tied_embeddings(tmp_path):
    save(tmp_path, make(1, model=build_model(tie_word_embeddings=True)))
    policy = make(0, model=build_model(tie_word_embeddings=True))
    load_reference_adapter(policy, str(tmp_path))
    independent = PeftModel.from_pretrained(build_model(tie_word_embeddings=True), tmp_path).eval()
    torch.testing.assert_close(reference_logps(policy), logps(independent), atol=1e-5, rtol=0)


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_that_equal_the_policys_are_no_obstacle(tmp_path, tied):
    save(tmp_path, make(1, model=build_model(tie_word_embeddings=tied)), save_embedding_layers=True)
    assert any("embed_tokens" in name for name in load_file(tmp_path / WEIGHTS))
    policy = make(0, model=build_model(tie_word_embeddings=tied))
    load_reference_adapter(policy, str(tmp_path))
    independent = PeftModel.from_pretrained(build_model(tie_word_embeddings=tied), tmp_path).eval()
    torch.testing.assert_close(reference_logps(policy), logps(independent), atol=1e-5, rtol=0)


def test_targets_that_peft_knows_by_the_kind_of_model(tmp_path):
    policy = make(0)
    load_reference_adapter(policy, str(change_config(save(tmp_path), target_modules=None)))
    assert policy.peft_config[REFERENCE_ADAPTER].target_modules == {"q_proj", "v_proj"}
    torch.testing.assert_close(reference_logps(policy), logps(make(1)), atol=1e-5, rtol=0)


def test_path_below_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    save(tmp_path / "adapter")
    load_reference_adapter(make(0), "~/adapter")


def test_adapter_of_another_base_model_warns_and_names_both(tmp_path):
    # Shapes cannot tell one base model from another.
    change_config(save(tmp_path), base_model_name_or_path="theirs/base")
    policy = make(0)
    policy.peft_config["default"].base_model_name_or_path = "ours/base"
    with pytest.warns(UserWarning, match="base model 'theirs/base', but the policy's is 'ours/base'") as caught:
        load_reference_adapter(policy, str(tmp_path))
    assert str(tmp_path) in str(caught[0].message)


@pytest.mark.parametrize(
    ("theirs", "ours"), [("a/base", "a/base"), (None, "a/base"), ("a/base", None), ("", "a/base")]
)
def test_adapter_of_the_same_or_an_unknown_base_model_does_not_warn(tmp_path, theirs, ours):
    change_config(save(tmp_path), base_model_name_or_path=theirs)
    policy = make(0)
    policy.peft_config["default"].base_model_name_or_path = ours
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_reference_adapter(policy, str(tmp_path))


def test_hash_tells_weights_apart(tmp_path):
    one, same, other = save(tmp_path / "one"), save(tmp_path / "same"), save(tmp_path / "other", make(2))
    hashes = [load_reference_adapter(make(0), str(folder)) for folder in (one, same, other)]
    assert hashes[0] == hashes[1] != hashes[2]
    # An adapter that differs in the last bit of one weight is another adapter.
    change_weights(
        same, lambda weights: weights | {k: torch.nextafter(v, v + 1) for k, v in [next(iter(weights.items()))]}
    )
    assert load_reference_adapter(make(0), str(same)) != hashes[0]


def test_hash_covers_names_shapes_types_and_values():
    tensors = {"a": torch.arange(4.0), "b": torch.zeros(())}
    variants = [
        tensors,
        {"a": torch.arange(4.0), "c": torch.zeros(())},
        {"a": torch.arange(4.0).reshape(2, 2), "b": torch.zeros(())},
        {"a": torch.arange(4.0).double(), "b": torch.zeros(())},
        {"a": torch.arange(4.0) + 1, "b": torch.zeros(())},
        {"a": torch.arange(4.0)},
        {"a": torch.arange(4.0), "b": torch.zeros(()), "c": torch.zeros(0)},
    ]
    assert len({hash_tensors(variant) for variant in variants}) == len(variants)
    assert hash_tensors(dict(reversed(tensors.items()))) == hash_tensors(tensors)
    assert hash_tensors({"a": torch.arange(8.0)[::2]}) == hash_tensors({"a": torch.tensor([0.0, 2.0, 4.0, 6.0])})


# ---- A copy of the policy's adapter ----


@pytest.mark.parametrize("kind", {**POLICIES, **REFERENCES})
def test_copy_is_the_policy_and_does_not_follow_it(kind):
    policy = make(0, **{**POLICIES, **REFERENCES}[kind])
    own, own_flags = logps(policy), flags(policy)
    torch.manual_seed(11)
    rng = torch.get_rng_state()
    copy_trained_adapter(policy)
    assert torch.equal(reference_logps(policy), own) and torch.equal(logps(policy), own)
    assert torch.equal(torch.get_rng_state(), rng)
    kept = {name: flag for name, flag in flags(policy).items() if name in own_flags}
    assert kept == own_flags
    assert not any(flag for name, flag in flags(policy).items() if name not in own_flags)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
    assert torch.equal(reference_logps(policy), own)
    assert (logps(policy) - own).abs().max() > 0.01


@pytest.mark.parametrize(
    "config",
    [LoHaConfig(r=4, target_modules=["q_proj"]), IA3Config(target_modules=["k_proj"], feedforward_modules=[])],
)
def test_copy_of_an_adapter_of_another_type(config):
    policy = make(0, config=config)
    own = logps(policy)
    copy_trained_adapter(policy)
    assert torch.equal(reference_logps(policy), own) and torch.equal(logps(policy), own)


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_copy_when_the_policys_initialisation_has_rewritten_the_base(init):
    policy = make(0, init_lora_weights=init)
    own, base = logps(policy), hash_tensors(dict(policy.get_base_model().named_parameters()))
    copy_trained_adapter(policy)
    assert torch.equal(reference_logps(policy), own) and torch.equal(logps(policy), own)
    kept = {n: p for n, p in policy.get_base_model().named_parameters() if REFERENCE_ADAPTER not in n}
    assert hash_tensors(kept) == base


def test_copy_computes_in_the_precision_of_the_policy():
    model = build_model().to(torch.bfloat16)
    policy = get_peft_model(model, lora(), autocast_adapter_dtype=False).eval()
    with torch.no_grad():
        for parameter in adapter_tensors(policy, "default").values():
            parameter.normal_(0, 0.2, generator=torch.Generator().manual_seed(1))
    own = logps(policy)
    copy_trained_adapter(policy)
    assert {p.dtype for p in adapter_tensors(policy, REFERENCE_ADAPTER).values()} == {torch.bfloat16}
    assert torch.equal(reference_logps(policy), own)


def test_copy_on_a_base_model_in_bf16():
    policy = make(0, model=build_model().to(torch.bfloat16))
    own = logps(policy)
    assert {parameter.dtype for parameter in adapter_tensors(policy, "default").values()} == {torch.float32}
    copy_trained_adapter(policy)
    assert torch.equal(reference_logps(policy), own)


def test_copy_of_a_policy_that_trains_biases_is_refused():
    policy = make(0, bias="all")
    with untouched(policy), pytest.raises(ValueError, match="Cannot copy the policy's adapter 'default'.*bias='all'"):
        copy_trained_adapter(policy)


def test_copy_of_prompt_tuning_is_refused():
    policy = get_peft_model(build_model(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    names = [name for name, _ in policy.named_parameters()]
    with pytest.raises(ValueError, match="Cannot copy the policy's adapter 'default'.*PROMPT_TUNING"):
        copy_trained_adapter(policy)
    assert [name for name, _ in policy.named_parameters()] == names and list(policy.peft_config) == ["default"]


def test_several_active_adapters_are_refused(tmp_path):
    policy = make(0)
    policy.add_adapter("second", lora())
    policy.base_model.set_adapter(["default", "second"])
    for add in (copy_trained_adapter, lambda model: load_reference_adapter(model, str(save(tmp_path)))):
        with pytest.raises(ValueError, match=r"one active adapter, got \['default', 'second'\].*Call `set_adapter`"):
            add(policy)
        assert REFERENCE_ADAPTER not in policy.peft_config


# ---- Activation ----


@pytest.mark.parametrize("kind", POLICIES)
def test_no_adapter_is_the_base_model(kind):
    policy = make(0, **POLICIES[kind])
    with untouched(policy):
        with adapter_active(policy, None):
            torch.testing.assert_close(logps(policy), logps(build_model().eval()), atol=1e-6, rtol=0)
    copy_trained_adapter(policy)
    with untouched(policy):
        with adapter_active(policy, None):
            torch.testing.assert_close(logps(policy), logps(build_model().eval()), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", [None, REFERENCE_ADAPTER])
def test_activation_leaves_no_trace(tmp_path, name):
    policy = make(0, modules_to_save=["lm_head"]).train()
    load_reference_adapter(policy, str(save(tmp_path, make(1, modules_to_save=["norm"]))))
    # A weight that the user froze must stay frozen.
    next(iter(adapter_tensors(policy, "default").values())).requires_grad_(False)
    with untouched(policy):
        with adapter_active(policy, name):
            pass
    with untouched(policy), pytest.raises(KeyError):
        with adapter_active(policy, name):
            raise KeyError("in the middle of it")


def test_reference_is_frozen_while_active():
    policy = make(0)
    copy_trained_adapter(policy)
    with adapter_active(policy, REFERENCE_ADAPTER):
        assert not any(parameter.requires_grad for parameter in adapter_tensors(policy, REFERENCE_ADAPTER).values())


def test_no_gradient_reaches_the_reference(tmp_path):
    policy = make(0)
    load_reference_adapter(policy, str(save(tmp_path)))
    with adapter_active(policy, REFERENCE_ADAPTER), torch.no_grad():
        policy(input_ids=IDS)
    policy(input_ids=IDS, labels=IDS).loss.backward()
    assert all(parameter.grad is None for parameter in adapter_tensors(policy, REFERENCE_ADAPTER).values())
    assert all(parameter.grad is not None for parameter in adapter_tensors(policy, "default").values())


# ---- What is saved ----


@pytest.mark.parametrize("kind", POLICIES)
def test_only_the_trained_adapter_is_saved(tmp_path, kind):
    alone, policy = make(0, **POLICIES[kind]), make(0, **POLICIES[kind])
    alone.save_pretrained(tmp_path / "alone")
    load_reference_adapter(policy, str(save(tmp_path / "reference", make(1, modules_to_save=["norm"]))))
    policy.save_pretrained(tmp_path / "both", selected_adapters=list(policy.peft_config))
    policy.save_pretrained(tmp_path / "asked")
    with only_trained_adapter(policy):
        policy.save_pretrained(tmp_path / "saved")

    def files(folder: str) -> dict[str, bytes]:
        found = (file for file in (tmp_path / folder).rglob("*") if file.is_file())
        return {str(file.relative_to(tmp_path / folder)): file.read_bytes() for file in found}

    expected, got = files("alone"), files("saved")
    assert any("klx_ref" in name for name in files("both"))  # what would be saved otherwise
    assert got.keys() == expected.keys() == files("asked").keys()
    assert all(got[name] == expected[name] for name in got if name.endswith(".safetensors"))
    name = trained_adapter(policy)
    folder = tmp_path / "saved" / ("" if name == "default" else name)
    assert torch.equal(logps(PeftModel.from_pretrained(build_model(), folder).eval()), logps(policy))


def test_saving_sees_every_adapter_of_the_user_again_afterwards(tmp_path):
    policy = make(0)
    policy.add_adapter("mine", copy.deepcopy(policy.peft_config["default"]))
    copy_trained_adapter(policy)
    before = policy.save_pretrained
    with untouched(policy), pytest.raises(KeyError):
        with only_trained_adapter(policy):
            raise KeyError("in the middle of it")
    assert policy.save_pretrained is before
    policy.save_pretrained(tmp_path)
    assert (tmp_path / "mine" / WEIGHTS).is_file() and not (tmp_path / "klx_ref").exists()


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_a_copy_of_the_policy_saves_itself(again, tmp_path):
    policy = make(0)
    copy_trained_adapter(policy)
    other = again(policy)
    with torch.no_grad():
        for weight in adapter_tensors(other, "default").values():
            weight.fill_(3.0)
    other.save_pretrained(tmp_path, True, None)  # by position
    assert all((weight == 3.0).all() for weight in load_file(tmp_path / WEIGHTS).values())
    assert not (tmp_path / "klx_ref").exists()


def test_weightless_copy_keeps_how_a_weight_is_quantised():
    # PEFT reads these attributes of bitsandbytes' weights when an adapter adds a layer to one more module.
    class QuantisedWeight(torch.nn.Parameter):
        pass

    policy = make(0)
    layer = policy.get_base_model().model.layers[0].mlp.up_proj
    layer.weight = QuantisedWeight(layer.weight.data, requires_grad=False)
    layer.weight.compress_statistics, layer.weight.quant_type = True, "nf4"
    empty = _weightless_copy(policy).get_base_model().model.layers[0].mlp.up_proj.weight
    assert empty.is_meta and empty.compress_statistics and empty.quant_type == "nf4"


@pytest.mark.parametrize("double", [False, True])
def test_a_4_bit_policy_takes_a_reference_on_more_modules(double, tmp_path):
    """Its log-probs are those of the adapter on the same 4-bit model."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install bitsandbytes")
    build_model(hidden_size=64, intermediate_size=64).save_pretrained(tmp_path / "base")
    targets = ["q_proj", "v_proj", "o_proj", "up_proj"]
    wide = trained_lora(3, model=AutoModelForCausalLM.from_pretrained(tmp_path / "base"), target_modules=targets)
    wide.save_pretrained(tmp_path / "reference")
    quantised = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=double)

    def base():
        return AutoModelForCausalLM.from_pretrained(tmp_path / "base", quantization_config=quantised)

    policy = trained_lora(1, model=base())
    load_reference_adapter(policy, str(tmp_path / "reference"))
    expected = PeftModel.from_pretrained(base(), tmp_path / "reference")
    ids = torch.arange(4, 12).unsqueeze(0)
    with torch.no_grad(), adapter_active(policy, "klx_ref"):
        found = policy(ids).logits
    torch.testing.assert_close(found, expected(ids).logits)


def test_saving_through_a_replaced_method(tmp_path):
    policy, calls = make(0), []
    copy_trained_adapter(policy)
    original = policy.save_pretrained

    def replaced(*args, **kwargs):
        calls.append(kwargs)
        return original(*args, **kwargs)

    policy.save_pretrained = replaced
    with only_trained_adapter(policy):
        policy.save_pretrained(tmp_path)
    assert policy.save_pretrained is replaced
    assert len(calls) == 1 and not (tmp_path / "klx_ref").exists()


def test_saving_a_model_without_adapters(tmp_path):
    model = build_model()
    with only_trained_adapter(model):
        model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").is_file()


# ---- Wrappers of engines ----


def test_a_model_is_unwrapped_once_and_not_kept(monkeypatch):
    asked = []

    def extract(model):
        asked.append(model)
        return model.module if isinstance(model, torch.nn.DataParallel) else model

    monkeypatch.setattr(peft_adapters, "extract_model_from_parallel", extract)
    model = build_model()
    wrapped = torch.nn.DataParallel(model)
    for _ in range(3):
        assert unwrapped(wrapped) is model and unwrapped(model) is model
    assert len(asked) == 2
    asked.clear()
    kept = weakref.ref(model)
    del model, wrapped
    gc.collect()
    assert kept() is None
