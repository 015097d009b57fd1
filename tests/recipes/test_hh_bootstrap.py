import math
import random

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
)

from hh import bootstrap as hh_bootstrap
from hh.bootstrap import prepare_default
from hh.measures import heldout_perplexity, score_texts


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("hh") / "cache"


@pytest.fixture(scope="module")
def generator_states(cache_dir):
    """State of the global generators before and after the run that trains."""
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    before = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy())
    prepare_default(cache_dir, quick=True)
    return before, (torch.get_rng_state(), random.getstate(), np.random.get_state()[1])


@pytest.fixture(scope="module")
def assets(cache_dir, generator_states):
    return prepare_default(cache_dir, quick=True)


@pytest.fixture(scope="module")
def tokenizer(assets):
    return AutoTokenizer.from_pretrained(assets.sft_path)


@pytest.fixture
def no_training(monkeypatch):
    """Make any attempt to train raise."""

    class TrainingStarted(Exception):
        pass

    def build(*args):
        (args[0] / "sft").mkdir()
        raise TrainingStarted

    monkeypatch.setattr(hh_bootstrap, "_build", build)
    return TrainingStarted


class TestPrepareDefault:
    def test_metrics(self, assets):
        assert assets.sft_perplexity_after < 0.1 * assets.sft_perplexity_before
        assert 0.6 < assets.reward_accuracy <= 1.0
        assert assets.mean_reward_chosen > assets.mean_reward_rejected
        assert (len(assets.train_rows), len(assets.heldout_rows)) == (600, 100)

    def test_artefacts_load(self, assets, tokenizer):
        policy = AutoModelForCausalLM.from_pretrained(assets.sft_path)
        inputs = tokenizer([row["prompt"] for row in assets.heldout_rows[:3]], return_tensors="pt", padding=True)
        output = policy.generate(**inputs, max_new_tokens=4, do_sample=False)
        assert output.shape[0] == 3
        assert policy.config.max_position_embeddings == 512
        perplexity = heldout_perplexity(policy, tokenizer, assets.heldout_rows)
        assert perplexity == pytest.approx(assets.sft_perplexity_after, rel=1e-4)

    def test_reward_model_scores_as_measured(self, assets):
        reward_model = AutoModelForSequenceClassification.from_pretrained(assets.reward_path)
        tokenizer = AutoTokenizer.from_pretrained(assets.reward_path)
        assert reward_model.config.num_labels == 1
        assert reward_model.config.pad_token_id == tokenizer.pad_token_id
        chosen, rejected = (
            score_texts(reward_model, tokenizer, [row["prompt"] + row[key] for row in assets.heldout_rows])
            for key in ("chosen", "rejected")
        )
        assert (chosen > rejected).float().mean().item() == pytest.approx(assets.reward_accuracy, abs=0.011)

    def test_second_call_does_not_train(self, cache_dir, assets, no_training):
        files = {path: path.stat().st_mtime_ns for path in cache_dir.rglob("*")}
        again = prepare_default(cache_dir, quick=True)
        assert again.from_cache
        assert again == assets
        assert {path: path.stat().st_mtime_ns for path in cache_dir.rglob("*")} == files

    def test_only_the_finished_folder_is_left(self, cache_dir, assets):
        assert [path.name for path in cache_dir.iterdir()] == [assets.sft_path.parent.name]
        assert sorted(path.name for path in assets.sft_path.parent.iterdir()) == ["metrics.json", "reward", "sft"]

    def test_another_seed_has_another_folder(self, cache_dir, assets, no_training):
        with pytest.raises(no_training):
            prepare_default(cache_dir, seed=1, quick=True)

    def test_interrupted_run_leaves_nothing_behind(self, tmp_path, no_training):
        with pytest.raises(no_training):
            prepare_default(tmp_path, quick=True)
        assert list(tmp_path.iterdir()) == []

    def test_half_written_cache_is_not_used(self, tmp_path, assets, monkeypatch):
        # A folder with the right name, but without the file that is written last
        half = tmp_path / assets.sft_path.parent.name
        (half / "sft").mkdir(parents=True)
        (half / "sft" / "config.json").write_text("{}")
        built = []

        def build(folder, *args):
            built.append(folder)
            for source in assets.sft_path.parent.glob("*.json"):
                (folder / source.name).write_text(source.read_text())

        monkeypatch.setattr(hh_bootstrap, "_build", build)
        rebuilt = prepare_default(tmp_path, quick=True)
        assert len(built) == 1 and not rebuilt.from_cache
        assert not (half / "sft").exists()
        assert [path.name for path in tmp_path.iterdir()] == [half.name]

    def test_slower_process_keeps_the_finished_folder(self, tmp_path):
        target, folder = tmp_path / "target", tmp_path / "folder"
        for path, text in ((target, "first"), (folder, "second")):
            path.mkdir()
            (path / hh_bootstrap.METRICS_FILE).write_text(text)
        hh_bootstrap._publish(folder, target)
        assert (target / hh_bootstrap.METRICS_FILE).read_text() == "first"
        assert not folder.exists()

    def test_global_generators_are_left_alone(self, generator_states):
        before, after = generator_states
        assert torch.equal(before[0], after[0])
        assert before[1] == after[1]
        assert np.array_equal(before[2], after[2])


class TestTokenizer:
    def test_text_survives(self, assets, tokenizer):
        for row in assets.heldout_rows:
            text = row["prompt"] + row["chosen"]
            assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text

    def test_prompt_and_answer_tokenize_apart(self, assets, tokenizer):
        for row in assets.heldout_rows:
            apart = tokenizer(row["prompt"])["input_ids"] + tokenizer(row["chosen"])["input_ids"]
            assert tokenizer(row["prompt"] + row["chosen"])["input_ids"] == apart

    def test_special_tokens(self, tokenizer):
        assert len({tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id}) == 3
        assert tokenizer.padding_side == "left"
        assert not set(tokenizer("Hello")["input_ids"]) & set(tokenizer.all_special_ids)
        assert 1000 <= len(tokenizer) <= 1500


class TestHeldoutPerplexity:
    def test_uniform_model(self, tokenizer, assets):
        # With a zero output layer every token has probability 1 / V.
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(tokenizer),
                hidden_size=8,
                intermediate_size=8,
                num_hidden_layers=1,
                num_attention_heads=1,
                num_key_value_heads=1,
            )
        )
        torch.nn.init.zeros_(model.lm_head.weight)
        perplexity = heldout_perplexity(model, tokenizer, assets.heldout_rows[:5])
        assert perplexity == pytest.approx(len(tokenizer), rel=1e-4)

    def test_padding_and_batches_do_not_matter(self, tokenizer, assets):
        model = AutoModelForCausalLM.from_pretrained(assets.sft_path)
        rows = assets.heldout_rows[:5]
        one_by_one = heldout_perplexity(model, tokenizer, rows, batch_size=1)
        assert heldout_perplexity(model, tokenizer, rows, batch_size=5) == pytest.approx(one_by_one, rel=1e-4)

    def test_counts_answer_tokens_only(self, tokenizer, assets):
        model = AutoModelForCausalLM.from_pretrained(assets.sft_path).eval()
        row = assets.heldout_rows[0]
        prompt_ids = tokenizer(row["prompt"])["input_ids"]
        answer_ids = tokenizer(row["chosen"])["input_ids"] + [tokenizer.eos_token_id]
        with torch.no_grad():
            logps = model(torch.tensor([prompt_ids + answer_ids])).logits[0].log_softmax(-1)
        nll = [-logps[len(prompt_ids) + i - 1, token].item() for i, token in enumerate(answer_ids)]
        expected = math.exp(sum(nll) / len(nll))
        assert heldout_perplexity(model, tokenizer, [row]) == pytest.approx(expected, rel=1e-4)

    def test_long_rows_are_cut(self, tokenizer, assets):
        model = AutoModelForCausalLM.from_pretrained(assets.sft_path)
        row = {"prompt": "\n\nHuman: Hello." * 300, "chosen": " Sure!" * 300}
        assert math.isfinite(heldout_perplexity(model, tokenizer, [row], max_length=64))

    def test_mode_is_restored(self, tokenizer, assets):
        model = AutoModelForCausalLM.from_pretrained(assets.sft_path).train()
        heldout_perplexity(model, tokenizer, assets.heldout_rows[:1])
        assert model.training

    def test_no_rows(self, tokenizer, assets):
        with pytest.raises(ValueError, match="`rows` is empty"):
            heldout_perplexity(None, tokenizer, [])
