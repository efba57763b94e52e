"""Requests of all APIs without a server, and the prompts that they become."""

from __future__ import annotations

import json
from typing import Any

from cbatch.server.protocol.anthropic_request import parse_count, parse_messages
from cbatch.server.protocol.fields import ApiRequest, PendingPrompt
from cbatch.server.protocol.requests import parse_chat, parse_completion
from cbatch.server.protocol.response_store import ResponseStore
from cbatch.server.protocol.responses_request import parse_responses
from tests.server.apis import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from tests.server.http_client import toy_model
from tests.server.scripted import QWEN

COUNT = f"{MESSAGES}/count_tokens"
PARSERS: dict[str, Any] = {
    COMPLETIONS: parse_completion,
    CHAT: parse_chat,
    RESPONSES: lambda raw, model: parse_responses(raw, model, ResponseStore(2**20, 60).of(None)),
    MESSAGES: parse_messages,
    COUNT: parse_count,
}
TEMPLATE = """\
{% for t in tools or [] %}<{{ t.function.name }}:{{ t.function.parameters | tojson }}>\
{% endfor %}{% for m in messages %}[{{ m.role }}]{{ m.content }}\
{% if m.reasoning %}({{ m.reasoning }}){% endif %}\
{% for c in m.tool_calls or [] %}!{{ c.id }}:{{ c.function.name }}:\
{{ c.function.arguments | tojson }}{% endfor %}\
{% if m.tool_call_id %}={{ m.tool_call_id }}{% endif %}{% endfor %}\
{{ enable_thinking }}{{ reasoning_effort }}{{ mark }}"""


def model(template: str = TEMPLATE, **options: Any) -> Any:
    parsers = {"reasoning_parser": "qwen3", "tool_parser": "hermes"}
    return toy_model(template, **({"tokenizer": QWEN} | parsers | options))


def read(path: str, body: dict[str, Any], template: str = TEMPLATE, **options: Any) -> ApiRequest:
    request: ApiRequest = PARSERS[path](json.dumps(body).encode(), model(template, **options))
    return request


def ids_of(request: ApiRequest) -> list[int]:
    (prompt,) = request.prompts
    assert isinstance(prompt, PendingPrompt)
    return list(prompt.make())


def prompt_of(request: ApiRequest) -> str:
    return QWEN.decode(ids_of(request), skip_special_tokens=False)
