"""Outputs of the engine to what one call is answered with: whole, or as events of a stream."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Generic, TypeVar

import msgspec
from msgspec import UNSET, UnsetType, structs

from cbatch.core.request.request import FinishReason
from cbatch.core.scheduler.committer import NO_TOKEN_MESSAGE
from cbatch.server.protocol.errors import GenerationError, UnanswerableError
from cbatch.server.protocol.forced_tools import CallPart, ToolCallReader
from cbatch.server.protocol.logprobs import ChatLogprobs, CompletionLogprobs, prompt_logprobs
from cbatch.server.protocol.model import ServedModel
from cbatch.server.protocol.requests import Call
from cbatch.server.protocol.responses import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatMessage,
    CompletionChoice,
    CompletionResponse,
    Delta,
    FunctionCall,
    PromptLogprobs,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from cbatch.server.serving.call import OutputStream
from cbatch.server.serving.metrics import Meter, SequenceTimes
from cbatch.text.outputs import Choice, Output, TokenLogprob

DONE = b"data: [DONE]\n\n"
encode = msgspec.json.Encoder().encode
Part = TypeVar("Part", CompletionChoice, ChatChunkChoice)


class _Progress:
    """One choice on its way. `position` is that of its prompt in the call."""

    def __init__(
        self, index: int, position: int, stream: OutputStream, times: SequenceTimes
    ) -> None:
        self.index, self.position, self.stream, self.times = index, position, stream, times
        self.begun = False  # whether something of it was sent
        self.frame: tuple[bytes, bytes] | None = None  # around the text of an event
        self.end_offset = 0  # of the text whose log probabilities were told


class Answer(ABC, Generic[Part]):
    """What has been completed so far, over the prompts and choices of one call."""

    id_prefix: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, call: Call, model: ServedModel, meter: Meter) -> None:
        self.call, self._model, self._meter = call, model, meter
        self.id = f"{self.id_prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._streams: list[OutputStream] = []
        self._progress: dict[int, _Progress] = {}
        self._done: dict[int, Choice] = {}
        self._prompt_tokens = 0
        self._completion_tokens = 0
        head = {"id": self.id, "object": self.chunk_object, "created": self._created}
        self._head = b"data: " + encode(head | {"model": model.name})[:-1] + b',"choices":['
        options = call.fields.stream_options
        self._continuous = bool(options.continuous_usage_stats)
        self._tail = b'],"usage":null}\n\n' if options.include_usage else b"]}\n\n"
        # Chunks without text are sent only where they tell of tokens one by one.
        params = call.params
        tells_logprobs = params.logprobs is not None or params.prompt_logprobs is not None
        self._tells_tokens = tells_logprobs or call.fields.return_token_ids
        # From a choice's second event on nothing changes but the text.
        self._only_text = not (self._tells_tokens or self._continuous or call.call_reader)

    def open(self, stream: OutputStream) -> None:
        """The prompts' streams, in order, before any output."""
        self._streams.append(stream)
        prompt_tokens = len(stream.accepted.prompt_token_ids)
        self._prompt_tokens += prompt_tokens
        num_choices, max_tokens = stream.accepted.num_choices, self.call.params.max_tokens
        self._meter.open(prompt_tokens, num_choices, max_tokens)

    def take(self, position: int, output: Output) -> _Progress:
        """Counts what a choice brought. `position` is the prompt's. Raises `GenerationError` where
        the choice ended with one."""
        output = self._shown(output)
        stream, done = self._streams[position], output.finished
        index = position * stream.accepted.num_choices + output.index
        progress = self._progress.get(index)
        if progress is None:
            progress = _Progress(index, position, stream, self._meter.begin())
            self._progress[index] = progress
        self._completion_tokens += len(output.token_ids)
        self._meter.observe(progress.times, output, stream.admitted_s)
        if done is not None:
            if done.finish_reason is FinishReason.ERROR:
                if done.error == NO_TOKEN_MESSAGE:
                    raise UnanswerableError(done.error)
                raise GenerationError(done.error or "the request failed")
            self._done[index] = done
        return progress

    def event(self, position: int, output: Output) -> bytes:
        """The event that tells of it; empty where there is nothing to tell yet."""
        output = self._shown(output)
        progress, done = self.take(position, output), output.finished
        text = output.text
        if self._only_text and progress.begun and done is None:
            if not text:
                return b""
            before, after = progress.frame or self._frame(progress, output)
            return before + encode(text) + after
        if not progress.begun and self.call.echo:
            text = self._prompt_text(progress) + text
        tells = self._read(progress, text, ends=done is not None)
        if not tells and done is None and not self._tells_tokens:
            return b""
        part = self._part(progress, output, text)
        if done is not None:
            part.finish_reason = self._reason(progress, done)
        if self.call.fields.return_token_ids:
            part.token_ids = list(output.token_ids)
        extra = self._first_extra(progress)
        progress.begun = True
        return self._chunk(encode(part), extra)

    def last_event(self) -> bytes:
        """What belongs to no choice, where that was asked for."""
        if not self.call.include_usage:
            return b""
        extra = b',"usage":' + encode(self.usage())
        if self.call.fields.return_metrics:
            extra += b',"metrics":' + encode(self._meter.report())
        return self._head + b"]" + extra + b"}\n\n"

    def fail(self, error: Exception) -> None:
        """It ends with this, though it has begun."""
        self._meter.error = type(error).__name__

    def usage(self) -> Usage:
        total = self._prompt_tokens + self._completion_tokens
        return Usage(self._prompt_tokens, self._completion_tokens, total)

    @abstractmethod
    def whole(self) -> msgspec.Struct:
        """The answer, once every choice has finished."""

    @abstractmethod
    def _part(self, progress: _Progress, output: Output, text: str) -> Part: ...

    def _read(self, progress: _Progress, text: str, *, ends: bool) -> bool:
        """Takes in what comes next. False: there is nothing in it to be told yet."""
        return bool(text)

    def _reason(self, progress: _Progress, choice: Choice) -> str:
        return choice.finish_reason.value

    def _first_extra(self, progress: _Progress) -> bytes:
        """What a choice's first chunk has beside it."""
        return b""

    def _shown(self, output: Output) -> Output:
        """The output, without the token that was made for a prompt alone."""
        done = output.finished
        if not self.call.prompt_only or (done and done.finish_reason is FinishReason.ERROR):
            return output
        none: dict[str, Any] = {"text": "", "token_ids": ()}
        if output.logprobs is not None:
            none["logprobs"] = ()
        if done is not None:
            done = structs.replace(done, **none, finish_reason=FinishReason.LENGTH)
        return structs.replace(output, **none, finished=done)

    def _frame(self, progress: _Progress, output: Output) -> tuple[bytes, bytes]:
        """What stands before and after the text of this event and of those that follow."""
        before, _, after = encode(self._part(progress, output, "")).partition(b'""')
        progress.frame = self._head + before, after + self._tail
        return progress.frame

    def _chunk(self, choice: bytes, extra: bytes) -> bytes:
        if self._continuous:
            extra += b',"usage":' + encode(self.usage())
        if extra:
            return self._head + choice + b"]" + extra + b"}\n\n"
        return self._head + choice + self._tail

    def _finished(self) -> list[tuple[_Progress, Choice]]:
        return [(self._progress[index], self._done[index]) for index in sorted(self._done)]

    def _prompt_text(self, progress: _Progress) -> str:
        prompt = self.call.prompts[progress.position]
        if isinstance(prompt, str):
            return prompt
        return "".join(each or "" for each in self._prompt_texts(progress))

    def _prompt_texts(self, progress: _Progress) -> list[str | None]:
        """What each token of the prompt adds to the text that is echoed."""
        prompt = self.call.prompts[progress.position]
        if not isinstance(prompt, str):
            prompt = progress.stream.accepted.prompt_token_ids
        return self._model.token_texts(prompt, self.call.params)

    def _prompt_logprobs(self, part: Output | Choice) -> PromptLogprobs | None:
        found = part.prompt_logprobs
        return None if found is None else prompt_logprobs(found, self._model.decode)

    def _prompt_ids(self, progress: _Progress) -> list[int] | UnsetType:
        """As a choice begins, on request."""
        if progress.begun or not self.call.fields.return_token_ids:
            return UNSET
        return list(progress.stream.accepted.prompt_token_ids)

    def _token_ids(self, choice: Choice) -> list[int] | UnsetType:
        return list(choice.token_ids) if self.call.fields.return_token_ids else UNSET

    def _common(self) -> dict[str, Any]:
        """Fields of a whole answer."""
        wanted = self.call.fields.return_metrics
        return {
            "id": self.id,
            "created": self._created,
            "model": self._model.name,
            "usage": self.usage(),
            "metrics": self._meter.report() if wanted else UNSET,
        }


class CompletionAnswer(Answer[CompletionChoice]):
    id_prefix, chunk_object = "cmpl", "text_completion"

    def whole(self) -> CompletionResponse:
        return CompletionResponse(
            choices=[self._choice(*each) for each in self._finished()], **self._common()
        )

    def _choice(self, progress: _Progress, choice: Choice) -> CompletionChoice:
        text = self._prompt_text(progress) + choice.text if self.call.echo else choice.text
        made = self._part(progress, choice, text)
        made.finish_reason, made.token_ids = choice.finish_reason.value, self._token_ids(choice)
        return made

    def _part(self, progress: _Progress, part: Output | Choice, text: str) -> CompletionChoice:
        return CompletionChoice(
            index=progress.index,
            text=text,
            seed=progress.stream.accepted.seed,
            logprobs=self._logprobs(progress, part),
            prompt_logprobs=self._prompt_logprobs(part),
            prompt_token_ids=self._prompt_ids(progress),
        )

    def _logprobs(self, progress: _Progress, part: Output | Choice) -> CompletionLogprobs | None:
        """Of the new tokens; with `echo` those of the prompt come before the first."""
        if part.logprobs is None:
            return None
        found: list[TokenLogprob | None] = list(part.logprobs)
        ids, texts = list(part.token_ids), []
        if self.call.echo and part.prompt_logprobs is not None:
            found = [*part.prompt_logprobs, *found]
            ids = [*progress.stream.accepted.prompt_token_ids, *ids]
            texts = self._prompt_texts(progress)
        made = CompletionLogprobs.of(found, ids, self._model.decode, progress.end_offset, texts)
        progress.end_offset = max(progress.end_offset, made.end_offset)
        return made


class ChatAnswer(Answer[ChatChunkChoice]):
    """Tool calls in a reply are told as these, and what is left of it as its text."""

    id_prefix, chunk_object = "chatcmpl", "chat.completion.chunk"

    def __init__(self, call: Call, model: ServedModel, meter: Meter) -> None:
        super().__init__(call, model, meter)
        self._readers: dict[int, ToolCallReader] = {}  # by the choice's index
        # What the next chunk tells, where calls are looked for.
        self._content: str | None = None
        self._calls: list[CallPart] = []

    def whole(self) -> ChatCompletion:
        finished = self._finished()
        return ChatCompletion(
            choices=[self._choice(*each) for each in finished],
            prompt_token_ids=self._prompt_ids(finished[0][0]),
            **self._common(),
        )

    def _choice(self, progress: _Progress, choice: Choice) -> ChatChoice:
        message = ChatMessage(choice.text)
        if self.call.call_reader is not None:
            self._read(progress, choice.text, ends=True)
            calls = [_tool_call(part) for part in self._calls]
            message = ChatMessage(self._content, tool_calls=calls or UNSET)
        return ChatChoice(
            index=progress.index,
            message=message,
            seed=progress.stream.accepted.seed,
            finish_reason=self._reason(progress, choice),
            logprobs=self._logprobs(choice),
            prompt_logprobs=self._prompt_logprobs(choice) or UNSET,
            token_ids=self._token_ids(choice),
        )

    def _part(self, progress: _Progress, output: Output, text: str) -> ChatChunkChoice:
        first = not progress.begun
        delta = Delta(text)
        if self.call.call_reader is not None:
            parts = [_tool_call_delta(part) for part in self._calls]
            delta = Delta(self._content or UNSET, tool_calls=parts or UNSET)
        delta.role = "assistant" if first else UNSET
        return ChatChunkChoice(
            index=progress.index,
            delta=delta,
            logprobs=self._logprobs(output),
            seed=progress.stream.accepted.seed if first else UNSET,
            prompt_logprobs=self._prompt_logprobs(output) or UNSET,
        )

    def _read(self, progress: _Progress, text: str, *, ends: bool) -> bool:
        if self.call.call_reader is None:
            return bool(text)
        reader = self._readers.get(progress.index)
        if reader is None:
            reader = self._readers[progress.index] = self.call.call_reader()
        parts = [*reader.push(text), *(reader.finish() if ends else ())]
        self._content = "".join(part for part in parts if isinstance(part, str)) or None
        self._calls = [part for part in parts if isinstance(part, CallPart)]
        return bool(parts)

    def _reason(self, progress: _Progress, choice: Choice) -> str:
        """`tool_calls` where they are complete, also of a named function: clients look for it."""
        reader = self._readers.get(progress.index)
        if choice.finish_reason is FinishReason.STOP and reader is not None and reader.complete:
            return "tool_calls"
        return choice.finish_reason.value

    def _first_extra(self, progress: _Progress) -> bytes:
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
