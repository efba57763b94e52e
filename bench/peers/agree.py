"""Comparison of greedy tokens: do the systems compute the same model as cbatch?

Two correct implementations differ where two tokens are nearly tied, and then write different texts.
So only the first difference counts: the gap between the two tokens in the reference logits, which
are transformers'. A wrong conversion (rotary pairs in another order, a missing norm) changes logits
at once by 1 or more. With quantised weights each system rounds the activations in its own way,
which changes logits by a few tenths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.engine.systems import Prompts, System
from bench.failures import Failures
from bench.report import rounded

NEARLY_TIED = 1e-2  # difference of logits; rounding of float32 changes them by about 1e-5
NEARLY_TIED_QUANTISED = 0.5  # the same for quantised weights
Logits = Callable[[list[int]], np.ndarray]


def reference_logits(model: Path) -> Logits:
    """Return a function from token ids to the logits [V] of the next token, by transformers in
    float32. It loads the model at its first call."""

    @cache
    def peer() -> Any:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def logits(ids: list[int]) -> np.ndarray:
        with torch.inference_mode():
            next_logits: np.ndarray = peer()(torch.tensor([ids])).logits[0, -1].numpy()
        return next_logits

    return logits


def agreement(
    name: str,
    systems: Iterable[System],
    prompts: Prompts,
    output_tokens: int,
    logits: Logits,
    failures: Failures,
    tie: float = NEARLY_TIED,
) -> list[dict[str, Any]]:
    """Return a row for each system after the first, comparing it with the first. `logit_gap` is the
    largest gap of all sequences at their first difference, None if all are equal. Two tokens with a
    gap up to `tie` count as nearly tied."""
    answers: list[tuple[System, Prompts]] = []
    for system in systems:
        with failures.caught(system.label):
            answers.append((system, system.run(prompts, output_tokens).outputs))
    rows = []
    for system, outputs in answers[1:]:
        first_outputs = answers[0][1]
        gaps = [
            gap
            for each in zip(prompts, first_outputs, outputs, strict=True)
            if (gap := first_gap(*each, logits)) is not None
        ]
        rows.append(
            {
                "model": name,
                "system": system.name,
                "lookahead": system.lookahead,
                "sequences": len(prompts),
                "equal": len(prompts) - len(gaps),
                "logit_gap": rounded(max(gaps)) if gaps else None,
                "agrees": all(gap <= tie for gap in gaps),
            }
        )
    return rows


def first_gap(
    prompt: list[int], tokens: list[int], other_tokens: list[int], logits: Logits
) -> float | None:
    """Return the gap between the two tokens' logits where the sequences first differ; None if they
    are equal. Raises ValueError for sequences of unequal length."""
    for at, (token, other_token) in enumerate(zip(tokens, other_tokens, strict=True)):
        if token != other_token:
            next_logits = logits(prompt + tokens[:at])
            return abs(float(next_logits[token]) - float(next_logits[other_token]))
    return None
