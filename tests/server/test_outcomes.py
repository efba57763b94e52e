"""How requests end that are refused, wait too long, or cannot be run."""

from __future__ import annotations

import contextlib
import gc
import logging
import signal
import time
from collections.abc import Iterator
from http.client import IncompleteRead
from typing import Any

import pytest

from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import Request
from cbatch.server.serving.admission_queue import Limits
from cbatch.server.serving.prompts import PromptReader
from tests.server.apis import APIS, CHAT, COMPLETIONS, body_of
from tests.server.engines import FIRST_CONTENT, PROMPT, one_slot
from tests.server.http_client import Client, sample, serving, wait_until
from tests.toy_engine import make_engine

BODY = {"prompt": PROMPT, "max_tokens": 20, "seed": 5}
LONG = BODY | {"max_tokens": 400, "stream": True}
STREAM = pytest.mark.parametrize("stream", [False, True])
ENVOY = "x-envoy-expected-rq-timeout-ms"
REJECTIONS = "vllm:admission_rejections_total"


def test_rejections_of_the_queue_are_counted_by_reason() -> None:
    """One request has the slot and one is queued; then only the bound on prompt tokens is
    reached."""
    limits = Limits(max_queued_requests=2, max_queued_prompt_tokens=40)
    with one_slot(limits) as (client, service, _), client.running(LONG), client.begin(LONG):
        wait_until(lambda: service.queue.num_requests == 1)
        assert client.post(BODY | {"prompt": [1] * 40})[0] == 503
        with client.begin(LONG):
            wait_until(lambda: service.queue.num_requests == 2)
            for path in (COMPLETIONS, CHAT):
                status, answer, headers = client.post(body_of(path), path)
                assert status == 503 and int(headers["retry-after"]) >= 1
                assert answer["error"]["type"] == "overloaded"
            assert sample(client, "cbatch:queued_requests") == 2
        for reason, count in (("queued_prompt_tokens", 1), ("queued_requests", 2)):
            assert sample(client, REJECTIONS, reason=reason) == count


def test_a_prompt_is_not_rendered_before_it_has_a_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither template nor tokenizer runs for a call that the queue rejects: a chat, or a truncated
    prompt."""
    made: list[int] = []  # prompt tokens that were reserved at that time
    calls = [(CHAT, body_of(CHAT, "a" * 200, max_tokens=1))]
    calls += [(COMPLETIONS, body_of(COMPLETIONS, "a" * 200, truncate_prompt_tokens=5))]
    with one_slot(Limits(max_queued_prompt_tokens=100)) as (client, service, _):
        run = PromptReader.run

        async def watched(*args: Any) -> Any:
            made.append(service.queue.num_prompt_tokens)
            return await run(*args)

        monkeypatch.setattr(PromptReader, "run", watched)
        with client.running(LONG), client.begin(LONG):
            wait_until(lambda: service.queue.num_requests == 1)
            for path, body in calls:
                assert client.post(body, path)[0] == 503
        assert not made
        wait_until(lambda: not service.queue.num_requests)
        for path, body in calls:
            assert client.post(body, path)[0] == 200
        assert len(made) == 2 and min(made) >= 200, "tokenized without a reserved place"
        wait_until(lambda: service.queue.num_prompt_tokens == 0)


@STREAM
def test_a_call_that_waits_too_long_for_a_slot_is_rejected(stream: bool) -> None:
    """A stream has begun by then, so an event says it."""
    limits = Limits(queue_timeout_s=0.5)
    with one_slot(limits) as (client, _, _), client.running(LONG) as first:
        with client.open(BODY | {"stream": stream}) as response:
            assert response.status == (200 if stream else 503)
            assert stream or int(response.getheader("retry-after", "0")) >= 1
            assert b'"type":"overloaded"' in response.read()
        assert first.read().endswith(b"data: [DONE]\n\n"), "a request with a slot continues"


@STREAM
def test_the_timeout_of_a_call(stream: bool) -> None:
    """The status is 408 if the call is not streamed; an error event ends a stream. The server's own
    limit gives 504."""
    body, expected = BODY | {"stream": stream}, 200 if stream else 408
    with one_slot(Limits(timeout_s=30)) as (client, service, _), client.running(LONG) as first:
        wait_until(lambda: service.queue.num_requests == 0)
        for fields, headers, words in (
            ({"timeout": 0.2}, {}, b"0.2 s is over"),
            ({}, {ENVOY: "150"}, b"0.15 s is over"),
        ):
            with client.open(body | fields, headers=headers) as response:
                raw = response.read()
                assert response.status == expected and words in raw and b'"timeout"' in raw
        first.close()
    if not stream:
        with one_slot(Limits(timeout_s=0.3)) as (client, _, _):
            status, answer, _ = client.post(LONG | {"stream": False, "timeout": 9})
            assert (status, answer["error"]["type"]) == (504, "timeout")


def test_a_client_may_request_short_gaps() -> None:
    with one_slot(Limits()) as (client, service, scheduler):
        with client.running(LONG, headers={"x-slo-itl-ms": "40"}):
            (sequence,) = scheduler.state.sequences.values()
            assert sequence.request.itl_target_s == 0.04
        wait_until(lambda: not service.num_requests)
        for wrong in ("soon", "-1", "1.5"):
            with client.open(BODY, headers={"x-slo-itl-ms": wrong}) as response:
                assert response.status == 400 and "x-slo-itl-ms" in response.read().decode()


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


def test_the_grace_time_of_a_stopping_server_ends() -> None:
    with one_slot(Limits()) as (client, service, _), client.running(LONG) as first:
        draining = client.run(service.drain(0.2))
        assert "grace time of 0.2 s" in first.read().decode()
        draining.result(timeout=30)


def test_a_second_stop_signal_aborts_open_calls(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "cbatch")
    with one_slot(Limits(), grace_s=600) as (client, _, _), client.running(LONG) as first:
        assert client.server is not None
        for _ in range(3):
            client.server.handle_exit(signal.SIGTERM, None)
            time.sleep(0.05)
        with contextlib.suppress(IncompleteRead):
            first.read()
    gc.unfreeze()  # the server has frozen the heap
    assert "draining: 1 open requests have 600 s to finish" in caplog.text
    assert caplog.text.count("second signal: aborting 1 open requests") == 1
    assert "Traceback" not in caplog.text


# ---- refused by the executor ---------------------------------------------------------------------

REFUSAL = "top_k: 7 is refused by this device; use 8"


def check(request: Request) -> None:
    if request.params.top_k == 7:
        raise FieldError("top_k", "7 is refused by this device", "use 8")


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    engine = make_engine(max_model_len=256)
    vars(engine.core.executor)["check"] = check
    with serving(engine, chat_template=FIRST_CONTENT) as client:
        yield client


@pytest.mark.parametrize("path", APIS)
def test_a_refused_request_ends_with_400_and_the_next_is_served(client: Client, path: str) -> None:
    """A stream ends with the error: its head is sent before the executor has seen the request."""
    status, answer, _ = client.post(body_of(path, top_k=7), path)
    assert status == 400 and REFUSAL in answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error"
    with client.open(body_of(path, top_k=7, stream=True), path) as response:
        events = response.read().decode()
    assert response.status == 200 and REFUSAL in events
    assert "invalid_request_error" in events or "invalid_prompt" in events
    assert client.post(body_of(path, top_k=8), path)[0] == 200
