"""Counts of requests: totals for metrics, and a record of each request.

Counting is limited to a few additions, since it happens for every chunk of every stream.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from typing import Any

from cbatch.core.request.errors import FieldError
from cbatch.server.protocol.responses import CallMetrics, SpeculativeDecoding
from cbatch.server.serving.admission_queue import CallMemory
from cbatch.server.serving.open_request import OpenRequest
from cbatch.text.outputs import Output

# Upper bounds of the buckets of histograms.
TIME_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
TOKEN_BUCKETS = tuple(float(2**i) for i in range(18))
CHOICE_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
DRAFT_BUCKETS = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 12.0, 16.0, 32.0)
REASONS = ("stop", "length", "abort", "error")
_VLLM_REASONS = {"cancelled": "abort"}  # vLLM's names of finish reasons, where they differ

_logger = logging.getLogger("cbatch")
MAX_PATH_CHARS = 200  # of a path, or a field's name, in a log line
SHOWN_KEY_CHARS = 8  # of a key's id in log lines


class Histogram:
    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        return sum(self._counts)

    def buckets(self) -> list[tuple[str, float]]:
        """Return cumulative counts by upper bound, as Prometheus expects."""
        total, buckets = 0, []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else repr(float(bound)), float(total)))
        return buckets


class DraftingCounts:
    """Counts of drafted and accepted tokens, over steps with draft tokens."""

    def __init__(self) -> None:
        self.accepted: list[int] = [0]  # [j]: steps that accepted j draft tokens
        self.steps = self.drafted_tokens = self.accepted_tokens = self.longest_tokens = 0

    def observe(self, drafted: int, accepted: int) -> None:
        if not drafted:
            return
        self.steps += 1
        self.drafted_tokens += drafted
        self.accepted_tokens += accepted
        if drafted > self.longest_tokens:
            self.accepted += [0] * (drafted - self.longest_tokens)
            self.longest_tokens = drafted
        self.accepted[accepted] += 1

    @property
    def wasted_tokens(self) -> int:
        return self.drafted_tokens - self.accepted_tokens

    def accepted_at(self) -> list[int]:
        """Return, at index i, the number of steps that accepted draft token i."""
        return [sum(self.accepted[i + 1 :]) for i in range(self.longest_tokens)]

    def report(self) -> SpeculativeDecoding | None:
        if not self.steps:
            return None
        return SpeculativeDecoding(
            acceptance_histogram=list(self.accepted),
            num_spec_steps=self.steps,
            num_spec_tokens=self.longest_tokens,
            mean_acceptance_length=1 + self.accepted_tokens / self.steps,
            draft_acceptance_rate=self.accepted_tokens / self.drafted_tokens,
            num_accepted_draft_tokens=self.accepted_tokens,
            num_draft_tokens=self.drafted_tokens,
        )


class RequestTotals:
    """Totals of all requests since the server started."""

    def __init__(self) -> None:
        self.prompt_tokens = self.generation_tokens = 0
        self.endings = dict.fromkeys(REASONS, 0)
        self.rejections: dict[str, int] = {}  # by reason
        self.drafting = DraftingCounts()
        self.first_token_s, self.inter_token_s = Histogram(TIME_BUCKETS), Histogram(TIME_BUCKETS)
        self.per_token_s, self.e2e_s = Histogram(TIME_BUCKETS), Histogram(TIME_BUCKETS)
        self.decode_s, self.queue_s = Histogram(TIME_BUCKETS), Histogram(TIME_BUCKETS)
        self.prefill_s, self.inference_s = Histogram(TIME_BUCKETS), Histogram(TIME_BUCKETS)
        self.choices, self.max_tokens = Histogram(CHOICE_BUCKETS), Histogram(TOKEN_BUCKETS)
        self.prompt, self.generation = Histogram(TOKEN_BUCKETS), Histogram(TOKEN_BUCKETS)
        self.lookahead = Histogram(DRAFT_BUCKETS)

    def reject(self, reason: str) -> None:
        self.rejections[reason] = self.rejections.get(reason, 0) + 1


class SequenceTimes:
    """Times of one choice, in seconds of `time.monotonic`."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.first_s = self.last_s = 0.0
        self.admitted_s: float | None = None  # when its prompt got a slot


class RequestRecord:
    """Record of one HTTP request, for its log line, its metrics and the totals. `status` is None
    until a response begins; `generates` is true for routes that generate tokens. `memory` is what
    the call holds."""

    memory: CallMemory

    def __init__(self, totals: RequestTotals, method: str, path: str, request_id: str) -> None:
        self._totals, self.began_s = totals, time.monotonic()
        self._method, self.path, self.request_id = method, path[:MAX_PATH_CHARS], request_id
        self.status: int | None = None
        self.key: str | None = None  # id of the API key
        self.key_salt: str | None = None  # of the key, for the prefix cache
        self.id: str | None = None  # the response's id
        self.streamed: bool | None = None
        self.error: str | None = None
        self.generates = False
        self._sequences: list[SequenceTimes] = []  # choices that have tokens
        self._drafting = DraftingCounts()
        self._num_open = self._prompt_tokens = 0
        self._reasons: dict[str, None] = {}  # distinct reasons why its choices ended

    def fail(self, error: BaseException) -> None:
        """Record the error's type and field. The message may contain the client's data."""
        self.error = type(error).__name__
        if isinstance(error, FieldError):
            self.error += f" {error.field[:MAX_PATH_CHARS]}"

    def open(self, opened: OpenRequest) -> None:
        prompt_tokens, num_choices = len(opened.request.prompt), opened.num_choices
        self._totals.choices.observe(num_choices)
        self._totals.max_tokens.observe(opened.request.params.max_tokens)
        self._totals.prompt_tokens += prompt_tokens
        self._prompt_tokens += prompt_tokens
        self._num_open += num_choices
        for _ in range(num_choices):
            self._totals.prompt.observe(prompt_tokens)

    def observe(self, sequence: SequenceTimes, output: Output, admitted_s: float | None) -> None:
        """Count an output. `admitted_s` is when the first choice of its prompt got a slot."""
        totals, num_new = self._totals, len(output.token_ids)
        if num_new:
            now_s = time.monotonic()
            if sequence.num_tokens:
                totals.inter_token_s.observe(now_s - sequence.last_s)
                totals.lookahead.observe(output.num_drafted)
                totals.drafting.observe(output.num_drafted, output.num_accepted)
                self._drafting.observe(output.num_drafted, output.num_accepted)
            else:
                self._sequences.append(sequence)
                sequence.first_s = now_s
                totals.first_token_s.observe(now_s - self.began_s)
                if admitted_s is not None:
                    sequence.admitted_s = admitted_s
                    totals.queue_s.observe(admitted_s - self.began_s)
                    totals.prefill_s.observe(now_s - admitted_s)
            sequence.last_s = now_s
            sequence.num_tokens += num_new
            totals.generation_tokens += num_new
        if output.finished is not None:
            reason = output.finished.finish_reason.value
            self._end(sequence, _VLLM_REASONS.get(reason, reason))

    def close(self) -> None:
        """Count the choices that have not finished as aborted."""
        if self._num_open:
            self._reasons["abort"] = None
        self._totals.endings["abort"] += self._num_open
        self._num_open = 0

    def report(self) -> CallMetrics:
        if not self._sequences:
            return CallMetrics(None, None, None)
        first_s = min(times.first_s for times in self._sequences)
        last_s = max(times.last_s for times in self._sequences)
        return CallMetrics(
            (first_s - self.began_s) * 1e3, (last_s - first_s) * 1e3, self._drafting.report()
        )

    def write(self) -> None:
        """Write the log line of a POST request, or of any request that failed (status >= 400).
        `acceptance` is the accepted share of draft tokens."""
        status = self.status or 499  # the client left before a response began
        if self._method != "POST" and status < 400:
            return
        line: dict[str, Any] = {
            "request_id": self.request_id,
            "id": self.id,
            "path": self.path,
            "status": status,
            "key": self.key and self.key[:SHOWN_KEY_CHARS],
            "stream": self.streamed,
            "e2e_s": round(time.monotonic() - self.began_s, 4),
        }
        if self.generates:
            drafted = self._drafting.drafted_tokens
            first_s = min((times.first_s for times in self._sequences), default=None)
            accepted = self._drafting.accepted_tokens
            line |= {
                "prompt_tokens": self._prompt_tokens,
                "output_tokens": sum(times.num_tokens for times in self._sequences),
                "ttft_s": None if first_s is None else round(first_s - self.began_s, 4),
                "acceptance": round(accepted / drafted, 4) if drafted else None,
                "finish_reason": ",".join(self._reasons) or None,
            }
        line["error"] = self.error
        shown = {name: value for name, value in line.items() if value is not None}
        _logger.info("request", extra={"fields": shown})

    def _end(self, sequence: SequenceTimes, reason: str) -> None:
        totals, tokens = self._totals, sequence.num_tokens
        self._reasons[reason] = None
        self._num_open -= 1
        totals.endings[reason] = totals.endings.get(reason, 0) + 1
        totals.generation.observe(tokens)
        if tokens:
            totals.e2e_s.observe(sequence.last_s - self.began_s)
            totals.decode_s.observe(sequence.last_s - sequence.first_s)
            if sequence.admitted_s is not None:
                totals.inference_s.observe(sequence.last_s - sequence.admitted_s)
        if tokens > 1:
            totals.per_token_s.observe((sequence.last_s - sequence.first_s) / (tokens - 1))
