"""Replies as successive blocks: thoughts, texts and tool calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from cbatch.server.serving.replies import Replies, encode
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


class ReplyBlocks(list[ReplyBlock]):
    """The blocks of a request with one choice. `reason` is why it ended, once it has."""

    def __init__(self, replies: Replies) -> None:
        super().__init__()
        self._replies, self.reason = replies, ""

    def read(
        self, position: int, output: Output
    ) -> Iterator[tuple[Literal["begin", "delta", "end"], ReplyBlock, str]]:
        """Yield what an output does to the blocks: it begins or ends one, or adds a text. While the
        end of the last block is yielded, `reason` is set."""
        update = self._replies.take(position, output)
        for part in update.parts:
            kind: BlockKind = "text"
            if isinstance(part, ToolCallPart):
                text = part.arguments
                if part.id is not None:
                    yield from self._begin(ReplyBlock("call", len(self), part.id, part.name or ""))
            elif isinstance(part, str):
                text = str(part)
                if isinstance(part, Thought):
                    if not self._replies.api_request.include_reasoning:
                        continue
                    kind = "thought"
                if not self or self[-1].kind != kind:
                    yield from self._begin(ReplyBlock(kind, len(self)))
            else:
                self.reason = part.reason
                if self:
                    yield "end", self[-1], ""
                continue
            if text:
                self[-1].pieces.append(text)
                yield "delta", self[-1], text

    def _begin(self, block: ReplyBlock) -> Iterator[tuple[Any, ReplyBlock, str]]:
        if self:
            yield "end", self[-1], ""
        self.append(block)
        yield "begin", block, ""


def named_event(name: str, /, **members: Any) -> bytes:
    """Return a server-sent event whose data has the event's name as its type."""
    data = encode({"type": name, **members})
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"
