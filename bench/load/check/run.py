"""A run of checks: their trials, what they found, and what they did not support."""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from bench.load.check.server import Answer, Body, NoAnswerError, NotSupportedError, TestedServer

PASSED, NEAR_TIE, FOUND, UNSUPPORTED = "passed", "near tie", "found", "not supported"
MAX_SHOWN = 3  # findings of a check in the report
TIMING_TRIALS = 3  # with one seed, until one of them finds nothing


class Finding(msgspec.Struct, frozen=True):
    """A deviation. `seed` makes its trial the first when the check is run alone with it."""

    problem: str
    seed: int
    near_tie: bool = False
    request: Body | None = None


class CheckTrial:
    """One trial of a check, with random numbers of its own. `memory` is common to the trials of a
    check, `seen` is shown in the report."""

    def __init__(self, servers: Sequence[TestedServer], seed: int, memory: Any) -> None:
        self.server, self.other, *_ = (*servers, None)
        self.seed, self.memory = seed, memory
        self.rng = random.Random(f"{seed}")  # the same prompts in every check
        self.findings: list[Finding] = []
        self.seen = ""

    def body(self, **fields: Any) -> Body:
        """Return a greedy request of plain text, with these fields."""
        prompt = fields.pop("prompt", None) or self.server.prompt(self.rng)
        return {"prompt": prompt, "temperature": 0.0, "max_tokens": 40} | fields

    async def both(self, body: Body, what: str = "the request") -> list[tuple[str, Answer]]:
        """Ask for a whole and for a streamed answer. Raises `NotSupportedError`."""
        whole = await self.server.require(body, what, streamed=False)
        return [("whole", whole), ("streamed", await self.server.require(body, what))]

    def found(self, problem: str, request: Body | None = None, **fields: Any) -> None:
        self.findings.append(Finding(problem, **({"seed": self.seed, "request": request} | fields)))


class Check(msgspec.Struct, frozen=True):
    """A check by name. `share` is its part of the time, relative to others. It ends after
    `max_trials`, since further ones would show little, or `max_findings`. A finding of `timing`
    must come three times in a row, since any machine is slow for a moment."""

    name: str
    what: str
    trial: Callable[[CheckTrial], Awaitable[None]]
    share: float = 1.0
    max_trials: int = 20
    max_findings: int = 3
    timing: bool = False


class Result(msgspec.Struct):
    name: str
    what: str
    state: str
    trials: int = 0
    seconds: float = 0.0
    seen: str = ""
    findings: list[Finding] = []


async def run_check(
    check: Check, servers: Sequence[TestedServer], *, seed: int, seconds: float
) -> Result:
    """Run trials with the seeds from `seed` on until the time is over, or enough is found. There
    is at least one."""
    began_s, result = time.monotonic(), Result(check.name, check.what, PASSED)
    memory: dict[str, Any] = {}
    findings: list[Finding] = []
    try:
        while sum(not each.near_tie for each in findings) < check.max_findings:
            for _ in range(TIMING_TRIALS if check.timing else 1):
                for server in servers:
                    await server.rest()
                trial = CheckTrial(servers, seed + result.trials, memory)
                try:
                    await check.trial(trial)
                except NoAnswerError as error:
                    trial.found(*error.args)
                except OSError as error:  # of a check that opens connections itself
                    trial.found(f"no connection: {error}")
                if not trial.findings:
                    break
            result.trials += 1
            findings += sorted(trial.findings, key=lambda finding: finding.near_tie)[:1]
            result.seen = trial.seen or result.seen
            if result.trials == check.max_trials or time.monotonic() - began_s > seconds:
                break
    except NotSupportedError as error:
        result.seen, result.state = str(error), UNSUPPORTED
    if findings:
        result.findings = sorted(findings, key=lambda finding: finding.near_tie)[:MAX_SHOWN]
        result.state = NEAR_TIE if result.findings[0].near_tie else FOUND
    result.seconds = round(time.monotonic() - began_s, 1)
    return result
