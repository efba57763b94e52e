"""Figures of the systems, measured in turns, and the rows that report them. Comparison of greedy
tokens: do the systems compute the same model as cbatch?

Two correct implementations differ where two tokens are nearly tied, and then write different texts.
So only the first difference counts: the gap between the log probabilities of the two tokens, as
cbatch computes them. A wrong conversion (rotary pairs in another order, a missing norm) changes
logits at once by 1 or more. With quantised weights each system rounds the activations in its own
way, which changes logits by a few tenths.
"""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from bench.peers.engines import Prompts
from bench.peers.models import CBATCH, ModelFormats, Run, System, Worker
from bench.report import Failures, rounded
from bench.shapes import SHAPES
from cbatch.demo import demo_prompts

OUTPUT, DECODE = "output_tokens_per_s", "decode_tokens_per_s"
PREFILL, STARTUP = "prefill_tokens_per_s", "startup_s"
FIGURES = (OUTPUT, DECODE, PREFILL, STARTUP)
PREFILL_PROMPTS, PREFILL_TOKENS = 8, 1024
_VOCAB_SIZE = min(shape["vocab_size"] for shape in SHAPES.values())
_WARM_UP_TOKENS = 1024  # of a prompt
# Allowed gap of logits. Rounding of float32 changes them by about 1e-5.
_NEARLY_TIED, _NEARLY_TIED_QUANTISED = 1e-2, 0.5
Row = dict[str, Any]


def make_prompts(model: ModelFormats, tokens: int, count: int) -> Prompts:
    """Return `count` prompts of `tokens` tokens: the end of a demo prompt after others that make
    up the length, or random ids for a model without a tokenizer."""
    tokenizer, texts = model.tokenizer, demo_prompts()
    if tokenizer is None:
        return _random_prompts(count, tokens)

    @functools.cache
    def ending_with(index: int) -> list[int]:
        text = "\n\n".join((*texts[index + 1 :], *texts[: index + 1]))
        while len(ids := list(tokenizer.encode(text))) < tokens:
            text = f"{text}\n\n{text}"
        return ids[-tokens:]

    return [ending_with(i % len(texts)) for i in range(count)]


def _random_prompts(count: int, tokens: int) -> Prompts:
    ids: Prompts = np.random.default_rng(0).integers(1, _VOCAB_SIZE - 1, (count, tokens)).tolist()
    return ids


# -- speed


def take_turns(
    subjects: Mapping[str, Callable[[int], Any]], repeats: int, failures: Failures
) -> dict[str, list[Any]]:
    """Call each subject once per repeat, every other repeat in reverse. Return the results of those
    that did not fail, by name. Repeat -1 is a warm-up without a result."""
    results: dict[str, list[Any]] = {name: [] for name in subjects}
    for repeat in range(-1, repeats):
        gc.collect()
        for name in subjects if repeat % 2 == 0 else reversed(subjects):
            if name not in failures:
                with failures.caught(name):
                    results[name].append(subjects[name](repeat))
    return {name: values[1:] for name, values in results.items() if name not in failures}


def timed_runs(
    workers: Sequence[Worker],
    prompts: Prompts,
    batch: int,
    output_tokens: int,
    repeats: int,
    failures: Failures,
) -> list[tuple[System, list[Run]]]:
    """Return the systems that did not fail, and their runs, one per repeat. Prompts are completed
    in successive batches: several small ones even out the differences between prompts. The warm-up
    cuts long prompts, which may take minutes."""

    def run(worker: Worker, repeat: int) -> Run:
        if repeat < 0:
            short = [prompt[:_WARM_UP_TOKENS] for prompt in prompts[:batch]]
            return worker.run(short, min(8, output_tokens))
        total = Run(0.0, [])
        for at in range(0, len(prompts), batch):
            total += worker.run(prompts[at : at + batch], output_tokens)
        return total

    subjects = {worker.system.label: functools.partial(run, worker) for worker in workers}
    runs = take_turns(subjects, repeats, failures)
    return [(w.system, runs[w.system.label]) for w in workers if w.system.label in runs]


def outputs(
    model: ModelFormats,
    workers: Sequence[Worker],
    batch: int,
    args: argparse.Namespace,
    failures: Failures,
) -> list[Row]:
    """Return rows for all output tokens; and for those after each prompt's first one, of systems
    that report their steps."""
    count = -(-max(batch, args.prompts) // batch) * batch
    prompts = make_prompts(model, args.prompt_tokens, count)
    runs = timed_runs(workers, prompts, batch, args.output_tokens, args.repeats, failures)
    speeds = [(s, [r.tokens / r.seconds for r in each]) for s, each in runs]
    decoding = [
        (s, [(r.tokens - len(r.outputs)) / sum(r.steps_s) for r in each])
        for s, each in runs
        if each[0].steps_s
    ]
    return [
        *rows_of(model.name, OUTPUT, batch, speeds),
        *rows_of(model.name, DECODE, batch, decoding),
    ]


def prefill(
    model: ModelFormats, workers: Sequence[Worker], repeats: int, failures: Failures
) -> list[Row]:
    """Return rows for random prompts: prompt tokens a second until each has an output token."""
    prompts, count = _random_prompts(PREFILL_PROMPTS, PREFILL_TOKENS), PREFILL_PROMPTS
    runs = timed_runs(workers, prompts, count, 1, repeats, failures)
    speeds = [(s, [count * PREFILL_TOKENS / run.seconds for run in each]) for s, each in runs]
    return rows_of(model.name, PREFILL, count, speeds)


def startups(
    model: ModelFormats, systems: Sequence[System], repeats: int, failures: Failures
) -> list[Row]:
    """Return rows for the seconds of a constructor, in a new process with all imports done. The
    warm-up creates the files and caches that later starts of a system reuse."""

    def start(system: System, _: int) -> float:
        with Worker(system) as worker:
            return worker.start()

    subjects = {system.label: functools.partial(start, system) for system in systems}
    seconds = take_turns(subjects, repeats, failures)
    return rows_of(
        model.name, STARTUP, 0, [(s, seconds[s.label]) for s in systems if s.label in seconds]
    )


def rows_of(
    model: str, figure: str, batch: int, values: Sequence[tuple[System, Sequence[float]]]
) -> list[Row]:
    """Return a row for each system from its values by turn: the median, and the median ratio to the
    first peer within a turn, each with the smallest and largest of all turns. `ours_to_it` is the
    median ratio of cbatch with lookahead off to the system."""
    first_peer = next((each for system, each in values if system.name != CBATCH), None)
    own = values[0][1] if values and values[0][0].name == CBATCH else None
    rows = []
    for system, turns in values:
        to_peer = _ratios(turns, first_peer)
        row = {"model": model, "figure": figure, "batch": batch, "system": system.name}
        row |= {"lookahead": system.lookahead}
        row |= dict(zip(("value", "min", "max"), _cuts(turns), strict=True))
        row |= dict(zip(("to_peer", "to_min", "to_max"), _cuts(to_peer), strict=True))
        rows.append(row | {"ours_to_it": _cuts(_ratios(own, turns))[0]})
    return rows


def _ratios(values: Sequence[float] | None, bases: Sequence[float] | None) -> list[float]:
    if values is None or bases is None:
        return []
    return [value / base for value, base in zip(values, bases, strict=True)]


def _cuts(values: Sequence[float]) -> list[float | None]:
    if not values:
        return [None] * 3
    return [rounded(cut(values)) for cut in (statistics.median, min, max)]


# -- agreement


def agreement(
    model: ModelFormats,
    systems: Sequence[System],
    prompts: Prompts,
    output_tokens: int,
    failures: Failures,
) -> list[Row]:
    """Return a row for each system after the first, comparing it with the first. `logit_gap` is the
    largest gap of all sequences at their first difference, None if all are equal. Each system ends
    before the next one starts: two may not fit into memory."""
    answers: list[tuple[System, Prompts]] = []
    for system in systems:
        with failures.caught(system.label), Worker(system) as worker:
            worker.start()
            answers.append((system, worker.run(prompts, output_tokens).outputs))
    if not answers or answers[0][0] is not systems[0]:
        return []
    tie = _NEARLY_TIED_QUANTISED if model.quantised else _NEARLY_TIED
    pairs = [first_differences(prompts, answers[0][1], each) for _, each in answers[1:]]
    logprobs: list[list[float]] = []
    if any(pairs):
        with Worker(systems[0]) as worker:
            worker.start()
            logprobs = worker.call("logprobs", [ids for several in pairs for ids in several])
    rows, last = [], iter([each[-1] for each in logprobs])
    for (system, _), several in zip(answers[1:], pairs, strict=True):
        gaps = [abs(next(last) - next(last)) for _ in range(len(several) // 2)]
        row = {"model": model.name, "system": system.name, "lookahead": system.lookahead}
        row |= {"sequences": len(prompts), "equal": len(prompts) - len(gaps)}
        row |= {"logit_gap": rounded(max(gaps, default=None))}
        rows.append(row | {"agrees": all(gap <= tie for gap in gaps)})
    return rows


def first_differences(prompts: Prompts, outputs: Prompts, other_outputs: Prompts) -> Prompts:
    """Return both texts up to their first difference, for each pair that is not equal. Raises
    ValueError for texts of unequal length."""
    pairs: Prompts = []
    for prompt, tokens, others in zip(prompts, outputs, other_outputs, strict=True):
        differs = [token != other for token, other in zip(tokens, others, strict=True)]
        if any(differs):
            end = differs.index(True) + 1
            pairs += [prompt + tokens[:end], prompt + others[:end]]
    return pairs
