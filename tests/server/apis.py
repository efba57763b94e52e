"""The APIs as a table: a body for a text, and what a reply says, whole or as a stream whose events
are checked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from tests.server.http_client import CHAT, COMPLETIONS, Client

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
APIS = [COMPLETIONS, CHAT, RESPONSES, MESSAGES]
CHATS = [CHAT, RESPONSES, MESSAGES]  # those with roles, thoughts and calls
USER: Any = {"role": "user", "content": "Rome?"}
SCHEMA: Any = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
FUNCTION: Any = {"name": "f", "parameters": SCHEMA}
TOOLS: dict[str, Any] = {
    CHAT: [{"type": "function", "function": FUNCTION}],
    RESPONSES: [{"type": "function", **FUNCTION}],
    MESSAGES: [{"name": "f", "input_schema": SCHEMA}],
}
Event = dict[str, Any]


def prompt_field(path: str) -> str:
    return {COMPLETIONS: "prompt", RESPONSES: "input"}.get(path, "messages")


def body_of(path: str, text: str = "Rome?", max_tokens: int = 4, **more: Any) -> dict[str, Any]:
    """Return the body of a call with one text of a user."""
    length = "max_output_tokens" if path == RESPONSES else "max_tokens"
    plain = prompt_field(path) != "messages"
    prompt: Any = text if plain else [{"role": "user", "content": text}]
    return {prompt_field(path): prompt, length: max_tokens} | more


class Block(NamedTuple):
    """A thought, a text or a call, with its text or its arguments."""

    kind: str
    text: str
    name: str | None = None


class Reply(NamedTuple):
    blocks: list[Block]
    reason: str
    body: dict[str, Any]

    def of(self, kind: str) -> list[str]:
        return [block.text for block in self.blocks if block.kind == kind]

    @property
    def text(self) -> str:
        return "".join(self.of("text"))


def frames_of(raw: str) -> Iterator[tuple[str, Event]]:
    """Yield name and data of each event of a stream, without comments and pings."""
    *frames, end = raw.split("\n\n")
    assert end == ""
    for frame in frames:
        lines = dict(line.split(": ", 1) for line in frame.split("\n") if not line.startswith(":"))
        if lines and lines.get("event") != "ping" and lines["data"] != "[DONE]":
            yield lines.get("event", ""), json.loads(lines["data"])


def events_of(client: Client, path: str, body: dict[str, Any]) -> list[Event]:
    """Return the events of a stream. Events of the newer APIs have their type as their name."""
    with client.open(body | {"stream": True}, path) as response:
        raw = response.read().decode()
        assert response.status == 200, raw
        assert response.getheader("content-type", "").startswith("text/event-stream")
    assert raw.endswith("data: [DONE]\n\n") == (path in (COMPLETIONS, CHAT))
    events = []
    for name, data in frames_of(raw):
        assert name == data.get("type", "")
        events.append(data)
    return events


def reply_of(path: str, body: dict[str, Any]) -> Reply:
    """Return what a response says that is not streamed."""
    blocks = []
    if path in (COMPLETIONS, CHAT):
        choice = body["choices"][0]
        said = choice.get("message") or {"content": choice.get("text")}
        if thought := said.get("reasoning"):
            blocks.append(Block("thought", thought))
        if said["content"]:
            blocks.append(Block("text", said["content"]))
        calls = [each["function"] for each in said.get("tool_calls") or ()]
        blocks += [Block("call", each["arguments"], each["name"]) for each in calls]
        return Reply(blocks, choice["finish_reason"], body)
    kinds = {"reasoning": "thought", "thinking": "thought", "message": "text", "text": "text"}
    for item in body["output" if path == RESPONSES else "content"]:
        kind = kinds.get(item["type"], "call")
        if kind == "call":
            arguments = item["arguments"] if path == RESPONSES else json.dumps(item["input"])
            blocks.append(Block(kind, arguments, item["name"]))
        else:
            text = item["content"][0]["text"] if path == RESPONSES else item[item["type"]]
            blocks.append(Block(kind, text))
    if path == MESSAGES:
        return Reply(blocks, body["stop_reason"], body)
    details = body["incomplete_details"]
    return Reply(blocks, body["status"] + (f" {details['reason']}" if details else ""), body)


def streamed_chunks(events: list[Event]) -> Reply:
    """Return the first choice of a stream. One chunk has the role, and the last the reason."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": []}
    reasons, usage = [], None
    for number, event in enumerate(events):
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            delta = choice.get("delta") or {"content": choice.get("text")}
            assert ("role" in delta) == (number == 0 and "delta" in choice)
            assert delta.get("reasoning") == delta.get("reasoning_content")
            for name in ("content", "reasoning"):
                message[name] += delta.get(name) or ""
            for call in delta.get("tool_calls", ()):
                if call["index"] == len(message["tool_calls"]):
                    message["tool_calls"].append({"function": {"name": None, "arguments": ""}})
                function = message["tool_calls"][call["index"]]["function"]
                function["name"] = function["name"] or call["function"]["name"]
                function["arguments"] += call["function"]["arguments"]
            reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    (reason,) = reasons
    body = {"choices": [{"message": message, "finish_reason": reason}], "usage": usage}
    return reply_of(CHAT, body)


def streamed_response(events: list[Event]) -> Reply:
    """Return the response of a stream, after checking the events that lead to it."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    names = [event["type"].removeprefix("response.") for event in events]
    assert names[:2] == ["created", "in_progress"]
    assert all(event["response"]["status"] == "in_progress" for event in events[:2])
    final, rest = events[-1]["response"], list(zip(names, events, strict=True))[2:-1]
    assert names[-1] == final["status"]
    items: list[dict[str, Any]] = []
    while rest:
        (name, added), rest = rest[0], rest[1:]
        assert (name, added["output_index"]) == ("output_item.added", len(items))
        assert added["item"]["status"] == "in_progress"
        end = next(i for i, (name, _) in enumerate(rest) if name == "output_item.done")
        item = rest[end][1]["item"]
        _check_item(added["item"], item, rest[:end])
        items.append(item)
        rest = rest[end + 1 :]
    assert items == final["output"]
    assert len({item["id"] for item in items}) == len(items)
    return reply_of(RESPONSES, final)


def _check_item(added: dict[str, Any], item: dict[str, Any], events: Any) -> None:
    assert {event["item_id"] for _, event in events} == {added["id"]} == {item["id"]}
    stems = {"message": "output_text", "reasoning": "reasoning_text"}
    stem = stems.get(item["type"], "function_call_arguments")
    names = [name for name, _ in events]
    if item["type"] == "function_call":
        (*deltas, done), text = events, item["arguments"]
        assert added["arguments"] == "" and done[1]["arguments"] == text
    else:
        (_, *deltas, done, ended), text = events, item["content"][0]["text"]
        assert names[0] == "content_part.added" and names[-1] == "content_part.done"
        assert added["content"] == [] and [ended[1]["part"]] == item["content"]
        assert done[1]["text"] == text
    assert done[0] == f"{stem}.done" and {name for name, _ in deltas} <= {f"{stem}.delta"}
    pieces = [event["delta"] for _, event in deltas]
    assert "".join(pieces) == text and all(pieces)


def streamed_message(events: list[Event]) -> Reply:
    """Return the message of a stream, after checking the events that lead to it."""
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    assert events[0]["type"] == "message_start"
    message = events[0]["message"]
    assert message["content"] == [] and message["stop_reason"] is None
    arguments: dict[int, str] = {}
    open_index: int | None = None
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert open_index is None and event["index"] == len(message["content"])
            open_index = event["index"]
            message["content"].append(event["content_block"])
        elif event["type"] == "content_block_stop":
            assert event["index"] == open_index
            open_index = None
        else:
            assert (event["type"], event["index"]) == ("content_block_delta", open_index)
            block, delta = message["content"][-1], event["delta"]
            if delta["type"] == "input_json_delta":
                index = event["index"]
                arguments[index] = arguments.get(index, "") + delta["partial_json"]
            else:
                member = delta["type"].removesuffix("_delta")
                block[member] += delta[member]
    for index, text in arguments.items():
        message["content"][index]["input"] = json.loads(text)
    assert open_index is None
    message |= events[-2]["delta"]
    message["usage"] |= events[-2]["usage"]
    return reply_of(MESSAGES, message)


def ask(client: Client, path: str, body: dict[str, Any], *, stream: bool = False) -> Reply:
    """Return the reply to a call, whole or from a stream whose events are checked."""
    if stream:
        readers = {RESPONSES: streamed_response, MESSAGES: streamed_message}
        if path in (COMPLETIONS, CHAT):
            body = {"stream_options": {"include_usage": True}} | body
        return readers.get(path, streamed_chunks)(events_of(client, path, body))
    status, whole, _ = client.post(body, path)
    assert status == 200, whole
    return reply_of(path, whole)


def error_of(path: str, body: dict[str, Any]) -> tuple[str, str]:
    """Return type and message of an error, which has the format of its API."""
    if path.startswith(MESSAGES):
        assert body.keys() == {"type", "error"} and body["type"] == "error"
        assert body["error"].keys() == {"type", "message"}
    else:
        assert body.keys() == {"error"}
        assert body["error"].keys() == {"message", "type", "param", "code"}
    return body["error"]["type"], body["error"]["message"]
