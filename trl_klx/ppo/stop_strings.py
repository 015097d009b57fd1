"""Texts that end a completion."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, StoppingCriteriaList, StopStringCriteria


class StopTexts(StopStringCriteria):
    """
    Stops a row once its completion contains one of the texts. A text that begins in the prompt does not count.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Tokenizer of the policy.
        texts (`list[str]`):
            Texts that end a completion.
        prompt_length (`int`):
            Length of the prompt in tokens, including padding.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, texts: list[str], prompt_length: int):
        super().__init__(tokenizer, texts)
        self.prompt_length = prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        stopped: torch.Tensor = super().__call__(input_ids[:, self.prompt_length :], scores, **kwargs)
        return stopped


def generate_until(
    generate: Callable[..., Any],
    tokenizer: PreTrainedTokenizerBase,
    texts: list[str],
    inputs: torch.Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """Call a model's `generate` with texts that end a completion, in addition to EOS."""
    prompt = inputs if inputs is not None else kwargs.get("input_ids")
    criteria = StoppingCriteriaList(kwargs.pop("stopping_criteria", None) or [])
    # With `inputs_embeds` instead of token ids, the output is the completion alone.
    criteria.append(StopTexts(tokenizer, texts, 0 if prompt is None else prompt.size(1)))
    return generate(inputs, stopping_criteria=criteria, **kwargs)


def holds_text(tokenizer: PreTrainedTokenizerBase, texts: list[str], ids: list[int]) -> bool:
    """Whether a completion contains one of the texts."""
    text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return any(stop in text for stop in texts)
