"""Whether the systems compute the same model: greedy tokens, beside ours.

Two right implementations differ where two tokens are nearly tied, and from there on they write
different texts. So what counts is the first difference: by how much the reference's logits (those
of transformers) tell the two tokens apart. A wrong conversion (rotary pairs in the other order, a
norm left out) differs at once, by whole units. Quantised weights are multiplied by activations that
are rounded too, by each in its own way, which moves logits by tenths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from bench.engine.systems import Prompts, System
from bench.report import rounded

NEARLY_TIED = 1e-2  # logits; rounding of float32 moves them by 1e-5 or so
NEARLY_TIED_QUANTISED = 0.5
Logits = Callable[[list[int]], np.ndarray]


def reference_logits(model: Path) -> Logits:
    """Of transformers in float32: token ids to the logits [V] of the next. Loads it when asked."""
    import torch

    @cache
    def peer() -> Any:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def logits(ids: list[int]) -> np.ndarray:
        with torch.inference_mode():
            found: np.ndarray = peer()(torch.tensor([ids])).logits[0, -1].numpy()
        return found

    return logits


def agreement(
    name: str,
    systems: Iterable[System],
    prompts: Prompts,
    output_tokens: int,
    logits: Logits,
    tie: float = NEARLY_TIED,
) -> list[dict[str, Any]]:
    """A row for each system after the first, which they are compared with. `logit_gap` is the
    largest of all sequences at their first difference, None where there is none; up to `tie` two
    tokens count as nearly tied."""
    (_, ours), *others = [(each, each.run(prompts, output_tokens).outputs) for each in systems]
    rows = []
    for system, theirs in others:
        gaps = [
            gap
            for each in zip(prompts, ours, theirs, strict=True)
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
    prompt: list[int], ours: list[int], theirs: list[int], logits: Logits
) -> float | None:
    """How far apart the two tokens' logits are where the sequences first differ; None where they
    do not. Raises ValueError if one has more tokens."""
    for at, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if one != other:
            found = logits(prompt + ours[:at])
            return abs(float(found[one]) - float(found[other]))
    return None
