"""Requests wait for pending kernels only if they need these kernels."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cbatch import FieldError, FinishReason, SamplingParams
from cbatch.engine.engine import Engine
from cbatch.runtime.gpu.capture import GROUPS, SHAPED
from cbatch.text.outputs import Choice
from tests.checking.invariants import check_scheduler
from tests.engine.late import HeldKernels, held_kernels
from tests.toy_engine import make_engine

PROMPT = "def add(a, b):"
PARAMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "filtered": {"top_p": 0.9, "temperature": 0.7, "logprobs": 2},
    "shaped": {"logit_bias": {5: 1.0}},
    "penalties": {"frequency_penalty": 0.5},
}
WAITS = {"shaped", "penalties"}


@pytest.fixture
def late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldKernels]:
    made = held_kernels(tmp_path, monkeypatch)
    yield made
    made.end_all()


def add(engine: Engine, *kinds: str, **more: Any) -> None:
    for kind in kinds:
        params = SamplingParams(max_tokens=20, seed=4, **PARAMS[kind], **more)
        engine.add(PROMPT, params, request_id=kind)


def steps(engine: Engine, left: set[str]) -> dict[str, Choice]:
    """Step until all requests except `left` have ended. Return the output of the ended requests."""
    ended: dict[str, Choice] = {}
    while len(engine._groups) > len(left):
        for output in engine.step():
            if output.finished is not None:
                ended[output.request_id] = output.finished
        check_scheduler(engine.scheduler)
    assert set(engine._groups) == left
    return ended


@pytest.mark.parametrize("depth", [0, 1])
def test_only_requests_that_need_pending_kernels_wait(
    late: HeldKernels,
    depth: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "cbatch")
    calm = make_engine(depth=depth)
    add(calm, *PARAMS)
    undisturbed = steps(calm, set())
    engine = make_engine(depth=depth, background_kernels=late.kernels)
    assert engine.core.background_kernels.pending == GROUPS
    assert f"compiling while serving: {SHAPED}\n" in caplog.text
    add(engine, *PARAMS)
    outputs = steps(engine, WAITS)
    assert set(outputs) == {"plain", "filtered"}
    for _ in range(3):
        assert engine.step() == [] and not engine.scheduler.has_work and engine.has_work
    late.end()
    outputs |= steps(engine, set())
    assert engine.core.background_kernels.pending == ()
    assert "not every" not in caplog.text
    texts = {kind: choice.text for kind, choice in outputs.items()}
    assert texts == {kind: choice.text for kind, choice in undisturbed.items()}
    assert all(choice.finish_reason is FinishReason.LENGTH for choice in outputs.values())
    assert held_kernels(late.folder, monkeypatch).kernels.pending == (), "the next start finds them"


def test_kernels_that_do_not_compile_block_no_request(
    late: HeldKernels, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(background_kernels=late.kernels)
    add(engine, *PARAMS)
    late.end(status=1)
    assert set(steps(engine, set())) == set(PARAMS)
    assert "not every kernel could be compiled ahead of: shape_kernel\n" in caplog.text


def test_a_request_that_waits_can_be_cancelled_and_is_checked_at_once(late: HeldKernels) -> None:
    engine = make_engine(background_kernels=late.kernels)
    add(engine, "shaped", n=3)
    with pytest.raises(FieldError, match="prompt"):
        engine.add("x" * 5000, SamplingParams(logit_bias={5: 1.0}))
    with pytest.raises(FieldError, match="logit_bias"):
        engine.add(PROMPT, SamplingParams(logit_bias={5000: 1.0}))
    assert engine.cancel("shaped")
    outputs = engine.step()
    reasons = [output.finished and output.finished.finish_reason for output in outputs]
    assert reasons == [FinishReason.CANCELLED] * 3
    assert not engine.has_work
    late.end()
    while SHAPED in engine.core.background_kernels.pending:
        pass
    assert engine.step() == [] and not engine.scheduler.has_work
