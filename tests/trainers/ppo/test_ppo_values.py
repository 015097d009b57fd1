"""PPO's value function: how it is trained, scaled, saved, restored and refused."""

import copy
import json
import math
import shutil
import warnings

import pytest
import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from trl.generation.vllm_generation import VLLMGeneration

from support.ppo_checks import check_losses, record
from support.tiny import (
    RUN,
    assert_same_weights,
    build_dataset,
    build_model,
    logged,
    lora,
    weights,
)
from support.tiny_ppo import (
    RecordingPPOTrainer,
    build_ppo,
    build_scorer,
    train_ppo,
)
from support.value_checks import ADAPTERS, parts
from trl_klx import KLXPPOTrainer
from trl_klx.ppo import policy_layers
from trl_klx.ppo.policy_layers import copy_top_layers, layer_stack
from trl_klx.ppo.value_function import ReturnScale, ValueHead


pytestmark = pytest.mark.slow


OWNERS = pytest.mark.parametrize("owner", ["head", "model"])


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
    # Embeddings of tokens that never occurred do not move, but they are part of a larger tensor that does.
    assert moved == list(before)


def test_no_second_forward_with_a_head(tmp_path):
    calls = []
    trainer = build_ppo(tmp_path, max_steps=4, num_ppo_epochs=4, kl_penalty_coef=0.0)
    trainer.model.model.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    trainer.train()
    # One pass with gradients per step. Without gradients: generation, and the log-probs that TRL needs for four
    # epochs.
    assert calls.count(True) == 4 and calls.count(False) == RUN["max_completion_length"] + 1


def test_head_starts_at_zero_and_draws_no_random_numbers():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    head, again = (ValueHead(8, torch.float32, torch.device("cpu"), seed=5) for _ in range(2))
    assert torch.equal(torch.rand(1), expected)
    assert not head(torch.randn(2, 3, 8), [], slice(None)).any()
    assert all(torch.equal(one, other) for one, other in zip(head.parameters(), again.parameters(), strict=True))
    other = ValueHead(8, torch.float32, torch.device("cpu"), seed=6)
    assert not torch.equal(head.inner.weight, other.inner.weight)


@ADAPTERS
def test_value_loss_moves_the_policy_only_when_asked_to(adapter, tmp_path):
    """With a detached head, a value loss of any size does not change the policy's gradient."""
    gradients = {}
    for name, fields in {
        "none": {"vf_coef": 0.0},
        "detached": {"vf_coef": 50.0},
        # On the last hidden states: copies of all layers of the tiny model would share only its embeddings.
        "shared": {"vf_coef": 50.0, "value_head_detached": False, "num_value_layers": 0},
    }.items():
        settings = {"max_steps": 2, "num_ppo_epochs": 2, "learning_rate": 0.0} | fields
        trainer = build_ppo(tmp_path, RecordingPPOTrainer, extras=parts(adapter, "head"), **settings)
        with torch.no_grad():
            trainer.value_function.module.outer.weight.fill_(0.1)  # at 0 it would pass on no gradient
        trainer.train()
        gradients[name] = {key: value for key, value in trainer.gradients[0].items() if "klx_value" not in key}
    assert gradients["none"]
    for key, gradient in gradients["none"].items():
        torch.testing.assert_close(gradients["detached"][key], gradient, atol=1e-6, rtol=1e-4)
    assert any(not torch.allclose(gradients["shared"][key], gradient) for key, gradient in gradients["none"].items())


@ADAPTERS
@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_head_starts_from_copies_of_the_top_layers(count, adapter, tmp_path):
    trainer = build_ppo(tmp_path, num_value_layers=count, extras=parts(adapter, "head"))
    layers, plain = trainer.value_function.module.layers, build_model()
    assert len(layers) == min(count, len(plain.model.layers))
    for layer, source in zip(layers, plain.model.layers[len(plain.model.layers) - len(layers) :], strict=True):
        state = layer.state_dict()
        assert state.keys() == source.state_dict().keys()
        assert all(torch.equal(state[name], weight) for name, weight in source.state_dict().items())


@pytest.mark.parametrize("count", [0, 1])
def test_losses_with_fewer_layers_are_those_of_the_plain_loops(count, tmp_path):
    check_losses(record(tmp_path, num_value_layers=count), build_model())


def test_layers_that_cannot_be_copied_are_refused(tmp_path):
    model = build_model()
    model.model.layers[-1].mlp.up_proj.weight = torch.nn.Parameter(
        torch.zeros(4, dtype=torch.uint8), requires_grad=False
    )
    with pytest.raises(ValueError, match=r"`num_value_layers=2` cannot copy .* quantized.* Set `num_value_layers=0`"):
        copy_top_layers(model, 2)
    assert copy_top_layers(model, 0) == []


def test_layers_of_a_policy_that_says_it_is_quantized_are_refused():
    model = build_model()
    model.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(
        ValueError, match=r"its layers are quantized, and cannot be trained\. Set `num_value_layers=0`"
    ):
        copy_top_layers(model, 1)
    one_byte = build_model()
    one_byte.model.layers[-1].to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="quantized"):
        copy_top_layers(one_byte, 1)


def test_layers_that_are_not_in_one_list_are_refused(tmp_path):
    model = build_model()
    model.config.num_hidden_layers = 3
    with pytest.raises(ValueError, match=r"its layers are not in one list\. Set `num_value_layers=0`"):
        copy_top_layers(model, 2)
    # Such a policy trains with a head on the last hidden states.
    train_ppo(tmp_path, model=model, num_value_layers=0, max_steps=1)


def test_layers_are_those_that_read_the_text():
    model = build_model()
    # A vision tower with as many layers, which comes first.
    model._modules = {"vision": torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]), **model._modules}
    assert layer_stack(model) is model.model.layers


def test_layers_that_are_called_more_than_once_are_refused(tmp_path):
    class Twice(torch.nn.Module):
        """Calls a layer twice, like models that share layers."""

        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, *args, **kwargs):
            return self.layer(self.layer(*args, **kwargs), *args[1:], **kwargs)

    trainer = build_ppo(tmp_path, max_steps=1)
    layers = trainer.model.model.layers
    layers[1] = Twice(layers[1])
    with pytest.raises(ValueError, match=r"`num_value_layers=2` does not fit this policy.* called 3 times.*Set"):
        trainer.train()


def test_layers_of_weights_in_parts_are_copied_whole(monkeypatch):
    """As under ZeRO-3, where a weight is empty until its parts are gathered."""
    model, whole = build_model(), {}
    for weight in model.model.layers[1].parameters():
        whole[weight] = weight.data.clone()
        weight.data = weight.data.new_empty(0)
    monkeypatch.setattr(policy_layers, "join_parts", lambda weight: whole[weight])
    (layer,) = copy_top_layers(model, 1)
    expected = build_model().model.layers[1].state_dict()
    assert_same_weights(layer.state_dict(), expected)
    assert all(weight.requires_grad for weight in layer.parameters())


@pytest.mark.parametrize("checkpointing", [{"use_reentrant": False}, {"use_reentrant": True}, None])
def test_layers_are_trained_with_gradient_checkpointing(checkpointing, tmp_path):
    fields = {"gradient_checkpointing": checkpointing is not None, "gradient_checkpointing_kwargs": checkpointing}
    trainer = build_ppo(tmp_path, RecordingPPOTrainer, max_steps=2, num_ppo_epochs=2, **fields)
    with torch.no_grad():
        trainer.value_function.module.outer.weight.fill_(0.1)
    trainer.train()
    layers = [name for name, _ in trainer.model.named_parameters() if name.startswith("klx_value.layers.")]
    assert layers and all(trainer.gradients[0][name].any() for name in layers if not name.endswith("k_proj.bias"))


@pytest.mark.parametrize("how", ["weights", "autocast"])
def test_head_is_fp32_under_bf16(how, tmp_path):
    model = build_model().to(torch.bfloat16) if how == "weights" else build_model()
    trainer = build_ppo(tmp_path, model=model, max_steps=2, num_ppo_epochs=2, bf16=how == "autocast")
    seen = []
    module = trainer.value_function.module
    module.outer.register_forward_hook(lambda _, args, output: seen.extend([args[0].dtype, output.dtype]))
    trainer.train()
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
    assert set(seen) == {torch.float32}


def test_values_count_in_units_of_the_returns(tmp_path):
    """Rewards a thousand times larger give the same value loss from the second rollout on, and values that scale."""
    logs, values = [], []
    for factor in (1.0, 1000.0):
        trainer = train_ppo(
            tmp_path,
            RecordingPPOTrainer,
            rewards=lambda completion_ids, factor=factor, **kwargs: [factor * ids[0] for ids in completion_ids],
            # Nothing learns, so both runs have the same rollouts; only the mean and the scale adapt.
            learning_rate=1e-12,
            value_learning_rate=1e-12,
            kl_penalty_coef=0.0,
            per_device_train_batch_size=8,
            num_ppo_epochs=2,
            max_steps=6,
            dataset=build_dataset(24),
        )
        logs.append(logged(trainer, "ppo/value_loss")[2:])
        values.append([rollout["ppo_values"] for rollout in trainer.rollouts])
    assert logs[0] == pytest.approx(logs[1], rel=1e-3)
    assert not values[0][0].any()
    for small, large in zip(values[0][1:], values[1][1:], strict=True):
        assert small.abs().min() > 0.1
        torch.testing.assert_close(1000.0 * small, large, rtol=1e-3, atol=0)


def test_return_scale_by_hand():
    scale = ReturnScale()
    assert (scale.mean, scale.std) == (0.0, 1.0)
    # Returns 1 and 3, then 5 and 5: count, sum and sum of squares.
    scale.observe(torch.tensor([2.0, 4.0, 10.0], dtype=torch.float64))
    assert (scale.mean, scale.std) == (0.0, 1.0)
    scale.advance()
    assert (float(scale.mean), float(scale.std)) == (2.0, 1.0)
    scale.observe(torch.tensor([2.0, 10.0, 50.0], dtype=torch.float64))
    scale.advance()
    # (0.9 * 4 + 10) / 3.8 = 3.5789, and (0.9 * 10 + 50) / 3.8 - 3.5789^2 = 2.7175
    assert float(scale.mean) == pytest.approx(13.6 / 3.8)
    assert float(scale.std) == pytest.approx(math.sqrt(59.0 / 3.8 - (13.6 / 3.8) ** 2))
    again = ReturnScale()
    scale.observe(torch.tensor([2.0, 0.0, 8.0], dtype=torch.float64))
    again.load_state_dict(scale.state_dict(), torch.device("cpu"))
    # Both the units in use, as for an evaluation, and those of the next rollout.
    assert (again.mean, again.std) == (scale.mean, scale.std)
    before = scale.mean
    scale.advance(), again.advance()
    assert (again.mean, again.std) == (scale.mean, scale.std) and scale.mean != before
    again.load_state_dict(None, torch.device("cpu"))
    assert (again.mean, again.std) == (0.0, 1.0)
    for name in ("in_use", "next"):
        with pytest.raises(ValueError, match="expected three finite numbers"):
            again.load_state_dict(scale.state_dict() | {name: [1.0, math.nan, 0.0]}, torch.device("cpu"))


def test_return_scale_of_equal_returns_is_one():
    scale = ReturnScale()
    scale.observe(torch.tensor([4.0, 0.4, 0.04], dtype=torch.float64))
    scale.advance()
    assert float(scale.mean) == pytest.approx(0.1) and float(scale.std) == 1.0


@OWNERS
def test_policy_and_value_function_are_clipped_apart(owner, tmp_path):
    norms = []

    class Watching(KLXPPOTrainer):
        def _ppo_clip_gradients(self, clip, parameters, max_norm, norm_type=2.0):
            parameters = list(parameters)
            value = {id(parameter) for parameter in self.value_function.module.parameters()}

            def by_part():
                parts = [[p.grad for p in parameters if (id(p) in value) is chosen] for chosen in (False, True)]
                return [float(torch.nn.utils.get_total_norm(part)) for part in parts]

            before = by_part()
            norm = super()._ppo_clip_gradients(clip, parameters, max_norm, norm_type)
            norms.append((before, by_part()))
            return norm

    trainer = build_ppo(
        tmp_path,
        Watching,
        max_steps=2,
        num_ppo_epochs=2,
        max_grad_norm=1e-3,
        vf_coef=100.0,
        extras=parts("full", owner),
    )
    trainer.train()
    for (policy, value), after in norms:
        assert policy > 1e-3 and value > 1e-3
        assert after == pytest.approx([1e-3, 1e-3], rel=1e-2)
    # The logged norm is the policy's.
    assert logged(trainer, "grad_norm") == pytest.approx([before[0] for before, _ in norms], rel=1e-4)


@pytest.mark.parametrize(
    ("fields", "owner", "rate"),
    [
        ({}, "head", 5e-3),  # the tiny model is narrow
        ({"learning_rate": 8e-3}, "head", 8e-3),
        ({"value_head_detached": False}, "head", 1e-5),
        ({}, "model", 1e-5),
        ({"value_learning_rate": 3e-4}, "head", 3e-4),
        ({"value_learning_rate": 3e-4}, "model", 3e-4),
    ],
)
def test_value_function_has_its_learning_rate(fields, owner, rate, tmp_path):
    fields = {"learning_rate": 1e-5, "lr_scheduler_type": "constant"} | fields
    trainer = train_ppo(tmp_path, max_steps=1, extras=parts("full", owner), **fields)
    value = {id(parameter) for parameter in trainer.value_function.module.parameters()}
    rates = {True: set(), False: set()}
    for group in trainer.optimizer.param_groups:
        for parameter in group["params"]:
            rates[id(parameter) in value].add(group["lr"])
    assert rates == {True: {rate}, False: {fields["learning_rate"]}}
    assert logged(trainer, "learning_rate") == [fields["learning_rate"]]


def test_fields_of_the_value_function_without_effect_are_refused(tmp_path):
    for name, value in (("value_head_detached", False), ("num_value_layers", 1)):
        with pytest.raises(ValueError, match=f"`{name}={value}` has no effect with a `value_model`"):
            build_ppo(tmp_path, extras=parts("full", "model"), **{name: value})
    model, value_model = build_model(), build_scorer(seed=3)
    optimizer = torch.optim.SGD([*model.parameters(), *value_model.parameters()], lr=0.5)
    extras = {"optimizers": (optimizer, None), "value_model": value_model}
    with pytest.raises(
        ValueError, match=r"`value_learning_rate=0.1` has no effect with an optimizer that already has"
    ):
        build_ppo(tmp_path, model=model, value_learning_rate=0.1, extras=extras)


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
    # It has not moved.
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
    # TRL's own loop over the parameters for vLLM, without an engine.
    sync = object.__new__(VLLMGeneration)
    sync.model, sync.accelerator, sync._dist = trainer.model, trainer.accelerator, trainer._dist
    policy = {name for name, _ in build_model().named_parameters()}
    value = {f"klx_value.{name}" for name, _ in trainer.value_function.module.named_parameters()}
    assert {name for name, _ in sync._iter_named_params()} == policy | value
    with trainer.value_function.hidden():
        assert {name for name, _ in sync._iter_named_params()} == policy
    assert {name for name, _ in sync._iter_named_params()} == policy | value


def test_weight_sync_of_a_trainer_with_vllm_goes_without_the_value_function(tmp_path):
    # There is no engine here; the trainer treats every engine's weight sync the same way.
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
        tmp_path, max_steps=4, num_ppo_epochs=1, save_strategy="steps", save_steps=1, eval_strategy="steps",
        eval_steps=1, per_device_eval_batch_size=4, load_best_model_at_end=True,
        metric_for_best_model="eval_ppo/score", greater_is_better=True, rewards=falling_reward(),
        extras={"eval_dataset": build_dataset(4)}, reward_scaling="ref",
    )  # fmt: skip
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-1")
    best = load_file(tmp_path / "checkpoint-1" / "value_function.safetensors")
    assert all(torch.equal(best[name], weight) for name, weight in value_state(trainer).items())
    # The units of the values and the scale of the rewards are also those of the best step, not of the last.
    states = [json.loads((tmp_path / f"checkpoint-{step}" / "ppo_state.json").read_text()) for step in (1, 4)]
    restored = trainer._ppo_scaler.state_dict() | {"return_moments": trainer.value_function.scale.state_dict()}
    assert restored == states[0] != states[1]
    assert states[0]["return_moments"] != states[1]["return_moments"] and states[0]["count"] != states[1]["count"]
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
    with pytest.warns(UserWarning, match="holds no value function: it starts from its initial weights"):
        trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 4


def test_checkpoint_with_another_kind_of_value_function_is_refused(tmp_path):
    saved = {"save_strategy": "steps", "save_steps": 2, "num_ppo_epochs": 2}
    train_ppo(tmp_path, max_steps=2, **saved)
    trainer = build_ppo(tmp_path, max_steps=4, extras=parts("full", "model"), **saved)
    with pytest.raises(
        ValueError, match=r"Cannot resume: the value function in .* Build the trainer with the `value_model` and"
    ):
        trainer.train(resume_from_checkpoint=True)


@pytest.mark.parametrize(("saved_with", "resumed_with"), [(0, 2), (2, 1)])
def test_checkpoint_with_other_layers_is_refused(saved_with, resumed_with, tmp_path):
    saved = {"save_strategy": "steps", "save_steps": 2, "num_ppo_epochs": 2}
    train_ppo(tmp_path, max_steps=2, num_value_layers=saved_with, **saved)
    trainer = build_ppo(tmp_path, max_steps=4, num_value_layers=resumed_with, **saved)
    reason = rf"\(it has {saved_with} copied layers, but this trainer's has {resumed_with}\)"
    with pytest.raises(ValueError, match=rf"Cannot resume: .*{reason}\. .*`num_value_layers` of that run, or delete"):
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
