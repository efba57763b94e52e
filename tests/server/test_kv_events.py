"""The KV events and the step log of a server."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cbatch.core.scheduler.events import Added, Configured
from cbatch.core.scheduler.sequence import Commit
from cbatch.kv_events.publisher import KVEventPublisher, KVEventsConfig
from cbatch.steplog.recorded_run import RecordedRun
from cbatch.steplog.recorder import StepRecorder
from cbatch.steplog.step_log import engines_of, read_step_log, replay
from sim.workload.traces.step_log import joined, read_recording
from tests.checking.executor import Faults
from tests.checking.follower import Follower, cached_prefixes, digest, digest_of_root
from tests.checking.invariants import check_scheduler
from tests.helpers import World, make_request
from tests.kv_events.client import WAIT_MS, Subscriber, subscribed
from tests.process.factories import SIZES, SimFactory
from tests.server.http_client import sample, serving, wait_until
from tests.server.processes import Answer, Served, call, serving_process
from tests.toy_engine import TOKENIZER, make_engine

BODY: dict[str, Any] = {"prompt": "def add(a, b):", "max_tokens": 40, "return_token_ids": True}


@contextmanager
def followed(folder: Path) -> Iterator[tuple[KVEventPublisher, Subscriber]]:
    endpoint, replays = f"ipc://{folder}/live", f"ipc://{folder}/replay"
    config = KVEventsConfig(True, endpoint=endpoint, replay_endpoint=replays)
    publisher = KVEventPublisher(config)  # the service closes it
    with subscribed(endpoint, replays) as subscriber:
        yield publisher, subscriber


def hear_all(publisher: KVEventPublisher, subscriber: Subscriber) -> Follower:
    while subscriber.hear():
        pass
    if subscriber.next_seq < publisher.num_published:
        subscriber.catch_up()
    return subscriber.follower


def test_a_gateway_can_follow_the_cache(tmp_path: Path) -> None:
    """The pool is small, calls have salts, clients disconnect, and the executor fails twice."""
    faults = Faults(raise_at_runs=frozenset({30, 90}))
    engine = make_engine(
        kv_events=True, num_blocks=60, max_model_len=128, lookahead="off", faults=faults
    )
    salts = (None, "alice", "bob")

    async def calls(port: int) -> None:
        work = []
        for i in range(24):
            body = BODY | {"prompt": "def add" + "ab" * (i % 5), "cache_salt": salts[i % 3]}
            leave = 1 if i % 4 == 3 else None
            work.append(call(port, body | {"stream": True}, leave_after_bytes=leave))
        await asyncio.gather(*work)

    with (
        followed(tmp_path) as (publisher, subscriber),
        serving(engine, kv_events=publisher) as client,
    ):
        scheduler, follower = engine.scheduler, subscriber.follower
        for _ in range(2):
            asyncio.run(calls(client.port))
            wait_until(lambda: not (scheduler.has_work or scheduler.num_in_flight))
            wait_until(
                lambda: (
                    hear_all(publisher, subscriber).prefixes
                    == cached_prefixes(scheduler.state.pool, salts)
                )
            )
        assert min(follower.num_events[f"Block{what}"] for what in ("Stored", "Removed")) > 10
        assert follower.num_events["AllBlocksCleared"] == 3, "at the start, and for each fault"
        assert sample(client, "cbatch:kv_event_batches_total") == publisher.num_published
        assert sample(client, "cbatch:kv_event_batches_dropped_total") == 0
        cache_labels = {"block_size": "4", "num_gpu_blocks": "60", "kv_cache_size_tokens": "240"}
        assert (
            sample(client, "vllm:cache_config_info", enable_prefix_caching="True", **cache_labels)
            == 1
        )


def test_the_cache_is_empty_after_the_engines_death(tmp_path: Path) -> None:
    """The engine is killed during a stream, with blocks of finished calls in its cache. Only blocks
    of the next engine are left: those of the stream, which continues, and of a later call."""
    pause_file = tmp_path / "held"
    pause_file.touch()
    factory = SimFactory(
        vocab_size=TOKENIZER.vocab_size, pause_file=str(pause_file), sizes={"kv_events": True}
    )

    async def scene(served: Served) -> list[Answer]:
        port = served.client.port
        await call(port, BODY | {"prompt": "it is over before"})
        stream = asyncio.create_task(call(port, BODY | {"max_tokens": 300, "stream": True}))
        while served.engine.num_tokens < 100:
            await asyncio.sleep(0.002)
        assert served.engine.pid is not None
        pause_file.unlink()
        os.kill(served.engine.pid, signal.SIGKILL)
        return [await stream, await call(port, BODY | {"prompt": "it comes after", "stream": True})]

    with followed(tmp_path) as (publisher, subscriber):
        with serving_process(factory, kv_events=publisher) as served:
            answers = asyncio.run(scene(served))
            follower = hear_all(publisher, subscriber)
        assert follower.num_events["AllBlocksCleared"] == 2, "at the start, and for the death"
        expected = set[bytes]()
        for answer in answers:
            choices = [choice for event in answer.events for choice in event["choices"]]
            output = [i for choice in choices for i in choice["token_ids"]]
            expected |= whole_blocks([*choices[0]["prompt_token_ids"], *output])
        assert follower.prefixes == expected and len(expected) > 80
        while follower.blocks:
            assert subscriber.hear(WAIT_MS), "nothing is cached once the server has ended"


def whole_blocks(tokens: list[int]) -> set[bytes]:
    """Return digests of all whole blocks of the tokens except the last, whose KV is never
    computed."""
    size, before, digests = SIZES["block_size"], digest_of_root(None), set()
    for at in range(0, (len(tokens) - 1) // size * size, size):
        before = digest(before, tokens[at : at + size])
        digests.add(before)
    return digests


RECORDED_BODY: dict[str, Any] = {
    "prompt": "def add(a, b):",
    "stream": True,
    "return_token_ids": True,
}


def bodies(count: int, tokens: int) -> list[dict[str, Any]]:
    salted = {"cache_salt": "alice"}
    return [RECORDED_BODY | salted | {"max_tokens": tokens - i, "seed": i} for i in range(count)]


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
    added = [event for event in log.events if isinstance(event, Added)]
    assert any(event.output for event in added)
    assert {event.request.cache_salt for event in added} == {"alice"}, "a salt is lost"
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
