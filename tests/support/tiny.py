"""Builders shared by the tests and by the scripts that the tests launch in separate processes."""

import copy
import random

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    set_seed,
)
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.trainer import utils as trl_utils

from support.oracle import plain_model


WORDS = [f"w{index}" for index in range(28)]
SPECIALS = ["<pad>", "<eos>", "<bos>", "<unk>"]


def build_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: index for index, word in enumerate(SPECIALS + WORDS)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", unk_token="<unk>"
    )


def build_model(seed: int = 0, **overrides) -> Qwen2ForCausalLM:
    settings = {
        "vocab_size": len(WORDS) + len(SPECIALS),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
        "tie_word_embeddings": False,
        # Wide enough that a few steps move the policy by a KL well above rounding.
        "initializer_range": 0.3,
    } | overrides
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(Qwen2Config(**settings))


def build_dataset(rows: int = 16) -> Dataset:
    return Dataset.from_dict({"prompt": [f"{WORDS[i % 28]} {WORDS[(3 * i + 1) % 28]}" for i in range(rows)]})


def lora(**overrides) -> LoraConfig:
    settings = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"} | overrides
    return LoraConfig(**settings)


def reward_even_tokens(completion_ids, **kwargs) -> list[float]:
    """Share of even token ids: a reward that any policy can raise."""
    return [sum(token % 2 == 0 for token in ids) / max(1, len(ids)) for ids in completion_ids]


# Settings of every run: CPU, one process, no reporting, every step logged.
RUN = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": [],
    "logging_steps": 1,
    "save_strategy": "no",
    "disable_tqdm": True,
    "per_device_train_batch_size": 4,
    "num_generations": 2,
    "max_completion_length": 6,
    "max_steps": 3,
    "learning_rate": 1e-2,
    "seed": 7,
}


def config_class_of(trainer_class):
    """The config class of a trainer of TRL or of ours."""
    ours = getattr(trainer_class, "_config_class", None)
    if ours is not None:
        return ours
    return GRPOConfig if issubclass(trainer_class, GRPOTrainer) else RLOOConfig


def build_trainer(
    trainer_class, output_dir, *, model=None, rewards=reward_even_tokens, dataset=None, extras=None, **fields
):
    """A trainer on the tiny model. `extras` goes to the trainer, every other keyword to its config."""
    args = config_class_of(trainer_class)(output_dir=str(output_dir), **(RUN | fields))
    extras = dict(extras or {})
    if "peft_config" in extras:
        extras["peft_config"] = copy.deepcopy(extras["peft_config"])  # PEFT writes the model's name into it
    # TRL 1.14 draws the weights of a new adapter before it sets the seed.
    set_seed(args.seed)
    return trainer_class(
        model=build_model() if model is None else model,
        reward_funcs=rewards,
        args=args,
        train_dataset=build_dataset() if dataset is None else dataset,
        **({"processing_class": build_tokenizer()} | extras),
    )


def scaled_logits() -> CohereForCausalLM:
    """A policy that scales its logits, which the weights of its LM head do not show."""
    like = build_model().config
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    sizes = {name: getattr(like, name) for name in names}
    set_seed(0)
    return CohereForCausalLM(CohereConfig(logit_scale=0.5, initializer_range=0.3, **sizes))


def train(trainer_class, output_dir, **settings):
    """Build a trainer as [`build_trainer`] does, train it, and return it."""
    trainer = build_trainer(trainer_class, output_dir, **settings)
    trainer.train()
    return trainer


def trained_lora(seed: int, model=None, scale: float = 0.3, **overrides) -> PeftModel:
    """A policy with an adapter in which no weight is 0."""
    policy = get_peft_model(build_model() if model is None else model, lora(**overrides))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            if "lora_" in name:
                weight.copy_(scale * torch.randn(weight.shape, generator=generator))
    return policy


TIMINGS = {"step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second"}
EVAL_TIMINGS = {"eval_runtime", "eval_samples_per_second", "eval_steps_per_second"}


def history(trainer, drop: str | None = None) -> list[dict]:
    """The logs without timings and, with `drop`, without the metrics of that prefix."""
    skip = TIMINGS | EVAL_TIMINGS
    return [
        {key: value for key, value in entry.items() if key not in skip and not (drop and key.startswith(drop))}
        for entry in trainer.state.log_history
    ]


def logged(trainer, name: str) -> list[float]:
    """The logged values of one metric."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def weights(trainer) -> dict[str, torch.Tensor]:
    """The policy's weights, without those of a reference adapter."""
    state = trainer.accelerator.unwrap_model(trainer.model).state_dict()
    return {name: weight for name, weight in state.items() if "klx_ref" not in name}


def assert_same_weights(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert not different, f"{len(different)} of {len(one)} weights differ, first {different[0]}"


# ---- Recording what passes through TRL's methods ----


class Recorder:
    """
    Sits between a KLX trainer and its TRL parent, and keeps what the parent's generation returns and what the parent's
    loss receives.
    """

    def __init__(self, *args, **kwargs):
        self.generated: list[dict] = []
        self.losses: list[dict] = []
        super().__init__(*args, **kwargs)

    def _generate_and_score_completions(self, inputs):
        policy = plain_model(self.accelerator.unwrap_model(self.model))
        batch = super()._generate_and_score_completions(inputs)
        batch["row"] = torch.arange(len(batch["completion_ids"]))
        mode = "train" if self.model.training else "eval"
        self.generated.append({"policy": policy, "mode": mode, "inputs": inputs} | batch)
        return batch

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        # After the loss, because our trainer sets the advantages during it.
        seen = {"loss": loss.detach().clone(), "beta": self.beta, "rollout": len(self.generated) - 1}
        self.losses.append(seen | inputs)
        return loss


class TotalRecorder:
    """Sits on top of a KLX trainer, and adds the trainer's final loss to each record."""

    def _compute_loss(self, model, inputs):
        total = super()._compute_loss(model, inputs)
        self.losses[-1]["total"] = total.detach().clone()
        return total


def recording(trainer_class):
    """The trainer with a [`Recorder`] between it and TRL's. Recording does not change training."""
    host = GRPOTrainer if issubclass(trainer_class, GRPOTrainer) else RLOOTrainer
    below = type(f"Recorded{host.__name__}", (Recorder, host), {})
    # The recorder passes per-token advantages on to TRL's loss.
    fields = {"takes_token_advantages": True}
    return type(f"Recording{trainer_class.__name__}", (TotalRecorder, trainer_class, below), fields)


def watch_projections(monkeypatch) -> list[tuple]:
    """Record the arguments of every call of TRL's projection to log-probs from now on."""
    inner, calls = trl_utils._ChunkedLogProbFunction, []

    class Watched:
        @staticmethod
        def apply(*args):
            calls.append(args)
            return inner.apply(*args)

    monkeypatch.setattr(trl_utils, "_ChunkedLogProbFunction", Watched)
    return calls


# ---- Rollouts that depend only on the prompt ----


def scripted_completion(prompt: str, generation: int) -> list[int]:
    """A completion of 2 to 6 tokens, sometimes ended by EOS, determined by the prompt and its place in the group."""
    draw = random.Random(f"{prompt}|{generation}")
    tokens = [draw.randrange(len(SPECIALS), len(SPECIALS) + len(WORDS)) for _ in range(draw.randrange(2, 7))]
    return tokens[:-1] + [1] if draw.random() < 0.5 else tokens


def scripted_rollout(prompts: list[str], trainer) -> dict:
    """A `rollout_func` of [`scripted_completion`]s, the same however the batch is split over processes."""
    training = trainer.model.training
    generations = trainer.num_generations if training else trainer.num_generations_eval
    first = trainer.accelerator.process_index * len(prompts)
    completions = [scripted_completion(prompt, (first + i) % generations) for i, prompt in enumerate(prompts)]
    return {
        "prompt_ids": trainer.processing_class(prompts)["input_ids"],
        "completion_ids": completions,
        "logprobs": None,
    }


class ScriptedGeneration:
    """[`scripted_rollout`] for a trainer that takes no `rollout_func`: it replaces the sampler."""

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        prompts = self.processing_class.batch_decode(prompt_ids)
        return scripted_rollout(prompts, self)["completion_ids"]
