"""Builds replies as successive blocks (thoughts, texts and tool calls), for APIs whose responses
and streams consist of blocks."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Literal

from cbatch.server.protocol.model import ServedModel
from cbatch.server.protocol.requests import ApiRequest
from cbatch.server.serving.chat_builder import ChatBuilder
from cbatch.server.serving.request_record import RequestRecord
from cbatch.server.serving.response_builder import ChoiceState, encode
from cbatch.text.forced_tools import ToolCallPart
from cbatch.text.outputs import Output
from cbatch.text.reply_reader import Thought

BlockKind = Literal["thought", "text", "call"]


class ReplyBlock:
    """A block of a reply, number `index`. `pieces` join to its text, or to a call's arguments.
    `call_id` and `name` are those of a call."""

    def __init__(self, kind: BlockKind, index: int, call_id: str = "", name: str = "") -> None:
        self.kind, self.index, self.call_id, self.name = kind, index, call_id, name
        self.pieces: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class BlockBuilder(ChatBuilder):
    """A response of one choice as blocks. A stream has events at the start and the end of the
    response and of each block, and for each piece of a block."""

    chunk_object = ""

    def __init__(self, api_request: ApiRequest, model: ServedModel, record: RequestRecord) -> None:
        super().__init__(api_request, model, record)
        self._blocks: list[ReplyBlock] = []
        self._pending: list[bytes] = []  # events that were not sent yet
        self._started = False

    def event(self, position: int, output: Output) -> bytes:
        self.take(position, output)
        if output.finished is not None:
            self._pending.append(self._start_once())
        events, self._pending = b"".join(self._pending), []
        return events

    def last_event(self) -> bytes:
        if self._blocks:
            self._pending.append(self._end_block(self._blocks[-1]))
        return b"".join([*self._pending, self._end()])

    @property
    def _finish_reason(self) -> str:
        """The reason why the finished reply ended, as in a chat completion."""
        return self._reason(self._choices[0], self._final_choices[0])

    def _read(self, state: ChoiceState, output: Output) -> None:
        for part in self._parts(state, output):
            if isinstance(part, ToolCallPart):
                if part.id is not None:
                    self._begin("call", part.id, part.name or "")
                self._add(part.arguments)
            elif not isinstance(part, Thought):
                self._add_to("text", part)
            elif self.api_request.include_reasoning:
                self._add_to("thought", str(part))

    def _add_to(self, kind: BlockKind, text: str) -> None:
        """Add text to the last block if it is of this kind, otherwise to a new block."""
        if text and (not self._blocks or self._blocks[-1].kind != kind):
            self._begin(kind)
        self._add(text)

    def _begin(self, kind: BlockKind, call_id: str = "", name: str = "") -> None:
        ended = self._blocks[-1:]
        self._blocks.append(ReplyBlock(kind, len(self._blocks), call_id, name))
        if self.api_request.fields.stream:
            before = [self._start_once(), *map(self._end_block, ended)]
            self._pending += [*before, self._begin_block(self._blocks[-1])]

    def _add(self, text: str) -> None:
        if not text:
            return
        self._blocks[-1].pieces.append(text)
        if self.api_request.fields.stream:
            self._pending.append(self._delta(self._blocks[-1], text))

    def _start_once(self) -> bytes:
        started, self._started = self._started, True
        return b"" if started else self._start()

    @abstractmethod
    def _start(self) -> bytes:
        """Return the first events of a stream."""

    @abstractmethod
    def _begin_block(self, block: ReplyBlock) -> bytes: ...

    @abstractmethod
    def _delta(self, block: ReplyBlock, text: str) -> bytes: ...

    @abstractmethod
    def _end_block(self, block: ReplyBlock) -> bytes: ...

    @abstractmethod
    def _end(self) -> bytes:
        """Return the last events of a stream, after its last block."""


def named_event(name: str, /, **members: Any) -> bytes:
    """Return a server-sent event whose data has the event's name as its type."""
    data = encode({"type": name, **members})
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"
