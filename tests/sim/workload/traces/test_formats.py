"""Every format is detected and read; bad input names file, line and field; a cut trace is used."""

from __future__ import annotations

import gzip
import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from cbatch.cli.main import main
from sim.workload.traces.reader import Trace, write_requests
from sim.workload.traces.request import TraceError, TraceRequest

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-12 00:00:14+00:00,10,3
2024-05-12 00:00:14.250000+00:00,20,4
"""
MOONCAKE = """{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}
{"timestamp": 3000, "input_length": 1025, "output_length": 6, "hash_ids": [0, 2, 3]}
"""
AIPERF = """{"session_id": "a", "timestamp": 0, "input_length": 600, "output_length": 5, \
"delay": null, "hash_ids": null}
{"session_id": "b", "timestamp": 1000, "input_length": 40, "output_length": 6}
{"session_id": "b", "delay": 250.0, "input_length": 700, "output_length": 7}
{"session_id": "b", "timestamp": 3000, "delay": 1500, "input_length": 700, "output_length": 8}
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,GPT-4,1087,230,1317,API log
"""
BURSTGPT_3 = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,\
Total tokens,Log Type
19440110.0,1722ac82,43,GPT-4,906,446,1352,Conversation log
19440161.0,,2,ChatGPT,36,29,65,API log
"""
BAILIAN = """{"chat_id": 7, "parent_chat_id": -1, "timestamp": 1.5, "input_length": 20, \
"output_length": 4, "type": "text", "turn": 1, "hash_ids": [5, 6]}
{"chat_id": 9, "parent_chat_id": 7, "timestamp": 2.0, "input_length": 40, "output_length": 4, \
"type": "text", "turn": 2, "hash_ids": [5, 6, 8]}
"""
VIDUR = """arrived_at,num_prefill_tokens,num_decode_tokens
0.5,100,10
0.75,200.0,20
"""
SERVEGEN = """arrival_s,client,input,output,reason_ratio
0.1,3,10,5,0.5
0.4,1,20,6,0.1
"""
VLLM_RUN = """{"request_id": "a", "input_toks": 8, "output_toks": 2, "arrival_time": 1777142838.5, \
"queued_ts": 1, "scheduled_ts": 1, "first_token_ts": 2, "last_token_ts": 3}
{"request_id": "b", "input_toks": 9, "output_toks": 3, "arrival_time": 1777142839.0}
"""
BENCH = {
    "start_times": [12.5, 12.0],
    "input_lens": [7, 8],
    "output_lens": [2, 3],
    "backend": "vllm",
}
LOG = """{"format": "cbatch-requests", "version": 1}
{"arrival_s": 0.0, "prompt_tokens": 20, "output_tokens": 3, "hash_ids": [1, 2], \
"hash_block_tokens": 16, "session": "s", "priority": -1, "ttft_slo_s": 0.5}
{"arrival_s": 0.0, "prompt_tokens": 30, "output_tokens": 4, "session": "s", "think_s": 1.5}
"""


def write(folder: Path, text: str | bytes, name: str = "trace") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def request(arrival_s: float, prompt: int, output: int, **more: Any) -> TraceRequest:
    return TraceRequest(
        arrival_s=pytest.approx(arrival_s, abs=2e-6),
        prompt_tokens=prompt,
        output_tokens=output,
        **more,
    )


BLOCKS = {"hash_block_tokens": 512}
FIRST = {"session": "s", "priority": -1, "ttft_slo_s": 0.5}
EXPECTED = {
    "azure": (
        f"\ufeff{AZURE}".replace("\n", "\r\n"),
        [request(0, 374, 44), request(4.314579, 396, 109)],
    ),
    "azure-2024": (AZURE_2024, [request(0, 10, 3), request(0.25, 20, 4)]),
    "mooncake": (
        MOONCAKE,
        [request(0, 600, 5, hash_ids=(0, 1), **BLOCKS)]
        + [request(3, 1025, 6, hash_ids=(0, 2, 3), **BLOCKS)],
    ),
    "mooncake, with sessions": (
        AIPERF,
        [request(0, 600, 5, session="a"), request(1, 40, 6, session="b")]
        + [request(1, 700, 7, session="b", think_s=0.25)]
        + [request(3, 700, 8, session="b", think_s=1.5)],
    ),
    "burstgpt": (BURSTGPT, [request(0, 472, 18), request(40, 1087, 230)]),
    "burstgpt-3": (BURSTGPT_3, [request(0, 906, 446, session="1722ac82"), request(51, 36, 29)]),
    "bailian": (
        BAILIAN,
        [request(0, 20, 4, hash_ids=(5, 6), hash_block_tokens=16, session="7")]
        + [request(0.5, 40, 4, hash_ids=(5, 6, 8), hash_block_tokens=16, session="7")],
    ),
    "vidur": (VIDUR, [request(0, 100, 10), request(0.25, 200, 20)]),
    "servegen-requests": (SERVEGEN, [request(0, 10, 5), request(0.3, 20, 6)]),
    "vllm-run": (VLLM_RUN, [request(0, 8, 2), request(0.5, 9, 3)]),
    "vllm-bench": (json.dumps(BENCH), [request(0, 8, 3), request(0.5, 7, 2)]),
    "cbatch-requests": (
        LOG,
        [request(0, 20, 3, hash_ids=(1, 2), hash_block_tokens=16, **FIRST)]
        + [request(0, 30, 4, session="s", think_s=1.5)],
    ),
}


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("zipped", [False, True])
def test_format_is_found_out_and_read(tmp_path: Path, name: str, zipped: bool) -> None:
    text, expected = EXPECTED[name]
    trace = Trace(write(tmp_path, gzip.compress(text.encode()) if zipped else text))
    assert name.startswith(trace.format)
    assert list(trace) == expected
    assert list(trace) == expected, "a second reading starts again"


BAD = {
    # name: (text, line or None, field, words)
    "no file": (None, None, "file", "cannot be read"),
    "empty": ("", None, "file", "is empty"),
    "header alone": ("TIMESTAMP,ContextTokens,GeneratedTokens\n", None, "file", "no requests"),
    "unknown table": ("a,b,c\n1,2,3\n", 1, "columns", "no known format"),
    "unknown object": ('{"a": 1}\n', 1, "columns", "no known format"),
    "unknown column": (VIDUR.replace("\n", ",x\n", 1), 1, "x", "unknown column"),
    "unknown field": (MOONCAKE.replace("}\n", ', "x": 1}\n'), 1, "x", "not a field"),
    "short row": (AZURE + "2023-11-16 18:15:51,1\n", 4, "columns", "2 cells under 3"),
    "no object": (MOONCAKE + "[1]\n", 3, "line", "not a JSON object"),
    "NaN in a table": (VIDUR.replace("0.75", "nan"), 3, "arrived_at", "finite"),
    "no time": (AZURE.replace("2023-11-16 18:15:50", "yesterday"), 3, "TIMESTAMP", "not a time"),
    "unsorted": (VIDUR + "0.6,1,1\n", 4, "arrival", "--sort"),
    "no output": (BURSTGPT + "50,ChatGPT,3,0,3,API log\n", 4, "output", "--skip-empty"),
    "negative length": (VIDUR + "1,-4,3\n", 4, "num_prefill_tokens", "negative"),
    "a field short": (MOONCAKE + '{"timestamp": 9, "input_length": 1}', 3, "output_length", "miss"),
    "too few blocks": (MOONCAKE.replace("[0, 2, 3]", "[0]"), 2, "hash_ids", "names 1 blocks"),
    "a block without a number": (MOONCAKE.replace("[0, 1]", '["a", 1]'), 1, "hash_ids", "list"),
    "10**18 tokens": (MOONCAKE.replace("600", str(10**18)), 1, "input_length", "more than"),
    "10**400 tokens": (MOONCAKE.replace("600", str(10**400)), 1, "input_length", "not a number"),
    "brackets within brackets": (MOONCAKE.replace("600", "[" * 10**5), 1, "line", "is not JSON"),
    "a delay of no session": (AIPERF.replace('"session_id": "b", ', ""), 3, "session", "missing"),
    "a delay first": (AIPERF.replace('"timestamp": 1000', '"delay": 1'), 2, "timestamp", "missing"),
    "not UTF-8": (AZURE.encode() + b"\xff\n", 4, "line", "not UTF-8"),
    "truncated gzip": (
        gzip.compress((VIDUR + "2,1,1\n" * 9999).encode())[:-20],
        1,
        "gzip",
        "ends or breaks",
    ),
    "broken gzip": (b"\x1f\x8b" + b"x" * 50, 0, "gzip", "ends or breaks"),
    "another version": (LOG.replace('"version": 1', '"version": 2'), 1, "version", "unknown"),
    "think without session": (LOG.replace(', "session": "s"', ""), 3, "session", "missing"),
    "blocks without size": (LOG.replace('"hash_block_tokens": 16, ', ""), 2, "hash_block", "miss"),
    "bench without stamps": ('{"input_lens": [1], "output_lens": [1]}', 1, "start_t", "detailed"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_names_file_line_and_field(tmp_path: Path, name: str) -> None:
    text, line, field, words = BAD[name]
    path = tmp_path / "absent" if text is None else write(tmp_path, text)
    with pytest.raises(TraceError) as caught:
        list(Trace(path))
    error = caught.value
    if name == "truncated gzip":  # the decoder decides where it stops
        assert error.line is not None and 1 <= error.line <= 10_002
    else:
        assert error.line == line
    assert error.field.startswith(field) and words in str(error)
    assert str(path) in str(error)
    assert not error.line or f"line {error.line}" in str(error)


def test_a_line_without_an_end_takes_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sim.workload.traces.files.MAX_LINE_BYTES", 2**20)
    path = tmp_path / "zeros"
    with gzip.open(path, "wb", 1) as file:
        file.write(MOONCAKE.encode())
        for _ in range(64):
            file.write(bytes(2**20))
    tracemalloc.start()
    try:
        with pytest.raises(TraceError, match="line 3: line: has more than 1 MiB"):
            list(Trace(path))
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    finally:
        tracemalloc.stop()


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", Path("/dev/zero"), Path("/dev/full"), tmp_path):
        with pytest.raises(TraceError, match="not a regular file"):
            Trace(path)


@pytest.mark.parametrize(("size", "count"), [(16, 41), (256, 3), (300, 3), (655, 1), (700, 1)])
def test_blocks_of_another_size(tmp_path: Path, size: int, count: int) -> None:
    row = {"timestamp": 0, "input_length": 655, "output_length": 4, "hash_ids": list(range(count))}
    for more in ({}, {"chat_id": 1, "parent_chat_id": -1}):
        path = write(tmp_path, json.dumps(row | more))
        (first,) = Trace(path, block_tokens=size)
        assert first.hash_block_tokens == size and first.hash_ids == tuple(range(count))
        with pytest.raises(TraceError, match="line 1: hash_ids: names .* --block-tokens"):
            list(Trace(path, block_tokens=size * 4 if count > 1 else size // 4))


@pytest.mark.parametrize(("unit", "times"), [("s", 1000), ("ms", 1), ("us", 1e-3), ("ns", 1e-6)])
def test_stamps_of_another_unit(tmp_path: Path, unit: str, times: float) -> None:
    for text in (MOONCAKE, AIPERF):
        usual = list(Trace(write(tmp_path, text)))
        stamped = list(Trace(tmp_path / "trace", time_unit=unit))
        for request, other in zip(usual, stamped, strict=True):
            assert other.arrival_s == pytest.approx(request.arrival_s * times)
            assert other.think_s == (request.think_s and pytest.approx(request.think_s * times))
    stamped = list(Trace(write(tmp_path, VIDUR), time_unit=unit))
    assert stamped[1].arrival_s == pytest.approx(0.25 * times / 1000)


SECONDS = [{"timestamp": t, "input_length": 9, "output_length": 5} for t in (0.0, 60.0, 90.5)]
MILLIS = [{"timestamp": 1000 * t, "input_length": 9, "output_length": 5} for t in (0, 1, 1, 3)]


@pytest.mark.parametrize(
    ("text", "doubtful"),
    [
        ("\n".join(map(json.dumps, SECONDS)), True),
        ("\n".join(json.dumps(row | {"timestamp": i}) for i, row in enumerate(SECONDS)), True),
        ("\n".join(map(json.dumps, MILLIS)), False),
        ("\n".join(map(json.dumps, MILLIS[1:3])), False),
        (MOONCAKE, False),
        (VIDUR, False),
    ],
)
def test_stamps_that_look_like_seconds(tmp_path: Path, text: str, doubtful: bool) -> None:
    assert Trace(write(tmp_path, text)).has_stamps_like_seconds() is doubtful


def test_another_format_than_was_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path, VIDUR)
    assert Trace(path, format="vidur").format == "vidur"
    for wrong in ("azure", "mooncake", "cbatch-requests"):
        with pytest.raises(TraceError, match="vidur"):
            Trace(path, format=wrong)
    broken = write(tmp_path, VIDUR.replace("arrived_at", "arrived"), "broken")
    with pytest.raises(TraceError, match="arrived_at: is not a column"):
        list(Trace(broken, format="vidur"))


def test_failed_requests_are_left_out_and_counted(tmp_path: Path) -> None:
    trace = Trace(
        write(tmp_path, "Timestamp,Request tokens,Response tokens\n3,5,0\n4,6,2\n5,0,0\n9,1,1")
    )
    with pytest.raises(TraceError, match="line 2: output"):
        list(trace)
    trace = Trace(trace.path, skip_empty=True)
    assert [(r.arrival_s, r.prompt_tokens) for r in trace] == [(0, 6), (5, 1)]
    assert trace.skipped == 2


@pytest.mark.parametrize("name", ["log.jsonl", "log.jsonl.gz"])
def test_what_is_written_is_read_again(tmp_path: Path, name: str) -> None:
    requests = list(Trace(write(tmp_path, LOG)))
    for path in (tmp_path / name, tmp_path / f"again-{name}"):
        assert write_requests(path, requests) == 2
    assert list(Trace(tmp_path / name)) == requests
    assert (tmp_path / name).read_bytes() == (tmp_path / f"again-{name}").read_bytes()


def test_memory_does_not_grow_with_the_trace(tmp_path: Path) -> None:
    """8,000 requests are read within the memory of a few hundred."""
    rows = "".join(f"{i},{i % 900 + 1},{i % 90 + 1}\n" for i in range(8_000))
    path = write(tmp_path, "arrived_at,num_prefill_tokens,num_decode_tokens\n" + rows)
    tracemalloc.start()
    try:
        count = sum(1 for _ in Trace(path))
        peak_bytes = tracemalloc.get_traced_memory()[1]
        requests = list(Trace(path))
        held_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == len(requests) == 8_000
    assert peak_bytes < 1e5 < 5e5 < held_bytes


ROWS = [{"timestamp": 40 * i, "input_length": 1000, "output_length": 20 + i} for i in range(9)]
NINE_LINES = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
NINE_LINES += [f"2023-11-16 18:15:{10 + i}.5,{100 + i},{20 + i}" for i in range(9)]
TABLE = "\n".join(NINE_LINES).encode() + b"\n"
NINE = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
CUT = {
    "JSON": (NINE[:-30], 9),
    "JSON, at its last brace": (NINE[:-2], 9),
    "TABLE": (TABLE[:-15], 10),
    "gzip": (gzip.compress(NINE * 200)[:-40], None),
}


@pytest.mark.parametrize("name", CUT)
def test_what_is_whole_is_used(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, line = CUT[name]
    path = tmp_path / f"{name[:3]}.trace"
    path.write_bytes(content)
    with pytest.raises(TraceError):
        list(Trace(path, in_order=False))
    words: list[str] = []
    requests = list(Trace(path, in_order=False, on_cut=words.append))
    assert len(requests) == 8 if line else len(requests) > 100
    assert len(words) == 1 and f"{path} is cut short at line" in words[0]
    assert line is None or f"line {line};" in words[0]
    if line is not None:
        assert main(["trace", "show", str(path)]) == 0
        assert words[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    "content",
    [
        NINE.replace(b"1000", b"x", 1),  # a bad row that is not the last
        NINE[:-30] + b"\n",  # a bad row with a line end
        NINE[:30],  # no whole row
        b"",
    ],
)
def test_other_damage_is_an_error(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(TraceError):
        list(Trace(path, on_cut=lambda _: None))


def test_a_file_without_a_last_line_end_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(NINE[:-1])
    words: list[str] = []
    assert len(list(Trace(path, on_cut=words.append))) == 9 and words == []
