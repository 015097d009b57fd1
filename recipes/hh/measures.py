"""Measurements on dialogues: the perplexity of a policy, and the scores of a reward model."""

import contextlib
import math
from collections.abc import Iterator, Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase


MOST_LOGITS = 2**27


@contextlib.contextmanager
def _eval_mode(model: torch.nn.Module) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def heldout_perplexity(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[dict[str, str]],
    batch_size: int = 32,
    max_length: int = 512,
) -> float:
    """
    Perplexity of the chosen answers given their prompts.

    `exp(-(1/N) sum log p(token))` over the N tokens of all answers, each followed by the end-of-sequence token. Prompt
    tokens are context only.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            Causal language model.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Its tokenizer.
        rows (`Sequence[dict[str, str]]`):
            Rows with `"prompt"` and `"chosen"`.
        batch_size (`int`, *optional*, defaults to `32`):
            Maximum number of rows per forward pass; fewer if their logits would take more than half a gigabyte.
        max_length (`int`, *optional*, defaults to `512`):
            Longest sequence. A longer one loses the start of its prompt, then the end of its answer.

    Returns:
        `float`:
            The perplexity.
    """
    if not rows:
        raise ValueError("`rows` is empty, so there is no perplexity to compute.")
    total_nll, total_tokens = 0.0, 0
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    device = next(model.parameters()).device
    batch_size = max(1, min(batch_size, MOST_LOGITS // (max_length * model.config.get_text_config().vocab_size)))
    with _eval_mode(model):
        for start in range(0, len(rows), batch_size):
            batch = rows[start : start + batch_size]
            input_ids, labels = [], []
            for row in batch:
                prompt_ids = tokenizer(row["prompt"])["input_ids"]
                answer_ids = tokenizer(row["chosen"], add_special_tokens=False)["input_ids"]
                answer_ids = (answer_ids + [tokenizer.eos_token_id])[: max_length - 1]
                prompt_ids = prompt_ids[-(max_length - len(answer_ids)) :]
                input_ids.append(prompt_ids + answer_ids)
                labels.append([-100] * len(prompt_ids) + answer_ids)
            width = max(len(ids) for ids in input_ids)
            mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in input_ids])  # (B, T)
            padded = torch.tensor([ids + [pad_id] * (width - len(ids)) for ids in input_ids])  # (B, T)
            target = torch.tensor([ids + [-100] * (width - len(ids)) for ids in labels])  # (B, T)
            logits = model(input_ids=padded.to(device), attention_mask=mask.to(device), use_cache=False).logits
            nll = torch.nn.functional.cross_entropy(
                logits[:, :-1].float().flatten(0, 1), target[:, 1:].flatten().to(device), reduction="sum"
            )
            total_nll += nll.item()
            total_tokens += int((target[:, 1:] != -100).sum())
    return math.exp(total_nll / total_tokens)


def score_texts(
    reward_model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], batch_size: int = 64
) -> torch.Tensor:
    """
    Scores of a reward model, computed the way TRL's online trainers do: no special tokens, padding on the right.

    Args:
        reward_model ([`~transformers.PreTrainedModel`]):
            Sequence classification model with one label.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Its tokenizer.
        texts (`Sequence[str]`):
            Transcripts, each `prompt + answer`.
        batch_size (`int`, *optional*, defaults to `64`):
            Transcripts per forward pass.

    Returns:
        `torch.Tensor`:
            Scores of shape `(len(texts),)`.
    """
    device = next(reward_model.parameters()).device
    scores = []
    with _eval_mode(reward_model):
        for start in range(0, len(texts), batch_size):
            inputs = tokenizer(
                text=list(texts[start : start + batch_size]),
                return_tensors="pt",
                padding=True,
                padding_side="right",
                add_special_tokens=False,
            ).to(device)
            scores.append(reward_model(**inputs).logits[:, 0].float().cpu())
    return torch.cat(scores)
