"""Equality: answers, and their times, do not depend on what else the server does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from bench.load.check.run import Check, CheckTrial
from bench.load.check.server import BUSY, Answer, Body, FindingError, NotSupportedError
from bench.load.client.http import COMPLETIONS

NEAR_TIE_NATS = 0.25  # two steps of a bfloat16 logit of 16 to 32: smaller gaps are rounding
MAX_PAUSE_S, MAX_PAUSE_RATIO = 1.0, 4.0  # a longer pause is one if it exceeds both
MAX_DELAY_S = 2.0  # until requests of clients that left have ended
STORM, LEFT_TOKENS = 16, 600  # answers that their clients leave, and their lengths
UNREAD_S = 2.0


async def _equal(
    trial: CheckTrial,
    *,
    before: Callable[[CheckTrial], Awaitable[None]] | None = None,
    load: int = 0,
    long: bool = False,
    one_by_one: bool = False,
    unread_s: float = 0.0,
    against: bool = False,
    **fields: Any,
) -> None:
    """Compare answers with those alone: after what `before` does, among `load` requests (with long
    prompts), if one client does not read for a while, on another server, with further fields."""
    rng, server = trial.rng, trial.other if against else trial.server
    if server is None:
        raise NotSupportedError("no second server (--against)")
    sampling = [{}, {}, *({"temperature": 0.9, "seed": rng.getrandbits(31)} for _ in "ab")]
    shown = {"logprobs": 5} if await trial.server.takes(logprobs=5) else {}
    requests = [trial.body(max_tokens=48, **shown, **each) for each in sampling]
    alone = [await trial.server.alone(each) for each in requests]
    tokens = await server.long_tokens() if long else 24
    if before:
        await before(trial)
    async with server.load(load, rng, tokens):
        waits_s = (0.0, 0.0, 0.0, unread_s)
        calls = [
            server.ask(each | fields, needed=False, unread_s=wait_s)
            for each, wait_s in zip(reversed(requests), waits_s, strict=True)
        ]
        answers = [await each for each in calls] if one_by_one else await asyncio.gather(*calls)
    _require_equal(requests, alone, answers[::-1])


async def _without_speculation(trial: CheckTrial) -> None:
    server = trial.server
    if not await server.takes(max_lookahead=0) or await server.takes(max_lookahead=-1):
        raise NotSupportedError("requests cannot switch speculation (no `max_lookahead`)")
    await _equal(trial, max_lookahead=0)


async def _leave_in_mid_request(trial: CheckTrial) -> None:
    client, data = trial.server.client, json.dumps(trial.body()).encode()
    message = client.message("POST", COMPLETIONS, data)
    for length in (20, len(message) // 2, len(message) - 1):
        _, writer = await asyncio.open_connection(client.endpoint.host, client.endpoint.port)
        writer.write(message[:length])
        await writer.drain()
        writer.close()


def _require_equal(
    requests: Sequence[Body], alone: Sequence[Answer], answers: Sequence[Answer]
) -> None:
    """Raise `FindingError` if an answer differs from the one alone. A full server's refusal is no
    answer."""
    findings = []
    for request, before, after in zip(requests, alone, answers, strict=True):
        if after.error and after.status not in BUSY:
            findings.append(FindingError(after.error, request))
        elif not after.error and (finding := _difference(before, after, request)):
            findings.append(finding)
    if findings:
        raise min(findings, key=lambda one: one.near_tie)


def _difference(before: Answer, after: Answer, request: Body) -> FindingError | None:
    """Return the first token that differs. Log probabilities of equal tokens may differ by rounding
    only."""
    tokens, others = before.tokens or before.text, after.tokens or after.text
    pairs = enumerate(zip(tokens, others, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), None)
    for i, (a, b) in enumerate(zip(before.logprobs[:at], after.logprobs[:at], strict=False)):
        if abs(a - b) > NEAR_TIE_NATS:
            problem = f"log probability of token {i} is {a:.3f} alone, {b:.3f} then"
            return FindingError(problem, request)
    if at is not None:
        text = f"token {at} is {tokens[at]!r} alone, {others[at]!r} then"
        known = before.tops[at] if at < len(before.tops) else {}
        if request["temperature"] or not {tokens[at], others[at]} <= known.keys():
            return FindingError(text, request)
        gap = known[tokens[at]] - known[others[at]]
        tie = abs(gap) <= NEAR_TIE_NATS
        return FindingError(f"{text}: {gap:.4f} nats apart" + ", a near tie" * tie, request, tie)
    if (before.text, before.finish_reason) != (after.text, after.finish_reason):
        ends = [f"{each.text[-40:]!r} ({each.finish_reason})" for each in (before, after)]
        return FindingError(f"the text ends {ends[0]} alone, {ends[1]} then", request)
    return None


async def _pause(trial: CheckTrial) -> str:
    server, body, begun = trial.server, trial.body(ignore_eos=True), asyncio.Event()
    alone = await server.ask(body | {"max_tokens": 64})
    if len(alone.pieces) < 16:
        raise NotSupportedError("a stream of 64 tokens has fewer than 16 events")
    prompt = server.prompt(trial.rng, await server.long_tokens())
    stream = asyncio.create_task(server.ask(body | {"max_tokens": 400}, begun=begun))
    await begun.wait()
    reading = server.ask(trial.body(prompt=prompt, max_tokens=1))
    other, answer = await asyncio.gather(reading, stream)
    longest_s, usual_s = _longest_gap_s(answer, other), _longest_gap_s(alone, alone)
    seen = f"longest pause {longest_s:.2f} s, alone {usual_s:.2f} s"
    if longest_s > max(MAX_PAUSE_S, MAX_PAUSE_RATIO * usual_s):
        raise FindingError(f"a stream paused: {seen}", body)
    return seen


def _longest_gap_s(answer: Answer, other: Answer) -> float:
    """Return the longest time between two pieces of an answer while the other was awaited."""
    pairs = pairwise(answer.read_s)
    return max((b - a for a, b in pairs if b > other.sent_s and a < other.end_s), default=0.0)


async def _cancel(trial: CheckTrial) -> str:
    """Leave long answers: then a short one comes as fast as a while later."""
    server, body = trial.server, trial.body(max_tokens=8)
    await server.ask(body)
    await _cancel_storm(trial)
    after = await server.ask(body)
    running = await server.rest(MAX_DELAY_S)
    later = await server.ask(body)
    late_s = after.end_s - after.sent_s - (later.end_s - later.sent_s)
    if running or late_s > MAX_DELAY_S:
        then = f"{running:.0f} requests run" if running else f"an answer comes {late_s:.1f} s late"
        raise FindingError(
            f"{then} after {STORM} clients left, {MAX_DELAY_S:g} s are allowed", body
        )
    return f"{max(late_s, 0):.2f} s later than with no client that left"


async def _cancel_storm(trial: CheckTrial) -> None:
    """Begin long answers, and leave them when the first has text."""
    async with trial.server.load(STORM, trial.rng, max_tokens=LEFT_TOKENS):
        pass


CHECKS = [
    Check("equal-again", "the same requests again", partial(_equal, one_by_one=True)),
    Check("equal-order", "all at once, in another order", _equal),
    Check("equal-load-1", "at the same time as another", partial(_equal, load=1)),
    Check("equal-load-8", "among 8 other requests", partial(_equal, load=8)),
    Check("equal-load-32", "among 32 other requests", partial(_equal, load=32)),
    Check("equal-long-prompts", "while long prompts are read", partial(_equal, load=2, long=True)),
    Check(
        "equal-cancels", "after clients left long answers", partial(_equal, before=_cancel_storm)
    ),
    Check("equal-speculation", "with speculation and without", _without_speculation),
    Check("equal-against", "here and on the second server", partial(_equal, against=True)),
    Check("slow-reader", "one client does not read for 2 s", partial(_equal, unread_s=UNREAD_S)),
    Check(
        "after-leaving",
        "after requests cut in the middle",
        partial(_equal, before=_leave_in_mid_request),
    ),
    Check("pause", "a stream during another's long prompt", _pause, max_findings=1, timing=True),
    Check("cancel", "clients that left cost nothing", _cancel, max_findings=1, timing=True),
]
