"""Log lines on standard error, as text or as JSON objects.

Pass extra fields of a record as `extra=fields(name=value)`. No log line holds prompt text. Clients
choose paths, ids and parts of errors. So all characters that are not printable are escaped: they
could end a line, turn its direction, or control a terminal.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal

LogFormat = Literal["text", "json"]
_dumps = partial(json.dumps, default=str, ensure_ascii=False, separators=(",", ":"))


def fields(**values: Any) -> dict[str, Any]:
    """Return the `extra` argument of a log call. Values that are None are left out."""
    return {"fields": {name: value for name, value in values.items() if value is not None}}


def configure(log_format: LogFormat, level: int = logging.INFO) -> None:
    """Set up logging of this process: cbatch logs at `level`, libraries only warnings."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if log_format == "json" else PlainLines())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("cbatch").setLevel(level)


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {"time": _time(record), "level": record.levelname.lower(), "logger": record.name}
        line |= {"message": record.getMessage(), **getattr(record, "fields", {})}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return _escaped(_dumps(line))


class PlainLines(logging.Formatter):
    """A record is one line. Lines of a traceback follow it, indented."""

    def format(self, record: logging.LogRecord) -> str:
        line = f"{_time(record)} {record.levelname.lower()}: {_escaped(record.getMessage())}"
        for name, value in getattr(record, "fields", {}).items():
            line += f" {name}={_plain(value)}"
        if record.exc_info:
            trace = self.formatException(record.exc_info).split("\n")
            line = "\n  ".join([line, *map(_escaped, trace)])
        return line


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
