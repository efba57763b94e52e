"""Responses of OpenAI's Responses API. A complete response is stored."""

from __future__ import annotations

import time
from typing import Any

from msgspec import to_builtins

from cbatch.server.protocol.response_items import encrypted, qualified
from cbatch.server.protocol.responses_request import (
    ENCRYPTED,
    REPEATED,
    RESPONSES_NAMES,
    ResponsesCall,
)
from cbatch.server.serving.blocks import ReplyBlock, ReplyBlocks, named_event
from cbatch.server.serving.replies import PING, Replies, encode
from cbatch.text.outputs import Output

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
