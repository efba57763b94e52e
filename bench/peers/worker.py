"""A process that runs one of the compared systems."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

ROOT = Path(__file__).parents[2]
SETTLE_S = 0.3  # pause before a run, until idle threads of the previous system stop spinning
Prompts = list[list[int]]


class Run(msgspec.Struct):
    """Outputs and times of batches."""

    seconds: float
    outputs: Prompts  # token ids, in order of the prompts
    steps_s: list[float] = []  # durations of decoding steps, if the system reports them

    @property
    def tokens(self) -> int:
        return sum(map(len, self.outputs))

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


class System(NamedTuple):
    """A compared system: its module in `bench.peers.workers`, a Python that can import it, and its
    settings."""

    name: str
    lookahead: str
    module: str
    python: str
    threads: int
    settings: dict[str, Any]

    @property
    def label(self) -> str:
        return self.name if self.lookahead == "off" else f"{self.name} {self.lookahead}"


class Worker:
    """A process that runs a system. The constructor returns when it has imported the system. Every
    call raises RuntimeError, with the end of the worker's output, if the worker dies."""

    def __init__(self, system: System) -> None:
        threads = str(system.threads)
        environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"}
        self.system = system
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [system.python, "-m", f"bench.peers.workers.{system.module}_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._output,
            text=True,
            cwd=ROOT,
            env=os.environ | environment,
        )
        self._read_answer()  # sent after the imports

    def start(self) -> float:
        """Construct the system. Return the seconds until it was ready."""
        return float(self._ask(self.system.settings)["seconds"])

    def call(self, method: str, *arguments: Any) -> Any:
        return self._ask({"method": method, "arguments": arguments})["value"]

    def run(self, prompts: Prompts, output_tokens: int) -> Run:
        time.sleep(SETTLE_S)
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
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._output.seek(0)
            text = self._output.read().decode(errors="replace")
            self.__exit__()
            raise RuntimeError(f"the worker of {self.system.name} died:\n{text[-3000:]}")
        return json.loads(line)
