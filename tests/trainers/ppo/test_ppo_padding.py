"""Padding without an embedding changes nothing: not the losses, the weights, or the saved files."""

import copy

import pytest
import torch
from datasets import Dataset
from peft import get_peft_model
from transformers import AutoModelForCausalLM

from support.tiny import (
    SPECIALS,
    WORDS,
    assert_same_weights,
    build_model,
    build_tokenizer,
    history,
    lora,
    reward_even_tokens,
    weights,
)
from support.tiny_ppo import build_ppo, build_scorer, byte_tokenizer, padded_tokenizer, train_ppo
from trl_klx.ppo.padding import SkipPadding, skip_padding


ROWS = len(SPECIALS) + len(WORDS)
# The policy must not sample token 0, which is padding for one tokenizer and a word for the other.
SAMPLING = {"generation_kwargs": {"suppress_tokens": [0]}}


def build_prompts() -> Dataset:
    """Prompts of one to five words, so that every batch is padded."""
    return Dataset.from_dict({"prompt": [" ".join(WORDS[i % 20 : i % 20 + 1 + i % 5]) for i in range(32)]})


def hooks(model) -> list:
    return [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]


def settings_of(case: str) -> dict:
    settings = {"num_ppo_epochs": 2, "max_steps": 6, "kl_penalty_coef": 0.1, "dataset": build_prompts(), **SAMPLING}
    extras = {"reward_model": build_scorer(seed=9)}
    settings["rewards"] = None
    if case == "models":
        extras |= {"value_model": build_scorer(seed=3), "ref_model": build_model(seed=0)}
    elif case == "lora":
        extras |= {"peft_config": lora()}
    elif case == "lora on the embedding":
        extras |= {"peft_config": lora(target_modules=["embed_tokens", "q_proj"])}
        settings["kl_penalty_reference_step"] = 0
    elif case == "embedding saved whole":
        extras |= {"peft_config": lora(modules_to_save=["embed_tokens"])}
    elif case == "tied":
        settings["model"] = build_model(tie_word_embeddings=True)
    elif case == "moving reference":
        settings["kl_ref_sync_steps"] = 2
    elif case == "full":
        # The exact KL can be penalised only in the loss.
        settings |= {"kl_placement": "loss", "kl_estimator": "full", "kl_statistic": "full"}
    elif case == "stop strings":
        # They need a tokenizer that can split a text anywhere.
        settings |= {"stop_strings": ["a", "b", "c", "d"], "model": build_model(vocab_size=len(byte_tokenizer()))}
        settings["rewards"] = reward_even_tokens
        extras = {}
    elif case == "loss":
        settings["kl_placement"] = "loss"
    return settings | {"extras": extras}


CASES = [
    "plain",
    "models",
    "lora",
    "lora on the embedding",
    "embedding saved whole",
    "tied",
    "moving reference",
    "full",
    "stop strings",
    "loss",
]


@pytest.mark.parametrize("case", CASES)
def test_training_is_that_of_padding_with_an_embedding(case, tmp_path):
    def run(name, tokenizer):
        settings = settings_of(case)
        settings["extras"] |= {"processing_class": tokenizer}
        return train_ppo(tmp_path / name, **settings)

    build = byte_tokenizer if case == "stop strings" else build_tokenizer
    plain, padded = run("plain", build()), run("padded", padded_tokenizer(build))
    assert history(plain)[:-1] == history(padded)[:-1]
    assert_same_weights(weights(plain), weights(padded))
    assert not any(isinstance(hook, SkipPadding) for hook in hooks(plain.model))
    assert any(isinstance(hook, SkipPadding) for hook in hooks(padded.model))


def test_only_the_padding_is_skipped():
    model = build_model()
    plain = copy.deepcopy(model)
    assert skip_padding(model, ROWS)
    tokens = torch.tensor([[ROWS, 5, 6]])
    mask = torch.tensor([[0, 1, 1]])
    expected = plain(input_ids=torch.tensor([[0, 5, 6]]), attention_mask=mask).logits
    assert torch.equal(model(input_ids=tokens, attention_mask=mask).logits, expected)
    with pytest.raises(IndexError):
        model(input_ids=torch.tensor([[5, ROWS + 1]]))


def test_copies_and_second_trainers_skip_padding_once():
    model = build_model()
    assert skip_padding(model, ROWS) and skip_padding(model, ROWS)
    assert hooks(model) == hooks(copy.deepcopy(model)) == [SkipPadding(ROWS)]
    assert not skip_padding(model, None) and not skip_padding(model, ROWS - 1)
    assert hooks(model) == [SkipPadding(ROWS)]


def test_resized_embeddings_are_left_alone():
    model = build_model()
    model.resize_token_embeddings(ROWS + 1)
    assert not skip_padding(model, ROWS) and hooks(model) == []
    assert not skip_padding(torch.nn.Linear(2, 2), ROWS)  # embeds nothing


@pytest.mark.parametrize("made_with", [None, 0])
def test_what_is_saved_loads(made_with, tmp_path):
    extras = {"processing_class": padded_tokenizer()}
    model = build_model(pad_token_id=made_with)
    trainer = train_ppo(
        tmp_path,
        model=model,
        num_ppo_epochs=1,
        dataset=build_prompts(),
        extras=extras,
        save_strategy="steps",
        save_steps=3,
    )
    trainer.save_model(str(tmp_path / "saved"))
    trainer.model.save_pretrained(tmp_path / "by_hand")
    for folder in ("checkpoint-3", "saved", "by_hand"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        assert loaded.config.pad_token_id == loaded.generation_config.pad_token_id == made_with
    # The merged model of an adapter is saved by the base model's own method.
    base = build_model(pad_token_id=made_with)
    trainer = build_ppo(tmp_path, model=get_peft_model(base, lora()), extras={"processing_class": padded_tokenizer()})
    trainer.model.merge_and_unload().save_pretrained(tmp_path / "merged")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged").config.pad_token_id == made_with


def test_resumption_and_a_saved_step_as_reference(tmp_path):
    def settings():
        extras = {"processing_class": padded_tokenizer()}
        fields = {"kl_penalty_coef": 0.1, "num_ppo_epochs": 1, "max_steps": 4, **SAMPLING}
        return {"dataset": build_prompts(), "extras": extras, **fields}

    whole = train_ppo(tmp_path, save_strategy="steps", save_steps=2, **settings())
    resumed = build_ppo(tmp_path, **settings())
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same_weights(weights(whole), weights(resumed))
    later = train_ppo(tmp_path, kl_penalty_reference_step=4, **settings())
    assert later.kl_reference.identity["step"] == 4
