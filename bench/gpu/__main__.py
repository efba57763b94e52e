"""The command `python -m bench.gpu --out DIR`: sections one after another, each a process."""

from __future__ import annotations

import argparse
import contextlib
import functools
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
from typing import NamedTuple, NoReturn

from bench.gpu import ceilings, correctness, engine, kernels, models, report, sweep, vllm_engine
from bench.gpu.cells import FILE, NOT_REACHED, Cell, Results, run_cells
from bench.gpu.environment import Bench, describe
from bench.gpu.limits import SMALLER
from cbatch.cli.parser import CommandParser

_MINUTES = 5.0
_PACKING_S = 12.0  # time reserved for packing Triton's cache
_MAX_RESTARTS = 4
CACHE, CLOCKS, LOG = "triton_cache.txz", "clocks.csv", "log.txt"
_CLOCKS = "timestamp,clocks.sm,power.draw,clocks_event_reasons.active"


class Section(NamedTuple):
    """A section and its time limits. One that has less than `min_s` is left out; earlier sections
    leave that time for a `needed` section."""

    cells: Callable[[Bench], Iterable[Cell]]
    min_s: float
    max_s: float
    needed: bool = False


SECTIONS = {
    "ceilings": Section(ceilings.cells, 8, 40),
    "engine": Section(engine.cells, 25, 240),
    "vllm": Section(vllm_engine.cells, 45, 300),
    "correctness": Section(correctness.cells, 20, 150, needed=True),
    "kernels": Section(kernels.cells, 20, 150, needed=True),
    "models": Section(models.cells, 20, 240),
    "engine-1b": Section(functools.partial(engine.cells, model=SMALLER), 25, 150),
    "sweep": Section(sweep.cells, 40, 600),
}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = CommandParser(
        prog="python -m bench.gpu",
        description="Measure engine, kernels and correctness on a GPU; without one, a dry run.",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for results and tables")
    parser.add_argument("--section", choices=SECTIONS, action="append", help="default: all")
    parser.add_argument("--peers", type=Path, help="folder with vllm/, or vllm.txz and wheels/")
    parser.add_argument(
        "--minutes",
        type=float,
        default=_MINUTES,
        help=f"duration of the whole run; default {_MINUTES:g}",
    )
    parser.add_argument(
        "--triton-cache",
        type=Path,
        metavar="FILE",
        help=f"unpacked before the run if it exists; DIR/{CACHE} is written after it",
    )
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
    signal.signal(signal.SIGTERM, _interrupt)
    with clocks(args.out):
        run_sections(names, command, args.out, until_s)
    if args.triton_cache is not None:
        with tarfile.open(args.out / CACHE, "w:xz", preset=1) as packed:
            for path in sorted(cache.iterdir()) if cache.exists() else ():
                packed.add(path, path.name)


@contextlib.contextmanager
def clocks(out: Path) -> Iterator[None]:
    """Write the device's clocks five times a second, and what slowed it, if it tells them."""
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
            Results(out).save(name, {name: {"status": "left out: not enough time"}})
        else:
            words = [*command, "--child", name]
            run_section(name, words, out, min(left_s, section.max_s))


def run_section(name: str, command: Sequence[str], out: Path, seconds: float) -> None:
    """Run a process for at most so long. If it dies it loses its current cell, and another
    continues after that cell."""
    until_s, reached = time.monotonic() + seconds, 0
    for _ in range(1 + _MAX_RESTARTS):
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
        results = Results(out)
        states = [row["status"] for row in results.of(name).values()]
        if not states:
            results.save(name, {name: {"status": f"failed: exit {process.returncode}, see {LOG}"}})
        before, reached = reached, sum(state != NOT_REACHED for state in states)
        if reached <= before:
            return


def _interrupt(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def run_child(name: str, args: argparse.Namespace) -> None:
    """Measure the cells of a section in this process."""
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d ms %(name)s %(message)s")
    bench = Bench.open(args.out, args.peers)
    commit = {"commit": args.commit} if args.commit else {}
    bench.results.about = describe(bench) | commit | bench.results.about
    cells = SECTIONS[name].cells(bench)
    if not bench.full:
        rows = {cell.key: cell.labels | {"status": "unmeasured: no GPU"} for cell in cells}
        bench.results.save(name, rows)
        return
    run_cells(name, cells, bench.results)


def main(argv: Sequence[str] | None = None) -> int:
    args, words = parse(argv), sys.argv[1:] if argv is None else argv
    if args.child:
        run_child(args.child, args)
        return 0
    try:
        run(args, [sys.executable, "-m", "bench.gpu", *words])
    finally:
        results = Results(args.out)
        sweep.write_table(results, args.out)
        text = report.tables(results.about | {"minutes": args.minutes}, results.rows)
        (args.out / report.TABLE).write_text(text + "\n", encoding="utf-8")
    print(text, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
