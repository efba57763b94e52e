"""Log lines on standard error, as text or as JSON objects.

Pass extra fields of a record as `extra={"fields": {...}}`. No log line holds prompt text. Clients
choose paths, ids and parts of errors. So all characters that are not printable are escaped: they
could end a line, turn its direction, or control a terminal.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal

LogFormat = Literal["text", "json"]
_dumps = partial(json.dumps, default=str, ensure_ascii=False, separators=(",", ":"))
# User and password of a URL, or a query, which libraries write with their errors.
_SECRETS = re.compile(r"(?<=://)[^/\s'\"]*@|(?<=[\w/])\?[^\s'\")>]+")


def configure(log_format: LogFormat, level: int = logging.INFO) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if log_format == "json" else PlainLines())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("cbatch").setLevel(level)


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {"time": _time(record), "level": record.levelname.lower(), "logger": record.name}
        line |= {"message": _shown(record, record.getMessage()), **getattr(record, "fields", {})}
        if record.exc_info:
            line["exception"] = _shown(record, self.formatException(record.exc_info))
        return _escaped(_dumps(line))


class PlainLines(logging.Formatter):
    """A record is one line. Lines of a traceback follow it, indented."""

    def format(self, record: logging.LogRecord) -> str:
        message = _escaped(_shown(record, record.getMessage()))
        line = f"{_time(record)} {record.levelname.lower()}: {message}"
        for name, value in getattr(record, "fields", {}).items():
            line += f" {name}={_plain(value)}"
        if record.exc_info:
            trace = _shown(record, self.formatException(record.exc_info)).split("\n")
            line = "\n  ".join([line, *map(_escaped, trace)])
        return line


def _shown(record: logging.LogRecord, text: str) -> str:
    """Return the text of a record; without the secrets of URLs if a library logged it."""
    return text if record.name.startswith("cbatch") else _SECRETS.sub("", text)


def _plain(value: Any) -> str:
    """Return the value, quoted where a client's text could pass for another line or field."""
    if isinstance(value, str) and value.isprintable() and not set(value) & set(' ="'):
        return value
    return _escaped(_dumps(value))


def _escaped(text: str) -> str:
    """Return the text with characters that are not printable as in JSON: \\n, \\u009b."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in text)


def _time(record: logging.LogRecord) -> str:
    at = datetime.fromtimestamp(record.created, UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
