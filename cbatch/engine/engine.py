"""`Engine`: requests of text or token ids, for programs that call `step` themselves."""

from __future__ import annotations

import copy
import time
from contextlib import ExitStack

import msgspec
from msgspec import structs

from cbatch.core.request.errors import FieldError
from cbatch.core.request.output import OutputRow
from cbatch.core.request.request import (
    FinishReason,
    Request,
    SamplingParams,
    StructuredOutputs,
)
from cbatch.core.scheduler.scheduler import Scheduler
from cbatch.engine.core import COMPILING_TICK_S, EngineCore
from cbatch.grammars import FIELD, grammars_unsupported
from cbatch.text import TextTokenizer
from cbatch.text.output_processor import LiveChoice, Prompt, Seeds, require_supported, token_ids
from cbatch.text.outputs import Accepted, Output, Speculation


class EngineStats(msgspec.Struct):
    """Totals since the engine was created."""

    steps: int = 0
    output_tokens: int = 0
    speculation: Speculation = msgspec.field(default_factory=Speculation)


class Engine:
    """An `EngineCore` with a tokenizer: `add` requests, `step` for outputs. Not thread-safe.

    `LLM` and `cbatch.load_engine` create one from model directories; tests use the simulator's
    executor. A request's `n` choices are separate sequences that share the prompt's KV.
    `default_params` apply to requests without parameters.
    """

    def __init__(
        self,
        core: EngineCore,
        *,
        tokenizer: TextTokenizer | None = None,
        seed: int | None = None,
        default_params: SamplingParams | None = None,
    ) -> None:
        self.core = core
        self.tokenizer = tokenizer
        self.default_params = default_params or SamplingParams()
        self._stats = EngineStats()  # with the speculation of choices that have ended
        self._seeds = Seeds(seed)
        self._live: dict[str, LiveChoice] = {}  # by the core's request id
        self._groups: dict[str, list[str]] = {}  # caller's request id: core ids of live choices
        self._num_added = 0
        self._ready: list[Output] = []  # outputs of cancelled choices, for the next `step`

    @property
    def scheduler(self) -> Scheduler:
        return self.core.scheduler

    @property
    def stats(self) -> EngineStats:
        """Return the totals so far. Each running choice counts for itself, so that steps take no
        time for it."""
        stats = copy.deepcopy(self._stats)
        for live in self._live.values():
            stats.speculation.merge(live.speculation)
        return stats

    @property
    def has_work(self) -> bool:
        """Return whether a further step could return an output."""
        return bool(self._live or self._ready or self.scheduler.num_in_flight)

    def add(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        mark_ids: frozenset[int] | None = None,
    ) -> Accepted:
        """Queue a prompt (text or token ids). Requests share cached prefixes only if they have the
        same `cache_salt`. `mark_ids` is as in `LiveChoice`. Raises `FieldError` for an invalid
        request, and does not queue it."""
        params = given = params or self.default_params
        request_id = request_id or f"request-{self._num_added}"
        if request_id in self._groups:
            raise FieldError("request_id", f"{request_id!r} is running", "use another")
        ids = token_ids(prompt, self.tokenizer, self.scheduler.config.max_sequence_tokens)
        params, seed = self._seeds.seeded(params)
        request = Request(
            request_id=request_id,
            prompt=ids,
            params=params,
            seed=seed,
            priority=priority,
            cache_salt=cache_salt,
        )
        has_text = self.tokenizer is not None
        require_supported(request, drafters=self.core.drafters, has_text=has_text)
        if params.structured_outputs is not None:
            self.check_grammar(params.structured_outputs)
        names = [request_id if params.n == 1 else f"{request_id}#{i}" for i in range(params.n)]
        live = {}
        with ExitStack() as added:
            for i, name in enumerate(names):
                choice = structs.replace(request, request_id=name, choice=i)
                self.core.add(choice)
                added.callback(self.core.cancel, name)
                live[name] = LiveChoice(choice, request_id, self.tokenizer, mark_ids=mark_ids)
            added.pop_all()
        self._num_added += 1
        self._seeds.count(given)
        self._live |= live
        self._groups[request_id] = names
        return Accepted(request_id, ids, request.seed, params.n)

    def check_grammar(self, output: StructuredOutputs, field: str = FIELD) -> None:
        """Raise `FieldError` about `field` for a constraint that this engine cannot follow."""
        if self.core.grammars is None:
            raise grammars_unsupported(field)
        self.core.grammars.check(output, field)

    def cancel(self, request_id: str) -> bool:
        """End every running choice of a request; the next `step` returns their outputs. Returns
        False if no choice is running."""
        running = tuple(self._groups.get(request_id, ()))
        for core_id in running:
            self.core.cancel(core_id)
            row = OutputRow(core_id, finish_reason=FinishReason.CANCELLED)
            self._ready.append(self._forget(core_id).extend(row))
        return bool(running)

    def step(self) -> list[Output]:
        outputs, self._ready = self._ready, []
        step = self.core.step()
        self._stats.steps += step.times is not None
        for core_id, entry in step.logprobs:
            if core_id in self._live:
                self._live[core_id].on_logprobs(entry)
        for row in step.rows:
            live = self._live.get(row.request_id)
            if live is None:
                continue  # a stop string or the caller ended the choice while this step ran
            output = live.extend(row)
            self._stats.output_tokens += len(output.token_ids)
            if output.finished is not None:
                self._forget(row.request_id)
                if row.finish_reason is None:
                    self.core.finish(row.request_id, live.num_tokens)
            outputs.append(output)
        if self.core.waiting_for_kernels and not outputs and not self.core.busy:
            time.sleep(COMPILING_TICK_S)
        return outputs

    def _forget(self, core_id: str) -> LiveChoice:
        live = self._live.pop(core_id)
        self._stats.speculation.merge(live.speculation)
        siblings = self._groups[live.group_id]
        siblings.remove(core_id)
        if not siblings:
            del self._groups[live.group_id]
        return live
