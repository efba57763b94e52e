"""What a caller asks for: sampling parameters, requests, and how a request can end."""

from __future__ import annotations

import enum
import math

import msgspec
import numpy as np

from cbatch.core.errors import FieldError

MAX_SEED = 2**64 - 1


class FinishReason(enum.Enum):
    """How an accepted request ended. Every accepted request ends in exactly one of these."""

    STOP = "stop"  # EOS, a stop token id, or a stop string found by the text side
    LENGTH = "length"  # max_tokens, or the context is full
    CANCELLED = "cancelled"  # by the client
    ERROR = "error"  # the request itself failed (non-finite logits, a faulting executor)


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the tokens of one request are chosen.

    `temperature` 0 is greedy; ties go to the lowest token id. Filters apply in the order
    temperature, top_k, top_p, min_p, and ties at an edge go to the lowest id. `n` is expanded into
    requests with choice indices 0..n-1 and `stop` (strings) is matched on text, both above the
    core; everything
    else is in token ids. Raises `FieldError` naming the field.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    max_lookahead: int | None = None  # per-request cap on drafted tokens a step; 0 opts out

    def __post_init__(self) -> None:
        _require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "ask for at least 1")
        _require(
            0 <= self.min_tokens <= self.max_tokens,
            "min_tokens",
            self.min_tokens,
            "use 0 to max_tokens",
        )
        _require(
            math.isfinite(self.temperature) and self.temperature >= 0,
            "temperature",
            self.temperature,
            "use 0 (greedy) or a finite positive number",
        )
        _require(
            self.top_k is None or self.top_k >= 1,
            "top_k",
            self.top_k,
            "use at least 1, or leave it out to keep every token",
        )
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "use a number in (0, 1]")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "use a number in [0, 1]")
        _require(
            self.seed is None or 0 <= self.seed <= MAX_SEED,
            "seed",
            self.seed,
            "use 0 to 2**64 - 1, or leave it out",
        )
        _require(self.n >= 1, "n", self.n, "ask for at least 1 choice")
        _require(all(self.stop), "stop", list(self.stop), "an empty string would stop at once")
        _require(
            all(i >= 0 for i in self.stop_token_ids),
            "stop_token_ids",
            list(self.stop_token_ids),
            "use token ids of the vocabulary",
        )
        _require(
            self.max_lookahead is None or self.max_lookahead >= 0,
            "max_lookahead",
            self.max_lookahead,
            "use 0 (no speculation) or more",
        )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def _require(ok: bool, field: str, value: object, remedy: str) -> None:
    if not ok:
        raise FieldError(field, f"{value!r} is not allowed", remedy)


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to complete. `seed` is always set: the face that accepts a request draws one for
    a caller who gave none, and keeps it in the transcript, so that a token is a function of
    (seed, choice, position) alone."""

    request_id: str
    prompt: tuple[int, ...]  # token ids
    params: SamplingParams
    seed: int
    choice: int = 0  # index among the n choices of one call
    priority: int = 0  # smaller goes first, under the `priority` queue policy

    def prompt_array(self) -> np.ndarray:
        return np.asarray(self.prompt, dtype=np.int32)
