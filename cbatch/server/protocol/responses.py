"""Response bodies of completions and chats. Unset fields are left out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from cbatch.text.outputs import TokenLogprob

PromptLogprobs = list[dict[str, dict[str, Any]] | None]


class TokenDetails(msgspec.Struct):
    reasoning_tokens: int  # includes the marks around thoughts


class PromptDetails(msgspec.Struct):
    cached_tokens: int  # that were in the prefix cache, of a prompt's first choice


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: TokenDetails | UnsetType = UNSET  # set with a reasoning parser


class CompletionChoice(msgspec.Struct):
    """A complete choice, or its part in one chunk. `seed` is the request's seed or a drawn seed."""

    index: int
    text: str
    seed: int
    finish_reason: str | None = None
    logprobs: CompletionLogprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET  # if requested, in a choice's first chunk
    token_ids: list[int] | UnsetType = UNSET


class FunctionCall(msgspec.Struct):
    """`arguments` is the JSON text from the model, or the next piece of the text."""

    arguments: str
    name: str | UnsetType = UNSET  # with the first piece


class ToolCall(msgspec.Struct):
    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class ToolCallDelta(msgspec.Struct):
    index: int
    function: FunctionCall
    id: str | UnsetType = UNSET  # with the first piece
    type: Literal["function"] | UnsetType = UNSET


class Delta(msgspec.Struct):
    """The message of a chunk. `role` comes with a choice's first text: in an earlier chunk, a
    client could mistake it for the first token."""

    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET  # older name of `reasoning`
    role: Literal["assistant"] | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: Delta
    finish_reason: str | None = None
    logprobs: ChatLogprobs | None = None
    seed: int | UnsetType = UNSET  # in the first chunk
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatMessage(msgspec.Struct):
    content: str | None  # None: only calls, or a thought that was cut off
    role: Literal["assistant"] = "assistant"
    reasoning: str | None | UnsetType = UNSET  # set with a reasoning parser
    reasoning_content: str | None | UnsetType = UNSET
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    seed: int
    finish_reason: str
    logprobs: ChatLogprobs | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class SpeculativeDecoding(msgspec.Struct):
    """Statistics of a request's steps with draft tokens. `acceptance_histogram[j]` counts the steps
    that accepted j draft tokens. `mean_acceptance_length` includes the bonus token."""

    acceptance_histogram: list[int]
    num_spec_steps: int
    num_spec_tokens: int  # maximum of draft tokens in one step
    mean_acceptance_length: float
    draft_acceptance_rate: float
    num_accepted_draft_tokens: int
    num_draft_tokens: int


class CallMetrics(msgspec.Struct):
    """Times by the server's clock. `speculative_decoding` is null if nothing was drafted."""

    time_to_first_token_ms: float | None
    generation_time_ms: float | None  # from the first token to the last
    speculative_decoding: SpeculativeDecoding | None


class StreamChunk(msgspec.Struct):
    """An event of a streamed completion or chat. `usage` is null until the last, if requested."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Any]  # of `CompletionChoice` or `ChatChunkChoice`
    prompt_token_ids: list[int] | UnsetType = UNSET  # of a chat, with its first chunk
    usage: Usage | None | UnsetType = UNSET
    metrics: CallMetrics | UnsetType = UNSET


class _Whole(msgspec.Struct, kw_only=True):
    """The shared members of complete responses of completions and chats."""

    id: str
    created: int
    model: str
    usage: Usage
    metrics: CallMetrics | UnsetType = UNSET


class CompletionResponse(_Whole, kw_only=True):
    choices: list[CompletionChoice]
    object: Literal["text_completion"] = "text_completion"


class ChatCompletion(_Whole, kw_only=True):
    choices: list[ChatChoice]
    object: Literal["chat.completion"] = "chat.completion"
    prompt_token_ids: list[int] | UnsetType = UNSET


class Tokenized(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct):
    prompt: str


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(msgspec.Struct):
    error: ErrorDetail


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
