"""A run of checks: their trials, what they found, and what they did not support."""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from bench.load.check.server import Body, FindingError, NotSupportedError, TestedServer
from bench.load.client.http import CallError

PASSED, NEAR_TIE, FOUND, UNSUPPORTED = "passed", "near tie", "found", "not supported"
MAX_SHOWN = 3  # findings of a check in the report
TIMING_TRIALS = 3  # with one seed, until one of them finds nothing


class CheckTrial(NamedTuple):
    """One trial of a check. `memory` is common to the trials of a check."""

    server: TestedServer
    other: TestedServer | None
    rng: random.Random
    memory: dict[str, Any]

    def body(self, **fields: Any) -> Body:
        """Return a greedy request of plain text, with these fields."""
        prompt = self.server.prompt(self.rng)
        return {"prompt": prompt, "temperature": 0.0, "max_tokens": 40} | fields


class Check(NamedTuple):
    """A check by name. A trial returns what was seen, or raises what it found. `share` is the
    check's part of the time, relative to others. It ends after `max_trials`, since further ones
    would show little, or `max_findings`. With `timing` a finding must come three times in a row,
    since any machine is slow for a moment. If it `adds` up, a finding is of all trials."""

    name: str
    what: str
    trial: Callable[[CheckTrial], Awaitable[str | None]]
    share: float = 1.0
    max_trials: int = 20
    max_findings: int = 3
    timing: bool = False
    adds: bool = False


class Result(msgspec.Struct):
    name: str
    what: str
    state: str = PASSED
    trials: int = 0
    seconds: float = 0.0
    seen: str = ""
    findings: list[dict[str, Any]] = []


async def run_check(
    check: Check, servers: Sequence[TestedServer], *, seed: int, seconds: float
) -> Result:
    """Run trials with the seeds from `seed` on until the time is over, or enough is found. There
    is at least one."""
    began_s, result = time.monotonic(), Result(check.name, check.what)
    server, other, *_ = (*servers, None)
    memory, findings = dict[str, Any](), list[FindingError]()
    try:
        while sum(not each.near_tie for each in findings) < check.max_findings:
            for _ in range(TIMING_TRIALS if check.timing else 1):
                for tested in servers:
                    await tested.rest()
                rng = random.Random(f"{seed + result.trials}")  # the same prompts in every check
                finding: FindingError | None = None
                try:
                    result.seen = (
                        await check.trial(CheckTrial(server, other, rng, memory)) or result.seen
                    )
                    break
                except FindingError as error:
                    finding = error
                except (OSError, CallError) as error:  # of a check that opens connections itself
                    finding = FindingError(f"no answer: {error}")
            if finding:
                finding.seed = seed if check.adds else seed + result.trials
                findings.append(finding)
            result.trials += 1
            if result.trials == check.max_trials or time.monotonic() - began_s > seconds:
                break
    except NotSupportedError as error:
        if not result.trials:  # a later prompt may have too many tokens
            result.seen, result.state = str(error), UNSUPPORTED
    if findings:
        findings.sort(key=lambda finding: finding.near_tie)
        result.findings = [vars(finding) for finding in findings[:MAX_SHOWN]]
        result.state = NEAR_TIE if findings[0].near_tie else FOUND
    result.seconds = round(time.monotonic() - began_s, 1)
    return result
