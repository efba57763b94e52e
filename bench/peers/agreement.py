"""Comparison of greedy tokens: do the systems compute the same model as cbatch?

Two correct implementations differ where two tokens are nearly tied, and then write different texts.
So only the first difference counts: the gap between the log probabilities of the two tokens, as
cbatch computes them. A wrong conversion (rotary pairs in another order, a missing norm) changes
logits at once by 1 or more. With quantised weights each system rounds the activations in its own
way, which changes logits by a few tenths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.failures import Failures
from bench.peers.models import ModelFormats
from bench.peers.worker import Prompts, System, Worker
from bench.report import rounded

NEARLY_TIED = 1e-2  # difference of logits; rounding of float32 changes them by about 1e-5
NEARLY_TIED_QUANTISED = 0.5  # the same for quantised weights


def agreement(
    model: ModelFormats,
    systems: Sequence[System],
    prompts: Prompts,
    output_tokens: int,
    failures: Failures,
) -> list[dict[str, Any]]:
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
    tie = NEARLY_TIED_QUANTISED if model.quantised else NEARLY_TIED
    pairs = [first_differences(prompts, answers[0][1], outputs) for _, outputs in answers[1:]]
    logprobs: list[list[float]] = []
    if any(pairs):
        with Worker(systems[0]) as worker:
            worker.start()
            logprobs = worker.call("logprobs", [ids for several in pairs for ids in several])
    rows, last = [], iter([each[-1] for each in logprobs])
    for (system, _), several in zip(answers[1:], pairs, strict=True):
        gaps = [abs(next(last) - next(last)) for _ in range(len(several) // 2)]
        rows.append(
            {
                "model": model.name,
                "system": system.name,
                "lookahead": system.lookahead,
                "sequences": len(prompts),
                "equal": len(prompts) - len(gaps),
                "logit_gap": rounded(max(gaps, default=None)),
                "agrees": all(gap <= tie for gap in gaps),
            }
        )
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
