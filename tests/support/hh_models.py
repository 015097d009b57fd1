"""Tiny local models and dialogues for the tests of the recipes."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from hh import bootstrap as hh_bootstrap
from support.tiny import WORDS


ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"
# Flags of every recipe run in the tests.
ON_CPU = [
    "--use_cpu",
    "--bf16=False",
    "--gradient_checkpointing=False",
    "--report_to=none",
    "--save_strategy=no",
    "--logging_steps=1",
    "--learning_rate=0.01",
    "--eval_prompts=4",
]


def dialogue(index: int) -> dict[str, str]:
    word, other = WORDS[index % 28], WORDS[(5 * index + 2) % 28]
    prompt = f"\n\nHuman: {word} {other}\n\nAssistant:"
    return {"prompt": prompt, "chosen": f" {other} {word}", "rejected": f" {word}"}


def save_models(folder: Path) -> None:
    """Save a policy, a reward model, and two unusable models: one with two labels, one with another tokenizer."""
    # Byte-level, like real tokenizers: stop strings are matched through it.
    tokenizer = hh_bootstrap.train_tokenizer([dialogue(index) for index in range(28)], 300, 128)
    settings = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 128,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "initializer_range": 0.3,
    }
    torch.manual_seed(0)
    for name, build in (
        ("policy", lambda: LlamaForCausalLM(LlamaConfig(**settings))),
        ("reward", lambda: LlamaForSequenceClassification(LlamaConfig(**settings, num_labels=1))),
        ("two_labels", lambda: LlamaForSequenceClassification(LlamaConfig(**settings, num_labels=2))),
    ):
        build().save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    LlamaForCausalLM(LlamaConfig(**settings)).save_pretrained(folder / "mismatch")
    tokenizer.add_tokens([f"extra{index}" for index in range(9)])
    tokenizer.save_pretrained(folder / "mismatch")
