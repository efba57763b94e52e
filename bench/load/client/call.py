"""Record of a single call as its client saw it, and the kinds of failure."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
# "chunks": the server sent no usage, and each chunk with output counts as a token.
TokenSource = Literal["per chunk usage", "usage", "chunks", "none"]


class Failure(StrEnum):
    """Kinds of failure; the values name them in reports."""

    CONNECT = "not connected"  # refused, unreachable, no such host, no TLS.
    STATUS = "status"  # a status other than 200; reports count each status separately.
    REPORTED = "error in stream"  # status 200 with an error in the body.
    CUT = "cut"  # the connection ended before the response.
    MALFORMED = "malformed"  # not HTTP, not server-sent events, not JSON of the API.
    EMPTY = "empty"  # status 200 without a token.
    TRUNCATED = "truncated"  # status 200 without a finish reason and without [DONE].
    NO_USAGE = "no usage"  # not streamed and without usage, so tokens cannot be counted.
    TIMEOUT = "timeout"
    CLIENT = "client"  # the client machine is out of ports or file descriptors


class CallError(Exception):
    """A failed call. `status` is the HTTP status if `failure` is `STATUS`."""

    def __init__(self, failure: Failure, detail: str, status: int | None = None) -> None:
        super().__init__(failure, detail, status)
        self.failure, self.detail, self.status = failure, detail, status

    def __str__(self) -> str:
        return f"{self.label}: {self.detail}"

    @property
    def label(self) -> str:
        return f"status {self.status}" if self.failure is Failure.STATUS else self.failure.value


@dataclass(slots=True, eq=False)
class TimedCall:
    """Times and token counts of a call. Times are in seconds since the start of the run.

    `scheduled_s` is the send time by the source's schedule, whatever the delay of the client.
    `chunk_s` are the times of the socket reads that contained output tokens, `chunk_tokens` their
    token counts. Both are empty if the response was not streamed.
    """

    index: int
    scheduled_s: float
    prompt_tokens: int  # as planned, then as in the server's usage
    max_tokens: int
    cached_tokens: int = 0  # part of the prompt from the server's prefix cache, by its usage
    output_tokens: int = 0
    ignore_eos: bool = False  # the output should have exactly `max_tokens`
    session: str | None = None
    slo_s: tuple[float | None, float | None, float | None] = (None, None, None)
    sent_s: float = field(init=False)
    end_s: float = field(init=False)  # time of the last token, or of the failure
    chunk_s: array[float] = field(default_factory=lambda: array("d"))
    chunk_tokens: array[int] = field(default_factory=lambda: array("q"))
    chunks: int = 0  # events with output tokens
    counted_by: TokenSource = "none"
    error: CallError | None = None

    def __post_init__(self) -> None:
        self.sent_s = self.end_s = self.scheduled_s

    @property
    def first_s(self) -> float:
        """Time of the first token; without streaming, that of the last."""
        return self.chunk_s[0] if self.chunk_s else self.end_s

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.scheduled_s

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.scheduled_s

    @property
    def tpot_s(self) -> float | None:
        """Time from first to last token, per token after the first. None for a single token, or if
        the response was not streamed."""
        if self.output_tokens < 2 or not self.chunk_s:
            return None
        return (self.end_s - self.first_s) / (self.output_tokens - 1)

    def tokens_by_read(self) -> list[int]:
        """Return the number of tokens of each read in `chunk_s`. If only their sum is known, it is
        spread evenly over the reads."""
        if self.counted_by != "usage" or not self.chunk_s:
            return self.chunk_tokens.tolist()
        count, total = len(self.chunk_s), self.output_tokens
        return [(i + 1) * total // count - i * total // count for i in range(count)]


@dataclass(slots=True)
class LiveTally:
    """Counts for the progress display. `tokens` counts only chunks with usage."""

    sent: int = 0
    done: int = 0
    failed: int = 0
    in_flight: int = 0
    chunks: int = 0
    tokens: int = 0
