"""What must hold on an H100 and whether it did, tables for people, and one JSON document of
everything."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bench.gpu.cells import Row
from bench.gpu.limits import CHUNK, DECODE, FEW_LONG, VERIFY
from bench.report import print_table

Rows = Mapping[str, Mapping[str, Any]]
OURS, VLLM = "cbatch", "vllm triton"


class TargetVerdict(NamedTuple):
    """`met` is None where something that it needs was not measured."""

    target: str
    needed: str
    found: float | None
    met: bool | None


def verdicts(correctness: Rows, kernels: Rows, engine: Rows) -> list[TargetVerdict]:
    """`engine` may be empty, and so may any: what is missing is unmeasured."""

    def of(name: str, field: str = "fraction_of_limit") -> float | None:
        value = kernels.get(f"{name} {OURS}", {}).get(field)
        return None if value is None else float(value)

    decode, verify, chunk, few = (f"attention {n}" for n in (DECODE, VERIFY, CHUNK, FEW_LONG))
    longer = _ratio(of(verify, "median_us"), of(decode, "median_us"))
    step = engine.get("llama-3.1-8b batch 64 off cbatch", {}).get("over_limit")
    return [
        _all_right(correctness),
        _at_least("decode attention, of copy bandwidth", 0.85, of(decode)),
        _at_least("verify (k = 7), of copy bandwidth", 0.85, of(verify)),
        _at_most("verify (k = 7) over decode", 1.08, longer),
        _at_least("few long sequences, of copy bandwidth", 0.70, of(few)),
        _at_least("prefill chunk of 2048, TFLOP/s", 400, of(chunk, "tflop_per_s")),
        _at_least(
            "verify sampling, 64 rows, of one read", 0.75, of("verify coupled 64 requests k 0")
        ),
        _ahead_of_vllm(kernels),
        _at_most("engine step over its limit, 8B, batch 64", 1.15, step),
    ]


def _ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or below is None else above / below


def _at_least(target: str, needed: float, found: float | None) -> TargetVerdict:
    return TargetVerdict(target, f">= {needed}", found, None if found is None else found >= needed)


def _at_most(target: str, needed: float, found: float | None) -> TargetVerdict:
    return TargetVerdict(target, f"<= {needed}", found, None if found is None else found <= needed)


def _all_right(correctness: Rows) -> TargetVerdict:
    """Wrong, failed and crashed cells; those left out make it unknown, unless one is wrong."""
    states = [str(row.get("status")) for row in correctness.values()]
    bad = sum(state.startswith(("wrong", "failed", "crashed", "hung")) for state in states)
    ran = sum(state == "ok" for state in states)
    met = False if bad else (True if ran and ran == len(states) else None)
    return TargetVerdict("correctness cells that are wrong", "0", bad if ran or bad else None, met)


def _ahead_of_vllm(kernels: Rows) -> TargetVerdict:
    """The worst ratio of vLLM's time to ours over all workloads of attention."""
    ratios = []
    for row in kernels.values():
        if row.get("kernel") == "attention" and row.get("implementation") == VLLM:
            ours = kernels.get(f"attention {row['workload']} {OURS}", {})
            ratios.append(_ratio(row.get("median_us"), ours.get("median_us")))
    known = [ratio for ratio in ratios if ratio is not None]
    worst = min(known, default=None)
    met = None  # unless it is behind somewhere, or ahead in every row
    if worst is not None and (worst <= 1 or len(known) == len(ratios)):
        met = worst > 1
    return TargetVerdict("vLLM's Triton attention over ours, worst row", "> 1", worst, met)


RESULTS = "results.json"
Sections = Mapping[str, Mapping[str, Row]]  # rows of each section, by cell

_COLUMNS = {
    "limits": ("ceiling", "per_s", "unit", "samples", "status"),
    "correctness": ("kernel", "case", "what", "found", "allowed", "status"),
    "kernels": (
        "kernel", "workload", "implementation", "median_us", "low_us", "high_us", "limit_us",
        "fraction_of_limit", "tflop_per_s", "method", "beyond_l2", "sm_mhz_low",
        "slowed_by", "status",
    ),
    "sweep": (
        "heads", "page_tokens", "tile", "split_tokens", "median_us", "over_sdpa", "over_limit",
        "status",
    ),
    "engine": (
        "model", "batch", "lookahead", "implementation", "tokens_per_s", "tokens_a_row", "step_ms",
        "limit_ms", "over_limit", "sm_mhz_low", "slowed_by", "status",
    ),
}  # fmt: skip


def print_sections(sections: Sections, about: Row) -> None:
    for name, rows in sections.items():
        shown = [{c: _shown(row.get(c)) for c in _COLUMNS[name]} for row in rows.values()]
        if shown:
            print_table(f"{name}: {where(about)}", shown)
    if any(value is not None for value in about.get("clocks", {}).values()):
        print_table("clocks, while it ran", [about["clocks"]])
    print_table("what must hold", [v._asdict() for v in verdicts_of(sections)])


def where(about: Row) -> str:
    """One line that names device and versions."""
    versions = about["versions"]
    device = about["device"] or f"no GPU, {about['world']}"
    names = ("torch", "triton")
    return ", ".join((device, *(f"{n} {versions[n]}" for n in names if n in versions)))


def verdicts_of(sections: Sections) -> list[Any]:
    return verdicts(*(sections.get(name, {}) for name in ("correctness", "kernels", "engine")))


def _shown(value: Any) -> Any:
    """A figure of each workload, or the fields of a tile, in one cell of a table."""
    if not isinstance(value, Mapping):
        return value
    return ", ".join(
        f"{key} {'unmeasured' if v is None else f'{v:.4g}'}" for key, v in value.items()
    )


def document(sections: Sections, about: Row) -> Row:
    return {
        "about": about,
        "targets": [verdict._asdict() for verdict in verdicts_of(sections)],
        **{name: list(rows.values()) for name, rows in sections.items()},
    }


def write_document(out: Path, found: Row) -> None:
    (out / RESULTS).write_text(json.dumps(found, indent=1) + "\n")
