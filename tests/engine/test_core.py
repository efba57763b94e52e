"""The core of an engine: requests enter, steps return rows, and each request ends once."""

from __future__ import annotations

import msgspec
import pytest

from cbatch import FieldError, FinishReason
from cbatch.engine.core import EngineCore, StepOutput
from tests.checking.invariants import check_scheduler
from tests.helpers import make_request
from tests.toy_engine import make_engine


def run(core: EngineCore) -> list[StepOutput]:
    steps = []
    while core.busy:
        steps.append(core.step())
        check_scheduler(core.scheduler)
    return steps


@pytest.mark.parametrize("depth", [0, 1])
def test_every_request_has_one_ending(depth: int) -> None:
    core = make_engine(depth=depth, lookahead="off").core
    for name in ("ends", "stopped", "cancelled"):
        core.add(make_request(name, [5, 6, 7], max_tokens=9))
    core.reject("rejected", FieldError("prompt", "is bad", "give another"))
    first = core.step()
    assert list(first.admitted) == ["ends", "stopped", "cancelled"] and first.times is not None
    core.finish("stopped", 1)
    core.cancel("cancelled")
    core.cancel("unknown")
    steps = [first, *run(core)]
    endings = [row for step in steps for row in step.rows if row.finish_reason is not None]
    assert {ending.request_id: ending.finish_reason for ending in endings} == {
        "ends": FinishReason.LENGTH,
        "stopped": FinishReason.STOP,
        "cancelled": FinishReason.CANCELLED,
        "rejected": FinishReason.ERROR,
    }
    assert len(endings) == 4
    assert ["is bad" in str(row.message) for row in first.rows if row.message] == [True]
    tokens = [
        t for step in steps for row in step.rows if row.request_id == "ends" for t in row.tokens
    ]
    assert len(tokens) == 9
    metrics = core.metrics()
    assert metrics.num_running == 0 and metrics.totals.steps == sum(
        s.times is not None for s in steps
    )
    assert metrics.step_s == pytest.approx(sum(s.times.total_s for s in steps if s.times))
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(steps[-1]), type=StepOutput)
    assert sent == steps[-1]


def test_without_work_a_step_returns_nothing() -> None:
    core = make_engine().core
    assert not core.busy and core.step() == StepOutput()
    core.add(make_request("a", [5, 6, 7]))
    core.cancel("a")
    assert [row.finish_reason for row in core.step().rows] == [FinishReason.CANCELLED]
    assert core.step() == StepOutput()


def test_requests_that_can_neither_run_nor_end_are_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = make_engine().core
    core.add(make_request("a", [5, 6, 7]))
    monkeypatch.setattr(core.scheduler, "schedule", lambda now_s: None)
    core.reject("b", ValueError("bad"))
    assert len(core.step().rows) == 1, "what has ended comes first"
    with pytest.raises(RuntimeError, match="cannot plan"):
        core.step()
