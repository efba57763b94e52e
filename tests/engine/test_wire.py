"""What goes over the wire comes out the same; what was in flight is known whatever happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cbatch.core.outlook import Calibration, Outlook
from cbatch.core.plan import TokenLogprobs
from cbatch.core.request import MAX_SEED, FinishReason, StructuredOutputs
from cbatch.core.sequence import SchedulerStats
from cbatch.engine import flight as flight_module
from cbatch.engine.flight import FlightRecorder
from cbatch.engine.process import EngineServer
from cbatch.engine.wire import (
    Add,
    BlockMap,
    Cancel,
    Ending,
    EngineStats,
    Finish,
    Heartbeat,
    Ready,
    Row,
    SeenRow,
    SeenStep,
    Sight,
    StartFailed,
    Stepped,
    StepTimes,
    Stop,
    Watch,
    decode_command,
    decode_event,
    encode,
)
from tests.engine.factories import SimFactory
from tests.helpers import make_config, make_request

STRUCTURED = StructuredOutputs(json={"enum": [1, None, "x"]})
CALIBRATION = Calibration([4.0], [3.1], [3.0])
OUTLOOK = Outlook(True, 0.4, 900.0, 0.3, CALIBRATION)
STATS = EngineStats(3, 2, 64, 10, 7, 0.5, 0.1, 0.02, SchedulerStats(steps=9), OUTLOOK)


@pytest.mark.parametrize(
    "command",
    [
        Add(make_request("r", 9, seed=MAX_SEED, stop=("x",), logit_bias={3: -1.5}), (1, 2)),
        Add(make_request("r", 9, structured_outputs=STRUCTURED)),
        Cancel("r"),
        Finish("r", 12),
        Stop(),
        Watch(True),
    ],
)
def test_commands(command: Any) -> None:
    assert decode_command(encode(command)) == command


@pytest.mark.parametrize(
    "event",
    [
        Ready(make_config(lookahead="fixed:3"), ("model",), {"model": "m", "blocks": 3}, True),
        StartFailed("no", "num_blocks", "more"),
        Heartbeat(STATS),
        Stepped(
            admitted=("a",),
            rows=(Row("a", [1, 2], 3, 1), Row("b", [7], 0, 0)),
            endings=(Ending("b", FinishReason.ERROR, "why"),),
            logprobs=(),
            times=StepTimes(0.1, 0.2, 0.4),
            stats=STATS,
        ),
        Sight(
            rows=(SeenRow(3, "7", 10, 14, 1, 0.5), SeenRow(4, "8", 10, 10, 10, None)),
            steps=(SeenStep([3, 4], [2, 0], [1, 0], [1, 10]),),
            num_steps=9,
            blocks=BlockMap(4, [4, 1], [0, 2]),
            stats=STATS,
        ),
    ],
)
def test_events(event: Any) -> None:
    assert decode_event(encode(event)) == event


def test_logprobs_keep_their_bits_and_shapes() -> None:
    rng = np.random.default_rng(0)
    entry = TokenLogprobs(
        slot=1,
        first_position=5,
        chosen=np.asarray([-0.1, -np.inf], np.float32),
        top_ids=rng.integers(0, 9, (2, 0), dtype=np.int32),
        top=rng.normal(size=(2, 3)).astype(np.float32),
    )
    event = decode_event(encode(Stepped((), (), (), (("a", entry),), None, STATS)))
    assert isinstance(event, Stepped)
    ((name, back),) = event.logprobs
    assert name == "a" and (back.slot, back.first_position) == (1, 5)
    for mine, theirs in ((entry.chosen, back.chosen), (entry.top_ids, back.top_ids)):
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
    assert back.top.tobytes() == entry.top.tobytes()


def test_what_is_in_flight_is_read_by_another(tmp_path: Path) -> None:
    reader = FlightRecorder.create(tmp_path / "flight")
    writer = FlightRecorder(tmp_path / "flight")
    assert reader.read() == []
    for names in ({"b", "a"}, {"c"}, {"c"}):
        writer.write(names)
        assert reader.read() == sorted(names)
        writer.write(set())
        assert reader.read() == []


def test_a_half_written_flight_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = FlightRecorder.create(tmp_path / "flight")
    writer = FlightRecorder(tmp_path / "flight")
    writer.write({"a" * 40})

    def die(_: object) -> bytes:
        raise KeyboardInterrupt

    monkeypatch.setattr(flight_module.msgspec.msgpack, "encode", die)
    with pytest.raises(KeyboardInterrupt):
        writer.write({"b"})
    assert reader.read() == []


class OneCommand:
    """A socket on which some commands wait."""

    def __init__(self, *commands: Any) -> None:
        self.waiting = [encode(command) for command in commands]
        self.sent: list[Any] = []

    def poll(self, _: int) -> int:
        return len(self.waiting)

    def recv(self) -> bytes:
        return self.waiting.pop(0)

    def send(self, content: bytes) -> None:
        self.sent.append(decode_event(content))


@pytest.mark.parametrize("depth", [0, 1])
def test_rows_are_announced_before_their_step_and_withdrawn_after_it(
    depth: int, tmp_path: Path
) -> None:
    parts = SimFactory(lookahead="off", depth=depth)()
    recorder = FlightRecorder.create(tmp_path / "flight")
    inner = parts.loop._executor
    seen: list[list[str]] = []

    verb = "submit" if depth else "run"
    original = getattr(inner, verb)

    def spy(plan: Any) -> Any:
        seen.append(recorder.read())
        return original(plan)

    setattr(inner, verb, spy)
    adds = [Add(make_request(name, 5, max_tokens=3)) for name in ("a", "b")]
    socket: Any = OneCommand(*adds)
    server = EngineServer(parts, socket, recorder)
    while server._obey() and server._busy:
        server._step()
    assert seen[0] == ["a", "b"] and all(seen), "a step ran unannounced"
    assert recorder.read() == []
    steps = [event for event in socket.sent if isinstance(event, Stepped)]
    assert [e.reason for s in steps for e in s.endings] == [FinishReason.LENGTH] * 2
    assert steps[0].admitted == ("a", "b") and steps[0].times is not None


def test_what_the_scheduler_refuses_ends_with_its_reason(tmp_path: Path) -> None:
    parts = SimFactory()()
    socket: Any = OneCommand(Add(make_request("a", [10**6])))
    server = EngineServer(parts, socket, FlightRecorder.create(tmp_path / "flight"))
    server._obey()
    server._step()
    ((ending,),) = (event.endings for event in socket.sent)
    assert ending.request_id == "a" and "out of range" in ending.message
