"""Traces of requests, sent to an OpenTelemetry collector (`--otlp-endpoint`, extra `otel`).

The spans of a request are made when it ends, from the times in its record. A thread of the SDK
sends them in batches, and drops them if the collector does not answer. Names are those of vLLM's
spans and of the GenAI semantic conventions.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterable
from importlib.metadata import version
from typing import Any, NamedTuple

from cbatch.core.request.errors import FieldError
from cbatch.core.scheduler.sequence import SchedulerStats
from cbatch.process.client import EngineClient
from cbatch.server.serving.open_request import OpenRequest
from cbatch.server.serving.request_record import RequestRecord, SequenceTimes
from cbatch.text.outputs import Output

SpanExporter = Any  # OpenTelemetry's class. Its packages need not be installed.
Headers = Iterable[tuple[bytes, bytes]]
FLUSH_S = 3.0  # time to send the last spans before the process ends
_URL = re.compile(r"(\w+)://[^/:\s][^/\s]*?(:\d+)?(/\S*)?")
_SCHEMES = {"grpc": ("http", "https", "grpc"), "http/protobuf": ("http", "https")}
_PROTOCOL = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_OPERATION = {"/v1/completions": "text_completion"}  # by path; any other: chat
# By the name of a span: vLLM's name of its duration, after "time_in_".
_PARTS = {"queue": "queue", "prefill": "model_prefill", "decode": "model_decode"}
_PARAMS = ("n", "max_tokens", "temperature", "top_p", "top_k")
# Names of the conventions for attributes that vLLM calls otherwise. A span has both.
_CONVENTION = {
    "gen_ai.request.id": "gen_ai.response.id",
    "gen_ai.request.n": "gen_ai.request.choice.count",
    "gen_ai.response.model": "gen_ai.request.model",
    "gen_ai.usage.completion_tokens": "gen_ai.usage.output_tokens",
    "gen_ai.usage.prompt_tokens": "gen_ai.usage.input_tokens",
}
_logger = logging.getLogger("cbatch")


def span_exporter(endpoint: str) -> SpanExporter:
    """Return an exporter to `endpoint`. OpenTelemetry's variables of the environment choose the
    protocol. Without them it is HTTP if the URL has a path or port 4318, else gRPC. Raises
    `FieldError`, also if a package is missing."""
    match = _URL.fullmatch(endpoint)
    scheme, port, path = match.groups("/") if match else ("", "", "/")
    default = "http/protobuf" if port == ":4318" or path != "/" else "grpc"
    protocol = next(filter(None, map(os.environ.get, _PROTOCOL)), default)
    if scheme not in _SCHEMES.get(protocol, ()):
        problem = f"cannot export to {without_secrets(endpoint)!r} with protocol {protocol!r}"
        remedy = f"give a URL as http://localhost:4317; {_PROTOCOL[1]}: {' or '.join(_SCHEMES)}"
        raise FieldError("otlp_endpoint", problem, remedy)
    if protocol != "grpc" and path == "/":
        endpoint = endpoint.rstrip("/") + "/v1/traces"

    def exporter() -> SpanExporter:
        try:
            if protocol == "grpc":
                from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as grpc

                return grpc.OTLPSpanExporter(endpoint=endpoint)
            from opentelemetry.exporter.otlp.proto.http import trace_exporter as http

            return http.OTLPSpanExporter(endpoint=endpoint, session=bounded_session())
        except ImportError as error:
            problem = f"needs OpenTelemetry, which cannot be imported ({error})"
            raise FieldError("otlp_endpoint", problem, "run pip install 'cbatch[otel]'") from error

    def trial() -> None:
        provider = _provider(exporter())
        provider.get_tracer("cbatch").start_span("trial")  # never ends, so it is not sent
        provider.shutdown()

    require_valid_variables(trial)
    _logger.info(f"traces: {without_secrets(endpoint)} ({protocol})")
    return exporter()


def _provider(exporter: SpanExporter) -> Any:
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create()
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "cbatch"}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


class SpanData(NamedTuple):
    """A request or a part of it. Times are seconds of `time.monotonic`."""

    name: str
    start_s: float
    end_s: float
    attributes: dict[str, Any]


class TracedRecord(RequestRecord):
    """Record of a request whose spans go to `tracer`. `args` are those of `RequestRecord`."""

    def __init__(self, tracer: RequestTracer, headers: Headers, *args: Any) -> None:
        super().__init__(*args)
        self._tracer, self.headers = tracer, headers
        self._prompts: list[OpenRequest] = []
        # At the first and the latest output: starts of the engine, and totals of its steps.
        self._steps: list[tuple[int, SchedulerStats]] = []

    def open(self, opened: OpenRequest) -> None:
        super().open(opened)
        self._prompts.append(opened)

    def observe(self, sequence: SequenceTimes, output: Output, admitted_s: float | None) -> None:
        super().observe(sequence, output, admitted_s)
        client = self._tracer.client
        if self._sequences and client.stats is not None:
            self._steps[1:] = [(client.num_starts, client.stats.totals)]

    def write(self) -> None:
        super().write()
        if self.generates:
            self._tracer.export(self)

    def spans(self, model: str, end_s: float) -> list[SpanData]:
        """Return the span of a request that ends at `end_s`, then those of the parts it reached. A
        part ends when the first choice leaves it, but `decode` with the last choice."""
        began_s, params = self.began_s, [each.request.params for each in self._prompts[:1]]
        slots_s = [max(began_s, each.admitted_s) for each in self._prompts if each.admitted_s]
        first_s = min((each.first_s for each in self._sequences), default=None)
        last_s = max((each.last_s for each in self._sequences), default=None)
        attributes: dict[str, Any] = {
            "gen_ai.latency.e2e": end_s - began_s,
            "gen_ai.latency.time_to_first_token": first_s and first_s - began_s,
            "gen_ai.operation.name": _OPERATION.get(self.path, "chat"),
            "gen_ai.provider.name": "cbatch",
            "gen_ai.request.id": self.id,
            "gen_ai.request.stream": self.streamed,
            "gen_ai.response.model": model,
            "gen_ai.response.finish_reasons": list(self._reasons) or None,
            "gen_ai.usage.completion_tokens": sum(each.num_tokens for each in self._sequences),
            "gen_ai.usage.prompt_tokens": self._prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": sum(p.cached_tokens for p in self._prompts),
            "http.response.status_code": self.status,
            "url.path": self.path,
            "error.type": self.error and self.error.partition(" ")[0],
            **{f"gen_ai.request.{name}": getattr(p, name) for p in params for name in _PARAMS},
        }
        attributes |= {_CONVENTION[name]: attributes.get(name) for name in _CONVENTION}
        parts: list[SpanData] = []
        start_s = began_s if params else None
        ends_s = (min(slots_s, default=None), first_s, last_s)
        for (name, latency), part_end_s in zip(_PARTS.items(), ends_s, strict=True):
            if start_s is not None:
                until_s = end_s if part_end_s is None else part_end_s
                speculation = self._speculation() if name == "decode" else {}
                parts.append(SpanData(name, start_s, until_s, speculation))
                attributes[f"gen_ai.latency.time_in_{latency}"] = until_s - start_s
            start_s = part_end_s
        attributes = {name: value for name, value in attributes.items() if value is not None}
        return [SpanData("llm_request", began_s, end_s, attributes), *parts]

    def _speculation(self) -> dict[str, Any]:
        """Return the drafts of all choices, and the engine's time from their first output to the
        last. Its steps serve other requests too, so the time is not of this request alone."""
        attributes: dict[str, Any] = {
            "cbatch.drafts": self._drafting.steps,
            "cbatch.drafted_tokens": self._drafting.drafted_tokens,
            "cbatch.accepted_tokens": self._drafting.accepted_tokens,
        }
        if self._steps and self._steps[0][0] == self._steps[-1][0]:  # else the totals began again
            first, last = self._steps[0][1], self._steps[-1][1]
            attributes["cbatch.steps"] = last.steps - first.steps
            attributes["cbatch.time_in_draft"] = last.draft_s - first.draft_s
            attributes["cbatch.time_in_verify"] = last.target_s - first.target_s
        return attributes


class RequestTracer:
    """Exports the spans of requests. OpenTelemetry's variables of the environment choose the
    sampler, the name of the service and the size of batches."""

    def __init__(self, exporter: SpanExporter, model: str, client: EngineClient) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = _provider(exporter)
        self._start_span = self._provider.get_tracer("cbatch", version("cbatch")).start_span
        self._extract, self._trace = TraceContextTextMapPropagator().extract, trace
        self._model, self.client = model, client

    def export(self, record: TracedRecord) -> None:
        """Queue the spans of a request that ends now. Its header `traceparent` names the parent."""
        trace, offset_ns = self._trace, time.time_ns() - time.monotonic_ns()
        headers = {name.decode("latin-1"): text.decode("latin-1") for name, text in record.headers}
        context, kind = self._extract(headers), trace.SpanKind.SERVER
        for name, start_s, end_s, attributes in record.spans(self._model, time.monotonic()):
            start_ns, end_ns = (offset_ns + int(at_s * 1e9) for at_s in (start_s, end_s))
            span = self._start_span(name, context, kind, attributes, start_time=start_ns)
            if kind is trace.SpanKind.SERVER:  # the request's, which is the parent of the others
                context, kind = trace.set_span_in_context(span), trace.SpanKind.INTERNAL
                if record.error is not None and not 400 <= (record.status or 499) < 500:
                    span.set_status(trace.StatusCode.ERROR, record.error)
            span.end(end_ns)

    def close(self) -> None:
        flush = threading.Thread(target=self._provider.shutdown, daemon=True)
        flush.start()
        flush.join(FLUSH_S)


MAX_ANSWER_BYTES = 2**16  # read of an answer; the exporter needs none of it
MAX_ANSWER_S = 5.0  # time to read an answer after its head
_PREFIX, _OTLP = "OTEL_", ("OTEL_EXPORTER_OTLP_TRACES_", "OTEL_EXPORTER_OTLP_")
_FILES = ("CERTIFICATE", "CLIENT_KEY", "CLIENT_CERTIFICATE")
_CREDENTIALS = "CREDENTIAL_PROVIDER"  # variables of this suffix name a class of sessions
_sdk = logging.getLogger("opentelemetry")
_logger = logging.getLogger("cbatch")


def bounded_session() -> Any:
    """Return a `requests.Session` that reads at most `MAX_ANSWER_BYTES` of an answer, not
    decompressed; None if a variable names another session."""
    if any(name.endswith(_CREDENTIALS) for name in os.environ if name.startswith(_PREFIX)):
        return None
    import requests
    from requests.adapters import HTTPAdapter

    class BoundedAdapter(HTTPAdapter):
        def send(self, *args: Any, **options: Any) -> Any:
            options["stream"] = True
            response: Any = super().send(*args, **options)
            response._content, response._content_consumed = _start_of(response.raw), True
            return response

    session = requests.Session()
    for scheme in ("http://", "https://"):
        session.mount(scheme, BoundedAdapter())
    return session


def _start_of(raw: Any) -> bytes:
    content, until_s = b"", time.monotonic() + MAX_ANSWER_S
    while len(content) < MAX_ANSWER_BYTES and time.monotonic() < until_s:
        part = raw.read1(MAX_ANSWER_BYTES - len(content), decode_content=False)
        if not part:
            raw.release_conn()
            return content
        content += part
    raw.close()
    return content


def without_secrets(url: str) -> str:
    return re.sub(r"[?#].*", "", re.sub(r"^((?:.*?//)?).*@", r"\1", url))


def require_valid_variables(trial: Callable[[], None]) -> None:
    """Call `trial`, which makes what reads OpenTelemetry's variables. Raises `FieldError` naming
    the variable without which the trial fails no more. Warnings of the SDK count as failures. An
    empty variable is unset, as OpenTelemetry specifies."""
    values = {name: text for name, text in os.environ.items() if name.startswith(_PREFIX)}
    for name in [name for name, text in values.items() if not text.strip()]:
        del os.environ[name], values[name]
    if "OTEL_TRACES_SAMPLER" in values:
        os.environ.setdefault("OTEL_TRACES_SAMPLER_ARG", "1.0")  # the default, without a warning
    problem = _problem(trial)
    if problem is None:
        return
    named = [name for name in values if name.removeprefix(_PREFIX) in problem]
    culprit = max(named, key=len, default=None)
    if culprit is None and _problem(trial) is not None:
        culprit = _culprit(trial, sorted(values))
    elif culprit is None:  # a module has read the variable once, at its import
        quoted = [name for name, text in values.items() if text in problem]
        culprit = max(quoted, key=lambda name: len(values[name]), default=None)
    if culprit is None:
        _logger.warning("OpenTelemetry: %s", without_secrets(problem))
        return
    secret = "HEADERS" in culprit
    shown = "its value" if secret else repr(without_secrets(values[culprit]))
    reason = "write name=value, separated by commas" if secret else without_secrets(problem)
    raise FieldError(culprit, f"{shown} is not allowed", f"correct it or unset it ({reason})")


def _culprit(trial: Callable[[], None], names: list[str]) -> str | None:
    removed = {}
    try:
        for name in names:
            removed[name] = os.environ.pop(name)
            if _problem(trial) is None:
                return name
    finally:
        os.environ.update(removed)
    return None


def _problem(trial: Callable[[], None]) -> str | None:
    """Return why the trial failed, or what the SDK logged meanwhile, in one line."""
    said: list[str] = []
    listener, propagates = logging.Handler(logging.WARNING), _sdk.propagate
    listener.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    _sdk.addHandler(listener)
    _sdk.propagate = False
    try:
        _require_usable()
        trial()
    except FieldError:  # of `--otlp-endpoint`
        raise
    except Exception as error:
        said.insert(0, str(error) or repr(error))
    finally:
        _sdk.removeHandler(listener)
        _sdk.propagate = propagates
    return " ".join(said[0].split()) if said else None


def _require_usable() -> None:
    """Check the variables that are read only when spans are sent. Raises ValueError, OSError."""
    for prefix in _OTLP:
        seconds = os.environ.get(f"{prefix}TIMEOUT") or "1"
        if not 0 < float(seconds) <= threading.TIMEOUT_MAX:
            raise ValueError(f"{seconds} s cannot be waited for")
        for name in _FILES:
            if path := os.environ.get(prefix + name):
                with open(path, "rb"):
                    pass
    delay_ms = os.environ.get("OTEL_BSP_SCHEDULE_DELAY") or "1"
    if int(delay_ms) > threading.TIMEOUT_MAX * 1000:
        raise ValueError(f"{delay_ms} ms is too long")
