"""`python -m bench.gpu --out DIR`: see the package."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from bench.gpu import clocks, preflight, summary, supervise
from bench.gpu.cells import Cell, Journal, TimeBudget, run_cells, shard
from bench.gpu.sweep import write_table
from bench.gpu.world import Bench, World, describe, device_of, find_world

_SHIPPED_TABLE = Path(__file__).parents[2] / "triton_kernels" / "attention" / "tiles.json"
_MINUTES = 9.0
_TABLES_S = 5.0  # at the end, of the whole run


class Share(NamedTuple):
    """Of a section: the seconds without which it is not begun, and how it shares what is over."""

    least_s: float
    weight: float


# What is asked first comes first: whether it is right; what is fast; what an engine makes of it.
_SECTIONS = {
    "correctness": Share(18, 105),
    "limits": Share(12, 5),
    "kernels": Share(20, 115),
    "engine": Share(50, 100),
    "sweep": Share(30, 60),
}
_SHARDED, _WARMED = ("correctness",), ("kernels",)
_MODULES = {"limits": "ceilings"}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for tables, JSON")
    parser.add_argument("--section", choices=_SECTIONS, action="append", help="default: all")
    parser.add_argument("--peers", type=Path, help="folder with vllm/")
    parser.add_argument(
        "--minutes", type=float, default=_MINUTES, help=f"of the whole run; default {_MINUTES:g}"
    )
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)  # of a child
    parser.add_argument("--commit", help="of the code, where git cannot tell")
    parser.add_argument("--child", help=argparse.SUPPRESS)  # index/count of a section's processes
    parser.add_argument("--warming", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def seconds_of(sections: Iterable[str], whole_s: float) -> dict[str, float]:
    """The whole time, shared out among the sections asked for, and the limits that the others need;
    from the first on which does not fit, none."""
    asked, chosen, left_s = {"limits", *sections}, [], whole_s - _TABLES_S
    for name, share in _SECTIONS.items():
        if name not in asked:
            continue
        if share.least_s > left_s:
            break
        chosen.append(name)
        left_s -= share.least_s
    total = sum(_SECTIONS[name].weight for name in chosen)
    return {
        name: _SECTIONS[name].least_s + left_s * _SECTIONS[name].weight / total for name in chosen
    }


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
    # What does not end by itself is ended within the section's time, too.
    seconds = max(seconds - supervise.GRACE_S, 0.0)
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
    asked = args.section or list(_SECTIONS)
    sections = seconds_of(asked, 60 * args.minutes)
    about["left_out"] = [name for name in _SECTIONS if name in asked and name not in sections]
    if about["left_out"]:
        told = ", ".join(about["left_out"])
        print(f"left out, for {args.minutes:g} minutes do not hold them: {told}", flush=True)
    for old in (old for section in _SECTIONS for old in args.out.glob(f"**/{section}*.jsonl")):
        old.unlink()
    on_device = world is World.DEVICE
    with clocks.recorded(args.out) if on_device else nullcontext():
        found = run_sections(sections, Bench(world, device_of(world), args.out, args.peers), about)
    if "sweep" in found:
        source = f"swept on {summary.where(about)}, {about['date']}, commit {about['commit']}"
        write_table(found["sweep"], _SHIPPED_TABLE, source, args.out)
    summary.print_sections(found, about)
    return summary.document(found, about)


def run_sections(sections: dict[str, float], bench: Bench, about: dict[str, Any]) -> dict[str, Any]:
    """One after the other; the document on disk has all that is known after each."""
    found: dict[str, Any] = {}
    for section, seconds in sections.items():
        print(f"{section}: {seconds:.0f} s", flush=True)
        bench = bench._replace(left_s=TimeBudget(seconds).left_s)
        if bench.full:
            run_on_device(section, seconds, bench)
        else:
            run_here(section, bench)
        sampled = clocks.samples(bench.out) if bench.full else []
        rows = supervise.rows_of(bench.out, section)
        found[section] = {key: clocks.beside(row, sampled) for key, row in rows.items()}
        about["clocks"] = clocks.during(sampled)
        summary.write_document(bench.out, summary.document(found, about))
        states = Counter(str(row.get("status")).partition(":")[0] for row in rows.values())
        print(f"{section}: " + ", ".join(f"{n} {state}" for state, n in states.items()), flush=True)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if args.child:
        run_child(args)
        return 0
    if find_world() is World.DEVICE:
        problem = preflight.needs()
        if problem is not None:
            print(f"bench.gpu: {problem}", file=sys.stderr)
            return 2
        print(preflight.line(preflight.lacks(args.peers)), flush=True)
    else:
        print("no GPU is used: a dry run, every figure is null", flush=True)
    print(json.dumps(run(args)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
