"""Grammars are compiled while steps run, and no step waits for a grammar."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import FinishReason, Request, StructuredOutputs
from cbatch.process import server as queue_module
from cbatch.process.in_flight import InFlightJournal
from cbatch.process.messages import Add, Cancel, Stepped
from cbatch.process.server import EngineServer, GrammarQueue
from tests.helpers import make_request
from tests.process.factories import SimFactory
from tests.process.test_messages import OneCommand


class SlowGrammars:
    """Compiling ends at `release`, for "quick" at once. Grammars that begin with "bad" do not
    compile."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.compiled_texts: list[str] = []

    def compiled(self, outputs: StructuredOutputs) -> Any:
        assert threading.current_thread() is not threading.main_thread()
        assert outputs.regex == "quick" or self.release.wait(30)
        self.compiled_texts.append(str(outputs.regex))
        if str(outputs.regex).startswith("bad"):
            raise FieldError("structured_outputs", "does not compile", "change it")
        return object()


def asking(name: str, regex: str, **more: Any) -> Request:
    return make_request(name, 5, structured_outputs=StructuredOutputs(regex=regex), **more)


def ready(grammar_queue: GrammarQueue, count: int) -> dict[str, str | None]:
    problems: dict[str, str | None] = {}
    deadline_s = time.monotonic() + 30
    while len(problems) < count:
        assert time.monotonic() < deadline_s
        for request, _, problem in grammar_queue.take_ready():
            problems[request.request_id] = None if problem is None else str(problem)
    return problems


def test_choices_share_a_grammar_and_a_bad_one_is_reported() -> None:
    grammars: Any = SlowGrammars()
    grammar_queue = GrammarQueue(grammars, lambda _: None)
    for name, regex in (("a", "x"), ("b", "x"), ("c", "bad"), ("d", "y")):
        grammar_queue.enter(asking(name, regex), ())
    grammar_queue.leave("d")
    assert grammar_queue.waiting and not list(grammar_queue.take_ready())
    grammars.release.set()
    problems = ready(grammar_queue, 3)
    assert problems["a"] is problems["b"] is None and "does not compile" in str(problems["c"])
    assert not grammar_queue.waiting and grammars.compiled_texts == ["x", "bad"], (
        "the request of the last grammar had left"
    )


def test_a_quick_grammar_does_not_wait_for_slow_ones() -> None:
    grammars: Any = SlowGrammars()
    noted: list[set[str]] = []
    grammar_queue = GrammarQueue(grammars, lambda names: noted.append(set(names)))
    for name in "abc":
        grammar_queue.enter(
            structs.replace(asking(name, name), compile_s=2 * queue_module.QUICK_CPU_S), ()
        )
    while not noted:
        time.sleep(0.001)
    grammar_queue.enter(asking("d", "quick"), ())
    assert set(ready(grammar_queue, 1)) == {"d"} and not grammars.release.is_set()
    assert {"a", "d"} in noted, "the journal must list both"
    grammars.release.set()
    assert set(ready(grammar_queue, 3)) == set("abc")


def test_the_number_of_kept_grammars_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_module, "MAX_GRAMMARS", 2)
    grammars: Any = SlowGrammars()
    grammars.release.set()
    grammar_queue = GrammarQueue(grammars, lambda _: None)
    for name in "abc":
        grammar_queue.enter(asking(name, name), ())
    assert set(ready(grammar_queue, 2)) == {"a", "b"} and grammar_queue.waiting
    assert not list(grammar_queue.take_ready()), "all places are used until a request leaves"
    grammar_queue.leave("a")
    assert set(ready(grammar_queue, 1)) == {"c"}
    grammar_queue.enter(asking("d", "b"), ())
    assert set(ready(grammar_queue, 1)) == {"d"}, "a compiled grammar is shared"


def test_one_owner_leaves_grammars_for_others() -> None:
    grammars: Any = SlowGrammars()
    grammars.release.set()
    grammar_queue = GrammarQueue(grammars, lambda _: None)
    for i in range(2 * queue_module.MAX_GRAMMARS):
        grammar_queue.enter(structs.replace(asking(f"a{i}", f"a{i}"), owner="a"), ())
    others = [f"other {i}" for i in range(3)]
    for name in others:
        grammar_queue.enter(structs.replace(asking(name, name), owner=name), ())
    deadline_s, waiting = time.monotonic() + 30, {*others, "a0"}
    while waiting:
        assert time.monotonic() < deadline_s, "no grammar of a leaves"
        waiting -= {request.request_id for request, *_ in grammar_queue.take_ready()}
    for i in range(2 * queue_module.MAX_GRAMMARS):
        grammar_queue.leave(f"a{i}")
    for name in others:
        grammar_queue.leave(name)
    assert not grammar_queue.waiting


def ends(socket: OneCommand) -> dict[str, FinishReason]:
    """Return the reason why each request ended, by id, in order."""
    steps = [event for event in socket.sent if isinstance(event, Stepped)]
    rows = [row for step in steps for row in step.output.rows]
    return {row.request_id: row.finish_reason for row in rows if row.finish_reason is not None}


def test_steps_continue_while_a_grammar_is_compiled(tmp_path: Path) -> None:
    grammars: Any = SlowGrammars()
    core = SimFactory(lookahead="off")()
    core.grammars = grammars
    plain = Add(make_request("", 5, max_tokens=40), {"plain": (0, ())})
    slow = Add(asking("", "x", max_tokens=3), {"slow": (0, ()), "gone": (1, ())})
    bad = Add(asking("", "bad", max_tokens=3), {"bad": (0, ())})
    socket: Any = OneCommand(slow, bad, plain, Cancel("gone"))
    recorder = InFlightJournal.create(tmp_path / "journal")
    server = EngineServer(core, socket, recorder)
    while server.iterate() and core.busy:
        pass
    assert recorder.read() == ["slow"], "the journal must list it"
    assert list(ends(socket)) == ["plain"], "the others wait"
    grammars.release.set()
    endings: dict[str, FinishReason] = {}
    deadline_s = time.monotonic() + 30
    while len(endings) < 3:
        assert time.monotonic() < deadline_s
        server.iterate()
        endings = ends(socket)
    assert endings == {
        "plain": FinishReason.LENGTH,
        "slow": FinishReason.LENGTH,
        "bad": FinishReason.ERROR,
    }
    assert recorder.read() == []
