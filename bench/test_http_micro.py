"""`pytest bench --benchmark-enable`: calls through the HTTP server over a stub that has an output
ready whenever it is asked. The reader of raw sockets shares the process."""

from __future__ import annotations

import pytest

from bench.server.overhead import BODIES, read, serving

CHUNKS = 20


@pytest.mark.parametrize("streams", [1, 16])
@pytest.mark.parametrize("path", BODIES, ids=["completions", "chat"])
def test_streams(benchmark, path, streams):
    """Streams of 20 chunks of two tokens, opened, read and closed."""
    with serving(CHUNKS, 2, tick_s=0.0) as (port, _):
        read(port, path, 1)  # the first call imports and compiles
        found = benchmark(read, port, path, streams)
    assert found.chunks >= streams * CHUNKS
