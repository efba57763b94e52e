"""Builds responses to chats: messages and deltas of thoughts, tool calls and text."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

from msgspec import UNSET, UnsetType

from cbatch.core.request.request import FinishReason
from cbatch.server.protocol.logprobs import ChatLogprobs
from cbatch.server.protocol.model import ServedModel
from cbatch.server.protocol.requests import ApiRequest
from cbatch.server.protocol.responses import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatMessage,
    Delta,
    FunctionCall,
    TokenDetails,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from cbatch.server.serving.request_record import RequestRecord
from cbatch.server.serving.response_builder import ChoiceState, ResponseBuilder, encode
from cbatch.text.forced_tools import ToolCallPart, add_part
from cbatch.text.outputs import Choice, Output
from cbatch.text.reply_reader import Part, ReplyReader, Thought


class ChatBuilder(ResponseBuilder[ChatChunkChoice]):
    """A response whose replies are parsed into thoughts, tool calls and text."""

    id_prefix, chunk_object = "chatcmpl-", "chat.completion.chunk"

    def __init__(self, api_request: ApiRequest, model: ServedModel, record: RequestRecord) -> None:
        super().__init__(api_request, model, record)
        self._separates = api_request.reply is not None and api_request.reply.separate
        self._reasoning_tokens = 0

    def usage(self) -> Usage:
        usage = super().usage()
        if self._separates:
            usage.completion_tokens_details = TokenDetails(self._reasoning_tokens)
        return usage

    def full_response(self) -> ChatCompletion | dict[str, Any]:
        finished = self._finished()
        return ChatCompletion(
            choices=[self._choice(*pair) for pair in finished],
            prompt_token_ids=self._prompt_ids(finished[0][0]),
            **self._common(),
        )

    def _choice(self, state: ChoiceState, choice: Choice) -> ChatChoice:
        return ChatChoice(
            index=state.index,
            message=self._message(state, choice),
            seed=state.opened.request.seed,
            finish_reason=self._reason(state, choice),
            logprobs=self._logprobs(choice),
            prompt_logprobs=self._prompt_logprobs(choice) or UNSET,
            token_ids=self._token_ids(choice),
        )

    def _message(self, state: ChoiceState, choice: Choice) -> ChatMessage:
        if self.api_request.reply is None:
            return ChatMessage(choice.text)
        texts, parts = self._by_field(state.parts)
        calls, reasoning = [_tool_call(part) for part in parts], texts.get("reasoning")
        message = ChatMessage(texts.get("content", None if calls or reasoning else ""))
        message.tool_calls = calls or UNSET
        if self._separates and self.api_request.include_reasoning:
            message.reasoning = message.reasoning_content = reasoning
        return message

    def _part(self, state: ChoiceState, output: Output, texts: dict[str, str]) -> ChatChunkChoice:
        first = not state.started
        delta = Delta("" if self.api_request.reply is None else UNSET)
        if "content" in texts:
            delta.content = texts["content"]
        if "reasoning" in texts:
            delta.reasoning = delta.reasoning_content = texts["reasoning"]
        delta.tool_calls = [_tool_call_delta(part) for part in state.calls] or UNSET
        delta.role = "assistant" if first else UNSET
        return ChatChunkChoice(
            index=state.index,
            delta=delta,
            logprobs=self._logprobs(output),
            seed=state.opened.request.seed if first else UNSET,
            prompt_logprobs=self._prompt_logprobs(output) or UNSET,
        )

    def _read(self, state: ChoiceState, output: Output) -> None:
        if self.api_request.reply is None:
            state.texts = {"content": output.text} if output.text else {}
        elif self.api_request.fields.stream:
            state.texts, state.calls = self._by_field(self._parts(state, output))
        else:
            state.parts += self._parts(state, output)

    def _parts(self, state: ChoiceState, output: Output) -> list[Part]:
        """Return the parts that an output adds to its reply, and count tokens of thoughts."""
        reply, reader = self.api_request.reply, state.reader
        if reply is None:
            return [output.text] if output.text else []
        if reader is None:
            prompt_end = self._model.prompt_end(state.opened.request.prompt)
            reader = state.reader = ReplyReader(reply, prompt_end)
        parts: list[Part] = []
        for piece, _ in zip_longest(output.pieces, output.token_ids, fillvalue=""):
            thinking = reader.in_thought
            parts += reader.push(piece)
            self._reasoning_tokens += thinking or reader.in_thought
        parts += reader.push(output.text[sum(map(len, output.pieces)) :])
        if output.finished is None:
            return parts
        return parts + reader.finish(cut=output.finished.finish_reason is not FinishReason.STOP)

    def _by_field(self, parts: list[Part]) -> tuple[dict[str, str], list[ToolCallPart]]:
        """Return the texts by field, and the pieces of tool calls."""
        texts: dict[str, list[str]] = {}
        calls: list[ToolCallPart] = []
        for part in parts:
            if isinstance(part, ToolCallPart):
                add_part(calls, part)
            elif not isinstance(part, Thought):
                texts.setdefault("content", []).append(part)
            elif self.api_request.include_reasoning:
                texts.setdefault("reasoning", []).append(part)
        return {kind: "".join(pieces) for kind, pieces in texts.items()}, calls

    def _reason(self, state: ChoiceState, choice: Choice) -> str:
        """Return the finish reason. It is `tool_calls` after complete calls, also forced calls."""
        reader = state.reader
        if choice.finish_reason is FinishReason.STOP and reader is not None and reader.complete:
            return "tool_calls"
        return choice.finish_reason.value

    def _first_extra(self, state: ChoiceState) -> bytes:
        ids = self._prompt_ids(state)
        return b"" if isinstance(ids, UnsetType) else b',"prompt_token_ids":' + encode(ids)

    def _logprobs(self, part: Output | Choice) -> ChatLogprobs | None:
        if part.logprobs is None:
            return None
        return ChatLogprobs.of(part.logprobs, self._model.decode, self._model.token_bytes)


def _tool_call(part: ToolCallPart) -> ToolCall:
    """Convert a piece that holds a complete call."""
    return ToolCall(part.id or "", FunctionCall(part.arguments, part.name or UNSET))


def _tool_call_delta(part: ToolCallPart) -> ToolCallDelta:
    function = FunctionCall(part.arguments, part.name or UNSET)
    if part.id is None:
        return ToolCallDelta(part.call, function)
    return ToolCallDelta(part.call, function, part.id, "function")
