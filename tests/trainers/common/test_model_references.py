"""Another model as the reference, by `kl_ref_model_path` or as `ref_model`."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2ForCausalLM,
)

from support.oracle import plain_model
from support.reference_checks import Watched, assert_used, differ, trained_policy
from support.tiny import (
    assert_same_weights,
    build_model,
    build_tokenizer,
    build_trainer,
    history,
    logged,
    lora,
    scripted_rollout,
    trained_lora,
    weights,
)
from support.tiny_ppo import build_ppo, build_scorer
from trl_klx import KLXGRPOTrainer, KLXRLOOTrainer


PENALTY = {"kl_penalty_coef": 0.1}
# A teacher is usually larger than the policy.
WIDER = {"hidden_size": 48, "num_hidden_layers": 3}
ADAPTERS = pytest.mark.parametrize("peft", [None, lora()], ids=["full", "lora"])


class WatchedGRPOTrainer(Watched, KLXGRPOTrainer):
    pass


class WatchedRLOOTrainer(Watched, KLXRLOOTrainer):
    pass


TRAINERS = pytest.mark.parametrize("trainer_class", [WatchedGRPOTrainer, WatchedRLOOTrainer], ids=["grpo", "rloo"])


def teacher() -> Qwen2ForCausalLM:
    return build_model(seed=11, **WIDER).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A teacher with the policy's tokenizer."""
    place = tmp_path_factory.mktemp("models") / "teacher"
    teacher().save_pretrained(place)
    build_tokenizer().save_pretrained(place)
    return place


def build(output_dir, trainer_class=WatchedGRPOTrainer, peft=None, ref_model=None, **settings):
    extras = {} if peft is None else {"peft_config": peft}
    extras |= {} if ref_model is None else {"ref_model": ref_model}
    return build_trainer(trainer_class, output_dir, extras=extras, **(PENALTY | settings))


def refusal(output_dir, error=ValueError, **settings) -> str:
    with pytest.raises(error) as caught:
        build(output_dir, **settings)
    return str(caught.value)


# ---- What is used ----


@ADAPTERS
@TRAINERS
@pytest.mark.parametrize("passed", [False, True], ids=["path", "argument"])
def test_the_model_is_the_reference(trainer_class, peft, passed, folder, tmp_path):
    choice = {"ref_model": teacher().train()} if passed else {"kl_ref_model_path": folder}
    trainer = build(tmp_path / "run", trainer_class, peft, **choice, max_steps=3)
    reference = trainer.kl_reference.model
    before = {name: weight.clone() for name, weight in reference.state_dict().items()}
    trainer.train()
    assert len(trainer.seen) == 3
    for seen in trainer.seen:
        assert_used(seen, teacher())
    assert differ(teacher(), build_model(), trainer.seen[-1]) and logged(trainer, "klx/kl")[0] > 0.1

    # It is frozen, and no part of what is trained or saved.
    assert not reference.training and not any(weight.requires_grad for weight in reference.parameters())
    assert_same_weights(before, reference.state_dict())
    optimized = {id(weight) for group in trainer.optimizer.param_groups for weight in group["params"]}
    assert not optimized & {id(weight) for weight in reference.parameters()}
    trainer.save_model(str(tmp_path / "saved"))
    names = {name for file in (tmp_path / "saved").rglob("*.safetensors") for name in load_file(file)}
    assert names and not any("layers.2." in name for name in names)  # only the teacher has a third layer


@pytest.mark.parametrize("policy", [trained_policy, None], ids=["lora", "full"])
def test_the_choice_of_reference_is_all_that_differs(policy, folder, tmp_path):
    """A path and an argument train alike, to the bit: loading draws no random numbers."""
    runs = []
    for choice in ({"ref_model": teacher()}, {"kl_ref_model_path": folder}):
        trainer = build(tmp_path, model=policy and policy(), **choice)
        trainer.train()
        runs.append(trainer)
    assert history(runs[0])[:-1] == history(runs[1])[:-1]
    assert_same_weights(weights(runs[0]), weights(runs[1]))
    hashes = {trainer.kl_reference.identity["hash"] for trainer in runs}
    assert len(hashes) == 1


@pytest.mark.parametrize("placement", ["reward", "loss"])
@TRAINERS
def test_other_placements(trainer_class, placement, folder, tmp_path):
    trainer = build(tmp_path, trainer_class, kl_placement=placement, kl_ref_model_path=folder, max_steps=2)
    trainer.train()
    for seen in trainer.seen:
        assert_used(seen, teacher())


def test_ppo(folder, tmp_path):
    trainer = build_ppo(tmp_path, kl_ref_model_path=folder, max_steps=1)
    assert trainer.kl_reference.identity["path"] == "teacher"
    trainer.train()
    assert logged(trainer, "klx/kl")[0] > 0.1


def test_reference_may_be_a_peft_model(tmp_path):
    trainer = build(tmp_path, ref_model=trained_lora(seed=5), max_steps=1)
    trainer.train()
    assert_used(trainer.seen[0], plain_model(trained_lora(seed=5)))


def other_architecture() -> LlamaForCausalLM:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        settings = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
        return LlamaForCausalLM(LlamaConfig(**settings, num_attention_heads=2, initializer_range=0.3)).eval()


@pytest.mark.parametrize("reference", [teacher, other_architecture])
@pytest.mark.parametrize(
    "fields", [{"kl_statistic": "full"}, {"kl_placement": "loss", "kl_estimator": "full"}], ids=["statistic", "loss"]
)
def test_exact_kl_between_models_of_different_width(reference, fields, tmp_path):
    reference().save_pretrained(tmp_path / "model")
    trainer = build(tmp_path, KLXGRPOTrainer, kl_ref_model_path=tmp_path / "model", max_steps=2, **fields)
    kept = {}

    def keep(batch, rollout, score=trainer._klx_score_batch):
        kept.setdefault("batch", dict(batch))
        score(batch, rollout)

    trainer._klx_score_batch = keep
    trainer.train()
    batch = kept["batch"]
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    keep_last = batch["completion_ids"].size(1)
    with torch.no_grad():
        ours, theirs = (
            torch.log_softmax(model.eval()(input_ids=ids, attention_mask=mask).logits, dim=-1)[:, -keep_last - 1 : -1]
            for model in (build_model(), reference())
        )
    kl = ((ours.exp() * (ours - theirs)).sum(-1) * batch["completion_mask"]).sum(1).mean()
    assert logged(trainer, "klx/kl")[0] == pytest.approx(float(kl), rel=1e-4)


def test_head_of_a_reference_of_another_architecture_is_checked(tmp_path):
    # Its logits are scaled after the head.
    settings = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    scaled = CohereForCausalLM(
        CohereConfig(**settings, num_attention_heads=2, logit_scale=0.2, initializer_range=1.0, pad_token_id=0)
    )
    trainer = build(tmp_path, KLXGRPOTrainer, ref_model=scaled, kl_statistic="full", max_steps=1)
    with pytest.raises(ValueError, match="The 'full' KL cannot be used with CohereForCausalLM: the logits rebuilt"):
        trainer.train()


# ---- dtype ----


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype(dtype, folder, tmp_path):
    trainer = build(tmp_path, kl_ref_model_path=folder, kl_ref_dtype=dtype, max_steps=1)
    found = {weight.dtype for weight in trainer.kl_reference.model.parameters()}
    assert found == {getattr(torch, dtype)} and trainer.kl_reference.identity["dtype"] == dtype
    assert {weight.dtype for weight in trainer.model.parameters()} == {torch.float32}
    trainer.train()
    assert trainer.seen[0]["logps"].dtype == torch.float32
    assert logged(trainer, "klx/kl")[0] > 0.1


def test_dtype_is_the_policys_by_default(folder, tmp_path):
    trainer = build(tmp_path, model=build_model().to(torch.bfloat16), kl_ref_model_path=folder)
    assert {weight.dtype for weight in trainer.kl_reference.model.parameters()} == {torch.bfloat16}
    policy = get_peft_model(build_model().to(torch.bfloat16), lora())  # its adapter is in fp32
    trainer = build(tmp_path, model=policy, kl_ref_model_path=folder)
    assert {weight.dtype for weight in trainer.kl_reference.model.parameters()} == {torch.bfloat16}


# ---- Identity ----


def test_resumes_with_the_same_model_only(folder, tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "kl_target": 0.5}
    whole = build(tmp_path / "run", KLXGRPOTrainer, kl_ref_model_path=folder, **saving)
    whole.train()
    identity = json.loads((tmp_path / "run" / "checkpoint-2" / "kl_state.json").read_text())["reference"]
    assert identity == whole.kl_reference.identity
    assert identity | {"hash": ""} == {"kind": "model", "path": "teacher", "dtype": "float32", "hash": ""}
    assert not (tmp_path / "run" / "checkpoint-2" / "kl_reference.safetensors").exists()

    # The folder may have moved.
    moved = Path(shutil.copytree(folder, tmp_path / "moved"))
    resumed = build(tmp_path / "run", KLXGRPOTrainer, kl_ref_model_path=moved, **saving)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert history(resumed)[:-1] == history(whole)[:-1]
    assert_same_weights(weights(resumed), weights(whole))

    build_model(seed=12, **WIDER).save_pretrained(tmp_path / "other")
    for fields in (
        {"kl_ref_model_path": tmp_path / "other"},
        {"kl_ref_model_path": folder, "kl_ref_dtype": "bfloat16"},
        {},
    ):
        trainer = build(tmp_path / "run", KLXGRPOTrainer, **fields, **saving)
        with pytest.raises(ValueError, match="The KL reference is not the one that the checkpoint"):
            trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))


def test_model_card_names_the_model_but_not_its_place(folder, tmp_path):
    trainer = build(tmp_path, KLXGRPOTrainer, kl_ref_model_path=folder, kl_ref_dtype="bfloat16")
    trainer.create_model_card()
    card = (tmp_path / "README.md").read_text()
    assert "| `kl_ref_model_path` | `teacher` |" in card and "| `kl_ref_dtype` | `bfloat16` |" in card
    assert "| reference | kind `model`, path `teacher`, dtype `bfloat16`, hash `" in card
    assert str(folder.parent) not in card


# ---- Refused ----


@pytest.mark.parametrize(
    "fields",
    [
        {"kl_ref_model_path": "some/model"},
        {"kl_penalty_reference_step": 0},
        {"kl_ref_adapter_path": "some/adapter"},
        {"kl_ref_lag": 2},
        {"kl_ref_sync_steps": 2},
    ],
)
@TRAINERS
def test_argument_and_field_together(trainer_class, fields, tmp_path):
    (name, value), *_ = fields.items()
    message = refusal(tmp_path, trainer_class=trainer_class, ref_model=teacher(), **fields)
    assert f"Only one reference can be chosen, got a `ref_model` and `{name}={value!r}`" in message


def test_argument_that_cannot_be_used(folder, tmp_path):
    policy = build_model()
    assert "must not be the policy itself" in refusal(tmp_path, model=policy, ref_model=policy)
    message = refusal(tmp_path, error=TypeError, ref_model=str(folder))
    assert "`ref_model` must be a model" in message and "`kl_ref_model_path`" in message
    message = refusal(tmp_path, ref_model=teacher(), kl_penalty_coef=None)
    assert "`ref_model` has no effect without a KL penalty" in message and "`kl_monitor=True`" in message
    assert build(tmp_path, ref_model=teacher(), kl_penalty_coef=None, kl_monitor=True).kl_reference is not None

    shares = build_model(seed=1)
    shares.lm_head.weight = policy.lm_head.weight
    message = refusal(tmp_path, model=policy, ref_model=shares)
    assert "`ref_model` cannot be used" in message and "shares the weight 'lm_head.weight' with the policy" in message
    assert all(weight.requires_grad for weight in policy.parameters())

    message = refusal(tmp_path, ref_model=build_model(vocab_size=40))
    assert "its vocabulary has 40 entries, and the policy's has 32" in message
    spoiled = teacher()
    with torch.no_grad():
        spoiled.model.norm.weight[3] = torch.nan
    assert "weight 'model.norm.weight' holds NaN or infinite values" in refusal(tmp_path, ref_model=spoiled)


def path_refusal(tmp_path, path, **settings) -> str:
    message = refusal(tmp_path / "run", kl_ref_model_path=str(path), **settings)
    assert message.startswith("`kl_ref_model_path` cannot be used. ") and repr(str(path)) in message
    return message


@pytest.mark.parametrize("name", ["missing", "./missing", "a/b/c", "owner/missing"])
def test_missing_path(name, tmp_path):
    assert "the directory does not exist" in path_refusal(tmp_path, name)
    path = tmp_path / name
    assert "the directory does not exist" in path_refusal(tmp_path, path)


def test_file_empty_folder_and_adapter(tmp_path):
    (tmp_path / "file").write_text("x")
    assert "it is not a directory" in path_refusal(tmp_path, tmp_path / "file")
    (tmp_path / "empty").mkdir()
    assert "it has no `config.json`." in path_refusal(tmp_path, tmp_path / "empty")
    trained_lora(1).save_pretrained(tmp_path / "adapter")
    message = path_refusal(tmp_path, tmp_path / "adapter")
    assert "It holds an adapter: set `kl_ref_adapter_path` instead." in message
    message = refusal(tmp_path, peft=lora(), kl_ref_adapter_path=str(saved(tmp_path / "model", build_model())))
    assert "It holds a full model: set `kl_ref_model_path` instead." in message


def saved(place: Path, model, tokenizer=None) -> Path:
    model.save_pretrained(place)
    if tokenizer is not None:
        tokenizer.save_pretrained(place)
    return place


def set_in_config(place: Path, **fields) -> None:
    content = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(content | fields))


def test_other_vocabulary(tmp_path):
    message = path_refusal(tmp_path, saved(tmp_path / "model", build_model(vocab_size=40)))
    assert "its vocabulary has 40 entries, and the policy's has 32" in message
    assert "`resize_token_embeddings(32)`" in message


def tokenizer_with(*changes: tuple[str, str | None]) -> PreTrainedTokenizerFast:
    """The policy's tokenizer with some tokens renamed, or removed if the new name is `None`."""
    renamed = dict(changes)
    vocabulary = {renamed.get(token, token): index for token, index in build_tokenizer().get_vocab().items()}
    vocabulary.pop(None, None)
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", unk_token="<unk>")


def test_other_tokenizer(tmp_path):
    message = path_refusal(
        tmp_path, saved(tmp_path / "swapped", teacher(), tokenizer_with(("w3", "w4"), ("w4", "w3")))
    )
    assert "its tokenizer is not the policy's: 2 tokens have different ids, the first of them is 'w3'" in message
    message = path_refusal(tmp_path, saved(tmp_path / "renamed", teacher(), tokenizer_with(("w5", "x5"))))
    assert "'w5' (None in the reference, 9 in the policy)" in message
    # The policy's padding token is never scored, so the other model need not have it.
    trainer = build(
        tmp_path, kl_ref_model_path=saved(tmp_path / "unpadded", teacher(), tokenizer_with(("<pad>", None)))
    )
    assert trainer.kl_reference.identity["path"] == "unpadded"
    (tmp_path / "swapped" / "tokenizer.json").write_text("{")
    assert "its tokenizer cannot be loaded" in path_refusal(tmp_path, tmp_path / "swapped")


def test_weights_that_cannot_be_used(tmp_path):
    place = saved(tmp_path / "nan", teacher())
    content = load_file(place / "model.safetensors")
    content["model.norm.weight"][0] = torch.inf
    save_file(content, place / "model.safetensors", metadata={"format": "pt"})
    assert "weight 'model.norm.weight' holds NaN or infinite values" in path_refusal(tmp_path, place)
    del content["model.norm.weight"]
    save_file(content, place / "model.safetensors", metadata={"format": "pt"})
    assert "the weight 'model.norm.weight' is missing" in path_refusal(tmp_path, place)
    (place / "model.safetensors").write_bytes(b"no such thing")
    assert "its weights cannot be loaded" in path_refusal(tmp_path, place)
    (place / "model.safetensors").rename(place / "pytorch_model.bin")
    message = path_refusal(tmp_path, place)
    assert "it has no `model.safetensors`; other formats of weights are never loaded" in message


def test_code_is_never_trusted(tmp_path):
    place = saved(tmp_path / "model", teacher())
    (place / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: pass\n")
    set_in_config(place, model_type="evil", auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.LM"})
    message = path_refusal(tmp_path, place)
    assert "it needs `trust_remote_code`" in message and "pass it to the trainer as `ref_model`" in message
    set_in_config(place, model_type="qwen2", architectures=["EvilForCausalLM"])
    assert "its class EvilForCausalLM needs `trust_remote_code`" in path_refusal(tmp_path, place)
    assert not (tmp_path / "ran").exists()
    set_in_config(place, model_type="unheard", auto_map=None)
    assert "does not know its `model_type` 'unheard'" in path_refusal(tmp_path, place)
    (place / "config.json").write_text("[")
    assert "its `config.json` cannot be read" in path_refusal(tmp_path, place)


def test_models_that_are_not_causal_language_models(tmp_path):
    message = path_refusal(tmp_path, saved(tmp_path / "scorer", build_scorer()))
    assert "its class is LlamaForSequenceClassification, which is no causal language model" in message


def test_gpt2_names(tmp_path):
    """The names in the file of some models are not those of the modules."""
    config = GPT2Config(vocab_size=32, n_positions=64, n_embd=16, n_layer=1, n_head=2, eos_token_id=1, bos_token_id=2)
    place = saved(tmp_path / "model", GPT2LMHeadModel(config))
    trainer = build(tmp_path / "run", kl_ref_model_path=place, max_steps=1)
    trainer.train()
    assert_used(trainer.seen[0], GPT2LMHeadModel.from_pretrained(place))


# ---- Quantization ----


def save_teacher(folder, **overrides) -> str:
    build_model(seed=3, hidden_size=64, intermediate_size=128, **overrides).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(("bits", "layer"), [("4bit", "Linear4bit"), ("8bit", "Linear8bitLt")])
def test_a_quantized_reference(bits, layer, tmp_path):
    pytest.importorskip("bitsandbytes")
    path = save_teacher(tmp_path / "teacher")
    runs = {
        quantization: build_trainer(
            KLXGRPOTrainer,
            tmp_path / "run",
            kl_penalty_coef=0.1,
            kl_ref_model_path=path,
            kl_ref_quantization=quantization,
            extras={"rollout_func": scripted_rollout},
        )
        for quantization in (None, bits)
    }
    for trainer in runs.values():
        trainer.train()
    reference = runs[bits].kl_reference
    assert reference.identity["quantization"] == bits and "quantization" not in runs[None].kl_reference.identity
    assert type(reference.model.model.layers[0].mlp.up_proj).__name__ == layer
    # About the same KL, and not the same.
    whole, quantized = (logged(trainer, "klx/kl")[0] for trainer in runs.values())
    assert quantized == pytest.approx(whole, rel=0.5) and quantized != whole


def test_a_quantized_reference_without_finite_weights_is_refused(tmp_path):
    pytest.importorskip("bitsandbytes")
    model = build_model(seed=3)
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] = torch.nan
    model.save_pretrained(tmp_path / "teacher")
    fields = {"kl_ref_model_path": str(tmp_path / "teacher"), "kl_ref_quantization": "4bit"}
    with pytest.raises(ValueError, match="up_proj.weight' holds NaN"):
        build_trainer(KLXGRPOTrainer, tmp_path, kl_penalty_coef=0.1, **fields)


def test_quantization_needs_bitsandbytes(tmp_path, monkeypatch):
    monkeypatch.setattr("trl_klx.references.model_files.has_bitsandbytes", lambda: False)
    fields = {"kl_ref_model_path": save_teacher(tmp_path / "teacher"), "kl_ref_quantization": "8bit"}
    with pytest.raises(ValueError, match="`kl_ref_quantization='8bit'` needs bitsandbytes"):
        build_trainer(KLXGRPOTrainer, tmp_path, kl_penalty_coef=0.1, **fields)
