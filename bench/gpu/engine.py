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
from bench.gpu.limits import MODEL, SAMPLING, Query, step_cost
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
from sim.cost.roofline import ModelShape

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
_HEADS = ("lm_head.weight", "model.embed_tokens.weight")


class EngineSizes(NamedTuple):
    batches: tuple[int, ...] = limits.BATCHES
    prompt_tokens: int = limits.PROMPT_TOKENS
    warm_steps: int = 12
    window_steps: int = 10
    windows: int = 5
    budget_tokens: int = 8192
    draft_layers: int = 2
    dtype: torch.dtype = torch.bfloat16

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest sequence: it decodes while the other prompts are computed, during
        the warm-up and during the windows."""
        free_tokens = max(self.budget_tokens - max(self.batches) * (1 + _MAX_DRAFTS), 1)
        prompts = -(-max(self.batches) * self.prompt_tokens // free_tokens)
        steps = prompts + self.warm_steps + self.windows * self.window_steps
        return self.prompt_tokens + _TOKENS_A_STEP * (steps + 4)

    @property
    def num_blocks(self) -> int:
        return max(self.batches) * -(-(self.max_tokens + _MAX_DRAFTS + 1) // _PAGE_TOKENS)


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
    return ModelBench(bench, model, limits.MODELS[model]).cells()


class ModelBench:
    """One model and a draft model with its first layers, with an engine for each setting."""

    def __init__(
        self, bench: Bench, model: str, shape: ModelShape, sizes: EngineSizes | None = None
    ) -> None:
        self.bench, self.model, self.shape = bench, model, shape
        self.sizes = sizes or EngineSizes()
        self._executor: GpuExecutor | None = None
        self._prices: CostProfile | None = None  # step prices, measured once for `adaptive`

    def cells(self) -> Iterator[Cell]:
        """Yield the start, then for each setting the steps and their kernels, first without
        drafts."""
        labels = {"model": self.model, "implementation": CBATCH}
        yield Cell("start", labels | {"what": "start"}, self.start)
        for lookahead, sampling in _SETTINGS:
            for what, function, batches in (
                (STEPS, self.measure, self.sizes.batches),
                (STEP_KERNELS, self.profile_step, _PROFILED.get((lookahead, sampling), ())),
            ):
                for batch in batches:
                    setting = {"batch": batch, "lookahead": lookahead, "sampling": sampling}
                    run = functools.partial(function, **setting)
                    key = f"{what}, {lookahead} {sampling} {batch}"
                    yield Cell(key, labels | setting | {"what": what}, run)

    def start(self) -> Row:
        """Load weights, compile and capture graphs. Return the seconds."""
        if not self.bench.full and self.sizes == EngineSizes():
            raise NotAvailable("no GPU")
        simulate_acceptance()
        began_s, device, sizes = time.perf_counter(), self.bench.device, self.sizes
        source = DeviceWeights(device, sizes.dtype)
        draft_shape = structs.replace(self.shape, num_hidden_layers=sizes.draft_layers)
        configs = (limits.config_of(shape) for shape in (self.shape, draft_shape))
        target, draft = (
            Decoder(parse_config(config, Path(self.model)), source, sizes.dtype, device)
            for config in configs
        )
        executor = GpuExecutor(
            target,
            num_blocks=sizes.num_blocks,
            block_size=_PAGE_TOKENS,
            max_num_seqs=max(sizes.batches),
            max_sequence_tokens=sizes.max_tokens + _MAX_DRAFTS + 1,
            max_num_batched_tokens=sizes.budget_tokens,
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
        windows = [self._window(engine, batch) for _ in range(self.sizes.windows)]
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
            num_blocks=self.sizes.num_blocks,
            block_size=_PAGE_TOKENS,
            max_num_seqs=max(self.sizes.batches),
            max_model_len=self.sizes.max_tokens,
            max_num_batched_tokens=self.sizes.budget_tokens,
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
        max_tokens = self.sizes.max_tokens - self.sizes.prompt_tokens
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **SAMPLING[sampling])
        for _ in range(batch):
            prompt = rng.integers(1, self.shape.vocab_size - 1, self.sizes.prompt_tokens)
            engine.add(prompt.tolist(), params)
        decoding: set[str] = set()
        while len(decoding) < batch:
            decoding |= {output.request_id for output in _advance(engine)}
        for _ in range(self.sizes.warm_steps):
            _advance(engine)
        return engine

    def _window(self, engine: Engine, batch: int) -> TimedWindow:
        stats = engine.scheduler.stats
        steps, tokens, drafts = stats.steps, stats.emitted_tokens, stats.drafted_tokens
        started_s = time.perf_counter()
        while stats.steps < steps + self.sizes.window_steps:
            _advance(engine)
        seconds, emitted = time.perf_counter() - started_s, stats.emitted_tokens - tokens
        context = self.sizes.prompt_tokens + (tokens + emitted / 2) / batch
        drafted = stats.drafted_tokens - drafts
        return TimedWindow(seconds, stats.steps - steps, emitted, drafted, context)


class TimedWindow(NamedTuple):
    seconds: float
    steps: int
    tokens: int
    drafts: int
    context_tokens: float  # of a sequence, averaged over the window


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
