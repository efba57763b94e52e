"""Encoders of the Responses API and of the Messages API. A reply is successive blocks: thoughts,
texts and tool calls."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Literal

import msgspec
from msgspec import to_builtins

from cbatch.server.protocol.anthropic_request import ANTHROPIC_NAMES
from cbatch.server.protocol.errors import anthropic_error
from cbatch.server.protocol.responses_request import (
    ENCRYPTED,
    REPEATED,
    RESPONSES_NAMES,
    ResponsesCall,
    encrypted,
    qualified,
)
from cbatch.server.serving.replies import PING, Replies, encode
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
    data = encode({"type": name, **members})
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


_DELTAS = {
    "thought": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}
SIGNATURE = "cbatch"  # of every thinking block; clients send it back, and nothing checks it


class MessagesEncoder:
    id_prefix, new_ids, field_names = "msg_", False, ANTHROPIC_NAMES
    ping = named_event("ping")

    def __init__(self, replies: Replies) -> None:
        self.replies, self._blocks, self._started = replies, ReplyBlocks(replies), False

    def take(self, position: int, output: Output) -> None:
        for _ in self._blocks.read(position, output):
            pass

    def full_response(self) -> dict[str, Any]:
        content = [_block(block) for block in self._blocks]
        return {**self._head(), "content": content, **self._stop(), "usage": self._counts()}

    def first_events(self) -> bytes:
        return b""

    def event(self, position: int, output: Output) -> bytes:
        events = b"".join([self._event(*step) for step in self._blocks.read(position, output)])
        if self._started or not (events or output.finished):
            return events
        self._started = True
        start = {**self._head(), "usage": self._counts()}
        return named_event("message_start", message=start) + events

    def last_event(self) -> bytes:
        delta = named_event("message_delta", delta=self._stop(), usage=self._counts())
        return delta + named_event("message_stop")

    def error_event(self, body: dict[str, Any]) -> bytes:
        status = 400 if body["error"]["type"] == "invalid_request_error" else 500
        return named_event("error", **anthropic_error(status, body))

    def _event(self, step: str, block: ReplyBlock, text: str) -> bytes:
        index, thinks = block.index, block.kind == "thought"
        if step == "begin":
            empty = _block(block) | ({"signature": ""} if thinks else {})
            return named_event("content_block_start", index=index, content_block=empty)
        if step == "delta":
            kind, member = _DELTAS[block.kind]
            delta = {"type": kind, member: text}
            return named_event("content_block_delta", index=index, delta=delta)
        delta = {"type": "signature_delta", "signature": SIGNATURE}
        signed = named_event("content_block_delta", index=index, delta=delta) if thinks else b""
        return signed + named_event("content_block_stop", index=index)

    def _head(self) -> dict[str, Any]:
        head = {"id": self.replies.api_request.id, "type": "message", "role": "assistant"}
        rest: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        return head | {"model": self.replies.model.name} | rest

    def _stop(self) -> dict[str, Any]:
        """Return why the message ended. A text that is shorter than `max_tokens` filled the
        context."""
        ((_, final),) = self.replies.finished()
        sequence, reason = final.stop_string, "end_turn"
        if self._blocks.reason == "tool_calls":
            reason, sequence = "tool_use", None
        elif sequence is not None:
            reason = "stop_sequence"
        elif self._blocks.reason == "length":
            limit = self.replies.api_request.params.max_tokens
            whole = self.replies.completion_tokens >= limit
            reason = "max_tokens" if whole else "model_context_window_exceeded"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _counts(self) -> dict[str, Any]:
        replies = self.replies
        cached = replies.usage().prompt_tokens_details.cached_tokens
        counts: dict[str, Any] = {
            "input_tokens": replies.prompt_tokens - cached,  # the rest of the prompt
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": replies.completion_tokens,
        }
        if replies.separates:
            counts["output_tokens_details"] = {"thinking_tokens": replies.thought_tokens}
        return counts


def _block(block: ReplyBlock) -> dict[str, Any]:
    if block.kind == "thought":
        return {"type": "thinking", "thinking": block.text, "signature": SIGNATURE}
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    arguments: dict[str, Any] = {}  # of a call that was cut off
    with suppress(msgspec.DecodeError):
        arguments = msgspec.json.decode(block.text, type=dict[str, Any])
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": arguments}


# By the kind of a block: the prefix of ids, and the beginning of the names of its own events.
_KINDS = {
    "thought": ("rs", "reasoning_text"),
    "text": ("msg", "output_text"),
    "call": ("fc", "function_call_arguments"),
}
# Members of every response, with their defaults.
_FIXED = {"object": "response", "background": False, "truncation": "disabled", "output": []}
_FIXED |= dict.fromkeys(("error", "incomplete_details", "usage"))


class ResponsesEncoder:
    id_prefix, ping, field_names = "resp_", PING, RESPONSES_NAMES
    new_ids = True  # clients may repeat an id, and a stored response must not replace another

    def __init__(self, replies: Replies) -> None:
        self.replies, self._blocks, self._started = replies, ReplyBlocks(replies), False
        assert isinstance(replies.api_request.origin, ResponsesCall)
        self._call = replies.api_request.origin
        # Names and namespaces of functions, by their names in a chat.
        self._functions = {
            qualified(tool.name, str(each.name)): {"name": each.name, "namespace": tool.name}
            for tool in self._call.tools
            for each in tool.tools or ()
        }
        self._num_events = 0

    def take(self, position: int, output: Output) -> None:
        for _ in self._blocks.read(position, output):
            pass

    def full_response(self) -> dict[str, Any]:
        """Return the response, and store it unless the client does not want that."""
        cut = self._blocks.reason == "length"
        response = self._response("incomplete" if cut else "completed") | {
            "output": [self._item(block) for block in self._blocks],
            "usage": self._counts(),
            "seed": self.replies.opened[0].request.seed,
        }
        if cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            response["completed_at"] = int(time.time())
        if self._call.responses is not None:
            new = {item["id"]: encode(item) for item in response["output"]}
            items, named = (*self._call.items, *new.values()), self._call.named_items | new
            self._call.responses.keep(response["id"], encode(response), items, named)
        return response

    def first_events(self) -> bytes:
        if self._started:
            return b""
        self._started = True
        response = self._response("in_progress")
        created = self._event("created", response=response)
        return created + self._event("in_progress", response=response)

    def event(self, position: int, output: Output) -> bytes:
        events = b""
        for step in self._blocks.read(position, output):
            events += self.first_events() + self._step(*step)
        return events + self.first_events() if output.finished else events

    def last_event(self) -> bytes:
        response = self.full_response()
        return self._event(response["status"], response=response)

    def error_event(self, body: dict[str, Any]) -> bytes:
        error = body["error"]
        kind = "invalid_prompt" if error["type"] == "invalid_request_error" else "server_error"
        error = {"code": error["code"] or kind, "message": error["message"]}
        return self._event("failed", response=self._response("failed") | {"error": error})

    def _step(self, step: str, block: ReplyBlock, text: str) -> bytes:
        if step == "delta":
            return self._own_event("delta", block, delta=text)
        item = self._item(block, "in_progress" if step == "begin" else None)
        if step == "begin":
            member = "arguments" if block.kind == "call" else "content"
            parts, item[member] = item[member], "" if block.kind == "call" else []
            events = self._event("output_item.added", output_index=block.index, item=item)
            if block.kind != "call":
                events += self._block_event("content_part.added", block, part=parts[0])
            return events
        if block.kind == "call":
            events = self._own_event("done", block, arguments=block.text, name=item["name"])
        else:
            events = self._own_event("done", block, text=block.text)
            events += self._block_event("content_part.done", block, part=item["content"][0])
        return events + self._event("output_item.done", output_index=block.index, item=item)

    def _event(self, name: str, /, **members: Any) -> bytes:
        self._num_events += 1
        number = self._num_events - 1
        return named_event(f"response.{name}", sequence_number=number, **members)

    def _block_event(self, name: str, block: ReplyBlock, /, **members: Any) -> bytes:
        where = {"item_id": self._item_id(block), "output_index": block.index}
        if block.kind != "call":
            where["content_index"] = 0
        return self._event(name, **where, **members)

    def _own_event(self, name: str, block: ReplyBlock, /, **members: Any) -> bytes:
        if block.kind == "text":
            members["logprobs"] = []
        return self._block_event(f"{_KINDS[block.kind][1]}.{name}", block, **members)

    def _item_id(self, block: ReplyBlock) -> str:
        unique = self.replies.api_request.id.removeprefix(self.id_prefix)
        return f"{_KINDS[block.kind][0]}_{unique}_{block.index}"

    def _item(self, block: ReplyBlock, status: str | None = None) -> dict[str, Any]:
        """Return an output item. Its default status is that of a finished block, and the last block
        of a reply that was cut is incomplete."""
        if status is None:
            cut = block is self._blocks[-1] and self._blocks.reason == "length"
            status = "incomplete" if cut else "completed"
        item: dict[str, Any] = {"id": self._item_id(block), "status": status}
        if block.kind == "call":
            names = self._functions.get(block.name, {"name": block.name})
            item |= {"type": "function_call", "call_id": block.call_id, **names}
            return item | {"arguments": block.text}
        if block.kind == "text":
            part = {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}
            return item | {"type": "message", "role": "assistant", "content": [part]}
        part = {"type": "reasoning_text", "text": block.text}
        item |= {"type": "reasoning", "summary": [], "content": [part]}
        wants_encrypted = ENCRYPTED in self._call.fields.include
        return item | {"encrypted_content": encrypted(block.text) if wants_encrypted else None}

    def _response(self, status: str) -> dict[str, Any]:
        """Return the response without what only its end shows."""
        sent, params = self._call.sent, self.replies.api_request.params
        return {
            "id": self.replies.api_request.id,
            **_FIXED,
            "created_at": self.replies.created,
            "status": status,
            "model": self.replies.model.name,
            "temperature": params.temperature,
            "top_p": params.top_p,
            **{name: sent.get(name, default) for name, default in REPEATED.items()},
        }

    def _counts(self) -> dict[str, Any]:
        usage = self.replies.usage()
        details = to_builtins(usage.prompt_tokens_details) | {"cache_write_tokens": 0}
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": details,
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self.replies.thought_tokens},
            "total_tokens": usage.total_tokens,
        }
