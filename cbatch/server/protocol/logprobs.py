"""Log probabilities as clients expect them: lists for completions, one by one for chat."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from cbatch.text.outputs import TokenLogprob

Decode = Callable[[list[int]], str]


class CompletionLogprobs(msgspec.Struct):
    """Lists of one length. `text_offset` counts characters from the beginning of the text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None]
    text_offset: list[int]

    @classmethod
    def of(
        cls, found: Iterable[TokenLogprob | None], ids: Iterable[int], decode: Decode, offset: int
    ) -> CompletionLogprobs:
        """Of the tokens `ids`; None for one that nothing precedes."""
        made = cls([], [], [], [])
        for each, token_id in zip(found, ids, strict=True):
            made.tokens.append(token_text(token_id, decode))
            made.token_logprobs.append(None if each is None else each.logprob)
            top = None if each is None else {token_text(i, decode): v for i, v in each.top}
            made.top_logprobs.append(top)
            made.text_offset.append(offset)
            offset += len(made.tokens[-1])
        return made

    @property
    def end_offset(self) -> int:
        """Where the text of these tokens ends; 0 of none."""
        return self.text_offset[-1] + len(self.tokens[-1]) if self.tokens else 0


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
        def spelt(token_id: int, logprob: float | None) -> LikelyToken:
            return LikelyToken(token_text(token_id, decode), logprob, list(to_bytes(token_id)))

        content = []
        for each in found:
            it = spelt(each.token_id, each.logprob)
            top = [spelt(*likely) for likely in each.top]
            content.append(ChatToken(it.token, it.logprob, it.bytes, top))
        return cls(content)


def token_text(token_id: int, decode: Decode) -> str:
    """The token's text; `token_id:N` where it has none of its own (a special token, a byte that is
    no character), so that different tokens stay different."""
    text = decode([token_id])
    return text if text and "\ufffd" not in text else f"token_id:{token_id}"


def prompt_logprobs(
    found: Iterable[TokenLogprob | None], decode: Decode
) -> list[dict[str, dict[str, Any]] | None]:
    """For each token of a prompt, by token id: itself, and the likeliest in its place."""
    return [
        None
        if each is None
        else {
            str(i): {"logprob": value, "decoded_token": token_text(i, decode)}
            for i, value in dict([(each.token_id, each.logprob), *each.top]).items()
        }
        for each in found
    ]
