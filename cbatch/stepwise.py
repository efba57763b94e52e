"""The engine for those who drive it themselves: add, step, cancel."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable, Sequence

import msgspec

from cbatch.core.errors import FieldError
from cbatch.core.plan import TokenLogprobs
from cbatch.core.request import FinishReason, Request, SamplingParams
from cbatch.core.scheduler import Scheduler
from cbatch.core.sequence import Commit
from cbatch.engine.loop import Executor, OverlappedExecutor, StepLoop
from cbatch.outputs import Choice, Output, Speculation, TokenLogprob, token_logprobs
from cbatch.text import TextStream, TextTokenizer

Prompt = str | Sequence[int]


class EngineStats(msgspec.Struct):
    """Totals since the engine was made."""

    steps: int = 0
    output_tokens: int = 0
    speculation: Speculation = msgspec.field(default_factory=Speculation)


class Accepted(msgspec.Struct, frozen=True):
    """What an accepted request runs with."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    seed: int
    num_choices: int


class _Live:
    """One choice on its way."""

    def __init__(self, request: Request, group_id: str, stream: TextStream | None) -> None:
        self.core_id = request.request_id
        self.group_id = group_id
        self.index = request.choice
        self.stream = stream
        self.tokens: list[int] = []
        self.text: list[str] = []
        self.speculation = Speculation()
        params = request.params
        self.prompt = request.prompt
        self.logprobs: list[TokenLogprob] | None = None if params.logprobs is None else []
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        if params.wants_prompt(request.choice):
            self.prompt_logprobs = [None] * len(request.prompt)

    def end(self, reason: FinishReason, error: str | None = None) -> Choice:
        return Choice(
            index=self.index,
            text="".join(self.text),
            token_ids=tuple(self.tokens),
            finish_reason=reason,
            error=error,
            speculation=self.speculation,
            logprobs=None if self.logprobs is None else tuple(self.logprobs),
            prompt_logprobs=None if self.prompt_logprobs is None else tuple(self.prompt_logprobs),
        )

    def take_prompt_logprobs(self, entry: TokenLogprobs) -> None:
        """Of some of the prompt's tokens; after a preemption they come again, and are the same."""
        assert self.prompt_logprobs is not None
        first = entry.first_position
        tokens = self.prompt[first : first + len(entry.chosen)]
        self.prompt_logprobs[first : first + len(tokens)] = token_logprobs(tokens, entry)


class Engine:
    """Requests in, outputs out, one step at a time. Not thread-safe: one thread drives it.

    `LLM` and `cbatch.load_engine` make one from model directories; any scheduler and executor will
    do (tests hand it the simulator's). A request's `n` choices run as sequences of their own that
    share the prompt's KV. `drafters` are the names of those that the executor holds.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor | OverlappedExecutor,
        *,
        tokenizer: TextTokenizer | None = None,
        clock: Callable[[], float] = time.monotonic,
        depth: int = 0,
        seed: int | None = None,
        drafters: Sequence[str] = (),
    ) -> None:
        self.scheduler = scheduler
        self.drafters = tuple(drafters)
        self.tokenizer = tokenizer
        self.stats = EngineStats()
        self.loop = StepLoop(scheduler, executor, clock=clock, depth=depth)
        self._clock = clock
        self._seeds = None if seed is None else random.Random(seed)
        self._live: dict[str, _Live] = {}  # by the core's request id
        self._groups: dict[str, list[str]] = {}  # the caller's id: live core ids
        self._num_added = 0
        self._ready: list[Output] = []  # endings that no step brings: cancelled by the caller

    @property
    def has_work(self) -> bool:
        """Whether a step could still bring an output."""
        return bool(self._live or self._ready or self.scheduler.num_in_flight)

    def is_running(self, request_id: str) -> bool:
        """Whether a choice of the request has yet to finish."""
        return request_id in self._groups

    def add(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> Accepted:
        """Queues a prompt (text or token ids). Raises `FieldError`, and then nothing was queued."""
        params = params or SamplingParams()
        request_id = request_id or f"request-{self._num_added}"
        if request_id in self._groups:
            raise FieldError("request_id", f"{request_id!r} is running", "use another")
        ids = self._token_ids(prompt)
        if params.stop and self.tokenizer is None:
            raise FieldError("stop", "needs a tokenizer", "use stop_token_ids")
        for name in params.drafter or ():
            if name not in self.drafters:
                held = f"use one of: {', '.join(self.drafters)}"
                remedy = held if self.drafters else "leave it out, or start the engine with one"
                raise FieldError("drafter", f"{name!r} is not loaded here", remedy)
        seed = params.seed if params.seed is not None else self._draw_seed()
        requests = [
            Request(
                request_id=request_id if params.n == 1 else f"{request_id}#{choice}",
                prompt=ids,
                params=params,
                seed=seed,
                choice=choice,
                priority=priority,
            )
            for choice in range(params.n)
        ]
        self._add_all(requests)
        self._num_added += 1
        for request in requests:
            live = _Live(request, request_id, self._stream(ids, params))
            self._live[request.request_id] = live
        self._groups[request_id] = [r.request_id for r in requests]
        return Accepted(request_id, ids, seed, params.n)

    def cancel(self, request_id: str) -> bool:
        """Ends every choice that is still running; their outputs come with the next step. False if
        there is none."""
        running = tuple(self._groups.get(request_id, ()))
        for core_id in running:
            self.scheduler.cancel(core_id, self._clock())
            self._ready.append(self._end(self._live[core_id], FinishReason.CANCELLED))
        return bool(running)

    def step(self) -> list[Output]:
        """One step of the model. An empty list where nothing was completed or nothing waits."""
        outputs, self._ready = self._ready, []
        busy = self.scheduler.has_work or self.scheduler.num_in_flight
        commit = self.loop.step() if busy else None
        finished = self.scheduler.take_finished()
        if commit is not None:
            self.stats.steps += 1
            outputs += self._take(commit)
            finished = (*commit.finished, *finished)
        elif not outputs and not finished and self._live:
            raise RuntimeError("the scheduler has requests that it cannot plan")
        for end in finished:
            live = self._live.get(end.request_id)
            if live is not None:
                outputs.append(self._end(live, end.reason, end.message))
        return outputs

    def _take(self, commit: Commit) -> list[Output]:
        """New tokens to text. An ending in the same step is joined to its last tokens."""
        endings = {end.request_id: end for end in commit.finished}
        logprobs = self._take_logprobs(commit) if commit.logprobs else {}
        outputs = []
        for core_id, new, drafted, accepted in commit.updates():
            live = self._live.get(core_id)
            if live is None:
                continue  # ended by the text side, or cancelled, while this step ran
            if live.tokens:
                live.speculation.observe(drafted, accepted)
                self.stats.speculation.observe(drafted, accepted)
            output = self._extend(live, new.tolist(), drafted, accepted, logprobs.get(core_id))
            end = endings.get(core_id)
            if output.finished is None and end is not None:
                last = self._end(live, end.reason, end.message)
                output = msgspec.structs.replace(
                    output, text=output.text + last.text, finished=last.finished
                )
            outputs.append(output)
        return outputs

    def _take_logprobs(self, commit: Commit) -> dict[str, TokenLogprobs]:
        """Hands on those of prompts; returns those of new tokens, by the core's request id."""
        of_outputs = {}
        for core_id, entry in commit.logprobs:
            live = self._live.get(core_id)
            if live is None:
                continue
            if entry.first_position < len(live.prompt):
                live.take_prompt_logprobs(entry)
            else:
                of_outputs[core_id] = entry
        return of_outputs

    def _extend(
        self,
        live: _Live,
        tokens: list[int],
        drafted: int,
        accepted: int,
        entry: TokenLogprobs | None,
    ) -> Output:
        text, keep_tokens = live.stream.push(tokens) if live.stream else ("", None)
        if keep_tokens is not None:
            tokens = tokens[: keep_tokens - len(live.tokens)]
        live.tokens += tokens
        live.text.append(text)
        self.stats.output_tokens += len(tokens)
        prompt_logprobs = None
        if live.prompt_logprobs is not None and len(live.tokens) == len(tokens):
            prompt_logprobs = tuple(live.prompt_logprobs)
        logprobs = None
        if live.logprobs is not None and entry is not None:
            logprobs = tuple(token_logprobs(tokens, entry))
            live.logprobs += logprobs
        ended = None
        if keep_tokens is not None:
            self.scheduler.finish(live.core_id, keep_tokens, self._clock())
            ended = self._end(live, FinishReason.STOP).finished
        return Output(
            request_id=live.group_id,
            index=live.index,
            text=text,
            token_ids=tuple(tokens),
            num_drafted=drafted,
            num_accepted=accepted,
            finished=ended,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )

    def _end(self, live: _Live, reason: FinishReason, error: str | None = None) -> Output:
        rest = live.stream.finish() if live.stream else ""
        live.text.append(rest)
        del self._live[live.core_id]
        siblings = self._groups[live.group_id]
        siblings.remove(live.core_id)
        if not siblings:
            del self._groups[live.group_id]
        return Output(live.group_id, live.index, rest, (), finished=live.end(reason, error))

    def _add_all(self, requests: list[Request]) -> None:
        for at, request in enumerate(requests):
            try:
                self.scheduler.add(request, self._clock())
            except FieldError:
                for earlier in requests[:at]:
                    self.scheduler.cancel(earlier.request_id, self._clock())
                raise

    def _token_ids(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise FieldError("prompt", "is text, but there is no tokenizer", "give token ids")
            return tuple(self.tokenizer.encode(prompt))
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in prompt):
            raise FieldError("prompt", "holds something that is no token id", "give integers")
        return tuple(prompt)

    def _stream(self, prompt: tuple[int, ...], params: SamplingParams) -> TextStream | None:
        if self.tokenizer is None:
            return None
        return TextStream(self.tokenizer, prompt, stop=params.stop, min_tokens=params.min_tokens)

    def _draw_seed(self) -> int:
        """53 bits, so that a seed survives every JSON reader on its way back."""
        return secrets.randbits(53) if self._seeds is None else self._seeds.getrandbits(53)
