"""A run of checks: their trials, what they found, and what they did not support."""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from bench.load.check.server import Body, NotSupportedError, TestedServer

PASSED, NEAR_TIE, FOUND, UNSUPPORTED = "passed", "near tie", "found", "not supported"


class Finding(msgspec.Struct, frozen=True):
    """A deviation. `seed` makes its trial the first when the check is run alone with it."""

    problem: str
    seed: int
    near_tie: bool = False
    request: Body | None = None


class CheckTrial:
    """One trial of a check, with random numbers of its own. `memory` is common to the trials of a
    check, `seen` is shown in the report."""

    def __init__(
        self, server: TestedServer, other: TestedServer | None, seed: int, memory: Any
    ) -> None:
        self.server, self.other, self.seed, self.memory = server, other, seed, memory
        self.rng = random.Random(f"{seed}")  # the same prompts in every check
        self.findings: list[Finding] = []
        self.seen = ""

    def found(self, problem: str, request: Body | None = None, *, near_tie: bool = False) -> None:
        self.findings.append(Finding(problem, self.seed, near_tie, request))


class Check(msgspec.Struct, frozen=True):
    """A check by name. `share` is its part of the time, relative to others."""

    name: str
    what: str
    trial: Callable[[CheckTrial], Awaitable[None]]
    share: float = 1.0


class Result(msgspec.Struct):
    name: str
    what: str
    state: str
    trials: int
    seconds: float
    seen: str
    findings: list[Finding]


async def run_check(
    check: Check, server: TestedServer, other: TestedServer | None, *, seed: int, seconds: float
) -> Result:
    """Run trials with the seeds from `seed` on until the time is over, or three found something.
    There is at least one."""
    memory: dict[str, Any] = {}
    began_s, result = time.monotonic(), Result(check.name, check.what, PASSED, 0, 0.0, "", [])
    try:
        while len(result.findings) < 3:
            trial = CheckTrial(server, other, seed + result.trials, memory)
            await check.trial(trial)
            result.trials += 1
            result.findings += sorted(trial.findings, key=lambda finding: finding.near_tie)[:1]
            result.seen = trial.seen or result.seen
            if time.monotonic() - began_s > seconds:
                break
    except NotSupportedError as error:
        result.seen = str(error)
        result.state = UNSUPPORTED
    if result.findings:
        result.state = FOUND
        if all(finding.near_tie for finding in result.findings):
            result.state = NEAR_TIE
    result.seconds = round(time.monotonic() - began_s, 1)
    return result
