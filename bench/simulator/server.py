"""Cases served by `cbatch serve` and sent by `cbatch bench`: the demo pair as clients see it."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from bench.load.run.report import read_records
from bench.server.started import started
from bench.simulator.pair import (
    PROBE_TOKENS,
    PROBES,
    PROBES_PER_S,
    EngineRuns,
    LoadCase,
    ServedRun,
)
from cbatch.demo import demo_paths
from sim.report.report import Record
from sim.traces.reader import write_requests

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
MAX_QUEUED = 100_000  # so that a load beyond what is served waits, as in the simulator


class Client:
    """`cbatch bench`, in a process of its own, and the files between us."""

    def __init__(self, folder: Path, prompts: Sequence[Sequence[int]]) -> None:
        self._folder, self._prompts = folder, folder / "prompts.jsonl"
        items = (json.dumps({"prompt": list(prompt)}) for prompt in prompts)
        self._prompts.write_text("\n".join(items), encoding="utf-8")

    def replay(self, port: int, case: LoadCase) -> ServedRun:
        """The case's requests at their times; its report and records are left in the folder."""
        trace = self._folder / "trace.jsonl"
        write_requests(trace, case.requests)
        words = ("--trace", trace, "--prompts", self._prompts, "--ignore-eos")
        records = self._run(port, f"measured-{case.policy}-{case.load}", *words)
        first_s = min(record.arrival_s for record in records)
        end_s = max(record.arrival_s + record.e2e_s for record in records)
        return ServedRun.of(end_s - first_s, records)

    def probe(self, port: int) -> float:
        """Median seconds to the first token of short requests that find the server idle."""
        lengths = ("--prompt-tokens", PROBE_TOKENS, "--output-tokens", 1)
        arrivals = ("--rate", PROBES_PER_S, "--arrivals", "constant", "--requests", PROBES)
        records = self._run(port, "probe", *arrivals, *lengths)
        return statistics.median(record.ttft_s for record in records)

    def _run(self, port: int, name: str, *words: object) -> list[Record]:
        records = self._folder / f"{name}.jsonl"
        command: list[object] = [sys.executable, "-m", "cbatch.cli.main", "bench"]
        command += [f"http://127.0.0.1:{port}", "--quiet", "--warmup", 4, *words]
        command += ["--json", self._folder / f"{name}.json", "--records", records]
        done = subprocess.run(
            list(map(str, command)), env=os.environ | ONE_THREAD, capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"cbatch bench failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        return list(read_records(records))


@contextlib.contextmanager
def served_by_server(
    folder: Path, prompts: Sequence[Sequence[int]], policies: Sequence[str], max_slots: int
) -> Iterator[Callable[[EngineRuns, LoadCase], ServedRun]]:
    """A server for each policy; they are probed once a repeat."""
    model, draft = demo_paths()
    client, probes = Client(folder, prompts), list[float]()
    with contextlib.ExitStack() as stack:
        ports = {}
        for policy in policies:
            command = [str(model), "--draft", str(draft), "--lookahead", policy]
            command += ["--max-slots", str(max_slots), "--no-prefix-cache"]
            command += ["--max-queued-requests", str(MAX_QUEUED)]
            ports[policy] = stack.enter_context(started(command, ONE_THREAD))

        def serve_case(runs: EngineRuns, case: LoadCase) -> ServedRun:
            if case is runs.cases[0]:
                probes.append(client.probe(ports[case.policy]))
                runs.probe_ttft_s = statistics.median(probes)
            return client.replay(ports[case.policy], case)

        yield serve_case
