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
from cbatch.steplog.recorder import WRITE_EVERY_S, StepRecorder
from cbatch.steplog.step_log import engines_of, read_step_log, replay
from sim.workload.traces.step_log import joined, read_recording
from tests.checking.follower import Follower, digest, digest_of_root
from tests.checking.invariants import check_scheduler
from tests.helpers import World, make_request
from tests.kv_events.client import WAIT_MS, Subscriber, subscribed
from tests.process.factories import SIZES, SimFactory
from tests.server.engines import Served, serving_process
from tests.server.http_client import sample
from tests.server.raw_calls import Answer, call
from tests.toy_engine import TOKENIZER

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


def bodies(count: int, tokens: int) -> list[dict[str, Any]]:
    salted = BODY | {"cache_salt": "alice", "stream": True}
    return [salted | {"max_tokens": tokens - i, "seed": i} for i in range(count)]


def ids_of(answer: Answer) -> tuple[list[int], list[int]]:
    """Return the token ids of the prompt and of the output."""
    choices = [choice for event in answer.events for choice in event["choices"]]
    return choices[0]["prompt_token_ids"], [i for choice in choices for i in choice["token_ids"]]


def whole_blocks(tokens: list[int], salt: str | None) -> set[bytes]:
    """Return digests of all whole blocks of the tokens except the last, whose KV is never
    computed."""
    size, before, digests = SIZES["block_size"], digest_of_root(salt), set()
    for at in range(0, (len(tokens) - 1) // size * size, size):
        before = digest(before, tokens[at : at + size])
        digests.add(before)
    return digests


def test_cache_and_log_after_the_engines_death(tmp_path: Path) -> None:
    """The engine is killed during streams, with blocks of a finished call in its cache. Only blocks
    of the next engine are left: those of the streams, which continue, and of a later call. The log
    goes on, and the trace has each request once, with the tokens that its client received."""
    path, pause_file = tmp_path / "steps.jsonl", tmp_path / "held"
    pause_file.touch()
    factory = SimFactory(
        vocab_size=TOKENIZER.vocab_size,
        pause_file=str(pause_file),
        record=str(path),
        sizes={"kv_events": True},
    )

    async def scene(served: Served) -> list[Answer]:
        port = served.client.port
        await call(port, BODY | {"prompt": "it is over before"})
        calls = (call(port, body) for body in bodies(8, 300))
        streams = asyncio.ensure_future(asyncio.gather(*calls))
        while served.service.num_requests < 8 or served.engine.num_tokens < 100:
            await asyncio.sleep(0.002)
        size = -1
        while size < (size := path.stat().st_size):  # until the paused engine's log is written
            await asyncio.sleep(3 * WRITE_EVERY_S)
        assert served.engine.pid is not None
        pause_file.unlink()
        os.kill(served.engine.pid, signal.SIGKILL)
        later = BODY | {"prompt": "it comes after", "stream": True}
        return [*await streams, await call(port, later)]

    with followed(tmp_path) as (publisher, subscriber):
        with serving_process(factory, kv_events=publisher) as served:
            answers = asyncio.run(scene(served))
            assert served.engine.num_starts == 2
            follower = hear_all(publisher, subscriber)
            batches = sample(served.client, "cbatch:kv_event_batches_total")
            assert batches == publisher.num_published
            assert sample(served.client, "cbatch:kv_event_batches_dropped_total") == 0
            sizes = {"block_size": "4", "num_gpu_blocks": "2048", "kv_cache_size_tokens": "8192"}
            assert sample(served.client, "vllm:cache_config_info", **sizes) == 1
        assert follower.num_events["AllBlocksCleared"] == 2, "at the start, and for the death"
        expected = set[bytes]()
        for number, answer in enumerate(answers):
            prompt, output = ids_of(answer)
            expected |= whole_blocks([*prompt, *output], "alice" if number < 8 else None)
        assert follower.prefixes == expected and len(expected) > 80
        while follower.blocks:
            assert subscriber.hear(WAIT_MS), "nothing is cached once the server has ended"

    log = read_step_log(path)
    assert log.warning is None, "it was not closed"
    assert sum(isinstance(event, Configured) for event in log.events) == 2
    added = [event for event in log.events if isinstance(event, Added)]
    assert any(event.output for event in added)
    emitted = 0

    def count(commit: Commit) -> None:
        nonlocal emitted
        emitted += sum(len(row.tokens) for row in commit.updates())

    for engine in engines_of(log.events):
        check_scheduler(replay(engine, on_commit=count))
    assert emitted > 400
    recorded = joined(map(RecordedRun, engines_of(log.events)))
    assert len(recorded) == 10
    salted = [each for each in recorded if each.request.cache_salt == "alice"]
    assert all(each.ended for each in salted)
    lengths = {each.request.seed: len(each.output) for each in salted}
    assert lengths == {i: len(ids_of(answer)[1]) for i, answer in enumerate(answers[:8])}


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
