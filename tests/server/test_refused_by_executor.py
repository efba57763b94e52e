"""A request that only the executor refuses gets an error that names the field, from all APIs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import Request
from cbatch.text import ChatTemplate
from tests.server.http_client import Client, serving
from tests.toy_engine import make_engine

CHAT = [{"role": "user", "content": "def add(a, b):"}]
CALLS = {
    "/v1/completions": {"prompt": "def add(a, b):", "max_tokens": 8},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 8},
    "/v1/responses": {"input": CHAT, "max_output_tokens": 8},
    "/v1/messages": {"messages": CHAT, "max_tokens": 8},
}


def check(request: Request) -> None:
    if request.params.top_k == 7:
        raise FieldError("top_k", "7 is refused by this device", "use 8")


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    engine = make_engine(max_model_len=256)
    vars(engine.core.executor)["check"] = check
    template = ChatTemplate("{{ messages[0].content }}", {}, "the test")
    with serving(engine, chat_template=template) as client:
        yield client


REFUSAL = "top_k: 7 is refused by this device; use 8"


@pytest.mark.parametrize("path", CALLS)
def test_it_ends_with_400_and_the_next_is_served(client: Client, path: str) -> None:
    body: dict[str, Any] = CALLS[path]
    status, answer, _ = client.post(body | {"top_k": 7}, path)
    assert status == 400, answer
    assert answer["error"]["type"] == "invalid_request_error"
    assert REFUSAL in answer["error"]["message"]
    assert client.post(body | {"top_k": 8}, path)[0] == 200


@pytest.mark.parametrize("path", CALLS)
def test_a_stream_that_has_begun_ends_with_the_error(client: Client, path: str) -> None:
    """The head of a stream is sent before the executor has seen the request."""
    body: dict[str, Any] = CALLS[path] | {"stream": True}
    with client.open(body | {"top_k": 7}, path) as response:
        events = response.read().decode()
    assert REFUSAL in events
    assert "invalid_request_error" in events or "invalid_prompt" in events
    with client.open(body | {"top_k": 8}, path) as response:
        assert response.status == 200 and REFUSAL not in response.read().decode()
