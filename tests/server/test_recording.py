"""What a serving engine writes down is what it did, and what the simulator reads."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cbatch.cli.main import main
from cbatch.cli.tracefile import recorded_requests
from cbatch.core.events import Added, Configured, TextFinished
from cbatch.core.plan import StepPlan
from cbatch.core.scheduler import Scheduler
from cbatch.core.sequence import Commit
from cbatch.engine.client import EngineClient
from cbatch.engine.steplog import AnyEvent, encode_array, engines_of, read_step_log, replay
from cbatch.server.service import EngineService
from tests.engine.factories import SimFactory
from tests.engine.threads import EngineThread
from tests.server.http_client import serving_service
from tests.server.processes import Answer, Served, call, serving_process
from tests.toy_engine import TOKENIZER

BODY: dict[str, Any] = {"prompt": "def add(a, b):", "stream": True, "return_token_ids": True}


def bodies(count: int, tokens: int) -> list[dict[str, Any]]:
    return [BODY | {"max_tokens": tokens - i, "seed": i} for i in range(count)]


async def crowd(port: int, given: list[dict[str, Any]]) -> list[Answer]:
    return await asyncio.gather(*(call(port, each) for each in given))


def token_ids(answer: Answer) -> list[int]:
    return [i for event in answer.events for i in event["choices"][0]["token_ids"]]


def encoded(plans: list[StepPlan]) -> list[bytes]:
    return [msgspec.msgpack.encode(plan, enc_hook=encode_array) for plan in plans]


def replayed(events: Sequence[AnyEvent]) -> tuple[list[bytes], Scheduler | None]:
    """The plans, up to one whose result was another's."""
    plans: list[StepPlan | None] = []
    scheduler = None
    with contextlib.suppress(ValueError):
        scheduler = replay(events, on_plan=plans.append)
    return encoded([plan for plan in plans if plan is not None]), scheduler


def test_its_replay_makes_the_same_decisions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every plan of a run over HTTP, with speculation and a stop string, comes again."""
    path = tmp_path / "steps.jsonl"
    factory = SimFactory(
        lookahead="goodput", vocab_size=TOKENIZER.vocab_size, step_s=0.001, record=str(path)
    )
    parts = factory()
    plans: list[StepPlan] = []
    plan_next = parts.scheduler.plan

    def plan(now_s: float) -> StepPlan | None:
        made = plan_next(now_s)
        if made is not None:
            plans.append(made)
        return made

    parts.scheduler.plan = plan  # type: ignore[method-assign]
    link = EngineClient(partial(EngineThread, parts.scheduler, parts.loop))
    given = bodies(12, 60)
    given[3]["stop"] = " "
    with serving_service(EngineService(link, TOKENIZER), TOKENIZER) as client:
        answers = asyncio.run(crowd(client.port, given))
    assert parts.close is not None
    parts.close()
    log = read_step_log(path)
    assert log.warning is None
    assert any(isinstance(event, TextFinished) for event in log.events)
    again, scheduler = replayed(log.events)
    assert again == encoded(plans)
    assert scheduler is not None and scheduler.stats == parts.scheduler.stats
    assert scheduler.stats.accepted_tokens > 0, "nothing was speculated"
    lost = [event for event in log.events if not isinstance(event, TextFinished)]
    assert replayed(lost)[0] != encoded(plans), "a log that lacks an event is no different"
    counts = sorted(each.output_tokens for each in recorded_requests(log.events))
    assert counts == sorted(len(token_ids(answer)) for answer in answers)
    sizes = ["--num-blocks", "512", "--max-model-tokens", "512"]
    assert main(["sim", str(path), "--step-seconds", "0.01", *sizes]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (report["requests"], report["output_tokens"]) == (12, sum(counts))


def test_it_goes_on_in_the_engine_that_follows(tmp_path: Path) -> None:
    """The engine is killed in mid-stream. Its successor appends; every request is one in the
    trace, with the tokens that its client got."""
    path = tmp_path / "steps.jsonl"
    factory = SimFactory(vocab_size=TOKENIZER.vocab_size, step_s=0.004, record=str(path))

    async def scene(served: Served) -> list[Answer]:
        streams = asyncio.create_task(crowd(served.client.port, bodies(8, 300)))
        while served.engine.num_tokens < 400:
            await asyncio.sleep(0.002)
        assert served.engine.pid is not None
        os.kill(served.engine.pid, signal.SIGKILL)
        return await streams

    with serving_process(factory) as served:
        answers = asyncio.run(scene(served))
        assert served.engine.num_starts == 2
    log = read_step_log(path)
    assert log.warning is None, "it was not closed"
    assert sum(isinstance(event, Configured) for event in log.events) == 2
    assert any(isinstance(event, Added) and event.output for event in log.events)
    emitted = 0

    def count(commit: Commit) -> None:
        nonlocal emitted
        emitted += sum(len(tokens) for _, tokens, _, _ in commit.updates())

    for engine in engines_of(log.events):
        replay(engine, on_commit=count).check()
    assert emitted > 400
    recorded = recorded_requests(log.events)
    assert all(each.ended for each in recorded)
    by_seed = {each.request.seed: each.output_tokens for each in recorded}
    assert len(recorded) == 8
    assert by_seed == {i: len(token_ids(answer)) for i, answer in enumerate(answers)}
