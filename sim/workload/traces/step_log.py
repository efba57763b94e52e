"""Requests from a step log: the requests that an engine served, for replay."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

from msgspec.structs import replace

from cbatch.core.request.errors import FieldError
from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.steplog.recorded_run import RecordedRun, RecordedText, read_runs
from cbatch.steplog.step_log import StepLogError
from sim.workload.traces.reader import sort_requests
from sim.workload.traces.request import TraceRequest


def read_recording(path: Path) -> tuple[list[TraceRequest], SchedulerConfig, str | None]:
    """Return the recorded requests, each with its output length, the last engine's configuration,
    and a warning if the log is damaged. Requests that ended without a token are left out. Prompts
    with equal leading blocks have equal leading `hash_ids`. Reads the log whole."""
    try:
        runs, warning = read_runs(path)
    except StepLogError as error:
        raise FieldError("step log", str(error), "record it again") from error
    configs = [run.configured.config for run in runs]
    size = configs[0].block_size if configs else 1
    names = _BlockNames(size)
    requests = [
        TraceRequest(
            arrival_s=text.arrival_s,
            prompt_tokens=len(text.request.prompt),
            output_tokens=len(text.output),
            hash_ids=names.of(text.request.prompt, text.request.cache_salt),
            hash_block_tokens=size,
            priority=text.request.priority or None,
        )
        for text in joined(runs)
        if text.output
    ]
    if not requests:
        raise FieldError("step log", f"{path} has no request with output", "record it again")
    # A replay has no KV events.
    return sort_requests(requests), replace(configs[-1], kv_events=False), warning


def joined(runs: Iterable[RecordedRun]) -> list[RecordedText]:
    """Return the texts of all runs, without the ids of requests. A request that was open when its
    engine died continues under another id in the next engine's run, and counts once. If a clock
    restarts from 0 (a reboot), time continues from its last value."""
    texts: list[RecordedText] = []
    shift_s = last_s = 0.0
    for run in runs:
        if run.times_s is None:
            continue
        shift_s = max(shift_s, last_s - run.times_s[0])
        last_s = run.times_s[1] + shift_s
        orphans = [text for text in texts if not text.ended]
        for text in run.texts:
            text.request = replace(text.request, request_id="")
            earlier = next((each for each in orphans if each.request == text.request), None)
            if earlier is None:
                text.arrival_s += shift_s
                texts.append(text)
            else:
                orphans.remove(earlier)
                earlier.output, earlier.ended = text.output, text.ended
    return texts


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
