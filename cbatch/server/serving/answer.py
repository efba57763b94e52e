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
from cbatch.server.protocol.forced_tools import CallPart
from cbatch.server.protocol.logprobs import CompletionLogprobs, prompt_logprobs
from cbatch.server.protocol.model import ServedModel
from cbatch.server.protocol.reply_reader import Part, ReplyReader
from cbatch.server.protocol.requests import Call
from cbatch.server.protocol.responses import (
    ChatChunkChoice,
    CompletionChoice,
    CompletionResponse,
    PromptLogprobs,
    Usage,
)
from cbatch.server.serving.call import OutputStream
from cbatch.server.serving.metrics import Meter, SequenceTimes
from cbatch.text.outputs import Choice, Output, TokenLogprob

DONE = b"data: [DONE]\n\n"
encode = msgspec.json.Encoder().encode
AnyChoice = TypeVar("AnyChoice", CompletionChoice, ChatChunkChoice)


class Reply:
    """One choice on its way. `position` is that of its prompt in the call."""

    def __init__(
        self, index: int, position: int, stream: OutputStream, times: SequenceTimes
    ) -> None:
        self.index, self.position, self.stream, self.times = index, position, stream, times
        self.begun = False  # whether something of it was sent
        # Of the last output: texts that are not empty, by kind, and parts of calls.
        self.texts: dict[str, str] = {}
        self.calls: list[CallPart] = []
        self.frames: dict[str, list[bytes]] = {}  # around the text of an event, by its kind
        self.reader: ReplyReader | None = None
        self.parts: list[Part] = []  # of the whole reply, unless it is streamed
        self.end_offset = 0  # of the text whose log probabilities were told


class Answer(ABC, Generic[AnyChoice]):
    """What has been completed so far, over the prompts and choices of one call."""

    id_prefix: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, call: Call, model: ServedModel, meter: Meter) -> None:
        self.call, self._model, self._meter = call, model, meter
        self.id = f"{self.id_prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._streams: list[OutputStream] = []
        self._progress: dict[int, Reply] = {}
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
        self._only_text = not (self._tells_tokens or self._continuous)

    def open(self, stream: OutputStream) -> None:
        """The prompts' streams, in order, before any output."""
        self._streams.append(stream)
        prompt_tokens = len(stream.accepted.prompt_token_ids)
        self._prompt_tokens += prompt_tokens
        num_choices, max_tokens = stream.accepted.num_choices, self.call.params.max_tokens
        self._meter.open(prompt_tokens, num_choices, max_tokens)

    def take(self, position: int, output: Output) -> Reply:
        """Counts what a choice brought. `position` is the prompt's. Raises `GenerationError` where
        the choice ended with one."""
        output = self._shown(output)
        stream, done = self._streams[position], output.finished
        index = position * stream.accepted.num_choices + output.index
        progress = self._progress.get(index)
        if progress is None:
            progress = Reply(index, position, stream, self._meter.begin())
            self._progress[index] = progress
        self._completion_tokens += len(output.token_ids)
        self._meter.observe(progress.times, output, stream.admitted_s)
        if done is not None:
            if done.finish_reason is FinishReason.ERROR:
                if done.error == NO_TOKEN_MESSAGE:
                    raise UnanswerableError(done.error)
                raise GenerationError(done.error or "the request failed")
            self._done[index] = done
        self._read(progress, output)
        return progress

    def event(self, position: int, output: Output) -> bytes:
        """The event that tells of it; empty where there is nothing to tell yet."""
        output = self._shown(output)
        progress, done = self.take(position, output), output.finished
        if self._only_text and progress.begun and done is None and not progress.calls:
            if not progress.texts:
                return b""
            if len(progress.texts) == 1:
                ((kind, text),) = progress.texts.items()
                frame = progress.frames.get(kind) or self._frame(progress, output, kind)
                return encode(text).join(frame)
        texts = progress.texts
        if not progress.begun and self.call.echo:
            texts = {"text": self._prompt_text(progress) + output.text}
        if not (texts or progress.calls) and done is None and not self._tells_tokens:
            return b""
        part = self._part(progress, output, texts)
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
    def _part(self, progress: Reply, output: Output, texts: dict[str, str]) -> AnyChoice: ...

    @abstractmethod
    def _read(self, progress: Reply, output: Output) -> None:
        """Set the texts and calls of `progress` to what the output adds."""

    def _reason(self, progress: Reply, choice: Choice) -> str:
        return choice.finish_reason.value

    def _first_extra(self, progress: Reply) -> bytes:
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

    def _frame(self, progress: Reply, output: Output, kind: str) -> list[bytes]:
        """Return what is around the text of this event, and of later ones of its kind."""
        first, *between, last = encode(self._part(progress, output, {kind: ""})).split(b'""')
        progress.frames[kind] = [self._head + first, *between, last + self._tail]
        return progress.frames[kind]

    def _chunk(self, choice: bytes, extra: bytes) -> bytes:
        if self._continuous:
            extra += b',"usage":' + encode(self.usage())
        if extra:
            return self._head + choice + b"]" + extra + b"}\n\n"
        return self._head + choice + self._tail

    def _finished(self) -> list[tuple[Reply, Choice]]:
        return [(self._progress[index], self._done[index]) for index in sorted(self._done)]

    def _prompt_text(self, progress: Reply) -> str:
        prompt = self.call.prompts[progress.position]
        if isinstance(prompt, str):
            return prompt
        return "".join(each or "" for each in self._prompt_texts(progress))

    def _prompt_texts(self, progress: Reply) -> list[str | None]:
        """What each token of the prompt adds to the text that is echoed."""
        prompt, accepted = self.call.prompts[progress.position], progress.stream.accepted
        text = prompt if isinstance(prompt, str) else None
        return self._model.token_texts(accepted.prompt_token_ids, self.call.params, text)

    def _prompt_logprobs(self, part: Output | Choice) -> PromptLogprobs | None:
        found = part.prompt_logprobs
        return None if found is None else prompt_logprobs(found, self._model.decode)

    def _prompt_ids(self, progress: Reply) -> list[int] | UnsetType:
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

    def _choice(self, progress: Reply, choice: Choice) -> CompletionChoice:
        text = self._prompt_text(progress) + choice.text if self.call.echo else choice.text
        made = self._part(progress, choice, {"text": text})
        made.finish_reason, made.token_ids = choice.finish_reason.value, self._token_ids(choice)
        return made

    def _read(self, progress: Reply, output: Output) -> None:
        progress.texts = {"text": output.text} if output.text else {}

    def _part(
        self, progress: Reply, part: Output | Choice, texts: dict[str, str]
    ) -> CompletionChoice:
        return CompletionChoice(
            index=progress.index,
            text=texts.get("text", ""),
            seed=progress.stream.accepted.seed,
            logprobs=self._logprobs(progress, part),
            prompt_logprobs=self._prompt_logprobs(part),
            prompt_token_ids=self._prompt_ids(progress),
        )

    def _logprobs(self, progress: Reply, part: Output | Choice) -> CompletionLogprobs | None:
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
