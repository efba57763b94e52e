"""A call's choices: the requests it becomes, and the text of each as its tokens come.

`Engine` holds these beside the scheduler, a server in the process that owns its clients.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Sequence

import msgspec

from cbatch.core.errors import FieldError
from cbatch.core.plan import TokenLogprobs
from cbatch.core.request import FinishReason, Request, SamplingParams
from cbatch.grammars import Grammars, require_grammars
from cbatch.outputs import Choice, Output, Speculation, TokenLogprob, token_logprobs
from cbatch.text import TextStream, TextTokenizer

Prompt = str | Sequence[int]


class Seeds:
    """Seeds for requests without one; `seed` makes them reproducible."""

    def __init__(self, seed: int | None) -> None:
        self._random = None if seed is None else random.Random(seed)

    def of(self, params: SamplingParams) -> int:
        """The request's own, or 53 drawn bits, so that it survives every JSON reader on its way
        back."""
        if params.seed is not None:
            return params.seed
        return secrets.randbits(53) if self._random is None else self._random.getrandbits(53)


def token_ids(prompt: Prompt, tokenizer: TextTokenizer | None) -> tuple[int, ...]:
    """Raises `FieldError`."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise FieldError("prompt", "is text, but there is no tokenizer", "give token ids")
        return tuple(tokenizer.encode(prompt))
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in prompt):
        raise FieldError("prompt", "holds something that is no token id", "give integers")
    return tuple(prompt)


def choice_requests(
    request_id: str,
    prompt: tuple[int, ...],
    params: SamplingParams,
    *,
    seed: int,
    priority: int,
    drafters: Sequence[str],
    has_text: bool,
    grammars: Grammars | None,
) -> list[Request]:
    """One for each of the `n` choices; they share the prompt's KV. `drafters` are the names that a
    request may ask for, `grammars` what it may ask its output to follow. Raises `FieldError`."""
    if params.stop and not has_text:
        raise FieldError("stop", "needs a tokenizer", "use stop_token_ids")
    for name in params.drafter or ():
        if name not in drafters:
            held = f"use one of: {', '.join(drafters)}"
            remedy = held if drafters else "leave it out, or start the engine with one"
            raise FieldError("drafter", f"{name!r} is not loaded here", remedy)
    if params.structured_outputs is not None:
        require_grammars(grammars).check(params.structured_outputs)
    return [
        Request(
            request_id=request_id if params.n == 1 else f"{request_id}#{choice}",
            prompt=prompt,
            params=params,
            seed=seed,
            choice=choice,
            priority=priority,
        )
        for choice in range(params.n)
    ]


class LiveChoice:
    """One choice on its way. `core_id` is its request's, `group_id` the caller's."""

    def __init__(self, request: Request, group_id: str, tokenizer: TextTokenizer | None) -> None:
        params = request.params
        self.core_id = request.request_id
        self.group_id = group_id
        self.tokens: list[int] = []
        self._index = request.choice
        self._prompt = request.prompt
        self._stream: TextStream | None = None
        if tokenizer is not None:
            self._stream = TextStream(
                tokenizer, request.prompt, stop=params.stop, min_tokens=params.min_tokens
            )
        self._text: list[str] = []
        self._speculation = Speculation()
        self._logprobs: list[TokenLogprob] | None = None if params.logprobs is None else []
        self._prompt_logprobs: list[TokenLogprob | None] | None = None
        if params.wants_prompt(request.choice):
            self._prompt_logprobs = [None] * len(request.prompt)

    def take_prompt_logprobs(self, entry: TokenLogprobs) -> bool:
        """False if the entry is not about the prompt. After a preemption or a restart those of the
        prompt come again, and are the same."""
        first = entry.first_position
        if first >= len(self._prompt):
            return False
        if self._prompt_logprobs is not None:
            tokens = self._prompt[first : first + len(entry.chosen)]
            self._prompt_logprobs[first : first + len(tokens)] = token_logprobs(tokens, entry)
        return True

    def extend(
        self, tokens: list[int], drafted: int, accepted: int, entry: TokenLogprobs | None
    ) -> Output:
        """What a step added. If it completes a stop string the choice has `finished`, and the core
        is to keep `len(self.tokens)` tokens."""
        if self.tokens:
            self._speculation.observe(drafted, accepted)
        text, keep_tokens = self._stream.push(tokens) if self._stream else ("", None)
        if keep_tokens is not None:
            tokens = tokens[: keep_tokens - len(self.tokens)]
        first = not self.tokens
        self.tokens += tokens
        self._text.append(text)
        prompt_logprobs = None
        if self._prompt_logprobs is not None and first:
            prompt_logprobs = tuple(self._prompt_logprobs)
        logprobs = None
        if self._logprobs is not None and entry is not None:
            logprobs = tuple(token_logprobs(tokens, entry))
            self._logprobs += logprobs
        output = Output(
            request_id=self.group_id,
            index=self._index,
            text=text,
            token_ids=tuple(tokens),
            num_drafted=drafted,
            num_accepted=accepted,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )
        return output if keep_tokens is None else joined(output, self.end(FinishReason.STOP))

    def end(self, reason: FinishReason, error: str | None = None) -> Output:
        """Its last output: text that was held back, and the whole choice."""
        rest = self._stream.finish() if self._stream else ""
        self._text.append(rest)
        prompt_logprobs = self._prompt_logprobs
        choice = Choice(
            index=self._index,
            text="".join(self._text),
            token_ids=tuple(self.tokens),
            finish_reason=reason,
            error=error,
            speculation=self._speculation,
            logprobs=None if self._logprobs is None else tuple(self._logprobs),
            prompt_logprobs=None if prompt_logprobs is None else tuple(prompt_logprobs),
        )
        return Output(self.group_id, self._index, rest, (), finished=choice)


def joined(output: Output, last: Output) -> Output:
    """The last tokens of a choice and its end in one."""
    return msgspec.structs.replace(output, text=output.text + last.text, finished=last.finished)
