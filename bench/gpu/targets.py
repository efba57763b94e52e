"""What must hold on an H100, and whether it did. Pure: rows in, verdicts out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from bench.gpu.grid import CHUNK, DECODE, FEW_LONG, VERIFY

Rows = Mapping[str, Mapping[str, Any]]
OURS, VLLM = "cbatch", "vllm triton"


class Verdict(NamedTuple):
    """`met` is None where something that it needs was not measured."""

    target: str
    needed: str
    found: float | None
    met: bool | None


def verdicts(correctness: Rows, kernels: Rows, engine: Rows) -> list[Verdict]:
    """`engine` may be empty, and so may any: what is missing is unmeasured."""

    def of(name: str, field: str) -> float | None:
        value = kernels.get(f"{name} {OURS}", {}).get(field)
        return None if value is None else float(value)

    decode, verify = (of(f"attention {name}", "median_us") for name in (DECODE, VERIFY))
    step = engine.get("llama-3.1-8b batch 64 off cbatch", {}).get("over_limit")
    return [
        _all_right(correctness),
        _at_least("decode attention, of copy bandwidth", 0.85, of(_att(DECODE), _FRACTION)),
        _at_least("verify (k = 7), of copy bandwidth", 0.85, of(_att(VERIFY), _FRACTION)),
        _at_most("verify (k = 7) over decode", 1.08, _ratio(verify, decode)),
        _at_least("few long sequences, of copy bandwidth", 0.70, of(_att(FEW_LONG), _FRACTION)),
        _at_least("prefill chunk of 2048, TFLOP/s", 400, of(_att(CHUNK), "tflop_per_s")),
        _at_least(
            "verify sampling, 64 rows, of one read",
            0.75,
            of("verify coupled 64 requests k 0", _FRACTION),
        ),
        _ahead_of_vllm(kernels),
        _at_most("engine step over its limit, 8B, batch 64", 1.15, step),
    ]


_FRACTION = "fraction_of_limit"


def _att(workload: str) -> str:
    return f"attention {workload}"


def _ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or below is None else above / below


def _at_least(target: str, needed: float, found: float | None) -> Verdict:
    return Verdict(target, f">= {needed}", found, None if found is None else found >= needed)


def _at_most(target: str, needed: float, found: float | None) -> Verdict:
    return Verdict(target, f"<= {needed}", found, None if found is None else found <= needed)


def _all_right(correctness: Rows) -> Verdict:
    """Wrong, failed and crashed cells; those left out make it unknown, unless one is wrong."""
    states = [str(row.get("status")) for row in correctness.values()]
    bad = sum(state.startswith(("wrong", "failed", "crashed", "hung")) for state in states)
    ran = sum(state == "ok" for state in states)
    met = False if bad else (True if ran and ran == len(states) else None)
    return Verdict("correctness cells that are wrong", "0", bad if ran or bad else None, met)


def _ahead_of_vllm(kernels: Rows) -> Verdict:
    """The worst ratio of vLLM's time to ours over all workloads of attention."""
    ratios = []
    for row in kernels.values():
        if row.get("kernel") == "attention" and row.get("implementation") == VLLM:
            ours = kernels.get(f"attention {row['workload']} {OURS}", {})
            ratios.append(_ratio(row.get("median_us"), ours.get("median_us")))
    known = [ratio for ratio in ratios if ratio is not None]
    worst = min(known, default=None)
    met = None if worst is None else (False if worst <= 1 else None)
    if worst is not None and worst > 1 and len(known) == len(ratios):
        met = True
    return Verdict("vLLM's Triton attention over ours, worst row", "> 1", worst, met)
