"""The command `python -m bench.gpu --out DIR`: sections one after another, each a process."""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import logging
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.gpu import correctness, engine, host, kernels, models, report, sweep, timing
from bench.gpu.cells import FILE, NOT_REACHED, Bench, Cell
from bench.gpu.timing import SMALLER
from bench.report import print_table
from cbatch.cli.output import print_line
from cbatch.cli.parser import CommandParser

_MINUTES = 5.0
_PACKING_S = 12.0  # time reserved for packing Triton's cache
_MAX_STARTS = 5  # of a section's process
CACHE, CLOCKS, LOG, TABLE = "triton_cache.txz", "clocks.csv", "log.txt", "table.txt"
_CLOCKS = "timestamp,clocks.sm,power.draw,clocks_event_reasons.active"


class Section(NamedTuple):
    """A section and its time limits. One that has less than `min_s` is left out; earlier sections
    leave that time for a `needed` section. One that runs `anywhere` needs no GPU."""

    cells: Callable[[Bench], Iterable[Cell]]
    min_s: float
    max_s: float
    needed: bool = False
    anywhere: bool = False


SECTIONS = {
    "ceilings": Section(timing.cells, 8, 40),
    "engine": Section(engine.cells, 25, 240),
    "vllm": Section(engine.vllm_cells, 45, 300),
    "correctness": Section(correctness.cells, 20, 150, needed=True),
    "kernels": Section(kernels.cells, 20, 150, needed=True),
    "models": Section(models.cells, 20, 240),
    "engine-1b": Section(functools.partial(engine.cells, model=SMALLER), 25, 150),
    "sweep": Section(sweep.cells, 40, 600),
    "host": Section(host.cells, 30, 120, anywhere=True),
}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = CommandParser(
        prog="python -m bench.gpu",
        description="Measure engine, kernels and correctness on a GPU; without one, only the host.",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for results and tables")
    parser.add_argument("--section", choices=SECTIONS, action="append", help="default: all")
    parser.add_argument("--peers", type=Path, help="folder with vllm/, or vllm.txz and wheels/")
    text = f"duration of the whole run; default {_MINUTES:g}"
    parser.add_argument("--minutes", type=float, default=_MINUTES, help=text)
    text = f"unpacked before the run if it exists; DIR/{CACHE} is written after it"
    parser.add_argument("--triton-cache", type=Path, metavar="FILE", help=text)
    parser.add_argument("--commit", help="commit of the code, if git is not available")
    parser.add_argument("--child", choices=SECTIONS, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.peers is not None and not any((args.peers / n).exists() for n in ("vllm", "vllm.txz")):
        parser.error(f"--peers: {args.peers} holds neither vllm/ nor vllm.txz")
    return args


def run(args: argparse.Namespace, command: Sequence[str]) -> None:
    """Run the sections within the time. A signal ends the run; measured rows are kept."""
    args.out.mkdir(parents=True, exist_ok=True)
    for name in (FILE, LOG):  # of an earlier run
        (args.out / name).unlink(missing_ok=True)
    cache = Path(os.environ.get("TRITON_CACHE_DIR", Path.home() / ".triton" / "cache"))
    until_s = time.monotonic() + 60 * args.minutes
    if args.triton_cache is not None:
        until_s -= _PACKING_S
        if args.triton_cache.exists():
            with tarfile.open(args.triton_cache) as packed:
                packed.extractall(cache, filter="data")
    names = [name for name in SECTIONS if name in (args.section or SECTIONS)]
    if args.peers is None and "vllm" in names:
        names.remove("vllm")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with clocks(args.out):
        run_sections(names, command, args.out, until_s)
    if args.triton_cache is not None:
        with tarfile.open(args.out / CACHE, "w:xz", preset=1) as packed:
            for path in sorted(cache.iterdir()) if cache.exists() else ():
                packed.add(path, path.name)


@contextlib.contextmanager
def clocks(out: Path) -> Iterator[None]:
    """Write the device's clocks five times a second, and what slowed it, if it reports them."""
    if shutil.which("nvidia-smi") is None:
        yield
        return
    words = ["nvidia-smi", f"--query-gpu={_CLOCKS}", "--format=csv", "-lms", "200", "-i", "0"]
    with (out / CLOCKS).open("w") as file, subprocess.Popen(words, stdout=file) as process:
        try:
            yield
        finally:
            process.kill()


def run_sections(names: Sequence[str], command: Sequence[str], out: Path, until_s: float) -> None:
    for at, name in enumerate(names):
        section, later = SECTIONS[name], [SECTIONS[other] for other in names[at + 1 :]]
        reserved_s = sum(other.min_s for other in later if other.needed)
        left_s = until_s - time.monotonic() - reserved_s
        if left_s < section.min_s:
            Bench(out).save(name, {name: {"status": "left out: not enough time"}})
        else:
            words = [*command, "--child", name]
            run_section(name, words, out, min(left_s, section.max_s))


def run_section(name: str, command: Sequence[str], out: Path, seconds: float) -> None:
    """Run a process for at most so long. If it dies it loses its current cell, and another
    continues after that cell."""
    until_s, reached = time.monotonic() + seconds, 0
    for _ in range(_MAX_STARTS):
        with (out / LOG).open("a") as log:
            log.write(f"##### {name}\n")
            log.flush()
            process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            if not process.wait(until_s - time.monotonic()):
                return
        except subprocess.TimeoutExpired:
            return
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # including its children
            process.wait()
        bench = Bench(out)
        states = [row["status"] for row in bench.of(name).values()]
        if not states:
            bench.save(name, {name: {"status": f"failed: exit {process.returncode}, see {LOG}"}})
        before, reached = reached, sum(state != NOT_REACHED for state in states)
        if reached <= before:
            return


def run_child(name: str, args: argparse.Namespace) -> None:
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d ms %(name)s %(message)s")
    bench = Bench(args.out, args.peers)
    commit = {"commit": args.commit} if args.commit else {}
    bench.about = bench.describe() | commit | bench.about
    cells = SECTIONS[name].cells(bench)
    if bench.full or SECTIONS[name].anywhere:
        bench.measure(name, cells)
    else:
        rows = {cell.key: cell.labels | {"status": "unmeasured: no GPU"} for cell in cells}
        bench.save(name, rows)


def print_results(bench: Bench, minutes: float) -> None:
    """Print tables, and write them to a file; then one line of JSON, as every benchmark does."""
    text, about = io.StringIO(), bench.about
    with contextlib.redirect_stdout(text):
        device = about.get("device") or "no GPU: only `host` is timed"
        print(device, about.get("date"), f"commit {about.get('commit')}", sep=", ")
        for title, rows in report.tables(bench.rows).items():
            print_table(title, rows)
    (bench.out / TABLE).write_text(text.getvalue(), encoding="utf-8")
    print(text.getvalue(), flush=True)
    print_line({"results": bench.rows, **about, "minutes": minutes})


def main(argv: Sequence[str] | None = None) -> int:
    args, words = parse(argv), sys.argv[1:] if argv is None else argv
    if args.child:
        run_child(args.child, args)
        return 0
    try:
        run(args, [sys.executable, "-m", "bench.gpu", *words])
    finally:
        bench = Bench(args.out)
        sweep.write_table(bench)
        print_results(bench, args.minutes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
