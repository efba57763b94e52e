"""Requests from a step log: the requests that an engine served, for replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

from msgspec.structs import replace

from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import Request
from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.scheduler.events import Added, Cancelled, Configured, Failed, TextFinished
from cbatch.core.scheduler.sequence import Commit
from cbatch.steplog.step_log import (
    AnyEvent,
    StepLogError,
    engines_of,
    read_step_log,
    replay,
)
from sim.workload.traces.reader import sort_requests
from sim.workload.traces.request import TraceRequest

STEP_LOG = "cbatch-step-log"


def is_step_log(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return STEP_LOG.encode() in file.readline(200)


def read_recording(path: Path) -> tuple[list[TraceRequest], SchedulerConfig, str | None]:
    """Return the recorded requests, each with its output length, the last engine's configuration,
    and a warning if the log is damaged. Requests that ended without a token are left out. Prompts
    with equal leading blocks have equal leading `hash_ids`. Reads the log whole."""
    try:
        log, damage = read_step_log(path), list[str]()
        recorded = recorded_requests(
            log.events, lambda begin, e: damage.append(f"line {log.lines[begin + e.event]}: {e}")
        )
    except StepLogError as error:
        raise FieldError("step log", str(error), "record it again") from error
    configs = [event.config for event in log.events if isinstance(event, Configured)]
    size = configs[0].block_size if configs else 1
    names = _BlockNames(size)
    requests = [
        TraceRequest(
            arrival_s=one.arrival_s,
            prompt_tokens=len(one.request.prompt),
            output_tokens=one.output_tokens,
            hash_ids=names.of(one.request.prompt, one.request.cache_salt),
            hash_block_tokens=size,
            priority=one.request.priority or None,
        )
        for one in recorded
        if one.output_tokens
    ]
    if not requests:
        raise FieldError("step log", f"{path} has no request with output", "record it again")
    warning = f"{path}, {damage[0]}; of its engine the rest is not used" if damage else log.warning
    # A replay has no KV events.
    return sort_requests(requests), replace(configs[-1], kv_events=False), warning


@dataclass
class Recorded:
    """A request in a step log, with the number of its output tokens at the end."""

    request: Request
    arrival_s: float
    output_tokens: int = 0
    ended: bool = False


def _refuse(begin: int, error: StepLogError) -> None:
    raise error


def recorded_requests(
    events: Sequence[AnyEvent], on_damage: Callable[[int, StepLogError], None] = _refuse
) -> list[Recorded]:
    """Return the requests in order of arrival. A request that was open when its engine died
    continues under another name in the next engine's log, and counts once. If a clock restarts from
    0 (a reboot), time continues from its last value. If an event does not follow from those before
    it, the rest of its engine is not used; `on_damage` gets the index of the engine's first event,
    and the error."""
    recorded: list[Recorded] = []
    shift_s = last_s = 0.0
    begin = 0
    for engine in engines_of(events):
        begin += len(engine)
        times_s = [event.now_s for event in engine if not isinstance(event, Configured)]
        if not times_s:
            continue
        shift_s = max(shift_s, last_s - times_s[0])
        last_s = times_s[-1] + shift_s
        orphans = [request for request in recorded if not request.ended]
        recorded += _recorded_by(engine, orphans, shift_s, partial(on_damage, begin - len(engine)))
    return recorded


def _recorded_by(
    engine: Sequence[AnyEvent],
    orphans: list[Recorded],
    shift_s: float,
    on_damage: Callable[[StepLogError], None],
) -> list[Recorded]:
    """Return the requests that this engine adds; update `orphans` that it continues, and remove
    them from the list."""
    running: dict[str, Recorded] = {}
    new: list[Recorded] = []
    for event in engine:
        if not isinstance(event, Added):
            continue
        name = event.request.request_id
        nameless = replace(event.request, request_id="")
        resumed = next((each for each in orphans if each.request == nameless), None)
        if resumed is None:
            resumed = Recorded(nameless, event.now_s + shift_s)
            new.append(resumed)
        else:
            orphans.remove(resumed)
        resumed.output_tokens = len(event.output)
        running[name] = resumed

    def count(commit: Commit) -> None:
        for row in commit.updates():
            running[row.request_id].output_tokens += len(row.tokens)
        for end in commit.finished:
            running[end.request_id].ended = True

    try:
        replay(engine, on_commit=count)
    except StepLogError as error:
        on_damage(error)
        engine = engine[: error.event]
    for event in engine:
        if isinstance(event, TextFinished | Cancelled | Failed) and event.request_id in running:
            ended = running[event.request_id]
            ended.ended = True
            if isinstance(event, TextFinished):
                ended.output_tokens = min(ended.output_tokens, max(event.keep_tokens, 0))
    return new


class _BlockNames:
    """A number for every distinct prefix of whole blocks, by cache salt."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._names: dict[tuple[int | str | None, tuple[int, ...]], int] = {}

    def of(self, prompt: tuple[int, ...], salt: str | None) -> tuple[int, ...]:
        names: list[int] = []
        cuts = range(0, len(prompt) + 1, self._block_tokens)
        for start, end in pairwise(cuts):
            key = (names[-1] if names else salt, prompt[start:end])
            names.append(self._names.setdefault(key, len(self._names)))
        return tuple(names)
