"""Figures of the systems, measured in turns, and the rows that report them."""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.failures import Failures
from bench.peers.models import ModelFormats
from bench.peers.systems import CBATCH
from bench.peers.worker import Prompts, Run, System, Worker
from bench.report import rounded
from bench.shapes import SHAPES
from cbatch.demo import demo_prompts

OUTPUT, DECODE = "output_tokens_per_s", "decode_tokens_per_s"
PREFILL, STARTUP = "prefill_tokens_per_s", "startup_s"
FIGURES = (OUTPUT, DECODE, PREFILL, STARTUP)
PREFILL_PROMPTS, PREFILL_TOKENS = 8, 1024
_VOCAB_SIZE = min(shape["vocab_size"] for shape in SHAPES.values())


def make_prompts(model: ModelFormats, tokens: int, count: int) -> Prompts:
    """Return `count` prompts of `tokens` tokens: the end of a demo prompt after others that make
    up the length, or random ids for a model without a tokenizer."""
    tokenizer, texts = model.tokenizer, demo_prompts()
    if tokenizer is None:
        drawn = np.random.default_rng(0).integers(1, _VOCAB_SIZE - 1, (count, tokens))
        ids: Prompts = drawn.tolist()
        return ids

    @functools.cache
    def ending_with(index: int) -> list[int]:
        text = "\n\n".join((*texts[index + 1 :], *texts[: index + 1]))
        while len(ids := list(tokenizer.encode(text))) < tokens:
            text = f"{text}\n\n{text}"
        return ids[-tokens:]

    return [ending_with(i % len(texts)) for i in range(count)]


def measure(
    workers: Sequence[Worker],
    prompts: Prompts,
    batch: int,
    args: argparse.Namespace,
    failures: Failures,
) -> tuple[list[System], list[list[Run]]]:
    """Return the systems that did not fail, and the runs of each, one per repeat. Every other
    repeat runs them in reverse. Prompts are completed in successive batches: several small ones
    even out the differences between prompts."""
    runs: dict[str, list[Run]] = {worker.system.label: [] for worker in workers}
    for repeat in range(-1, args.repeats):  # the first warms up
        gc.collect()
        for worker in workers if repeat % 2 == 0 else reversed(workers):
            label = worker.system.label
            if label in failures:
                continue
            with failures.caught(label):
                if repeat < 0:
                    worker.run(prompts[:batch], min(8, args.output_tokens))
                    continue
                total = Run(0.0, [])
                for at in range(0, len(prompts), batch):
                    run = worker.run(prompts[at : at + batch], args.output_tokens)
                    outputs, steps_s = total.outputs + run.outputs, total.steps_s + run.steps_s
                    total = Run(total.seconds + run.seconds, outputs, steps_s)
                runs[label].append(total)
    working = [worker.system for worker in workers if worker.system.label not in failures]
    return working, [runs[system.label] for system in working]


def outputs(
    model: ModelFormats,
    workers: Sequence[Worker],
    batch: int,
    args: argparse.Namespace,
    failures: Failures,
) -> list[dict[str, Any]]:
    """Return rows for all output tokens; and for those after each prompt's first one, of systems
    that report their steps."""
    count = -(-max(batch, args.prompts) // batch) * batch
    prompts = make_prompts(model, args.prompt_tokens, count)
    systems, runs = measure(workers, prompts, batch, args, failures)
    speeds = [[run.tokens_per_s for run in system_runs] for system_runs in runs]
    rows = rows_of(model.name, OUTPUT, batch, systems, speeds)
    stepping = [(s, each) for s, each in zip(systems, runs, strict=True) if each[0].steps_s]
    speeds = [[(r.tokens - len(r.outputs)) / sum(r.steps_s) for r in each] for _, each in stepping]
    return rows + rows_of(model.name, DECODE, batch, [system for system, _ in stepping], speeds)


def prefill(
    model: ModelFormats, workers: Sequence[Worker], args: argparse.Namespace, failures: Failures
) -> list[dict[str, Any]]:
    """Return rows for random prompts: prompt tokens a second until each has an output token."""
    args = argparse.Namespace(**vars(args) | {"output_tokens": 1})
    drawn = np.random.default_rng(0).integers(1, _VOCAB_SIZE - 1, (PREFILL_PROMPTS, PREFILL_TOKENS))
    systems, runs = measure(workers, drawn.tolist(), PREFILL_PROMPTS, args, failures)
    speeds = [[drawn.size / run.seconds for run in system_runs] for system_runs in runs]
    return rows_of(model.name, PREFILL, PREFILL_PROMPTS, systems, speeds)


def startups(
    model: ModelFormats, systems: Sequence[System], repeats: int, failures: Failures
) -> list[dict[str, Any]]:
    """Return rows for the seconds of a constructor, in a new process with all imports done. An
    untimed first turn creates the files and caches that later starts of a system reuse."""
    values: dict[str, list[float]] = {system.label: [] for system in systems}
    for repeat in range(-1, repeats):
        for system in systems if repeat % 2 == 0 else reversed(systems):
            if system.label not in failures:
                with failures.caught(system.label), Worker(system) as worker:
                    values[system.label].append(worker.start())
    working = [system for system in systems if system.label not in failures]
    return rows_of(model.name, STARTUP, 0, working, [values[each.label][1:] for each in working])


def rows_of(
    model: str,
    figure: str,
    batch: int,
    systems: Sequence[System],
    values: Sequence[Sequence[float]],
) -> list[dict[str, Any]]:
    """Return a row for each system from its values by turn: the median, and the median ratio to the
    first peer within a turn, each with the smallest and largest of all turns. `ours_to_it` is the
    median ratio of cbatch with lookahead off to the system."""
    named = list(zip((system.name for system in systems), values, strict=True))
    first_peer = next((each for name, each in named if name != CBATCH), None)
    own_values = values[0] if named and named[0][0] == CBATCH else None
    rows = []
    for system, system_values in zip(systems, values, strict=True):
        to_peer = _ratios(system_values, first_peer)
        rows.append(
            {
                "model": model,
                "figure": figure,
                "batch": batch,
                "system": system.name,
                "lookahead": system.lookahead,
                "value": _median(system_values),
                "min": rounded(min(system_values)),
                "max": rounded(max(system_values)),
                "to_peer": _median(to_peer),
                "to_min": rounded(min(to_peer, default=None)),
                "to_max": rounded(max(to_peer, default=None)),
                "ours_to_it": _median(_ratios(own_values, system_values)),
            }
        )
    return rows


def _ratios(values: Sequence[float] | None, bases: Sequence[float] | None) -> list[float]:
    if values is None or bases is None:
        return []
    return [value / base for value, base in zip(values, bases, strict=True)]


def _median(values: Sequence[float]) -> float | None:
    return rounded(statistics.median(values)) if values else None
