"""Encoder of chats: messages, and deltas of thoughts, tool calls and text."""

from __future__ import annotations

from msgspec import UNSET

from cbatch.server.protocol.responses import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    Delta,
    FunctionCall,
    ToolCall,
    ToolCallDelta,
)
from cbatch.server.serving.replies import ChoiceState, ChunkEncoder, Replies, event_of
from cbatch.text.forced_tools import ToolCallPart, add_part
from cbatch.text.outputs import Choice, Output
from cbatch.text.reply_reader import Done, ReplyPart, Thought


class ChatEncoder(ChunkEncoder):
    id_prefix, kind = "chatcmpl-", "chat.completion.chunk"

    def __init__(self, replies: Replies) -> None:
        super().__init__(replies)
        self._parts: dict[int, list[ReplyPart]] = {}  # of whole replies, by choice

    def take(self, position: int, output: Output) -> None:
        choice, _, parts = self.replies.take(position, output)
        self._parts.setdefault(choice.index, []).extend(parts)

    def event(self, position: int, output: Output) -> bytes:
        update = self.replies.take(position, output)
        choice, output, parts = update
        if len(parts) == 1 and (chunk := choice.plain.get(type(parts[0]))):
            shown, delta = str(parts[0]), chunk.choices[0].delta
            if isinstance(parts[0], Thought):
                delta.reasoning = delta.reasoning_content = shown
            else:
                delta.content = shown
            return event_of(chunk)
        text, thought, calls = self._by_field(parts)
        said = text is not None or thought is not None or calls
        if not (said or output.finished or self.replies.has_token_data):
            return b""
        first, delta = not choice.started, Delta()
        if text is not None or self.replies.api_request.reply is None:
            delta.content = text or ""
        if thought is not None:
            delta.reasoning = delta.reasoning_content = thought
        delta.role = "assistant" if first else UNSET
        delta.tool_calls = [_tool_call_delta(part) for part in calls] or UNSET
        part = ChatChunkChoice(
            index=choice.index,
            delta=delta,
            logprobs=self._logprobs(output),
            seed=choice.opened.request.seed if first else UNSET,
            prompt_logprobs=self.replies.prompt_logprobs(output) or UNSET,
        )
        return self.event_of_part(update, part, prompt_token_ids=self.replies.prompt_ids(choice))

    def full_response(self) -> ChatCompletion:
        finished = self.replies.finished()
        return ChatCompletion(
            choices=[self._choice(*pair) for pair in finished],
            prompt_token_ids=self.replies.prompt_ids(finished[0][0]),
            **self.replies.common(),
        )

    def _choice(self, choice: ChoiceState, final: Choice) -> ChatChoice:
        *parts, done = self._parts[choice.index]
        assert isinstance(done, Done)
        return ChatChoice(
            index=choice.index,
            message=self._message(parts),
            seed=choice.opened.request.seed,
            finish_reason=done.reason,
            logprobs=self._logprobs(final),
            prompt_logprobs=self.replies.prompt_logprobs(final) or UNSET,
            token_ids=self.replies.token_ids(final),
        )

    def _message(self, parts: list[ReplyPart]) -> ChatMessage:
        text, thought, calls = self._by_field(parts)
        message = ChatMessage(text)
        if text is None and not (calls or thought):
            message.content = ""
        message.tool_calls = [_tool_call(part) for part in calls] or UNSET
        if self.replies.separates and self.replies.api_request.include_reasoning:
            message.reasoning = message.reasoning_content = thought
        return message

    def _by_field(
        self, parts: list[ReplyPart]
    ) -> tuple[str | None, str | None, list[ToolCallPart]]:
        """Return the text, the thought, and the pieces of tool calls; None: no such part."""
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[ToolCallPart] = []
        for part in parts:
            if isinstance(part, ToolCallPart):
                add_part(calls, part)
            elif isinstance(part, Thought):
                if self.replies.api_request.include_reasoning:
                    thoughts.append(part)
            elif isinstance(part, str):
                texts.append(part)
        return "".join(texts) if texts else None, "".join(thoughts) if thoughts else None, calls

    def _logprobs(self, part: Output | Choice) -> ChatLogprobs | None:
        if part.logprobs is None:
            return None
        model = self.replies.model
        return ChatLogprobs.of(part.logprobs, model.decode, model.token_bytes)


def _tool_call(part: ToolCallPart) -> ToolCall:
    return ToolCall(part.id or "", FunctionCall(part.arguments, part.name or UNSET))


def _tool_call_delta(part: ToolCallPart) -> ToolCallDelta:
    function = FunctionCall(part.arguments, part.name or UNSET)
    if part.id is None:
        return ToolCallDelta(part.call, function)
    return ToolCallDelta(part.call, function, part.id, "function")
