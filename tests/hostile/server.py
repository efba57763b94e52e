"""`cbatch serve` with the demo pair, and its state as seen from outside."""

from __future__ import annotations

import http.client
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parent.parent.parent
HOST = "127.0.0.1"
HONEST_KEY, HOSTILE_KEY = "honest", "hostile"
CALLS_PER_KEY = 16
# Texts are guaranteed to be the same only if a row's bits do not depend on the batch.
COMMAND = [
    *(sys.executable, "-m", "cbatch.cli.main", "serve", "--port", "0"),
    *("--numerics", "invariant", "--log-format", "json"),
    *("--max-requests-per-key", str(CALLS_PER_KEY)),
    *("--response-store-bytes", "8M"),  # a part of the memory that may grow
    *("--api-key", HONEST_KEY, "--api-key", HOSTILE_KEY),
]
MIB = 2**20
STOP_S = 20.0  # less than the grace time, for which the server waits if a call is never released


class Memory(NamedTuple):
    """Memory in bytes, each page divided among the processes that share it: of the serving process,
    of the engine, and of all others together."""

    server: int
    engine: int
    others: int

    @property
    def total(self) -> int:
        return sum(self)

    def __str__(self) -> str:
        parts = (f"{name} {value / MIB:.0f}" for name, value in self._asdict().items())
        return f"{self.total / MIB:.0f} MiB ({', '.join(parts)})"


class Kill(NamedTuple):
    """A kill of an engine, and the time when the next engine was ready, by `time.monotonic`."""

    killed_s: float
    ready_s: float


class Server:
    """A running server."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process, self.port, self._log = process, port, log

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def get(self, path: str) -> tuple[int, bytes]:
        """Get a path. Raises `OSError` if no server listens."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=30)
        with closing(connection):
            connection.request("GET", path, headers={"Authorization": f"Bearer {HONEST_KEY}"})
            response = connection.getresponse()
            return response.status, response.read()

    def metrics(self) -> dict[str, float]:
        """Return metrics by name; labels other than the model's follow it, as in `name/value`."""
        families = text_string_to_metric_families(self.get("/metrics")[1].decode())
        own = ("model_name", "engine")
        return {
            "/".join([each.name, *(v for k, v in each.labels.items() if k not in own)]): each.value
            for family in families
            for each in family.samples
        }

    def held(self) -> dict[str, float]:
        """Return resources that calls use; empty if no call is open."""
        values = self.metrics()
        names = [
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
            "vllm:kv_cache_usage_perc",
            "cbatch:queued_requests",
            "cbatch:queued_prompt_tokens",
            "cbatch:open_calls",
        ]
        return {name: values[name] for name in names if values[name]}

    def children(self) -> list[int]:
        pids: list[int] = []
        for task in _look(lambda: os.listdir(f"/proc/{self.process.pid}/task")) or ():
            path = Path(f"/proc/{self.process.pid}/task/{task}/children")
            pids += map(int, (_look(path.read_text) or "").split())
        return pids

    def engine_pid(self) -> int | None:
        """Return the pid of the largest child, or None if there is no child."""
        sizes = {pid: memory_bytes(pid) for pid in self.children()}
        return max(sizes, key=sizes.__getitem__, default=None)

    def memory(self) -> Memory:
        sizes = sorted(map(memory_bytes, self.children()), reverse=True) or [0]
        return Memory(memory_bytes(self.process.pid), sizes[0], sum(sizes[1:]))

    def kill_engine(self, limit_s: float = 60.0) -> Kill:
        """Kill the engine and wait for another one."""
        before = self.metrics()["cbatch:engine_restarts_total"]
        pid = self.engine_pid()
        assert pid is not None, "there is no engine to kill"
        os.kill(pid, signal.SIGKILL)
        began_s = time.monotonic()
        wait_until(
            lambda: (
                self.metrics()["cbatch:engine_restarts_total"] > before
                and self.get("/ready")[0] == 200
            ),
            limit_s,
            "a killed engine was not replaced",
        )
        return Kill(began_s, time.monotonic())

    def kill_fork_server(self, serve_a_chat: Callable[[], Any]) -> Kill:
        """Kill the fork server of the workers, while its idle workers live. The next is ready when
        `serve_a_chat` returns."""
        lines = {pid: _look(Path(f"/proc/{pid}/cmdline").read_text) for pid in self.children()}
        (pid,) = (pid for pid, line in lines.items() if "cbatch.workers.worker" in (line or ""))
        os.kill(pid, signal.SIGKILL)
        began_s = time.monotonic()
        serve_a_chat()
        return Kill(began_s, time.monotonic())

    def stop(self) -> int | None:
        """Stop the server; return its exit status, or None if it did not end in time."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            return None

    def log(self) -> list[dict[str, Any]]:
        """Return the log lines that are JSON; other lines are from a dying process."""
        lines = self._log.read_bytes().splitlines()
        return [msgspec.json.decode(line) for line in lines if line.startswith(b"{")]

    def last_words(self) -> str:
        """Return the log lines that the server did not write, but the interpreter or a library."""
        lines = self._log.read_text(errors="replace").splitlines()
        return "\n".join(line for line in lines if not line.startswith("{"))[-2000:]


@contextmanager
def served(folder: Path) -> Iterator[Server]:
    path = folder / "server.log"
    mine = {name: value for name, value in os.environ.items() if not name.startswith("CBATCH_")}
    with (
        path.open("wb") as log,
        subprocess.Popen(COMMAND, cwd=ROOT, env=mine, stderr=log, stdout=log) as process,
    ):
        try:
            pattern = re.compile(rf"serving .* on http://{re.escape(HOST)}:(\d+)/")
            where: list[str] = []

            def listening() -> bool:
                assert process.poll() is None, path.read_text()
                where[:] = pattern.findall(path.read_text())
                return bool(where)

            wait_until(listening, 120, "the server did not start")
            yield Server(process, int(where[0]), path)
        finally:
            if process.poll() is None:
                process.kill()


def memory_bytes(pid: int) -> int:
    """Return the memory of a process, 0 if it has ended."""
    rollup = _look(Path(f"/proc/{pid}/smaps_rollup").read_text) or ""
    match = re.search(r"^Pss: +(\d+) kB", rollup, re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


def wait_until(condition: Callable[[], bool], limit_s: float, why: str) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, why
        time.sleep(0.05)


def _look(read: Callable[[], Any]) -> Any:
    """Read a file of a process; return None if it has just ended."""
    try:
        return read()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
