"""The curves over time of a measured run."""

from __future__ import annotations

import numpy as np
import pytest

from bench.load.client.call import CallError, Failure, TimedCall
from bench.load.run.files import series_of
from bench.load.run.report import ServerSample


def call(sent_s: float, reads: list[tuple[float, int]]) -> TimedCall:
    made = TimedCall(0, sent_s, 4, 8)
    made.output_tokens, made.counted_by = sum(n for _, n in reads), "per chunk usage"
    for at_s, tokens in reads:
        made.chunk_s.append(at_s)
        made.chunk_tokens.append(tokens)
    made.end_s = reads[-1][0]
    return made


def test_tokens_and_calls_under_way_add_up() -> None:
    """A pause of the server from 2 s to 6 s is visible."""
    calls = [call(0.0, [(1.0, 3), (2.0, 2), (6.0, 1)]), call(1.0, [(1.5, 1), (8.0, 4)])]
    whole = TimedCall(2, 3.0, 4, 8)  # it was not streamed
    whole.end_s, whole.output_tokens = 7.0, 5
    failed = TimedCall(3, 2.0, 4, 8)
    failed.end_s, failed.error = 4.0, CallError(Failure.CUT, "")
    series = series_of([*calls, whole, failed])
    assert series is not None and series.first_s == 0.0
    assert series.length_s == pytest.approx(8 / 240)
    tokens, running = (
        np.array(values, dtype=float) for values in (series.output_tokens_per_s, series.running)
    )
    assert tokens.sum() * series.length_s == pytest.approx(3 + 2 + 1 + 1 + 4 + 5, rel=1e-3)
    assert not tokens[61:179].any() and tokens[60] > 0 and tokens[-1] > 0
    assert running.sum() * series.length_s == pytest.approx(6 + 7 + 4 + 2, rel=1e-3)
    assert running[100] == pytest.approx(4) and running[-1] == pytest.approx(1)


def test_nothing_that_came_is_nothing_drawn() -> None:
    failed = TimedCall(0, 0.0, 4, 8)
    failed.error = CallError(Failure.EMPTY, "")
    assert series_of([failed]) is None and series_of([]) is None


def look(at_s: float, waiting: float, drafted: int, accepted: int | None) -> ServerSample:
    values = {"running": 1.0, "kv_share": 0.5, "output_tokens": None, "steps": None}
    values |= {"waiting": waiting, "prompt_tokens": round(10 * at_s)}
    values |= {"prefix_hit_tokens": round(4 * at_s)}
    return ServerSample(at_s=at_s, drafted_tokens=drafted, accepted_tokens=accepted, **values)


def test_values_of_the_server_are_drawn_too() -> None:
    calls = [call(0.0, [(1.0, 3), (8.0, 1)])]
    looks = [look(0.0, 0, 0, 0), look(2.0, 8, 0, 0), look(6.0, 0, 40, 10), look(8.0, 0, 60, 30)]
    series = series_of(calls, looks)
    assert series is not None
    waiting = np.array(series.waiting, dtype=float)
    assert waiting.max() == pytest.approx(8, rel=0.02) == waiting[60]
    assert waiting.sum() * series.length_s == pytest.approx(8 + 16, rel=1e-3)  # two triangles
    prompts = np.array(series.prompt_tokens_per_s, dtype=float)
    assert prompts == pytest.approx(np.full(240, 6.0), rel=1e-3)
    assert set(series.acceptance[:59]) == {None}, "nothing was drafted"
    assert series.acceptance[61:179] == pytest.approx([0.25] * 118, rel=1e-3)
    assert series.acceptance[181:] == pytest.approx([1.0] * 59, rel=1e-3)
    assert set(series.kv_share) == {0.5}
    half = series_of(calls, [look(0.0, 0, 0, None), look(8.0, 0, 60, None)])
    assert half is not None and set(half.acceptance) == {None} != set(half.waiting)
    assert set(series_of(calls).waiting) == {None}  # type: ignore[union-attr]
