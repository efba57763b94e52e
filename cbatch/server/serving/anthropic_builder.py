"""Builds messages of Anthropic's API."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec

from cbatch.server.protocol.anthropic_request import ANTHROPIC_NAMES
from cbatch.server.protocol.errors import anthropic_error
from cbatch.server.serving.block_builder import BlockBuilder, ReplyBlock, named_event

_DELTAS = {
    "thought": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}
SIGNATURE = "cbatch"  # of every thinking block; clients send it back, and nothing checks it


class AnthropicBuilder(BlockBuilder):
    id_prefix, field_names = "msg_", ANTHROPIC_NAMES
    ping = named_event("ping")

    def full_response(self) -> dict[str, Any]:
        content = [_block(block) for block in self._blocks]
        return {
            **self._head_of_message(),
            "content": content,
            **self._stop(),
            "usage": self._counts(),
        }

    def error_event(self, body: dict[str, Any]) -> bytes:
        status = 400 if body["error"]["type"] == "invalid_request_error" else 500
        return named_event("error", **anthropic_error(status, body))

    def _start(self) -> bytes:
        return named_event(
            "message_start", message={**self._head_of_message(), "usage": self._counts()}
        )

    def _begin_block(self, block: ReplyBlock) -> bytes:
        empty = _block(ReplyBlock(block.kind, block.index, block.call_id, block.name))
        if block.kind == "thought":
            empty["signature"] = ""
        return named_event("content_block_start", index=block.index, content_block=empty)

    def _delta(self, block: ReplyBlock, text: str) -> bytes:
        kind, member = _DELTAS[block.kind]
        delta = {"type": kind, member: text}
        return named_event("content_block_delta", index=block.index, delta=delta)

    def _end_block(self, block: ReplyBlock) -> bytes:
        signed = b""
        if block.kind == "thought":
            delta = {"type": "signature_delta", "signature": SIGNATURE}
            signed = named_event("content_block_delta", index=block.index, delta=delta)
        return signed + named_event("content_block_stop", index=block.index)

    def _end(self) -> bytes:
        delta = named_event("message_delta", delta=self._stop(), usage=self._counts())
        return delta + named_event("message_stop")

    def _head_of_message(self) -> dict[str, Any]:
        head = {"id": self.api_request.id, "type": "message", "role": "assistant"}
        rest: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        return head | {"model": self._model.name} | rest

    def _stop(self) -> dict[str, Any]:
        """Return why the message ended. A text that is shorter than `max_tokens` filled the
        context."""
        sequence, reason = self._final_choices[0].stop_string, "end_turn"
        if self._finish_reason == "tool_calls":
            reason, sequence = "tool_use", None
        elif sequence is not None:
            reason = "stop_sequence"
        elif self._finish_reason == "length":
            whole = self._completion_tokens >= self.api_request.params.max_tokens
            reason = "max_tokens" if whole else "model_context_window_exceeded"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _counts(self) -> dict[str, Any]:
        cached = self.usage().prompt_tokens_details.cached_tokens
        counts: dict[str, Any] = {
            "input_tokens": self._prompt_tokens - cached,  # the rest of the prompt
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self._completion_tokens,
        }
        if self._separates:
            counts["output_tokens_details"] = {"thinking_tokens": self._reasoning_tokens}
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
