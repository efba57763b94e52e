"""The engine for those who drive it themselves: add, step, cancel."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable, Sequence

import msgspec

from cbatch.core.errors import FieldError
from cbatch.core.request import FinishReason, Request, SamplingParams
from cbatch.core.scheduler import Scheduler
from cbatch.core.sequence import Commit
from cbatch.engine.loop import Executor, OverlappedExecutor, StepLoop
from cbatch.outputs import Choice, Output, Speculation
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

    def end(self, reason: FinishReason, error: str | None = None) -> Choice:
        return Choice(
            self.index, "".join(self.text), tuple(self.tokens), reason, error, self.speculation
        )


class Engine:
    """Requests in, outputs out, one step at a time. Not thread-safe: one thread drives it.

    `LLM` and `cbatch.load_engine` make one from model directories; any scheduler and executor will
    do (tests hand it the simulator's). A request's `n` choices run as sequences of their own that
    share the prompt's KV.
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
    ) -> None:
        self.scheduler = scheduler
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
        outputs = []
        for core_id, new, drafted, accepted in commit.updates():
            live = self._live.get(core_id)
            if live is None:
                continue  # ended by the text side, or cancelled, while this step ran
            if live.tokens:
                live.speculation.observe(drafted, accepted)
                self.stats.speculation.observe(drafted, accepted)
            output = self._extend(live, new.tolist(), drafted, accepted)
            end = endings.get(core_id)
            if output.finished is None and end is not None:
                last = self._end(live, end.reason, end.message)
                output = msgspec.structs.replace(
                    output, text=output.text + last.text, finished=last.finished
                )
            outputs.append(output)
        return outputs

    def _extend(self, live: _Live, tokens: list[int], drafted: int, accepted: int) -> Output:
        text, keep_tokens = live.stream.push(tokens) if live.stream else ("", None)
        if keep_tokens is not None:
            tokens = tokens[: keep_tokens - len(live.tokens)]
        live.tokens += tokens
        live.text.append(text)
        self.stats.output_tokens += len(tokens)
        ended = None
        if keep_tokens is not None:
            self.scheduler.finish(live.core_id, keep_tokens, self._clock())
            ended = self._end(live, FinishReason.STOP).finished
        return Output(live.group_id, live.index, text, tuple(tokens), drafted, accepted, ended)

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
