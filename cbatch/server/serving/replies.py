"""The choices of one API request, as the engine's outputs arrive, and the encoding of completions.

An encoder writes the response of one API: whole, or as events of a stream.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple, Protocol

import msgspec
from msgspec import UNSET, UnsetType, structs

from cbatch.core.request.request import FinishReason
from cbatch.core.scheduler.update_from_output import NO_TOKEN_MESSAGE
from cbatch.server.protocol.errors import GenerationError, UnanswerableError
from cbatch.server.protocol.fields import ApiRequest
from cbatch.server.protocol.model import ServedModel
from cbatch.server.protocol.responses import (
    ChatChunkChoice,
    CompletionChoice,
    CompletionLogprobs,
    CompletionResponse,
    PromptDetails,
    PromptLogprobs,
    StreamChunk,
    TokenDetails,
    Usage,
    prompt_logprobs,
)
from cbatch.server.protocol.translation import FieldNames
from cbatch.server.serving.open_request import OpenRequest
from cbatch.server.serving.request_record import RequestRecord, SequenceTimes
from cbatch.text.outputs import Choice, Output, TokenLogprob
from cbatch.text.reply_reader import Done, ReplyPart, ReplyReader, read_reply

PING = b": ping\n\n"  # an event that clients ignore
_DONE = b"data: [DONE]\n\n"
_DONE = b"data: [DONE]\n\n"
encode = msgspec.json.Encoder().encode


class ChoiceState(SequenceTimes):
    """The state of one choice. `position` is the index of its prompt in the request."""

    def __init__(self, index: int, position: int, opened: OpenRequest) -> None:
        super().__init__()
        self.index, self.position, self.opened = index, position, opened
        self.started = False  # an event of this choice was sent
        self.reader: ReplyReader | None = None  # None: the reply is only text
        self.end_offset = 0  # text offset after the last returned log probabilities
        self.final: Choice | None = None
        # The last chunk with only a text or a thought. The next such chunk differs in that alone.
        self.plain: dict[type, StreamChunk] = {}


class Update(NamedTuple):
    """The parts that one output adds to the reply of a choice, and the output itself."""

    choice: ChoiceState
    output: Output
    parts: list[ReplyPart]

    @property
    def reason(self) -> str | None:
        """The reason why the choice has ended, if it has."""
        last = self.parts[-1] if self.parts else None
        return last.reason if isinstance(last, Done) else None


class Replies:
    """All choices of a request, in order of prompts and choices."""

    def __init__(self, api_request: ApiRequest, model: ServedModel, record: RequestRecord) -> None:
        self.api_request, self.model, self.record = api_request, model, record
        self.created = int(time.time())
        self.opened: list[OpenRequest] = []
        self._choices: dict[int, ChoiceState] = {}
        self.separates = api_request.reply is not None and api_request.reply.separate
        self.prompt_tokens = self.completion_tokens = 0
        # True if each chunk has data of its tokens. Chunks without text are then sent, too.
        params = api_request.params
        has_logprobs = params.logprobs is not None or params.prompt_logprobs is not None
        self.has_token_data = has_logprobs or api_request.fields.return_token_ids

    def open(self, opened: OpenRequest) -> None:
        self.opened.append(opened)
        self.prompt_tokens += len(opened.request.prompt)
        self.record.open(opened)

    def take(self, position: int, output: Output) -> Update:
        """Count a choice's output, and read it. `position` is the index of its prompt. Raises
        `GenerationError` if the choice ended with an error."""
        if self.api_request.prompt_only:
            output = _without_extra_token(output)
        opened, done = self.opened[position], output.finished
        index = position * opened.num_choices + output.index
        choice = self._choices.get(index)
        if choice is None:
            choice = self._choices[index] = ChoiceState(index, position, opened)
            if self.api_request.reply is not None:
                prompt_end = self.model.prompt_end(opened.request.prompt)
                choice.reader = ReplyReader(self.api_request.reply, prompt_end)
        self.completion_tokens += len(output.token_ids)
        self.record.observe(choice, output, opened.admitted_s)
        if done is not None:
            if done.finish_reason is FinishReason.ERROR:
                if done.error and (done.is_refused or done.error == NO_TOKEN_MESSAGE):
                    raise UnanswerableError(done.error)
                raise GenerationError(done.error or "the request failed")
            choice.final = done
        if choice.reader is not None:
            return Update(choice, output, [part for part, _ in read_reply(output, choice.reader)])
        parts: list[ReplyPart] = [output.text] if output.text else []
        if done is not None:
            parts.append(Done(done.finish_reason.value))
        return Update(choice, output, parts)

    def finished(self) -> list[tuple[ChoiceState, Choice]]:
        return [(s, s.final) for _, s in sorted(self._choices.items()) if s.final is not None]

    @property
    def thought_tokens(self) -> int:
        readers = [choice.reader for choice in self._choices.values()]
        return sum(reader.thought_tokens for reader in readers if reader is not None)

    def usage(self) -> Usage:
        total = self.prompt_tokens + self.completion_tokens
        details = PromptDetails(sum(opened.cached_tokens for opened in self.opened))
        thoughts = TokenDetails(self.thought_tokens) if self.separates else UNSET
        return Usage(self.prompt_tokens, self.completion_tokens, total, details, thoughts)

    def prompt_logprobs(self, part: Output | Choice) -> PromptLogprobs | None:
        logprobs = part.prompt_logprobs
        return None if logprobs is None else prompt_logprobs(logprobs, self.model.decode)

    def prompt_ids(self, choice: ChoiceState) -> list[int] | UnsetType:
        if choice.started or not self.api_request.fields.return_token_ids:
            return UNSET
        return list(choice.opened.request.prompt)

    def token_ids(self, part: Output | Choice) -> list[int] | UnsetType:
        return list(part.token_ids) if self.api_request.fields.return_token_ids else UNSET

    def common(self) -> dict[str, Any]:
        has_metrics = self.api_request.fields.return_metrics
        return {
            "id": self.api_request.id,
            "created": self.created,
            "model": self.model.name,
            "usage": self.usage(),
            "metrics": self.record.report() if has_metrics else UNSET,
        }


def _without_extra_token(output: Output) -> Output:
    """Return the output without the token that was generated only to process a prompt."""
    done = output.finished
    if done is not None and done.finish_reason is FinishReason.ERROR:
        return output
    none: dict[str, Any] = {"text": "", "token_ids": ()}
    if output.logprobs is not None:
        none["logprobs"] = ()
    if done is not None:
        done = structs.replace(done, **none, finish_reason=FinishReason.LENGTH)
    return structs.replace(output, **none, finished=done)


class Encoder(Protocol):
    """The form of one API's responses."""

    id_prefix: str  # with its separator
    new_ids: bool  # False: ids differ as those of HTTP requests do
    ping: bytes  # an event that clients ignore
    field_names: FieldNames  # names that errors use for fields of a chat
    replies: Replies

    def __init__(self, replies: Replies) -> None: ...

    def take(self, position: int, output: Output) -> None:
        """Read an output of a response that is not streamed."""

    def full_response(self) -> msgspec.Struct | dict[str, Any]:
        """Return the complete response, after every choice has finished."""

    def first_events(self) -> bytes:
        """Return the events to send before the first output, if any."""

    def event(self, position: int, output: Output) -> bytes:
        """Return the events of an output; empty if there is nothing to send yet."""

    def last_event(self) -> bytes:
        """Return the end of the stream."""

    def error_event(self, body: dict[str, Any]) -> bytes:
        """Return the end of a stream that failed. `body` is the body of an error response."""


def event_of(data: StreamChunk | dict[str, Any]) -> bytes:
    return b"data: " + encode(data) + b"\n\n"


class ChunkEncoder(Encoder):
    """Encoder of streams of chunks, whose `object` is `kind`."""

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
