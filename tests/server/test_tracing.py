"""Traces of requests: the spans of a record, and what an exporter gets from a server."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cbatch.cli.model_service import ModelParts
from cbatch.cli.serve_settings import ServeSettings
from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import FinishReason
from cbatch.core.scheduler.sequence import SchedulerStats
from cbatch.server.protocol.errors import OverloadedError
from cbatch.server.serving import request_record
from cbatch.server.serving.admission_queue import Limits
from cbatch.server.serving.open_request import OpenRequest
from cbatch.server.serving.request_record import RequestTotals, SequenceTimes
from cbatch.server.serving.tracing import SpanData, TracedRecord
from cbatch.text.outputs import Choice, Output, Speculation
from tests.server.apis import APIS, COMPLETIONS, body_of
from tests.server.engines import FIRST_CONTENT, PROMPT, SlowEngine
from tests.server.http_client import Client, open_request, serving, wait_until
from tests.toy_engine import TOKENIZER, make_engine

pytestmark = pytest.mark.usefixtures("otel_environment")
EXTRA = "needs OpenTelemetry: pip install 'cbatch[otel]'"  # why a test is skipped
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 40, "seed": 1, "ignore_eos": True}
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def parent(flags: str = "01") -> dict[str, str]:
    """Return the header of a call that is part of a trace. By the `flags` 01 it is sampled."""
    return {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-{flags}"}


# ---- from a record to spans ----------------------------------------------------------------------


class Call:
    """A request whose times are given. The engine has made `steps` steps at its present output."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: str = COMPLETIONS) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(request_record.time, "monotonic", lambda: self.now_s)
        self.client = SimpleNamespace(stats=None, num_starts=1)
        self.exported: list[TracedRecord] = []
        tracer = SimpleNamespace(client=self.client, export=self.exported.append)
        args = (RequestTotals(), "POST", path, "x")
        self.record = TracedRecord(cast(Any, tracer), [], *args)
        self.record.generates = True

    def open(self, **options: Any) -> OpenRequest:
        opened = open_request((1, 2, 3), **options)
        self.record.open(opened)
        return opened

    def output(self, sequence: SequenceTimes, at_s: float, steps: int, **options: Any) -> None:
        """Observe an output of two tokens, of which one was a draft."""
        self.now_s = at_s
        totals = SchedulerStats(steps=steps, draft_s=steps * 0.25, target_s=steps * 0.5)
        self.client.stats = SimpleNamespace(totals=totals)
        output = Output("x", 0, "", (1, 2), num_drafted=3, num_accepted=1, **options)
        self.record.observe(sequence, output, None)

    def spans(self, end_s: float) -> dict[str, SpanData]:
        whole, *parts = self.record.spans("m", end_s)
        assert whole.name == "llm_request"
        start_s = whole.start_s
        for part in parts:  # the parts follow one another
            assert whole.start_s <= part.start_s == start_s <= part.end_s <= whole.end_s
            start_s = part.end_s
        return {each.name: each for each in (whole, *parts)}


ENDED = Choice(0, "", (), FinishReason.LENGTH, None, Speculation())


def test_the_spans_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Call(monkeypatch)
    opened, sequence = call.open(), SequenceTimes()
    opened.admitted_s, opened.cached_tokens = 101.0, 2
    call.output(sequence, 103.0, steps=10)
    call.output(sequence, 104.0, steps=12)
    call.output(sequence, 107.0, steps=16, finished=ENDED)
    call.record.close()
    call.record.id, call.record.streamed, call.record.status = "cmpl-x", True, 200
    spans = call.spans(108.0)
    assert [(each.name, each.start_s, each.end_s) for each in spans.values()] == [
        ("llm_request", 100.0, 108.0),
        ("queue", 100.0, 101.0),
        ("prefill", 101.0, 103.0),
        ("decode", 103.0, 107.0),
    ]
    assert spans["llm_request"].attributes == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "cbatch",
        "gen_ai.request.model": "m",
        "gen_ai.request.stream": True,
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 1.0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.n": 1,
        "gen_ai.request.choice.count": 1,
        "gen_ai.request.id": "cmpl-x",
        "gen_ai.response.id": "cmpl-x",
        "gen_ai.response.model": "m",
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.prompt_tokens": 3,
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 2,
        "gen_ai.usage.completion_tokens": 6,
        "gen_ai.usage.output_tokens": 6,
        "gen_ai.latency.e2e": 8.0,
        "gen_ai.latency.time_to_first_token": 3.0,
        "gen_ai.latency.time_in_queue": 1.0,
        "gen_ai.latency.time_in_model_prefill": 2.0,
        "gen_ai.latency.time_in_model_decode": 4.0,
        "http.response.status_code": 200,
        "url.path": "/v1/completions",
    }
    assert spans["queue"].attributes == spans["prefill"].attributes == {}
    assert spans["decode"].attributes == {
        "cbatch.drafts": 2,
        "cbatch.drafted_tokens": 6,
        "cbatch.accepted_tokens": 2,
        "cbatch.steps": 6,
        "cbatch.time_in_draft": 1.5,
        "cbatch.time_in_verify": 3.0,
    }


@pytest.mark.parametrize(
    ("reached", "names"),
    [
        (0, ["llm_request"]),
        (1, ["llm_request", "queue"]),
        (2, ["llm_request", "queue", "prefill"]),
        (3, ["llm_request", "queue", "prefill", "decode"]),
    ],
)
def test_a_request_that_is_cut_has_the_parts_that_it_reached(
    monkeypatch: pytest.MonkeyPatch, reached: int, names: list[str]
) -> None:
    call = Call(monkeypatch)
    if reached > 0:
        opened = call.open()
        if reached > 1:
            opened.admitted_s = 101.0
        if reached > 2:
            call.output(SequenceTimes(), 102.0, steps=3)
    call.record.fail(OverloadedError("full", 1))
    spans = call.spans(105.0)
    assert list(spans) == names
    attributes = spans["llm_request"].attributes
    assert attributes["error.type"] == "OverloadedError"
    assert ("gen_ai.request.max_tokens" in attributes) == (reached > 0)
    assert ("gen_ai.latency.time_to_first_token" in attributes) == (reached == 3)
    if 0 < reached < 3:
        assert spans[names[-1]].end_s == 105.0, "its last part is cut with it"
    call.record.write()
    assert call.exported == [call.record]


def test_the_type_of_an_error_has_no_text_of_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Call(monkeypatch)
    call.record.fail(FieldError("seed", "'secret' is not a number", "give one"))
    assert call.spans(105.0)["llm_request"].attributes["error.type"] == "FieldError"


def test_an_engine_that_restarts_has_no_times_over_both(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Call(monkeypatch)
    call.open().admitted_s = 101.0
    sequence = SequenceTimes()
    call.output(sequence, 102.0, steps=5)
    call.client.num_starts = 2
    call.output(sequence, 103.0, steps=9)
    attributes = call.spans(105.0)["decode"].attributes
    assert attributes["cbatch.drafted_tokens"] == 3 and "cbatch.time_in_draft" not in attributes
    call.output(sequence, 104.0, steps=11)
    assert "cbatch.steps" not in call.spans(105.0)["decode"].attributes


# ---- what is exported ----------------------------------------------------------------------------


def test_nothing_is_imported_without_the_option(
    toy_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    assert ModelParts(ServeSettings()).span_exporter is None
    with toy_client.open(BODY, headers=parent()) as response:
        assert response.status == 200


@contextmanager
def traced(**options: Any) -> Iterator[tuple[Client, Any]]:
    """Serve with an exporter that keeps the spans."""
    memory = pytest.importorskip(
        "opentelemetry.sdk.trace.export.in_memory_span_exporter", reason=EXTRA
    ).InMemorySpanExporter()
    options.setdefault("engine", make_engine())
    with serving(options.pop("engine"), span_exporter=memory, **options) as client:
        yield client, memory


def finished(memory: Any, number: int) -> list[Any]:
    """Return the spans since the last call of this."""
    wait_until(lambda: len(memory.get_finished_spans()) >= number)
    spans = list(memory.get_finished_spans())
    memory.clear()
    assert len(spans) == number
    return spans


def test_every_way_of_calling_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SlowEngine(monkeypatch).engine
    with traced(engine=engine, chat_template=FIRST_CONTENT) as (client, memory):
        for path, stream in [(path, stream) for path in APIS for stream in (False, True)]:
            body = body_of(path, PROMPT, 60, seed=1, ignore_eos=True, stream=stream)
            headers = parent() | {"x-request-id": f"mine{stream}"}
            with client.open(body, path, headers) as response:
                assert response.status == 200 and response.read()
            check_spans(*finished(memory, 4), path, stream)


def check_spans(request: Any, *rest: Any) -> None:
    *parts, path, stream = rest
    assert [each.name for each in parts] == ["queue", "prefill", "decode"]
    assert request.name == "llm_request" and request.kind.name == "SERVER"
    assert f"{request.parent.span_id:016x}" == PARENT_ID and request.parent.is_remote
    assert f"{request.context.trace_id:032x}" == TRACE_ID
    start_ns, now_ns = request.start_time, time.time_ns()
    assert now_ns - 600e9 < start_ns < request.end_time <= now_ns, "it is wall time"
    for part in parts:
        assert part.parent.span_id == request.context.span_id and part.kind.name == "INTERNAL"
        assert start_ns == part.start_time <= part.end_time <= request.end_time
        start_ns = part.end_time
    attributes = request.attributes
    assert attributes["gen_ai.response.id"].endswith(f"mine{stream}")
    assert attributes["gen_ai.request.stream"] is stream and attributes["url.path"] == path
    assert attributes["gen_ai.usage.input_tokens"] == len(TOKENIZER.encode(PROMPT))
    assert attributes["gen_ai.usage.output_tokens"] == 60
    assert attributes["gen_ai.response.finish_reasons"] == ("length",)
    decode = parts[2].attributes
    assert decode["cbatch.drafted_tokens"] > decode["cbatch.accepted_tokens"] > 0
    assert decode["cbatch.drafted_tokens"] <= 3 * decode["cbatch.drafts"]
    assert 0 < decode["cbatch.steps"] < 60
    assert decode["cbatch.time_in_verify"] > 0 and decode["cbatch.time_in_draft"] > 0
    assert request.status.status_code.name == "UNSET"
    assert request.resource.attributes["service.name"] == "cbatch"


BAD_PARENTS = ["", "x", "00-" + 32 * "0" + "-" + PARENT_ID + "-01", "ÿ", "ff-1-2-3"]


def test_which_calls_are_traced() -> None:
    with traced() as (client, memory):
        for path in ("/health", "/metrics", "/v1/models", "/version"):
            with client.open(None, path, parent()):
                pass
        assert client.post({"prompt": PROMPT}, "/tokenize")[0] == 200
        assert client.post({"prompt": 3})[0] == 400
        (request,) = finished(memory, 1)
        assert request.attributes["http.response.status_code"] == 400
        assert request.attributes["error.type"] == "FieldError"
        assert request.status.status_code.name == "UNSET", "the call is at fault, not the server"
        for header in BAD_PARENTS:
            headers = {"traceparent": header.encode("latin-1"), "tracestate": "=,;=="}
            with client.open(BODY, headers=headers) as response:
                assert response.status == 200
            request = finished(memory, 4)[0]
            assert request.parent is None and request.context.trace_id
        with client.open(BODY, headers=parent("00")):  # it is not sampled
            pass
        with client.open(BODY, headers=parent("01")):
            pass
        assert finished(memory, 4)[0].parent is not None


def test_how_a_call_was_cut_off_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    long = BODY | {"max_tokens": 8000}
    engine = SlowEngine(monkeypatch).engine
    with traced(engine=engine, limits=Limits(timeout_s=0.5)) as (client, memory):
        assert client.post(long)[0] == 504
        request, *_ = finished(memory, 4)
        assert request.attributes["error.type"] == "DeadlineError"
        assert request.status.status_code.name == "ERROR"
        assert request.attributes["gen_ai.usage.output_tokens"] > 0
        with client.open(long | {"stream": True, "timeout": 60}) as response:
            response.read(10)
        request = finished(memory, 4)[0]
        assert request.attributes["gen_ai.response.finish_reasons"] == ("abort",)


@pytest.mark.parametrize("sampled", [False, True])
def test_the_environment_decides_on_sampling(
    monkeypatch: pytest.MonkeyPatch, sampled: bool
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_on" if sampled else "always_off")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "shop")
    headers = parent("00" if sampled else "01")
    with traced() as (client, memory), client.open(BODY, headers=headers):
        pass
    spans = finished(memory, 4 if sampled else 0)
    assert {each.resource.attributes["service.name"] for each in spans} <= {"shop"}
