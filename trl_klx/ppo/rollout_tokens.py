"""Lets the reward model read the token ids of the rollout instead of tokenizing its text again."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import BatchEncoding
from trl.trainer.utils import pad

from ..control.rollout import Rollout


class RolloutTokens:
    """
    Replaces the tokenizer of a reward model that shares the policy's tokenizer. TRL decodes prompts and completions
    and tokenizes the text again for the reward model, which loses the completion's special tokens and often splits the
    rest differently. While a batch is being generated, calling this object returns the sampled ids. At other times,
    and for everything else, it behaves like the tokenizer.

    Args:
        processing_class ([`~transformers.PreTrainedTokenizerBase`] or [`~transformers.ProcessorMixin`]):
            Tokenizer or processor of the policy.
        current_rollout (`Callable`):
            Returns the batch that is being generated, or `None`.
    """

    processing_class: Any

    def __init__(self, processing_class: Any, current_rollout: Callable[[], Rollout | None]):
        # Assignment would set attributes of the tokenizer.
        vars(self).update(processing_class=processing_class, current_rollout=current_rollout)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, even if `processing_class` is a processor."""
        return getattr(self.processing_class, "tokenizer", self.processing_class)

    def __getattr__(self, name: str) -> Any:
        # Python calls this only for missing attributes. A new copy has none yet, and looking them up would recurse.
        if "processing_class" not in vars(self):
            raise AttributeError(name)
        owner = self.processing_class if hasattr(self.processing_class, name) else self.tokenizer
        return getattr(owner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.tokenizer, name, value)

    def __call__(self, text: Any = None, *args: Any, **kwargs: Any) -> Any:
        rollout = self.current_rollout()
        if rollout is None or rollout.prompt_ids is None or rollout.completion_ids is None:
            return self.processing_class(text, *args, **kwargs)
        pairs = zip(rollout.prompt_ids, rollout.completion_ids, strict=True)
        rows = [torch.tensor([*prompt, *completion], dtype=torch.long) for prompt, completion in pairs]
        if len(rows) != len(text):
            raise ValueError(
                f"The reward model was given {len(text)} texts for a rollout of {len(rows)} completions, so their "
                "tokens are unknown. Pass it in `reward_funcs`, where it reads the texts."
            )
        ids = pad(rows, padding_value=self.tokenizer.pad_token_id, padding_side="right")
        mask = pad([torch.ones_like(row) for row in rows], padding_value=0, padding_side="right")
        return BatchEncoding({"input_ids": ids, "attention_mask": mask})
