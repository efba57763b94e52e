"""What is measured of systems in turns, and the rows that tell it."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.engine.systems import EngineRun, System, measure
from bench.peers.files import ModelFiles
from bench.peers.systems import LIMITS, OURS, Entrant
from bench.report import rounded

OUTPUT, DECODE = "output_tokens_per_s", "decode_tokens_per_s"
PREFILL, STARTUP = "prefill_tokens_per_s", "startup_s"
FIGURES = (OUTPUT, DECODE, PREFILL, STARTUP)
PREFILL_PROMPTS, PREFILL_TOKENS = 8, 1024


def outputs(
    model: ModelFiles, systems: Sequence[System], batch: int, args: argparse.Namespace
) -> list[dict[str, Any]]:
    real = model.tokenizer is not None
    runs = measure(systems, model.source, batch, args, real=real)
    values = [[run.tokens_per_s for run in found] for found in runs]
    rows = rows_of(model.name, OUTPUT, batch, systems, values)
    for row, found in zip(rows, runs, strict=True):
        row["step_p99_to_median"] = None if row["system"] == LIMITS else _tail(found)
    return rows + _decoding(model, systems, batch, runs)


def _decoding(
    model: ModelFiles, systems: Sequence[System], batch: int, runs: Sequence[Sequence[EngineRun]]
) -> list[dict[str, Any]]:
    """What came after each prompt's first token, of those that tell their steps."""
    telling = [i for i, found in enumerate(runs) if all(run.steps_s for run in found)]
    values = [
        [(run.tokens - len(run.outputs)) / sum(run.steps_s) for run in runs[i]] for i in telling
    ]
    rows = rows_of(model.name, DECODE, batch, [systems[i] for i in telling], values)
    for row, i in zip(rows, telling, strict=True):
        steps_per_s = [len(run.steps_s) / sum(run.steps_s) for run in runs[i]]
        row["read_gb_per_s"] = rounded(statistics.median(steps_per_s) * model.weight_bytes / 1e9)
    return rows


def prefill(
    model: ModelFiles, systems: Sequence[System], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Of random tokens, up to the first of each prompt's output."""
    changed = {
        "prompt_tokens": PREFILL_TOKENS,
        "prompts": PREFILL_PROMPTS,
        "output_tokens": 1,
    }
    changed_args = argparse.Namespace(**vars(args) | changed)
    runs = measure(systems, model.source, PREFILL_PROMPTS, changed_args, real=False)
    tokens = PREFILL_PROMPTS * PREFILL_TOKENS
    values = [[tokens / run.seconds for run in found] for found in runs]
    rows = rows_of(model.name, PREFILL, PREFILL_PROMPTS, systems, values)
    token_flop = model.token_flop + model.prompt_flop / PREFILL_TOKENS
    for row in rows:
        row["multiplied_gflop_per_s"] = rounded(row["value"] * token_flop / 1e9)
    return rows


def startups(model: ModelFiles, choices: Sequence[Entrant], repeats: int) -> list[dict[str, Any]]:
    """From the call of a constructor until it returns, in a new process that has imported all. The
    files, and what a system keeps of an earlier start, are where the first turn left them."""
    values: list[list[float]] = [[] for _ in choices]
    for repeat in range(-1, repeats):
        order = range(len(choices))
        for index in order if repeat % 2 == 0 else reversed(order):
            with choices[index].worker_of_it() as worker:
                seconds = worker.start(**choices[index].settings)
            if repeat >= 0:
                values[index].append(seconds)
    return rows_of(model.name, STARTUP, 0, choices, values)


def rows_of(
    model: str,
    figure: str,
    batch: int,
    systems: Sequence[System | Entrant],
    values: Sequence[Sequence[float]],
) -> list[dict[str, Any]]:
    """A row a system of its values by turn: the median, and that of the ratio within a turn to the
    first peer, each between the least and the most of all turns; and the medians of ours with
    lookahead off to it, and of it to the limits where these are there."""
    named = list(zip((system.name for system in systems), values, strict=True))
    peer = next((found for name, found in named if name not in (OURS, LIMITS)), None)
    limits = next((found for name, found in named if name == LIMITS), None)
    return [
        {
            "model": model,
            "figure": figure,
            "batch": batch,
            "system": system.name,
            "lookahead": system.lookahead,
            **_told("value", "least", "most", found),
            **_told(
                "to_peer", "to_least", "to_most", None if peer is None else _ratios(found, peer)
            ),
            "ours_to_it": rounded(statistics.median(_ratios(values[0], found))),
            "of_limit": None
            if limits is None
            else rounded(statistics.median(_ratios(found, limits))),
            "step_p99_to_median": None,
        }
        for system, found in zip(systems, values, strict=True)
    ]


def _ratios(of: Sequence[float], to: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(of, to, strict=True)]


def _told(
    name: str, least: str, most: str, values: Sequence[float] | None
) -> dict[str, float | None]:
    if values is None:
        return dict.fromkeys((name, least, most))
    found = {least: min(values), most: max(values), name: statistics.median(values)}
    return {each: rounded(found[each]) for each in (name, least, most)}


def _tail(runs: Sequence[EngineRun]) -> float | None:
    """Of steps that decode, over all turns; of ours alone."""
    steps = [step for run in runs for step in run.steps_s]
    return rounded(float(np.quantile(steps, 0.99) / np.median(steps))) if steps else None
