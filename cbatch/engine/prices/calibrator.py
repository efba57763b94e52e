"""Calibration: a longer measurement of the shapes of the start-up and of the loop around the
executor, and a test of the prices on other shapes."""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
from msgspec import structs

from cbatch.core.prices.calibration import Calibration, accuracy
from cbatch.core.prices.step_work import StepSample
from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import MODEL, Request, SamplingParams
from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.scheduler.executor import Executor
from cbatch.core.scheduler.scheduler import Scheduler
from cbatch.engine.core import EngineCore
from cbatch.engine.info import EngineInfo
from cbatch.engine.prices.fit import fit_profile
from cbatch.engine.prices.shapes import StepRunner, can_profile, held_out_shapes, shapes_for
from cbatch.system.machine import describe_machine, describe_versions

_MAX_ROUNDS = 1000
_HELD_OUT_SHARE = 0.25  # of the time
_LOOP_ROWS, _MAX_LOOP_S = 32, 5.0  # of the measurement of the loop
_LOOP_TOKENS = 8 * _LOOP_ROWS  # output of its requests: with drafts, several tokens a step
_FIT_ROUNDS, _MIN_ERROR_S = 20, 1e-6
_ENGINE_FIELDS = (
    "num_blocks",
    "block_size",
    "max_num_seqs",
    "max_model_len",
    "max_num_batched_tokens",
    "draft_context_tokens",
    "catch_up_price",
)


def calibrate(
    executor: Executor,
    config: SchedulerConfig,
    info: EngineInfo,
    *,
    seconds: float,
) -> Calibration:
    """Return prices measured in about `seconds` seconds, and their errors. Raises `FieldError` if
    lookups draft, whose price depends on the text, or if the engine is too small."""
    if config.default_chain not in ((), (MODEL,)):
        raise FieldError("--drafter", "lookups cannot be calibrated", "use the draft, or off")
    if not can_profile(config):
        raise FieldError("--max-model-len", "is too short to measure", "give 70 tokens or more")
    if not held_out_shapes(config):
        raise FieldError("--max-num-batched-tokens", "is too small to measure", "give 64 or more")
    executor.reset()
    loop = _measure_loop(executor, config)
    runner = StepRunner(executor, config, max_rounds=_MAX_ROUNDS)
    fitted, held_out = (
        [loop.added_to(sample) for sample in runner.measure(shapes, budget_s)]
        for shapes, budget_s in (
            (shapes_for(config), seconds * (1 - _HELD_OUT_SHARE)),
            (held_out_shapes(config), seconds * _HELD_OUT_SHARE),
        )
    )
    executor.reset()
    prices = fit_profile(fitted)
    return Calibration(
        model=info.model,
        draft=info.draft,
        machine=describe_machine(),
        versions=describe_versions(),
        engine={name: getattr(config, name) for name in _ENGINE_FIELDS},
        prices=prices,
        profile=config.cost_profile,
        max_rows=max(sample.work.rows for sample in fitted),
        fitted=accuracy(prices, _whole(fitted)),
        held_out=accuracy(prices, _whole(held_out)),
    )


def _whole(samples: list[StepSample]) -> list[StepSample]:
    return [sample for sample in samples if sample.target_s > 0]


class _Loop(NamedTuple):
    """Seconds of the loop around the executor: of a step, of each row, and of a new request."""

    step_s: float
    row_s: float
    request_s: float

    def added_to(self, sample: StepSample) -> StepSample:
        rows, enters = sample.work.rows, sample.work.prefill_tokens > 0
        host_s = self.step_s + self.row_s * rows + self.request_s * enters
        return structs.replace(sample, host_s=host_s)


def _measure_loop(executor: Executor, config: SchedulerConfig) -> _Loop:
    """Serve more and more requests, one of which enters in every third step."""
    core = EngineCore(Scheduler(structs.replace(config, enable_prefix_caching=False)), executor)
    tokens = min(_LOOP_TOKENS, config.max_sequence_tokens - 2)
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    counts, loops_s, end_s = list[tuple[int, int, bool]](), list[float](), _MAX_LOOP_S
    end_s += time.perf_counter()
    for step in range(3 * min(_LOOP_ROWS, config.max_num_seqs)):
        start_s, enters = time.perf_counter(), step % 3 == 0
        if start_s > end_s and not enters:
            break
        if enters:
            request = Request(request_id=str(step), prompt=(0,), params=params, seed=0)
            core.add(request)
        times = core.step().times
        if times is not None and core.loop.last is not None:
            loops_s.append(time.perf_counter() - start_s - times.draft_s - times.target_s)
            counts.append((1, core.loop.last[0].num_rows, enters))
    executor.reset()
    return _Loop(*_least_absolute(np.array(counts, np.float64), np.array(loops_s)).tolist())


def _least_absolute(counts: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Return prices, 0 or more, with the least sum of absolute errors, by weighted least squares: a
    pause of the machine in a few steps changes them little."""
    prices: np.ndarray = np.zeros(counts.shape[1])
    weights = np.ones(len(seconds))
    for _ in range(_FIT_ROUNDS):
        prices = np.linalg.lstsq(counts * weights[:, None], seconds * weights, rcond=None)[0]
        weights = 1 / np.sqrt(np.abs(counts @ prices - seconds) + _MIN_ERROR_S)
    return prices.clip(0.0)
