"""Builds the response to one API request from the engine's outputs: whole, or as stream events."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Generic, TypeVar

import msgspec
from msgspec import UNSET, UnsetType, structs

from cbatch.core.request.request import FinishReason
from cbatch.core.scheduler.update_from_output import NO_TOKEN_MESSAGE
from cbatch.server.protocol.errors import GenerationError, UnanswerableError
from cbatch.server.protocol.logprobs import CompletionLogprobs, prompt_logprobs
from cbatch.server.protocol.model import ServedModel
from cbatch.server.protocol.requests import ApiRequest
from cbatch.server.protocol.responses import (
    ChatChunkChoice,
    CompletionChoice,
    CompletionResponse,
    PromptDetails,
    PromptLogprobs,
    Usage,
)
from cbatch.server.protocol.translation import FieldNames
from cbatch.server.serving.open_request import OpenRequest
from cbatch.server.serving.request_record import RequestRecord, SequenceTimes
from cbatch.text.forced_tools import ToolCallPart
from cbatch.text.outputs import Choice, Output, TokenLogprob
from cbatch.text.reply_reader import Part, ReplyReader

DONE = b"data: [DONE]\n\n"
encode = msgspec.json.Encoder().encode
AnyChoice = TypeVar("AnyChoice", CompletionChoice, ChatChunkChoice)


class ChoiceState(SequenceTimes):
    """The state of one choice. `position` is the index of its prompt in the request."""

    def __init__(self, index: int, position: int, opened: OpenRequest) -> None:
        super().__init__()
        self.index, self.position, self.opened = index, position, opened
        self.started = False  # an event of this choice was sent
        # The last output's non-empty texts by field, and its pieces of tool calls.
        self.texts: dict[str, str] = {}
        self.calls: list[ToolCallPart] = []
        self.frames: dict[str, list[bytes]] = {}  # event bytes around the text, by field
        self.reader: ReplyReader | None = None
        self.parts: list[Part] = []  # parts of the whole reply, if not streamed
        self.end_offset = 0  # text offset after the last returned log probabilities


class ResponseBuilder(ABC, Generic[AnyChoice]):
    """Builds one response over all prompts and choices of a request."""

    id_prefix: ClassVar[str]  # with its separator
    new_ids: ClassVar[bool] = False  # False: ids differ as those of HTTP requests do
    chunk_object: ClassVar[str]
    ping: ClassVar[bytes] = b": ping\n\n"  # an event that clients ignore
    field_names: ClassVar[FieldNames] = {}  # names that errors use for fields of a chat

    def __init__(self, api_request: ApiRequest, model: ServedModel, record: RequestRecord) -> None:
        self.api_request, self._model, self.record = api_request, model, record
        self._created = int(time.time())
        self._opened: list[OpenRequest] = []
        self._choices: dict[int, ChoiceState] = {}
        self._final_choices: dict[int, Choice] = {}
        self._prompt_tokens = 0
        self._completion_tokens = 0
        start = {"id": api_request.id, "object": self.chunk_object, "created": self._created}
        self._head = b"data: " + encode(start | {"model": model.name})[:-1] + b',"choices":['
        options = api_request.fields.stream_options
        self._continuous = bool(options.continuous_usage_stats)
        self._tail = b'],"usage":null}\n\n' if options.include_usage else b"]}\n\n"
        # True if each chunk has data of its tokens. Chunks without text are then sent, too.
        params = api_request.params
        has_logprobs = params.logprobs is not None or params.prompt_logprobs is not None
        self._has_token_data = has_logprobs or api_request.fields.return_token_ids
        # True if a choice's events after the first differ only in their text.
        self._only_text = not (self._has_token_data or self._continuous)

    def open(self, opened: OpenRequest) -> None:
        """Add the next prompt. Call this for all prompts before any output."""
        self._opened.append(opened)
        self._prompt_tokens += len(opened.request.prompt)
        self.record.open(opened)

    def first_events(self) -> bytes:
        """Return the events to send before the first output, if any."""
        return b""

    def take(self, position: int, output: Output) -> ChoiceState:
        """Count a choice's output, and return the state of the choice. `position` is the index of
        its prompt. Raises `GenerationError` if the choice ended with an error."""
        output = self._without_extra_token(output)
        opened, done = self._opened[position], output.finished
        index = position * opened.num_choices + output.index
        state = self._choices.get(index)
        if state is None:
            state = self._choices[index] = ChoiceState(index, position, opened)
        self._completion_tokens += len(output.token_ids)
        self.record.observe(state, output, opened.admitted_s)
        if done is not None:
            if done.finish_reason is FinishReason.ERROR:
                if done.error and (done.is_refused or done.error == NO_TOKEN_MESSAGE):
                    raise UnanswerableError(done.error)
                raise GenerationError(done.error or "the request failed")
            self._final_choices[index] = done
        self._read(state, output)
        return state

    def event(self, position: int, output: Output) -> bytes:
        """Return the event of an output; empty if there is nothing to send yet."""
        output = self._without_extra_token(output)
        state, done = self.take(position, output), output.finished
        if self._only_text and state.started and done is None and not state.calls:
            if not state.texts:
                return b""
            if len(state.texts) == 1:
                ((kind, text),) = state.texts.items()
                frame = state.frames.get(kind) or self._frame(state, output, kind)
                return encode(text).join(frame)
        texts = state.texts
        if not state.started and self.api_request.echo:
            texts = {"text": self._prompt_text(state) + output.text}
        if not (texts or state.calls) and done is None and not self._has_token_data:
            return b""
        part = self._part(state, output, texts)
        if done is not None:
            part.finish_reason = self._reason(state, done)
        if self.api_request.fields.return_token_ids:
            part.token_ids = list(output.token_ids)
        extra = self._first_extra(state)
        state.started = True
        return self._chunk(encode(part), extra)

    def last_event(self) -> bytes:
        """Return the end of the stream, with usage and metrics if requested."""
        if not self.api_request.include_usage:
            return DONE
        extra = b',"usage":' + encode(self.usage())
        if self.api_request.fields.return_metrics:
            extra += b',"metrics":' + encode(self.record.report())
        return self._head + b"]" + extra + b"}\n\n" + DONE

    def error_event(self, body: dict[str, Any]) -> bytes:
        """Return the end of a stream that failed. `body` is the body of an error response."""
        return b"data: " + encode(body) + b"\n\n" + DONE

    def usage(self) -> Usage:
        total = self._prompt_tokens + self._completion_tokens
        details = PromptDetails(sum(opened.cached_tokens for opened in self._opened))
        return Usage(self._prompt_tokens, self._completion_tokens, total, details)

    @abstractmethod
    def full_response(self) -> msgspec.Struct | dict[str, Any]:
        """Return the complete response, after every choice has finished."""

    @abstractmethod
    def _part(self, state: ChoiceState, output: Output, texts: dict[str, str]) -> AnyChoice: ...

    @abstractmethod
    def _read(self, state: ChoiceState, output: Output) -> None:
        """Set the texts and tool calls of `state` to what the output adds."""

    def _reason(self, state: ChoiceState, choice: Choice) -> str:
        return choice.finish_reason.value

    def _first_extra(self, state: ChoiceState) -> bytes:
        """Return additional fields of the event with a choice's first chunk."""
        return b""

    def _without_extra_token(self, output: Output) -> Output:
        """Return the output without the token that was generated only to process a prompt."""
        done = output.finished
        if not self.api_request.prompt_only or (done and done.finish_reason is FinishReason.ERROR):
            return output
        none: dict[str, Any] = {"text": "", "token_ids": ()}
        if output.logprobs is not None:
            none["logprobs"] = ()
        if done is not None:
            done = structs.replace(done, **none, finish_reason=FinishReason.LENGTH)
        return structs.replace(output, **none, finished=done)

    def _frame(self, state: ChoiceState, output: Output, kind: str) -> list[bytes]:
        """Return the bytes around the text, which all later events of the same field share."""
        first, *between, last = encode(self._part(state, output, {kind: ""})).split(b'""')
        state.frames[kind] = [self._head + first, *between, last + self._tail]
        return state.frames[kind]

    def _chunk(self, choice: bytes, extra: bytes) -> bytes:
        if self._continuous:
            extra += b',"usage":' + encode(self.usage())
        if extra:
            return self._head + choice + b"]" + extra + b"}\n\n"
        return self._head + choice + self._tail

    def _finished(self) -> list[tuple[ChoiceState, Choice]]:
        return [
            (self._choices[index], choice) for index, choice in sorted(self._final_choices.items())
        ]

    def _prompt_text(self, state: ChoiceState) -> str:
        prompt = self.api_request.prompts[state.position]
        if isinstance(prompt, str):
            return prompt
        return "".join(text or "" for text in self._prompt_texts(state))

    def _prompt_texts(self, state: ChoiceState) -> list[str | None]:
        """Return what each token of the prompt adds to the echoed text."""
        prompt, ids = self.api_request.prompts[state.position], state.opened.request.prompt
        text = prompt if isinstance(prompt, str) else None
        return self._model.token_texts(ids, self.api_request.params, text)

    def _prompt_logprobs(self, part: Output | Choice) -> PromptLogprobs | None:
        logprobs = part.prompt_logprobs
        return None if logprobs is None else prompt_logprobs(logprobs, self._model.decode)

    def _prompt_ids(self, state: ChoiceState) -> list[int] | UnsetType:
        """Return the prompt's token ids for a choice's first chunk, if requested."""
        if state.started or not self.api_request.fields.return_token_ids:
            return UNSET
        return list(state.opened.request.prompt)

    def _token_ids(self, choice: Choice) -> list[int] | UnsetType:
        return list(choice.token_ids) if self.api_request.fields.return_token_ids else UNSET

    def _common(self) -> dict[str, Any]:
        """Return the fields that all complete responses share."""
        has_metrics = self.api_request.fields.return_metrics
        return {
            "id": self.api_request.id,
            "created": self._created,
            "model": self._model.name,
            "usage": self.usage(),
            "metrics": self.record.report() if has_metrics else UNSET,
        }


class CompletionBuilder(ResponseBuilder[CompletionChoice]):
    id_prefix, chunk_object = "cmpl-", "text_completion"

    def full_response(self) -> CompletionResponse:
        return CompletionResponse(
            choices=[self._choice(*pair) for pair in self._finished()], **self._common()
        )

    def _choice(self, state: ChoiceState, choice: Choice) -> CompletionChoice:
        text = self._prompt_text(state) + choice.text if self.api_request.echo else choice.text
        response = self._part(state, choice, {"text": text})
        response.finish_reason, response.token_ids = (
            choice.finish_reason.value,
            self._token_ids(choice),
        )
        return response

    def _read(self, state: ChoiceState, output: Output) -> None:
        state.texts = {"text": output.text} if output.text else {}

    def _part(
        self, state: ChoiceState, part: Output | Choice, texts: dict[str, str]
    ) -> CompletionChoice:
        return CompletionChoice(
            index=state.index,
            text=texts.get("text", ""),
            seed=state.opened.request.seed,
            logprobs=self._logprobs(state, part),
            prompt_logprobs=self._prompt_logprobs(part),
            prompt_token_ids=self._prompt_ids(state),
        )

    def _logprobs(self, state: ChoiceState, part: Output | Choice) -> CompletionLogprobs | None:
        """Return the new tokens' log probabilities; with `echo`, the prompt's come first."""
        if part.logprobs is None:
            return None
        entries: list[TokenLogprob | None] = list(part.logprobs)
        ids, texts = list(part.token_ids), []
        if self.api_request.echo and part.prompt_logprobs is not None:
            entries = [*part.prompt_logprobs, *entries]
            ids = [*state.opened.request.prompt, *ids]
            texts = self._prompt_texts(state)
        lists = CompletionLogprobs.of(entries, ids, self._model.decode, state.end_offset, texts)
        state.end_offset = max(state.end_offset, lists.end_offset)
        return lists
