"""
A small pretrained model as a benchmark task: TinyStories prompts, and a reward for happy text.

Benchmarks with `--assets FOLDER` expect in it the model `stories260K` and `text/tinystories_400k.txt`,
400,000 characters of TinyStories. `benchmarks/fetch_stories.py FOLDER` brings both, and says where they come from.

With `--model`, another causal language model, a folder or a Hub id, takes the model's place. The reward needs PyPI's
`vaderSentiment`.
"""

import json
from pathlib import Path


PROMPT_WORDS, ANSWER_WORDS = 8, 40


def model_path(assets: Path | str, model: str | None = None) -> str:
    """The model to train: `model`, or the one among the assets."""
    return model or str(Path(assets) / "stories260K")


def vader(completions, **kwargs) -> list[float]:
    """Sentiment of each completion, from -1 to 1."""
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    analyzer = SentimentIntensityAnalyzer()
    return [analyzer.polarity_scores(text)["compound"] for text in completions]


def is_available(assets: Path) -> bool:
    """Whether the model, its text and the reward's package are available."""
    try:
        import vaderSentiment.vaderSentiment  # noqa: F401
    except ImportError:
        return False
    return (assets / "stories260K").is_dir() and (assets / "text" / "tinystories_400k.txt").is_file()


def write_dataset(assets: Path, folder: Path) -> Path:
    """Write story openings as prompts, and their continuations for held-out perplexity, to a JSON Lines file."""
    text = (assets / "text" / "tinystories_400k.txt").read_text().replace("<|endoftext|>", "\n\n")
    file = folder / "stories.jsonl"
    with file.open("w") as lines:
        for paragraph in text.split("\n\n"):
            words = paragraph.split()
            if len(words) >= PROMPT_WORDS + ANSWER_WORDS:
                prompt = " ".join(words[:PROMPT_WORDS])
                answer = " " + " ".join(words[PROMPT_WORDS : PROMPT_WORDS + ANSWER_WORDS])
                lines.write(json.dumps({"prompt": prompt, "chosen": answer}) + "\n")
    return file


def exact_kl(policy, reference, tokenizer, prompts: list[str], length: int) -> tuple[float, float]:
    """The exact KL of two models on completions of the first, in nats per completion and per token."""
    import torch

    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    training = policy.training
    policy.eval()
    with torch.no_grad():
        ids = policy.generate(
            **inputs, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=length, pad_token_id=0, use_cache=True
        )
        width = inputs["input_ids"].size(1)
        ended = (ids[:, width:] == tokenizer.eos_token_id).int()
        there = (ended.cumsum(dim=1) - ended) == 0  # up to the first EOS, which counts
        mask = torch.cat([inputs["attention_mask"], there.long()], dim=1)
        ours, theirs = (
            model(input_ids=ids, attention_mask=mask).logits[:, width - 1 : -1].float().log_softmax(-1)
            for model in (policy, reference)
        )
    policy.train(training)
    total = ((ours.exp() * (ours - theirs)).sum(-1) * there).sum().item()
    return total / len(prompts), total / there.sum().item()


def load_prompts(assets: Path, folder: str):
    """The prompts as a dataset; `folder` takes what is written on the way."""
    from datasets import load_dataset

    data = str(write_dataset(assets, Path(folder)))
    return load_dataset("json", data_files=data, split="train", cache_dir=folder).remove_columns("chosen")


def load_task(assets: Path, folder: str, path: str):
    """Tokenizer and model of `path`, and prompts, see [`load_prompts`]."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return AutoTokenizer.from_pretrained(path), model, load_prompts(assets, folder)
