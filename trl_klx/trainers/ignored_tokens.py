"""The ids of the tokens in `kl_ignore_tokens`, whose KL is neither measured nor penalised."""

from collections.abc import Sequence
from typing import Any


def ignored_token_ids(
    tokens: Sequence[int | str] | None, tokenizer: Any, eos_token_ids: Sequence[int]
) -> tuple[int, ...]:
    """
    Look up the ids of `kl_ignore_tokens`.

    Args:
        tokens (`Sequence[int | str]`, *optional*):
            Ids, texts that are one token each, or `"eos"` for every token that ends a completion.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Tokenizer of the policy.
        eos_token_ids (`Sequence[int]`):
            Tokens that end a completion.
    """
    ids: set[int] = set()
    for token in tokens or ():
        if token == "eos":
            ids.update(eos_token_ids)
        elif isinstance(token, int):
            if not 0 <= token < len(tokenizer):
                raise ValueError(
                    f"`kl_ignore_tokens` has the id {token!r}, but the tokenizer has {len(tokenizer)} tokens. "
                    "Remove this id."
                )
            ids.add(token)
        else:
            ids.add(_id_of(token, tokenizer))
    return tuple(sorted(ids))


def _id_of(token: str, tokenizer: Any) -> int:
    found = tokenizer.get_vocab().get(token)
    if found is None:
        encoded = tokenizer.encode(token, add_special_tokens=False)
        if len(encoded) != 1 or encoded[0] == tokenizer.unk_token_id:
            raise ValueError(
                f"`kl_ignore_tokens` has {token!r}, which is not one token of the tokenizer. Pass ids, or texts that "
                "are one token each."
            )
        found = encoded[0]
    return int(found)
