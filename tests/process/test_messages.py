"""Messages arrive unchanged, and requests in flight are known after any failure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cbatch.core.request.request import FinishReason
from cbatch.process import in_flight as journal_module
from cbatch.process.in_flight import InFlightJournal
from cbatch.process.messages import (
    Add,
    Stepped,
    decode_command,
    decode_event,
    encode,
    frames_of,
)
from cbatch.process.server import EngineServer
from tests.helpers import make_request
from tests.process.factories import SimFactory


@pytest.fixture
def journals(tmp_path: Path) -> tuple[InFlightJournal, InFlightJournal]:
    """Return the journal of a reader and that of a writer, with one file."""
    return InFlightJournal.create(tmp_path / "journal"), InFlightJournal(tmp_path / "journal")


def test_requests_in_flight_can_be_read_by_another_process(
    journals: tuple[InFlightJournal, InFlightJournal], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list that does not fit, or is half written, reads as empty."""
    reader, writer = journals
    assert reader.read() == []
    many = {f"{i:0200}" for i in range(6000)}
    for names, expected in (({"b", "a"}, ["a", "b"]), ({"c"}, ["c"]), (many, []), ({"c"}, ["c"])):
        writer.write(names)
        assert reader.read() == expected

    def die(_: object) -> bytes:
        raise KeyboardInterrupt

    monkeypatch.setattr(journal_module.msgspec.msgpack, "encode", die)
    with pytest.raises(KeyboardInterrupt):
        writer.write({"b"})
    assert reader.read() == []


def test_requests_being_decoded_are_recorded_and_count_as_progress(
    journals: tuple[InFlightJournal, InFlightJournal],
) -> None:
    reader, writer = journals
    writer.write({"a"})
    names, _ = frames_of(Add(make_request("", 5), {"b": (0, ()), "c": (1, ())}))
    for count in range(1, 3):
        writer.begin_reading(names)
        assert reader.read() == ["a", "b", "c"]
        writer.end_reading()
        assert reader.read() == ["a"] and reader.progress.tolist() == [count, 0]


def test_choices_of_a_call_are_sent_together() -> None:
    """Their parameters may be long, so they are sent only once."""
    request = make_request("", 5, banned_token_ids=tuple(range(5000)))
    choices = {str(i): (i, (7,) * i) for i in range(128)}
    alone = len(encode(Add(request, {"0": (0, ())})))
    content = encode(Add(request, choices))
    assert len(content) - alone < 128 * 200
    command = decode_command(content)
    assert isinstance(command, Add)
    for i, (choice, output) in enumerate(command.requests()):
        assert (choice.request_id, choice.choice, output) == (str(i), i, (7,) * i)
        assert choice.params is command.request.params


class OneCommand:
    """A socket with some waiting commands."""

    def __init__(self, *commands: Any) -> None:
        self.waiting = [frames_of(command) for command in commands]
        self.sent: list[Any] = []

    def poll(self, _: int) -> int:
        return len(self.waiting)

    def recv_multipart(self) -> list[bytes]:
        return self.waiting.pop(0)

    def send(self, content: bytes) -> None:
        self.sent.append(decode_event(content))


@pytest.mark.parametrize("depth", [0, 1])
def test_requests_are_in_the_journal_only_while_their_step_runs(depth: int, tmp_path: Path) -> None:
    core = SimFactory(lookahead="off", depth=depth)()
    recorder = InFlightJournal.create(tmp_path / "journal")
    inner = core.executor
    seen: list[list[str]] = []

    verb = "submit" if depth else "run"
    original = getattr(inner, verb)

    def spy(plan: Any) -> Any:
        seen.append(recorder.read())
        return original(plan)

    setattr(inner, verb, spy)
    adds = [Add(make_request(n, 5, max_tokens=3), {n: (0, ())}) for n in ("a", "b")]
    socket: Any = OneCommand(*adds)
    server = EngineServer(core, socket, recorder)
    while server.iterate() and core.busy:
        pass
    assert seen[0] == ["a", "b"] and all(seen), "a step ran without its requests in the journal"
    assert recorder.read() == []
    steps = [event for event in socket.sent if isinstance(event, Stepped)]
    ends = [row.finish_reason for s in steps for row in s.output.rows if row.finish_reason]
    assert ends == [FinishReason.LENGTH] * 2
    assert list(steps[0].output.admitted) == ["a", "b"] and steps[0].output.times is not None


def test_a_request_that_the_scheduler_rejects_ends_with_the_reason(tmp_path: Path) -> None:
    core = SimFactory()()
    socket: Any = OneCommand(Add(make_request("", [10**6]), {"a": (0, ())}))
    server = EngineServer(core, socket, InFlightJournal.create(tmp_path / "journal"))
    server.iterate()
    ((ending,),) = (event.output.rows for event in socket.sent)
    assert ending.request_id == "a" and "out of range" in str(ending.message)
