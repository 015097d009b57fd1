"""Adapter files that are refused, for every kind of defect."""

import copy
import json
import os
import pickle
import re
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import IA3Config, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file

from support.adapter_checks import (
    CONFIG,
    WEIGHTS,
    change_config,
    change_weights,
    logps,
    make,
    reference_logps,
    save,
    untouched,
)
from support.tiny import build_model, lora
from trl_klx.references.adapter_loading import REFERENCE_ADAPTER, copy_trained_adapter, load_reference_adapter
from trl_klx.references.peft_adapters import adapter_tensors


def refused(path, reason: str, policy: PeftModel | None = None) -> str:
    """Load the adapter, and expect one error that names path and reason, and an unchanged model."""
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
    # Perhaps from a newer version: its meaning is unknown, so the adapter cannot be rebuilt.
    change_config(save(tmp_path), use_warp_drive=True)
    refused(tmp_path, "the installed PEFT does not know the setting 'use_warp_drive'")


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
    refused(tmp_path, "it is of type PROMPT_TUNING, which cannot be combined with another adapter")


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
    refused(tmp_path, f"has dtype {dtype}, expected floating point")


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_trained_biases(tmp_path, bias):
    save(tmp_path, make(1, bias=bias))
    refused(tmp_path, f"it trains biases \\(bias='{bias}'\\).*Train it with bias='none'")


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora", "OLoRA", "corda", "lora_ga", "newer"])
def test_initialisations_that_rewrite_the_base(tmp_path, init):
    change_config(save(tmp_path), init_lora_weights=init)
    refused(tmp_path, f"it was initialised with '{init}', which rewrites the base weights .* Convert it")


def test_loftq(tmp_path):
    # PEFT needs scipy to build such a config, which nothing else here needs.
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
    refused(tmp_path, "does not know the setting 'runtime_config'")


@pytest.mark.parametrize("rank", [0, -4, 10**6, 10**12, 10**30, 4.5, "4", None, True, [4]])
def test_rank_that_is_none(tmp_path, rank):
    # A huge rank must be refused before it costs memory.
    change_config(save(tmp_path), r=rank)
    refused(tmp_path, "has shape|does not fit the model|cannot be read")


@pytest.mark.parametrize("alpha", [float("nan"), float("inf"), 1e300, -1e300, "16", None])
def test_scaling_that_is_no_number(tmp_path, alpha):
    change_config(save(tmp_path), lora_alpha=alpha)
    refused(
        tmp_path, r"its scaling \(`lora_alpha / r`\) is (nan|inf|-?2\.5e\+299), beyond 1e\+06|does not fit the model"
    )


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
    refused(tmp_path, r"it contains the base weight 'base_model\.model\.model\.embed_tokens\.weight'.* values differ")


def test_embeddings_of_another_size(tmp_path):
    other = build_model()
    other.resize_token_embeddings(40)
    save(tmp_path, make(1, model=other), save_embedding_layers=True)
    refused(tmp_path, r"it contains the base weight 'base_model\.model\.(lm_head|model\.embed_tokens)\.weight'")


def test_a_second_reference(tmp_path):
    policy = make(0)
    load_reference_adapter(policy, str(save(tmp_path)))
    refused(tmp_path, "already has an adapter 'klx_ref'.*delete_adapter", policy)
    with untouched(policy), pytest.raises(ValueError, match="Cannot copy .*already has an adapter 'klx_ref'"):
        copy_trained_adapter(policy)
    policy.delete_adapter("klx_ref")
    load_reference_adapter(policy, str(tmp_path))


def test_policy_whose_adapter_has_the_name_of_a_module(tmp_path):
    # Newer versions of PEFT treat the layer as part of that adapter, and so lose track of it.
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
        # The header was changed where it has no effect: in the metadata or in white space.
        assert all(torch.equal(loaded[name], original[name]) for name in original)
