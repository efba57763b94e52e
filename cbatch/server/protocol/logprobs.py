"""Log probabilities in OpenAI's formats: parallel lists for completions, objects for chat."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from cbatch.text.outputs import TokenLogprob

Decode = Callable[..., str]  # `TextTokenizer.decode`


class CompletionLogprobs(msgspec.Struct):
    """Lists with an element per token. `tokens` join to the text up to a stop string; `text_offset`
    counts the characters before each token. `top_logprobs` are keyed by `token_name`."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None]
    text_offset: list[int]

    @classmethod
    def of(
        cls,
        entries: Iterable[TokenLogprob | None],
        ids: Iterable[int],
        decode: Decode,
        offset: int,
        texts: Sequence[str | None] = (),
    ) -> CompletionLogprobs:
        """Return the lists for the tokens `ids`. An entry is None for the first token of a prompt.
        `texts` replaces the texts of the first entries."""
        lists = cls([], [], [], [])
        for at, (entry, token_id) in enumerate(zip(entries, ids, strict=True)):
            text = texts[at] if at < len(texts) else None if entry is None else entry.text
            lists.tokens.append(token_name(token_id, decode) if text is None else text)
            lists.token_logprobs.append(None if entry is None else entry.logprob)
            top = None if entry is None else _top(entry, lists.tokens[-1], decode)
            lists.top_logprobs.append(top)
            lists.text_offset.append(offset)
            offset += len(lists.tokens[-1])
        return lists

    @property
    def end_offset(self) -> int:
        """Offset of the end of these tokens' text; 0 without tokens."""
        return self.text_offset[-1] + len(self.tokens[-1]) if self.tokens else 0


def _top(entry: TokenLogprob, text: str, decode: Decode) -> dict[str, float | None]:
    """Return the likeliest tokens by unique name. The chosen token's name is its `text`."""
    top: dict[str, float | None] = {}
    for token_id, logprob in entry.top:
        name = text if text and token_id == entry.token_id else token_name(token_id, decode)
        top[name if name not in top else f"token_id:{token_id}"] = logprob
    return top


class LikelyToken(msgspec.Struct):
    """A token and its log probability. `bytes` are the UTF-8 bytes that the token adds."""

    token: str
    logprob: float | None
    bytes: list[int]


class ChatToken(LikelyToken):
    top_logprobs: list[LikelyToken]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatToken]
    refusal: None = None

    @classmethod
    def of(
        cls, entries: Iterable[TokenLogprob], decode: Decode, to_bytes: Callable[[int], bytes]
    ) -> ChatLogprobs:
        content = []
        for entry in entries:
            top = [
                LikelyToken(token_name(i, decode), value, list(to_bytes(i)))
                for i, value in entry.top
            ]
            raw = to_bytes(entry.token_id)
            text = token_name(entry.token_id, decode) if entry.text is None else entry.text
            if entry.text is not None and "\ufffd" not in raw.decode(errors="replace"):
                raw = text.encode()
            content.append(ChatToken(text, entry.logprob, list(raw), top))
        return cls(content)


def token_name(token_id: int, decode: Decode) -> str:
    """Return the token's text in the middle of a sentence, also for a special token. A token that
    is incomplete UTF-8 is named `token_id:N`, so that different tokens have different names."""
    once = decode([token_id], skip_special_tokens=False)
    text = decode([token_id] * 2, skip_special_tokens=False)[len(once) :]
    return text if text and "\ufffd" not in text else f"token_id:{token_id}"


def prompt_logprobs(
    entries: Iterable[TokenLogprob | None], decode: Decode
) -> list[dict[str, dict[str, Any]] | None]:
    """Return, for each prompt token, entries by token id: of the token and of the likeliest."""
    return [
        None
        if entry is None
        else {
            str(i): {
                "logprob": value,
                "decoded_token": (i == entry.token_id and entry.text) or token_name(i, decode),
            }
            for i, value in dict([(entry.token_id, entry.logprob), *entry.top]).items()
        }
        for entry in entries
    ]
