"""Answers, in any pieces."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.load.client import answer as answer_module
from bench.load.client.answer import AnswerReader
from bench.load.client.http import CallError, Failure, LiveTally, TimedCall
from tests.bench.load.scripted import DONE, chunk, usage


def read(pieces: list[bytes], *, streamed: bool = True) -> tuple[TimedCall, str]:
    """Read pieces; piece i comes at i seconds. Return the call and its text."""
    call = TimedCall(0, 0.0, 5, 6)
    reader = AnswerReader(call, LiveTally(), streamed=streamed, keep_text=True)
    reader.begin(200)
    for at, piece in enumerate(pieces):
        reader.read(piece, float(at))
    reader.end(float(len(pieces)))
    assert sum(call.tokens_by_read()) in (0, call.output_tokens)
    return call, reader.text


def summary(raw: bytes, cuts: Sequence[int] = ()) -> tuple[str, int, int, str, int]:
    """Return the values read from it, cut into pieces at these places."""
    edges = [0, *cuts, len(raw)]
    call, text = read([raw[a:b] for a, b in zip(edges, edges[1:], strict=False)])
    return text, call.prompt_tokens, call.output_tokens, call.counted_by, call.chunks


@pytest.mark.parametrize(
    ("pieces", "failure"),
    [
        ([b""], Failure.EMPTY),
        ([DONE], Failure.EMPTY),
        ([chunk("", 0, reason="stop"), usage(0), DONE], Failure.EMPTY),
        ([chunk("a", 1), usage(1)], Failure.TRUNCATED),
        ([chunk("a", None)], Failure.TRUNCATED),
        ([chunk("a", 1), b'data: {"choices": [\n\n'], Failure.MALFORMED),
        ([chunk("a", 1), b'data: {"choices": ['], Failure.MALFORMED),
        ([chunk("a", 1), b'data: {"choices": 3}\n\n'], Failure.MALFORMED),
        ([chunk("a", 1), b"data: \xff\n\n"], Failure.MALFORMED),
        ([b"<html>no stream at all</html>\n\n"], Failure.MALFORMED),
        ([b'{"choices": []}'], Failure.MALFORMED),
        ([b"data: " + b"[" * 100_000 + b"\n\n"], Failure.MALFORMED),
        ([b"data: " + b" " * 2**12] * 65, Failure.MALFORMED),  # an event without an end
        ([chunk("a", 1), b'data: {"error": {"message": "dead"}}\n\n', DONE], Failure.REPORTED),
    ],
)
def test_a_200_alone_is_no_success(
    pieces: list[bytes], failure: Failure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_module, "MAX_BYTES", 2**18)
    with pytest.raises(CallError) as caught:
        read(pieces)
    assert caught.value.failure is failure


# The content of each file: text, prompt and output tokens, how they were counted, chunks with
# output.
STREAMS = {
    "openai-chat": ("Rivers run south.", 9, 3, "usage", 3),
    "openai-refusal": ("I cannot do that.", 9, 6, "usage", 2),
    "openai-hidden-reasoning": ("", 9, 64, "usage", 0),
    "openai-tool-call": ('tide{"port":"Brest"}', 9, 14, "usage", 4),
    "openai-azure": ("Rivers run.", 9, 3, "usage", 2),
    "vllm-chat-reasoning": ("Hm, easy\n\nYes", 11, 6, "per chunk usage", 5),
    "vllm-completions": (" one two three", 11, 4, "per chunk usage", 3),
    "sglang-chat": ("So thenDone", 7, 5, "usage", 3),
    "llama.cpp-chat": ("A heron", 8, 3, "usage", 2),
    "llama.cpp-no-usage": ("BirdA heron", 5, 3, "chunks", 3),
    "ollama-chat": ("We greetHi!", 68, 6, "usage", 4),
    "ollama-tool-call": ('tide{"port":"Brest"}', 68, 20, "usage", 1),
    "tgi-chat": ("Sand dunes move", 33, 4, "usage", 3),
    "tgi-without-done": ("Sand dunes move", 33, 3, "usage", 3),
    "tensorrt-llm-chat": ("Snow melts", 5, 3, "per chunk usage", 3),
    "openrouter-chat": ("Well nowMoss", 14, 4, "usage", 3),
    "openrouter-encrypted-reasoning": ("c2VjcmV0Moss", 14, 9, "usage", 2),
    "litellm-chat": ("Let me seeLime trees", 20, 7, "usage", 4),
}
FOLDER = Path(__file__).parent / "streams"


@pytest.mark.parametrize("name", [path.stem for path in FOLDER.iterdir()])
def test_streams_of_other_servers(name: str) -> None:
    """The stream comes in any pieces, with every line end, with a byte order mark, and without the
    last blank line. Heartbeats and unknown fields are between its events."""
    raw = (FOLDER / f"{name}.txt").read_bytes()
    expected = STREAMS[name]
    assert summary(raw) == expected
    rng = np.random.default_rng(5)
    for line_end in (b"\n", b"\r\n", b"\r"):
        same = b"\xef\xbb\xbf" + raw.replace(b"\n", line_end)
        assert summary(same, range(1, len(same))) == expected
        for _ in range(10):
            cuts = sorted(rng.choice(len(same), 7, replace=False).tolist())
            assert summary(same, cuts) == expected
    assert summary(raw.rstrip()) == expected
    beats = b":\n\ndata:\n\nevent: ping\ndata: {}\n\nevent: beat\ndata: now\n\nx-load: 3\nid: 4\n"
    beats += b"data: null\n\ndata:[]\n\nevent: ping\ndata: null\n\nretry: 3\n"
    beats += b'event: ping\ndata: {"type": "ping"}\n\ndata: ""\n\ndata\n\n'
    assert summary(raw.replace(b"data:", beats + b"data:")) == expected
    single = raw.replace(b"\n\n", b"\n")  # events that do not end
    assert summary(single) == expected


def data(*answers: Any) -> list[bytes]:
    return [b"data: " + json.dumps(answer).encode() + b"\n\n" for answer in answers]


def choice(**members: Any) -> dict[str, Any]:
    return {"choices": [members]}


def empty(tokens: int | None) -> bytes:
    """Return an event with a role and no text."""
    delta = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
    return data(delta | ({} if tokens is None else {"usage": {"completion_tokens": tokens}}))[0]


FIRST_CHUNKS = {
    # pieces; times at which tokens came, and their numbers
    "final usage": ([empty(3), chunk("a", None), chunk("b", None), usage(3)], [1, 2], [1, 2]),
    "final usage in all": ([empty(3), chunk("a", 3), chunk("b", 3)], [1, 2], [1, 2]),
    "final usage twice": ([empty(3), empty(3), chunk("a", 3), chunk("b", 3)], [2, 3], [1, 2]),
    "a role that counts as a token": ([empty(1), chunk("a", 1), chunk("b", 2)], [1, 2], [1, 1]),
    "only usage": ([usage(2), chunk("a", 1), chunk("b", 2)], [1, 2], [1, 1]),
    "a role": ([empty(None), chunk("a", 1), chunk("b", 2)], [1, 2], [1, 1]),
    "half a character": ([empty(1), chunk("a", 2), chunk("b", 3)], [0, 1, 2], [1, 1, 1]),
    "hidden thoughts": ([empty(1), empty(2), chunk("a", 3)], [0, 1, 2], [1, 1, 1]),
    "no text at all": ([empty(1), empty(2), empty(3)], [0, 1, 2], [1, 1, 1]),
    "no text but usage": ([empty(3), empty(None)], [], []),
    "a token without text": (
        [chunk("", 0), chunk("a", 1), chunk("", 2), chunk("b", 3)],
        [1, 2, 3],
        [1, 1, 1],
    ),
    "several in one read": ([chunk("a", 1) + chunk("b", 3), chunk("c", 4)], [0, 1], [3, 1]),
}


@pytest.mark.parametrize("name", FIRST_CHUNKS)
def test_when_the_first_token_came(name: str) -> None:
    pieces, times_s, tokens = FIRST_CHUNKS[name]
    call, _ = read([*pieces, DONE])
    assert call.chunk_s.tolist() == times_s and call.tokens_by_read() == tokens
    assert call.first_s == (times_s[0] if times_s else len(pieces) + 1)


COUNTED = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}}
ODD = {
    "null members": [
        choice(delta=None, finish_reason=None),
        {"choices": None, "usage": None, "error": None},
        choice(delta={"content": None, "tool_calls": None, "role": None}),
        choice(delta={"content": "ab"}, finish_reason="stop"),
        COUNTED,
    ],
    "missing members": [{}, choice(), choice(delta={}), choice(delta={"content": "ab"}), COUNTED],
    "content in parts": [
        choice(delta={"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}),
        COUNTED,
    ],
    "all of it again at the end": [
        choice(delta={"content": "a"}, message={"content": "a"}),
        choice(delta={"content": "b"}, message={"content": "ab"}),
        choice(delta={}, message={"content": "ab"}, finish_reason="stop"),
        COUNTED,
    ],
    "usage first": [COUNTED, choice(text="ab", finish_reason="stop")],
    "usage in a choice": [
        choice(delta={"content": "ab"}),
        choice(delta={}, finish_reason="stop", usage=COUNTED["usage"]),
    ],
    "usage in part": [
        {"choices": [], "usage": {"prompt_tokens": 5}},
        choice(text="ab", finish_reason="stop"),
        {"choices": [], "usage": {"completion_tokens": 2}},
    ],
    "zeros after the count": [
        choice(text="ab", finish_reason="stop") | {"usage": COUNTED["usage"]},
        {"choices": [], "usage": {"prompt_tokens": 0, "completion_tokens": 0}},
    ],
    "no finish reason": [choice(text="ab", finish_reason=""), COUNTED],
    "numbers that JSON has not": [
        choice(text="ab", finish_reason="stop", logprobs=[float("nan"), float("-inf")]),
        COUNTED,
    ],
}


@pytest.mark.parametrize("name", ODD)
def test_odd_chunks_are_read(name: str) -> None:
    text, prompt, tokens, _, _ = summary(b"".join(data(*ODD[name])) + DONE)
    assert (text, prompt, tokens) == ("ab", 5, 2)


def test_halves_of_a_character_are_joined() -> None:
    halves = data(choice(text="\ud83e"), choice(text="\udd86", finish_reason="stop"), COUNTED)
    assert b"ud83e" in halves[0]
    assert summary(b"".join(halves))[0] == "\U0001f986"
    assert summary(halves[0] + DONE)[0] == "\ufffd", "which can be sent on"


def test_a_whole_answer_that_is_not_counted_has_no_tokens() -> None:
    with pytest.raises(CallError, match="does not count"):
        read([json.dumps(choice(text="ab", finish_reason="stop")).encode()], streamed=False)


ERRORS = {
    "OpenAI": b'data: {"error": {"message": "it broke", "type": "server_error"}}',
    "vLLM of old": b'data: {"object": "error", "message": "it broke", "code": 400}',
    "llama.cpp of old": b'error: {"code": 500, "message": "it broke", "type": "server_error"}',
    "TGI": b'data: {"error": "it broke", "error_type": "generation"}',
    "a name": b'event: error\ndata: {"message": "it broke"}',
    "a name, and text": b"event: error\ndata: it broke",
    "OpenRouter": b'data: {"id": "x", "error": {"code": "server_error", "message": "it broke"}, '
    b'"choices": [{"index": 0, "delta": {"content": ""}, "finish_reason": "error"}]}',
    "in a choice": b'data: {"choices": [{"delta": {}, "error": {"message": "it broke"}}]}',
    "of the Responses API": b'data: {"type": "error", "code": "x", "message": "it broke"}',
    "without choices": b'data: {"choices": [], "error": {"message": "it broke"}}',
    "FastAPI": b'data: {"detail": "it broke"}',
    "no message": b"event: error",
    "null": b"event: error\ndata: null",
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_within_a_stream(name: str) -> None:
    with pytest.raises(CallError, match="it broke|without a message") as caught:
        summary(chunk("a", 1) + ERRORS[name] + b"\n\n" + DONE)
    assert caught.value.failure is Failure.REPORTED


@pytest.mark.parametrize("streamed", [True, False])
def test_cached_tokens_of_the_prompt(streamed: bool) -> None:
    for cached in (
        {"prompt_tokens_details": {"audio_tokens": 1, "cached_tokens": 4.0}},
        {"prompt_tokens_details": None, "prompt_cache_hit_tokens": 4},
    ):
        counted = {"usage": {"prompt_tokens": 9, "completion_tokens": 1} | cached}
        answer = choice(text="a", finish_reason="stop") | counted
        pieces = data(answer) if streamed else [json.dumps(answer).encode()]
        call, _ = read(pieces, streamed=streamed)
        assert (call.prompt_tokens, call.cached_tokens) == (9, 4)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"error": {"message": "no such field: x", "param": "x"}}', "400: no such field: x"),
        (b'{"error": "no such field: x"}', "400: no such field: x"),
        (b'{"object": "error", "message": "no such field: x"}', "400: no such field: x"),
        (
            b'{"detail": [{"loc": ["body", "a", "x"], "msg": "extra"}, {"msg": "y"}]}',
            "400: body.a.x: extra; y",
        ),
        (b"<html>", "400: '<html>'"),
        (b"[" * 10_000, "400: '[["),
    ],
)
def test_what_a_refusal_says(body: bytes, words: str) -> None:
    reader = AnswerReader(TimedCall(0, 0.0, 5, 6), LiveTally(), streamed=True)
    reader.begin(400)
    reader.read(body, 0.0)
    with pytest.raises(CallError) as caught:
        reader.end(0.0)
    assert caught.value.detail.startswith(words)
