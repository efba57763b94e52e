"""The GPU executor on a stream that runs nothing before the host waits, with graphs that are tapes.

Whether a kernel is interpreted is decided when triton is imported, so this folder runs in a process
of its own:

    TRITON_INTERPRET=1 python -m pytest tests/gpu_proofs/interpreted
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gpu_proofs.interpreted.stream import Stream, substituted
from tests.triton_kernels.interpreter.quick import interpret, without_overflow_checks

INTERPRETED = interpret()
if not INTERPRETED:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def bare_stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stream]:
    """A stream on which kernels are interpreted."""
    without_overflow_checks(monkeypatch)
    with substituted() as stream:
        yield stream


@pytest.fixture
def stream(bare_stream: Stream, monkeypatch: pytest.MonkeyPatch) -> Stream:
    """A stream with references in place of a decoder's kernels."""
    from tests.gpu_proofs.interpreted.references import use_references

    use_references(bare_stream, monkeypatch)
    return bare_stream
