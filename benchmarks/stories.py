"""
A small pretrained model as a benchmark task: TinyStories prompts, and a reward for happy text.

Benchmarks with `--assets FOLDER` expect in it

- `stories260K`: Karpathy's model of that name, 260K parameters, MIT licence, from
  https://huggingface.co/karpathy/tinyllamas, as a transformers checkpoint (a `LlamaForCausalLM` and its tokenizer,
  with `<s>` as `eos_token`);
- `text/tinystories_400k.txt`: 400,000 characters of https://huggingface.co/datasets/roneneldan/TinyStories.

The reward needs PyPI's `vaderSentiment`.
"""

import json
from pathlib import Path


PROMPT_WORDS, ANSWER_WORDS = 8, 40


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
