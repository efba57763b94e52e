"""One call as its client saw it, and the ways in which one can fail."""

from __future__ import annotations

from array import array
from enum import StrEnum


class Failure(StrEnum):
    CONNECT = "not connected"  # refused, unreachable, no such host, no TLS
    STATUS = "status"  # any but 200; counted by its number
    REPORTED = "error in stream"  # an error that the server told in a 200
    CUT = "cut"  # the connection ended before the answer did
    MALFORMED = "malformed"  # not HTTP, not server-sent events, not JSON of the API
    EMPTY = "empty"  # a 200 without a token
    TRUNCATED = "truncated"  # a 200 that ended in order, but without its finish reason or [DONE]
    NO_USAGE = "no usage"  # nobody can say how many tokens it had
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


class Call:
    """Times are in seconds on the clock of the run, 0 at its start; `scheduled_s` is when it should
    have been sent, and nothing that came later moves that.

    `chunk_s` and `chunk_tokens` are those reads of the answer that brought tokens (what came in one
    read came at once), and how many each brought; empty where the answer was not streamed.
    """

    __slots__ = (
        "chunk_s",
        "chunk_tokens",
        "chunks",
        "end_s",
        "error",
        "index",
        "max_tokens",
        "output_tokens",
        "per_chunk_usage",
        "prompt_tokens",
        "scheduled_s",
        "sent_s",
        "session",
        "slo_s",
        "wants_all",
    )

    def __init__(self, index: int, scheduled_s: float, prompt_tokens: int, max_tokens: int) -> None:
        self.index, self.scheduled_s = index, scheduled_s
        self.prompt_tokens = prompt_tokens  # as planned; as the server counted, once it has
        self.max_tokens = max_tokens
        self.output_tokens = 0
        self.wants_all = False  # it was told to go on to `max_tokens`
        self.session: str | None = None
        self.slo_s: tuple[float | None, float | None, float | None] = (None, None, None)
        self.sent_s = scheduled_s
        self.end_s = scheduled_s  # of its last token, or when it failed
        self.chunk_s, self.chunk_tokens = array("d"), array("q")
        self.chunks = 0  # events that brought tokens
        self.per_chunk_usage = False
        self.error: CallError | None = None

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
        if self.per_chunk_usage or not self.chunk_s:
            return self.chunk_tokens.tolist()
        count, total = len(self.chunk_s), self.output_tokens
        return [(i + 1) * total // count - i * total // count for i in range(count)]


class Tally:
    """What somebody who watches a run is shown. `tokens` are those told while they come."""

    __slots__ = ("chunks", "done", "failed", "in_flight", "sent", "tokens")

    def __init__(self) -> None:
        self.sent = self.done = self.failed = self.in_flight = self.chunks = self.tokens = 0
