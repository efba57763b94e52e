"""How `cbatch serve` starts and ends: on the port of another server, with too little memory or
disk, and on each of the signals that stop it."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from cbatch.cli.serve import bind, listen
from cbatch.core.request.errors import FieldError
from cbatch.process import spawn
from tests.cli.conftest import Run
from tests.cli.test_serve import post, serve

ROOT = Path(__file__).parent.parent.parent
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


def test_of_two_servers_that_start_on_one_port_one_serves() -> None:
    with socket.create_server((HOST, 0)) as free:
        port = free.getsockname()[1]
    first, second = (started("--port", str(port)) for _ in range(2))
    try:
        while first.poll() is None and second.poll() is None:
            time.sleep(0.02)
        loser, winner = (first, second) if first.poll() is not None else (second, first)
        (line,) = lines_of(loser)
        assert line.startswith(f"cbatch: --port: {port} is taken")
        assert winner.stderr is not None
        while f"on http://{HOST}:{port}/v1" not in (said := winner.stderr.readline()):
            assert said, "the other server ended"
        answer = post(f"http://{HOST}:{port}/v1/completions", {"prompt": "x", "max_tokens": 2}, "-")
        assert answer["usage"]["completion_tokens"] == 2
    finally:
        for process in (first, second):
            process.kill()
            process.communicate()


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


@pytest.mark.parametrize("kib", [500_000, 760_000])
def test_no_limit_of_address_space_gives_a_traceback(kib: int) -> None:
    """C libraries may print more lines before the last."""
    limited = started("--kv-cache-memory-bytes", "4G", "--port", "0", before=f"ulimit -v {kib}")
    lines = lines_of(limited)
    assert re.match("cbatch: .*ulimit -v", lines[-1]) and not lines[-1].endswith("Error"), lines
    assert not any("Traceback" in line for line in lines), lines


def test_a_server_starts_with_any_tmpdir(tmp_path: Path) -> None:
    place = tmp_path / ("d" * 120)
    place.mkdir()
    options = ("--port", "0", "--lookahead", "off", "--kv-cache-memory-bytes", "20M")
    with serve(*options, environment={"TMPDIR": str(place)}) as (_, where, _):
        post(f"{where}/v1/completions", {"prompt": "x", "max_tokens": 2}, "-")


# ---- the engine's process ------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [("--max-num-seqss", "4"), ("--chat-template", "/none/such")])
def test_a_server_that_is_refused_leaves_no_process(
    cbatch: Callable[..., Run], flags: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    kept = spawn.SpawnedProcess.__init__

    def noted(self: spawn.SpawnedProcess, **options: bool) -> None:
        kept(self, **options)
        made.append(self.process.pid)

    monkeypatch.setattr(spawn.SpawnedProcess, "__init__", noted)
    try:
        assert cbatch("serve", *flags).status == 2
    except SystemExit as error:  # of argparse
        assert error.code == 2
    (pid,) = made
    assert pid not in {each.pid for each in multiprocessing.active_children()}
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


# ---- signals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGQUIT, signal.SIGINT])
def test_a_signal_ends_the_server_after_its_open_calls(number: signal.Signals) -> None:
    options = ("--port", "0", "--lookahead", "off", "--kv-cache-memory-bytes", "20M")
    with serve(*options, environment={}) as (process, where, _):
        body = {"prompt": "x = [", "max_tokens": 400, "ignore_eos": True, "stream": True}
        call = Request(f"{where}/v1/completions", json.dumps(body).encode(), JSON)
        begun = urlopen(call, timeout=120)
        assert begun.readline().startswith(b"data: ")
        process.send_signal(number)
        assert begun.read().rstrip().endswith(b"data: [DONE]")
        assert process.wait(timeout=60) == 0
