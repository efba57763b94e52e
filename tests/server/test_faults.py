"""Disconnecting clients, overload, signals, and killed engines, through real sockets and processes.
Texts are compared with those of an undisturbed engine."""

from __future__ import annotations

import asyncio
import functools
import gc
import random
import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from cbatch import SamplingParams
from cbatch.engine.model_files import load_tokenizers
from cbatch.engine.options import EngineOptions
from cbatch.llm import complete_all
from cbatch.process.factory import EngineFactory
from cbatch.server.serving.admission_queue import Limits
from cbatch.system.heap import freeze_heap
from tests.process.factories import SimFactory
from tests.process.watching import kill_and_restart
from tests.server.engines import Served, serving_process
from tests.server.http_client import sample, wait_until
from tests.server.raw_calls import Answer, call
from tests.test_llm import write_model
from tests.toy_engine import TOKENIZER, make_engine

PROMPT = "def add(a, b):"
SIM = SimFactory(vocab_size=TOKENIZER.vocab_size, step_s=0.003)


def body(seed: int, max_tokens: int, **more: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": max_tokens, "seed": seed, "stream": True} | more


@functools.cache
def expected(seeds: range, max_tokens: int) -> list[str]:
    engine = make_engine(num_blocks=2048, max_model_len=512)
    params = [SamplingParams(max_tokens=max_tokens, seed=seed) for seed in seeds]
    return [c.text for c in complete_all(engine, [PROMPT] * len(seeds), params)]


async def crowd(port: int, bodies: list[dict[str, Any]]) -> list[Answer]:
    return await asyncio.gather(*(call(port, each) for each in bodies))


def assert_nothing_is_left(served: Served) -> None:
    def idle() -> bool:
        stats = served.service.client.stats
        return stats is not None and not stats.num_running and not stats.num_waiting

    wait_until(idle)
    stats = served.service.client.stats
    assert stats is not None
    assert stats.free_blocks + stats.cached_blocks == stats.num_blocks
    assert served.service.num_requests == served.engine.num_open == 0
    queue = served.service.queue
    assert queue.num_requests == queue.num_prompt_tokens == 0


def test_many_disconnecting_clients_leave_no_resources() -> None:
    """Half of 80 clients disconnect: before the response, at its first bytes, or later."""
    rng = random.Random(3)

    async def storm(port: int) -> list[Answer]:
        leaving = [
            call(port, body(i, 400), leave_after_bytes=rng.choice([0, 20, 600])) for i in range(40)
        ]
        staying = [call(port, body(i, 12)) for i in range(40)]
        mixed = [each for pair in zip(leaving, staying, strict=True) for each in pair]
        return (await asyncio.gather(*mixed))[1::2]

    with serving_process(SIM) as served:
        answers = asyncio.run(storm(served.client.port))
        assert [answer.text for answer in answers] == expected(range(40), 12)
        assert_nothing_is_left(served)
        stats = served.service.client.stats
        assert stats is not None and stats.totals.emitted_tokens < 40 * 400, "none was ended early"


def overload(seconds: float) -> dict[str, float]:
    """Send four times as many calls as the engine can serve. Return figures for the report."""
    slots, tokens = 4, 8
    factory = SimFactory(
        lookahead="off", vocab_size=TOKENIZER.vocab_size, step_s=0.02, sizes={"max_num_seqs": slots}
    )
    limits = Limits(max_queued_requests=2 * slots)
    max_queued = 0

    async def drive(served: Served) -> list[Answer]:
        nonlocal max_queued
        per_s = 4 * slots / (tokens * factory.step_s)
        calls = []
        begin_s = time.monotonic()
        for i in range(int(per_s * seconds)):
            calls.append(asyncio.create_task(call(served.client.port, body(i, tokens))))
            max_queued = max(max_queued, served.service.queue.num_requests)
            await asyncio.sleep(max(0.0, begin_s + i / per_s - time.monotonic()))
        return await asyncio.gather(*calls)

    with serving_process(factory, limits) as served, ExitStack() as stack:
        freeze_heap()  # as a serving process does once it listens
        stack.callback(gc.unfreeze)
        answers = asyncio.run(drive(served))
        assert_nothing_is_left(served)
        why = {"reason": "queued_requests"}
        counted = sample(served.client, "vllm:admission_rejections_total", **why)
    refused = [answer for answer in answers if answer.status != 200]
    accepted = [answer for answer in answers if answer.status == 200]
    assert len(refused) > len(answers) / 4, "the load was too low"
    assert {answer.status for answer in refused} == {503}
    assert counted == len(refused)
    assert all(1 <= int(answer.headers["retry-after"]) <= 60 for answer in refused)
    assert 0 < max_queued <= limits.max_queued_requests
    assert all(a.events[-1]["choices"][0]["finish_reason"] == "length" for a in accepted)
    took_s = [answer.took_s for answer in refused]
    served_s = [answer.took_s for answer in accepted]
    assert statistics.median(took_s) < statistics.median(served_s), "rejections waited in the queue"
    return {
        "refused": len(refused),
        "refused_median_ms": 1000 * statistics.median(took_s),
        "refused_max_ms": 1000 * max(took_s),
        "accepted_per_s": len(accepted) / seconds,
        "capacity_per_s": slots / (tokens * factory.step_s),
    }


def test_overload_is_rejected_at_once_and_accepted_calls_finish(record_property: Any) -> None:
    for name, value in overload(1).items():
        record_property(name, value)


@pytest.mark.statistics
@pytest.mark.slow
def test_a_minute_of_overload() -> None:
    print(overload(60))


REGEX = "((ab|ba){2}[0-9]{1,3}, ?){9,}"
AROUND = "start: before @answer\nbefore[lazy]: /(?s:.){12,30};/"
GRAMMARS: dict[int, dict[str, Any]] = {
    6: {"structured_outputs": {"regex": REGEX}},
    7: {"structured_outputs": {"regex": REGEX, "around": AROUND}},
}


@pytest.mark.parametrize("hybrid", [None, "qwen3_5_text"])
def test_greedy_and_coupled_texts_survive_a_kill(tmp_path: Path, hybrid: str | None) -> None:
    """Streams of a real (tiny) pair, whose engine is killed. One has a grammar, another one free
    text before it."""
    target = write_model(tmp_path / "target", hybrid=hybrid)
    draft = write_model(tmp_path / "draft", layers=1)
    options = EngineOptions(
        numerics="invariant", random_weights_seed=0, lookahead="fixed:3", max_num_seqs=16
    )
    tokenizer = load_tokenizers(target, draft, options)
    assert tokenizer is not None
    bodies = [
        body(i, 200 - i, temperature=i % 2, prompt=f"def f{i}(a", ignore_eos=True)
        | GRAMMARS.get(i % 8, {})
        for i in range(10)
    ]

    async def scene(served: Served) -> tuple[list[Answer], list[Answer]]:
        undisturbed = await crowd(served.client.port, bodies)
        streams = asyncio.create_task(crowd(served.client.port, bodies))
        goal = served.engine.num_tokens + 300
        while served.engine.num_tokens < goal:
            assert not streams.done(), "the streams were too short for the test"
            await asyncio.sleep(0.001)
        assert served.service.num_requests > 6
        await kill_and_restart(served.engine)
        return undisturbed, await streams

    with serving_process(EngineFactory(target, draft, options), tokenizer=tokenizer) as served:
        undisturbed, answers = asyncio.run(scene(served))
        assert served.engine.num_starts == 2
        assert sample(served.client, "cbatch:engine_restarts_total") == 1
    assert [each.text for each in answers] == [each.text for each in undisturbed]
