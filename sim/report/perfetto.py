"""The steps of a replay in Chrome's trace event format, which Perfetto and chrome://tracing open.

One process has a thread for the steps and a thread per slot, with the requests that ran in the
slot, from admission to end. Counters show running and waiting requests and used blocks. Times are
microseconds of the virtual clock. (Trace Event Format, Duflot and Duca 2016: "X" is a complete
event, "C" a counter, "M" a name.)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sim.report.timeline import TimelineStep

_PROCESS = 1  # id of the only process
_STEPS = 1  # thread of the steps; slot s is thread s + 2


class PerfettoTrace:
    """An `Observer` that writes each step at once. It is a context manager."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")
        self._separator = "[\n"
        # By request id: slot, admission time in seconds, facts to show.
        self._inside: dict[str, tuple[int, float, dict[str, Any]]] = {}
        self._occupants: dict[int, str] = {}
        self._named: set[int] = set()
        self._now_s = 0.0

    def __enter__(self) -> PerfettoTrace:
        self._name(_STEPS, "steps")
        return self

    def __exit__(self, *error: object) -> None:
        for name in list(self._inside):
            self._leave(name, self._now_s, "unfinished")
        self._file.write("\n]\n")
        self._file.close()

    def step(self, step: TimelineStep) -> None:
        plan, result = step.plan, step.result
        self._now_s = step.ended_s
        for slot in plan.deltas.released.tolist():
            if slot in self._occupants:  # the request has not finished
                self._leave(self._occupants[slot], step.started_s, "preempted")
        for admission in plan.deltas.new_sequences:
            facts = {
                "tokens": len(admission.tokens),
                "prompt_tokens": admission.num_prompt_tokens,
                "cached_tokens": admission.kv_len_tokens,
            }
            self._inside[admission.request_id] = admission.slot, step.started_s, facts
            self._occupants[admission.slot] = admission.request_id
        drafted = int(result.num_drafted.sum())
        work: dict[str, Any] = {
            "rows": len(plan.slots),
            "prompt_tokens": step.chunk_tokens,
            "drafted": drafted,
            "accepted": int(result.num_accepted.sum()),
            "tokens": int(step.commit.counts.sum()),
            "draft_s": result.draft_s,
        }
        kind = "prefill and decode" if work["prompt_tokens"] else "decode"
        self._slice(_STEPS, "verify" if drafted else kind, step.started_s, step.ended_s, work)
        for counter, value in (
            ("running", step.scheduler.num_running),
            ("waiting", step.scheduler.num_waiting),
            ("blocks used", step.blocks_used),
        ):
            self._event("C", name=counter, ts=_us(step.ended_s), args={counter: value})
        for end in step.commit.finished:
            if end.request_id in self._inside:
                self._leave(end.request_id, step.ended_s, end.reason.name.lower())

    # -- inside

    def _leave(self, request_id: str, now_s: float, how: str) -> None:
        slot, since_s, facts = self._inside.pop(request_id)
        del self._occupants[slot]
        if slot not in self._named:
            self._named.add(slot)
            self._name(slot + 2, f"slot {slot}")
        self._slice(slot + 2, f"request {request_id}", since_s, now_s, facts | {"ended": how})

    def _slice(
        self, thread: int, name: str, since_s: float, now_s: float, facts: dict[str, Any]
    ) -> None:
        self._event(
            "X", tid=thread, name=name, ts=_us(since_s), dur=_us(now_s - since_s), args=facts
        )

    def _name(self, thread: int, name: str) -> None:
        self._event("M", tid=thread, name="thread_name", args={"name": name})

    def _event(self, phase: str, **fields: Any) -> None:
        event = {"ph": phase, "pid": _PROCESS} | fields
        self._file.write(self._separator + json.dumps(event))
        self._separator = ",\n"


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
