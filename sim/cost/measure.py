"""Measuring what steps of an engine cost, for the simulator: real steps of designed batches.

The engine itself serves made-up requests: so many at a time, each drafting so many tokens, prompts
of many lengths between them, so that steps mix chunks with rows that decode or verify. They go on
with what the model has said before: where `goodput` chooses depths, it must find drafts worth it.
The engine runs its steps through a `StepMeter`; what its turn takes besides is the host's share.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from msgspec import structs

from cbatch.core.prices.step_work import StepSample
from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import MODEL, SamplingParams
from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.scheduler.scheduler import Scheduler
from cbatch.core.speculation.config import LookaheadConfig
from cbatch.engine.engine import Engine
from cbatch.engine.info import EngineInfo
from cbatch.engine.loop import Executor
from cbatch.engine.step_meter import StepMeter
from sim.cost.calibrated import Calibration, accuracy, fit_prices

_ROWS, _KS = (1, 2, 4, 8, 16, 32, 64, 128, 256), (0, 1, 2, 4, 8)
_OTHER_ROWS, _OTHER_KS = (3, 6, 12, 24, 48, 96, 192), (0, 3, 6)
_LEAST_PROMPT_TOKENS = 8
_MOST_PROMPT_TOKENS = 512
_OUTPUT_TOKENS = (2, 48)  # of a request, at least and at most
_IDLE_S, _OTHER_IDLE_S = (0.01, 0.03, 0.1), (0.02, 0.06)
_SHARED_TOKENS, _OTHER_SHARED_TOKENS = (64, 256, 512), (160, 384)
_MOST_OWN_TOKENS = 128  # behind them
_MOST_SHARING = 8  # rows
_WOKEN_TOKENS = 4  # the output of a request that ends an idleness, or shares its beginning
_WARM_UP = 3  # batches that nobody looks at
_SPEAKERS, _SPOKEN_TOKENS = 16, 128  # who make prompts, and how much each says
ENGINE_FIELDS = (
    "num_blocks",
    "block_size_tokens",
    "max_slots",
    "max_model_tokens",
    "step_budget_tokens",
    "draft_context_tokens",
    "catch_up_price",
)
# Engines of a calibrator.
_PLAIN, _CONTROLLED, _SHARING = "plain", "controlled", "sharing"


class DesignedBatch(NamedTuple):
    """`rows` requests at a time, each drafting `k` tokens a step, or as many as `goodput` says;
    they come after so many seconds without anything to do. Prompts begin with the same
    `shared_tokens`, which a prefix cache has, and go on with some of their own."""

    rows: int
    k: int | None
    idle_s: float = 0.0
    shared_tokens: int = 0


def designed(config: SchedulerConfig) -> tuple[list[DesignedBatch], list[DesignedBatch]]:
    """What prices are fitted to, and others to see how well they do: of other sizes and depths (in
    an engine of one or two slots of other lengths alone), the largest last. Raises `FieldError`
    where somebody else than a draft model drafts: a lookup's price depends on the text."""
    if config.default_chain not in ((), (MODEL,)):
        raise FieldError("--drafter", "lookups have no price of their own", "use the draft, or off")
    speculates = bool(config.default_chain) and config.lookahead.policy != "off"
    most = config.max_slots
    rows = (*(n for n in _ROWS if n < most), most)
    others = tuple(n for n in _OTHER_ROWS if n < most) or (most,)
    fitted = [DesignedBatch(1, 0, idle_s) for idle_s in _IDLE_S]
    held_out = [DesignedBatch(1, 0, idle_s) for idle_s in _OTHER_IDLE_S]
    room = config.max_sequence_tokens - _MOST_OWN_TOKENS - _OUTPUT_TOKENS[1] - 1
    for kind, tokens in ((fitted, _SHARED_TOKENS), (held_out, _OTHER_SHARED_TOKENS)):
        sizes = rows if kind is fitted else others
        kind += [
            DesignedBatch(n, 0, 0.0, shared)
            for n in sizes
            for shared in tokens
            if n <= _MOST_SHARING and shared <= room
        ]
    fitted += [DesignedBatch(n, k) for n in rows for k in ((*_KS, None) if speculates else (0,))]
    held_out += [
        DesignedBatch(n, k) for n in others for k in ((*_OTHER_KS, None) if speculates else (0,))
    ]
    return fitted, held_out


class Calibrator:
    """An engine of its own around the executor, which it resets; how deep its requests draft is
    their own choice. `pause` lets so many seconds of `clock` go by."""

    def __init__(
        self,
        executor: Executor,
        config: SchedulerConfig,
        clock: Callable[[], float] = time.perf_counter,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        executor.reset()
        self._config, self._clock, self._pause = config, clock, pause
        self._meter = StepMeter(executor, config.max_slots, clock)
        # By whether `goodput` chooses depths. In the other one requests choose theirs themselves.
        # The third one has a prefix cache.
        plain = LookaheadConfig()
        self._engines = {_PLAIN: self._make(plain), _SHARING: self._make(plain, shares=True)}
        if config.default_chain and config.lookahead.policy != "off":
            fixed = LookaheadConfig(policy="fixed", k=max(*_KS, *_OTHER_KS))
            controlled = LookaheadConfig(policy="goodput")
            self._engines |= {_PLAIN: self._make(fixed), _CONTROLLED: self._make(controlled)}
        self._serving = _PLAIN  # whose sequences the executor has
        self._running: set[str] = set()
        self._words: list[int] = []

    def _make(self, lookahead: LookaheadConfig, *, shares: bool = False) -> Engine:
        config = structs.replace(self._config, lookahead=lookahead, prefix_cache=shares)
        scheduler = Scheduler(config)
        return Engine(scheduler, self._meter, clock=self._clock, seed=0)

    def measure(
        self,
        batches: Iterable[DesignedBatch],
        *,
        seed: int,
        steps: int,
        on_batch: Callable[[], None] = lambda: None,
    ) -> list[StepSample]:
        """Samples of `steps` steps of each batch, in an order drawn from `seed`: a machine that is
        slow for some seconds is so to all kinds of batches."""
        rng = np.random.default_rng(seed)
        order = list(batches)
        order = [order[i] for i in rng.permutation(len(order))]
        for batch in order[:_WARM_UP]:
            self.samples(batch, steps, rng)
        samples: list[StepSample] = []
        for batch in order:
            samples += self.samples(batch, steps, rng)
            on_batch()
        return samples

    def samples(
        self, batch: DesignedBatch, steps: int, rng: np.random.Generator
    ) -> list[StepSample]:
        """Of so many steps of one batch, from its first prefill on."""
        if not self._words:
            self._speak(rng)
        controlled = batch.k is None
        kind = _CONTROLLED if controlled else _SHARING if batch.shared_tokens else _PLAIN
        engine, running = self._engine_of(kind), self._running
        found = []
        for _ in range(steps):
            requests = [self._request(batch, rng) for _ in range(batch.rows - len(running))]
            if batch.idle_s and not running:
                self._pause(batch.idle_s)
                self._meter.idle(batch.idle_s)
            started_s = self._clock()
            running |= {engine.add(prompt, params).request_id for prompt, params in requests}
            outputs = engine.step()
            turn_s = self._clock() - started_s
            running -= {out.request_id for out in outputs if out.finished is not None}
            last = self._meter.last
            host_s = max(turn_s - self._meter.own_s - last.draft_s - last.target_s, 0.0)
            found.append(structs.replace(last, host_s=host_s, controlled=controlled))
        for request_id in running:
            engine.cancel(request_id)
        running.clear()
        return found

    def _engine_of(self, kind: str) -> Engine:
        """Ready to serve: the executor may have had to do with another one."""
        if kind not in self._engines:
            raise ValueError("k: is None, but nobody drafts; give 0")
        engine = self._engines[kind]
        if kind != self._serving:
            self._meter.reset()
            engine.scheduler.executor_reset(self._clock())
            self._serving = kind
        return engine

    def _prompt(self, length: int, rng: np.random.Generator) -> list[int]:
        """Some words of the model's own."""
        first = int(rng.integers(len(self._words)))
        return [self._words[(first + i) % len(self._words)] for i in range(length)]

    def _speak(self, rng: np.random.Generator) -> None:
        most = min(self._config.max_sequence_tokens - 2, _SPOKEN_TOKENS)
        params = SamplingParams(max_tokens=most, ignore_eos=True, max_lookahead=0)
        engine = self._engine_of(_PLAIN)
        said: dict[str, list[int]] = {}
        for first in rng.integers(0, self._config.vocab_size, _SPEAKERS).tolist():
            said[engine.add([first], params).request_id] = [first]
        while engine.has_work:
            for output in engine.step():
                said[output.request_id] += output.token_ids
        self._words = [token for words in said.values() for token in words]

    def _request(
        self, batch: DesignedBatch, rng: np.random.Generator
    ) -> tuple[list[int], SamplingParams]:
        """Lengths are as likely at any scale."""
        room = self._config.max_sequence_tokens - _OUTPUT_TOKENS[1] - 1
        most = max(min(_MOST_PROMPT_TOKENS, room), 1)
        length = _at_any_scale(min(_LEAST_PROMPT_TOKENS, most), most, rng)
        shared = self._words[:1] * batch.shared_tokens
        if shared:
            length = _at_any_scale(_LEAST_PROMPT_TOKENS, _MOST_OWN_TOKENS, rng)
        params = SamplingParams(
            temperature=0.0,
            max_tokens=_WOKEN_TOKENS
            if batch.idle_s or shared
            else _at_any_scale(*_OUTPUT_TOKENS, rng),
            ignore_eos=True,
            max_lookahead=batch.k,
        )
        return shared + self._prompt(length, rng), params


def _at_any_scale(least: int, most: int, rng: np.random.Generator) -> int:
    return round(least * math.pow(most / least, rng.random()))


def calibration_of(
    info: EngineInfo,
    config: SchedulerConfig,
    known: Sequence[StepSample],
    others: Sequence[StepSample],
) -> Calibration:
    """Prices fitted to `known`, and how well they foretell these and `others`."""
    from cbatch.system.machine import describe_machine, describe_versions

    prices = fit_prices(known)
    return Calibration(
        model=info.model,
        draft=info.draft,
        machine=describe_machine(),
        versions=describe_versions(),
        engine={name: getattr(config, name) for name in ENGINE_FIELDS},
        prices=prices,
        profile=config.cost_profile,
        max_rows=max(sample.work.rows for sample in known),
        fitted=accuracy(prices, known),
        held_out=accuracy(prices, others),
    )
