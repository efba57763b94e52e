"""A server whose kernels are still being compiled says so, and serves requests that need none of
them."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cbatch.runtime.gpu.capture import SHAPED
from tests.engine.late import held_kernels
from tests.server.http_client import serving, wait_until
from tests.toy_engine import make_engine

BODY = {"prompt": "def add(a, b):", "max_tokens": 8, "seed": 1}


def test_ready_lists_the_kernels_that_are_still_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    late = held_kernels(tmp_path, monkeypatch)
    caplog.set_level(logging.INFO, "cbatch")
    with (
        serving(make_engine(background_kernels=late.kernels, depth=1)) as client,
        ThreadPoolExecutor() as pool,
    ):

        def compiling() -> object:
            status, state = client.get("/ready")
            assert (status, state["status"]) == (200, "ready")
            return state.get("compiling")

        shaped = pool.submit(client.post, BODY | {"logit_bias": {"5": 2}})
        for _ in range(3):
            assert client.post(BODY)[0] == 200
        assert compiling() == [SHAPED] and not shaped.done()
        late.end(status=1)
        assert shaped.result(timeout=60)[0] == 200
        wait_until(lambda: compiling() is None, limit_s=60)
    assert f"still compiling: {SHAPED}\n" in caplog.text
    assert "still compiling: nothing" in caplog.text
