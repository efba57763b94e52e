"""Messages of Anthropic's API."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec

from cbatch.server.protocol.anthropic_request import ANTHROPIC_NAMES
from cbatch.server.protocol.errors import anthropic_error
from cbatch.server.serving.blocks import ReplyBlock, ReplyBlocks, named_event
from cbatch.server.serving.replies import Replies
from cbatch.text.outputs import Output

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
