"""Response bodies. Unset fields are left out."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from cbatch.server.protocol.logprobs import ChatLogprobs, CompletionLogprobs

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


class CompletionResponse(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    object: Literal["text_completion"] = "text_completion"
    metrics: CallMetrics | UnsetType = UNSET


class ChatCompletion(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    prompt_token_ids: list[int] | UnsetType = UNSET
    metrics: CallMetrics | UnsetType = UNSET


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
