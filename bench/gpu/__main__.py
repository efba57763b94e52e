"""`python -m bench.gpu --out DIR`: see the package."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.gpu import summary, supervise
from bench.gpu.cells import Cell, Journal, TimeBudget, run_cells, shard
from bench.gpu.sweep import write_table
from bench.gpu.world import Bench, World, describe, device_of, find_world

_SHIPPED_TABLE = Path(__file__).parents[2] / "triton_kernels" / "attention" / "tiles.json"
# Seconds of the whole run, and how sections share them; `limits` is always run, for the others. To
# end what does not end by itself, and for tables, there is a minute more.
_WHOLE_S = 480.0
_SHARES = {"limits": 15, "correctness": 120, "kernels": 130, "sweep": 70, "engine": 145}
_SHARDED, _WARMED = ("correctness",), ("kernels", "sweep")
_MODULES = {"limits": "ceilings"}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for tables, JSON")
    parser.add_argument("--section", choices=_SHARES, action="append", help="default: all")
    parser.add_argument("--peers", type=Path, help="folder with vllm/")
    parser.add_argument(
        "--seconds", type=float, default=_WHOLE_S, help=f"of the whole run; default {_WHOLE_S:.0f}"
    )
    parser.add_argument("--commit", help="of the code, where git cannot tell")
    parser.add_argument("--child", help=argparse.SUPPRESS)  # index/count of a section's processes
    parser.add_argument("--warming", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def seconds_of(sections: Iterable[str], whole_s: float) -> dict[str, float]:
    """The whole time, shared out among the sections asked for."""
    chosen = [name for name in _SHARES if name in {"limits", *sections}]
    total = sum(_SHARES[name] for name in chosen)
    return {name: whole_s * _SHARES[name] / total for name in chosen}


def cells_of(section: str) -> Callable[[Bench], Iterable[Cell]]:
    module = importlib.import_module(f"bench.gpu.{_MODULES.get(section, section)}")
    found: Callable[[Bench], Iterable[Cell]] = module.cells
    return found


def run_child(args: argparse.Namespace) -> None:
    """One process of one section."""
    world, budget = find_world(), TimeBudget(args.seconds)
    section, (index, count) = args.section[0], map(int, args.child.split("/"))
    bench = Bench(world, device_of(world), args.out, args.peers, budget.left_s, args.warming)
    cells = shard(cells_of(section)(bench), index, count)
    journal = Journal(supervise.Shard(index, count, args.warming).journal(args.out, section))
    run_cells(cells, journal, budget.left_s)


def run_here(section: str, bench: Bench) -> None:
    """In this process: nothing can crash or hang where nothing is launched on a device."""
    run_cells(cells_of(section)(bench), Journal(bench.out / f"{section}.jsonl"), bench.left_s)


def run_on_device(section: str, seconds: float, bench: Bench) -> None:
    shards = supervise.SHARDS if section in _SHARDED else 1
    plan = supervise.SectionPlan(section, seconds, shards, section in _WARMED)
    supervise.run_section(plan, bench.out, supervise.child_command(bench.out, bench.peers))
    missing = Journal(bench.out / f"{section}.missing.jsonl")
    missing.rows |= supervise.rows_of(bench.out, section)
    run_cells(cells_of(section)(bench), missing, lambda: 0.0)  # names what no process came to


def run(args: argparse.Namespace) -> dict[str, Any]:
    world = find_world()
    about = describe(world)
    about["commit"] = args.commit or about["commit"]
    args.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    sections = seconds_of(args.section or _SHARES, args.seconds)
    for section in sections:
        for old in args.out.glob(f"**/{section}*.jsonl"):
            old.unlink()
    for section, seconds in sections.items():
        print(f"{section}: {seconds:.0f} s", flush=True)
        bench = Bench(world, device_of(world), args.out, args.peers, TimeBudget(seconds).left_s)
        if world is World.DEVICE:
            run_on_device(section, seconds, bench)
        else:
            run_here(section, bench)
        found[section] = supervise.rows_of(args.out, section)
        summary.write_document(args.out, summary.document(found, about))
    if "sweep" in found:
        source = f"swept on {summary.where(about)}, {about['date']}, commit {about['commit']}"
        write_table(found["sweep"], _SHIPPED_TABLE, source, args.out)
    summary.print_sections(found, about)
    return summary.document(found, about)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if args.child:
        run_child(args)
    else:
        print(json.dumps(run(args)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
