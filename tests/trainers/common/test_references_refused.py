"""References that are refused, full models of every kind, and the identity of references."""

import copy
import json
import os
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MixtralConfig, MixtralForCausalLM, Qwen2ForCausalLM

from support.reference_checks import (
    MODELS,
    PENALTY,
    assert_used,
    borrowed,
    differ,
    made,
    rebuilt,
    run,
    save_adapter,
    save_checkpoints,
    scored,
    trained_policy,
)
from support.tiny import build_model, logged, lora
from trl_klx import KLXGRPOConfig
from trl_klx.references.adapter_loading import REFERENCE_ADAPTER
from trl_klx.references.building import resolve_reference
from trl_klx.references.fingerprint import fingerprint, hash_tensors
from trl_klx.references.loading import saved_steps


@pytest.fixture(scope="module")
def adapter_path(tmp_path_factory) -> str:
    return save_adapter(tmp_path_factory.mktemp("adapter"))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    return save_checkpoints(tmp_path_factory.mktemp("checkpoints"))


# ---- References that are refused ----


def refusal(output_dir, *, model=None, peft=None, **fields) -> str:
    model = build_model() if model is None else model
    names = [name for name, _ in model.named_parameters()]
    with pytest.raises(ValueError) as caught:
        run(output_dir, model=model, peft=peft, train=False, **PENALTY, **fields)
    if peft is None:
        assert [name for name, _ in model.named_parameters()] == names
    return str(caught.value)


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_step_that_was_never_saved(tmp_path, checkpoints, kind):
    output_dir = borrowed(checkpoints[kind], tmp_path)
    (output_dir / "checkpoint-11").mkdir()
    (output_dir / "checkpoint-x").mkdir()
    (output_dir / "checkpoint-7").write_text("a file")
    peft = lora() if kind == "lora" else None
    message = refusal(output_dir, peft=peft, kl_penalty_reference_step=7)
    assert message == (
        f"`kl_penalty_reference_step=7` was never saved: there is no `checkpoint-7` in {str(output_dir)!r}. "
        "Saved steps: 1, 2, 11. Choose one of them, 0 for the initial policy, or leave the field unset."
    )


def test_step_when_nothing_was_saved(tmp_path):
    assert "Saved steps: none." in refusal(tmp_path / "nowhere", kl_penalty_reference_step=3)
    assert saved_steps(str(tmp_path / "nowhere")) == []


def test_full_policy_and_a_checkpoint_with_an_adapter(tmp_path, checkpoints):
    output_dir = borrowed(checkpoints["lora"], tmp_path)
    message = refusal(output_dir, kl_penalty_reference_step=2)
    assert f"Cannot use {str(output_dir / 'checkpoint-2')!r} as KL reference: it has no `model.safetensors`" in message
    assert "It holds an adapter, but the policy has none" in message


def test_adapter_policy_and_a_full_checkpoint(tmp_path, checkpoints):
    output_dir = borrowed(checkpoints["full"], tmp_path)
    message = refusal(output_dir, peft=lora(), kl_penalty_reference_step=2)
    assert f"Cannot use the adapter at {str(output_dir / 'checkpoint-2')!r} as KL reference" in message
    assert "it has no `adapter_config.json`. It holds a full model: set `kl_ref_model_path` instead." in message


def test_adapter_without_a_peft_model(tmp_path, adapter_path):
    message = refusal(tmp_path, kl_ref_adapter_path=adapter_path)
    assert f"`kl_ref_adapter_path={adapter_path!r}` needs a PEFT policy" in message
    assert "got Qwen2ForCausalLM" in message and "Pass a `peft_config` or a `PeftModel`" in message


def test_missing_adapter(tmp_path):
    message = refusal(tmp_path, peft=lora(), kl_ref_adapter_path=str(tmp_path / "nothing"))
    assert f"Cannot use the adapter at {str(tmp_path / 'nothing')!r} as KL reference" in message


def spoil(folder: Path, change) -> None:
    file = folder / "model.safetensors"
    weights = change(load_file(file))
    save_file(weights, file, metadata={"format": "pt"})


def drop(weights):
    return {name: weight for name, weight in weights.items() if name != "model.layers.1.mlp.up_proj.weight"}


def add(weights):
    return weights | {"model.layers.7.mlp.up_proj.weight": torch.zeros(2, 2)}


def reshape(weights):
    return weights | {"model.norm.weight": torch.zeros(7)}


def nan(weights):
    weights["model.norm.weight"][3] = float("nan")
    return weights


def infinite(weights):
    weights["model.norm.weight"][3] = float("inf")
    return weights


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (drop, "'model.layers.1.mlp.up_proj.weight' is missing"),
        (add, "'model.layers.7.mlp.up_proj.weight' is missing, or has no place in the model"),
        (reshape, "its weights cannot be loaded"),
        (nan, "its weights hold NaN or infinite values"),
        (infinite, "its weights hold NaN or infinite values"),
    ],
)
def test_full_checkpoint_that_does_not_fit(tmp_path, checkpoints, change, reason):
    output_dir = borrowed(checkpoints["full"], tmp_path)
    spoil(output_dir / "checkpoint-2", change)
    message = refusal(output_dir, kl_penalty_reference_step=2)
    assert message.startswith(f"Cannot use {str(output_dir / 'checkpoint-2')!r} as KL reference: ")
    assert reason in message


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 0.999])
def test_truncated_full_checkpoint(tmp_path, checkpoints, share):
    output_dir = borrowed(checkpoints["full"], tmp_path)
    file = output_dir / "checkpoint-2" / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(share * len(content))])
    message = refusal(output_dir, kl_penalty_reference_step=2)
    assert f"Cannot use {str(output_dir / 'checkpoint-2')!r} as KL reference: its weights cannot be loaded" in message


def test_missing_shard(tmp_path, checkpoints):
    folder = shard(borrowed(checkpoints["full"], tmp_path) / "checkpoint-2")
    os.unlink(sorted(folder.glob("model-*.safetensors"))[1])
    message = refusal(folder.parent, kl_penalty_reference_step=2)
    assert message.startswith(f"Cannot use {str(folder)!r} as KL reference: its weights cannot be loaded")


def test_torn_adapter_checkpoint(tmp_path, checkpoints):
    output_dir = borrowed(checkpoints["lora"], tmp_path)
    file = output_dir / "checkpoint-2" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-50])
    message = refusal(output_dir, model=trained_policy(), kl_penalty_reference_step=2)
    assert "its `adapter_model.safetensors` cannot be read" in message


class Hostile:
    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


def test_pickled_checkpoint_is_never_loaded(tmp_path, checkpoints):
    output_dir = borrowed(checkpoints["full"], tmp_path)
    os.unlink(output_dir / "checkpoint-2" / "model.safetensors")
    marker = tmp_path / "ran"
    with open(output_dir / "checkpoint-2" / "pytorch_model.bin", "wb") as stream:
        pickle.dump(Hostile(marker), stream)
    assert "it has no `model.safetensors`" in refusal(output_dir, kl_penalty_reference_step=2)
    assert not marker.exists()


@pytest.mark.parametrize("fields", [{}, {"kl_penalty_reference_step": 0}, {"kl_ref_lag": 1}], ids=str)
def test_policy_that_trains_the_base_weights_which_the_reference_shares(tmp_path, fields):
    message = refusal(tmp_path, model=trained_policy(bias="all"), **fields)
    assert "The policy trains 'base_model.model.model.layers.0.self_attn.q_proj.base_layer.bias'" in message
    assert "The KL reference shares this weight" in message and "`bias='none'`" in message
    thawed = trained_policy()
    thawed.get_base_model().lm_head.weight.requires_grad_(True)
    assert "The policy trains 'base_model.model.lm_head.weight'" in refusal(tmp_path, model=thawed, **fields)


@pytest.mark.parametrize("reference", ["base", "adapter"])
def test_policy_whose_adapter_has_taken_over_a_part_of_the_base(reference, tmp_path, adapter_path):
    fields = {"kl_ref_adapter_path": adapter_path} if reference == "adapter" else {}
    message = refusal(tmp_path, peft=lora(init_lora_weights="pissa"), **fields)
    assert "`init_lora_weights='pissa'`" in message and "`kl_penalty_reference_step=0`" in message


def test_step_0_of_a_policy_whose_adapter_has_taken_over_a_part_of_the_base(tmp_path):
    trainer = run(tmp_path, peft=lora(init_lora_weights="pissa"), **PENALTY, kl_penalty_reference_step=0)
    # Against the base's residual weights, the KL of the first batch would be large.
    assert logged(trainer, "klx/kl")[0] == pytest.approx(0.0, abs=1e-5)


def test_a_second_trainer_on_the_same_policy(tmp_path):
    policy = trained_policy()
    run(tmp_path, model=policy, **PENALTY, kl_penalty_reference_step=0, train=False)
    message = refusal(tmp_path, model=policy, kl_penalty_reference_step=0)
    assert "already has an adapter 'klx_ref'" in message and "delete_adapter('klx_ref')" in message


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"kl_ref_lag": 2}, "`kl_ref_lag=2` cannot be used with FSDP version 1.*a reference that does not move"),
        ({"kl_ref_sync_steps": 2}, "`kl_ref_sync_steps=2` cannot be used"),
        ({"kl_statistic": "full"}, "`kl_statistic='full'` cannot be used.*or choose `kl_statistic='k3'`"),
    ],
)
def test_what_fsdp1_cannot_do(fields, message, tmp_path):
    # FSDP 1 needs a GPU, so only its version number is faked.
    accelerator = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=SimpleNamespace(fsdp_version=1)))
    args = KLXGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, kl_penalty_coef=0.1, **fields)
    with pytest.raises(ValueError, match=message):
        resolve_reference(args, build_model(), accelerator)
    with pytest.raises(ValueError, match="reference of a PEFT policy cannot be served by FSDP version 1"):
        resolve_reference(args, trained_policy(), accelerator)


# ---- Full models of every kind ----


def shard(folder: Path) -> Path:
    Qwen2ForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="30KB")
    (folder / "model.safetensors").unlink(missing_ok=True)
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    return folder


def test_sharded_checkpoint(tmp_path, checkpoints):
    folder = shard(borrowed(checkpoints["full"], tmp_path) / "checkpoint-2")
    trainer = run(folder.parent, **PENALTY, kl_penalty_reference_step=2, max_steps=2)
    for seen in trainer.seen:
        assert_used(seen, Qwen2ForCausalLM.from_pretrained(checkpoints["full"] / "checkpoint-2"))


@pytest.mark.parametrize(
    "fields", [{}, {"kl_ref_lag": 1}, {"kl_ref_sync_steps": 1, "kl_ref_mixup_alpha": 0.3}], ids=str
)
def test_tied_embeddings(tmp_path, fields):
    tied = {"tie_word_embeddings": True}
    trainer = run(tmp_path, model=build_model(**tied), **PENALTY, **fields, max_steps=3)
    reference = trainer.steps.after[0]
    for step, seen in enumerate(trainer.seen):
        if "kl_ref_lag" in fields:
            reference = trainer.steps.after[max(0, step - 1)]
        elif fields and step > 0:
            reference = {name: 0.7 * reference[name] + 0.3 * trainer.steps.after[step][name] for name in reference}
        model = build_model(**tied)
        model.load_state_dict(reference)
        assert_used(seen, model)
    with trainer.kl_reference.active() as model:
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_tied_embeddings_from_a_checkpoint(tmp_path):
    tied = {"tie_word_embeddings": True}
    one = run(tmp_path, model=build_model(**tied), **PENALTY, max_steps=2, save_strategy="steps", save_steps=2)
    assert "lm_head.weight" not in load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    fields = PENALTY | {"kl_penalty_reference_step": 2}
    trainer = run(tmp_path, model=build_model(**tied), **fields, max_steps=2)
    for seen in trainer.seen:
        assert_used(seen, rebuilt(one, 2, **tied))


def test_checkpoint_whose_names_are_not_those_of_the_modules(tmp_path):
    config = MixtralConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        num_local_experts=2,
        initializer_range=0.3,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, saved = MixtralForCausalLM(config), MixtralForCausalLM(config)
    saved.save_pretrained(tmp_path / "checkpoint-2")
    assert set(load_file(tmp_path / "checkpoint-2" / "model.safetensors")) != set(saved.state_dict())
    trainer = run(tmp_path, model=model, **PENALTY, kl_penalty_reference_step=2, max_steps=2)
    for seen in trainer.seen:
        assert_used(seen, saved)


@pytest.mark.parametrize("frozen", ["model.embed_tokens", "model.layers.0"])
def test_policy_with_frozen_layers(tmp_path, frozen):
    model = build_model()
    model.get_submodule(frozen).requires_grad_(False)
    trainer = run(tmp_path, model=model, **PENALTY)
    for seen in trainer.seen:
        assert_used(seen, build_model())
    assert differ(rebuilt(trainer, 4), build_model(), trainer.seen[-1])


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("fields", [{}, {"kl_penalty_reference_step": 2}], ids=["initial", "checkpoint"])
def test_fp32_lm_head_does_not_tie_the_reference_to_the_policy(tmp_path, tied, fields):
    # TRL's patched forward is a closure over the policy's head.
    settings = {"cast_lm_head_to_fp32": True, "learning_rate": 0.3} | PENALTY
    model = {"tie_word_embeddings": tied}
    if fields:
        first = build_model(**model).to(torch.bfloat16)
        run(tmp_path, model=first, **settings, max_steps=2, save_strategy="steps", save_steps=2)
    trainer = run(tmp_path, model=build_model(**model).to(torch.bfloat16), **settings, **fields, train=False)
    seen = {"ids": torch.arange(4, 28).reshape(2, 12), "mask": torch.ones(2, 12, dtype=torch.long), "keep": 6}
    before = scored(trainer, seen)
    policy = [weight.detach().clone() for weight in trainer.model.parameters()]
    trainer.train()
    after = scored(trainer, seen)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    moved = [(new - old).abs().max() for new, old in zip(trainer.model.parameters(), policy, strict=True)]
    assert min(moved) > 0.01

    # The same as for a copy that no trainer has touched.
    if fields:
        untouched = Qwen2ForCausalLM.from_pretrained(tmp_path / "checkpoint-2", dtype=torch.float32)
        weights = {
            n: w.bfloat16() if "lm_head" not in n and not tied else w for n, w in untouched.state_dict().items()
        }
        untouched = build_model(**model).to(torch.bfloat16)
        head = weights["lm_head.weight"].float()
        untouched.load_state_dict(weights)
    else:
        untouched = build_model(**model).to(torch.bfloat16)
        head = untouched.lm_head.weight.float()
    with torch.no_grad():
        hidden = untouched.model(input_ids=seen["ids"], attention_mask=seen["mask"]).last_hidden_state
        logits = hidden.float() @ head.T
    torch.testing.assert_close(after[1], logits, atol=1e-5, rtol=0)
    logps = torch.log_softmax(logits, dim=-1)[:, :-1].gather(2, seen["ids"][:, 1:, None]).squeeze(2)[:, -6:]
    torch.testing.assert_close(after[0], logps, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", MODELS)
def test_a_plain_forward_pass_through_the_reference_is_the_references(tmp_path, kind):
    # TRL's patched forward falls back to a bound method of the model it was made for.
    trainer = run(tmp_path, **made(kind), **PENALTY)
    seen = trainer.seen[-1]
    with trainer.kl_reference.active() as model, torch.no_grad():
        logits = model(input_ids=seen["ids"], attention_mask=seen["mask"]).logits
    with torch.no_grad():
        expected = build_model().eval()(input_ids=seen["ids"], attention_mask=seen["mask"]).logits
    there = seen["mask"].bool()
    torch.testing.assert_close(logits[there], expected[there], atol=1e-4, rtol=0)


def test_reference_keeps_the_policy_in_training_mode_and_the_adapter_active(tmp_path):
    trainer = run(tmp_path, peft=lora(), **PENALTY, kl_penalty_reference_step=0, train=False)
    trainer.model.train()
    with pytest.raises(KeyError), trainer.kl_reference.active() as model:
        assert not model.training and model.active_adapters == [REFERENCE_ADAPTER]
        raise KeyError("in the middle of it")
    assert all(module.training for module in trainer.model.modules())
    assert trainer.model.active_adapters == ["default"]


# ---- Identity ----


def identity(tmp_path, **settings) -> dict:
    trainer = run(tmp_path, **settings, **PENALTY, train=False)
    assert json.loads(json.dumps(trainer.kl_reference.identity)) == trainer.kl_reference.identity
    return trainer.kl_reference.identity


def test_fingerprint_tells_models_apart():
    assert fingerprint(build_model()) == fingerprint(build_model()) == fingerprint(copy.deepcopy(build_model()))
    assert fingerprint(build_model(0)) != fingerprint(build_model(1))
    assert fingerprint(build_model()) != fingerprint(build_model(num_hidden_layers=1))
    # One training step makes another model, whichever weight it changed.
    prints = set()
    for name, _ in build_model().named_parameters():
        model = build_model()
        with torch.no_grad():
            model.get_parameter(name).add_(1e-4)
        prints.add(fingerprint(model))
    assert len(prints | {fingerprint(build_model())}) == len(list(build_model().parameters())) + 1


def test_fingerprint_is_that_of_a_sample():
    large = torch.nn.Linear(1000, 1000, bias=False)
    one = fingerprint(large)
    with torch.no_grad():
        large.weight[0, 0] += 1.0
    assert fingerprint(large) != one


def test_identity_of_the_base_model_does_not_depend_on_the_adapter(tmp_path):
    identities = [
        identity(tmp_path, peft=lora()),
        identity(tmp_path, peft=lora(init_lora_weights="gaussian")),
        identity(tmp_path, model=trained_policy()),
    ]
    assert identities[0] == identities[1] == identities[2]
    assert identities[0]["kind"] == "base"
    assert identity(tmp_path, model=build_model(1), peft=lora())["hash"] != identities[0]["hash"]


def test_identity_of_the_other_references(tmp_path, adapter_path, checkpoints):
    policy = trained_policy()
    first = identity(tmp_path, model=policy, kl_penalty_reference_step=0)
    assert (first["kind"], first["step"]) == ("step", 0)
    assert first == identity(tmp_path, model=trained_policy(), kl_penalty_reference_step=0)
    assert first != identity(tmp_path, model=trained_policy(seed=4), kl_penalty_reference_step=0)

    at_path = identity(tmp_path, peft=lora(), kl_ref_adapter_path=adapter_path)
    assert (at_path["kind"], at_path["path"]) == ("adapter", adapter_path)
    assert at_path["hash"] == hash_tensors(load_file(Path(adapter_path) / "adapter_model.safetensors"))

    for kind, models in (("lora", {"peft": lora()}), ("full", {})):
        output_dir = borrowed(checkpoints[kind], tmp_path / kind)
        one, two = (identity(output_dir, **copy.deepcopy(models), kl_penalty_reference_step=step) for step in (1, 2))
        assert (one["kind"], one["step"], two["step"]) == ("step", 1, 2) and one["hash"] != two["hash"]

    # In full fine-tuning the initial policy is the default.
    assert identity(tmp_path) == identity(tmp_path, kl_penalty_reference_step=0)
