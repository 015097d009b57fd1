import copy
import itertools
import json
import os
import pickle
import re
import warnings
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import IA3Config, LoHaConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file

from tiny import build_model, lora
from trl_klx.adapters import (
    REFERENCE_ADAPTER,
    adapter_active,
    adapter_tensors,
    copy_trained_adapter,
    hash_tensors,
    load_reference_adapter,
    only_trained_adapter,
    trained_adapter,
)


IDS = torch.arange(4, 28).reshape(2, 12)
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def make(seed: int, *, name: str = "default", config=None, model=None, **overrides) -> PeftModel:
    """A policy whose every trainable weight does something."""
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
    """Everything that a refused adapter must leave as it was."""
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


def refused(path, reason: str, policy: PeftModel | None = None) -> str:
    """Load, and expect one error that names path and reason, and no trace on the model."""
    policy = make(0) if policy is None else policy
    with untouched(policy), pytest.raises(ValueError) as caught:
        load_reference_adapter(policy, str(path))
    message = str(caught.value)
    assert type(caught.value) is ValueError
    assert message.startswith(f"Cannot use the adapter at {str(path)!r} as KL reference: ")
    assert re.search(reason, message), message
    return message


# ---- Adapters that are refused ----


def test_missing_path(tmp_path):
    refused(tmp_path / "nothing", "the directory does not exist")


def test_name_of_a_hub_repository_that_cannot_be_had():
    refused("nobody-at-all/nothing", "the directory does not exist, and no such Hub repository could be downloaded")


@pytest.mark.parametrize("path", ["../nothing/here", "./nothing", "/nothing", "~/nothing", "", "a/b/c", "nothing"])
def test_path_that_can_be_no_hub_repository(path):
    assert "Hub" not in refused(path, "the directory does not exist")


def test_file_instead_of_a_directory(tmp_path):
    refused(save(tmp_path) / WEIGHTS, "it is not a directory")


def test_no_config(tmp_path):
    os.unlink(save(tmp_path) / CONFIG)
    refused(tmp_path, r"it has no `adapter_config\.json`")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "cannot be read"),
        ("{", "cannot be read"),
        ("r: 4", "cannot be read"),
        ("[]", "not a JSON object"),
        ("null", "not a JSON object"),
        ("[" * 100_000, "cannot be read"),
        ("{}", "unknown peft_type None"),
        ('{"peft_type": "LORRA"}', "unknown peft_type 'LORRA'"),
        ('{"peft_type": ["LORA"]}', r"unknown peft_type \['LORA'\]"),
    ],
    ids=lambda text: text[:12],
)
def test_config_that_is_none(tmp_path, text, reason):
    (save(tmp_path) / CONFIG).write_text(text)
    refused(
        tmp_path, rf"its `adapter_config\.json` cannot be read \(.*{reason}" if reason != "cannot be read" else reason
    )


def test_config_that_is_not_text(tmp_path):
    (save(tmp_path) / CONFIG).write_bytes(b"\xff\xfe\x00{}")
    refused(tmp_path, "cannot be read")


def test_config_that_is_a_directory(tmp_path):
    os.unlink(save(tmp_path) / CONFIG)
    (tmp_path / CONFIG).mkdir()
    refused(tmp_path, "it has no `adapter_config")


def test_setting_that_the_installed_peft_does_not_know(tmp_path):
    # Of a newer version, perhaps: what it means is not known, so the adapter cannot be rebuilt.
    change_config(save(tmp_path), use_warp_drive=True)
    refused(tmp_path, "the installed PEFT knows no setting 'use_warp_drive'")


def test_unknown_setting_that_is_off_is_harmless(tmp_path):
    change_config(save(tmp_path), use_warp_drive=False, warp_config=None, warp_pattern={})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_reference_adapter(make(0), str(tmp_path))


def test_adapter_of_another_type(tmp_path):
    config = IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
    save(tmp_path, get_peft_model(build_model(), config))
    refused(tmp_path, "different peft types")


def test_prompt_tuning(tmp_path):
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    save(tmp_path, get_peft_model(build_model(), config))
    refused(tmp_path, "it is of type PROMPT_TUNING, which cannot stand beside another adapter")


def test_no_weights(tmp_path):
    os.unlink(save(tmp_path) / WEIGHTS)
    refused(tmp_path, r"it has no `adapter_model\.safetensors`\.")


class Hostile:
    """Unpickling it leaves a file behind."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


def test_hostile_pickle_does_what_the_tests_below_look_for(tmp_path):
    pickle.loads(pickle.dumps(Hostile(tmp_path / "ran")))
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("write", [torch.save, lambda content, file: file.write_bytes(pickle.dumps(content))])
def test_pickle_is_never_loaded(tmp_path, write):
    marker = tmp_path / "ran"
    folder = save(tmp_path / "adapter")
    os.unlink(folder / WEIGHTS)
    write(Hostile(marker), folder / "adapter_model.bin")
    refused(folder, r"it only has `adapter_model\.bin`, a pickle, which is never loaded\. Save it again as")
    assert not marker.exists()


def test_pickle_beside_safetensors_is_not_looked_at(tmp_path):
    marker = tmp_path / "ran"
    folder = save(tmp_path / "adapter")
    for name in ("adapter_model.bin", "pytorch_model.bin", "training_args.bin", "optimizer.pt"):
        torch.save(Hostile(marker), folder / name)
    load_reference_adapter(make(0), str(folder))
    assert not marker.exists()


def test_pickle_that_calls_itself_safetensors(tmp_path):
    marker = tmp_path / "ran"
    folder = save(tmp_path / "adapter")
    torch.save(Hostile(marker), folder / WEIGHTS)
    refused(folder, r"its `adapter_model\.safetensors` cannot be read")
    assert not marker.exists()


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.99])
def test_truncated_weights(tmp_path, share):
    file = save(tmp_path) / WEIGHTS
    content = file.read_bytes()
    file.write_bytes(content[: int(share * len(content))])
    refused(tmp_path, r"its `adapter_model\.safetensors` cannot be read")


def test_weights_with_a_tail(tmp_path):
    file = save(tmp_path) / WEIGHTS
    file.write_bytes(file.read_bytes() + b"\0" * 64)
    refused(tmp_path, "cannot be read")


def test_no_tensors(tmp_path):
    change_weights(save(tmp_path), lambda weights: {})
    refused(tmp_path, r"its `adapter_model\.safetensors` holds no weights")


def test_wrong_rank(tmp_path):
    change_config(save(tmp_path), r=8)
    refused(tmp_path, r"weight '.*lora_A\.weight' has shape \(4, 32\), but the model needs \(8, 32\)")


def test_wrong_shapes(tmp_path):
    save(tmp_path, make(1, model=build_model(hidden_size=48)))
    refused(tmp_path, r"has shape \(4, 48\), but the model needs \(4, 32\)")


def test_some_weights_are_missing(tmp_path):
    change_weights(save(tmp_path), lambda weights: {k: v for k, v in weights.items() if "v_proj" not in k})
    refused(tmp_path, r"4 of 8 weights are missing \(first: '.*layers\.0\.self_attn\.v_proj\.lora_A\.weight'\)\.$")


def test_some_weights_are_too_many(tmp_path):
    change_config(save(tmp_path), target_modules=["q_proj"])
    refused(
        tmp_path, r"4 weights have no place in the model \(first: '.*layers\.0\.self_attn\.v_proj\.lora_A\.weight'\)"
    )


def test_some_weights_are_missing_and_others_too_many(tmp_path):
    change_config(save(tmp_path), target_modules=["q_proj", "k_proj"])
    message = refused(tmp_path, "4 of 8 weights are missing .*k_proj")
    assert re.search("4 weights have no place in the model .*v_proj", message)


def test_adapter_of_a_deeper_and_of_a_shallower_model(tmp_path):
    save(tmp_path / "deep", make(1, model=build_model(num_hidden_layers=3)))
    refused(tmp_path / "deep", r"4 weights have no place in the model \(first: '.*layers\.2\.")
    save(tmp_path / "shallow", make(1, model=build_model(num_hidden_layers=1)))
    refused(tmp_path / "shallow", r"4 of 8 weights are missing \(first: '.*layers\.1\.")


def test_targets_that_the_model_lacks(tmp_path):
    change_config(save(tmp_path), target_modules=["c_attn"])
    refused(tmp_path, r"it does not fit the model \(.*c_attn|it targets no module of the model")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_no_numbers(tmp_path, value):
    def spoil(weights):
        next(iter(weights.values())).view(-1)[3] = value
        return weights

    change_weights(save(tmp_path), spoil)
    refused(tmp_path, r"weight '.*q_proj\.lora_A\.weight' holds NaN or infinite values")


def test_weights_too_large_for_the_models_precision(tmp_path):
    change_weights(save(tmp_path), lambda weights: {k: v.double() * 1e300 for k, v in weights.items()})
    refused(tmp_path, "holds NaN or infinite values")


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.uint8])
def test_weights_of_a_type_that_holds_none(tmp_path, dtype):
    change_weights(save(tmp_path), lambda weights: {k: v.to(dtype) for k, v in weights.items()})
    refused(tmp_path, f"is of type {dtype}, which holds no weights")


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_trained_biases(tmp_path, bias):
    save(tmp_path, make(1, bias=bias))
    refused(tmp_path, f"it trains biases \\(bias='{bias}'\\).*Train it with bias='none'")


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora", "OLoRA", "corda", "lora_ga", "newer"])
def test_initialisations_that_rewrite_the_base(tmp_path, init):
    change_config(save(tmp_path), init_lora_weights=init)
    refused(tmp_path, f"it was initialised with '{init}', which rewrites the base weights .* Convert it")


def test_loftq(tmp_path):
    # PEFT builds no such config without scipy, which nothing here needs.
    change_config(save(tmp_path), init_lora_weights="loftq")
    refused(tmp_path, "it was initialised with 'loftq', which rewrites|ImportError: The required package 'scipy'")


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("layer_replication", [[0, 2], [1, 2]]),
        ("alora_invocation_tokens", [5, 6]),
        ("megatron_core", "a_module_of_theirs"),
        ("kasa_config", {"beta": 1e-4, "gamma": 1e-3}),
        ("arrow_config", {"top_k": 2}),
        ("use_bdlora", {"nblocks": 2}),
    ],
)
def test_variants_of_lora(tmp_path, setting, value):
    if setting not in lora().to_dict():
        pytest.skip(f"this version of PEFT has no `{setting}`")
    change_config(save(tmp_path), **{setting: value})
    refused(tmp_path, f"it sets `{setting}`, but the reference must be a plain LoRA adapter")


def test_config_cannot_import_a_module(tmp_path, monkeypatch):
    (tmp_path / "klx_hostile_module.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    change_config(save(tmp_path), megatron_config={"a": 1}, megatron_core="klx_hostile_module")
    refused(tmp_path, "megatron")
    assert not (tmp_path / "ran").exists()


def test_runtime_settings_do_not_belong_into_a_file(tmp_path):
    change_config(save(tmp_path), runtime_config={"ephemeral_gpu_offload": True})
    refused(tmp_path, "knows no setting 'runtime_config'")


@pytest.mark.parametrize("rank", [0, -4, 10**6, 10**12, 10**30, 4.5, "4", None, True, [4]])
def test_rank_that_is_none(tmp_path, rank):
    # A huge rank must cost no memory before it is refused.
    change_config(save(tmp_path), r=rank)
    refused(tmp_path, "has shape|does not fit the model|cannot be read")


@pytest.mark.parametrize("alpha", [float("nan"), float("inf"), "16", None])
def test_scaling_that_is_no_number(tmp_path, alpha):
    change_config(save(tmp_path), lora_alpha=alpha)
    refused(tmp_path, r"its scaling \(`lora_alpha`\) is (nan|inf)|does not fit the model")


@pytest.mark.parametrize("targets", [[], "", "(", "q_proj", 5, [5], {"q_proj": 1}])
def test_targets_that_are_none(tmp_path, targets):
    change_config(save(tmp_path), target_modules=targets)
    refused(tmp_path, "does not fit the model|targets no module|missing|no place")


def test_unknown_modules_to_save(tmp_path):
    change_config(save(tmp_path), modules_to_save=["lm_head"])
    refused(tmp_path, r"1 of 9 weights are missing \(first: 'base_model\.model\.lm_head\.weight'\)")


def test_names_that_leave_the_folder(tmp_path):
    outside = save(tmp_path / "outside")
    folder = save(tmp_path / "adapter")
    os.unlink(folder / WEIGHTS)
    index = {"weight_map": dict.fromkeys(load_file(outside / WEIGHTS), f"../outside/{WEIGHTS}")}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    refused(folder, "it has no `adapter_model")

    escaping = save(tmp_path / "escaping")
    change_weights(
        escaping, lambda weights: weights | {"../../outside/x": torch.zeros(1), "__class__": torch.zeros(1)}
    )
    refused(escaping, "2 weights have no place in the model")


def test_embeddings_that_differ_from_the_policys(tmp_path):
    other = build_model()
    with torch.no_grad():
        other.get_input_embeddings().weight[5] += 1e-3
    save(tmp_path, make(1, model=other), save_embedding_layers=True)
    refused(tmp_path, r"it carries 'base_model\.model\.model\.embed_tokens\.weight', a base weight, with other values")


def test_embeddings_of_another_size(tmp_path):
    other = build_model()
    other.resize_token_embeddings(40)
    save(tmp_path, make(1, model=other), save_embedding_layers=True)
    refused(tmp_path, r"it carries 'base_model\.model\.(lm_head|model\.embed_tokens)\.weight', a base weight")


def test_a_second_reference(tmp_path):
    policy = make(0)
    load_reference_adapter(policy, str(save(tmp_path)))
    refused(tmp_path, "already has an adapter 'klx_ref'.*delete_adapter", policy)
    with untouched(policy), pytest.raises(ValueError, match="Cannot copy .*already has an adapter 'klx_ref'"):
        copy_trained_adapter(policy)
    policy.delete_adapter("klx_ref")
    load_reference_adapter(policy, str(tmp_path))


def test_policy_whose_adapter_has_the_name_of_a_module(tmp_path):
    # Newer versions of PEFT take the layer for a part of that adapter, and so lose sight of it.
    policy = make(0, name="0")
    try:
        load_reference_adapter(policy, str(save(tmp_path)))
    except ValueError:
        refused(tmp_path, "weights have no place in the model", make(0, name="0"))
    else:
        torch.testing.assert_close(reference_logps(policy), logps(make(1)), atol=1e-5, rtol=0)


def test_refusal_keeps_training_mode_and_a_disabled_gradient(tmp_path):
    policy = make(0).train()
    next(iter(adapter_tensors(policy, "default").values())).requires_grad_(False)
    change_config(save(tmp_path), r=8)
    torch.manual_seed(3)
    refused(tmp_path, "has shape", policy)


@pytest.fixture(scope="module")
def good_file(tmp_path_factory):
    folder = save(tmp_path_factory.mktemp("good"))
    content = (folder / WEIGHTS).read_bytes()
    return folder, content, 8 + int.from_bytes(content[:8], "little")


@pytest.fixture(scope="module")
def plain_policy():
    return make(0)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_damaged_weights_are_refused_or_finite(good_file, plain_policy, data):
    folder, content, header = good_file
    damage = data.draw(st.sampled_from(["flip in header", "flip", "truncate", "bytes"]))
    if damage == "truncate":
        damaged = content[: data.draw(st.integers(0, len(content) - 1))]
    elif damage == "bytes":
        damaged = data.draw(st.binary(max_size=64)) + data.draw(st.sampled_from([b"", content]))
    else:
        damaged = bytearray(content)
        for _ in range(data.draw(st.integers(1, 3))):
            place = data.draw(st.integers(0, (header if damage == "flip in header" else len(content)) - 1))
            damaged[place] ^= 1 << data.draw(st.integers(0, 7))
        damaged = bytes(damaged)
    (folder / WEIGHTS).write_bytes(damaged)
    model = copy.deepcopy(plain_policy)
    try:
        with untouched(model):
            try:
                load_reference_adapter(model, str(folder))
            except ValueError as error:
                assert str(folder) in str(error)
                raise
            loaded = {name: weight.clone() for name, weight in adapter_tensors(model, REFERENCE_ADAPTER).items()}
            model.delete_adapter(REFERENCE_ADAPTER)
    except ValueError:
        return
    original = adapter_tensors(make(1), "default", as_name=REFERENCE_ADAPTER)
    assert {name: weight.shape for name, weight in loaded.items()} == {n: w.shape for n, w in original.items()}
    assert all(torch.isfinite(weight).all() for weight in loaded.values())
    if damaged[header:] == content[header:]:
        # The header was changed where it says nothing: in the metadata, or in white space.
        assert all(torch.equal(loaded[name], original[name]) for name in original)


# ---- Adapters that serve ----

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
    # PEFT itself wraps a module for one purpose only.
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
    # The same objects are trainable as before, so an optimizer built before or after has the same parameters.
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
    # One weight in its last bit is another adapter.
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


@pytest.mark.parametrize("config", [LoHaConfig(r=4, target_modules=["q_proj"]), IA3Config(target_modules=["k_proj"], feedforward_modules=[])])  # fmt: skip
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
    # A weight that the user froze must not thaw.
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
    policy.save_pretrained(tmp_path / "both")
    with only_trained_adapter(policy):
        policy.save_pretrained(tmp_path / "saved")

    def files(folder: str) -> dict[str, bytes]:
        found = (file for file in (tmp_path / folder).rglob("*") if file.is_file())
        return {str(file.relative_to(tmp_path / folder)): file.read_bytes() for file in found}

    expected, got = files("alone"), files("saved")
    assert any("klx_ref" in name for name in files("both"))  # what would be saved otherwise
    assert got.keys() == expected.keys()
    assert all(got[name] == expected[name] for name in got if name.endswith(".safetensors"))
    name = trained_adapter(policy)
    folder = tmp_path / "saved" / ("" if name == "default" else name)
    assert torch.equal(logps(PeftModel.from_pretrained(build_model(), folder).eval()), logps(policy))


def test_saving_sees_every_adapter_again_afterwards(tmp_path):
    policy = make(0)
    copy_trained_adapter(policy)
    with untouched(policy), pytest.raises(KeyError):
        with only_trained_adapter(policy):
            raise KeyError("in the middle of it")
    assert "save_pretrained" not in vars(policy)
    policy.save_pretrained(tmp_path)
    assert (tmp_path / "klx_ref" / WEIGHTS).is_file()


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
