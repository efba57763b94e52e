"""Calls whose traces tests look at."""

from __future__ import annotations

from typing import Any

EXTRA = "needs OpenTelemetry: pip install 'cbatch[otel]'"  # why a test is skipped
PROMPT = "def add(a, b):"
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 40, "seed": 1, "ignore_eos": True}
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def parent(flags: str = "01") -> dict[str, str]:
    """Return the header of a call that is part of a trace. By the `flags` 01 it is sampled."""
    return {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-{flags}"}
