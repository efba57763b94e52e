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
from tests.server.engines import Served, serving_process
from tests.server.http_client import wait_until
from tests.server.raw_calls import Answer, call
from tests.server.test_faults import SIM, assert_nothing_is_left, body, expected

NUM_CALLS, MAX_TOKENS = 4, 12
# Methods on the way to the engine, on the way back, and at the end, where they release something.
SUBMITTING: dict[type, list[str]] = {
    AdmissionQueue: ["reserve"],
    PromptReader: ["ids"],
    EngineService: ["_request"],
    OpenRequest: ["__init__", "enqueue", "set_deadlines", "begin"],
    Place: ["set_tokens"],
    LiveChoice: ["__init__"],
    EngineClient: ["add", "_dispatch"],
    EngineLink: ["send"],
    Replies: ["open"],
    RequestRecord: ["open"],
}
DISTRIBUTING: dict[type, list[str]] = {
    ServedChoice: ["on_admitted", "on_step"],
    OpenRequest: ["on_admitted", "deliver", "put", "take"],
    LiveChoice: ["extend"],
    Replies: ["take"],
    CompletionEncoder: ["event", "_part"],
    RequestRecord: ["observe"],
}
ENDING: dict[type, list[str]] = {
    LiveChoice: ["_choice"],
    OpenRequest: ["_cancel", "close", "ended"],
    EngineClient: ["cancel", "_close"],
    Place: ["leave", "__exit__"],
    EngineService: ["_count_closed"],
    RequestRecord: ["close"],
}
# Owner, name, and whether it raises after its work. Those that release something always do, and
# `reserve` never: it would leave counts without an owner.
RAISES = [
    (owner, name, late)
    for table in (SUBMITTING, DISTRIBUTING, ENDING)
    for owner, names in table.items()
    for name in names
    for late in (False, True)
    if not (table is ENDING and not late or name == "reserve" and late)
]


class Trap:
    """Replacement of a method that raises at its first call."""

    def __init__(self, owner: type, name: str, *, late: bool) -> None:
        self.sprung = False
        self._original, self._late, self._lock = getattr(owner, name), late, threading.Lock()

    def _due(self) -> bool:
        with self._lock:
            due, self.sprung = not self.sprung, True
            return due

    def method(self) -> Any:
        trap, original = self, self._original

        def raising(*args: Any, **options: Any) -> Any:
            due = trap._due()
            if due and not trap._late:
                raise OverflowError("on purpose")
            result = original(*args, **options)
            if due:
                if inspect.iscoroutine(result):
                    result.close()
                raise OverflowError("on purpose")
            return result

        return raising


def text_of(answer: Answer) -> str | None:
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
    leaving = call(port, body(99, 400), leave_after_bytes=300)
    *answers, _ = await asyncio.gather(*(call(port, each) for each in bodies), leaving)
    return [text_of(answer) for answer in answers]


@pytest.fixture(scope="module")
def served() -> Any:
    with serving_process(SIM) as made:
        yield made


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(("owner", "name", "late"), RAISES)
def test_an_exception_ends_only_its_own_call(
    served: Served, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, late: bool
) -> None:
    trap = Trap(owner, name, late=late)
    monkeypatch.setattr(owner, name, trap.method())
    texts = asyncio.run(asyncio.wait_for(crowd(served.client.port), 60))
    wait_until(lambda: trap.sprung)
    expected_texts = expected(range(NUM_CALLS), MAX_TOKENS)
    assert texts.count(None) <= 1, "other calls ended as well"
    assert [a or b for a, b in zip(texts, expected_texts, strict=True)] == expected_texts
    assert_nothing_is_left(served)
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
            running = [call(served.client.port, body(i, 300)) for i in range(NUM_CALLS)]
            tasks = [asyncio.create_task(each) for each in running]
            while served.service.num_requests < NUM_CALLS or served.engine.num_tokens < 50:
                await asyncio.sleep(0.002)
            trap = Trap(EngineClient, "_dispatch", late=False)
            monkeypatch.setattr(EngineClient, "_dispatch", trap.method())
            assert served.engine.pid is not None
            pause_file.unlink()
            os.kill(served.engine.pid, signal.SIGKILL)
            return [text_of(answer) for answer in await asyncio.gather(*tasks)]

        texts = asyncio.run(scene())
        assert texts.count(None) == 1
        assert [a or b for a, b in zip(texts, expected_texts, strict=True)] == expected_texts
        assert_nothing_is_left(served)
        assert served.engine.num_starts == 2 and served.engine.down is None
