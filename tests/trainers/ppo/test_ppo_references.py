"""PPO: frozen layers, references and stop strings."""

import pytest
import torch
from datasets import Dataset
from peft import PeftModel
from transformers import GPT2Config, GPT2LMHeadModel

from support.oracle import plain_model, sampled_logps
from support.tiny import (
    RUN,
    build_model,
    logged,
    lora,
    trained_lora,
    weights,
)
from support.tiny_ppo import (
    EOS,
    RecordingPPOTrainer,
    build_ppo,
    byte_tokenizer,
    kl_by_hand,
    train_ppo,
)
from support.value_checks import ADAPTERS, parts
from trl_klx import KLXPPOConfig, KLXPPOTrainer
from trl_klx.trl_versions import TRL_HAS_EOS_TOKEN_IDS


# ---- num_layers_unfrozen ----


def test_frozen_layers_stay_and_are_shared_with_the_reference(tmp_path):
    trainer = build_ppo(tmp_path, RecordingPPOTrainer, num_layers_unfrozen=1, max_steps=6, learning_rate=1e-2)
    reference = trainer.kl_reference.model
    ours, theirs = dict(trainer.model.named_parameters()), dict(reference.named_parameters())
    frozen = {name for name in theirs if "embed_tokens" in name or "layers.0." in name}
    assert {name for name, parameter in ours.items() if not parameter.requires_grad} == frozen
    shared = {name for name, parameter in theirs.items() if parameter.data_ptr() == ours[name].data_ptr()}
    assert shared == frozen
    # The reference's own memory: the top layer, the final norm and the LM head.
    own = sum(parameter.numel() for name, parameter in theirs.items() if name not in shared)
    top = build_model().model.layers[1]
    assert own == sum(p.numel() for p in top.parameters()) + 32 + 32 * 32
    assert not any(parameter.requires_grad for parameter in reference.parameters())

    before = {name: weight.clone() for name, weight in weights(trainer).items()}
    trainer.train()
    moved = {name for name, weight in weights(trainer).items() if not torch.equal(before[name], weight)}
    assert moved == before.keys() - frozen
    assert not [name for gradients in trainer.gradients for name in gradients if name in frozen]
    # The reference is still the initial policy.
    batch, initial = trainer.rollouts[-1], build_model().eval()
    with torch.no_grad(), trainer.kl_reference.active() as model:
        assert torch.equal(sampled_logps(model, batch, 0.7), sampled_logps(initial, batch, 0.7))
    assert logged(trainer, "klx/kl")[-1] > 1e-3


def test_training_the_top_layer_is_training_with_the_rest_frozen_by_hand(tmp_path):
    model = build_model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("embed_tokens" not in name and "layers.0." not in name)
    by_hand = train_ppo(tmp_path, model=model, max_steps=3)
    ours = train_ppo(tmp_path, num_layers_unfrozen=1, max_steps=3)
    assert logged(ours, "klx/kl") == logged(by_hand, "klx/kl")
    for name, weight in weights(by_hand).items():
        assert torch.equal(weights(ours)[name], weight)


def test_all_layers_may_be_unfrozen(tmp_path):
    trainer = build_ppo(tmp_path, num_layers_unfrozen=2)
    frozen = [name for name, parameter in trainer.model.named_parameters() if not parameter.requires_grad]
    assert frozen == ["model.embed_tokens.weight"]


def test_embeddings_of_positions_are_frozen_too(tmp_path):
    config = GPT2Config(vocab_size=32, n_positions=64, n_embd=16, n_layer=3, n_head=2, eos_token_id=1, bos_token_id=2)
    trainer = build_ppo(tmp_path, model=GPT2LMHeadModel(config), num_layers_unfrozen=1, max_steps=2)
    before = {name: weight.clone() for name, weight in weights(trainer).items()}
    trainer.train()
    moved = {name for name, weight in weights(trainer).items() if not torch.equal(before[name], weight)}
    inside = {name for name in moved if "klx_value" not in name}
    # The LM head is tied to the frozen embeddings.
    assert inside and all(name.startswith(("transformer.h.2.", "transformer.ln_f.")) for name in inside)


def test_frozen_layers_with_gradient_checkpointing(tmp_path):
    plain = train_ppo(tmp_path, num_layers_unfrozen=1, max_steps=2)
    checkpointed = train_ppo(tmp_path, num_layers_unfrozen=1, max_steps=2, gradient_checkpointing=True)
    assert logged(checkpointed, "loss") == pytest.approx(logged(plain, "loss"), abs=1e-6)
    assert logged(checkpointed, "grad_norm") == pytest.approx(logged(plain, "grad_norm"), rel=1e-5)


@pytest.mark.parametrize("layers", [3, 100])
def test_more_layers_than_there_are_are_refused(layers, tmp_path):
    with pytest.raises(
        ValueError, match=rf"`num_layers_unfrozen={layers}` does not fit a model of 2 layers. Choose 1 to 2"
    ):
        build_ppo(tmp_path, num_layers_unfrozen=layers)


def test_frozen_layers_are_refused_with_an_adapter(tmp_path):
    with pytest.raises(ValueError, match=r"`num_layers_unfrozen=1` cannot be used with PEFT.*`layers_to_transform`"):
        build_ppo(tmp_path, num_layers_unfrozen=1, extras={"peft_config": lora()})


# ---- References ----


@ADAPTERS
def test_reference_model_of_the_user_is_the_reference(adapter, tmp_path):
    reference = build_model(seed=4).train()
    extras = parts(adapter, "head") | {"ref_model": reference}
    trainer = train_ppo(tmp_path, RecordingPPOTrainer, max_steps=2, num_ppo_epochs=1, extras=extras)
    for step, rollout in enumerate(trainer.rollouts):
        kl = kl_by_hand(rollout, build_model(seed=4).eval(), 0.7) * rollout["completion_mask"]
        assert logged(trainer, "klx/kl_k1")[step] == pytest.approx(float(kl.sum(1).mean()), abs=1e-5)
    assert logged(trainer, "klx/kl")[0] > 0.1
    assert all(torch.equal(reference.state_dict()[n], w) for n, w in build_model(seed=4).state_dict().items())
    assert not reference.training and not any(parameter.requires_grad for parameter in reference.parameters())


def test_reference_model_may_be_a_peft_model(tmp_path):
    trainer = train_ppo(
        tmp_path, RecordingPPOTrainer, max_steps=1, num_ppo_epochs=1, extras={"ref_model": trained_lora(seed=5)}
    )
    kl = kl_by_hand(trainer.rollouts[0], plain_model(trained_lora(seed=5)), 0.7)
    kl = kl * trainer.rollouts[0]["completion_mask"]
    assert logged(trainer, "klx/kl_k1")[0] == pytest.approx(float(kl.sum(1).mean()), abs=1e-5)


def two_adapters() -> PeftModel:
    """A policy with two different nonzero adapters, `default` and `sft`."""
    policy = trained_lora(seed=1)
    policy.add_adapter("sft", lora())
    other = trained_lora(seed=2)
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            if ".sft." in name:
                weight.copy_(other.get_parameter(name.replace(".sft.", ".default.")))
    policy.set_adapter("default")
    return policy


@pytest.mark.parametrize(("trained", "frozen"), [("default", "sft"), ("sft", "default")])
def test_two_adapters_of_one_policy(trained, frozen, tmp_path):
    policy = two_adapters()
    before = {name: weight.clone() for name, weight in policy.state_dict().items()}
    reference = plain_model(policy, adapter=frozen)
    kls = []

    class Measuring(KLXPPOTrainer):
        def _generate_and_score_completions(self, inputs):
            with self.value_function.hidden():
                now = plain_model(policy, adapter=trained)
            batch = super()._generate_and_score_completions(inputs)
            kls.append(
                float((kl_by_hand({"policy": now} | batch, reference, 0.7) * batch["completion_mask"]).sum(1).mean())
            )
            return batch

    trainer = train_ppo(
        tmp_path,
        Measuring,
        model=policy,
        max_steps=4,
        num_ppo_epochs=2,
        model_adapter_name=trained,
        ref_adapter_name=frozen,
        save_strategy="steps",
        save_steps=4,
    )
    assert logged(trainer, "klx/kl_k1") == pytest.approx(kls, abs=1e-5) and kls[0] != 0.0
    moved = {
        name for name, weight in weights(trainer).items() if name in before and not torch.equal(before[name], weight)
    }
    assert moved and all(f".{trained}." in name for name in moved)
    # Only the trained adapter is saved, and a new trainer continues from it.
    folders = {
        path.parent.relative_to(tmp_path / "checkpoint-4").as_posix()
        for path in tmp_path.rglob("adapter_model.safetensors")
    }
    assert folders == {"." if trained == "default" else "sft"}
    again = build_ppo(
        tmp_path,
        model=two_adapters(),
        max_steps=4,
        num_ppo_epochs=2,
        model_adapter_name=trained,
        ref_adapter_name=frozen,
    )
    again.train(resume_from_checkpoint=True)
    for name, weight in weights(trainer).items():
        assert torch.equal(weights(again)[name], weight), name


def test_moving_references_work(tmp_path):
    trainer = train_ppo(tmp_path, kl_ref_lag=1, max_steps=4, num_ppo_epochs=1)
    assert logged(trainer, "klx/kl")[-1] > 0.0
    trainer = train_ppo(tmp_path, kl_ref_sync_steps=1, max_steps=3, num_ppo_epochs=1)
    assert max(logged(trainer, "klx/kl")) < 1e-6  # the reference is always the policy that samples


def test_reference_at_a_step_of_an_earlier_run(tmp_path):
    first = train_ppo(tmp_path, max_steps=2, num_ppo_epochs=2, save_strategy="steps", save_steps=2)
    trainer = build_ppo(tmp_path, kl_penalty_reference_step=2)
    expected = {name: weight for name, weight in weights(first).items() if "klx_value" not in name}
    assert trainer.kl_reference.model.state_dict().keys() == expected.keys()
    assert all(torch.equal(trainer.kl_reference.model.state_dict()[name], w) for name, w in expected.items())


@pytest.mark.parametrize("adapter", ["full", "lora"])
def test_reference_adapter_that_is_not_there_is_refused(adapter, tmp_path):
    known = "[]" if adapter == "full" else "['default']"
    with pytest.raises(ValueError) as caught:
        build_ppo(tmp_path, ref_adapter_name="sft", extras=parts(adapter, "head"))
    message = str(caught.value)
    assert "`ref_adapter_name='sft'`" in message and known in message and "kl_ref_adapter_path" in message


def test_reference_adapter_that_is_the_trained_one_is_refused(tmp_path):
    with pytest.raises(ValueError, match="`ref_adapter_name='default'` is the adapter that is trained"):
        build_ppo(tmp_path, model=two_adapters(), ref_adapter_name="default")


@pytest.mark.parametrize("model", [build_model, two_adapters])
def test_trained_adapter_that_is_not_there_is_refused(model, tmp_path):
    with pytest.raises(
        ValueError, match=r"`model_adapter_name='policy'` is not an adapter of the policy, which has \["
    ):
        build_ppo(tmp_path, model=model(), model_adapter_name="policy")


def test_default_is_the_name_of_a_new_adapter(tmp_path):
    trainer = build_ppo(tmp_path, model_adapter_name="default", extras={"peft_config": lora()})
    assert trainer.model.active_adapters == ["default"]


def test_reference_that_is_the_policy_is_refused(tmp_path):
    model = build_model()
    with pytest.raises(ValueError, match="`ref_model` must not be the policy itself. Pass a copy"):
        build_ppo(tmp_path, model=model, extras={"ref_model": model})


@pytest.mark.parametrize(
    "fields",
    [{"kl_penalty_reference_step": 0}, {"kl_ref_lag": 2}, {"kl_ref_sync_steps": 2}, {"ref_adapter_name": "sft"}],
)
def test_two_references_are_refused(fields, tmp_path):
    (name, value), *_ = fields.items()
    with pytest.raises(
        ValueError, match=rf"Only one reference can be chosen, got a `ref_model` and `{name}={value!r}`"
    ):
        build_ppo(tmp_path, extras={"ref_model": build_model()}, **fields)


def test_reference_model_without_a_kl_warns(tmp_path):
    with pytest.warns(UserWarning, match="`ref_model` is not used while `kl_penalty_coef=0.0`"):
        build_ppo(tmp_path, kl_penalty_coef=0.0, extras={"ref_model": build_model()})


# ---- Stops ----


@pytest.mark.skipif(TRL_HAS_EOS_TOKEN_IDS, reason="this TRL can end completions at several tokens")
def test_stop_token_is_refused_by_an_old_trl(tmp_path):
    with pytest.raises(ValueError, match="needs TRL 1.14.2"):
        train_ppo(tmp_path, stop_token_id=7)
    assert train_ppo(tmp_path, stop_token_id=EOS).eos_token_ids == [EOS]


@pytest.mark.skipif(not TRL_HAS_EOS_TOKEN_IDS, reason="before 1.14.2 TRL ends completions at EOS alone")
def test_stop_token_ends_completions(tmp_path):
    trainer = train_ppo(
        tmp_path, RecordingPPOTrainer, stop_token_id=7, max_completion_length=24, per_device_train_batch_size=16,
        max_steps=1, missing_eos_penalty=5.0, learning_rate=0.0, kl_penalty_coef=0.0, whiten_advantages=False,
        gamma=1.0, lam=1.0,
    )  # fmt: skip
    rollout = trainer.rollouts[0]
    rows = [
        [token for token, real in zip(*pair, strict=True) if real]
        for pair in zip(rollout["completion_ids"].tolist(), rollout["completion_mask"].tolist(), strict=True)
    ]
    assert any(row[-1] == 7 for row in rows) and any(row[-1] == EOS for row in rows)
    assert all(7 not in row[:-1] and EOS not in row[:-1] for row in rows)
    # It ends the completion like EOS, without a penalty. The return of the first token is the score.
    for row, score, outcome in zip(rows, rollout["rewards"][:, 0].tolist(), rollout["ppo_returns"], strict=True):
        cut_off = row[-1] not in (7, EOS)
        assert float(outcome[0]) == pytest.approx(score - 5.0 * cut_off, abs=1e-5)
    assert any(row[-1] not in (7, EOS) for row in rows)
    # The policy that users load generates as before.
    assert trainer.model.generation_config.eos_token_id == EOS


@pytest.mark.parametrize("pad", ["<pad>", "<eos>"])
@ADAPTERS
def test_stop_strings_end_completions(adapter, pad, tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = pad
    letters = set(tokenizer.convert_tokens_to_ids(["a", "b", "c"])) | {EOS}
    args = KLXPPOConfig(
        output_dir=str(tmp_path),
        **RUN
        | {
            "num_generations": 1,
            "per_device_train_batch_size": 32,
            "max_completion_length": 8,
            "max_steps": 1,
            "temperature": 4.0,
            "stop_strings": ["ab", "cc"],
            "missing_eos_penalty": 5.0,
            "kl_penalty_coef": 0.0,
            "gamma": 1.0,
            "lam": 1.0,
            "generation_kwargs": {
                "suppress_tokens": [token for token in range(len(tokenizer)) if token not in letters]
            },
        },
    )
    texts = []

    def reward(completions, **kwargs):
        texts.extend(completions)
        return [float(len(text)) for text in completions]

    trainer = RecordingPPOTrainer(
        args=args,
        model=build_model(vocab_size=len(tokenizer)),
        reward_funcs=reward,
        # Some prompts end with the beginning of a stop string, which ends nothing.
        train_dataset=Dataset.from_dict({"prompt": ["ca", "bb", "aa", "c"] * 8}),
        processing_class=tokenizer,
        **parts(adapter, "head"),
    )
    trainer.train()
    rollout, kinds = trainer.rollouts[0], []
    rows = zip(
        rollout["completion_ids"].tolist(),
        rollout["completion_mask"].tolist(),
        rollout["ppo_mask"].tolist(),
        strict=True,
    )
    for row, (ids, mask, counted) in enumerate(rows):
        real = [token for token, counts in zip(ids, mask, strict=True) if counts]
        text = tokenizer.decode(real)
        # Everything after the end is padding, and does not count.
        assert 0 not in real and counted == mask and set(ids[len(real) :]) <= {tokenizer.pad_token_id}
        assert not any(stop in text[:-1] for stop in ("ab", "cc")) and EOS not in real[:-1]
        stopped, ended = text.endswith(("ab", "cc")), real[-1] == EOS
        kinds.append("stop" if stopped else "eos" if ended else "cut off")
        assert stopped or ended or len(real) == 8
        # A stop string ends the completion like EOS, without a penalty. The return of the first token is the score.
        expected = float(len(texts[row])) - (0.0 if stopped or ended else 5.0)
        assert float(rollout["ppo_returns"][row, 0]) == pytest.approx(expected, abs=1e-5)
    assert set(kinds) == {"stop", "eos", "cut off"}
    lengths = rollout["completion_mask"].sum(1).float()
    assert logged(trainer, "completions/mean_length")[0] == pytest.approx(float(lengths.mean()), abs=1e-6)
