"""Steps of designed batches that an engine serves: all prices, for the simulator.

The engine serves made-up requests: so many at a time, each drafting so many tokens, prompts of many
lengths, so that steps mix chunks with rows that decode or verify. Prompts are text of the model's
own: where the adaptive policy chooses depths it must find drafts that are worth verifying. What a
step takes beyond the executor is the host's share.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from msgspec import structs

from cbatch.core.prices.calibration import Calibration, accuracy
from cbatch.core.prices.fit import fit_profile
from cbatch.core.prices.step_work import StepSample
from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import MODEL, SamplingParams
from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.scheduler.scheduler import Scheduler
from cbatch.core.speculation.config import LookaheadConfig
from cbatch.engine.engine import Engine
from cbatch.engine.info import EngineInfo
from cbatch.engine.loop import Executor
from cbatch.engine.prices.meter import StepMeter
from cbatch.system.machine import describe_machine, describe_versions

_ROWS, _KS = (1, 2, 4, 8, 16, 32, 64, 128, 256), (0, 1, 2, 4, 8)
_OTHER_ROWS, _OTHER_KS = (3, 6, 12, 24, 48, 96, 192), (0, 3, 6)
_PROMPT_TOKENS = (8, 512)  # of a request, at least and at most
_OUTPUT_TOKENS = (2, 48)
_IDLE_S, _OTHER_IDLE_S = (0.01, 0.03, 0.1), (0.02, 0.06)
_SHARED_TOKENS, _OTHER_SHARED_TOKENS = (64, 256, 512), (160, 384)
_MOST_OWN_TOKENS = 128  # after the shared ones
_MOST_SHARING = 8  # rows
_SHORT_OUTPUT_TOKENS = 4  # of a request that ends an idle time, or shares its beginning
_WARM_UP = 3  # batches that are not counted
_SPEAKERS, _SPOKEN_TOKENS = 16, 128  # requests whose output makes prompts, and its length
_ENGINE_FIELDS = (
    "num_blocks",
    "block_size_tokens",
    "max_slots",
    "max_model_tokens",
    "step_budget_tokens",
    "draft_context_tokens",
    "catch_up_price",
)


class DesignedBatch(NamedTuple):
    """`rows` requests at a time, after `idle_s` seconds without work. Each drafts `k` tokens a step
    (None: as many as the adaptive policy says). Prompts begin with the same `shared_tokens`, which
    a prefix cache has."""

    rows: int
    k: int | None
    idle_s: float = 0.0
    shared_tokens: int = 0


def designed(config: SchedulerConfig) -> tuple[list[DesignedBatch], list[DesignedBatch]]:
    """Return the batches that prices are fitted to, and others that test the prices.

    The others have other sizes and depths, in an engine of one or two slots other lengths alone;
    the largest are last. Raises `FieldError` where lookups draft: their price depends on the text.
    """
    if config.default_chain not in ((), (MODEL,)):
        raise FieldError("--drafter", "lookups have no price of their own", "use the draft, or off")
    most, speculates = config.max_slots, _speculates(config)
    room = config.max_sequence_tokens - _MOST_OWN_TOKENS - _OUTPUT_TOKENS[1] - 1

    def batches(
        rows: Sequence[int], ks: Sequence[int], idles_s: Sequence[float], shared: Sequence[int]
    ) -> list[DesignedBatch]:
        small = [n for n in rows if n <= _MOST_SHARING]
        depths = (*ks, None) if speculates else (0,)
        return [
            *(DesignedBatch(1, 0, idle_s) for idle_s in idles_s),
            *(DesignedBatch(n, 0, 0.0, t) for n in small for t in shared if t <= room),
            *(DesignedBatch(n, k) for n in rows for k in depths),
        ]

    rows, others = (tuple(n for n in sizes if n < most) for sizes in (_ROWS, _OTHER_ROWS))
    return (
        batches((*rows, most), _KS, _IDLE_S, _SHARED_TOKENS),
        batches(others or (most,), _OTHER_KS, _OTHER_IDLE_S, _OTHER_SHARED_TOKENS),
    )


def _speculates(config: SchedulerConfig) -> bool:
    return bool(config.default_chain) and config.lookahead.policy != "off"


class Calibrator:
    """Serves designed batches on an executor, which it resets. `pause` lets so many seconds of
    `clock` go by. Raises `FieldError` where lookups draft."""

    def __init__(
        self,
        executor: Executor,
        config: SchedulerConfig,
        clock: Callable[[], float] = time.perf_counter,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self.fitted, self.held_out = designed(config)
        self.known: list[StepSample] = []  # of the fitted batches
        self.others: list[StepSample] = []  # of the held-out ones
        executor.reset()
        self._config, self._clock, self._pause = config, clock, pause
        self._meter = StepMeter(executor, config.max_slots, clock)
        plain, speculates = LookaheadConfig(), _speculates(config)
        if speculates:  # requests choose their own depths
            plain = LookaheadConfig(policy="fixed", k=max(*_KS, *_OTHER_KS))
        self._plain = self._serving = self._make(plain)
        self._sharing = self._make(LookaheadConfig(), prefix_cache=True)
        if speculates:
            self._controlled = self._make(LookaheadConfig(policy="goodput"))
        self._words: list[int] = []

    def _make(self, lookahead: LookaheadConfig, *, prefix_cache: bool = False) -> Engine:
        config = structs.replace(self._config, lookahead=lookahead, prefix_cache=prefix_cache)
        return Engine(Scheduler(config), self._meter, clock=self._clock, seed=0)

    def measure(
        self,
        *,
        seed: int,
        steps: int,
        part: slice = slice(None),
        held_out: bool = True,
        on_batch: Callable[[], None] = lambda: None,
    ) -> None:
        """Measure `steps` steps of each of the batches in `part`, in an order drawn from `seed`: a
        machine that is slow for some seconds is so to all kinds of batches."""
        kinds = [(self.fitted, self.known), (self.held_out, self.others)]
        for batches, samples in kinds[: 1 + held_out]:
            rng, some = np.random.default_rng(seed), batches[part]
            order = [some[i] for i in rng.permutation(len(some))]
            for batch in order[:_WARM_UP]:
                self.samples(batch, steps, rng)
            for batch in order:
                samples += self.samples(batch, steps, rng)
                on_batch()

    def samples(
        self, batch: DesignedBatch, steps: int, rng: np.random.Generator
    ) -> list[StepSample]:
        """Return samples of the first `steps` steps of one batch."""
        if not self._words:
            self._speak(rng)
        controlled = batch.k is None
        engine = self._sharing if batch.shared_tokens else self._plain
        self._turn_to(self._controlled if controlled else engine)
        engine, running, samples = self._serving, set[str](), []
        for _ in range(steps):
            requests = [self._request(batch, rng) for _ in range(batch.rows - len(running))]
            if batch.idle_s and not running:
                self._pause(batch.idle_s)
                self._meter.idle(batch.idle_s)
            started_s = self._clock()
            running |= {engine.add(prompt, params).request_id for prompt, params in requests}
            outputs = engine.step()
            step_s = self._clock() - started_s
            running -= {out.request_id for out in outputs if out.finished is not None}
            last = self._meter.last
            host_s = max(step_s - self._meter.own_s - last.draft_s - last.target_s, 0.0)
            samples.append(structs.replace(last, host_s=host_s, controlled=controlled))
        for request_id in running:
            engine.cancel(request_id)
        return samples

    def calibration(self, info: EngineInfo) -> Calibration:
        """Return prices fitted to what was measured, and how well they predict it."""
        prices = fit_profile(self.known)
        return Calibration(
            model=info.model,
            draft=info.draft,
            machine=describe_machine(),
            versions=describe_versions(),
            engine={name: getattr(self._config, name) for name in _ENGINE_FIELDS},
            prices=prices,
            profile=self._config.cost_profile,
            max_rows=max(sample.work.rows for sample in self.known),
            fitted=accuracy(prices, self.known),
            held_out=accuracy(prices, self.others),
        )

    def _turn_to(self, engine: Engine) -> None:
        """Serve by this engine: the executor may hold sequences of another."""
        if engine is not self._serving:
            self._meter.reset()
            engine.scheduler.executor_reset(self._clock())
            self._serving = engine

    def _speak(self, rng: np.random.Generator) -> None:
        most = min(self._config.max_sequence_tokens - 2, _SPOKEN_TOKENS)
        params = SamplingParams(max_tokens=most, ignore_eos=True, max_lookahead=0)
        self._turn_to(self._plain)
        said: dict[str, list[int]] = {}
        for first in rng.integers(0, self._config.vocab_size, _SPEAKERS).tolist():
            said[self._plain.add([first], params).request_id] = [first]
        while self._plain.has_work:
            for output in self._plain.step():
                said[output.request_id] += output.token_ids
        self._words = [token for words in said.values() for token in words]

    def _request(
        self, batch: DesignedBatch, rng: np.random.Generator
    ) -> tuple[list[int], SamplingParams]:
        """Return a prompt and its parameters. Lengths are as likely at any scale."""
        least, most = _PROMPT_TOKENS
        most = max(min(most, self._config.max_sequence_tokens - _OUTPUT_TOKENS[1] - 1), 1)
        shared = self._words[:1] * batch.shared_tokens
        if shared:
            most = _MOST_OWN_TOKENS
        length = _at_any_scale(min(least, most), most, rng)
        first = int(rng.integers(len(self._words)))
        own = [self._words[(first + i) % len(self._words)] for i in range(length)]
        short = batch.idle_s or shared
        params = SamplingParams(
            temperature=0.0,
            max_tokens=_SHORT_OUTPUT_TOKENS if short else _at_any_scale(*_OUTPUT_TOKENS, rng),
            ignore_eos=True,
            max_lookahead=batch.k,
        )
        return shared + own, params


def _at_any_scale(least: int, most: int, rng: np.random.Generator) -> int:
    return round(least * math.pow(most / least, rng.random()))
