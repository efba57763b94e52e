"""What a caller gets back: text and tokens as they come, and the whole at the end."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from cbatch.core.request.logprobs import TokenLogprobs
from cbatch.core.request.request import FinishReason


class Speculation(msgspec.Struct):
    """How lookahead went, over steps that decoded. The step that ends a prompt is not counted."""

    steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    rejections: int = 0  # steps that refused a draft
    k_histogram: dict[int, int] = msgspec.field(default_factory=dict)  # drafted tokens: steps

    @property
    def mean_accepted_tokens(self) -> float | None:
        """Tokens a decoding step yields, its bonus token included: 1.0 without speculation."""
        return 1 + self.accepted_tokens / self.steps if self.steps else None

    @property
    def acceptance(self) -> float | None:
        """Share of judged drafts that were accepted. Drafts after a rejection are not judged."""
        judged = self.accepted_tokens + self.rejections
        return self.accepted_tokens / judged if judged else None

    @property
    def drafting_share(self) -> float:
        """Share of decoding steps that drafted anything."""
        return 1 - self.k_histogram.get(0, 0) / max(self.steps, 1)

    def observe(self, drafted: int, accepted: int) -> None:
        self.steps += 1
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
    """Natural logarithm of a token's probability, None where that is 0. `top` are (id, logprob) of
    the likeliest tokens in its place, the likeliest first, equal ones by id. `text` is what the
    token adds to the text: joined, those of all tokens are the text. It is empty for a token that
    is not shown, and for all but the last token of a character. None: there is no tokenizer."""

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float | None], ...] = ()
    text: str | None = None


def token_logprobs(
    token_ids: Sequence[int], entry: TokenLogprobs, texts: Sequence[str | None]
) -> list[TokenLogprob]:
    """Return the first `len(token_ids)` of an entry, which are about these tokens; `texts` has at
    least as many."""
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
    """What an accepted request runs with."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    seed: int
    num_choices: int


class Choice(msgspec.Struct, frozen=True):
    """One completed sequence. `text` is empty where the engine has no tokenizer; with a stop string
    it ends before it, and `token_ids` ends with the token that completed it. A server that streams
    one keeps none of its text, tokens and log probabilities for the end.

    `logprobs` has one for each of `token_ids`; `prompt_logprobs`, in the first choice alone, one
    for each token of the prompt, None for the first (nothing precedes it). None: not asked for."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    error: str | None
    speculation: Speculation
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None


class Output(msgspec.Struct, frozen=True):
    """What one step added to one choice. `finished` is set once, in its last output."""

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    num_drafted: int = 0
    num_accepted: int = 0
    finished: Choice | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None  # of `token_ids`; None: not asked for
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None  # with the first tokens
    pieces: tuple[str, ...] = ()  # what each token added to `text`, if asked for


class Completion(msgspec.Struct, frozen=True):
    """All choices of one prompt, in order. A refused request has `error` and no choices."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    # Given or drawn. A caller who gives it gets coupled verification unless asked otherwise, and
    # then the same choices whatever the engine does; a drawn one fixes the noise of a rejection.
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
        """Of all choices together."""
        total = Speculation()
        for choice in self.choices:
            total.merge(choice.speculation)
        return total
