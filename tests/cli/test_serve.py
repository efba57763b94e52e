"""`cbatch serve` as an operator runs it: the demo pair, a request, a stop signal."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from cbatch.cli.serve import LOST
from cbatch.server.run import EngineLostError
from tests.cli.conftest import Run

ROOT = Path(__file__).parent.parent.parent


@contextmanager
def serve(
    *options: Any, environment: dict[str, str]
) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """The process, where it serves, and what it told by then."""
    command = [sys.executable, "-m", "cbatch.cli.main", "serve", *map(str, options)]
    with subprocess.Popen(
        command, env=os.environ | environment, cwd=ROOT, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            told = ""
            while (where := re.search(r"http://127\.0\.0\.1:\d+", told)) is None:
                line = process.stderr.readline()
                assert line, f"it ended: {told}"
                told += line
            yield process, where[0], told
        finally:
            if process.poll() is None:
                process.kill()


def test_it_serves_the_demo_pair_until_it_is_told_to_stop(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# of the web shop\nthird\n")
    (tmp_path / "serve.toml").write_text(
        f'num_blocks = 64\napi_key = ["none"]\napi_key_file = "{tmp_path / "keys"}"\n'
    )
    with serve(
        *("--port", "0", "--max-slots", "2", "--config", tmp_path / "serve.toml"),
        environment={"CBATCH_API_KEY": "first,second", "CBATCH_LOOKAHEAD": "off"},
    ) as (process, where, told):
        assert "row_invariant" in told and "KV: 64 blocks of 16 tokens" in told
        assert "lookahead off" in told and re.search(
            r"weights: \d+ MiB; engine threads: \d+ of \d+\n", told
        )
        body = {"prompt": "def add(a, b):", "max_tokens": 8, "temperature": 0}
        texts = set()
        for key in ("first", "second", "third"):
            answer = post(f"{where}/v1/completions", body, key)
            assert answer["usage"]["completion_tokens"] == 8 and answer["choices"][0]["text"]
            texts.add(answer["choices"][0]["text"])
        chat = {"messages": [{"role": "user", "content": body.pop("prompt")}]}
        answer = post(f"{where}/v1/chat/completions", body | chat, "first")
        assert texts == {answer["choices"][0]["message"]["content"]}, "the demo pair's own template"
        with pytest.raises(HTTPError, match="401"):
            post(f"{where}/v1/completions", body, "none")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=120) == 0


def post(url: str, body: dict[str, Any], key: str) -> Any:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = Request(url, json.dumps(body).encode(), headers)
    with urlopen(request, timeout=120) as response:
        return json.loads(response.read())


def test_a_template_that_is_not_there_is_told_before_an_engine_starts(
    cbatch: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    monkeypatch.setattr("cbatch.engine.process.EngineProcess.__init__", started.append)
    run = cbatch("serve", "--chat-template", tmp_path / "none")
    assert run.status == 2 and "none cannot be read" in run.err and not started


def test_what_cannot_be_served_is_said_in_a_line(
    cbatch: Callable[..., Run], tmp_path: Path
) -> None:
    run = cbatch("serve", tmp_path / "nothing")
    assert run.status == 2 and str(tmp_path / "nothing") in run.err
    run = cbatch("serve", "--grace", "1", "--timeout", "-1")
    assert run.status == 2 and "--timeout: -1.0 is not allowed" in run.err


def test_an_engine_that_is_lost_is_the_last_line_and_a_status(
    cbatch: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def lost(_: Any) -> None:
        raise EngineLostError("the engine died 8 times without a token")

    monkeypatch.setattr("cbatch.cli.serve._serve", lost)
    assert cbatch("serve").status == LOST == 1
    last = caplog.records[-1]
    assert last.levelname == "CRITICAL"
    assert last.getMessage().startswith("the engine died 8 times without a token; the server ends")
