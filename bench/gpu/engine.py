"""The engine on random weights of real shapes: its start, the time of a step and tokens a second,
compared with the time to read weights and KV.

Acceptance is simulated. The verification kernels run at their usual cost. Then the number of
accepted drafts is drawn on the device: each draft is accepted with probability `ACCEPTANCE`.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from bench.gpu import limits
from bench.gpu.ceilings import load_ceilings
from bench.gpu.cells import Cell, NotAvailable, Row
from bench.gpu.environment import Bench
from bench.gpu.limits import BATCHES, MODEL, PROMPT_TOKENS, SAMPLING, Query, step_cost
from bench.gpu.timing import STEP_KERNELS, STEPS, step_kernels
from cbatch.core.prices.cost_profile import CostProfile
from cbatch.core.request.request import SamplingParams
from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.scheduler.scheduler import Scheduler
from cbatch.core.speculation.build import parse_lookahead
from cbatch.engine.core import EngineCore
from cbatch.engine.engine import Engine
from cbatch.engine.prices.startup import profile_costs
from cbatch.runtime.gpu import target_pass
from cbatch.runtime.gpu.decoder import Decoder
from cbatch.runtime.gpu.executor import GpuExecutor
from cbatch.runtime.model.config_json import parse_config
from cbatch.runtime.model.weight_files import WeightSource
from cbatch.text.outputs import Output

CBATCH = "cbatch"
ACCEPTANCE = 0.7
# (lookahead, sampling) in order of measurement; the time limit cuts off the end.
_SETTINGS = (
    ("off", "greedy"), ("off", "top_p"), ("fixed:4", "greedy"), ("adaptive", "greedy"),
    ("fixed:4", "top_p"), ("adaptive", "top_p"),
)  # fmt: skip
# Batch sizes for which the kernels of a step are listed.
_PROFILED = {("off", "greedy"): (64, 1), ("off", "top_p"): (64, 1), ("fixed:4", "greedy"): (64,)}
_PROFILED_STEPS = 6
_PAGE_TOKENS = 64  # the default on a GPU
_MAX_DRAFTS = 8
_PROFILE_S = 2.0
_TOKENS_A_STEP = 4  # upper estimate of tokens per sequence and step, above the mean with drafts
_WEIGHT_STD = 0.02
_WARM_STEPS, _WINDOW_STEPS, _WINDOWS = 12, 10, 5
_BUDGET_TOKENS = 8192  # of a step
_DRAFT_LAYERS = 2
_SLOTS = max(BATCHES)
# The first sequence decodes while other prompts are computed, in the warm-up and in the windows.
_PROMPT_STEPS = -(-_SLOTS * PROMPT_TOKENS // (_BUDGET_TOKENS - _SLOTS * (1 + _MAX_DRAFTS)))
_NEW_TOKENS = _TOKENS_A_STEP * (_PROMPT_STEPS + _WARM_STEPS + _WINDOWS * _WINDOW_STEPS + 4)
_MAX_TOKENS = PROMPT_TOKENS + _NEW_TOKENS
_NUM_BLOCKS = _SLOTS * -(-(_MAX_TOKENS + _MAX_DRAFTS + 1) // _PAGE_TOKENS)
_HEADS = ("lm_head.weight", "model.embed_tokens.weight")


class DeviceWeights(WeightSource):
    """Random weights, drawn on the device that uses them, which is fast enough for eight billion
    numbers."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.generator = torch.Generator(device).manual_seed(0)
        self.dtype = dtype

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        device = self.generator.device
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=self.dtype, device=device)
        std = limits.LOGIT_STD / shape[1] ** 0.5 if name in _HEADS else _WEIGHT_STD
        weight = torch.empty(shape, dtype=self.dtype, device=device)
        return weight.normal_(0.0, std, generator=self.generator)


def cells(bench: Bench, model: str = MODEL) -> Iterator[Cell]:
    """Yield the start, then for each setting the steps and their kernels, first without drafts."""
    subject = ModelBench(bench, model)
    labels = {"model": model, "implementation": CBATCH}
    yield Cell("start", labels | {"what": "start"}, subject.start)
    for lookahead, sampling in _SETTINGS:
        for what, function, batches in (
            (STEPS, subject.measure, BATCHES),
            (STEP_KERNELS, subject.profile_step, _PROFILED.get((lookahead, sampling), ())),
        ):
            for batch in batches:
                setting = {"batch": batch, "lookahead": lookahead, "sampling": sampling}
                run = functools.partial(function, **setting)
                key = f"{what}, {lookahead} {sampling} {batch}"
                yield Cell(key, labels | setting | {"what": what}, run)


class ModelBench:
    """One model and a draft model with its first layers, with an engine for each setting."""

    def __init__(self, bench: Bench, model: str) -> None:
        self.bench, self.model, self.shape = bench, model, limits.MODELS[model]
        self._executor: GpuExecutor | None = None
        self._prices: CostProfile | None = None  # step prices, measured once for `adaptive`

    def start(self) -> Row:
        """Load weights, compile and capture graphs. Return the seconds."""
        simulate_acceptance()
        began_s, device, dtype = time.perf_counter(), self.bench.device, torch.bfloat16
        source = DeviceWeights(device, dtype)
        draft_shape = structs.replace(self.shape, num_hidden_layers=_DRAFT_LAYERS)
        configs = (limits.config_of(shape) for shape in (self.shape, draft_shape))
        target, draft = (
            Decoder(parse_config(config, Path(self.model)), source, dtype, device)
            for config in configs
        )
        executor = GpuExecutor(
            target,
            num_blocks=_NUM_BLOCKS,
            block_size=_PAGE_TOKENS,
            max_num_seqs=_SLOTS,
            max_sequence_tokens=_MAX_TOKENS + _MAX_DRAFTS + 1,
            max_num_batched_tokens=_BUDGET_TOKENS,
            draft=draft,
            max_drafts=_MAX_DRAFTS,
        )
        executor.capture()  # otherwise the first step of each shape would include its capture
        self._executor = executor
        seconds = time.perf_counter() - began_s
        return {"seconds": seconds, "device_mib": torch.cuda.max_memory_allocated() >> 20}

    def measure(self, batch: int, lookahead: str, sampling: str) -> Row:
        """Time windows of decoding steps."""
        engine = self._decoding(batch, lookahead, sampling)
        windows = [_window(engine, batch) for _ in range(_WINDOWS)]
        if engine.scheduler.num_running != batch:
            raise RuntimeError(f"{engine.scheduler.num_running} of {batch} sequences ran")
        context_tokens = statistics.fmean(w.context_tokens for w in windows)
        steps = sorted(w.seconds / w.steps * 1e3 for w in windows)
        row: Row = {
            "tokens_a_row": statistics.fmean(w.tokens / w.steps / batch for w in windows),
            "drafts_a_row": statistics.fmean(w.drafts / w.steps / batch for w in windows),
            "context_tokens": context_tokens,
            "step_ms": statistics.median(steps),
            "step_ms_low": steps[0],
            "step_ms_high": steps[-1],
            "tokens_per_s": statistics.median(w.tokens / w.seconds for w in windows),
        }
        ceilings = load_ceilings(self.bench)
        if lookahead == "off" and ceilings is not None:
            queries = [Query(1, round(context_tokens))] * batch
            cost = step_cost(queries, self.shape, logits_rows=batch)
            row |= {"mbytes": cost.num_bytes / 1e6, "limit_ms": cost.limit_s(ceilings) * 1e3}
            row["over_limit"] = row["step_ms"] / row["limit_ms"]
        return row

    def profile_step(self, batch: int, lookahead: str, sampling: str) -> Row:
        return step_kernels(self._decoding(batch, lookahead, sampling).step, _PROFILED_STEPS)

    def _engine(self, lookahead: str) -> Engine:
        if self._executor is None:
            raise NotAvailable("the engine did not start")
        self._executor.reset()
        config = SchedulerConfig(
            num_blocks=_NUM_BLOCKS,
            block_size=_PAGE_TOKENS,
            max_num_seqs=_SLOTS,
            max_model_len=_MAX_TOKENS,
            max_num_batched_tokens=_BUDGET_TOKENS,
            vocab_size=self.shape.vocab_size,
            eos_ids=(self.shape.vocab_size - 1,),
            enable_prefix_caching=False,
            draft_context_tokens=8192,
            lookahead=parse_lookahead(lookahead),
        )
        if lookahead == "adaptive":
            if self._prices is None:
                self._prices = profile_costs(self._executor, config, budget_s=_PROFILE_S)
            config = structs.replace(config, cost_profile=self._prices)
        core = EngineCore(Scheduler(config), self._executor, depth=1, drafters=("model",))
        return Engine(core, seed=0)

    def _decoding(self, batch: int, lookahead: str, sampling: str) -> Engine:
        """Return a warm engine in which all sequences decode."""
        engine, rng = self._engine(lookahead), np.random.default_rng(0)
        params = SamplingParams(max_tokens=_NEW_TOKENS, ignore_eos=True, **SAMPLING[sampling])
        for _ in range(batch):
            prompt = rng.integers(1, self.shape.vocab_size - 1, PROMPT_TOKENS)
            engine.add(prompt.tolist(), params)
        decoding: set[str] = set()
        while len(decoding) < batch:
            decoding |= {output.request_id for output in _advance(engine)}
        for _ in range(_WARM_STEPS):
            _advance(engine)
        return engine


class TimedWindow(NamedTuple):
    seconds: float
    steps: int
    tokens: int
    drafts: int
    context_tokens: float  # of a sequence, averaged over the window


def _window(engine: Engine, batch: int) -> TimedWindow:
    stats = engine.scheduler.stats
    steps, tokens, drafts = stats.steps, stats.emitted_tokens, stats.drafted_tokens
    started_s = time.perf_counter()
    while stats.steps < steps + _WINDOW_STEPS:
        _advance(engine)
    seconds, emitted = time.perf_counter() - started_s, stats.emitted_tokens - tokens
    context = PROMPT_TOKENS + (tokens + emitted / 2) / batch
    return TimedWindow(
        seconds, stats.steps - steps, emitted, stats.drafted_tokens - drafts, context
    )


def _advance(engine: Engine) -> list[Output]:
    """Run one step. Raises RuntimeError if a sequence ends, since windows need full batches."""
    outputs = engine.step()
    for output in outputs:
        if output.finished is not None:
            raise RuntimeError(f"a sequence ended early: {output.finished.finish_reason}")
    return outputs


@functools.cache
def simulate_acceptance() -> None:
    """Accept each draft with probability `ACCEPTANCE` from now on. CUDA graphs keep the
    verification function of their capture, so call this before the first capture."""
    verify = target_pass.verify_logits

    def verify_with_acceptance(batch: Any, *rest: Any, **more: Any) -> Any:
        decision = verify(batch, *rest, **more)
        counts = batch.drafts.counts
        drawn = torch.rand(len(counts), _MAX_DRAFTS, device=counts.device) < ACCEPTANCE
        length = drawn.to(torch.int32).cumprod(dim=1).sum(dim=1).to(torch.int32)
        decision.num_accepted.copy_(torch.minimum(counts, length))
        return decision

    target_pass.verify_logits = verify_with_acceptance
