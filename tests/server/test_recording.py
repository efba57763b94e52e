"""The step log of a server records all requests, and the simulator can read it."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

from cbatch.core.scheduler.events import Added, Configured
from cbatch.core.scheduler.sequence import Commit
from cbatch.steplog.recorded_run import RecordedRun
from cbatch.steplog.recorder import StepRecorder
from cbatch.steplog.step_log import engines_of, read_step_log, replay
from sim.workload.traces.step_log import joined, read_recording
from tests.checking.invariants import check_scheduler
from tests.helpers import World, make_request
from tests.process.factories import SimFactory
from tests.server.processes import Answer, Served, call, serving_process
from tests.toy_engine import TOKENIZER

BODY: dict[str, Any] = {"prompt": "def add(a, b):", "stream": True, "return_token_ids": True}


def bodies(count: int, tokens: int) -> list[dict[str, Any]]:
    return [BODY | {"max_tokens": tokens - i, "seed": i} for i in range(count)]


async def crowd(port: int, given: list[dict[str, Any]]) -> list[Answer]:
    return await asyncio.gather(*(call(port, each) for each in given))


def token_ids(answer: Answer) -> list[int]:
    return [i for event in answer.events for i in event["choices"][0]["token_ids"]]


def test_prompts_with_different_salts_share_no_prefix_in_the_trace(tmp_path: Path) -> None:
    """This also holds in the simulator, which knows only how many tokens requests share."""
    path = tmp_path / "steps.jsonl"
    with StepRecorder(path) as log:
        world = World(log=log)
        for at, salt in enumerate((None, "a", "b", "a")):
            world.add(make_request(f"r{at}", range(40), cache_salt=salt, max_tokens=2))
            world.run()
    requests, *_ = read_recording(path)
    assert [each.hash_ids for each in requests].count(requests[1].hash_ids) == 2
    assert len({name for each in requests for name in each.hash_ids or ()}) == 3 * 10


def test_the_log_continues_in_the_next_engine(tmp_path: Path) -> None:
    """The engine is killed during a stream, and the next engine appends to the log. The trace has
    each request once, with the tokens that its client received."""
    path = tmp_path / "steps.jsonl"
    pause_file = tmp_path / "held"
    pause_file.touch()
    factory = SimFactory(
        vocab_size=TOKENIZER.vocab_size, record=str(path), pause_file=str(pause_file)
    )

    async def scene(served: Served) -> list[Answer]:
        streams = asyncio.create_task(crowd(served.client.port, bodies(8, 300)))
        while served.service.num_requests < 8 or b'"Added"' not in path.read_bytes():
            await asyncio.sleep(0.002)
        assert served.engine.pid is not None
        pause_file.unlink()
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
        emitted += sum(len(row.tokens) for row in commit.updates())

    for engine in engines_of(log.events):
        check_scheduler(replay(engine, on_commit=count))
    assert emitted > 400
    recorded = joined(map(RecordedRun, engines_of(log.events)))
    assert all(each.ended for each in recorded)
    by_seed = {each.request.seed: len(each.output) for each in recorded}
    assert len(recorded) == 8
    assert by_seed == {i: len(token_ids(answer)) for i, answer in enumerate(answers)}
