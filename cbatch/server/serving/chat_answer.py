"""Answers to chats: messages and deltas of thoughts, tool calls and text."""

from __future__ import annotations

from itertools import zip_longest

from msgspec import UNSET, UnsetType

from cbatch.core.request.request import FinishReason
from cbatch.server.protocol.forced_tools import CallPart, add_part
from cbatch.server.protocol.logprobs import ChatLogprobs
from cbatch.server.protocol.model import ServedModel
from cbatch.server.protocol.reply_reader import Part, ReplyReader, Thought
from cbatch.server.protocol.requests import Call
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
from cbatch.server.serving.answer import Answer, Reply, encode
from cbatch.server.serving.metrics import Meter
from cbatch.text.outputs import Choice, Output


class ChatAnswer(Answer[ChatChunkChoice]):
    """An answer whose replies are read to thoughts, tool calls and text."""

    id_prefix, chunk_object = "chatcmpl", "chat.completion.chunk"

    def __init__(self, call: Call, model: ServedModel, meter: Meter) -> None:
        super().__init__(call, model, meter)
        self._separates = call.reply is not None and call.reply.separate
        self._reasoning_tokens = 0

    def usage(self) -> Usage:
        usage = super().usage()
        if self._separates:
            usage.completion_tokens_details = TokenDetails(self._reasoning_tokens)
        return usage

    def whole(self) -> ChatCompletion:
        finished = self._finished()
        return ChatCompletion(
            choices=[self._choice(*each) for each in finished],
            prompt_token_ids=self._prompt_ids(finished[0][0]),
            **self._common(),
        )

    def _choice(self, progress: Reply, choice: Choice) -> ChatChoice:
        return ChatChoice(
            index=progress.index,
            message=self._message(progress, choice),
            seed=progress.stream.accepted.seed,
            finish_reason=self._reason(progress, choice),
            logprobs=self._logprobs(choice),
            prompt_logprobs=self._prompt_logprobs(choice) or UNSET,
            token_ids=self._token_ids(choice),
        )

    def _message(self, progress: Reply, choice: Choice) -> ChatMessage:
        if self.call.reply is None:
            return ChatMessage(choice.text)
        texts, parts = self._by_field(progress.parts)
        calls, reasoning = [_tool_call(part) for part in parts], texts.get("reasoning")
        message = ChatMessage(texts.get("content", None if calls or reasoning else ""))
        message.tool_calls = calls or UNSET
        if self._separates and self.call.include_reasoning:
            message.reasoning = message.reasoning_content = reasoning
        return message

    def _part(self, progress: Reply, output: Output, texts: dict[str, str]) -> ChatChunkChoice:
        first = not progress.begun
        delta = Delta("" if self.call.reply is None else UNSET)
        if "content" in texts:
            delta.content = texts["content"]
        if "reasoning" in texts:
            delta.reasoning = delta.reasoning_content = texts["reasoning"]
        delta.tool_calls = [_tool_call_delta(part) for part in progress.calls] or UNSET
        delta.role = "assistant" if first else UNSET
        return ChatChunkChoice(
            index=progress.index,
            delta=delta,
            logprobs=self._logprobs(output),
            seed=progress.stream.accepted.seed if first else UNSET,
            prompt_logprobs=self._prompt_logprobs(output) or UNSET,
        )

    def _read(self, progress: Reply, output: Output) -> None:
        reply = self.call.reply
        if reply is None:
            progress.texts = {"content": output.text} if output.text else {}
            return
        reader = progress.reader
        if reader is None:
            prompt_end = self._model.prompt_end(progress.stream.accepted.prompt_token_ids)
            reader = progress.reader = ReplyReader(reply, prompt_end)
        parts: list[Part] = []
        for piece, _ in zip_longest(output.pieces, output.token_ids, fillvalue=""):
            thinking = reader.in_thought
            parts += reader.push(piece)
            self._reasoning_tokens += thinking or reader.in_thought
        parts += reader.push(output.text[sum(map(len, output.pieces)) :])
        parts += () if output.finished is None else reader.finish()
        if self.call.fields.stream:
            progress.texts, progress.calls = self._by_field(parts)
        else:
            progress.parts += parts

    def _by_field(self, parts: list[Part]) -> tuple[dict[str, str], list[CallPart]]:
        """Return the texts by field, and the parts of calls."""
        texts: dict[str, list[str]] = {}
        calls: list[CallPart] = []
        for part in parts:
            if isinstance(part, CallPart):
                add_part(calls, part)
            elif not isinstance(part, Thought):
                texts.setdefault("content", []).append(part)
            elif self.call.include_reasoning:
                texts.setdefault("reasoning", []).append(part)
        return {kind: "".join(pieces) for kind, pieces in texts.items()}, calls

    def _reason(self, progress: Reply, choice: Choice) -> str:
        """`tool_calls` where they are complete, also of a named function: clients look for it."""
        reader = progress.reader
        if choice.finish_reason is FinishReason.STOP and reader is not None and reader.complete:
            return "tool_calls"
        return choice.finish_reason.value

    def _first_extra(self, progress: Reply) -> bytes:
        ids = self._prompt_ids(progress)
        return b"" if isinstance(ids, UnsetType) else b',"prompt_token_ids":' + encode(ids)

    def _logprobs(self, part: Output | Choice) -> ChatLogprobs | None:
        if part.logprobs is None:
            return None
        return ChatLogprobs.of(part.logprobs, self._model.decode, self._model.token_bytes)


def _tool_call(part: CallPart) -> ToolCall:
    """Of a part that is the whole of its call."""
    return ToolCall(part.id or "", FunctionCall(part.arguments, part.name or UNSET))


def _tool_call_delta(part: CallPart) -> ToolCallDelta:
    function = FunctionCall(part.arguments, part.name or UNSET)
    if part.id is None:
        return ToolCallDelta(part.call, function)
    return ToolCallDelta(part.call, function, part.id, "function")
