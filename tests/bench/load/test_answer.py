"""Answers, in whatever pieces they come."""

from __future__ import annotations

import json

import numpy as np
import pytest

from bench.load.client.answer import AnswerReader
from bench.load.client.call import CallError, Failure, LiveTally, TimedCall
from tests.bench.load.scripted import DONE, chunk, usage

WELL = (
    b": keep-alive\n\n"
    + chunk("", 0)  # a role, or nothing: no first token
    + chunk("a", 1)
    + chunk("bcd", 4)
    + b"event: x\ndata: "
    + json.dumps({"choices": [{"text": "\u00e9\n\n", "finish_reason": "length"}]})[:20].encode()
    + b"\ndata: "
    + json.dumps({"choices": [{"text": "\u00e9\n\n", "finish_reason": "length"}]})[20:].encode()
    + b"\n\n"
    + usage(6, prompt=9)
    + DONE
)


def read(pieces: list[bytes], *, keep_text: bool = True) -> tuple[TimedCall, AnswerReader]:
    """Piece i comes at i seconds."""
    call = TimedCall(0, 0.0, 0, 6)
    reader = AnswerReader(call, LiveTally(), streamed=True, keep_text=keep_text)
    reader.begin(200)
    for at, piece in enumerate(pieces):
        reader.read(piece, float(at))
    reader.end(float(len(pieces)))
    return call, reader


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_pieces_do_not_matter(line_end: bytes) -> None:
    raw = WELL.replace(b"\n", line_end)
    rng = np.random.default_rng(3)
    cuttings = [[*range(1, len(raw))], *([c] for c in range(1, len(raw)))]
    cuttings += [sorted(rng.choice(len(raw), 5, replace=False).tolist()) for _ in range(50)]
    for cuts in cuttings:
        edges = [0, *cuts, len(raw)]
        pieces = [raw[a:b] for a, b in zip(edges, edges[1:], strict=False)]
        call, reader = read(pieces)
        assert (reader.text, call.output_tokens, call.prompt_tokens) == ("abcd\u00e9\n\n", 6, 9)
        assert call.chunks == 3


def test_a_first_chunk_without_a_token_is_no_first_token() -> None:
    pieces = [chunk("", 0), chunk("a", 1), chunk("", 2), chunk("b", 3, reason="stop"), DONE]
    call, _ = read(pieces)
    # What the third chunk tells is a token without text yet: it came then.
    assert call.chunk_s.tolist() == [1.0, 2.0, 3.0] and call.first_s == 1.0
    assert call.told_tokens() == [1, 1, 1] and call.per_chunk_usage


def test_tokens_that_nobody_counts_one_by_one_are_spread() -> None:
    pieces = [chunk("a", None), chunk("b", None), chunk("c", None, reason="stop"), usage(8), DONE]
    call, _ = read(pieces)
    assert not call.per_chunk_usage and call.told_tokens() == [2, 3, 3]
    assert call.tpot_s == 2 / 7


def test_what_comes_in_one_read_came_at_once() -> None:
    pieces = [chunk("a", 1) + chunk("b", 3), chunk("c", 4, reason="stop") + DONE]
    call, _ = read(pieces)
    assert call.told_tokens() == [3, 1] and call.chunks == 3


def test_chat_and_reasoning() -> None:
    deltas = [{"role": "assistant", "content": ""}, {"reasoning_content": "h"}, {"content": "i"}]
    pieces = [
        b"data: " + json.dumps({"choices": [{"index": 0, "delta": delta}]}).encode() + b"\n\n"
        for delta in deltas
    ]
    last = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n'
    call, reader = read([*pieces, last, usage(2) + DONE])
    assert reader.text == "hi" and call.chunk_s.tolist() == [1.0, 2.0] and call.end_s == 2.0


@pytest.mark.parametrize(
    ("pieces", "failure"),
    [
        ([b""], Failure.EMPTY),
        ([DONE], Failure.EMPTY),
        ([chunk("", 0, reason="stop"), usage(0), DONE], Failure.EMPTY),
        ([chunk("a", 1), usage(1), DONE], Failure.TRUNCATED),
        ([chunk("a", 1, reason="stop"), usage(1)], Failure.TRUNCATED),
        ([chunk("a", None, reason="stop"), DONE], Failure.NO_USAGE),
        ([chunk("a", 1), b'data: {"choices": [\n\n'], Failure.MALFORMED),
        ([chunk("a", 1), b'data: {"choices": 3}\n\n'], Failure.MALFORMED),
        ([chunk("a", 1), b"data: \xff\n\n"], Failure.MALFORMED),
        ([b"<html>no stream at all</html>\n\n"], Failure.MALFORMED),
        ([b'{"choices": []}'], Failure.MALFORMED),
        ([chunk("a", 1), b'data: {"error": {"message": "dead"}}\n\n', DONE], Failure.REPORTED),
    ],
)
def test_a_200_alone_is_no_success(pieces: list[bytes], failure: Failure) -> None:
    with pytest.raises(CallError) as caught:
        read(pieces)
    assert caught.value.failure is failure
