"""PPO: constructor arguments and tokenized data."""

import warnings

import pytest
import torch
from datasets import Dataset

from support.tiny import (
    RUN,
    build_dataset,
    build_model,
    build_tokenizer,
    reward_even_tokens,
    weights,
)
from support.tiny_ppo import (
    RecordingPPOTrainer,
    build_ppo,
    build_scorer,
    tokenizer_with_bos,
)
from trl_klx import KLXGRPOConfig, KLXPPOConfig, KLXPPOTrainer


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
    # TRL's sampler would then yield nothing, and training would end before its first step without an error.
    with pytest.raises(ValueError, match=r"`train_dataset` has 7 prompts, but a rollout needs 8\. Add prompts"):
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
    dataset = Dataset.from_dict({"input_ids": [[5, 6, 7]] * 8})  # without the BOS that the tokenizer would add
    args = KLXPPOConfig(output_dir=str(tmp_path), **(RUN | {"num_generations": 1}))
    with pytest.warns(UserWarning, match="tokenizing this text gives different tokens"):
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
