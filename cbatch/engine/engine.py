"""The engine for those who drive it themselves: add, step, cancel."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from cbatch.core.request.errors import FieldError
from cbatch.core.request.output import Ending
from cbatch.core.request.request import FinishReason, Request, SamplingParams
from cbatch.core.scheduler.scheduler import Scheduler
from cbatch.core.scheduler.sequence import Commit
from cbatch.engine.loop import Executor, OverlappedExecutor, StepLoop
from cbatch.grammars import Grammars, not_served
from cbatch.text import TextTokenizer
from cbatch.text.output_processor import LiveChoice, Prompt, Seeds, choice_requests, token_ids
from cbatch.text.outputs import Accepted, Output, Speculation

COMPILING_TICK_S = 0.05  # an engine with nothing else to do looks whether its kernels are compiled


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
    the ones that it follows, `default_params` those of a request that brings none.
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
        default_params: SamplingParams | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.drafters = tuple(drafters)
        self.grammars = grammars
        self.default_params = default_params or SamplingParams()
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

    def add(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Accepted:
        """Queues a prompt (text or token ids). The KV of its prefixes is shared with requests of
        the same `cache_salt` alone. Raises `FieldError`, and then nothing was queued."""
        params = params or self.default_params
        request_id = request_id or f"request-{self._num_added}"
        if request_id in self._groups:
            raise FieldError("request_id", f"{request_id!r} is running", "use another")
        ids = token_ids(prompt, self.tokenizer, self.scheduler.config.max_sequence_tokens)
        requests = choice_requests(
            request_id,
            ids,
            params,
            seed=self._seeds.of(params),
            priority=priority,
            cache_salt=cache_salt,
            drafters=self.drafters,
            has_text=self.tokenizer is not None,
        )
        if params.structured_outputs is not None:
            if self.grammars is None:
                raise not_served()
            self.grammars.check(params.structured_outputs)
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
            self.loop.waiting.pop(core_id, None)
            self.scheduler.cancel(core_id, self._clock())
            self._ready.append(self._forget(core_id).end(FinishReason.CANCELLED))
        return bool(running)

    def step(self) -> list[Output]:
        """One step of the model. An empty list where nothing was completed or nothing waits."""
        outputs, self._ready = self._ready, []
        waiting = self.loop.admit_waiting()
        busy = self.scheduler.has_work or self.scheduler.num_in_flight
        if waiting and not busy and not outputs:
            time.sleep(COMPILING_TICK_S)
        commit = self.loop.step() if busy else None
        ended = (*(commit.finished if commit else ()), *self.scheduler.take_finished())
        endings: dict[str, Ending] = {end.request_id: end for end in ended}
        if commit is not None:
            self.stats.steps += 1
            outputs += self._take(commit, endings)
        elif not outputs and not endings and self._live and not waiting:
            raise RuntimeError("the scheduler has requests that it cannot plan")
        for core_id, end in endings.items():
            if core_id in self._live:
                outputs.append(self._forget(core_id).end(end.reason, end.message))
        return outputs

    def _take(self, commit: Commit, endings: dict[str, Ending]) -> list[Output]:
        """New tokens to text. Takes the endings that came with tokens."""
        for core_id, entry in commit.logprobs:
            if core_id in self._live:
                self._live[core_id].on_logprobs(entry)
        outputs = []
        for row in commit.updates():
            live = self._live.get(row.request_id)
            if live is None:
                continue  # ended by the text side, or cancelled, while this step ran
            if live.num_tokens:
                self.stats.speculation.observe(row.num_drafted, row.num_accepted)
            ending = endings.pop(row.request_id, None)
            output = live.extend(row, ending)
            self.stats.output_tokens += len(output.token_ids)
            if output.finished is not None:
                self._forget(row.request_id)
                if ending is None:
                    self.scheduler.finish(row.request_id, live.num_tokens, self._clock())
            outputs.append(output)
        return outputs

    def _forget(self, core_id: str) -> LiveChoice:
        live = self._live.pop(core_id)
        siblings = self._groups[live.group_id]
        siblings.remove(core_id)
        if not siblings:
            del self._groups[live.group_id]
        return live

    def _add_all(self, requests: list[Request]) -> None:
        for at, request in enumerate(requests):
            try:
                self.loop.add(request)
            except FieldError:
                for earlier in requests[:at]:
                    self.scheduler.cancel(earlier.request_id, self._clock())
                raise
