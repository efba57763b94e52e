"""Results for callers: the text and tokens of each step, and complete choices at the end."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from cbatch.core.request.logprobs import TokenLogprobs
from cbatch.core.request.request import FinishReason


class Speculation(msgspec.Struct):
    """Statistics of speculative decoding. The step that yields the first token is not counted."""

    steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    rejections: int = 0  # steps that rejected a draft token
    k_histogram: dict[int, int] = msgspec.field(default_factory=dict)  # steps by drafted tokens

    @property
    def mean_accepted_tokens(self) -> float | None:
        """Mean tokens that a decoding step yields, bonus token included: 1.0 without drafts."""
        return 1 + self.accepted_tokens / self.steps if self.steps else None

    @property
    def acceptance(self) -> float | None:
        """Share of verified draft tokens that were accepted, up to the first rejection."""
        verified = self.accepted_tokens + self.rejections
        return self.accepted_tokens / verified if verified else None

    @property
    def drafting_share(self) -> float:
        """Share of decoding steps that had draft tokens."""
        return 1 - self.k_histogram.get(0, 0) / max(self.steps, 1)

    def observe(self, drafted: int, accepted: int) -> None:
        self.steps += 1
        if drafted:
            self.drafted_tokens += drafted
            self.accepted_tokens += accepted
            self.rejections += accepted < drafted
        self.k_histogram[drafted] = self.k_histogram.get(drafted, 0) + 1

    def merge(self, other: Speculation) -> None:
        self.steps += other.steps
        self.drafted_tokens += other.drafted_tokens
        self.accepted_tokens += other.accepted_tokens
        self.rejections += other.rejections
        for k, steps in other.k_histogram.items():
            self.k_histogram[k] = self.k_histogram.get(k, 0) + steps


class TokenLogprob(msgspec.Struct, frozen=True):
    """Natural logarithm of a token's probability, None for probability 0. `top` holds (id, logprob)
    of the likeliest tokens at its position, the likeliest first, then by id. `text` is the part of
    the decoded text that the token adds. `text` is empty for a hidden token and for all but the
    last token of a character; None without a tokenizer."""

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float | None], ...] = ()
    text: str | None = None


def token_logprobs(
    token_ids: Sequence[int], entry: TokenLogprobs, texts: Sequence[str | None]
) -> list[TokenLogprob]:
    """Return log probabilities of `token_ids`, which are the first tokens of `entry`. `texts` has
    an element for each token; further elements are ignored."""
    rows = zip(entry.chosen.tolist(), entry.top_ids.tolist(), entry.top.tolist(), strict=True)
    return [
        TokenLogprob(
            token_id,
            _or_none(chosen),
            tuple((i, _or_none(value)) for i, value in zip(ids, values, strict=True)),
            text,
        )
        for token_id, (chosen, ids, values), text in zip(token_ids, rows, texts, strict=False)
    ]


def _or_none(logprob: float) -> float | None:
    return None if logprob == -math.inf else logprob


class Accepted(msgspec.Struct, frozen=True):
    """The settings with which an accepted request runs."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    seed: int
    num_choices: int


class Choice(msgspec.Struct, frozen=True):
    """One completed sequence. `text` is empty if the engine has no tokenizer. A stop string is cut
    from `text`, but `token_ids` includes the token that completed it. For a streamed response,
    `text` and `token_ids` are empty and `logprobs` is None.

    `logprobs` has an element per token of `token_ids`. `prompt_logprobs`, in the first choice only,
    has an element per prompt token, None for the first. Both are None if not requested.
    `stop_string` is the stop string that ended the text, if one did. `is_refused`: the `error` is
    about a field of the request.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    error: str | None
    speculation: Speculation
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    stop_string: str | None = None
    is_refused: bool = False


class Output(msgspec.Struct, frozen=True):
    """The part of a choice that one step added. `finished` is set in the last output only."""

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    num_drafted: int = 0
    num_accepted: int = 0
    finished: Choice | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None  # of `token_ids`; None: not requested
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None  # in the first output
    pieces: tuple[str, ...] = ()  # what each token added to `text`, if requested


class Completion(msgspec.Struct, frozen=True):
    """All choices of one prompt, in order. A rejected request has `error` and no choices."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    # The request's seed, or a drawn seed. A request with a seed uses coupled verification by
    # default, and its choices are reproducible. A request without a seed uses rejection sampling by
    # default; the drawn seed then fixes only the random numbers.
    seed: int | None
    choices: tuple[Choice, ...] = ()
    error: str | None = None

    @property
    def text(self) -> str:
        return self.choices[0].text if self.choices else ""

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids if self.choices else ()

    @property
    def finish_reason(self) -> FinishReason:
        return self.choices[0].finish_reason if self.choices else FinishReason.ERROR

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        return self.choices[0].logprobs if self.choices else None

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprob | None, ...] | None:
        return self.choices[0].prompt_logprobs if self.choices else None

    @property
    def speculation(self) -> Speculation:
        total = Speculation()
        for choice in self.choices:
            total.merge(choice.speculation)
        return total
