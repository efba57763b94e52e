"""Encoders of completions and chats: complete responses, and the chunks of streams."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET

from cbatch.server.protocol.responses import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    CompletionChoice,
    CompletionLogprobs,
    CompletionResponse,
    Delta,
    FunctionCall,
    StreamChunk,
    ToolCall,
    ToolCallDelta,
)
from cbatch.server.protocol.translation import FieldNames
from cbatch.server.serving.replies import PING, ChoiceState, Encoder, Replies, Update, encode
from cbatch.text.forced_tools import ToolCallPart, add_part
from cbatch.text.outputs import Choice, Output, TokenLogprob
from cbatch.text.reply_reader import Done, ReplyPart, Thought

_DONE = b"data: [DONE]\n\n"


def event_of(data: StreamChunk | dict[str, Any]) -> bytes:
    return b"data: " + encode(data) + b"\n\n"


class ChunkEncoder(Encoder):
    """What completions and chats share: streams of chunks, whose `object` is `kind`."""

    kind: str
    new_ids, ping, field_names = False, PING, FieldNames()

    def __init__(self, replies: Replies) -> None:
        options = replies.api_request.fields.stream_options
        self.replies = replies
        self._continuous = bool(options.continuous_usage_stats)
        self._no_usage = None if options.include_usage else UNSET
        self._only_text = not (self._continuous or replies.has_token_data)

    def first_events(self) -> bytes:
        return b""

    def event_of_part(
        self, update: Update, part: CompletionChoice | ChatChunkChoice, **more: Any
    ) -> bytes:
        """Return the event for a choice's part of one output."""
        choice, output, parts = update
        part.finish_reason = update.reason
        part.token_ids = self.replies.token_ids(output)
        usage = self.replies.usage() if self._continuous else self._no_usage
        chunk = self._chunk([part], usage=usage, **more)
        if choice.started and len(parts) == 1 and isinstance(parts[0], str) and self._only_text:
            choice.plain[type(parts[0])] = chunk
        choice.started = True
        return event_of(chunk)

    def _chunk(self, choices: list[Any], **more: Any) -> StreamChunk:
        replies = self.replies
        head = (replies.api_request.id, self.kind, replies.created, replies.model.name)
        return StreamChunk(*head, choices, **more)

    def last_event(self) -> bytes:
        """Return the end of the stream, with usage and metrics if requested."""
        replies = self.replies
        if not replies.api_request.include_usage:
            return _DONE
        wants_metrics = replies.api_request.fields.return_metrics
        metrics = replies.record.report() if wants_metrics else UNSET
        return event_of(self._chunk([], usage=replies.usage(), metrics=metrics)) + _DONE

    def error_event(self, body: dict[str, Any]) -> bytes:
        return event_of(body) + _DONE


class CompletionEncoder(ChunkEncoder):
    id_prefix, kind = "cmpl-", "text_completion"

    def take(self, position: int, output: Output) -> None:
        self.replies.take(position, output)

    def event(self, position: int, output: Output) -> bytes:
        update = self.replies.take(position, output)
        choice, output, parts = update
        if len(parts) == 1 and (chunk := choice.plain.get(type(parts[0]))):
            chunk.choices[0].text = output.text
            return event_of(chunk)
        echoes = self.replies.api_request.echo and not choice.started
        if not (output.text or echoes or output.finished or self.replies.has_token_data):
            return b""
        return self.event_of_part(update, self._part(choice, output, echo=echoes))

    def full_response(self) -> CompletionResponse:
        choices, echo = [], self.replies.api_request.echo
        for choice, final in self.replies.finished():
            choices.append(self._part(choice, final, echo=echo))
            choices[-1].finish_reason = final.finish_reason.value
            choices[-1].token_ids = self.replies.token_ids(final)
        return CompletionResponse(choices=choices, **self.replies.common())

    def _part(self, choice: ChoiceState, part: Output | Choice, *, echo: bool) -> CompletionChoice:
        return CompletionChoice(
            index=choice.index,
            text=self._prompt_text(choice) + part.text if echo else part.text,
            seed=choice.opened.request.seed,
            logprobs=self._logprobs(choice, part),
            prompt_logprobs=self.replies.prompt_logprobs(part),
            prompt_token_ids=self.replies.prompt_ids(choice),
        )

    def _prompt_text(self, choice: ChoiceState) -> str:
        prompt = self.replies.api_request.prompts[choice.position]
        if isinstance(prompt, str):
            return prompt
        return "".join(text or "" for text in self._prompt_texts(choice))

    def _prompt_texts(self, choice: ChoiceState) -> list[str | None]:
        request, ids = self.replies.api_request, choice.opened.request.prompt
        prompt = request.prompts[choice.position]
        text = prompt if isinstance(prompt, str) else None
        return self.replies.model.token_texts(ids, request.params, text)

    def _logprobs(self, choice: ChoiceState, part: Output | Choice) -> CompletionLogprobs | None:
        """Return the new tokens' log probabilities; with `echo`, the prompt's come first."""
        if part.logprobs is None:
            return None
        entries: list[TokenLogprob | None] = list(part.logprobs)
        ids, texts = list(part.token_ids), []
        if self.replies.api_request.echo and part.prompt_logprobs is not None:
            entries = [*part.prompt_logprobs, *entries]
            ids = [*choice.opened.request.prompt, *ids]
            texts = self._prompt_texts(choice)
        decode = self.replies.model.decode
        lists = CompletionLogprobs.of(entries, ids, decode, choice.end_offset, texts)
        choice.end_offset = max(choice.end_offset, lists.end_offset)
        return lists


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
