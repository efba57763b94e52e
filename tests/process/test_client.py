"""Real engine processes that are killed, hang, or get poison requests. The model is the
simulator's: a token is a hash of the request and all earlier tokens, so that any error changes all
later tokens."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import FinishReason, Request
from cbatch.process import client as client_module
from cbatch.process.client import EngineClient, EngineStartError
from tests.helpers import make_request
from tests.process.factories import BrokenFactory, SimFactory
from tests.process.watching import (
    Watched,
    all_over,
    assert_ended_by,
    assert_undisturbed,
    kill_mid_stream,
    running,
)

NUM_STREAMS = 32
SLOW = SimFactory(step_s=0.004)


def watch(client: EngineClient, max_tokens: int, count: int = NUM_STREAMS) -> list[Watched]:
    return [
        Watched(client, make_request(f"r{i}", 4 + i, seed=i, max_tokens=max_tokens - i % 7))
        for i in range(count)
    ]


async def kill_rounds(rounds: int, max_tokens: int, seed: int) -> None:
    rng = random.Random(seed)
    factory = SimFactory(step_s=0.01)
    async with running(factory) as client:
        watched = watch(client, max_tokens)
        cut = [await kill_mid_stream(client, watched, rng) for _ in range(rounds)]
        assert min(cut) > 0 and sum(cut) > rounds * NUM_STREAMS / 2, "the kills hit no streams"
        await all_over(watched)
        assert client.num_starts == rounds + 1
    assert_undisturbed(watched, factory)


def test_streams_survive_kills_in_the_middle_unchanged() -> None:
    asyncio.run(kill_rounds(2, max_tokens=180, seed=1))


def test_kills_before_any_token_blame_no_request(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two kills hit all requests in flight, then one request on trial, then another. The first step
    of each engine hangs until it is killed."""
    monkeypatch.setattr(client_module, "MAX_PAUSE_S", 0.1)
    gather = tmp_path / "gather"
    factory = SimFactory(gather_file=str(gather))

    async def scene() -> None:
        gather.write_text("8")
        async with running(factory) as client:
            watched = watch(client, 20, count=8)
            for start, (company, after) in enumerate(((8, 8), (8, 1), (1, 1), (1, 0)), start=1):
                while client.num_starts < start or in_flight(client) < company:
                    await asyncio.sleep(0.001)
                assert client.pid is not None
                os.kill(client.pid, signal.SIGSTOP)
                gather.write_text(str(after)) if after else gather.unlink()
                os.kill(client.pid, signal.SIGKILL)
                while client.up:
                    await asyncio.sleep(0.001)
            await all_over(watched)
            assert client.num_starts == 5
        assert_undisturbed(watched, factory)

    asyncio.run(scene())


def in_flight(client: EngineClient) -> int:
    """Return the number of requests in the running step, as the journal lists them."""
    link = client._link
    return len(link.journal.read()) if client.up and link else 0


POISONS = {
    "in a step": (
        SimFactory(step_s=0.01, poison=7, poison_at=9),
        make_request("poison", [7, 1, 2], max_tokens=40),
    ),
    "while it is decoded, and in no step yet": (
        SimFactory(step_s=0.01, unreadable=999),
        make_request("poison", [999, 1]),
    ),
}


@pytest.mark.parametrize("when", POISONS)
def test_a_poison_request_ends_only_itself(when: str) -> None:
    factory, request = POISONS[when]

    async def scene() -> None:
        async with running(factory) as client:
            watched = watch(client, 80, count=4)
            if when != "in a step":
                while not all(each.streaming for each in watched):
                    await asyncio.sleep(0.001)
            poison = Watched(client, request)
            await all_over([*watched, poison])
            assert_ended_by(poison, FinishReason.ERROR, "dies whenever it runs this request")
            if when == "in a step":
                # A step that began at 8 tokens may have yielded four more.
                assert 4 <= len(poison.tokens) <= 12, "it was not served until it died"
                # Steps whose results were lost with the engine run again, and a new token clears
                # the request.
                deaths = client.num_starts - poison.last_start
                assert deaths <= 4, "more than two strikes and two deaths alone"
        assert_undisturbed(watched, factory)

    asyncio.run(scene())


def test_a_hung_engine_is_killed_and_its_requests_continue() -> None:
    async def scene() -> None:
        async with running(SLOW, hang_timeout_s=2.0) as client:
            watched = watch(client, 40, count=4)
            while not all(each.streaming for each in watched):
                await asyncio.sleep(0.001)
            assert client.pid is not None
            os.kill(client.pid, signal.SIGSTOP)
            await all_over(watched)
            assert client.num_starts == 2
            client.stats = None
            while client.stats is None:  # an idle engine sends heartbeats
                await asyncio.sleep(0.01)
        assert_undisturbed(watched, SLOW)

    asyncio.run(scene())


def test_a_step_without_progress_is_killed(tmp_path: Path) -> None:
    gather = tmp_path / "gather"
    gather.write_text("1")
    factory = SimFactory(gather_file=str(gather))

    async def scene() -> None:
        async with running(factory, hang_timeout_s=1.0) as client:
            client.on_death = lambda: gather.unlink(missing_ok=True)
            watched = watch(client, 20, count=2)
            await all_over(watched)
            assert client.num_starts == 2
        assert_undisturbed(watched, factory)

    asyncio.run(scene())


def test_a_long_step_with_progress_does_not_count_as_hung() -> None:
    """A prefill chunk of a large model on a slow processor takes minutes, in many parts."""
    factory = SimFactory(step_s=3.0, parts=10, lookahead="off")

    async def scene() -> None:
        async with running(factory, hang_timeout_s=2.0) as client:
            watched = Watched(client, make_request("long", max_tokens=1))
            await all_over([watched])
            assert client.num_starts == 1
            assert_undisturbed([watched], factory)

    asyncio.run(scene())


ROOT = Path(__file__).parents[2]
OWNER = """
import asyncio
from functools import partial
from cbatch.process.client import EngineClient
from cbatch.process.server import EngineProcess
from tests.process.factories import SimFactory

async def own():
    await EngineClient(partial(EngineProcess, SimFactory())).start()
    print("it runs", flush=True)
    await asyncio.sleep(600)

asyncio.run(own())
"""


def test_an_engine_does_not_outlive_its_owner() -> None:
    command = [sys.executable, "-c", OWNER]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None and owner.stdout.readline()
        (task,) = Path(f"/proc/{owner.pid}/task/{owner.pid}").glob("children")
        engines = [Path(f"/proc/{pid}/stat") for pid in task.read_text().split()]
        assert engines
        owner.kill()
        deadline_s = time.monotonic() + 120
        while any(each.exists() and ") Z " not in each.read_text() for each in engines):
            assert time.monotonic() < deadline_s, "the engine still runs"
            time.sleep(0.02)


def test_a_failed_start_reports_its_reason() -> None:
    async def scene(field: bool) -> None:
        async with running(BrokenFactory(field)):
            pass

    with pytest.raises(FieldError, match="num_blocks: too few; give more"):
        asyncio.run(scene(True))
    with pytest.raises(EngineStartError, match="no such device"):
        asyncio.run(scene(False))


def test_many_poison_calls_at_once_end_only_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine dies more often in a row than the limit for a broken engine, but is not given up.
    The choices of a call run on trial together."""
    monkeypatch.setattr(client_module, "MAX_PAUSE_S", 0.1)
    monkeypatch.setattr(client_module, "MAX_DEATHS_WITHOUT_TOKEN", 2)
    factory = SimFactory(poison=7, death="exit")

    async def scene() -> None:
        async with running(factory) as client:
            poisons = [Watched(client, make_request(f"poison{i}", [7, i])) for i in range(2)]
            choices = [make_request(f"many{i}", [7, 9], choice=i) for i in range(3)]
            poisons += Watched.call(client, choices)
            await all_over(poisons)
            for request in poisons:
                assert_ended_by(request, FinishReason.ERROR, "dies whenever it runs this request")
            assert client.num_starts - 1 > 2 + 1, "fewer deaths than the limit"
            assert client.num_starts - 1 <= 3 * 4, "too many deaths per call"
            after = Watched(client, make_request("after", max_tokens=10))
            await all_over([after])
        assert_undisturbed([after], factory)

    asyncio.run(scene())


def test_an_engine_that_dies_at_every_request_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client's own test request kills it, too."""
    monkeypatch.setattr(client_module, "MAX_PAUSE_S", 0.1)
    monkeypatch.setattr(client_module, "MAX_DEATHS_WITHOUT_TOKEN", 2)

    async def scene() -> None:
        async with running(SimFactory(poison=0, death="exit")) as client:
            watched = [Watched(client, make_request(f"r{i}", [0, i])) for i in range(4)]
            await all_over(watched)
            assert client.down and all(each.lost for each in watched)
            assert Watched(client, make_request("late", max_tokens=5)).lost == client.down
            assert client.num_starts == 3

    asyncio.run(scene())


def test_a_request_that_cannot_be_encoded_ends_only_itself() -> None:
    """The encoding fails when it is added, or when it is sent to a new engine."""
    unsendable = make_request("unsendable", [2**70, 1], max_tokens=9)

    async def scene() -> None:
        async with running(SLOW) as client:
            watched = watch(client, 120, count=4)
            with pytest.raises(OverflowError):
                Watched(client, unsendable)
            assert client.num_open == 4
            while not all(each.streaming for each in watched):
                await asyncio.sleep(0.001)
            assert client.pid is not None
            os.kill(client.pid, signal.SIGKILL)
            while client.up:
                await asyncio.sleep(0.001)
            late = Watched(client, unsendable)  # it is not sent yet
            await all_over([*watched, late])
            assert isinstance(late.failed, OverflowError) and client.num_starts == 2
        assert_undisturbed(watched, SLOW)

    asyncio.run(scene())


# ---- an engine that nothing kills ----------------------------------------------------------------


class Calm(NamedTuple):
    """An engine that all tests below share, and the event loop of its client."""

    runner: asyncio.Runner
    client: EngineClient

    def run(self, scene: Callable[[EngineClient], Coroutine[Any, Any, None]]) -> None:
        async def both() -> None:
            await scene(self.client)
            self.client.stats = None
            while self.client.stats is None or self.client.stats.num_running:
                await asyncio.sleep(0.001)

        self.runner.run(both())
        stats = self.client.stats
        assert stats is not None and self.client.num_open == 0
        assert self.client.num_starts == 1 and self.client.down is None
        assert stats.free_blocks + stats.cached_blocks == stats.num_blocks


@pytest.fixture(scope="module")
def calm() -> Iterator[Calm]:
    with asyncio.Runner() as runner:
        context = running(SLOW)
        yield Calm(runner, runner.run(context.__aenter__()))
        runner.run(context.__aexit__(None, None, None))


def test_cancel_and_finish_free_all_resources(calm: Calm) -> None:
    async def scene(client: EngineClient) -> None:
        watched = watch(client, 100, count=10)
        while not all(each.streaming for each in watched):
            await asyncio.sleep(0.001)
        for request in watched[:5]:
            client.cancel(request)
        for request in watched[5:]:
            client.finish(request, keep_tokens=1)
        counts = [len(each.tokens) for each in watched]
        client.stats = None
        while client.stats is None or client.stats.num_running:
            await asyncio.sleep(0.001)
        assert [len(each.tokens) for each in watched] == counts, "called after the end"

    calm.run(scene)


class Unlucky(Watched):
    """A sequence whose handlers `hooks` raise."""

    def __init__(self, client: EngineClient, request: Request, hooks: tuple[str, ...]) -> None:
        self.raised: list[str] = []
        for hook in hooks:
            setattr(self, hook, partial(self._fail, hook))
        super().__init__(client, request)

    def _fail(self, hook: str, *_: object) -> None:
        self.raised.append(hook)
        raise OverflowError("on purpose")


@pytest.mark.parametrize(
    ("hooks", "refused"),
    [
        (("on_admitted",), False),
        (("on_step",), False),
        (("on_step",), True),
        (("on_step", "on_failed"), False),
    ],
)
def test_an_exception_of_a_handler_ends_only_its_own_request(
    calm: Calm, hooks: tuple[str, ...], refused: bool
) -> None:
    """A rejected request ends without tokens."""

    async def scene(client: EngineClient) -> None:
        watched = watch(client, 40, count=4)
        prompt = [10**6] if refused else 8
        unlucky = Unlucky(client, make_request("unlucky", prompt, max_tokens=30), hooks)
        await all_over(watched)
        assert tuple(unlucky.raised) == hooks, "once each, and nothing followed"
        assert "on_failed" in hooks or isinstance(unlucky.failed, OverflowError)
        assert_undisturbed(watched, SLOW)

    calm.run(scene)


def test_exceptions_of_observers_stop_nothing(calm: Calm, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise OverflowError("on purpose")

    async def scene(client: EngineClient) -> None:
        monkeypatch.setattr(client, "on_step", fail)
        client.watch(fail)
        watched = watch(client, 40, count=4)
        await all_over(watched)
        assert_undisturbed(watched, SLOW)

    calm.run(scene)
