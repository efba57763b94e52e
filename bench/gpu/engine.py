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
from bench.gpu.profiled import STEP_KERNELS, STEPS, step_kernels
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
_MOST_DRAFTS = 8
_PROFILE_S = 2.0
_TOKENS_A_STEP = 4  # upper estimate of tokens per sequence and step, above the mean with drafts
_WEIGHT_STD = 0.02
_HEADS = ("lm_head.weight", "model.embed_tokens.weight")


class EngineSizes(NamedTuple):
    batches: tuple[int, ...]
    prompt_tokens: int
    warm_steps: int
    window_steps: int
    windows: int
    budget_tokens: int

    @property
    def max_tokens(self) -> int:
        """Most tokens of a sequence: the first one decodes while the other prompts are computed,
        during the warm-up and during the windows."""
        free_tokens = max(self.budget_tokens - max(self.batches) * (1 + _MOST_DRAFTS), 1)
        prompts = -(-max(self.batches) * self.prompt_tokens // free_tokens)
        steps = prompts + self.warm_steps + self.windows * self.window_steps
        return self.prompt_tokens + _TOKENS_A_STEP * (steps + 4)

    @property
    def num_blocks(self) -> int:
        return max(self.batches) * -(-(self.max_tokens + _MOST_DRAFTS + 1) // _PAGE_TOKENS)


TINY_MODEL = ModelShape(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    vocab_size=128,
    tie_word_embeddings=True,
)
FULL = EngineSizes(
    limits.BATCHES, limits.PROMPT_TOKENS, 12, window_steps=10, windows=5, budget_tokens=8192
)
TINY = EngineSizes((2,), 48, warm_steps=1, window_steps=2, windows=1, budget_tokens=32)


class EngineSetting(NamedTuple):
    """The batch size, lookahead and sampling of a measurement."""

    batch: int
    lookahead: str
    sampling: str


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
    subject, labels = ModelBench(bench, model), {"model": model, "implementation": CBATCH}
    yield Cell("start", labels | {"what": "start"}, subject.start, timed=False)
    for lookahead, sampling in _SETTINGS:
        profiled = _PROFILED.get((lookahead, sampling), ())
        for what, function, batches in (
            (STEPS, subject.measure, subject.sizes.batches),
            (STEP_KERNELS, subject.profile_step, profiled),
        ):
            for setting in (EngineSetting(batch, lookahead, sampling) for batch in batches):
                key = f"{what}, {lookahead} {sampling} {setting.batch}"
                setting_labels = labels | setting._asdict() | {"what": what}
                yield Cell(key, setting_labels, functools.partial(function, setting))


class ModelBench:
    """One model and a draft model with two of its layers, with an engine for each setting."""

    def __init__(self, bench: Bench, model: str) -> None:
        self.bench, self.model = bench, model
        self.sizes = FULL if bench.full else TINY
        self.shape = limits.MODELS[model] if bench.full else TINY_MODEL
        self.draft = structs.replace(self.shape, num_hidden_layers=2 if bench.full else 1)
        self._executor: GpuExecutor | None = None
        self._prices: CostProfile | None = None  # step prices, measured once for `adaptive`

    def start(self) -> Row:
        """Load weights, compile and capture graphs. Return the seconds."""
        if not self.bench.mode.runs:
            return {"status": "unmeasured"}
        simulate_acceptance()
        began_s, device = time.perf_counter(), self.bench.device
        dtype = torch.bfloat16 if self.bench.full else torch.float32
        source = DeviceWeights(device, dtype)
        target, draft = (
            Decoder(parse_config(limits.config_of(shape), Path(self.model)), source, dtype, device)
            for shape in (self.shape, self.draft)
        )
        executor = GpuExecutor(
            target,
            num_blocks=self.sizes.num_blocks,
            block_size=_PAGE_TOKENS,
            max_num_seqs=max(self.sizes.batches),
            max_sequence_tokens=self.sizes.max_tokens + _MOST_DRAFTS + 1,
            max_num_batched_tokens=self.sizes.budget_tokens,
            draft=draft,
            max_drafts=_MOST_DRAFTS,
        )
        executor.capture()  # otherwise the first step of each shape would include its capture
        self._executor = executor
        if not self.bench.full:
            return {"status": "unmeasured"}
        seconds = time.perf_counter() - began_s
        return {"seconds": seconds, "device_mib": torch.cuda.max_memory_allocated() >> 20}

    def measure(self, setting: EngineSetting) -> Row:
        """Time windows of decoding steps."""
        if not self.bench.mode.runs:
            return {"step_ms": None, "status": "unmeasured"}
        engine = self._decoding(setting)
        windows = [self._window(engine, setting) for _ in range(self.sizes.windows)]
        if engine.scheduler.num_running != setting.batch:
            raise RuntimeError(f"{engine.scheduler.num_running} of {setting.batch} sequences ran")
        row: Row = {
            "tokens_a_row": statistics.fmean(w.tokens / w.steps / setting.batch for w in windows),
            "drafts_a_row": statistics.fmean(w.drafts / w.steps / setting.batch for w in windows),
            "context_tokens": statistics.fmean(w.context_tokens for w in windows),
        }
        if not self.bench.full:
            return row | {"step_ms": None, "status": "unmeasured"}
        steps = sorted(w.seconds / w.steps * 1e3 for w in windows)
        row |= {
            "step_ms": statistics.median(steps),
            "step_ms_low": steps[0],
            "step_ms_high": steps[-1],
            "tokens_per_s": statistics.median(w.tokens / w.seconds for w in windows),
        }
        ceilings = load_ceilings(self.bench.out)
        if setting.lookahead == "off" and ceilings is not None:
            queries = [Query(1, round(row["context_tokens"]))] * setting.batch
            cost = step_cost(queries, self.shape, logits_rows=setting.batch)
            row |= {"mbytes": cost.num_bytes / 1e6, "limit_ms": cost.limit_s(ceilings) * 1e3}
            row["over_limit"] = row["step_ms"] / row["limit_ms"]
        return row

    def profile_step(self, setting: EngineSetting) -> Row:
        if not self.bench.full:
            return {"kernels": [], "status": "unmeasured"}
        return {"kernels": step_kernels(self._decoding(setting).step, _PROFILED_STEPS)}

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

    def _decoding(self, setting: EngineSetting) -> Engine:
        """Return a warm engine in which all sequences decode."""
        engine, rng = self._engine(setting.lookahead), np.random.default_rng(0)
        max_tokens = self.sizes.max_tokens - self.sizes.prompt_tokens
        params = SamplingParams(
            max_tokens=max_tokens, ignore_eos=True, **SAMPLING[setting.sampling]
        )
        for _ in range(setting.batch):
            prompt = rng.integers(1, self.shape.vocab_size - 1, self.sizes.prompt_tokens)
            engine.add(prompt.tolist(), params)
        decoding: set[str] = set()
        while len(decoding) < setting.batch:
            decoding |= {output.request_id for output in _advance(engine)}
        for _ in range(self.sizes.warm_steps):
            _advance(engine)
        return engine

    def _window(self, engine: Engine, setting: EngineSetting) -> TimedWindow:
        stats = engine.scheduler.stats
        steps, tokens, drafts = stats.steps, stats.emitted_tokens, stats.drafted_tokens
        started_s = time.perf_counter()
        while stats.steps < steps + self.sizes.window_steps:
            _advance(engine)
        seconds, emitted = time.perf_counter() - started_s, stats.emitted_tokens - tokens
        context = self.sizes.prompt_tokens + (tokens + emitted / 2) / setting.batch
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
        drawn = torch.rand(len(counts), _MOST_DRAFTS, device=counts.device) < ACCEPTANCE
        length = drawn.to(torch.int32).cumprod(dim=1).sum(dim=1).to(torch.int32)
        decision.num_accepted.copy_(torch.minimum(counts, length))
        return decision

    target_pass.verify_logits = verify_with_acceptance
