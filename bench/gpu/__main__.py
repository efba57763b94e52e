"""The command `python -m bench.gpu --out DIR`: the parts of a run, each a process of `child.py`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from bench.gpu import clocks, report
from bench.gpu.cells import Row
from bench.gpu.run import GpuRun, Rows, RunPart
from cbatch.cli.parser import CommandParser

_TILES = Path(__file__).parents[2] / "triton_kernels" / "attention" / "tiles.json"
_MINUTES = 5.0
_LAST_S, _PACKING_S = 3.0, 12.0  # time reserved for the tables and for packing Triton's cache
CACHE = "triton_cache.txz"


def parts(out: Path, peers: Path | None, sections: Sequence[str]) -> list[RunPart]:
    """Return the parts of a run. The engine, vLLM and the ceilings start at once; vLLM measures
    after the engine's steps."""

    def part(
        name: str, least_s: float, most_s: float, *after: str, needed: bool = False
    ) -> RunPart:
        words = ("-m", "bench.gpu", "--child", name, "--out", str(out))
        words += ("--peers", str(peers)) if peers is not None else ()
        return RunPart(name, (sys.executable, *words), least_s, most_s, after, needed)

    parts = [
        part("ceilings", 8, 40),
        part("engine", 25, 240),
        part("vllm", 45, 300),
        part("correctness", 20, 150, "engine", needed=True),
        part("kernels", 20, 150, "correctness", "vllm", needed=True),
        part("models", 20, 240, "kernels"),
        part("engine-1b", 25, 150, "models"),
        part("sweep", 40, 600, "engine-1b"),
    ]
    return [p for p in parts if p.name in sections and (p.name != "vllm" or peers is not None)]


SECTIONS = (
    "ceilings", "engine", "vllm", "correctness", "kernels", "models", "engine-1b", "sweep",
)  # fmt: skip


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


# --- the run --------------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> Rows:
    """Run all parts and return their rows by cell. A signal ends the run; measured rows are
    kept."""
    out: Path = args.out
    out.mkdir(parents=True, exist_ok=True)
    cache = _cache_folder()
    if args.triton_cache is not None and args.triton_cache.exists():
        with tarfile.open(args.triton_cache) as packed:
            packed.extractall(cache, filter="data")
    spare_s = _LAST_S + (_PACKING_S if args.triton_cache is not None else 0.0)
    signal.signal(signal.SIGTERM, _interrupt)
    with tempfile.TemporaryDirectory(prefix="cbatch-gpu-") as folder, clocks.recorded() as samples:

        def write(rows: Rows, about: Row) -> None:
            complete_about = about | ({"commit": args.commit} if args.commit else {})
            flat = [
                {"section": name, **row, **clocks.during(samples, *row.get("at_s", (0, 0)))}
                for name, of_section in rows.items()
                for row in of_section.values()
            ]
            report.write(out, complete_about | {"minutes": args.minutes}, flat)

        gpu_run = GpuRun(Path(folder), 60 * args.minutes - spare_s, write)
        try:
            gpu_run.run(parts(Path(folder), args.peers, args.section or SECTIONS))
        finally:
            (out / "log.txt").write_text(gpu_run.log, encoding="utf-8")
            _write_tiles(gpu_run, out)
    if args.triton_cache is not None:
        _pack(cache, out / CACHE)
    return gpu_run.rows


def _interrupt(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def _cache_folder() -> Path:
    return Path(os.environ.get("TRITON_CACHE_DIR", Path.home() / ".triton" / "cache"))


def _pack(cache: Path, to: Path) -> None:
    with tarfile.open(to, "w:xz", preset=1) as packed:
        for path in sorted(cache.iterdir()) if cache.exists() else ():
            packed.add(path, path.name)


def _write_tiles(gpu_run: GpuRun, out: Path) -> None:
    """Write the tile table that follows from a sweep."""
    if gpu_run.rows.get("sweep"):
        device, date, commit = (gpu_run.about.get(name) for name in ("device", "date", "commit"))
        source = f"swept on {device}, {date}, commit {commit}"
        from bench.gpu.sweep import write_table

        write_table(gpu_run.rows["sweep"], _TILES, source, out)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if args.child:
        from bench.gpu.child import run_child

        return run_child(args.child, args.out, args.peers)
    run(args)
    print((args.out / report.TABLE).read_text(encoding="utf-8"), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
