"""A reward model with the policy's tokenizer reads the rollout's tokens, not their retokenized text."""

import copy

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForSequenceClassification, LlamaForCausalLM, PreTrainedTokenizerFast

from support.launch import torchrun
from support.ppo_checks import scripted
from support.reward_model_checks import check_calls, record, sampled_rows, watched_scorer
from support.tiny import SPECIALS, WORDS, build_dataset, build_model, build_tokenizer, reward_even_tokens
from support.tiny_ppo import (
    CHAT_TEMPLATE,
    build_scorer,
    completion_of,
    padded_tokenizer,
    rollout_with_tools,
    tokenizer_with_bos,
)
from trl_klx.control.rollout import Rollout
from trl_klx.ppo.rollout_tokens import RolloutTokens


def merging_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with tokens for pairs of letters, so that letters sampled one by one come back as pairs."""
    letters = [chr(ord("a") + index) for index in range(7)]
    pairs = [(one, other) for one in letters[:3] for other in letters]
    vocabulary = [*SPECIALS, *letters, *(one + other for one, other in pairs)]
    assert len(vocabulary) == len(SPECIALS) + len(WORDS)
    backend = Tokenizer(models.BPE({token: index for index, token in enumerate(vocabulary)}, pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", unk_token="<unk>"
    )


def chat_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<user>", "<assistant>"]})
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def round_trip(tokenizer, row: list[int]) -> list[int]:
    return tokenizer(tokenizer.decode(row, skip_special_tokens=True), add_special_tokens=False)["input_ids"]


TOKENIZERS = {
    "plain": build_tokenizer,
    "bos": tokenizer_with_bos,
    "merging": merging_tokenizer,
    "padding without a row": padded_tokenizer,
}


@pytest.mark.parametrize("build", TOKENIZERS.values(), ids=TOKENIZERS)
def test_the_model_receives_the_tokens_that_were_sampled(build, tmp_path):
    tokenizer = build()
    scorer, calls = watched_scorer()
    words = ["abg", "de", "fa", "gcab", "ed", "f", "gg", "bad"] if build is merging_tokenizer else WORDS[:8]
    prompts = [" ".join(words[: 1 + i % 3]) if build is not merging_tokenizer else words[i] for i in range(8)]
    # Completions of different lengths, some ended by EOS, and none with token 0, which may be padding.
    trainer = record(
        tmp_path,
        rewards=None,
        dataset=Dataset.from_dict({"prompt": prompts}),
        extras={"reward_model": scorer, "processing_class": tokenizer, "rollout_func": scripted},
    )
    check_calls(calls, trainer.rollouts, tokenizer.pad_token_id)
    rows = [row for rollout in trainer.rollouts for row in sampled_rows(rollout)]
    assert len({len(row) for row in rows}) > 1
    # Retokenized, the text would give other tokens.
    changed = [round_trip(tokenizer, row) != row for row in rows]
    assert all(changed) if build is tokenizer_with_bos else any(changed)
    if build is tokenizer_with_bos:
        assert all(row[0] == tokenizer.bos_token_id for row in rows)
    # The rewards are the model's scores of these tokens.
    plain = build_scorer(seed=9)
    for rollout in trainer.rollouts:
        with torch.no_grad():
            expected = [float(plain(input_ids=torch.tensor([row])).logits[0, 0]) for row in sampled_rows(rollout)]
        assert rollout["rewards"][:, 0].tolist() == pytest.approx(expected, abs=1e-5)


def test_conversational_prompts(tmp_path):
    tokenizer = chat_tokenizer()
    scorer, calls = watched_scorer(vocab_size=len(tokenizer))
    messages = [[{"role": "user", "content": " ".join(WORDS[i : i + 1 + i % 3])}] for i in range(16)]
    trainer = record(
        tmp_path,
        model=build_model(vocab_size=len(tokenizer)),
        rewards=None,
        dataset=Dataset.from_dict({"prompt": messages}),
        extras={"reward_model": scorer, "processing_class": tokenizer},
    )
    check_calls(calls, trainer.rollouts, tokenizer.pad_token_id)
    user, assistant = tokenizer.convert_tokens_to_ids(["<user>", "<assistant>"])
    assert all(user in row and assistant in row for row in sampled_rows(trainer.rollouts[0]))


def test_what_tools_wrote_is_read_too(tmp_path):
    scorer, calls = watched_scorer()
    trainer = record(tmp_path, rewards=None, extras={"reward_model": scorer, "rollout_func": rollout_with_tools})
    assert any((rollout["tool_mask"] == 0).any() for rollout in trainer.rollouts)
    check_calls(calls, trainer.rollouts, 0)


def test_beside_reward_functions_and_a_model_with_its_own_tokenizer(tmp_path):
    """Only `reward_model` reads tokens; a model in `reward_funcs` has its own tokenizer."""
    (scorer, calls), (other, texts) = watched_scorer(), watched_scorer()
    trainer = record(
        tmp_path,
        rewards=[reward_even_tokens, other],
        extras={
            "reward_model": scorer,
            "reward_processing_classes": [None, build_tokenizer()],
            "rollout_func": scripted,
        },
    )
    assert trainer.rollouts[0]["rewards"].shape == (8, 3)
    check_calls(calls, trainer.rollouts, 0)
    assert texts[0]["input_ids"].tolist() != calls[0]["input_ids"].tolist()


def test_truncated_completions_are_read_whole_though_they_are_masked(tmp_path):
    scorer, calls = watched_scorer()
    trainer = record(
        tmp_path,
        mask_truncated_completions=True,
        rewards=None,
        extras={"reward_model": scorer, "rollout_func": scripted},
    )
    for call, rollout in zip(calls, trainer.rollouts, strict=True):
        masked = rollout["completion_mask"].sum(1) == 0
        assert masked.any() and not masked.all()
        for row, mask, completion in zip(
            call["input_ids"], call["attention_mask"], rollout["completion_ids"], strict=True
        ):
            # The scripted completions hold no padding.
            assert row[mask.bool()].tolist()[2:] == [token for token in completion.tolist() if token]


def test_evaluation(tmp_path):
    scorer, calls = watched_scorer()
    trainer = record(
        tmp_path,
        rewards=None,
        eval_strategy="steps",
        eval_steps=4,
        per_device_eval_batch_size=4,
        extras={"reward_model": scorer, "eval_dataset": build_dataset(8), "rollout_func": scripted},
    )
    assert {rollout["mode"] for rollout in trainer.rollouts} == {"train", "eval"}
    check_calls(calls, trainer.rollouts, 0)


def test_tokens_are_forgotten_after_the_rollout(tmp_path):
    trainer = record(tmp_path, rewards=None, extras={"reward_model": build_scorer(seed=9)})
    assert trainer._klx_rollout is None
    (rollout,) = trainer._klx_rollouts.values()
    assert rollout.prompt_ids is rollout.completion_ids is rollout.tool_masks is None


def test_without_a_tokenizer_the_model_reads_the_text(tmp_path):
    """TRL then loads each model's tokenizer by name, and the two may differ."""
    # Not the tiny Qwen2, whose tokenizer transformers would not load as it was saved.
    policy = LlamaForCausalLM(build_scorer().config)
    for name, model in (("policy", policy), ("reward", build_scorer(seed=9))):
        model.save_pretrained(tmp_path / name)
        build_tokenizer().save_pretrained(tmp_path / name)
    scorer, calls = AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward", num_labels=1), []
    scorer.register_forward_pre_hook(lambda module, args, kwargs: calls.append(kwargs), with_kwargs=True)
    trainer = record(
        tmp_path / "out",
        model=str(tmp_path / "policy"),
        rewards=None,
        extras={"reward_model": scorer, "processing_class": None, "rollout_func": scripted},
    )
    assert not isinstance(trainer.reward_processing_classes[0], RolloutTokens)
    tokenizer, rollout = build_tokenizer(), trainer.rollouts[0]
    for row, mask, prompt, completion in zip(
        calls[0]["input_ids"],
        calls[0]["attention_mask"],
        rollout["prompt_ids"],
        rollout["completion_ids"],
        strict=True,
    ):
        text = tokenizer.decode(prompt, skip_special_tokens=True) + tokenizer.decode(
            completion, skip_special_tokens=True
        )
        assert row[mask.bool()].tolist() == tokenizer(text)["input_ids"]


# ---- The stand-in alone ----


def test_outside_of_generation_it_is_the_tokenizer():
    tokenizer = build_tokenizer()
    tokens = RolloutTokens(tokenizer, lambda: None)
    assert tokens(text=["w1 w2"])["input_ids"] == tokenizer(["w1 w2"])["input_ids"]
    assert (tokens.pad_token_id, tokens.eos_token) == (0, "<eos>")
    assert tokens.decode([5, 6]) == "w1 w2"
    tokens.pad_token = "<eos>"
    assert tokenizer.pad_token_id == tokens.pad_token_id == 1
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = tokens.no_such_thing
    assert copy.deepcopy(tokens).pad_token_id == 1
    # A rollout without tokens, as from a trainer with its own generation.
    assert RolloutTokens(tokenizer, Rollout)(text="w1")["input_ids"] == [5]


def test_a_processor_is_asked_first_and_its_tokenizer_then():
    class Processor:
        tokenizer = build_tokenizer()

        def apply_chat_template(self, messages):
            return "by the processor"

    rollout = Rollout(prompt_ids=[[4], [5, 6]], completion_ids=[[7], [8]])
    tokens = RolloutTokens(Processor(), lambda: rollout)
    assert tokens.apply_chat_template([]) == "by the processor" and tokens.pad_token_id == 0
    inputs = tokens(text=["", ""], return_tensors="pt")
    assert inputs["input_ids"].tolist() == [[4, 7, 0], [5, 6, 8]]
    assert inputs["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]


def test_another_number_of_texts_is_refused():
    rollout = Rollout(prompt_ids=[[4], [5]], completion_ids=[[7], [8]])
    with pytest.raises(ValueError, match=r"given 1 texts for a rollout of 2 completions.* Pass it in `reward_funcs`"):
        RolloutTokens(build_tokenizer(), lambda: rollout)(text=["w1"])


# ---- Two processes ----


@pytest.mark.slow
def test_each_process_reads_its_own_rows(tmp_path):
    torchrun("reward_model_in_group.py", str(tmp_path))
    one, other = (torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2))
    assert len(one) == len(other) == 8 and not {tuple(row) for row in one} & {tuple(row) for row in other}
    assert all(completion_of(build_tokenizer().decode(row[:2])) == row[2:] for row in one + other)
