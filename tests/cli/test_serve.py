"""`cbatch serve` in a process: requests, the port, too little of something, and stop signals."""

from __future__ import annotations

import json
import multiprocessing
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

from cbatch.cli.serve import ENGINE_LOST, bind, listen
from cbatch.core.request.errors import FieldError
from cbatch.demo import demo_paths
from cbatch.process import spawn
from cbatch.server.http.errors import internal_error_body
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


def test_serve_answers_until_it_is_stopped(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# of the web shop\nthird\n")
    (tmp_path / "serve.toml").write_text(
        f'num_blocks = 64\napi_key = ["none"]\napi_key_file = "{tmp_path / "keys"}"\n'
        "open_metrics = true\nmax_connections = 2\n"
    )
    model = shutil.copytree(demo_paths()[0], tmp_path / "model")
    (model / "generation_config.json").write_text('{"temperature": 0, "max_new_tokens": 9}')
    live, replays = f"ipc://{tmp_path}/live", f"ipc://{tmp_path}/replays"
    events = {"enable_kv_cache_events": True, "endpoint": live, "replay_endpoint": replays}
    with serve(
        *(model, "--port", "0", "--max-num-seqs", "2", "--lookahead", "off"),
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
        assert texts == {answer["choices"][0]["message"]["content"]}, "the model's own template"
        assert "defaults of calls, by generation_config.json: temperature 0.0, max_tokens 9" in log
        omitted = post(f"{where}/v1/chat/completions", chat, "first")
        given = post(
            f"{where}/v1/chat/completions", chat | {"temperature": 0, "max_tokens": 9}, "first"
        )
        assert omitted["choices"][0]["message"] == given["choices"][0]["message"]
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
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=120) == 0


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


def test_an_unexpected_error_is_logged_and_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    body = internal_error_body(RuntimeError("secret"), "/v1/completions")
    (record,) = caplog.records
    assert record.getMessage() == "/v1/completions failed" and record.exc_info is not None
    assert "secret" in str(record.exc_info[1]) and "secret" not in str(body)


def test_too_few_open_files_are_reported_in_a_line() -> None:
    """The event loop needs some files before the check."""
    command = f"ulimit -n 8; exec {sys.executable} -m cbatch.cli.main serve --port 0"
    done = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "open files: this process may have 8" in done.stderr


HOST = "127.0.0.1"
JSON = {"Content-Type": "application/json"}
COMMAND = [sys.executable, "-m", "cbatch.cli.main", "serve", "--kv-cache-memory-bytes", "20M"]


def started(*options: str, before: str = "", **environment: str) -> subprocess.Popen[str]:
    """Start a server, after a shell's command if there is one."""
    command = ["sh", "-c", f'{before or ":"}; exec "$@"', "sh", *COMMAND, *options]
    return subprocess.Popen(
        command, cwd=ROOT, env=os.environ | environment, stderr=subprocess.PIPE, text=True
    )


def lines_of(process: subprocess.Popen[str]) -> list[str]:
    """Return what a server that refuses to start says."""
    _, said = process.communicate(timeout=120)
    assert process.returncode == 2, said
    return said.splitlines()


# ---- the port ------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", [HOST, "0.0.0.0"])
def test_a_port_is_taken_from_the_moment_that_a_server_starts(other: str) -> None:
    with bind(HOST, 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((HOST, port))
        for _ in range(2):
            with pytest.raises(FieldError, match=f"port: {port} is taken"):
                bind(other, port)
            listen(first, HOST, port, 8)
        socket.create_connection((HOST, port)).close()


def test_a_server_may_start_where_connections_of_an_earlier_one_are_closing() -> None:
    with bind(HOST, 0) as first:
        port = first.getsockname()[1]
        listen(first, HOST, port, 8)
        client = socket.create_connection((HOST, port))
        first.accept()[0].close()  # the side that closes first keeps the port for a minute
        assert client.recv(1) == b""
        client.close()
    with bind(HOST, port) as second:
        with pytest.raises(FieldError, match="is taken"):
            bind(HOST, port)
        listen(second, HOST, port, 8)


# ---- too little of something ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        ("ulimit -v 300000", "cbatch: memory: .*--kv-cache-memory-bytes.*ulimit -v"),
        ("ulimit -f 64", r"cbatch: the engine cannot be started \(.*File too large\); see TMPDIR"),
    ],
)
def test_too_little_memory_or_disk_is_reported_in_a_line(limit: str, said: str) -> None:
    (line,) = lines_of(started("--port", "0", before=limit))
    assert re.match(said, line), line


def test_no_limit_of_address_space_gives_a_traceback() -> None:
    """C libraries may print more lines before the last."""
    limited = started("--kv-cache-memory-bytes", "4G", "--port", "0", before="ulimit -v 760000")
    lines = lines_of(limited)
    assert re.match("cbatch: .*ulimit -v", lines[-1]) and not lines[-1].endswith("Error"), lines
    assert not any("Traceback" in line for line in lines), lines


# ---- the engine's process ------------------------------------------------------------------------


def test_a_server_that_is_refused_leaves_no_process(
    cbatch: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    kept = spawn.SpawnedProcess.__init__

    def noted(self: spawn.SpawnedProcess, **options: bool) -> None:
        kept(self, **options)
        made.append(self.process.pid)

    monkeypatch.setattr(spawn.SpawnedProcess, "__init__", noted)
    with pytest.raises(SystemExit, match="2"):  # of argparse
        cbatch("serve", "--max-num-seqss", "4")
    (pid,) = made
    assert pid not in {each.pid for each in multiprocessing.active_children()}
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


# ---- signals -------------------------------------------------------------------------------------


def test_a_signal_ends_the_server_after_its_open_calls(tmp_path: Path) -> None:
    """The temporary folder has a name that is too long for a socket."""
    folder = tmp_path / ("d" * 120)
    folder.mkdir()
    options = ("--port", "0", "--lookahead", "off", "--kv-cache-memory-bytes", "20M")
    with serve(*options, environment={"TMPDIR": str(folder)}) as (process, where, _):
        body = {"prompt": "x = [", "max_tokens": 200, "ignore_eos": True, "stream": True}
        call = Request(f"{where}/v1/completions", json.dumps(body).encode(), JSON)
        begun = urlopen(call, timeout=120)
        assert begun.readline().startswith(b"data: ")
        process.send_signal(signal.SIGQUIT)
        assert begun.read().rstrip().endswith(b"data: [DONE]")
        assert process.wait(timeout=60) == 0
