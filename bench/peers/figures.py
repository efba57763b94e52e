"""Figures of the systems, measured in turns, and the rows that report them."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.engine.systems import EngineRun, System, measure
from bench.failures import Failures
from bench.peers.files import ModelFormats
from bench.peers.systems import CBATCH, LIMITS, Entrant
from bench.report import rounded

OUTPUT, DECODE = "output_tokens_per_s", "decode_tokens_per_s"
PREFILL, STARTUP = "prefill_tokens_per_s", "startup_s"
FIGURES = (OUTPUT, DECODE, PREFILL, STARTUP)
PREFILL_PROMPTS, PREFILL_TOKENS = 8, 1024


def outputs(
    model: ModelFormats,
    systems: Sequence[System],
    batch: int,
    args: argparse.Namespace,
    failures: Failures,
) -> list[dict[str, Any]]:
    real = model.tokenizer is not None
    measured = measure(systems, model.source, batch, args, failures, real=real)
    systems, runs = [system for system, _ in measured], [each for _, each in measured]
    values = [[run.tokens_per_s for run in system_runs] for system_runs in runs]
    rows = rows_of(model.name, OUTPUT, batch, systems, values)
    for row, system_runs in zip(rows, runs, strict=True):
        row["step_p99_to_median"] = None if row["system"] == LIMITS else _p99_to_median(system_runs)
    return rows + _decoding(model, systems, batch, runs)


def _decoding(
    model: ModelFormats, systems: Sequence[System], batch: int, runs: Sequence[Sequence[EngineRun]]
) -> list[dict[str, Any]]:
    """Return rows for the tokens after each prompt's first one, of systems that report their
    steps."""
    reporting = [i for i, system_runs in enumerate(runs) if all(run.steps_s for run in system_runs)]
    values = [
        [(run.tokens - len(run.outputs)) / sum(run.steps_s) for run in runs[i]] for i in reporting
    ]
    rows = rows_of(model.name, DECODE, batch, [systems[i] for i in reporting], values)
    for row, i in zip(rows, reporting, strict=True):
        steps_per_s = [len(run.steps_s) / sum(run.steps_s) for run in runs[i]]
        row["read_gb_per_s"] = rounded(statistics.median(steps_per_s) * model.weight_bytes / 1e9)
    return rows


def prefill(
    model: ModelFormats,
    systems: Sequence[System],
    args: argparse.Namespace,
    failures: Failures,
) -> list[dict[str, Any]]:
    """Return rows for random prompts: prompt tokens a second until each has an output token."""
    changed = {
        "prompt_tokens": PREFILL_TOKENS,
        "prompts": PREFILL_PROMPTS,
        "output_tokens": 1,
    }
    changed_args = argparse.Namespace(**vars(args) | changed)
    measured = measure(systems, model.source, PREFILL_PROMPTS, changed_args, failures, real=False)
    systems, runs = [system for system, _ in measured], [each for _, each in measured]
    tokens = PREFILL_PROMPTS * PREFILL_TOKENS
    values = [[tokens / run.seconds for run in system_runs] for system_runs in runs]
    rows = rows_of(model.name, PREFILL, PREFILL_PROMPTS, systems, values)
    token_flop = model.token_flop + model.prompt_flop / PREFILL_TOKENS
    for row in rows:
        row["multiplied_gflop_per_s"] = rounded(row["value"] * token_flop / 1e9)
    return rows


def startups(
    model: ModelFormats, entrants: Sequence[Entrant], repeats: int, failures: Failures
) -> list[dict[str, Any]]:
    """Return rows for the seconds of a constructor, in a new process with all imports done. An
    untimed first turn creates the files and caches that later starts of a system reuse."""
    values: dict[str, list[float]] = {entrant.label: [] for entrant in entrants}
    for repeat in range(-1, repeats):
        for entrant in entrants if repeat % 2 == 0 else reversed(entrants):
            if entrant.label in failures:
                continue
            with failures.caught(entrant.label), entrant.new_worker() as worker:
                seconds = worker.start(**entrant.settings)
                if repeat >= 0:
                    values[entrant.label].append(seconds)
    started = [entrant for entrant in entrants if entrant.label not in failures]
    return rows_of(model.name, STARTUP, 0, started, [values[each.label] for each in started])


def rows_of(
    model: str,
    figure: str,
    batch: int,
    systems: Sequence[System | Entrant],
    values: Sequence[Sequence[float]],
) -> list[dict[str, Any]]:
    """Return a row for each system from its values by turn: the median, and the median ratio to the
    first peer within a turn, each with the smallest and largest of all turns. Further median ratios
    are of cbatch with lookahead off to the system, and of the system to the limits, if measured."""
    by_name = list(zip((system.name for system in systems), values, strict=True))
    peer = next(
        (system_values for name, system_values in by_name if name not in (CBATCH, LIMITS)), None
    )
    limits = next((system_values for name, system_values in by_name if name == LIMITS), None)
    return [
        {
            "model": model,
            "figure": figure,
            "batch": batch,
            "system": system.name,
            "lookahead": system.lookahead,
            **_range("value", "least", "most", system_values),
            **_range(
                "to_peer",
                "to_least",
                "to_most",
                None if peer is None else _ratios(system_values, peer),
            ),
            "ours_to_it": None
            if systems[0].name != CBATCH
            else rounded(statistics.median(_ratios(values[0], system_values))),
            "of_limit": None
            if limits is None
            else rounded(statistics.median(_ratios(system_values, limits))),
            "step_p99_to_median": None,
        }
        for system, system_values in zip(systems, values, strict=True)
    ]


def _ratios(values: Sequence[float], base_values: Sequence[float]) -> list[float]:
    return [value / base for value, base in zip(values, base_values, strict=True)]


def _range(
    name: str, smallest: str, largest: str, values: Sequence[float] | None
) -> dict[str, float | None]:
    if values is None:
        return dict.fromkeys((name, smallest, largest))
    rates = {smallest: min(values), largest: max(values), name: statistics.median(values)}
    return {key: rounded(rates[key]) for key in (name, smallest, largest)}


def _p99_to_median(runs: Sequence[EngineRun]) -> float | None:
    """Return p99 / median of the decoding steps' times in all turns; None without step times."""
    steps = [step for run in runs for step in run.steps_s]
    return rounded(float(np.quantile(steps, 0.99) / np.median(steps))) if steps else None
