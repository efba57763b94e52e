"""One call as its client saw it, and the ways in which one can fail."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

# "chunks": the server sent no usage, and each chunk with output counts as a token.
TokenSource = Literal["per chunk usage", "usage", "chunks", "none"]


class Failure(StrEnum):
    CONNECT = "not connected"  # refused, unreachable, no such host, no TLS
    STATUS = "status"  # any but 200; counted by its number
    REPORTED = "error in stream"  # an error that the server told in a 200
    CUT = "cut"  # the connection ended before the answer did
    MALFORMED = "malformed"  # not HTTP, not server-sent events, not JSON of the API
    EMPTY = "empty"  # a 200 without a token
    TRUNCATED = "truncated"  # a 200 that ended without a finish reason and without [DONE]
    NO_USAGE = "no usage"  # an answer that is not streamed, and whose tokens are not counted
    TIMEOUT = "timeout"
    CLIENT = "client"  # no port, no file descriptor: this machine could not send it


class CallError(Exception):
    """`status` is the server's, where it is what failed."""

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
    """Times are in seconds on the clock of the run, 0 at its start; `scheduled_s` is when it should
    have been sent, and nothing that came later moves that.

    `chunk_s` and `chunk_tokens` are those reads of the answer that brought tokens (what came in one
    read came at once), and how many each brought; empty where the answer was not streamed.
    """

    index: int
    scheduled_s: float
    prompt_tokens: int  # as planned; as the server counted, once it has
    max_tokens: int
    output_tokens: int = 0
    wants_all: bool = False  # it was told to go on to `max_tokens`
    session: str | None = None
    slo_s: tuple[float | None, float | None, float | None] = (None, None, None)
    sent_s: float = field(init=False)
    end_s: float = field(init=False)  # of its last token, or when it failed
    chunk_s: array[float] = field(default_factory=lambda: array("d"))
    chunk_tokens: array[int] = field(default_factory=lambda: array("q"))
    chunks: int = 0  # events that brought tokens
    counted_by: TokenSource = "none"
    error: CallError | None = None

    def __post_init__(self) -> None:
        self.sent_s = self.end_s = self.scheduled_s

    @property
    def first_s(self) -> float:
        """Of its first token; what is not streamed comes with its last."""
        return self.chunk_s[0] if self.chunk_s else self.end_s

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.scheduled_s

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.scheduled_s

    @property
    def tpot_s(self) -> float | None:
        """(last token - first) / (tokens - 1); None with one token, or where nobody saw the
        first."""
        if self.output_tokens < 2 or not self.chunk_s:
            return None
        return (self.end_s - self.first_s) / (self.output_tokens - 1)

    def told_tokens(self) -> list[int]:
        """Tokens of each read. Where only the total is known it is spread as evenly as whole
        numbers can be."""
        if self.counted_by != "usage" or not self.chunk_s:
            return self.chunk_tokens.tolist()
        count, total = len(self.chunk_s), self.output_tokens
        return [(i + 1) * total // count - i * total // count for i in range(count)]


@dataclass(slots=True)
class LiveTally:
    """What somebody who watches a run is shown. `tokens` are those told while they come."""

    sent: int = 0
    done: int = 0
    failed: int = 0
    in_flight: int = 0
    chunks: int = 0
    tokens: int = 0
