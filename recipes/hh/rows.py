"""
The text format of Anthropic's HH-RLHF, and a parser that brings the datasets of that family into one form. Needs only
the standard library.
"""

from collections.abc import Mapping, Sequence
from typing import Any


HUMAN = "\n\nHuman:"
ASSISTANT = "\n\nAssistant:"


def split_transcript(text: str) -> tuple[str, str]:
    """
    Split a transcript at its last `"\\n\\nAssistant:"`.

    Args:
        text (`str`):
            Transcript such as `"\\n\\nHuman: Hi\\n\\nAssistant: Hello!"`.

    Returns:
        `tuple[str, str]`:
            The prompt, which ends in `"\\n\\nAssistant:"`, and the answer with its leading space. Joined, they are
            `text`.
    """
    if not isinstance(text, str):
        raise TypeError(f"A transcript must be a `str`, got `{type(text).__name__}`.")
    start = text.rfind(ASSISTANT)
    if start < 0:
        raise ValueError(f"The transcript has no {ASSISTANT!r} marker, so no answer can be split off: {text[:80]!r}.")
    end = start + len(ASSISTANT)
    return text[:end], text[end:]


def _is_messages(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _render_messages(messages: Sequence[Mapping[str, str]], column: str) -> str:
    """Render `[{"role", "content"}, ...]` as a transcript."""
    names = {"user": HUMAN, "human": HUMAN, "assistant": ASSISTANT}
    text = ""
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
            raise ValueError(f"Message {index} of `{column}` needs the keys 'role' and 'content', got {message!r}.")
        role, content = message["role"], str(message["content"]).strip()
        if role == "system" and index == 0:
            text += content
        elif role in names:
            text += f"{names[role]} {content}"
        else:
            raise ValueError(
                f"Message {index} of `{column}` has the role {role!r}. Valid roles are {sorted(names)}, and 'system' "
                "for the first message."
            )
    return text


def _normalise_prompt(value: Any) -> str:
    prompt = _render_messages(value, "prompt") if _is_messages(value) else value
    if not isinstance(prompt, str):
        raise TypeError(f"`prompt` must be text or a list of messages, got `{type(value).__name__}`.")
    prompt = prompt.rstrip()
    if not prompt:
        raise ValueError("`prompt` is empty.")
    if prompt.startswith(("Human:", "Assistant:")):
        prompt = "\n\n" + prompt
    if HUMAN not in prompt and ASSISTANT not in prompt:  # a bare question
        prompt = f"{HUMAN} {prompt.strip()}"
    return prompt if prompt.endswith(ASSISTANT) else prompt + ASSISTANT


def _normalise_answer(value: Any, column: str, prompt: str) -> str:
    """The answer alone, with one leading space. Accepts the answer, or a transcript that repeats the prompt."""
    if _is_messages(value):
        text = _render_messages(value, column)
        if not value or value[-1]["role"] != "assistant":
            raise ValueError(f"`{column}` must end in a message of the role 'assistant', got {list(value)[-1:]!r}.")
        value = split_transcript(text)[1]
    if not isinstance(value, str):
        raise TypeError(f"`{column}` must be text or a list of messages, got `{type(value).__name__}`.")
    return " " + value.removeprefix(prompt).strip()


def parse_hh_row(row: Mapping[str, Any]) -> dict[str, str]:
    """
    Bring a row of a preference dataset into the form of `hh.dialogues.make_preference_pairs`.

    Accepts the raw form of Anthropic/hh-rlhf (`chosen` and `rejected` are whole transcripts), the split form of
    Dahoas/rm-static (`prompt`, `chosen`, `rejected`; other columns such as `response` are ignored), and both with
    lists of `{"role", "content"}` messages instead of text.

    Args:
        row (`Mapping[str, Any]`):
            Row with `chosen`, and optionally `prompt` and `rejected`.

    Returns:
        `dict[str, str]`:
            `"prompt"`, which ends in `"\\n\\nAssistant:"`, `"chosen"` and, if the row has one, `"rejected"`. In the
            raw form the prompt comes from `chosen`. A rejected transcript that differs from it in an earlier turn is
            cut at its own last marker.
    """
    if row.get("chosen") is None:
        raise ValueError(f"The row needs a `chosen` column. Its columns are {sorted(row)}.")
    columns = ["chosen"] if row.get("rejected") is None else ["chosen", "rejected"]
    if row.get("prompt") is not None:
        prompt = _normalise_prompt(row["prompt"])
        return {"prompt": prompt, **{name: _normalise_answer(row[name], name, prompt) for name in columns}}
    parsed: dict[str, str] = {}
    for name in columns:
        text = _render_messages(row[name], name) if _is_messages(row[name]) else row[name]
        try:
            prompt, answer = split_transcript(text)
        except (TypeError, ValueError) as error:
            raise type(error)(f"`{name}` without a `prompt` column must be a whole transcript. {error}") from error
        parsed.setdefault("prompt", prompt)
        parsed[name] = answer
    return parsed
