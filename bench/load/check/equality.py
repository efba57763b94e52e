"""Equality: greedy and seeded answers do not depend on what else the server does."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from bench.load.check.run import Check, CheckTrial
from bench.load.check.server import BUSY, Answer, Body, NotSupportedError, TestedServer

NEAR_TIE_NATS = 0.25  # two steps of a bfloat16 logit of 16 to 32: smaller gaps are rounding


async def _equal(
    trial: CheckTrial,
    *,
    load: int = 0,
    long: bool = False,
    cancels: int = 0,
    one_by_one: bool = False,
    on: TestedServer | None = None,
    fields: Body | None = None,
) -> None:
    """Compare answers with those alone: among `load` requests (with long prompts), after `cancels`
    left answers, on another server, with further fields."""
    rng, server = trial.rng, on or trial.server
    sampling = [{}, {}, *({"temperature": 0.9, "seed": rng.getrandbits(31)} for _ in "ab")]
    shown = await trial.server.logprobs()
    requests = [trial.body(max_tokens=48, **shown, **each) for each in sampling]
    alone = [await trial.server.alone(each) for each in requests]
    await trial.server.cancel_storm(cancels, rng)
    tokens = await server.long_tokens() if long else 24
    async with server.load(load, rng, tokens):
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
            trial.found(after.error[:200], request)
        elif difference := describe_difference(before, after, request["temperature"] == 0):
            trial.found(difference[0], request, near_tie=difference[1])


def describe_difference(before: Answer, after: Answer, is_greedy: bool) -> tuple[str, bool] | None:
    """Describe the first token that differs; the second part says if it is a near tie. Log
    probabilities of equal tokens may differ by rounding only."""
    one, other = before.first, after.first
    tokens, others = one.tokens or one.text, other.tokens or other.text
    pairs = enumerate(zip(tokens, others, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), None)
    for i, (a, b) in enumerate(zip(one.logprobs[:at], other.logprobs[:at], strict=False)):
        if abs(a - b) > NEAR_TIE_NATS:
            return f"log probability of token {i} is {a:.3f} alone, {b:.3f} then", False
    if at is not None:
        text = f"token {at} is {tokens[at]!r} alone, {others[at]!r} then"
        known = one.tops[at] if at < len(one.tops) else {}
        if not (is_greedy and tokens[at] in known and others[at] in known):
            return text, False
        gap = known[tokens[at]] - known[others[at]]
        tie = gap <= NEAR_TIE_NATS
        return f"{text}: {gap:.4f} nats apart" + ", a near tie" * tie, tie
    if one.text != other.text or one.finish_reason != other.finish_reason:
        ends = [f"{each.text[-40:]!r} ({each.finish_reason})" for each in (one, other)]
        return f"the text ends differently: {ends[0]} alone, {ends[1]} then", False
    return None


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
    Check("equal-load-1", "at the same time as another", partial(_equal, load=1)),
    Check("equal-load-8", "among 8 other requests", partial(_equal, load=8)),
    Check("equal-load-32", "among 32 other requests", partial(_equal, load=32)),
    Check("equal-long-prompts", "while long prompts are read", partial(_equal, load=2, long=True)),
    Check("equal-cancels", "after clients left long answers", partial(_equal, cancels=16)),
    Check("equal-speculation", "with speculation and without", _without_speculation),
    Check("equal-against", "here and on the second server", _against),
]
