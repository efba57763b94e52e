"""Do the systems compute the same model as cbatch? Greedy tokens and perplexity are compared.

Two correct implementations differ where two tokens are nearly tied, and then write different texts.
So only the first difference counts: the gap between the log probabilities of the two tokens, as
cbatch computes them. A wrong conversion (rotary pairs in another order, a missing norm) changes
logits at once by 1 or more. With quantised weights each system rounds the activations in its own
way, which changes logits by a few tenths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.failures import Failures
from bench.peers.models import ModelFormats
from bench.peers.systems import Entrant
from bench.peers.worker import Prompts
from bench.report import rounded, student95

NEARLY_TIED = 1e-2  # difference of logits; rounding of float32 changes them by about 1e-5
NEARLY_TIED_QUANTISED = 0.5  # the same for quantised weights
WINDOW_TOKENS = 512  # of a text whose perplexity is measured


def agreement(
    model: ModelFormats,
    entrants: Sequence[Entrant],
    prompts: Prompts,
    output_tokens: int,
    failures: Failures,
) -> list[dict[str, Any]]:
    """Return a row for each system after the first, comparing it with the first. `logit_gap` is the
    largest gap of all sequences at their first difference, None if all are equal. Each system ends
    before the next one starts: two may not fit into memory."""
    answers: list[tuple[Entrant, Prompts]] = []
    for entrant in entrants:
        with failures.caught(entrant.label), entrant.new_worker() as worker:
            worker.start(**entrant.settings)
            answers.append((entrant, worker.run(prompts, output_tokens).outputs))
    if not answers or answers[0][0] is not entrants[0]:
        return []
    tie = NEARLY_TIED_QUANTISED if model.quantised else NEARLY_TIED
    pairs = [first_differences(prompts, answers[0][1], outputs) for _, outputs in answers[1:]]
    logprobs: list[list[float]] = []
    if any(pairs):
        with entrants[0].new_worker() as worker:
            worker.start(**entrants[0].settings)
            logprobs = worker.call("logprobs", [ids for several in pairs for ids in several])
    rows, last = [], iter([each[-1] for each in logprobs])
    for (entrant, _), several in zip(answers[1:], pairs, strict=True):
        gaps = [abs(next(last) - next(last)) for _ in range(len(several) // 2)]
        rows.append(
            {
                "model": model.name,
                "system": entrant.name,
                "lookahead": entrant.lookahead,
                "sequences": len(prompts),
                "equal": len(prompts) - len(gaps),
                "logit_gap": rounded(max(gaps, default=None)),
                "agrees": all(gap <= tie for gap in gaps),
            }
        )
    return rows


def first_differences(prompts: Prompts, ours: Prompts, theirs: Prompts) -> Prompts:
    """Return both texts up to their first difference, for each pair that is not equal. Raises
    ValueError for texts of unequal length."""
    pairs: Prompts = []
    for prompt, tokens, others in zip(prompts, ours, theirs, strict=True):
        differs = [token != other for token, other in zip(tokens, others, strict=True)]
        if any(differs):
            end = differs.index(True) + 1
            pairs += [prompt + tokens[:end], prompt + others[:end]]
    return pairs


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
    """Return a row for each system that reports log probabilities of prompts. `more_nats` is the
    mean loss per token minus the first system's; `ci95` is half the width of its 95 % interval over
    windows."""
    rows: list[dict[str, Any]] = []
    first: np.ndarray | None = None
    for entrant in entrants:
        if entrant.worker not in ("cbatch", "llama_cpp") or entrant.lookahead != "off":
            continue
        with failures.caught(entrant.label), entrant.new_worker() as worker:
            worker.start(**entrant.settings)
            logprobs = np.array(worker.call("logprobs", prompts))
            first = logprobs if first is None else first
            worse, count = (first - logprobs).mean(axis=1), len(prompts)
            error = float(worse.std(ddof=1)) / math.sqrt(count) if count > 1 else None
            rows.append(
                {
                    "model": model.name,
                    "system": entrant.name,
                    "tokens": logprobs.size,
                    "perplexity": rounded(math.exp(-float(logprobs.mean()))),
                    "more_nats": round(float(worse.mean()), 5),
                    "ci95": None if error is None else round(student95(count - 1) * error, 5),
                }
            )
    return rows
