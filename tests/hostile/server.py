"""`cbatch serve` with the demo pair, and its state as seen from outside."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from tests.hostile.attacker import HOST, HOSTILE_KEY
from tests.server.http_client import Client, samples, wait_until

ROOT = Path(__file__).parent.parent.parent
HONEST_KEY = "honest"
CALLS_PER_KEY = 16
# Texts are guaranteed to be the same only if a row's bits do not depend on the batch.
COMMAND = [
    *(sys.executable, "-m", "cbatch.cli.main", "serve", "--port", "0"),
    *("--numerics", "invariant", "--log-format", "json"),
    *("--max-requests-per-key", str(CALLS_PER_KEY)),
    *("--response-store-bytes", "8M"),  # a part of the memory that may grow
    *("--api-key", HONEST_KEY, "--api-key", HOSTILE_KEY),
]
STOP_S = 20.0  # less than the grace time, for which the server waits if a call is never released
HELD = (
    *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
    *("cbatch:queued_requests", "cbatch:queued_prompt_tokens", "cbatch:open_calls"),
)


class Server(Client):
    """A running server, with an honest client's key."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        super().__init__(port, headers={"Authorization": f"Bearer {HONEST_KEY}"})
        self.process, self._log = process, log

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def metrics(self) -> dict[str, float]:
        """Return metrics by name; labels other than the model's follow it, as in `name/value`."""
        own = ("model_name", "engine")
        return {
            "/".join([each.name, *(v for k, v in each.labels.items() if k not in own)]): each.value
            for each in samples(self)
        }

    def held(self) -> dict[str, float]:
        """Return resources that calls use; empty if no call is open."""
        values = self.metrics()
        return {name: values[name] for name in HELD if values[name]}

    def children(self) -> list[int]:
        """Return the pids of the children, the largest first: the engine."""
        pids: list[int] = []
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            with suppress(OSError):
                pids += map(int, (task / "children").read_text().split())
        return sorted(pids, key=memory_bytes, reverse=True)

    def memory(self) -> list[int]:
        """Return the bytes of the serving process, of the engine, and of all others together."""
        with suppress(FileNotFoundError):
            engine, *others = [memory_bytes(pid) for pid in self.children()] or [0]
            return [memory_bytes(self.process.pid), engine, sum(others)]
        return [0, 0, 0]

    def kill_engine(self, limit_s: float = 60.0) -> tuple[float, float]:
        """Kill the engine and wait for another one. Return the times of both."""
        before = self.metrics()["cbatch:engine_restarts_total"]
        os.kill(self.children()[0], signal.SIGKILL)
        began_s = time.monotonic()

        def is_ready() -> bool:
            if self.metrics()["cbatch:engine_restarts_total"] == before:
                return False
            with self.open(None, "/ready") as response:
                return response.status == 200

        wait_until(is_ready, limit_s)
        return began_s, time.monotonic()

    def kill_fork_server(self, serve_a_chat: Callable[[], Any]) -> tuple[float, float]:
        """Kill the fork server of the workers, while its idle workers live. The next is ready when
        `serve_a_chat` returns."""
        for pid in self.children():
            with suppress(OSError):
                if "cbatch.workers.worker" in Path(f"/proc/{pid}/cmdline").read_text():
                    os.kill(pid, signal.SIGKILL)
        began_s = time.monotonic()
        serve_a_chat()
        return began_s, time.monotonic()

    def stop(self) -> int | None:
        """Stop the server; return its exit status, or None if it did not end in time."""
        self.process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(STOP_S)
        return None

    def log(self) -> tuple[list[dict[str, Any]], str]:
        """Return the log lines that are JSON, and the end of the others, which the interpreter or a
        library of a dying process wrote."""
        lines = self._log.read_text(errors="replace").splitlines()
        others = "\n".join(line for line in lines if not line.startswith("{"))
        return [msgspec.json.decode(line) for line in lines if line[:1] == "{"], others[-2000:]


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

            def listens() -> bool:
                assert process.poll() is None, path.read_text()
                return pattern.search(path.read_text()) is not None

            wait_until(listens, 120)
            match = pattern.search(path.read_text())
            assert match is not None
            yield Server(process, int(match[1]), path)
        finally:
            if process.poll() is None:
                process.kill()


def memory_bytes(pid: int) -> int:
    """Return the memory of a process, 0 if it has ended. A page is divided among the processes that
    share it."""
    with suppress(OSError):
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        match = re.search(r"^Pss: +(\d+) kB", rollup, re.MULTILINE)
        return int(match[1]) * 1024 if match else 0
    return 0
