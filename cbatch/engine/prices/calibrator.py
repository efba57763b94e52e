"""Calibration: a longer measurement of the shapes of the start-up and of the loop around the
executor, and a test of the prices on other shapes."""

from __future__ import annotations

from statistics import median

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
_LOOP_ROWS, _LOOP_TOKENS = 8, 48  # requests of the measurement of the loop, and their output
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
    host_s = _loop_s(executor, config)
    runner = StepRunner(executor, config, max_rounds=_MAX_ROUNDS)
    fitted, held_out = (
        [structs.replace(sample, host_s=host_s) for sample in runner.measure(shapes, budget_s)]
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


def _loop_s(executor: Executor, config: SchedulerConfig) -> float:
    """Return the seconds of the loop around the executor: the median of steps that serve a few
    requests."""
    core = EngineCore(Scheduler(structs.replace(config, enable_prefix_caching=False)), executor)
    tokens = min(_LOOP_TOKENS, config.max_sequence_tokens - 2)
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    for number in range(min(_LOOP_ROWS, config.max_num_seqs)):
        core.add(Request(request_id=str(number), prompt=(number,), params=params, seed=0))
    loops_s = []
    while core.busy:
        times = core.step().times
        if times is not None:
            loops_s.append(times.total_s - times.draft_s - times.target_s)
    executor.reset()
    return max(median(loops_s), 0.0)
