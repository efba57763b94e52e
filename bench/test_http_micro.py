"""Micro-benchmark (`pytest bench --benchmark-enable`) of calls through the HTTP server. A stub of
the engine always has an output ready. The reader of raw sockets shares the process."""

from __future__ import annotations

import pytest

from bench.server.overhead import BODIES, read, serving

CHUNKS = 20


@pytest.mark.parametrize("streams", [1, 16])
@pytest.mark.parametrize("path", BODIES, ids=["completions", "chat"])
def test_streams(benchmark, path, streams):
    """Open, read and close streams of 20 chunks of two tokens."""
    with serving(CHUNKS, 2, tick_s=0.0) as (port, _):
        read(port, path, 1)  # the first call imports and compiles
        chunks_read = benchmark(read, port, path, streams)
    assert chunks_read.chunks >= streams * CHUNKS
