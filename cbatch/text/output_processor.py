"""Validation and seeds of requests, and the text of each choice as its tokens arrive.

`Engine` runs this in the scheduler's process, a server in the server's process.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence

from msgspec.structs import replace

from cbatch.core.request.errors import FieldError, too_long
from cbatch.core.request.logprobs import TokenLogprobs
from cbatch.core.request.output import OutputRow
from cbatch.core.request.request import FinishReason, Request, SamplingParams
from cbatch.core.request.typed import require_text
from cbatch.text import TextStream, TextTokenizer
from cbatch.text.outputs import Choice, Output, Speculation, TokenLogprob, token_logprobs

Prompt = str | Sequence[int]
_MAX_SKIPPED_CHARS = 32  # of a text, to find the next token's text
_SEED_BITS = 53  # drawn seeds are exact in JSON readers that parse numbers as doubles


class Seeds:
    """Seeds for requests without their own. A `seed` makes the sequence of seeds reproducible."""

    def __init__(self, seed: int | None) -> None:
        self._seed, self._num_drawn = seed, 0

    def seeded(self, params: SamplingParams) -> tuple[SamplingParams, int]:
        """Return the parameters of a request and its seed. A seed from `seed` is the request's own,
        so that its text does not depend on drafts, unless it asks for `rejection`. The next request
        gets the same seed until `count` is called."""
        if params.seed is not None:
            return params, params.seed
        if self._seed is None:
            return params, secrets.randbits(_SEED_BITS)
        seed = seed_at(self._seed, self._num_drawn)
        return replace(params, seed=seed), seed

    def count(self, params: SamplingParams) -> None:
        """Note that a request with these parameters, given before `seeded`, is accepted."""
        self._num_drawn += params.seed is None


def seed_at(seed: int, index: int) -> int:
    digest = hashlib.sha256(f"{seed} {index}".encode()).digest()
    return int.from_bytes(digest) >> 8 * len(digest) - _SEED_BITS


def token_ids(
    prompt: Prompt, tokenizer: TextTokenizer | None, max_tokens: int | None = None
) -> tuple[int, ...]:
    """Return the token ids of a prompt. Raises `FieldError` for an invalid prompt. A text that
    cannot fit in `max_tokens` is rejected before it is encoded."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise FieldError("prompt", "is text, but there is no tokenizer", "give token ids")
        require_text("prompt", prompt)
        if max_tokens is not None:
            require_length("prompt", prompt, tokenizer, max_tokens)
        return tuple(tokenizer.encode(prompt))
    if not isinstance(prompt, list | tuple):
        kind = type(prompt).__name__
        raise FieldError("prompt", f"is of type {kind}", "give a text or a list of token ids")
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in prompt):
        raise FieldError("prompt", "contains a value that is not a token id", "give integers")
    return tuple(prompt)


def require_length(field: str, text: str, tokenizer: TextTokenizer, max_tokens: int) -> None:
    """Raise `RefusedError` if a text cannot fit in `max_tokens` tokens. The check uses only the
    length of the text."""
    min_tokens = -(-len(text) // tokenizer.longest_token_chars)
    if min_tokens > max_tokens:
        raise too_long(field, f"at least {min_tokens}", max_tokens)


def token_texts(
    ids: Sequence[int],
    params: SamplingParams,
    tokenizer: TextTokenizer | None,
    text: str | None = None,
) -> list[str | None]:
    """Return the text that each token of a prompt adds, as in `TokenLogprob.text`. If `text`, the
    prompt's text, is given, the returned texts join to it."""
    if tokenizer is None:
        return [None] * len(ids)
    stream = TextStream(tokenizer, params)
    stream.push(ids)
    return [*stream.texts] if text is None else _split_by_token(text, ids, stream.texts, tokenizer)


def _split_by_token(
    text: str, ids: Sequence[int], decoded: Sequence[str], tokenizer: TextTokenizer
) -> list[str | None]:
    """Return the part of `text` that belongs to each token, by searching for its decoded text. A
    token that is not found gets the text up to the next token that is found."""
    starts, at = [], 0
    for token_id, token_text in zip(ids, decoded, strict=True):
        special = token_id in tokenizer.special_ids
        forms = (tokenizer.added[token_id],) if special else (token_text, token_text.strip(" "))
        skipped = 0 if special else _MAX_SKIPPED_CHARS
        matches = ((text.find(form, at, at + len(form) + skipped), form) for form in forms)
        start, form = next((match for match in matches if match[0] >= 0), (at, ""))
        starts.append(start)
        at = start + len(form)
    cuts = [0, *starts[1:], len(text)]
    return [text[cuts[i] : cuts[i + 1]] for i in range(len(starts))]


def require_supported(request: Request, *, drafters: Sequence[str], has_text: bool) -> None:
    """Raise `FieldError` for an invalid `cache_salt`, a stop string without a tokenizer, or a
    drafter that is not in `drafters`."""
    require_text("cache_salt", request.cache_salt)
    if request.params.stop and not has_text:
        raise FieldError("stop", "needs a tokenizer", "use stop_token_ids")
    for name in request.params.drafter or ():
        if name not in drafters:
            choices = f"use one of: {', '.join(drafters)}"
            remedy = choices if drafters else "leave it out, or start the engine with one"
            raise FieldError("drafter", f"{name!r} is not loaded", remedy)


class LiveChoice:
    """One choice of a running request: turns the engine's tokens into outputs with text. `request`
    is the scheduler's request, `group_id` the caller's id. With `accumulate=False` text, tokens and
    log probabilities are dropped after each output, and the final `Choice` lacks them. The special
    tokens `mark_ids` are decoded as text; if they are given, outputs have `pieces`."""

    def __init__(
        self,
        request: Request,
        group_id: str,
        tokenizer: TextTokenizer | None,
        *,
        mark_ids: frozenset[int] | None = None,
        accumulate: bool = True,
    ) -> None:
        params = request.params
        self.request, self.group_id = request, group_id
        self.num_tokens = 0
        self._accumulate = accumulate
        self._tokens: list[int] = []
        self._stream: TextStream | None = None
        if tokenizer is not None:
            self._stream = TextStream(tokenizer, params, request.prompt, mark_ids=mark_ids)
        self._text: list[str] = []
        self.speculation = Speculation()
        self._wants_logprobs = params.logprobs is not None
        self._logprobs: list[TokenLogprob] = []
        self._entry: TokenLogprobs | None = None  # for the tokens of the next `extend`
        self._prompt_logprobs: list[TokenLogprob | None] | None = None
        self._prompt_texts: list[str | None] = []
        if params.wants_prompt(request.choice):
            self._prompt_logprobs = [None] * len(request.prompt)
            self._prompt_texts = token_texts(request.prompt, params, tokenizer)

    def on_logprobs(self, entry: TokenLogprobs) -> None:
        """Store log probabilities of the prompt, or of the tokens of the next `extend`. After a
        preemption or a restart the prompt's values arrive again, unchanged."""
        first, prompt = entry.first_position, self.request.prompt
        if first >= len(prompt):
            self._entry = entry
        elif self._prompt_logprobs is not None:
            tokens = prompt[first : first + len(entry.chosen)]
            logprobs = token_logprobs(tokens, entry, self._prompt_texts[first:])
            self._prompt_logprobs[first : first + len(tokens)] = logprobs

    def extend(self, row: OutputRow) -> Output:
        """Return the output of a step, with the final choice if the sequence ended. If it ended
        without a `finish_reason` in the row, a stop string was completed: the scheduler must keep
        only `num_tokens` tokens."""
        if not row.tokens and row.finish_reason is not None:
            rest = self._rest()
            choice = self._choice(rest, row.finish_reason, row.message, row.is_refused)
            return Output(self.group_id, self.request.choice, rest, (), finished=choice)
        entry, self._entry, tokens = self._entry, None, row.tokens
        if self.num_tokens:
            self.speculation.observe(row.num_drafted, row.num_accepted)
        text, keep_tokens, rest = "", None, ""
        if self._stream:
            text, keep_tokens = self._stream.push(self._without_stop(row))
        if keep_tokens is not None:
            tokens = tokens[: keep_tokens - self.num_tokens]
        elif row.finish_reason is not None:
            rest = self._rest()
        logprobs = prompt_logprobs = None
        if self._wants_logprobs and entry is not None:
            logprobs = tuple(token_logprobs(tokens, entry, self._texts(len(tokens))))
        if self._prompt_logprobs is not None and not self.num_tokens:
            prompt_logprobs = tuple(self._prompt_logprobs)
        self.num_tokens += len(tokens)
        if self._accumulate:
            self._tokens += tokens
            self._text.append(text)
            self._logprobs += logprobs or ()
        else:
            self._prompt_logprobs = None
        finished = None
        if keep_tokens is not None:
            finished = self._choice("", FinishReason.STOP)
        elif row.finish_reason is not None:
            text += rest
            finished = self._choice(rest, row.finish_reason, row.message)
        return Output(
            request_id=self.group_id,
            index=self.request.choice,
            text=text,
            token_ids=tuple(tokens),
            num_drafted=row.num_drafted,
            num_accepted=row.num_accepted,
            finished=finished,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            pieces=tuple(self._stream.pieces) if self._stream else (),
        )

    def _without_stop(self, row: OutputRow) -> list[int]:
        includes = self.request.params.include_stop_str_in_output
        stopped = row.finish_reason is FinishReason.STOP
        return row.tokens[:-1] if stopped and not includes else row.tokens

    def _texts(self, count: int) -> list[str | None]:
        if self._stream is None:
            return [None] * count
        texts = [*self._stream.texts, ""][:count]  # a stop token is not always decoded
        return [*texts[:-1], *(text + self._stream.tail for text in texts[-1:])]

    def _rest(self) -> str:
        return self._stream.finish() if self._stream else ""

    def _choice(
        self, rest: str, reason: FinishReason, error: str | None = None, is_refused: bool = False
    ) -> Choice:
        has_logprobs = self._accumulate and self._wants_logprobs
        prompt_logprobs = self._prompt_logprobs
        return Choice(
            index=self.request.choice,
            text="".join([*self._text, rest]) if self._accumulate else "",
            token_ids=tuple(self._tokens),
            finish_reason=reason,
            error=error,
            speculation=self.speculation,
            logprobs=tuple(self._logprobs) if has_logprobs else None,
            prompt_logprobs=None if prompt_logprobs is None else tuple(prompt_logprobs),
            stop_string=self._stream.stop_string if self._stream else None,
            is_refused=is_refused,
        )
