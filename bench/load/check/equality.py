"""Equality: greedy and seeded answers do not depend on what else the server does."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from bench.load.check.run import Check, CheckTrial
from bench.load.check.server import BUSY, Answer, Body, NotSupportedError, TestedServer

NEAR_TIE_NATS = 0.1  # smaller gaps of log probabilities are rounding of 16-bit logits
MAX_TOKENS = 48
LONG_PROMPT_TOKENS = 1500


def _requests(trial: CheckTrial) -> list[Body]:
    """Return greedy and seeded requests."""
    common = {"max_tokens": MAX_TOKENS, "logprobs": 5}
    greedy = [common | {"prompt": trial.server.prompt(trial.rng), "temperature": 0.0} for _ in "ab"]
    seeds = [{"temperature": 0.9, "seed": trial.rng.randrange(2**31)} for _ in "ab"]
    return [*greedy, *(common | {"prompt": trial.server.prompt(trial.rng)} | s for s in seeds)]


async def _equal(
    trial: CheckTrial,
    *,
    load: int = 0,
    prompt_tokens: int = 24,
    cancels: int = 0,
    one_by_one: bool = False,
    on: TestedServer | None = None,
    fields: Body | None = None,
) -> None:
    """Compare answers with those alone: among `load` requests with prompts of `prompt_tokens`,
    after `cancels` left answers, on another server, with further fields."""
    requests, server = _requests(trial), on or trial.server
    alone = [await trial.server.alone(each) for each in requests]
    await trial.server.cancel_storm(cancels, trial.rng)
    async with trial.server.load(load, trial.rng, prompt_tokens=prompt_tokens):
        calls = [server.ask(each | (fields or {})) for each in reversed(requests)]
        answers = [await each for each in calls] if one_by_one else await asyncio.gather(*calls)
    require_equal(trial, requests, alone, answers[::-1])


def require_equal(
    trial: CheckTrial, requests: Sequence[Body], alone: Sequence[Answer], answers: Sequence[Answer]
) -> None:
    """Report each answer that differs from the one alone. A full server's refusal is no answer."""
    for request, before, after in zip(requests, alone, answers, strict=True):
        if after.status in BUSY:
            continue
        if after.error:
            trial.found(f"{after.status}: {after.error[:200]}", request)
        elif difference := describe_difference(before, after, request["temperature"] == 0):
            trial.found(difference[0], request, near_tie=difference[1])


def describe_difference(before: Answer, after: Answer, is_greedy: bool) -> tuple[str, bool] | None:
    """Describe the first token that differs; the second part says if it is a near tie. Log
    probabilities of equal tokens may differ by rounding only."""
    one, other = before.first, after.first
    pairs = zip(one.tokens or one.text, other.tokens or other.text, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    for i, (a, b) in enumerate(zip(one.logprobs[:at], other.logprobs[:at], strict=False)):
        if abs(a - b) > NEAR_TIE_NATS:
            return f"log probability of token {i} is {a:.3f} alone, {b:.3f} then", False
    if at is None and one.text == other.text and one.finish_reason == other.finish_reason:
        return None
    if at is None:
        return f"the text ends differently: {one.text[-40:]!r} alone, {other.text[-40:]!r}", False
    parts = (one.tokens or one.text)[at], (other.tokens or other.text)[at]
    text = f"token {at} is {parts[0]!r} alone, {parts[1]!r} then"
    known = one.tops[at] if at < len(one.tops) else {}
    if is_greedy and parts[0] in known and parts[1] in known:
        gap = known[parts[0]] - known[parts[1]]
        tie = gap <= NEAR_TIE_NATS
        return f"{text}: {gap:.4f} nats apart" + ", a near tie" * tie, tie
    return text, False


async def _without_speculation(trial: CheckTrial) -> None:
    body: Body = {"prompt": "a", "max_tokens": 1}
    await trial.server.require(body | {"max_lookahead": 0}, "max_lookahead")
    if (await trial.server.ask(body | {"max_lookahead": -1})).status == 200:
        raise NotSupportedError("requests cannot switch speculation (no `max_lookahead`)")
    await _equal(trial, fields={"max_lookahead": 0})


async def _against(trial: CheckTrial) -> None:
    if trial.other is None:
        raise NotSupportedError("no second server (--against)")
    await _equal(trial, on=trial.other)


CHECKS = [
    Check("equal-again", "the same requests again", partial(_equal, one_by_one=True)),
    Check("equal-order", "all at once, in another order", _equal),
    *(
        Check(f"equal-load-{n}", f"among {n} other requests", partial(_equal, load=n))
        for n in (1, 8, 32)
    ),
    Check(
        "equal-long-prompts",
        "while long prompts are read",
        partial(_equal, load=2, prompt_tokens=LONG_PROMPT_TOKENS),
    ),
    Check("equal-cancels", "after clients left long answers", partial(_equal, cancels=16)),
    Check("equal-speculation", "with speculation and without", _without_speculation),
    Check("equal-against", "here and on the second server", _against),
]
