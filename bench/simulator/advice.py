"""The advice against reality: `python -m bench.simulator.advice`.

A real engine in this process records loads at half its capacity, at it and at twice it. `cbatch
advise` reads each log, and its best settings then serve the same load. The clock is the processor
time of this process, so that other processes do not delay it; they still slow its caches.

`own` is the error of the simulated recorded settings, and `error` that of the best ones against
their run. `gain` is that of the best settings over the recorded ones, both run. Errors beyond
their bounds without a warning are `unmarked`. `worse`: the advice made a figure worse.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np

from bench.report import print_report
from cbatch import EngineOptions
from cbatch.cli.main import main
from cbatch.cli.parser import CommandParser
from cbatch.core.request.request import Request, SamplingParams
from cbatch.engine.build import load_core
from cbatch.engine.core import EngineCore
from cbatch.engine.model_files import find_model, tokenizer_of
from cbatch.steplog.recorder import StepRecorder
from sim.advise.recording import read_run
from sim.advise.scenarios import ScenarioSettings

LOADS = (0.5, 1.0, 2.0)  # of the capacity
# By figure: the error that needs a warning, and the change by which advice makes it worse.
BOUNDS = {"tokens_per_s": (0.05, -0.01), "tpot_p95_s": (0.15, 0.05)}
KINDS = {  # median tokens of a prompt and of an output, and the recorded settings
    "chat": (120, 48, ScenarioSettings("off", None, 32, 1024, None)),
    "code": (400, 16, ScenarioSettings("adaptive:8", "suffix", 16, 1024, None)),
}
Offered = Sequence[tuple[float, Request]]  # with the time of each arrival
Serve = Callable[[ScenarioSettings, Offered, Path], dict[str, Any]]  # returns figures


class CpuClock:
    """The processor time of this process, and the time that it has slept."""

    def __init__(self) -> None:
        self._slept_s = 0.0

    def __call__(self) -> float:
        return time.process_time() + self._slept_s

    def sleep(self, seconds: float) -> None:
        self._slept_s += max(seconds, 0.0)


def make_requests(kind: str, model: str, count: int) -> Offered:
    """Return requests in bursts, one per second in the mean."""
    rng, text = np.random.default_rng(1), ""
    for path in sorted((Path(__file__).parents[2] / "docs").glob("*.md")):
        text += path.read_text(encoding="utf-8")
    tokens, at_s = tokenizer_of(find_model(model)).encode(text), np.cumsum(rng.gamma(0.5, 2, count))
    requests = []
    for number, arrival_s in enumerate((at_s - at_s[0]).tolist()):
        lengths = np.array(KINDS[kind][:2]) * rng.lognormal(0, 0.6, 2)
        prompt, output = lengths.astype(int).clip(2, 700).tolist()
        first = int(rng.integers(len(tokens) - prompt))
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        ids = tuple(tokens[first : first + prompt])
        request = Request(request_id=str(number), prompt=ids, params=params, seed=number)
        requests.append((arrival_s, request))
    return requests


def offer(engine: EngineCore, clock: CpuClock, requests: Offered) -> None:
    """Serve the first request alone, since the first steps of a process are slow, then the others
    at their times."""
    engine.add(requests[0][1])
    while engine.busy:
        engine.step()
    start_s = clock()
    for arrival_s, request in requests[1:]:
        while engine.busy and clock() < start_s + arrival_s:
            engine.step()
        clock.sleep(start_s + arrival_s - clock())
        engine.add(request)
    while engine.busy:
        engine.step()


def serve(model: str, settings: ScenarioSettings, requests: Offered, path: Path) -> dict[str, Any]:
    """Serve requests with a new engine that records to `path`. Return the figures of its log."""
    clock, values = CpuClock(), settings._asdict()
    values["drafter"] = settings.drafter and tuple(settings.drafter.split("+"))
    models = {"model": str(find_model(model)), "options": {"threads": 1}}
    with patch("time.perf_counter", clock), StepRecorder(path, models=models) as log:
        options = EngineOptions(**values, threads=1)
        core, _, _ = load_core(model, None, options, handles_text=False, log=log)
        offer(EngineCore(core.scheduler, core.executor, clock=clock), clock, requests)
        core.resources.close()
    return read_run(path).figures()


def compare(
    serve: Serve, settings: ScenarioSettings, requests: Offered, path: Path, *words: str
) -> dict[str, Any]:
    """Record the requests, and serve them with the advice of the log. `words` are for `advise`."""
    real = serve(settings, requests, path)
    with redirect_stdout(sys.stderr):
        main(["advise", str(path), "--json", f"{path}.json", "--processes", "1", *words])
    document = json.loads(Path(f"{path}.json").read_text(encoding="utf-8"))
    best = ScenarioSettings(*map(document["best"].get, ScenarioSettings._fields))
    run, is_new = serve(best, requests, Path(f"{path}-best")), best != settings
    row: dict[str, Any] = {
        "best": " ".join(str(v) for v in best if v),
        "unmarked": 0,
        "worse": False,
    }
    for name, (bound, worse) in BOUNDS.items():
        own, error = document["simulated"][name] / real[name], document["best"][name] / run[name]
        gain, is_doubtful = (
            run[name] / real[name] - 1 if is_new else 0.0,
            name in document["doubtful"],
        )
        row |= {name: real[name], f"{name} own": own - 1, f"{name} error": error - 1}
        row |= {f"{name} gain": gain, f"{name} warned": is_doubtful}
        row["unmarked"] += max(abs(own - 1), abs(error - 1)) > bound and not is_doubtful
        row["worse"] |= gain < worse if worse < 0 else gain > worse
    return row


def run(argv: list[str] | None = None) -> None:
    parser = CommandParser(prog="python -m bench.simulator.advice", description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--requests", type=int, default=40, help="of each load (default: 40)")
    args = parser.parse_args(argv)
    served, rows = partial(serve, args.model), []
    with TemporaryDirectory() as folder:
        for kind, (*_, settings) in KINDS.items():
            requests, path = make_requests(kind, args.model, args.requests), Path(folder) / kind
            served(settings, [(0.0, request) for _, request in requests], path)
            texts = [*read_run(path).texts.values()][1:]
            span_s = max(text.last_s for text in texts) - texts[0].arrival_s
            for load in LOADS:
                scale = span_s / load / requests[-1][0]
                offered = [(scale * arrival_s, request) for arrival_s, request in requests]
                row = compare(served, settings, offered, Path(folder) / f"{kind}-{load}")
                rows.append({"load": f"{kind} {load}"} | row)
                print(rows[-1], file=sys.stderr, flush=True)
    print_report("advice against real runs", rows)


if __name__ == "__main__":
    run()
