"""A process that runs one of the compared systems."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from bench.failures import Failures
from bench.peers.engines import Prompts

_ROOT = Path(__file__).parents[2]
_SETTLE_S = 0.3  # pause before a run, until idle threads of the previous system stop spinning


class Run(msgspec.Struct):
    """Outputs and times of batches."""

    seconds: float
    outputs: Prompts  # token ids, in order of the prompts
    steps_s: list[float] = []  # durations of decoding steps, if the system reports them

    def __add__(self, later: Run) -> Run:
        outputs, steps_s = self.outputs + later.outputs, self.steps_s + later.steps_s
        return Run(self.seconds + later.seconds, outputs, steps_s)

    @property
    def tokens(self) -> int:
        return sum(map(len, self.outputs))


class System(NamedTuple):
    """A compared system: its engine, a Python that can import it, and its settings."""

    name: str
    engine: str
    python: str
    threads: int
    settings: dict[str, Any]

    @property
    def lookahead(self) -> str:
        return str(self.settings.get("lookahead", "off"))

    @property
    def label(self) -> str:
        return self.name if self.lookahead == "off" else f"{self.name} {self.lookahead}"


class Worker:
    """A process that runs a system. The constructor returns when it has imported the system. Every
    call raises RuntimeError, with the end of the worker's output, if the worker dies."""

    def __init__(self, system: System) -> None:
        threads = str(system.threads)
        environment = {"PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"}
        self.system = system
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [system.python, "-m", "bench.peers.engines", system.engine],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._output,
            text=True,
            cwd=_ROOT,
            env=os.environ | environment,
        )
        self._read_answer()  # sent after the imports

    def start(self) -> float:
        """Construct the system. Return the seconds until it was ready."""
        return float(self._ask(self.system.settings)["seconds"])

    def call(self, method: str, *arguments: Any) -> Any:
        return self._ask({"method": method, "arguments": arguments})["value"]

    def run(self, prompts: Prompts, output_tokens: int) -> Run:
        time.sleep(_SETTLE_S)
        answer = self._ask({"method": "run", "arguments": [prompts, output_tokens]})
        outputs, ends_s = answer["value"]
        return Run(answer["seconds"], outputs, np.diff(ends_s).tolist())

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._output.close()

    def _ask(self, call: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(call) + "\n")
            self._process.stdin.flush()
        return self._read_answer()

    def _read_answer(self) -> Any:
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return json.loads(line)
        self._process.wait()
        self._output.seek(0)
        text = self._output.read().decode(errors="replace")
        self.__exit__()
        raise RuntimeError(f"the worker of {self.system.name} died:\n{text[-3000:]}")


@contextlib.contextmanager
def started(systems: Sequence[System], failures: Failures) -> Iterator[list[Worker]]:
    """Start the systems that have not failed, each in a process that ends with the context."""
    with contextlib.ExitStack() as stack:
        workers = []
        for system in systems:
            if system.label not in failures:
                with failures.caught(system.label):
                    worker = stack.enter_context(Worker(system))
                    worker.start()
                    workers.append(worker)
        yield workers
