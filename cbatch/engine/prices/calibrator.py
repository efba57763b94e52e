"""Calibration: an engine serves designed batches, and its steps give all prices of the simulator.

A batch has a fixed number of concurrent requests and drafts per step. Its prompts have many
lengths, so that steps mix chunks with rows that decode or verify. Prompts are made of the model's
own output, so that drafts are accepted often enough for the adaptive policy to draft. Host time
is the time of a step outside the executor.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from msgspec import structs

from cbatch.core.prices.calibration import Calibration, accuracy
from cbatch.core.prices.step_work import StepSample
from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import MODEL, SamplingParams
from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.scheduler.executor import Executor
from cbatch.core.scheduler.scheduler import Scheduler
from cbatch.core.speculation.config import LookaheadConfig
from cbatch.engine.core import EngineCore
from cbatch.engine.engine import Engine
from cbatch.engine.info import EngineInfo
from cbatch.engine.prices.fit import fit_profile
from cbatch.engine.prices.meter import StepMeter
from cbatch.system.machine import describe_machine, describe_versions

# Fields of batches that prices are fitted to, and of held-out batches (`_HELD_OUT_...`).
_ROWS, _KS = (1, 2, 4, 8, 16, 32, 64, 128, 256), (0, 1, 2, 4, 8)
_HELD_OUT_ROWS, _HELD_OUT_KS = (3, 6, 12, 24, 48, 96, 192), (0, 3, 6)
_IDLE_S, _HELD_OUT_IDLE_S = (0.01, 0.03, 0.1), (0.02, 0.06)
_SHARED_TOKENS, _HELD_OUT_SHARED_TOKENS = (64, 256, 512), (160, 384)
_PROMPT_TOKENS = (8, 512)  # minimum and maximum of a request
_OUTPUT_TOKENS = (2, 48)  # minimum and maximum of a request
_MAX_UNSHARED_TOKENS = 128  # longest part of a prompt after the shared tokens
_MAX_SHARING_ROWS = 8  # maximum rows of a batch with shared tokens
_SHORT_OUTPUT_TOKENS = 4  # output of a request after idle time, or with shared tokens
_WARM_UP = 3  # batches that run first and are not measured
_NUM_TEXTS, _TEXT_TOKENS = 16, 128  # generated texts that prompts are cut from, and their length
_ENGINE_FIELDS = (
    "num_blocks",
    "block_size",
    "max_num_seqs",
    "max_model_len",
    "max_num_batched_tokens",
    "draft_context_tokens",
    "catch_up_price",
)


class DesignedBatch(NamedTuple):
    """`rows` concurrent requests, each of which drafts `k` tokens a step (None: the adaptive policy
    chooses). The engine idles for `idle_s` seconds before the batch. Prompts begin with the same
    `shared_tokens` tokens, which are in the prefix cache."""

    rows: int
    k: int | None
    idle_s: float = 0.0
    shared_tokens: int = 0


def designed(config: SchedulerConfig) -> tuple[list[DesignedBatch], list[DesignedBatch]]:
    """Return the batches that prices are fitted to, and held-out batches; the largest are last.

    Held-out batches have other rows and draft lengths; with at most 3 slots only the draft
    lengths differ. Raises `FieldError` if lookups draft: their price depends on the text.
    """
    if config.default_chain not in ((), (MODEL,)):
        raise FieldError("--drafter", "lookups cannot be calibrated", "use the draft, or off")
    max_rows, speculates = config.max_num_seqs, _speculates(config)
    max_shared = config.max_sequence_tokens - _MAX_UNSHARED_TOKENS - _OUTPUT_TOKENS[1] - 1

    def batches(
        rows: Sequence[int], ks: Sequence[int], idles_s: Sequence[float], shared: Sequence[int]
    ) -> list[DesignedBatch]:
        sharing = [n for n in rows if n <= _MAX_SHARING_ROWS]
        depths = (*ks, None) if speculates else (0,)
        return [
            *(DesignedBatch(1, 0, idle_s) for idle_s in idles_s),
            *(DesignedBatch(n, 0, 0.0, t) for n in sharing for t in shared if t <= max_shared),
            *(DesignedBatch(n, k) for n in rows for k in depths),
        ]

    rows, others = (tuple(n for n in sizes if n < max_rows) for sizes in (_ROWS, _HELD_OUT_ROWS))
    return (
        batches((*rows, max_rows), _KS, _IDLE_S, _SHARED_TOKENS),
        batches(others or (max_rows,), _HELD_OUT_KS, _HELD_OUT_IDLE_S, _HELD_OUT_SHARED_TOKENS),
    )


def _speculates(config: SchedulerConfig) -> bool:
    return bool(config.default_chain) and config.lookahead.policy != "off"


class Calibrator:
    """Resets an executor and serves designed batches on it. `pause` waits a number of seconds of
    `clock`. Raises `FieldError` if lookups draft."""

    def __init__(
        self,
        executor: Executor,
        config: SchedulerConfig,
        clock: Callable[[], float] = time.perf_counter,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self.fitted, self.held_out = designed(config)
        self.fitted_samples: list[StepSample] = []
        self.held_out_samples: list[StepSample] = []
        executor.reset()
        self._config, self._clock, self._pause = config, clock, pause
        self._meter = StepMeter(executor, config.max_num_seqs, clock)
        plain, speculates = LookaheadConfig(), _speculates(config)
        if speculates:  # `max_lookahead` of a request lowers k
            plain = LookaheadConfig(policy="fixed", k=max(*_KS, *_HELD_OUT_KS))
        self._plain_engine = self._current_engine = self._make_engine(plain)
        self._sharing_engine = self._make_engine(LookaheadConfig(), enable_prefix_caching=True)
        if speculates:
            self._adaptive_engine = self._make_engine(LookaheadConfig(policy="adaptive"))
        self._generated_text: list[int] = []  # token ids that prompts are cut from

    def _make_engine(
        self, lookahead: LookaheadConfig, *, enable_prefix_caching: bool = False
    ) -> Engine:
        config = structs.replace(
            self._config, lookahead=lookahead, enable_prefix_caching=enable_prefix_caching
        )
        core = EngineCore(Scheduler(config), self._meter, clock=self._clock)
        return Engine(core, seed=0)

    def measure(
        self,
        *,
        seed: int,
        steps: int,
        held_out: bool = True,
        on_batch: Callable[[], None] = lambda: None,
    ) -> None:
        """Measure `steps` steps of each batch. Call `on_batch` after a batch.

        The order of batches is drawn from `seed`, so that a slow phase of the machine affects all
        kinds of batches.
        """
        kinds = [(self.fitted, self.fitted_samples), (self.held_out, self.held_out_samples)]
        for batches, samples in kinds[: 1 + held_out]:
            rng = np.random.default_rng(seed)
            order = [batches[i] for i in rng.permutation(len(batches))]
            for batch in order[:_WARM_UP]:
                self.samples(batch, steps, rng)
            for batch in order:
                samples += self.samples(batch, steps, rng)
                on_batch()

    def samples(
        self, batch: DesignedBatch, steps: int, rng: np.random.Generator
    ) -> list[StepSample]:
        """Return samples of the first `steps` steps of one batch."""
        if not self._generated_text:
            self._generate_text(rng)
        adaptive = batch.k is None
        engine = self._sharing_engine if batch.shared_tokens else self._plain_engine
        self._switch_to(self._adaptive_engine if adaptive else engine)
        engine, running, samples = self._current_engine, set[str](), []
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
            host_s = max(step_s - self._meter.overhead_s - last.draft_s - last.target_s, 0.0)
            samples.append(structs.replace(last, host_s=host_s, adaptive=adaptive))
        for request_id in running:
            engine.cancel(request_id)
        return samples

    def calibration(self, info: EngineInfo) -> Calibration:
        """Return prices fitted to the samples measured so far, and their errors."""
        prices = fit_profile(self.fitted_samples)
        return Calibration(
            model=info.model,
            draft=info.draft,
            machine=describe_machine(),
            versions=describe_versions(),
            engine={name: getattr(self._config, name) for name in _ENGINE_FIELDS},
            prices=prices,
            profile=self._config.cost_profile,
            max_rows=max(sample.work.rows for sample in self.fitted_samples),
            fitted=accuracy(prices, self.fitted_samples),
            held_out=accuracy(prices, self.held_out_samples),
        )

    def _switch_to(self, engine: Engine) -> None:
        """Serve with this engine. If another engine served before, reset their common executor."""
        if engine is not self._current_engine:
            self._meter.reset()
            engine.scheduler.executor_reset(self._clock())
            self._current_engine = engine

    def _generate_text(self, rng: np.random.Generator) -> None:
        """Let the model generate `_NUM_TEXTS` texts from random first tokens, and join them."""
        max_tokens = min(self._config.max_sequence_tokens - 2, _TEXT_TOKENS)
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, max_lookahead=0)
        self._switch_to(self._plain_engine)
        texts: dict[str, list[int]] = {}
        for first in rng.integers(0, self._config.vocab_size, _NUM_TEXTS).tolist():
            texts[self._plain_engine.add([first], params).request_id] = [first]
        while self._plain_engine.has_work:
            for output in self._plain_engine.step():
                texts[output.request_id] += output.token_ids
        self._generated_text = [token for text in texts.values() for token in text]

    def _request(
        self, batch: DesignedBatch, rng: np.random.Generator
    ) -> tuple[list[int], SamplingParams]:
        minimum, maximum = _PROMPT_TOKENS
        maximum = max(min(maximum, self._config.max_sequence_tokens - _OUTPUT_TOKENS[1] - 1), 1)
        text = self._generated_text
        shared = text[:1] * batch.shared_tokens
        if shared:
            maximum = _MAX_UNSHARED_TOKENS
        length = _log_uniform(min(minimum, maximum), maximum, rng)
        first = int(rng.integers(len(text)))
        unshared = [text[(first + i) % len(text)] for i in range(length)]
        short = batch.idle_s or shared
        params = SamplingParams(
            temperature=0.0,
            max_tokens=_SHORT_OUTPUT_TOKENS if short else _log_uniform(*_OUTPUT_TOKENS, rng),
            ignore_eos=True,
            max_lookahead=batch.k,
        )
        return shared + unshared, params


def _log_uniform(minimum: int, maximum: int, rng: np.random.Generator) -> int:
    return round(minimum * math.pow(maximum / minimum, rng.random()))
