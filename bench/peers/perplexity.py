"""Perplexity of one text under several systems: how much quantised arithmetic costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.engine.systems import Prompts
from bench.peers.files import ModelFiles
from bench.peers.systems import Entrant
from bench.report import rounded, student95

WINDOW_TOKENS = 512


def windows(model: ModelFiles, text: Path) -> Prompts:
    """Token ids of the text in windows of equal length. Each stands for itself: its first token is
    given, all others are foretold. Raises ValueError where there is none."""
    if model.tokenizer is None:
        raise ValueError(f"{model.name} has no tokenizer")
    ids = list(model.tokenizer.encode(text.read_text(encoding="utf-8")))
    count = len(ids) // WINDOW_TOKENS
    if not count:
        raise ValueError(f"{text}: {len(ids)} tokens, a window has {WINDOW_TOKENS}")
    return [ids[i * WINDOW_TOKENS : (i + 1) * WINDOW_TOKENS] for i in range(count)]


def perplexities(
    model: ModelFiles, choices: Sequence[Entrant], prompts: Prompts
) -> list[dict[str, Any]]:
    """A row for each that tells log probabilities of prompts."""
    found = []
    for choice in choices:
        if choice.worker == "transformers" or choice.lookahead != "off":
            continue
        with choice.worker_of_it() as worker:
            worker.start(**choice.settings)
            found.append((choice.name, np.array(worker.call("logprobs", prompts))))
    return rows_of(model.name, found)


def rows_of(model: str, found: Sequence[tuple[str, np.ndarray]]) -> list[dict[str, Any]]:
    """Of log probabilities [windows, tokens]. `more_nats` is how much worse a token is foretold
    than by the first system, with half the width of its 95 % interval over windows."""
    first = found[0][1]
    rows = []
    for name, logprobs in found:
        worse = (first - logprobs).mean(axis=1)
        error = float(worse.std(ddof=1)) / math.sqrt(len(worse)) if len(worse) > 1 else None
        rows.append(
            {
                "model": model,
                "system": name,
                "tokens": logprobs.size,
                "perplexity": rounded(math.exp(-float(logprobs.mean()))),
                "more_nats": round(float(worse.mean()), 5),
                "ci95": None if error is None else round(student95(len(worse) - 1) * error, 5),
            }
        )
    return rows
