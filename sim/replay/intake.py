"""Adds a source's requests to schedulers: makes their prompt tokens, lists refused requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from cbatch.core.request.errors import RefusedError
from cbatch.core.request.request import Request, SamplingParams
from cbatch.core.scheduler.scheduler import Scheduler
from sim.replay.metrics import MetricsRecorder
from sim.report.report import Refused
from sim.workload.sources import Source
from sim.workload.tokens import TracePrompts, mix
from sim.workload.traces.request import TraceRequest


class ArrayPrompt(Sequence[int]):
    """A prompt as an int32 array, usable in place of a tuple of ints. Its thousands of Python
    integers are made only if a reader, such as a step log, needs them."""

    def __init__(self, tokens: np.ndarray) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, at: Any) -> Any:
        items = self._tokens[at].tolist()
        return tuple(items) if isinstance(at, slice) else items

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self._tokens, dtype)


class Arrival(NamedTuple):
    number: int  # in the trace, from 0
    traced: TraceRequest
    request: Request


# Makes a scheduler's request from a request of a trace and its number there, from 0.
MakeRequest = Callable[[int, TraceRequest], Request]


class Intake:
    def __init__(self, source: Source, seed: int, make_request: MakeRequest | None = None) -> None:
        self._source, self._seed = source, seed
        self._make_request = make_request or self._synthetic
        self._prompts = TracePrompts()
        self._params: dict[int, SamplingParams] = {}  # by number of output tokens
        self.refused: list[Refused] = []
        self.num_arrived = 0
        self.first_s: float | None = None

    def take(self) -> Arrival:
        """Return the source's next request, which is due now."""
        number, traced = self._source.take()
        self.num_arrived += 1
        if self.first_s is None:
            self.first_s = traced.arrival_s
        return Arrival(number, traced, self._make_request(number, traced))

    def _synthetic(self, number: int, traced: TraceRequest) -> Request:
        tokens = self._prompts.prompt(traced)
        count = traced.output_tokens
        params = self._params.get(count)
        if params is None:
            params = self._params[count] = SamplingParams(
                max_tokens=count, temperature=0.0, ignore_eos=True
            )
        return Request(
            request_id=str(number),
            prompt=cast("tuple[int, ...]", ArrayPrompt(tokens)),
            params=params,
            seed=mix(self._seed, number),
            priority=traced.priority or 0,
        )

    def deliver(
        self, arrival: Arrival, scheduler: Scheduler, recorder: MetricsRecorder, now_s: float
    ) -> bool:
        """Add the request to the scheduler; return False if it was refused. Its time in the queue
        counts from its arrival, not from `now_s`."""
        number, traced, request = arrival
        recorder.arrived(number, traced)
        try:
            scheduler.add(request, traced.arrival_s)
        except RefusedError as error:
            recorder.refused(request.request_id)
            self.refused.append(
                Refused(
                    index=number,
                    prompt_tokens=traced.prompt_tokens,
                    output_tokens=traced.output_tokens,
                    reason=str(error),
                )
            )
            self._source.ended(traced, now_s)
            return False
        return True
