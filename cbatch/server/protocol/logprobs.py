"""Log probabilities as clients expect them: lists for completions, one by one for chat."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from cbatch.text.outputs import TokenLogprob

Decode = Callable[..., str]  # of `TextTokenizer`


class CompletionLogprobs(msgspec.Struct):
    """Lists of one length. `tokens`, joined, are the text (up to a stop string), and `text_offset`
    counts its characters before each of them. `top_logprobs` are by `token_name`."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None]
    text_offset: list[int]

    @classmethod
    def of(
        cls,
        found: Iterable[TokenLogprob | None],
        ids: Iterable[int],
        decode: Decode,
        offset: int,
        texts: Sequence[str | None] = (),
    ) -> CompletionLogprobs:
        """Make those of the tokens `ids`; None for one that nothing precedes. `texts` are what the
        first tokens add to the text where their entries do not say it."""
        made = cls([], [], [], [])
        for at, (each, token_id) in enumerate(zip(found, ids, strict=True)):
            text = texts[at] if at < len(texts) else None if each is None else each.text
            made.tokens.append(token_name(token_id, decode) if text is None else text)
            made.token_logprobs.append(None if each is None else each.logprob)
            made.top_logprobs.append(None if each is None else _top(each, made.tokens[-1], decode))
            made.text_offset.append(offset)
            offset += len(made.tokens[-1])
        return made

    @property
    def end_offset(self) -> int:
        """Where the text of these tokens ends; 0 of none."""
        return self.text_offset[-1] + len(self.tokens[-1]) if self.tokens else 0


def _top(entry: TokenLogprob, text: str, decode: Decode) -> dict[str, float | None]:
    """The likeliest tokens by name, the chosen one by its `text`; no two have the same name."""
    top: dict[str, float | None] = {}
    for token_id, logprob in entry.top:
        name = text if text and token_id == entry.token_id else token_name(token_id, decode)
        top[name if name not in top else f"token_id:{token_id}"] = logprob
    return top


class LikelyToken(msgspec.Struct):
    """`bytes` are what the token adds to the text: those of all tokens, joined, are its UTF-8."""

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
        cls, found: Iterable[TokenLogprob], decode: Decode, to_bytes: Callable[[int], bytes]
    ) -> ChatLogprobs:
        content = []
        for each in found:
            top = [
                LikelyToken(token_name(i, decode), value, list(to_bytes(i)))
                for i, value in each.top
            ]
            raw = to_bytes(each.token_id)
            text = token_name(each.token_id, decode) if each.text is None else each.text
            if each.text is not None and "\ufffd" not in raw.decode(errors="replace"):
                raw = text.encode()
            content.append(ChatToken(text, each.logprob, list(raw), top))
        return cls(content)


def token_name(token_id: int, decode: Decode) -> str:
    """The token's text in the middle of a text, also of a special token; `token_id:N` where it has
    none of its own (bytes that are no character), so that different tokens stay different."""
    once = decode([token_id], skip_special_tokens=False)
    text = decode([token_id] * 2, skip_special_tokens=False)[len(once) :]
    return text if text and "\ufffd" not in text else f"token_id:{token_id}"


def prompt_logprobs(
    found: Iterable[TokenLogprob | None], decode: Decode
) -> list[dict[str, dict[str, Any]] | None]:
    """For each token of a prompt, by token id: itself, and the likeliest in its place."""
    return [
        None
        if each is None
        else {
            str(i): {
                "logprob": value,
                "decoded_token": (i == each.token_id and each.text) or token_name(i, decode),
            }
            for i, value in dict([(each.token_id, each.logprob), *each.top]).items()
        }
        for each in found
    ]
