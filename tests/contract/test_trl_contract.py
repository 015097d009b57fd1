"""The internals of TRL that this package relies on, pinned on the installed version."""

import inspect
import os
import re

import pytest
import torch
import trl
from packaging.version import Version
from peft import PeftModel
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.trainer.utils import shuffle_sequence_dict, split_tensor_dict

from support.tiny import build_model, build_trainer, lora, scripted_rollout, train


TRAINERS = {"grpo": GRPOTrainer, "rloo": RLOOTrainer}
both = pytest.mark.parametrize("trainer_class", TRAINERS.values(), ids=TRAINERS)
# Keys that every generation batch has.
TOKENS = {"prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages"}


def parameters(method) -> list[str]:
    return list(inspect.signature(inspect.unwrap(method)).parameters)


class Spying:
    """Records every call of the methods that we hook into."""

    def __init__(self, *args, **kwargs):
        self.calls: list[tuple] = []
        super().__init__(*args, **kwargs)

    def _generate_and_score_completions(self, inputs):
        self.calls.append(("generate", inputs))
        batch = super()._generate_and_score_completions(inputs)
        self.calls.append(("generated", batch))
        return batch

    def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
        output = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        self.calls.append(("score", (model, args, kwargs, output)))
        return output

    def _calculate_rewards(self, *args, **kwargs):
        rewards = super()._calculate_rewards(*args, **kwargs)
        self.calls.append(("rewards", rewards))
        return rewards

    def _compute_loss(self, model, inputs):
        self.calls.append(("loss", inputs))
        return super()._compute_loss(model, inputs)


def spy(trainer_class, output_dir, **settings):
    trainer = train(type("Spy", (Spying, trainer_class), {}), output_dir, **settings)
    return trainer, [name for name, _ in trainer.calls]


def test_version():
    # Set by `make test`, so that the tests of the oldest release cannot run on another one.
    assert trl.__version__ == os.environ.get("KLX_EXPECTED_TRL", trl.__version__)


@both
def test_signatures(trainer_class):
    assert parameters(trainer_class.__init__)[:4] == ["self", "model", "reward_funcs", "args"]
    assert parameters(trainer_class._generate_and_score_completions) == ["self", "inputs"]
    assert parameters(trainer_class._compute_loss) == ["self", "model", "inputs"]
    assert parameters(trainer_class._save_checkpoint) == ["self", "model", "trial"]
    assert parameters(trainer_class._load_optimizer_and_scheduler) == ["self", "checkpoint"]
    assert parameters(trainer_class._load_from_checkpoint) == ["self", "resume_from_checkpoint", "model"]
    assert parameters(trainer_class._save) == ["self", "output_dir", "state_dict"]
    assert callable(trainer_class._calculate_rewards) and callable(trainer_class._get_output_dir)


@both
def test_order_of_one_step(trainer_class, tmp_path):
    # With one micro-batch, GRPO scores the policy only in the loss; RLOO also scores it at generation.
    _, calls = spy(trainer_class, tmp_path, beta=0.0, max_steps=1)
    at_generation = [] if trainer_class is GRPOTrainer else ["score"]
    assert calls == ["generate", *at_generation, "rewards", "generated", "loss", "score"]


@both
def test_policy_is_scored_before_the_reference(trainer_class, tmp_path):
    trainer, calls = spy(
        trainer_class, tmp_path, beta=0.1, max_steps=1, num_iterations=2, extras={"peft_config": lora()}
    )
    assert calls[:5] == ["generate", "score", "score", "rewards", "generated"]
    batch = trainer.calls[4][1]
    policy = trainer.calls[1][1][3][0]
    if trainer_class is GRPOTrainer:
        assert torch.equal(batch["old_per_token_logps"], policy)
        assert torch.equal(batch["ref_per_token_logps"], trainer.calls[2][1][3][0])
    else:
        assert torch.equal(batch["old_logps"], (policy * batch["completion_mask"]).sum(1))


@both
def test_a_reference_object_in_the_place_of_ref_model_is_asked(trainer_class, tmp_path):
    # TRL passes `self.ref_model`, whatever it is, to its log-prob method, and uses the result.
    class Reference:
        pass

    class Host(trainer_class):
        def _generate_and_score_completions(self, inputs):
            self.beta, self.ref_model = 0.5, Reference()
            try:
                return super()._generate_and_score_completions(inputs)
            finally:
                self.beta, self.ref_model = 0.0, None

        def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
            if isinstance(model, Reference):
                self.asked = getattr(self, "asked", 0) + 1
                return torch.zeros(args[0].size(0), args[2]), None, None
            return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)

    trainer = train(Host, tmp_path, beta=0.0, max_steps=2)
    assert trainer.asked == 2
    if trainer_class is GRPOTrainer:
        assert trainer._buffered_inputs[0]["ref_per_token_logps"].abs().sum() == 0
    else:
        # RLOO logs the summed log-ratio. Against zeros it is the policy's own log-prob, which is negative.
        assert all(entry["kl"] < 0 for entry in trainer.state.log_history[:-1])


@both
def test_log_prob_method(trainer_class, tmp_path):
    trainer, _ = spy(trainer_class, tmp_path, beta=0.0, max_steps=1)
    model, args, kwargs, output = next(content for name, content in trainer.calls if name == "score")
    # Tokens, attention mask and number of completion tokens are positional; the rest may be keywords.
    ids, mask, keep = args[:3]
    assert ids.shape == mask.shape and isinstance(keep, int) and keep < ids.size(1)
    assert len(output) == 3 and output[0].shape == (ids.size(0), keep)
    chunked = trainer_class._get_per_token_logps_and_entropies(trainer, trainer.model, ids, mask, keep, batch_size=2)
    assert len(chunked) == 3 and chunked[0].shape == (ids.size(0), keep)
    with torch.no_grad():
        logits = build_like(trainer.model)(input_ids=ids, attention_mask=mask).logits[:, -keep - 1 : -1]
    expected = torch.log_softmax(logits, dim=-1).gather(2, ids[:, -keep:].unsqueeze(2)).squeeze(2)
    counts = mask[:, -keep:].bool()
    torch.testing.assert_close(chunked[0][counts], expected[counts], atol=1e-5, rtol=0)
    # Masked positions hold 0 since TRL 1.14, and so cannot spoil a masked sum. Before, they hold anything.
    assert Version(trl.__version__) < Version("1.14") or (chunked[0][~counts] == 0).all()


def build_like(model):
    plain = build_model()
    plain.load_state_dict(model.state_dict())
    return plain.eval()


def test_generation_batch_of_grpo(tmp_path):
    trainer, _ = spy(GRPOTrainer, tmp_path, max_steps=1)
    batch = next(content for name, content in trainer.calls if name == "generated")
    assert batch.keys() == TOKENS | {"num_items_in_batch"}
    assert batch["advantages"].shape == (4,) and batch["num_items_in_batch"].ndim == 0
    trainer, _ = spy(GRPOTrainer, tmp_path, max_steps=1, num_iterations=2, beta=0.1, extras={"peft_config": lora()})
    batch = next(content for name, content in trainer.calls if name == "generated")
    assert batch.keys() == TOKENS | {"num_items_in_batch", "old_per_token_logps", "ref_per_token_logps"}


def test_generation_batch_of_rloo(tmp_path):
    trainer, _ = spy(RLOOTrainer, tmp_path, max_steps=1, beta=0.1, extras={"peft_config": lora()})
    batch = next(content for name, content in trainer.calls if name == "generated")
    assert batch.keys() == TOKENS | {"old_logps"}
    assert batch["advantages"].shape == batch["old_logps"].shape == (4,)


def test_third_result_of_generate_is_the_tool_mask(tmp_path):
    source = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    unpacked = re.search(r"\(\s*([\w\s,]+?),?\s*\) = self\._generate\(prompts\)", source).group(1)
    assert [name.strip() for name in unpacked.split(",")][2] == "tool_mask_list"

    def rollout(prompts, trainer):
        output = scripted_rollout(prompts, trainer)
        return output | {"env_mask": [[0] + [1] * (len(ids) - 1) for ids in output["completion_ids"]]}

    trainer = build_trainer(GRPOTrainer, tmp_path, extras={"rollout_func": rollout})
    prompts = ["w1 w2", "w1 w2", "w3 w4", "w3 w4"]
    output = trainer._generate(prompts)
    assert output[2] == [[0] + [1] * (len(ids) - 1) for ids in output[1]]
    batch = trainer._generate_and_score_completions([{"prompt": prompt} for prompt in prompts])
    # Padded with 1, so it must be multiplied by the completion mask.
    assert (batch["tool_mask"][:, 0] == 0).all() and (batch["tool_mask"][:, 1:] == 1).all()


def test_grpo_reads_the_advantages_after_its_forward(tmp_path):
    # Our trainer replaces them with (B, T) advantages while TRL's loss runs.
    class Late(GRPOTrainer):
        def _compute_loss(self, model, inputs):
            self.inputs = inputs
            return super()._compute_loss(model, inputs)

        def _get_per_token_logps_and_entropies(self, *args, **kwargs):
            output = super()._get_per_token_logps_and_entropies(*args, **kwargs)
            self.inputs["advantages"] = torch.full_like(output[0].detach(), 3.0)
            return output

    trainer = train(Late, tmp_path, max_steps=2, loss_type="grpo")
    # On policy, the loss is minus the advantage.
    assert [entry["loss"] for entry in trainer.state.log_history[:-1]] == pytest.approx([-3.0, -3.0])


@both
def test_attributes(trainer_class, tmp_path):
    trainer = build_trainer(trainer_class, tmp_path, beta=0.0, num_generations=4, temperature=0.7)
    assert trainer.beta == 0.0 and trainer.ref_model is None
    assert trainer.num_generations == 4 and trainer.num_generations_eval and trainer.temperature == 0.7
    assert trainer.epsilon_low == trainer.epsilon_high == trainer.args.epsilon
    assert trainer.args.steps_per_generation == 1 and trainer.args.gradient_accumulation_steps == 1
    names = ("reward_funcs", "reward_func_names", "reward_processing_classes", "reward_weights")
    assert all(len(getattr(trainer, name)) == 1 for name in names)
    assert isinstance(trainer.reward_weights, torch.Tensor)
    # Both modes exist from the start, and a new name creates its own list.
    for mode in ("train", "eval"):
        trainer._metrics[mode]["something/new"].append(1.0)
    assert trainer._metrics["train"]["something/new"] == [1.0]


@both
def test_appended_metrics_are_logged_as_means(trainer_class, tmp_path):
    class Host(trainer_class):
        def _compute_loss(self, model, inputs):
            self._metrics["train"]["something/new"].append(float(self.state.global_step))
            return super()._compute_loss(model, inputs)

    trainer = train(Host, tmp_path, beta=0.0, max_steps=4, logging_steps=2)
    assert [entry["something/new"] for entry in trainer.state.log_history[:-1]] == [0.5, 2.5]


@both
def test_rewards_are_gathered_per_function(trainer_class, tmp_path):
    def other(completion_ids, **kwargs):
        return [None for _ in completion_ids]

    trainer, _ = spy(
        trainer_class, tmp_path, beta=0.0, max_steps=1, rewards=[lambda prompts, **kwargs: [1.0] * len(prompts), other]
    )
    rewards = next(content for name, content in trainer.calls if name == "rewards")
    assert rewards.shape == (4, 2)
    assert torch.isnan(rewards[:, 1]).all() and (rewards[:, 0] == 1.0).all()


def test_splitting_and_shuffling_keep_what_we_add():
    rows = torch.arange(4)
    batch = {
        "prompt_ids": rows.unsqueeze(1),
        "tokens": rows.unsqueeze(1).expand(4, 3),
        "hidden": rows.view(4, 1, 1).expand(4, 3, 2),
        "group": rows // 2,
        "count": torch.tensor(7),
        "nothing": None,
    }
    shuffled = shuffle_sequence_dict(batch)
    for name in ("tokens", "hidden"):
        assert torch.equal(shuffled[name].reshape(4, -1)[:, 0], shuffled["prompt_ids"][:, 0])
    chunks = split_tensor_dict(shuffled, 2)
    assert [chunk["tokens"].shape for chunk in chunks] == [(2, 3)] * 2
    assert [chunk["hidden"].shape for chunk in chunks] == [(2, 3, 2)] * 2
    assert all(chunk["count"] == 7 and chunk["count"].ndim == 0 and chunk["nothing"] is None for chunk in chunks)
    assert torch.equal(torch.cat([chunk["group"] for chunk in chunks]), shuffled["prompt_ids"][:, 0] // 2)


def test_configs():
    assert GRPOConfig.__dataclass_fields__["beta"].default == 0.0
    assert RLOOConfig.__dataclass_fields__["beta"].default == 0.05
    for config in (GRPOConfig, RLOOConfig):
        assert isinstance(config._VALID_DICT_FIELDS, list)


def test_adapter_subfolders_make_the_host_lose_the_trained_adapter(tmp_path):
    # Why our checkpoints hold only one adapter. If this fails, transformers was fixed, and our workaround can go.
    trainer = build_trainer(GRPOTrainer, tmp_path / "run", extras={"peft_config": lora()})
    policy = trainer.model
    assert isinstance(policy, PeftModel)
    policy.add_adapter("other", policy.peft_config["default"])
    name = next(name for name, _ in policy.named_parameters() if "lora_B.default" in name)
    with torch.no_grad():
        policy.get_parameter(name).fill_(0.5)
    policy.save_pretrained(tmp_path / "checkpoint")
    assert (tmp_path / "checkpoint" / "other" / "adapter_model.safetensors").is_file()
    with torch.no_grad():
        policy.get_parameter(name).zero_()
    trainer._load_from_checkpoint(str(tmp_path / "checkpoint"))
    assert policy.get_parameter(name).abs().sum() == 0
