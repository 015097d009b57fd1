"""Builders shared by the tests and by the scripts that the tests launch in processes of their own."""

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM


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
        # Wide enough that a few steps move the policy by a KL that can be told from rounding.
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


# What every run here sets: CPU, one process, nothing reported, every step logged.
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
