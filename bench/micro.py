"""Compare every micro-benchmark with a stored baseline: `python -m bench.micro` (part of `make
bench`).

Runs `pytest bench --benchmark-enable` on one thread, and prints the ratio of each benchmark's lower
quartile to the baseline's (`bench/baseline.json`, or `--baseline FILE`). The lower quartile is used
because other programs can only make a round slower. Machines differ, and the speed of one machine
drifts. So a fixed piece of Python and numpy, the yardstick, is timed before and after. `ratio` is
corrected by the yardstick, `raw` is not. `--save` stores the measurements as the baseline.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.report import print_report, rounded
from cbatch.cli.parser import CommandParser
from cbatch.system.machine import describe_machine, describe_versions

BASELINE = Path(__file__).parent / "baseline.json"
SLOWER = 1.3  # ratio beyond which a benchmark is reported as slower
YARDSTICK_ROUNDS = 200  # timed runs of the yardstick; its time is their median


def yardstick_us() -> float:
    """Return the median microseconds of a loop, a sort and a product, typical of the benchmarks."""
    rng = np.random.default_rng(0)
    values, matrix = rng.random(4096), rng.random((64, 64)).astype(np.float32)
    times_us = []
    for _ in range(YARDSTICK_ROUNDS):
        started_s = time.perf_counter()
        table = {i: i * i for i in range(1000)}
        sum(table.values())
        np.sort(values)
        for _ in range(10):
            matrix @ matrix
        times_us.append((time.perf_counter() - started_s) * 1e6)
    return float(np.median(times_us))


def run(options: Sequence[str]) -> dict[str, Any]:
    """Run the micro-benchmarks; `options` go to pytest. Raises RuntimeError with pytest's
    output."""
    before_us = yardstick_us()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, "-m", "pytest", str(Path(__file__).parent), "-q", "-x"]
        command += ["--benchmark-enable", "--benchmark-only", f"--benchmark-json={out}"]
        # On a busy machine a matrix product of several threads can be a hundred times slower, as
        # its threads wait for each other.
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run([*command, *options], capture_output=True, text=True, env=environment)
        if done.returncode:
            raise RuntimeError(f"pytest failed ({done.returncode}):\n{done.stdout}{done.stderr}")
        benchmarks = json.loads(out.read_bytes())["benchmarks"]
    return {
        "machine": describe_machine(),
        "versions": describe_versions(),
        "yardstick_us": round((before_us + yardstick_us()) / 2, 2),
        "quartile_us": {_name(each): round(each["stats"]["q1"] * 1e6, 3) for each in benchmarks},
    }


def rows_of(measured: dict[str, Any], baseline: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return a row for each benchmark, in order of running. Ratios are None without a baseline."""
    past = {} if baseline is None else baseline["quartile_us"]
    slowdown = 1.0 if baseline is None else measured["yardstick_us"] / baseline["yardstick_us"]
    rows = []
    for name, quartile_us in measured["quartile_us"].items():
        row = {"benchmark": name, "quartile_us": quartile_us, "baseline_us": past.get(name)}
        raw = quartile_us / past[name] if name in past else None
        rows.append(row | {"raw": rounded(raw), "ratio": rounded(raw and raw / slowdown)})
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = CommandParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--baseline", type=Path, default=BASELINE, metavar="FILE", help="stored measurements"
    )
    parser.add_argument("--save", action="store_true", help="store the measurements in FILE")
    parser.add_argument("--only", metavar="WORDS", help="run the benchmarks that match (pytest -k)")
    parser.add_argument(
        "--seconds", type=float, default=0.5, help="approximate time of each benchmark"
    )
    args = parser.parse_args(argv)
    options = [f"--benchmark-max-time={args.seconds}"]
    measured = run(options + (["-k", args.only] if args.only else []))
    baseline = json.loads(args.baseline.read_bytes()) if args.baseline.exists() else None
    rows = rows_of(measured, baseline)
    if args.save:
        args.baseline.write_text(json.dumps(measured, indent=1) + "\n")
    yardsticks = {
        "yardstick_us": measured["yardstick_us"],
        "baseline_yardstick_us": None if baseline is None else baseline["yardstick_us"],
    }
    notes = _notes(measured, baseline, rows)
    print_report("micro-benchmarks", rows, notes=notes, extra=yardsticks)


def _notes(
    measured: dict[str, Any], baseline: dict[str, Any] | None, rows: list[dict[str, Any]]
) -> list[str]:
    if baseline is None:
        return ["no baseline: store one with --save"]
    cpu, this_cpu = baseline["machine"]["cpu"], measured["machine"]["cpu"]
    slowdown = measured["yardstick_us"] / baseline["yardstick_us"]
    notes = [f"baseline: {cpu}, torch {baseline['versions'].get('torch')}"]
    if cpu != this_cpu:
        notes.append(f"this machine differs ({this_cpu}): ratios are rough")
    notes.append(
        f"yardstick took {slowdown:.3f} x the baseline's time; ratio = raw / {slowdown:.3f}"
    )
    slower = [row["benchmark"] for row in rows if row["ratio"] and row["ratio"] > SLOWER]
    if slower:
        notes.append(f"slower by more than {SLOWER - 1:.0%}: {', '.join(slower)}")
    return notes


def _name(benchmark: dict[str, Any]) -> str:
    """Return a benchmark's short name: its file without the common parts, and its test."""
    path, _, test = benchmark["fullname"].rpartition("::")
    kind = Path(path).stem.removeprefix("test_").removesuffix("_micro")
    # rich would read brackets as markup.
    return f"{kind}: {test.removeprefix('test_').replace('[', ' ').rstrip(']')}"


if __name__ == "__main__":
    main()
