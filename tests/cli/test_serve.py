"""`cbatch serve` in a process: the demo pair, a request, a stop signal."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from cbatch.cli.serve import ENGINE_LOST
from cbatch.demo import demo_paths
from cbatch.server.protocol.errors import EngineLostError
from tests.cli.conftest import Run
from tests.kv_events.client import subscribed

ROOT = Path(__file__).parent.parent.parent


@contextmanager
def serve(
    *options: Any, environment: dict[str, str]
) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """Start `cbatch serve`. Yield the process, its address, and its output so far."""
    command = [sys.executable, "-m", "cbatch.cli.main", "serve", *map(str, options)]
    with subprocess.Popen(
        command, env=os.environ | environment, cwd=ROOT, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            log = ""
            while (where := re.search(r"http://127\.0\.0\.1:\d+", log)) is None:
                line = process.stderr.readline()
                assert line, f"it ended: {log}"
                log += line
            yield process, where[0], log
        finally:
            if process.poll() is None:
                process.kill()


def test_serve_runs_the_demo_pair_until_it_is_stopped(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# of the web shop\nthird\n")
    (tmp_path / "serve.toml").write_text(
        f'num_blocks = 64\napi_key = ["none"]\napi_key_file = "{tmp_path / "keys"}"\n'
        "open_metrics = true\nmax_connections = 2\n"
    )
    live, replays = f"ipc://{tmp_path}/live", f"ipc://{tmp_path}/replays"
    events = {"enable_kv_cache_events": True, "endpoint": live, "replay_endpoint": replays}
    with serve(
        *("--port", "0", "--max-num-seqs", "2", "--lookahead", "off"),
        *("--config", tmp_path / "serve.toml"),
        *("--kv-events-config", json.dumps(events)),
        environment={"CBATCH_API_KEY": "first,second", "CBATCH_REQUEST_TIMEOUT": "3"},
    ) as (process, where, log):
        assert "batch_invariant" in log and "KV: 64 blocks of 16 tokens" in log
        assert "connections: 2 at most" in log
        assert "lookahead off" in log and re.search(
            r"weights: \d+ MiB; engine threads: \d+ of \d+\n", log
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
        with urlopen(f"{where}/metrics", timeout=60) as metrics:
            assert metrics.status == 200
        post(f"{where}/v1/completions", {"prompt": "x = [" + "1, " * 50, "max_tokens": 1}, "first")
        with subscribed(live, replays) as gateway:
            gateway.catch_up()
            assert len(gateway.follower.blocks) > 1
        address = ("127.0.0.1", int(where.rpartition(":")[2]))
        with socket.create_connection(address) as one, socket.create_connection(address) as two:
            with pytest.raises(HTTPError, match="503"):
                post(f"{where}/v1/completions", body, "first")
            assert one.recv(1) == two.recv(1) == b"", "the request had its grace time"
        with urlopen(f"{where}/ready", timeout=60) as ready:
            assert ready.status == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=120) == 0


def test_the_models_defaults_apply_to_fields_that_calls_omit(tmp_path: Path) -> None:
    model = shutil.copytree(demo_paths()[0], tmp_path / "model")
    (model / "generation_config.json").write_text('{"temperature": 0, "max_new_tokens": 9}')
    with serve(model, "--port", "0", environment={"CBATCH_LOOKAHEAD": "off"}) as (_, where, log):
        assert "defaults of calls, by generation_config.json: temperature 0.0, max_tokens 9" in log
        texts = set()
        for fields in ({}, {}, {"temperature": 0, "max_tokens": 9}):
            chat = {"messages": [{"role": "user", "content": "def add(a, b):"}]}
            (choice,) = post(f"{where}/v1/chat/completions", chat | fields, "-")["choices"]
            texts.add(choice["message"]["content"])
        assert len(texts) == 1


def post(url: str, body: dict[str, Any], key: str) -> Any:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = Request(url, json.dumps(body).encode(), headers)
    with urlopen(request, timeout=120) as response:
        return json.loads(response.read())


def test_a_lost_engine_is_the_last_log_line_and_sets_the_exit_status(
    cbatch: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def lost(*_: Any) -> None:
        raise EngineLostError("the engine died 8 times without a token")

    monkeypatch.setattr("cbatch.cli.serve.serve_engine", lost)
    assert cbatch("serve").status == ENGINE_LOST == 1
    last = caplog.records[-1]
    assert last.levelname == "CRITICAL"
    assert last.getMessage().startswith("the engine died 8 times without a token; the server exits")


@pytest.mark.parametrize("files", [8, 256])
def test_too_few_open_files_are_reported_in_a_line(files: int) -> None:
    """The event loop needs some files before the check."""
    command = f"ulimit -n {files}; exec {sys.executable} -m cbatch.cli.main serve --port 0"
    done = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert f"open files: this process may have {files}" in done.stderr
