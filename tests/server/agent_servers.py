"""Servers for the clients of agents: a scripted model with thoughts and calls, and a toy engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from cbatch.server.protocol.errors import ServiceError
from cbatch.server.protocol.requests import ApiRequest
from cbatch.server.serving.open_request import OpenRequest
from cbatch.text import ChatTemplate
from tests.server.http_client import Client, serving_service
from tests.server.scripted import ScriptedService, tokenizer_with

QWEN = tokenizer_with(
    ["<think>", "</think>", "<tool_call>", "</tool_call>"], ["<|im_start|>", "<|im_end|>"]
)
TEMPLATE = ChatTemplate(
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ m.reasoning }}"
    "{% for c in m.tool_calls or [] %}{{ c.id }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{{ m.tool_call_id }}{% endfor %}[assistant]",
    {},
    "the test",
)
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
CUT_ERROR = ServiceError("it broke")


class FailingService(ScriptedService):
    """A scripted service; a request ends with `error` after its first output, if that is set, or
    before any output if `at_once`. `prompt` is the text of the last prompt."""

    error: ServiceError | None = None
    at_once = False
    prompt = ""

    async def submit(self, api_request: ApiRequest) -> AsyncIterator[OpenRequest]:
        if self.error is not None:
            self.max_steps = 0 if self.at_once else 1
        async for opened in super().submit(api_request):
            ids = list(opened.request.prompt)
            self.prompt = self.tokenizer.decode(ids, skip_special_tokens=False)
            opened.cached_tokens = 3
            if self.error is not None:
                opened.fail(self.error)
            yield opened


class Scripted(NamedTuple):
    service: Any
    client: Client

    def restore(self) -> None:
        """Forget the script of a test."""
        kept = ("tokenizer", "queue", "model")
        self.service.__dict__ = {name: self.service.__dict__[name] for name in kept}


@contextmanager
def scripted_server(**options: Any) -> Iterator[Scripted]:
    service: Any = FailingService(QWEN)
    parsers: Any = {"reasoning_parser": "qwen3", "tool_parser": "hermes"}
    options = {"chat_template": TEMPLATE} | parsers | options
    with serving_service(service, QWEN, **options) as client:
        yield Scripted(service, client)
