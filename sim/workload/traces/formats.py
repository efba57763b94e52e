"""The trace formats: their columns, and the parser of their rows.

Every parser yields `Raw` rows in file order; `reader.py` checks and completes them.
Sources: Azure LLM inference traces 2023 and 2024 (Patel et al. 2024; Stojkovic et al. 2025),
Mooncake (Qin et al. 2025), BurstGPT (Wang et al. 2025), Qwen-Bailian usage traces (Wang et al.
2025), Vidur (Agrawal et al. 2024), requests sampled from ServeGen (Xiang et al. 2026), vLLM's
`bench serve`, and the measured vLLM runs of LLMServingSim (Cho et al. 2025).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from sim.workload.traces.files import Lines, TraceRow, csv_rows, json_object, json_rows
from sim.workload.traces.request import TraceError, TraceRequest

BLOCK_TOKENS = {"mooncake": 512, "bailian": 16}  # tokens per block named in `hash_ids`
UNITS_S = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}  # seconds per unit
STAMP_UNITS = {"mooncake": "ms"}  # unit of timestamps, in formats where they are plain numbers
STAMP_UNITS |= dict.fromkeys(("bailian", "burstgpt", "servegen-requests", "vidur", "vllm-run"), "s")
LOG_FORMAT, LOG_VERSION = "cbatch-requests", 1


class Raw(NamedTuple):
    """A row as in its file. `stamp` has any origin. `stamp`, and `think_s` in `other_fields`, are
    in the format's unit. Lengths are 0 or more."""

    line: int
    stamp: float
    prompt_tokens: int
    output_tokens: int
    other_fields: dict[str, Any]  # of `TraceRequest`


Parse = Callable[[Iterator[TraceRow]], Iterator[Raw]]


class Format(NamedTuple):
    name: str
    required: frozenset[str]  # columns, or fields of a JSON line
    optional: frozenset[str]
    is_json: bool
    parse: Parse


def _azure(rows: Iterator[TraceRow]) -> Iterator[Raw]:
    first: datetime | None = None
    for row in rows:
        text = row.text("TIMESTAMP")
        try:
            stamp = datetime.fromisoformat(text)
        except ValueError as error:
            raise row.fail(
                "TIMESTAMP", f"{text!r} is not a time", "write 2023-11-16 18:15:46"
            ) from (error)
        stamp = stamp if stamp.tzinfo else stamp.replace(tzinfo=UTC)
        first = first or stamp
        stamp_s = (stamp - first).total_seconds()
        yield Raw(row.line, stamp_s, row.count("ContextTokens"), row.count("GeneratedTokens"), {})


def _mooncake(rows: Iterator[TraceRow]) -> Iterator[Raw]:
    """Parse the fields of Mooncake, AIPerf and Dynamo: a turn with a `delay` follows the end of the
    session's last turn, and needs no timestamp."""
    started: dict[Any, float] = {}  # by session: its last stamp
    for row in rows:
        prompt_tokens, output_tokens, other_fields = _lengths(row)
        session = row.values.get("session_id")
        other_fields["session"] = None if session is None else str(session)
        if row.values.get("delay") is not None:
            other_fields["think_s"] = row.stamp("delay")
        is_turn = "think_s" in other_fields and row.values.get("timestamp") is None
        follows = is_turn and session in started
        started[session] = started[session] if follows else row.stamp("timestamp")
        yield Raw(row.line, started[session], prompt_tokens, output_tokens, other_fields)


def _bailian(rows: Iterator[TraceRow]) -> Iterator[Raw]:
    roots: dict[int, int] = {}  # by chat: the first chat of its conversation
    for row in rows:
        chat, parent = int(row.number("chat_id")), int(row.number("parent_chat_id"))
        root = roots[chat] = roots.get(parent, chat)
        prompt_tokens, output_tokens, other_fields = _lengths(row)
        other_fields["session"] = str(root)
        yield Raw(row.line, row.stamp("timestamp"), prompt_tokens, output_tokens, other_fields)


def _lengths(row: TraceRow) -> tuple[int, int, dict[str, Any]]:
    has_names = row.values.get("hash_ids") is not None
    other_fields = {"hash_ids": row.hash_ids("hash_ids")} if has_names else {}
    return row.count("input_length"), row.count("output_length"), other_fields


def _plain(stamp: str, prompt: str, output: str, session: str | None = None) -> Parse:
    """Return the parser of a format with one column each for stamp, lengths and session."""

    def parse(rows: Iterator[TraceRow]) -> Iterator[Raw]:
        for row in rows:
            lengths = row.count(prompt), row.count(output)
            other_fields = {} if session is None else {"session": row.values.get(session) or None}
            yield Raw(row.line, row.stamp(stamp), *lengths, other_fields)

    return parse


def _log(rows: Iterator[TraceRow]) -> Iterator[Raw]:
    for row in rows:
        prompt_tokens = row.count("prompt_tokens")
        other_fields: dict[str, Any] = {}
        for name in ("think_s", "ttft_slo_s", "tpot_slo_s", "e2e_slo_s"):
            if name in row.values:
                other_fields[name] = row.stamp(name)
        if "session" in row.values:
            other_fields["session"] = row.text("session")
        if "priority" in row.values:
            priority = row.number("priority")
            if priority != int(priority):
                raise row.fail(
                    "priority", f"{priority} is not a whole number", "give a whole number"
                )
            other_fields["priority"] = int(priority)
        if "hash_ids" in row.values:
            size = other_fields["hash_block_tokens"] = row.count("hash_block_tokens")
            if not size:
                raise row.fail("hash_block_tokens", "is 0", "give the tokens of a block")
            other_fields["hash_ids"] = row.hash_ids("hash_ids")
        elif "hash_block_tokens" in row.values:
            raise row.fail("hash_block_tokens", "has no hash_ids", "give both or neither")
        stamp_s, output_tokens = row.stamp("arrival_s"), row.count("output_tokens")
        yield Raw(row.line, stamp_s, prompt_tokens, output_tokens, other_fields)


def _format(name: str, required: str, optional: str, parse: Parse) -> Format:
    """Make a format. Columns are separated by commas; a trailing brace in `name` marks JSON."""
    columns = frozenset(required.split(",")), frozenset(filter(None, optional.split(",")))
    return Format(name.rstrip("}"), *columns, name.endswith("}"), parse)


_REQUEST_FIELDS = frozenset(TraceRequest.__struct_fields__)
_LOG_FIELDS = frozenset(("arrival_s", "prompt_tokens", "output_tokens"))
LOG = Format(LOG_FORMAT, _LOG_FIELDS, _REQUEST_FIELDS - _LOG_FIELDS, True, _log)

# In order of trial: the first format whose required fields are all present is chosen.
FORMATS = (
    _format("azure", "TIMESTAMP,ContextTokens,GeneratedTokens", "", _azure),
    _format(
        "burstgpt",
        "Timestamp,Request tokens,Response tokens",
        "Model,Total tokens,Log Type,Session ID,Elapsed time",
        _plain("Timestamp", "Request tokens", "Response tokens", "Session ID"),
    ),
    _format(
        "vidur",
        "arrived_at,num_prefill_tokens,num_decode_tokens",
        "num_total_tokens,pd_ratio",
        _plain("arrived_at", "num_prefill_tokens", "num_decode_tokens"),
    ),
    _format(
        "servegen-requests",
        "arrival_s,client,input,output",
        "reason_ratio",
        _plain("arrival_s", "input", "output"),
    ),
    _format(
        "bailian}",
        "chat_id,parent_chat_id,timestamp,input_length,output_length",
        "type,turn,hash_ids",
        _bailian,
    ),
    _format(
        "mooncake}",
        "timestamp,input_length,output_length",
        "hash_ids,session_id,delay",
        _mooncake,
    ),
    _format(
        "vllm-run}",
        "input_toks,output_toks,arrival_time",
        "request_id,queued_ts,scheduled_ts,first_token_ts,last_token_ts",
        _plain("arrival_time", "input_toks", "output_toks"),
    ),
)
BENCH = "vllm-bench"
FORMAT_NAMES = (*(f.name for f in FORMATS), LOG_FORMAT, BENCH)


def parse_lines(path: Path, lines: Lines, format_name: str | None) -> tuple[str, Iterator[Raw]]:
    """Return the format's name and its rows. The format is `format_name`, or recognised from the
    first line. Raises `TraceError` if the two disagree."""
    first = next(lines, None)
    if first is None:
        raise TraceError(path, None, "file", "is empty", "give a trace with requests in it")
    number, text = first
    whole, is_json = chain([first], lines), text.lstrip()[:1] in ("{", "[")
    if is_json and (text.strip() == "{" or format_name == BENCH):
        return _bench(path, whole, format_name)
    record = json_object(path, number, text) if is_json else {}
    if record.get("format") == LOG_FORMAT:
        _require(path, format_name, LOG_FORMAT)
        version = record.get("version")
        if version != LOG_VERSION:
            problem = f"{version!r} is unknown"
            raise TraceError(path, number, "version", problem, f"this reads {LOG_VERSION}")
        return LOG_FORMAT, _log(json_rows(path, lines, LOG.required, LOG.optional))
    if "input_lens" in record:
        return _bench(path, whole, format_name)
    names = [*record] if is_json else [name.strip().strip('"') for name in text.split(",")]
    known = _find(path, number, names, format_name, is_json=is_json)
    rows = json_rows if is_json else csv_rows
    return known.name, known.parse(rows(path, whole, known.required, known.optional))


def _find(path: Path, line: int, fields: Any, format_name: str | None, *, is_json: bool) -> Format:
    for known in FORMATS:
        if known.is_json is is_json and known.required <= set(fields):
            _require(path, format_name, known.name)
            return known
    if format_name is not None:
        for known in FORMATS:
            if known.name == format_name and known.is_json is is_json:
                return known  # its parser reports the missing column
    names = ", ".join(fields)
    raise TraceError(
        path,
        line,
        "columns",
        f"{names[:200]!r} match no known format",
        f"known are {', '.join(FORMAT_NAMES)}",
    )


def _require(path: Path, format_name: str | None, actual: str) -> None:
    if format_name not in (None, actual):
        raise TraceError(path, None, "--format", f"the file is {actual}", f"not {format_name}")


def _bench(path: Path, lines: Lines, format_name: str | None) -> tuple[str, Iterator[Raw]]:
    """Read the result of `vllm bench serve --save-detailed`: one JSON object, read whole."""
    _require(path, format_name, BENCH)
    record = json_object(path, 1, "\n".join(text for _, text in lines))
    columns = {name: record.get(name) for name in ("start_times", "input_lens", "output_lens")}
    for name, column in columns.items():
        if not isinstance(column, list):
            raise TraceError(path, 1, name, "is missing", "save the run with --save-detailed")
    if len({len(column) for column in columns.values()}) != 1:
        raise TraceError(path, 1, "input_lens", "is longer or shorter than others", "save it again")
    values = zip(*columns.values(), strict=True)
    rows = (TraceRow(path, 1, dict(zip(columns, row, strict=True))) for row in values)
    return BENCH, iter(sorted(_plain(*columns)(rows), key=lambda raw: raw.stamp))
