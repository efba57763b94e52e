"""The simulator against the demo server, as its clients see it: `python -m bench.simulator_server
--cost FILE --calibrate`.

`cbatch serve` serves the demo pair, with lookahead off and goodput, and `cbatch bench` sends it the
traces of `bench.simulator_engine` at the same three loads. `cbatch sim` gets these traces, prices
of made-up requests (FILE; with `--calibrate` measured between the runs), acceptance as each prompt
had it in a run of its own, and what a request spends outside of the engine: the time to first token
of short requests to the idle server, less what the simulator says of these.

Engines have one thread, here and in the servers: what serves HTTP has a core for itself. `--folder
FOLDER` keeps the reports and records of both, `--page FILE` draws them on the same axes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import torch

from bench.calibrated import Prices, add_run_options
from bench.clients import write_items
from bench.load.report import read_records
from bench.lookahead import make_prompts
from bench.report import print_report
from bench.server import started
from bench.simulator_engine import (
    MAX_SLOTS,
    RECORD_K,
    Case,
    Runs,
    Served,
    load_policy,
    make_cases,
    record_fates,
    rows_of,
    simulate,
)
from cbatch.cli.main import main as cbatch
from cbatch.demo import demo_paths
from sim.calibrated import Calibration
from sim.report import Record, to_json, to_line
from sim.sources import OpenLoop, Remote
from sim.traces.reader import write_requests
from sim.traces.request import TraceRequest

POLICIES = ("off", "goodput")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
MAX_QUEUED = 100_000  # so that a load beyond what is served waits, as in the simulator
# Short requests to a server that has been idle, as it mostly is at a light load.
PROBES, PROBE_TOKENS, PROBES_PER_S = 48, 16, 20.0


class Client:
    """`cbatch bench`, in a process of its own, and the files between us."""

    def __init__(self, folder: Path, prompts: Sequence[Sequence[int]]) -> None:
        self._folder, self._prompts = folder, folder / "prompts.jsonl"
        write_items(self._prompts, [{"prompt": list(prompt)} for prompt in prompts])

    def replay(self, port: int, case: Case) -> Served:
        """The case's requests at their times; its report and records are left in the folder."""
        trace = self._folder / "trace.jsonl"
        write_requests(trace, case.requests)
        self._run(port, _name(case), "--trace", trace, "--prompts", self._prompts, "--ignore-eos")
        return _served(list(read_records(self._folder / f"{_name(case)}.jsonl")))

    def probe(self, port: int) -> float:
        """Median seconds to the first token of short requests that find the server idle."""
        lengths = ("--prompt-tokens", PROBE_TOKENS, "--output-tokens", 1)
        arrivals = ("--rate", PROBES_PER_S, "--arrivals", "constant", "--requests", PROBES)
        self._run(port, "probe", *arrivals, *lengths)
        records = read_records(self._folder / "probe.jsonl")
        return statistics.median(record.ttft_s for record in records)

    def _run(self, port: int, name: str, *words: object) -> None:
        command: list[object] = [sys.executable, "-m", "cbatch.cli.main", "bench"]
        command += [f"http://127.0.0.1:{port}", "--quiet", "--warmup", 4, *words]
        command += ["--json", self._folder / f"{name}.json"]
        command += ["--records", self._folder / f"{name}.jsonl"]
        done = subprocess.run(
            list(map(str, command)), env=os.environ | ONE_THREAD, capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"cbatch bench failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def _name(case: Case) -> str:
    return f"measured-{case.policy}-{case.load}"


def _served(records: Sequence[Record]) -> Served:
    first_s = min(record.arrival_s for record in records)
    return Served.of(records, max(r.arrival_s + r.e2e_s for r in records) - first_s)


def latency_of(calibration: Calibration, ttft_s: float) -> float:
    """What a request spends outside of the engine, of a probe's time to its first token."""
    probes = [
        TraceRequest(arrival_s=i / PROBES_PER_S, prompt_tokens=PROBE_TOKENS, output_tokens=1)
        for i in range(PROBES)
    ]
    _, records = simulate(calibration, [[0]], OpenLoop(probes), "off")
    return max(ttft_s - statistics.median(record.ttft_s for record in records), 0.0)


@contextlib.contextmanager
def servers() -> Iterator[dict[str, int]]:
    """Their ports, by policy."""
    model, draft = demo_paths()
    with contextlib.ExitStack() as stack:
        ports = {}
        for policy in POLICIES:
            command = [str(model), "--draft", str(draft), "--lookahead", policy]
            command += ["--max-slots", str(MAX_SLOTS), "--no-prefix-cache"]
            command += ["--max-queued-requests", str(MAX_QUEUED)]
            ports[policy] = stack.enter_context(started(command, ONE_THREAD))
        yield ports


def measure(prices: Prices, folder: Path, seconds: float, repeats: int) -> tuple[Runs, float]:
    """And the probes' time to the first token."""
    prompts = make_prompts("mix", demo_paths()[0])
    fates = record_fates(load_policy(f"fixed:{RECORD_K}"), prompts)
    runs = Runs(fates, make_cases(prices.first, fates, prompts, seconds, POLICIES))
    client = Client(folder, prompts)
    probes = []
    with servers() as ports:
        for _ in range(repeats):
            probes.append(client.probe(ports["off"]))
            for case in runs.cases:
                case.runs.append(client.replay(ports[case.policy], case))
                prices.after_run()
    return runs, statistics.median(probes)


def simulated(calibration: Calibration, runs: Runs, folder: Path) -> None:
    """Reports and records of the same cases, beside those that were measured."""
    for case in runs.cases:
        source = Remote(OpenLoop(case.requests), runs.latency_s)
        report, records = simulate(calibration, runs.fates, source, case.policy)
        path = folder / f"simulated-{case.policy}-{case.load}"
        path.with_suffix(".json").write_bytes(to_json(report))
        path.with_suffix(".jsonl").write_bytes(b"".join(map(to_line, records)))


def draw(page: Path, folder: Path, runs: Runs) -> None:
    """The load near saturation, of every policy; measured is what the last repeat was."""
    names = [
        f"{kind}-{case.policy}-{case.load}"
        for case in runs.cases
        if case.load == "near"
        for kind in ("measured", "simulated")
    ]
    reports, records = (
        [str(folder / f"{name}.{suffix}") for name in names] for suffix in ("json", "jsonl")
    )
    cbatch(["report", "page", *reports, "--page", str(page), "--records", *records])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=6.0, help="of arrivals in a run")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="keep reports and records in it")
    parser.add_argument("--page", type=Path, help="draw the load near saturation (with --folder)")
    add_run_options(parser)
    args = parser.parse_args(argv)
    if args.page and not args.folder:
        parser.error("--page: reports are drawn from files, give --folder")
    if args.runs is None:
        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as unnamed:
        folder = args.folder or Path(unnamed)
        folder.mkdir(parents=True, exist_ok=True)
        prices = Prices(args, MAX_SLOTS)
        if args.runs is not None:
            calibration = prices.final()
            runs = msgspec.json.decode(args.runs.read_bytes(), type=Runs)
        else:
            runs, probe_s = measure(prices, folder, args.seconds, args.repeats)
            calibration = prices.final()
            runs.latency_s = latency_of(calibration, probe_s)
        if args.out is not None:
            args.out.write_bytes(msgspec.json.encode(runs))
        if args.folder is not None:
            simulated(calibration, runs, folder)
        if args.page is not None:
            draw(args.page, folder, runs)
    rows = rows_of(calibration, runs)
    print_report(
        "simulator against the demo server, as clients see it",
        rows,
        notes=(
            f"{sum(row['within'] for row in rows)} of {len(rows)} within their bound; outside of "
            f"the engine a request spends {runs.latency_s * 1e3:.2f} ms",
        ),
        extra={"latency_s": runs.latency_s},
    )


if __name__ == "__main__":
    main()
