"""Guards against a trace collector's answers, and against bad variables of OpenTelemetry."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable
from typing import Any

from cbatch.core.request.errors import FieldError

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
    """Read the start of an answer. The connection is kept if that is the whole answer."""
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
    """Return a URL without user, password and query."""
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
