"""PPO's value function, frozen layers, references, stops and constructor: what is trained, saved, shared and refused."""

import copy
import json
import shutil
import warnings

import pytest
import torch
from datasets import Dataset
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
from trl.generation.vllm_generation import VLLMGeneration

from oracle import plain_model, sampled_logps
from tiny import (
    RUN,
    build_dataset,
    build_model,
    build_tokenizer,
    logged,
    lora,
    reward_even_tokens,
    trained_lora,
    weights,
)
from tiny_ppo import (
    EOS,
    RecordingPPOTrainer,
    build_ppo,
    build_scorer,
    byte_tokenizer,
    kl_by_hand,
    tokenizer_with_bos,
    train_ppo,
)
from trl_klx import KLXGRPOConfig, KLXPPOConfig, KLXPPOTrainer
from trl_klx.values import ValueHead


OWNERS = pytest.mark.parametrize("owner", ["head", "model"])
ADAPTERS = pytest.mark.parametrize("adapter", ["full", "lora"])


def parts(adapter: str, owner: str) -> dict:
    extras = {} if adapter == "full" else {"peft_config": lora()}
    return extras | ({"value_model": build_scorer(seed=3)} if owner == "model" else {})


def value_state(trainer) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in trainer.value_function.module.state_dict().items()}


# ---- Training ----


@OWNERS
@ADAPTERS
def test_value_function_is_trained(adapter, owner, tmp_path):
    trainer = build_ppo(tmp_path, RecordingPPOTrainer, max_steps=2, extras=parts(adapter, owner))
    before = value_state(trainer)
    module = trainer.value_function.module
    assert isinstance(module, ValueHead) == (owner == "head")
    trainer.train()
    optimized = {id(parameter) for group in trainer.optimizer.param_groups for parameter in group["params"]}
    assert all(id(parameter) in optimized for parameter in module.parameters())
    assert all(parameter.requires_grad for parameter in module.parameters())
    assert all(f"klx_value.{name}" in trainer.gradients[1] for name, _ in module.named_parameters())
    moved = [name for name, weight in value_state(trainer).items() if not torch.equal(before[name], weight)]
    # Embeddings of tokens that never occurred stay, and are part of a larger tensor that moved.
    assert moved == list(before)


def test_no_second_forward_with_a_head(tmp_path):
    calls = []
    trainer = build_ppo(tmp_path, max_steps=4, num_ppo_epochs=4, kl_penalty_coef=0.0)
    trainer.model.model.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    trainer.train()
    # One pass with gradients per step; without: the sampled tokens, and the log-probs that TRL needs for four epochs.
    assert calls.count(True) == 4 and calls.count(False) == RUN["max_completion_length"] + 1


def test_head_starts_at_zero_and_draws_no_random_numbers():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    head, again = (ValueHead(8, torch.float32, torch.device("cpu"), seed=5) for _ in range(2))
    assert torch.equal(torch.rand(1), expected)
    assert not head(torch.randn(2, 3, 8)).any()
    assert all(torch.equal(one, other) for one, other in zip(head.parameters(), again.parameters(), strict=True))
    other = ValueHead(8, torch.float32, torch.device("cpu"), seed=6)
    assert not torch.equal(head.inner.weight, other.inner.weight)


def test_rollouts_do_not_depend_on_the_kind_of_value_function(tmp_path):
    one, other = (
        train_ppo(tmp_path, RecordingPPOTrainer, max_steps=1, num_ppo_epochs=1, extras=parts("full", owner))
        for owner in ("head", "model")
    )
    assert torch.equal(one.rollouts[0]["completion_ids"], other.rollouts[0]["completion_ids"])


def test_value_model_with_an_adapter_of_its_own(tmp_path):
    value_model = get_peft_model(build_scorer(seed=3), lora(task_type="SEQ_CLS"))
    trainer = build_ppo(tmp_path, max_steps=2, extras={"value_model": value_model})
    before = value_state(trainer)
    trainer.train()
    moved = {name for name, weight in value_state(trainer).items() if not torch.equal(before[name], weight)}
    assert any("lora_A" in name for name in moved) and any("score" in name for name in moved)
    assert not any("base_layer" in name or "embed_tokens" in name for name in moved)


@pytest.mark.parametrize("given", ["head", "model"])
def test_optimizer_made_before_the_value_function_trains_it(given, tmp_path):
    model, value_model = build_model(), build_scorer(seed=3) if given == "model" else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    extras = {"optimizers": (optimizer, None), "value_model": value_model}
    trainer = build_ppo(tmp_path, model=model, max_steps=2, extras=extras)
    before = value_state(trainer)
    trainer.train()
    assert any(not torch.equal(before[name], weight) for name, weight in value_state(trainer).items())
    assert len(optimizer.param_groups) == 2


def test_optimizer_and_scheduler_without_the_value_function_are_refused(tmp_path):
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    with pytest.raises(ValueError, match=r"`optimizers` has a scheduler .* Pass `\(optimizer, None\)`"):
        build_ppo(tmp_path, model=model, extras={"optimizers": (optimizer, scheduler)})


def test_optimizer_and_scheduler_with_the_value_function_are_used(tmp_path):
    model, value_model = build_model(), build_scorer(seed=3)
    optimizer = torch.optim.SGD([*model.parameters(), *value_model.parameters()], lr=0.5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    extras = {"optimizers": (optimizer, scheduler), "value_model": value_model}
    trainer = train_ppo(tmp_path, model=model, max_steps=1, extras=extras)
    assert len(optimizer.param_groups) == 1 and trainer.lr_scheduler is scheduler


# ---- Saving ----


@OWNERS
@ADAPTERS
def test_value_function_is_in_checkpoints_and_in_nothing_that_is_loaded(adapter, owner, tmp_path):
    trainer = train_ppo(
        tmp_path, max_steps=4, num_ppo_epochs=2, save_strategy="steps", save_steps=2, extras=parts(adapter, owner)
    )
    trainer.save_model(tmp_path / "final")
    trainer.model.save_pretrained(tmp_path / "by_hand")
    checkpoint = tmp_path / "checkpoint-4"
    weights_file = "model.safetensors" if adapter == "full" else "adapter_model.safetensors"
    for folder in (checkpoint, tmp_path / "final", tmp_path / "by_hand"):
        saved = load_file(folder / weights_file)
        assert saved and not [name for name in saved if "klx" in name or "value" in name]
        (load_full if adapter == "full" else load_lora)(folder, trainer)
    saved = load_file(checkpoint / "value_function.safetensors")
    assert saved.keys() == value_state(trainer).keys()
    assert all(torch.equal(saved[name], weight) for name, weight in value_state(trainer).items())
    assert (tmp_path / "checkpoint-2" / "value_function.safetensors").is_file()
    for folder in (tmp_path / "final", tmp_path / "by_hand"):
        assert not (folder / "value_function.safetensors").exists()
    # And it is still where it was.
    assert trainer.model.klx_value is trainer.value_function.module


def load_full(folder, trainer) -> None:
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    trained = weights(trainer)
    assert all(torch.equal(trained[name], weight) for name, weight in model.state_dict().items())


def load_lora(folder, trainer) -> None:
    base = build_model()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = PeftModel.from_pretrained(base, folder)
    result = model.load_adapter(folder, "again")
    assert not result.missing_keys and not result.unexpected_keys
    trained = weights(trainer)
    compared = [name for name in model.state_dict() if "lora_" in name and ".default" in name]
    assert compared and all(torch.equal(trained[name], model.state_dict()[name]) for name in compared)


def test_a_copy_of_the_policy_saves_itself(tmp_path):
    trainer = build_ppo(tmp_path)
    clone = copy.deepcopy(trainer.model)
    with torch.no_grad():
        clone.lm_head.weight.fill_(0.25)
    clone.save_pretrained(tmp_path / "clone")
    saved = load_file(tmp_path / "clone" / "model.safetensors")
    assert (saved["lm_head.weight"] == 0.25).all() and not [name for name in saved if "klx" in name]
    assert clone.klx_value is not trainer.model.klx_value


@OWNERS
@ADAPTERS
def test_vllm_is_not_sent_the_value_function(adapter, owner, tmp_path):
    trainer = build_ppo(tmp_path, extras=parts(adapter, owner))
    # TRL's own walk over the parameters that go to vLLM, without an engine at its end.
    sync = object.__new__(VLLMGeneration)
    sync.model, sync.accelerator, sync._dist = trainer.model, trainer.accelerator, trainer._dist
    policy = {name for name, _ in build_model().named_parameters()}
    value = {f"klx_value.{name}" for name, _ in trainer.value_function.module.named_parameters()}
    assert {name for name, _ in sync._iter_named_params()} == policy | value
    with trainer.value_function.hidden():
        assert {name for name, _ in sync._iter_named_params()} == policy
    assert {name for name, _ in sync._iter_named_params()} == policy | value


def test_weight_sync_of_a_trainer_with_vllm_goes_without_the_value_function(tmp_path):
    # The engine itself is not here; what the trainer does to its weight sync is the same with any.
    seen = []

    class Engine:
        def sync_weights(self):
            seen.append([name for name, _ in trainer.model.named_parameters() if "klx_value" in name])

    class WithEngine(KLXPPOTrainer):
        @property
        def use_vllm(self):
            return getattr(self, "vllm_generation", None) is not None

        @use_vllm.setter
        def use_vllm(self, value):
            pass

        @property
        def value_function(self):
            return self._value

        @value_function.setter
        def value_function(self, value):
            self._value, self.vllm_generation = value, Engine()

    trainer = build_ppo(tmp_path, WithEngine)
    trainer.vllm_generation.sync_weights()
    assert seen == [[]]
    assert [name for name, _ in trainer.model.named_parameters() if "klx_value" in name]


def test_best_model_comes_with_its_value_function(tmp_path, caplog):
    trainer = build_ppo(
        tmp_path, max_steps=4, num_ppo_epochs=1, save_strategy="steps", save_steps=1, eval_strategy="steps", eval_steps=1,
        per_device_eval_batch_size=4, load_best_model_at_end=True, metric_for_best_model="eval_ppo/score",
        greater_is_better=True, rewards=falling_reward(), extras={"eval_dataset": build_dataset(4)},
    )  # fmt: skip
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-1")
    best = load_file(tmp_path / "checkpoint-1" / "value_function.safetensors")
    assert all(torch.equal(best[name], weight) for name, weight in value_state(trainer).items())
    assert "missing keys" not in caplog.text
    load_full(tmp_path / "checkpoint-1", trainer)


def falling_reward():
    """A reward that is highest at the first step."""

    def reward(completion_ids, trainer_state, **kwargs):
        return [ids[0] / 100.0 - trainer_state.global_step for ids in completion_ids]

    return reward


def test_checkpoint_without_a_value_function_warns(tmp_path):
    saved = {"save_strategy": "steps", "save_steps": 2, "num_ppo_epochs": 2}
    train_ppo(tmp_path, max_steps=2, **saved)
    (tmp_path / "checkpoint-2" / "value_function.safetensors").unlink()
    trainer = build_ppo(tmp_path, max_steps=4, **saved)
    with pytest.warns(UserWarning, match="holds no value function: it starts anew"):
        trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 4


def test_checkpoint_with_another_kind_of_value_function_is_refused(tmp_path):
    saved = {"save_strategy": "steps", "save_steps": 2, "num_ppo_epochs": 2}
    train_ppo(tmp_path, max_steps=2, **saved)
    trainer = build_ppo(tmp_path, max_steps=4, extras=parts("full", "model"), **saved)
    with pytest.raises(
        ValueError, match=r"Cannot resume: the value function in .* Pass the `value_model` of that run"
    ):
        trainer.train(resume_from_checkpoint=True)


def test_checkpoint_without_the_state_of_the_scaling_warns(tmp_path):
    saved = {"save_strategy": "steps", "save_steps": 2, "num_ppo_epochs": 2, "reward_scaling": "running"}
    train_ppo(tmp_path, max_steps=2, **saved)
    state = tmp_path / "checkpoint-2" / "ppo_state.json"
    assert json.loads(state.read_text())["count"] == 4
    state.unlink()
    trainer = build_ppo(tmp_path, max_steps=4, **saved)
    with pytest.warns(UserWarning, match=r"holds no state of `reward_scaling='running'`"):
        trainer.train(resume_from_checkpoint=True)


def test_checkpoints_inside_a_rollout_warn_and_can_be_resumed(tmp_path):
    # Two epochs of two mini-batches: four steps per rollout.
    fields = {"num_ppo_epochs": 2, "num_mini_batches": 2, "save_strategy": "steps", "max_steps": 9}
    with pytest.warns(UserWarning, match=r"`save_steps=3` puts checkpoints inside a rollout.* multiple of 4"):
        train_ppo(tmp_path, save_steps=3, **fields)
    shutil.rmtree(tmp_path / "checkpoint-9")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer = build_ppo(tmp_path, save_steps=8, **fields)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 9 and len(logged(trainer, "loss")) == 9


def test_model_card_is_that_of_ppo(tmp_path):
    trainer = build_ppo(tmp_path)
    trainer.create_model_card(model_name="tiny")
    card = (tmp_path / "README.md").read_text()
    assert "trained with PPO" in card and "1707.06347" in card
    assert "GRPO" not in card and "DeepSeekMath" not in card


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
    """A policy with an adapter `default` and another, `sft`, that differ and are not zero."""
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
    # Only the trained adapter is saved, and a new trainer goes on from it.
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
    # It is an end like EOS: no penalty for it. The return of the first token is the score.
    for row, score, outcome in zip(rows, rollout["rewards"][:, 0].tolist(), rollout["ppo_returns"], strict=True):
        cut_off = row[-1] not in (7, EOS)
        assert float(outcome[0]) == pytest.approx(score - 5.0 * cut_off, abs=1e-5)
    assert any(row[-1] not in (7, EOS) for row in rows)
    # The policy that users load generates as it did before.
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
        # Some prompts end with the beginning of a text, which ends nothing.
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
        # What comes after the end is padding, and does not count.
        assert 0 not in real and counted == mask and set(ids[len(real) :]) <= {tokenizer.pad_token_id}
        assert not any(stop in text[:-1] for stop in ("ab", "cc")) and EOS not in real[:-1]
        stopped, ended = text.endswith(("ab", "cc")), real[-1] == EOS
        kinds.append("stop" if stopped else "eos" if ended else "cut off")
        assert stopped or ended or len(real) == 8
        # A text is an end like EOS: no penalty for it. The return of the first token is the score.
        expected = float(len(texts[row])) - (0.0 if stopped or ended else 5.0)
        assert float(rollout["ppo_returns"][row, 0]) == pytest.approx(expected, abs=1e-5)
    assert set(kinds) == {"stop", "eos", "cut off"}
    lengths = rollout["completion_mask"].sum(1).float()
    assert logged(trainer, "completions/mean_length")[0] == pytest.approx(float(lengths.mean()), abs=1e-6)


# ---- Constructor ----


def test_value_model_with_two_labels_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"`value_model` must be .*`num_labels=1`.* got LlamaFor.* `num_labels=2`"):
        build_ppo(tmp_path, extras={"value_model": build_scorer(num_labels=2)})


def test_value_model_that_is_no_classifier_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"`value_model` must be a sequence-classification model.*Qwen2ForCausalLM"):
        build_ppo(tmp_path, extras={"value_model": build_model(seed=1)})


def test_value_model_that_is_the_reward_model_is_refused(tmp_path):
    scorer = build_scorer()
    with pytest.raises(ValueError, match="`value_model` must not be the reward model itself"):
        build_ppo(tmp_path, rewards=None, extras={"reward_model": scorer, "value_model": scorer})
    with pytest.raises(ValueError, match="`value_model` must not be the reward model itself"):
        build_ppo(tmp_path, rewards=[scorer], extras={"value_model": scorer})


def test_other_config_is_refused(tmp_path):
    args = KLXGRPOConfig(output_dir=str(tmp_path), **RUN)
    with pytest.raises(TypeError, match="`args` must be a `KLXPPOConfig`, got `KLXGRPOConfig`"):
        KLXPPOTrainer(args=args, model=build_model(), reward_funcs=reward_even_tokens, train_dataset=build_dataset())


def test_no_policy_is_refused(tmp_path):
    args = KLXPPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    with pytest.raises(ValueError, match="`model` is required.*`sft_model_path`"):
        KLXPPOTrainer(args=args, reward_funcs=reward_even_tokens, train_dataset=build_dataset())


def test_policy_from_the_config(tmp_path):
    build_model(seed=6).save_pretrained(tmp_path / "sft")
    build_tokenizer().save_pretrained(tmp_path / "sft")
    args = KLXPPOConfig(
        output_dir=str(tmp_path), sft_model_path=str(tmp_path / "sft"), **(RUN | {"num_generations": 1})
    )
    trainer = KLXPPOTrainer(
        args=args, reward_funcs=reward_even_tokens, train_dataset=build_dataset(), processing_class=build_tokenizer()
    )
    expected = build_model(seed=6).state_dict()
    assert all(torch.equal(weights(trainer)[name], weight) for name, weight in expected.items())
    trainer.train()


def test_config_is_made_if_there_is_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # The default precision needs a GPU, or a config that says there is none.
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    build_model().save_pretrained("policy")
    trainer = KLXPPOTrainer(
        model="policy",
        reward_funcs=reward_even_tokens,
        train_dataset=build_dataset(),
        processing_class=build_tokenizer(),
    )
    assert isinstance(trainer.args, KLXPPOConfig) and trainer.args.output_dir == "policy-PPO"


def test_fewer_prompts_than_a_rollout_takes_are_refused(tmp_path):
    # TRL's sampler gives nothing then, and training ends before its first step without an error.
    with pytest.raises(ValueError, match=r"`train_dataset` has 7 prompts, but a rollout takes 8\. Give more prompts"):
        build_ppo(tmp_path, dataset=build_dataset(7), per_device_train_batch_size=8)
    build_ppo(tmp_path, dataset=build_dataset(4), per_device_train_batch_size=8, num_generations=2)


def test_collator_is_not_used_and_says_so(tmp_path):
    with pytest.warns(UserWarning, match="`data_collator` is not used"):
        build_ppo(tmp_path, extras={"data_collator": lambda rows: rows})


# ---- Tokenized data ----


def prompts_of(trainer) -> list[str]:
    return trainer.train_dataset["prompt"]


def test_tokenized_prompts_are_decoded(tmp_path):
    tokenizer, texts = build_tokenizer(), build_dataset()["prompt"]
    dataset = Dataset.from_dict(
        {"input_ids": [tokenizer(text)["input_ids"] for text in texts], "length": [2] * len(texts)}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer = build_ppo(tmp_path, RecordingPPOTrainer, dataset=dataset, max_steps=1, dataset_num_proc=2)
    assert prompts_of(trainer) == list(texts)
    assert trainer.train_dataset.column_names == ["length", "prompt"]
    trainer.train()
    assert all(
        row in [tokenizer(text)["input_ids"] for text in texts] for row in trainer.rollouts[0]["prompt_ids"].tolist()
    )


@pytest.mark.parametrize("masked", [True, False])
def test_padding_and_the_tokenizer_s_bos_are_not_part_of_the_prompt(masked, tmp_path):
    tokenizer = tokenizer_with_bos()
    rows = {"input_ids": [[0, 0, 2, 5, 6], [2, 7, 8, 9, 0]]}
    if masked:
        rows["attention_mask"] = [[0, 0, 1, 1, 1], [1, 1, 1, 1, 0]]
    dataset = Dataset.from_dict({name: column * 4 for name, column in rows.items()})
    args = KLXPPOConfig(
        output_dir=str(tmp_path), **(RUN | {"num_generations": 1, "max_steps": 1, "num_ppo_epochs": 1})
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer = RecordingPPOTrainer(
            args=args,
            model=build_model(),
            reward_funcs=reward_even_tokens,
            train_dataset=dataset,
            processing_class=tokenizer,
        )
    assert set(prompts_of(trainer)) == {"w1 w2", "w3 w4 w5"}
    trainer.train()
    ids = {
        tuple(token for token, real in zip(*pair, strict=True) if real)
        for pair in zip(
            trainer.rollouts[0]["prompt_ids"].tolist(), trainer.rollouts[0]["prompt_mask"].tolist(), strict=True
        )
    }
    # One BOS, as in the data.
    assert ids <= {(2, 5, 6), (2, 7, 8, 9)}


def test_special_tokens_of_the_prompt_stay(tmp_path):
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<user>", "<assistant>"]})
    user, assistant = tokenizer.convert_tokens_to_ids(["<user>", "<assistant>"])
    dataset = Dataset.from_dict({"input_ids": [[user, 5, 6, assistant]] * 8})
    args = KLXPPOConfig(
        output_dir=str(tmp_path), **(RUN | {"num_generations": 1, "max_steps": 1, "num_ppo_epochs": 1})
    )
    trainer = RecordingPPOTrainer(
        args=args,
        model=build_model(vocab_size=len(tokenizer)),
        reward_funcs=reward_even_tokens,
        train_dataset=dataset,
        processing_class=tokenizer,
    )
    trainer.train()
    assert trainer.rollouts[0]["prompt_ids"].tolist() == [[user, 5, 6, assistant]] * 4


def test_tokens_that_the_text_does_not_give_back_warn(tmp_path):
    tokenizer = tokenizer_with_bos()
    dataset = Dataset.from_dict({"input_ids": [[5, 6, 7]] * 8})  # without the BOS that the tokenizer adds
    args = KLXPPOConfig(output_dir=str(tmp_path), **(RUN | {"num_generations": 1}))
    with pytest.warns(UserWarning, match="this text has other tokens than the data"):
        KLXPPOTrainer(
            args=args,
            model=build_model(),
            reward_funcs=reward_even_tokens,
            train_dataset=dataset,
            processing_class=tokenizer,
        )


def test_tokenized_iterable_and_eval_data(tmp_path):
    tokenizer = build_tokenizer()
    dataset = Dataset.from_dict({"input_ids": [tokenizer(text)["input_ids"] for text in build_dataset()["prompt"]]})
    trainer = build_ppo(
        tmp_path, dataset=dataset.to_iterable_dataset(), max_steps=2, per_device_eval_batch_size=4,
        extras={"eval_dataset": {"some": dataset.select(range(4)), "other": dataset.select(range(4, 8))}},
    )  # fmt: skip
    trainer.train()
    metrics = trainer.evaluate()
    assert {"eval_some_reward", "eval_other_reward"} <= metrics.keys() or "eval_some_loss" in metrics


def test_tokenized_data_needs_a_tokenizer(tmp_path):
    dataset = Dataset.from_dict({"input_ids": [[5, 6]] * 8})
    args = KLXPPOConfig(output_dir=str(tmp_path), **(RUN | {"num_generations": 1}))
    with pytest.raises(ValueError, match="`input_ids`.* needs a `processing_class`"):
        KLXPPOTrainer(args=args, model=build_model(), reward_funcs=reward_even_tokens, train_dataset=dataset)
