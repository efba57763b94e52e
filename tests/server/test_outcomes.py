"""How requests end that are refused, wait too long, or cannot be run."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import pytest

from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import Request
from cbatch.core.scheduler.scheduler import Scheduler
from cbatch.process.client import EngineClient
from cbatch.server.serving.admission_queue import Limits
from cbatch.server.serving.prompts import PromptReader
from cbatch.server.serving.service import EngineService
from cbatch.text import ChatTemplate
from tests.process.factories import SimFactory
from tests.process.threads import EngineThread
from tests.server.http_client import (
    CHAT,
    COMPLETIONS,
    Client,
    sample,
    serving,
    serving_service,
    wait_until,
)
from tests.toy_engine import TOKENIZER, make_engine

PROMPT = "def add(a, b):"


TEMPLATE = ChatTemplate("[{{ messages[0].content }}]", {}, "the test")


BODY = {"prompt": PROMPT, "max_tokens": 20, "seed": 5}


LONG = BODY | {"max_tokens": 400, "stream": True}


STREAM = pytest.mark.parametrize("stream", [False, True])


ENVOY = "x-envoy-expected-rq-timeout-ms"


class Scene(NamedTuple):
    client: Client
    service: EngineService
    scheduler: Scheduler


@contextlib.contextmanager
def one_slot(limits: Limits) -> Iterator[Scene]:
    sizes = {"max_num_seqs": 1, "num_blocks": 512}
    # Steps are so long that a call has the slot until it leaves, on a busy machine too.
    core = SimFactory(vocab_size=TOKENIZER.vocab_size, step_s=0.02, sizes=sizes)()
    core.grammars = None
    link = EngineClient(partial(EngineThread, core))
    service = EngineService(link, TOKENIZER, limits=limits)
    with serving_service(service, TOKENIZER, chat_template=TEMPLATE) as client:
        yield Scene(client, service, core.scheduler)


def test_rejections_of_the_queue_are_counted_by_reason() -> None:
    """One request has the slot and one is queued; then only the bound on prompt tokens is
    reached."""
    limits = Limits(max_queued_requests=2, max_queued_prompt_tokens=40)
    with one_slot(limits) as (client, service, _), client.running(LONG), client.begin(LONG):
        wait_until(lambda: service.queue.num_requests == 1)
        assert client.post(BODY | {"prompt": [1] * 40})[0] == 503
        with client.begin(LONG):
            wait_until(lambda: service.queue.num_requests == 2)
            messages = [{"role": "user", "content": PROMPT}]
            for path in ("/v1/completions", CHAT):
                status, answer, headers = client.post(BODY | {"messages": messages}, path)
                assert status == 503 and int(headers["retry-after"]) >= 1
                assert answer["error"]["type"] == "overloaded"
            assert sample(client, "cbatch:queued_requests") == 2
        for reason, count in (("queued_prompt_tokens", 1), ("queued_requests", 2)):
            assert sample(client, "vllm:admission_rejections_total", reason=reason) == count


def test_a_prompt_is_not_rendered_before_it_has_a_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither template nor tokenizer runs for a call that the queue rejects: a chat, or a truncated
    prompt."""
    made: list[int] = []  # prompt tokens that were reserved at that time
    limits = Limits(max_queued_prompt_tokens=100)
    with one_slot(limits) as (client, service, _):
        run = PromptReader.run

        async def watched(*args: Any) -> Any:
            made.append(service.queue.num_prompt_tokens)
            return await run(*args)

        monkeypatch.setattr(PromptReader, "run", watched)
        chat = {"messages": [{"role": "user", "content": "a" * 200}], "max_tokens": 1}
        cut = {"prompt": "a" * 200, "truncate_prompt_tokens": 5, "max_tokens": 1}
        with client.running(LONG), client.begin(LONG):
            wait_until(lambda: service.queue.num_requests == 1)
            for path, body in ((CHAT, chat), ("/v1/completions", cut)):
                assert client.post(body, path)[0] == 503
        assert not made
        wait_until(lambda: not service.queue.num_requests)
        for path, body in ((CHAT, chat), ("/v1/completions", cut)):
            assert client.post(body, path)[0] == 200
        assert len(made) == 2 and min(made) >= 200, "tokenized without a reserved place"
        wait_until(lambda: service.queue.num_prompt_tokens == 0)


@STREAM
def test_a_call_that_waits_too_long_for_a_slot_is_rejected(stream: bool) -> None:
    """A stream has begun by then, so an event says it."""
    calls = [(COMPLETIONS, BODY), (CHAT, BODY | chat_of(PROMPT))]
    with (
        one_slot(Limits(queue_timeout_s=1.0)) as (client, _, _),
        client.running(LONG) as first,
        ThreadPoolExecutor(len(calls)) as pool,
    ):
        for status, error, headers in pool.map(
            lambda call: outcome(client, call[1] | {"stream": stream}, call[0]), calls
        ):
            assert status == (200 if stream else 503) and error["type"] == "overloaded"
            assert stream or int(headers["retry-after"]) >= 1
        assert first.read().endswith(b"data: [DONE]\n\n"), "a request with a slot continues"


@STREAM
def test_the_timeout_of_a_call(stream: bool) -> None:
    """The status is 408 if the call is not streamed; an error event ends a stream. The server's own
    limit gives 504."""
    body, expected = BODY | {"stream": stream}, 200 if stream else 408
    with one_slot(Limits(timeout_s=30)) as (client, service, _), client.running(LONG) as first:
        wait_until(lambda: service.queue.num_requests == 0)
        status, error, _ = outcome(client, body | {"timeout": 0.2})
        assert (status, error["type"]) == (expected, "timeout")
        assert "0.2 s is over" in error["message"]
        with client.open(body, headers={ENVOY: "150"}) as response:
            assert response.status == expected and b"0.15 s is over" in response.read()
        for wrong in ({"timeout": 0}, {"timeout": "1"}, {"timeout": 1e9}):
            status, answer, _ = client.post(body | wrong)
            assert (status, answer["error"]["param"]) == (400, "timeout")
        with client.open(body, headers={ENVOY: "soon"}) as response:
            assert response.status == 400 and ENVOY in response.read().decode()
        first.close()
        wait_until(lambda: not service.num_requests)
        with client.open(LONG | {"timeout": 1.0}, headers={ENVOY: "0"}) as response:
            content = response.read().decode()
            assert response.status == 200 and content.endswith("data: [DONE]\n\n")
            assert '"type":"timeout"' in content.split("\n\n")[-3] and content.count("data: ") > 3
        wait_until(lambda: not service.num_requests)


def test_a_client_may_request_short_gaps() -> None:
    with one_slot(Limits()) as (client, service, scheduler):
        with client.running(LONG, headers={"x-slo-itl-ms": "40"}):
            (sequence,) = scheduler.state.sequences.values()
            assert sequence.request.itl_target_s == 0.04
        wait_until(lambda: not service.num_requests)
        for wrong in ("soon", "-1", "1.5"):
            with client.open(BODY, headers={"x-slo-itl-ms": wrong}) as response:
                assert response.status == 400 and "x-slo-itl-ms" in response.read().decode()


def test_the_servers_timeout() -> None:
    with one_slot(Limits(timeout_s=0.3)) as (client, _, _):
        status, answer, _ = client.post(LONG | {"stream": False, "timeout": 9})
        assert (status, answer["error"]["type"]) == (504, "timeout")


def test_a_stopping_server_sends_retry_after() -> None:
    with one_slot(Limits()) as (client, service, _), client.running(LONG) as first:
        draining = client.run(service.drain(7))
        wait_until(lambda: not service.ready)
        for stream in (False, True):
            status, answer, headers = client.post(BODY | {"stream": stream})
            assert status == 503 and "stopping" in answer["error"]["message"]
            assert 1 <= int(headers["retry-after"]) <= 7
        first.close()
        draining.result(timeout=30)


def outcome(
    client: Client, body: dict[str, Any], path: str = COMPLETIONS
) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Return the status, the error (of a stream: in its last event), and the headers."""
    with client.open(body, path) as response:
        headers = {name.lower(): value for name, value in response.getheaders()}
        raw = response.read().decode()
    if response.status == 200 and body.get("stream"):
        *_, raw, done, _ = raw.split("\n\n")
        assert done == "data: [DONE]"
    return response.status, json.loads(raw.removeprefix("data: "))["error"], headers


def chat_of(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


USER = [{"role": "user", "content": "def add(a, b):"}]


CALLS = {
    "/v1/completions": {"prompt": "def add(a, b):", "max_tokens": 8},
    "/v1/chat/completions": {"messages": USER, "max_tokens": 8},
    "/v1/responses": {"input": USER, "max_output_tokens": 8},
    "/v1/messages": {"messages": USER, "max_tokens": 8},
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
