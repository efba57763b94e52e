"""The engine for those who drive it themselves: add, step, cancel."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from cbatch.choices import LiveChoice, Prompt, Seeds, choice_requests, joined, token_ids
from cbatch.core.errors import FieldError
from cbatch.core.plan import TokenLogprobs
from cbatch.core.request import FinishReason, Request, SamplingParams
from cbatch.core.scheduler import Scheduler
from cbatch.core.sequence import Commit
from cbatch.engine.loop import Executor, OverlappedExecutor, StepLoop
from cbatch.grammars import Grammars
from cbatch.outputs import Accepted, Output, Speculation
from cbatch.text import TextTokenizer


class EngineStats(msgspec.Struct):
    """Totals since the engine was made."""

    steps: int = 0
    output_tokens: int = 0
    speculation: Speculation = msgspec.field(default_factory=Speculation)


class Engine:
    """Requests in, outputs out, one step at a time. Not thread-safe: one thread drives it.

    `LLM` and `cbatch.load_engine` make one from model directories; any scheduler and executor will
    do (tests hand it the simulator's). A request's `n` choices run as sequences of their own that
    share the prompt's KV. `drafters` are the names of those that the executor holds, `grammars` are
    the ones that it follows.
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
        grammars: Grammars | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.drafters = tuple(drafters)
        self.grammars = grammars
        self.tokenizer = tokenizer
        self.stats = EngineStats()
        self.loop = StepLoop(scheduler, executor, clock=clock, depth=depth)
        self._clock = clock
        self._seeds = Seeds(seed)
        self._live: dict[str, LiveChoice] = {}  # by the core's request id
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
        ids = token_ids(prompt, self.tokenizer)
        requests = choice_requests(
            request_id,
            ids,
            params,
            seed=self._seeds.of(params),
            priority=priority,
            drafters=self.drafters,
            has_text=self.tokenizer is not None,
            grammars=self.grammars,
        )
        self._add_all(requests)
        self._num_added += 1
        for request in requests:
            self._live[request.request_id] = LiveChoice(request, request_id, self.tokenizer)
        self._groups[request_id] = [r.request_id for r in requests]
        return Accepted(request_id, ids, requests[0].seed, params.n)

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
                self.stats.speculation.observe(drafted, accepted)
            output = live.extend(new.tolist(), drafted, accepted, logprobs.get(core_id))
            self.stats.output_tokens += len(output.token_ids)
            end = endings.get(core_id)
            if output.finished is not None:
                self.scheduler.finish(core_id, len(live.tokens), self._clock())
                self._forget(live)
            elif end is not None:
                output = joined(output, self._end(live, end.reason, end.message))
            outputs.append(output)
        return outputs

    def _take_logprobs(self, commit: Commit) -> dict[str, TokenLogprobs]:
        """Hands on those of prompts; returns those of new tokens, by the core's request id."""
        of_outputs = {}
        for core_id, entry in commit.logprobs:
            live = self._live.get(core_id)
            if live is None:
                continue
            if not live.take_prompt_logprobs(entry):
                of_outputs[core_id] = entry
        return of_outputs

    def _end(self, live: LiveChoice, reason: FinishReason, error: str | None = None) -> Output:
        self._forget(live)
        return live.end(reason, error)

    def _forget(self, live: LiveChoice) -> None:
        del self._live[live.core_id]
        siblings = self._groups[live.group_id]
        siblings.remove(live.core_id)
        if not siblings:
            del self._groups[live.group_id]

    def _add_all(self, requests: list[Request]) -> None:
        for at, request in enumerate(requests):
            try:
                self.scheduler.add(request, self._clock())
            except FieldError:
                for earlier in requests[:at]:
                    self.scheduler.cancel(earlier.request_id, self._clock())
                raise
