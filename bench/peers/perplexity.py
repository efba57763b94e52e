"""Perplexity of a text under several systems: the accuracy lost by quantised arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.engine.systems import Prompts
from bench.failures import Failures
from bench.peers.files import ModelFormats
from bench.peers.systems import Entrant
from bench.report import rounded, student95

WINDOW_TOKENS = 512


def windows(model: ModelFormats, text: Path) -> Prompts:
    """Return the text's token ids in independent windows of equal length. In each the first token
    is given and all others are predicted. Raises ValueError without a tokenizer or a whole
    window."""
    if model.tokenizer is None:
        raise ValueError(f"{model.name} has no tokenizer")
    ids = list(model.tokenizer.encode(text.read_text(encoding="utf-8")))
    count = len(ids) // WINDOW_TOKENS
    if not count:
        raise ValueError(f"{text}: {len(ids)} tokens, a window has {WINDOW_TOKENS}")
    return [ids[i * WINDOW_TOKENS : (i + 1) * WINDOW_TOKENS] for i in range(count)]


def perplexities(
    model: ModelFormats, entrants: Sequence[Entrant], prompts: Prompts, failures: Failures
) -> list[dict[str, Any]]:
    """Return a row for each system that reports log probabilities of prompts."""
    logprobs = []
    for entrant in entrants:
        if entrant.worker in ("openvino", "transformers") or entrant.lookahead != "off":
            continue
        with failures.caught(entrant.label), entrant.new_worker() as worker:
            worker.start(**entrant.settings)
            logprobs.append((entrant.name, np.array(worker.call("logprobs", prompts))))
    return rows_of(model.name, logprobs) if logprobs else []


def rows_of(model: str, systems: Sequence[tuple[str, np.ndarray]]) -> list[dict[str, Any]]:
    """Return rows from (system, log probabilities [windows, tokens]). `more_nats` is the mean loss
    per token minus the first system's; `ci95` is half the width of its 95 % interval over
    windows."""
    first = systems[0][1]
    rows = []
    for name, logprobs in systems:
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
