"""An exception anywhere on the path of a call ends at most that call, and its resources are
released."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cbatch.process.client import EngineClient
from cbatch.process.connection import EngineLink
from cbatch.server.serving.admission_queue import AdmissionQueue, Place
from cbatch.server.serving.open_request import OpenRequest, ServedChoice
from cbatch.server.serving.prompts import PromptReader
from cbatch.server.serving.replies import CompletionEncoder, Replies
from cbatch.server.serving.request_record import RequestRecord
from cbatch.server.serving.service import EngineService
from cbatch.text.output_processor import LiveChoice
from tests.server import processes
from tests.server.http_client import wait_until
from tests.server.processes import Served, serving_process
from tests.server.test_faults import SIM, assert_nothing_is_left, body, expected

NUM_CALLS, MAX_TOKENS = 4, 12
# Methods that raise before their work, and after it.
SUBMITTING = [
    (AdmissionQueue, "reserve"),
    (PromptReader, "ids"),
    (EngineService, "_request"),
    (OpenRequest, "__init__"),
    (OpenRequest, "enqueue"),
    (Place, "set_tokens"),
    (OpenRequest, "set_deadlines"),
    (OpenRequest, "begin"),
    (LiveChoice, "__init__"),
    (EngineClient, "add"),
    (EngineClient, "_dispatch"),
    (EngineLink, "send"),
    (Replies, "open"),
    (RequestRecord, "open"),
]
DISTRIBUTING = [
    (ServedChoice, "on_admitted"),
    (ServedChoice, "on_step"),
    (OpenRequest, "on_admitted"),
    (OpenRequest, "deliver"),
    (LiveChoice, "extend"),
    (OpenRequest, "put"),
    (OpenRequest, "take"),
    (Replies, "take"),
    (CompletionEncoder, "event"),
    (CompletionEncoder, "_part"),
    (RequestRecord, "observe"),
]
# Methods that release a resource: they raise only after their work.
ENDING = [
    (LiveChoice, "_choice"),
    (OpenRequest, "_cancel"),
    (EngineClient, "cancel"),
    (EngineClient, "_close"),
    (Place, "leave"),
    (Place, "__exit__"),
    (EngineService, "_count_closed"),
    (OpenRequest, "close"),
    (OpenRequest, "ended"),
    (RequestRecord, "close"),
]
EARLY = [(owner, name, False) for owner, name in SUBMITTING + DISTRIBUTING]
# Except `reserve`: a raise after its work would leave counts without an owner.
LATE = [(owner, name, True) for owner, name in SUBMITTING[1:] + DISTRIBUTING + ENDING]


class Trap:
    """Replacement of a method that raises at its call number `at`."""

    def __init__(self, owner: type, name: str, *, at: int, late: bool) -> None:
        self.sprung = False
        self._original, self._at, self._late = getattr(owner, name), at, late
        self._count, self._lock = 0, threading.Lock()

    def due(self) -> bool:
        with self._lock:
            self._count += 1
            self.sprung |= self._count == self._at
            return self._count == self._at

    def method(self) -> Any:
        trap, original = self, self._original

        def raising(*args: Any, **options: Any) -> Any:
            due = trap.due()
            if due and not trap._late:
                raise OverflowError("on purpose")
            result = original(*args, **options)
            if due:
                if inspect.iscoroutine(result):
                    result.close()
                raise OverflowError("on purpose")
            return result

        return raising


def text_of(answer: processes.Answer) -> str | None:
    """Return the text of a call, or None if it ended with an error message."""
    if answer.status != 200:
        assert answer.status == 500 and json.loads(answer.body)["error"]["message"]
        return None
    if answer.headers["content-type"] != "application/json":
        return None if b'"error":' in answer.body else answer.text
    return str(json.loads(answer.body)["choices"][0]["text"])


async def crowd(port: int) -> list[str | None]:
    """Make calls, half of them streamed, and another one that disconnects."""
    bodies = [body(i, MAX_TOKENS, stream=i % 2 == 0) for i in range(NUM_CALLS)]
    leaving = processes.call(port, body(99, 400), leave_after_bytes=300)
    *answers, _ = await asyncio.gather(*(processes.call(port, b) for b in bodies), leaving)
    return [text_of(answer) for answer in answers]


def check(served: Served, trap: Trap) -> None:
    texts = asyncio.run(asyncio.wait_for(crowd(served.client.port), 60))
    wait_until(lambda: trap.sprung)
    expected_texts = expected(range(NUM_CALLS), MAX_TOKENS)
    ended = [i for i in range(NUM_CALLS) if texts[i] is None]
    assert len(ended) <= 1, "other calls ended as well"
    assert [texts[i] or expected_texts[i] for i in range(NUM_CALLS)] == expected_texts
    assert_nothing_is_left(served)


@pytest.fixture(scope="module")
def served() -> Any:
    with serving_process(SIM) as made:
        yield made


def spring(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, late: bool, at: int) -> Trap:
    trap = Trap(owner, name, at=at, late=late)
    monkeypatch.setattr(owner, name, trap.method())
    return trap


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(("owner", "name", "late"), EARLY + LATE)
def test_an_exception_ends_only_its_own_call(
    served: Served, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, late: bool
) -> None:
    trap = spring(monkeypatch, owner, name, late, at=1)
    check(served, trap)
    assert served.engine.down is None and served.engine.num_starts == 1


def test_an_exception_during_a_restart_ends_only_its_own_call(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is the first call that is sent to the next engine."""
    pause_file = tmp_path / "held"
    pause_file.touch()
    with serving_process(msgspec.structs.replace(SIM, pause_file=str(pause_file))) as served:
        expected_texts = expected(range(NUM_CALLS), 300)

        async def scene() -> list[str | None]:
            running = [processes.call(served.client.port, body(i, 300)) for i in range(NUM_CALLS)]
            tasks = [asyncio.create_task(each) for each in running]
            while served.service.num_requests < NUM_CALLS or served.engine.num_tokens < 50:
                await asyncio.sleep(0.002)
            spring(monkeypatch, EngineClient, "_dispatch", False, at=1)
            assert served.engine.pid is not None
            pause_file.unlink()
            os.kill(served.engine.pid, signal.SIGKILL)
            return [text_of(answer) for answer in await asyncio.gather(*tasks)]

        texts = asyncio.run(scene())
        assert texts.count(None) == 1
        assert [a or b for a, b in zip(texts, expected_texts, strict=True)] == expected_texts
        assert_nothing_is_left(served)
        assert served.engine.num_starts == 2 and served.engine.down is None
