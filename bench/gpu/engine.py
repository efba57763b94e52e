"""The engine on random weights of real shapes: tokens a second and the time of a step, against what
reading weights and KV would take.

Acceptance is scripted: after the verdict, which costs what it costs, the number of accepted drafts
is drawn anew on the device, each with a chance of `ACCEPTANCE`. The text is nonsense either way.
"""

from __future__ import annotations

import functools
import gc
import itertools
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from bench.gpu.ceilings import load_ceilings
from bench.gpu.cells import Absent, Cell, Row
from bench.gpu.limits import BATCHES, DRAFTS, MODELS, Cost, Query, step_cost
from bench.gpu.world import Bench
from bench.peers.transformers_peer import continuous
from cbatch.core.request.request import SamplingParams
from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.scheduler.scheduler import Scheduler
from cbatch.core.speculation.cost_profile import CostProfile
from cbatch.engine.engine import Engine
from cbatch.engine.options import parse_lookahead
from cbatch.engine.step_profile import profile_costs
from cbatch.runtime.gpu import Decoder, GpuExecutor, target_pass
from cbatch.runtime.model.config import parse_config
from cbatch.runtime.model.weight_files import WeightSource
from cbatch.text.outputs import Output
from sim.cost.roofline import ModelShape

OURS, PEER = "cbatch", "transformers, continuous batching"
LOOKAHEADS = ("off", "fixed:4", "goodput")
ACCEPTANCE = 0.7
_PAGE_TOKENS = 64
_MOST_DRAFTS = 8
_PROFILE_S = 2.0
_TOKENS_A_STEP = 4  # of a sequence, more than its drafts' chances give on average
_WEIGHT_STD = 0.02
_SHORT_TOKENS, _LONG_TOKENS = 16, 80  # of output, of the peer


class EngineSizes(NamedTuple):
    batches: tuple[int, ...]
    prompt_tokens: int
    warm_steps: int
    window_steps: int
    windows: int
    budget_tokens: int

    @property
    def most_tokens(self) -> int:
        """Of a sequence that is first to decode: while others are at their prompts, in the warm-up,
        and in the windows."""
        free_tokens = max(self.budget_tokens - max(self.batches) * (1 + _MOST_DRAFTS), 1)
        prompts = -(-max(self.batches) * self.prompt_tokens // free_tokens)
        steps = prompts + self.warm_steps + self.windows * self.window_steps
        return self.prompt_tokens + _TOKENS_A_STEP * (steps + 4)

    @property
    def num_blocks(self) -> int:
        return max(self.batches) * -(-(self.most_tokens + _MOST_DRAFTS + 1) // _PAGE_TOKENS)


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
FULL = EngineSizes(BATCHES, 512, warm_steps=12, window_steps=10, windows=5, budget_tokens=8192)
TINY = EngineSizes((2,), 48, warm_steps=1, window_steps=2, windows=1, budget_tokens=32)


def sizes_of(bench: Bench) -> EngineSizes:
    return FULL if bench.full else TINY


def cells(bench: Bench) -> Iterator[Cell]:
    """Model by model, since one is in memory at a time; the batch that has a target first, the peer
    last."""
    models, batches = MODELS if bench.full else ("tiny",), sizes_of(bench).batches
    for system, run, lookaheads in ((OURS, measure, LOOKAHEADS), (PEER, _peer, ("off",))):
        for each in itertools.product(models, batches, lookaheads):
            labels = dict(zip(("model", "batch", "lookahead"), each, strict=True))
            key = "{} batch {} {} {}".format(*each, system)
            cell_run = functools.partial(run, bench, *each)
            yield Cell(key, labels | {"implementation": system}, cell_run)


def shape_of(bench: Bench, model: str) -> tuple[ModelShape, ModelShape]:
    """Of the target and of its draft."""
    if not bench.full:
        return TINY_MODEL, structs.replace(TINY_MODEL, num_hidden_layers=1)
    return MODELS[model], DRAFTS[model]


# --- limits ---------------------------------------------------------------------------------------


def speculative_cost(
    shape: ModelShape, draft: ModelShape, batch: int, context_tokens: int, drafted: float
) -> Cost:
    """A step of `batch` rows that verifies `drafted` tokens a row on average: one pass of the
    target, and as many of the draft as the deepest row needs, each over all rows."""
    total = round(drafted * batch)
    lens = [1 + total // batch + (row < total % batch) for row in range(batch)]
    queries = [Query(n, context_tokens + n - 1) for n in lens]
    cost = step_cost(queries, shape, logits_rows=batch + total)
    for depth in range(max(lens) - 1):
        rows = [Query(1, context_tokens + depth)] * batch
        cost = cost.plus(step_cost(rows, draft, logits_rows=batch))
    return cost


# --- ours -----------------------------------------------------------------------------------------


class DeviceWeights(WeightSource):
    """Random weights, drawn where they are used: eight billion numbers are quickly drawn there."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.generator = torch.Generator(device).manual_seed(0)
        self.dtype = dtype

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        device = self.generator.device
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=self.dtype, device=device)
        drawn = torch.empty(shape, dtype=self.dtype, device=device)
        return drawn.normal_(0.0, _WEIGHT_STD, generator=self.generator)


def config_of(model: str, shape: ModelShape) -> dict[str, Any]:
    """The fields of a config.json."""
    family = "qwen3" if model.startswith("qwen3") else "llama"
    return structs.asdict(shape) | {
        "architectures": [f"{family.capitalize()}ForCausalLM"],
        "model_type": family,
        "head_dim": shape.head_size,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "eos_token_id": shape.vocab_size - 1,
    }


class _Loaded:
    """The executor of one model at a time; the one before is let go first."""

    def __init__(self) -> None:
        self.model: str | None = None
        self.executor: GpuExecutor | None = None
        self.profile: CostProfile | None = None  # what its steps cost, once `goodput` asked

    def take(self, bench: Bench, model: str) -> GpuExecutor:
        if self.model != model or self.executor is None:
            self.drop(bench)
            self.executor, self.model = _load(bench, model), model
        self.executor.reset()
        return self.executor

    def drop(self, bench: Bench) -> None:
        self.executor = self.profile = None
        gc.collect()
        if bench.full:
            torch.cuda.empty_cache()


_loaded = _Loaded()


def _load(bench: Bench, model: str) -> GpuExecutor:
    dtype, sizes = torch.bfloat16 if bench.full else torch.float32, sizes_of(bench)
    source = DeviceWeights(bench.device, dtype)
    target, draft = (
        Decoder(parse_config(config_of(model, shape), Path(model)), source, dtype, bench.device)
        for shape in shape_of(bench, model)
    )
    executor = GpuExecutor(
        target,
        num_blocks=sizes.num_blocks,
        block_size_tokens=_PAGE_TOKENS,
        max_slots=max(sizes.batches),
        max_sequence_tokens=sizes.most_tokens + _MOST_DRAFTS + 1,
        step_budget_tokens=sizes.budget_tokens,
        draft=draft,
        max_drafts=_MOST_DRAFTS,
    )
    executor.capture()  # else the first step of each shape would be priced with it
    return executor


@functools.cache
def script_verdicts() -> None:
    """From here on each draft is accepted with a chance of `ACCEPTANCE`, whatever it is. Graphs
    hold the verdict that was there at their capture: this comes before the first."""
    decide = target_pass.verify_logits

    def scripted_verdict(batch: Any, *rest: Any, **more: Any) -> Any:
        decision = decide(batch, *rest, **more)
        counts = batch.drafts.counts
        lucky = torch.rand(len(counts), _MOST_DRAFTS, device=counts.device) < ACCEPTANCE
        run = lucky.to(torch.int32).cumprod(dim=1).sum(dim=1).to(torch.int32)
        decision.num_accepted.copy_(torch.minimum(counts, run))
        return decision

    target_pass.verify_logits = scripted_verdict


def _engine(bench: Bench, model: str, lookahead: str) -> Engine:
    script_verdicts()
    executor = _loaded.take(bench, model)
    sizes, shape = sizes_of(bench), shape_of(bench, model)[0]
    config = SchedulerConfig(
        num_blocks=sizes.num_blocks,
        block_size_tokens=_PAGE_TOKENS,
        max_slots=max(sizes.batches),
        max_model_tokens=sizes.most_tokens,
        step_budget_tokens=sizes.budget_tokens,
        vocab_size=shape.vocab_size,
        eos_ids=(shape.vocab_size - 1,),
        prefix_cache=False,
        draft_context_tokens=8192,
        lookahead=parse_lookahead(lookahead),
    )
    if lookahead == "goodput":
        if _loaded.profile is None:
            _loaded.profile = profile_costs(executor, config, budget_s=_PROFILE_S)
        config = structs.replace(config, cost_profile=_loaded.profile)
    return Engine(Scheduler(config), executor, depth=1, seed=0, drafters=("model",))


def measure(bench: Bench, model: str, batch: int, lookahead: str) -> Row:
    """Windows of decoding steps, all sequences past their prompt."""
    shape, draft = shape_of(bench, model)
    if not bench.world.runs:
        return _figures(bench, [], shape, draft, batch)
    engine = _engine(bench, model, lookahead)
    sizes, rng = sizes_of(bench), np.random.default_rng(0)
    params = SamplingParams(
        temperature=0.0, max_tokens=sizes.most_tokens - sizes.prompt_tokens, ignore_eos=True
    )
    for _ in range(batch):
        prompt = rng.integers(1, shape.vocab_size - 1, sizes.prompt_tokens).tolist()
        engine.add(prompt, params)
    decoding: set[str] = set()
    while len(decoding) < batch:
        decoding |= {output.request_id for output in _advance(engine)}
    for _ in range(sizes.warm_steps):
        _advance(engine)
    windows = [_window(bench, engine, batch) for _ in range(sizes.windows)]
    if engine.scheduler.num_running != batch:
        raise RuntimeError(f"{engine.scheduler.num_running} of {batch} sequences were running")
    return _figures(bench, windows, shape, draft, batch)


def _advance(engine: Engine) -> list[Output]:
    """One step. Raises RuntimeError when a sequence has ended: windows are of full batches."""
    outputs = engine.step()
    for output in outputs:
        if output.finished is not None:
            raise RuntimeError(f"a sequence ended early: {output.finished.finish_reason}")
    return outputs


class TimedWindow(NamedTuple):
    seconds: float
    steps: int
    tokens: int
    drafted: int
    context_tokens: float  # of a sequence, on average over the window


def _window(bench: Bench, engine: Engine, batch: int) -> TimedWindow:
    sizes, stats = sizes_of(bench), engine.scheduler.stats
    before = stats.steps, stats.emitted_tokens, stats.drafted_tokens
    started_s = time.perf_counter()
    while stats.steps < before[0] + sizes.window_steps:
        _advance(engine)
    seconds = time.perf_counter() - started_s
    tokens = stats.emitted_tokens - before[1]
    context = sizes.prompt_tokens + (before[1] + tokens / 2) / batch
    drafted = stats.drafted_tokens - before[2]
    return TimedWindow(seconds, stats.steps - before[0], tokens, drafted, context)


def _figures(
    bench: Bench, windows: list[TimedWindow], shape: ModelShape, draft: ModelShape, batch: int
) -> Row:
    sizes = sizes_of(bench)
    context, drafted = float(sizes.prompt_tokens), 0.0
    if windows:
        context = statistics.fmean(w.context_tokens for w in windows)
        drafted = statistics.fmean(w.drafted / w.steps / batch for w in windows)
    cost = speculative_cost(shape, draft, batch, round(context), drafted)
    row: Row = {
        "mbytes_a_step": cost.num_bytes / 1e6,
        "gflop_a_step": cost.flop / 1e9,
        "context_tokens": context,
        "drafts_a_row": drafted if windows else None,
        **dict.fromkeys(MEASURED),
    }
    if not windows or not bench.full:
        return row | {"status": "unmeasured"}
    steps = sorted(w.seconds / w.steps for w in windows)
    row |= {
        "step_ms": statistics.median(steps) * 1e3,
        "step_ms_low": steps[0] * 1e3,
        "step_ms_high": steps[-1] * 1e3,
        "tokens_per_s": statistics.median(w.tokens / w.seconds for w in windows),
        "tokens_a_row": statistics.fmean(w.tokens / w.steps / batch for w in windows),
    }
    ceilings = load_ceilings(bench.out)
    if ceilings is not None:
        row["limit_ms"] = cost.limit_s(ceilings) * 1e3
        row["over_limit"] = row["step_ms"] / row["limit_ms"]
    return row


MEASURED = (
    "step_ms", "step_ms_low", "step_ms_high", "limit_ms", "over_limit", "tokens_per_s",
    "tokens_a_row",
)  # fmt: skip


def _peer(bench: Bench, model: str, batch: int, _: str) -> Row:
    """The same shape in transformers: a step is what more tokens cost, so that prompts cancel."""
    shape, draft = shape_of(bench, model)
    if not bench.full:
        return _figures(bench, [], shape, draft, batch)
    _loaded.drop(bench)
    rng, prompt_tokens = np.random.default_rng(0), FULL.prompt_tokens
    prompts = [rng.integers(1, shape.vocab_size - 1, prompt_tokens).tolist() for _ in range(batch)]
    try:
        system = continuous(_random_peer(model), most=batch, tokens=prompt_tokens + _LONG_TOKENS)
    except ImportError as error:
        raise Absent(str(error)) from None
    runs = [system.run(prompts, tokens) for tokens in (_SHORT_TOKENS, _SHORT_TOKENS, _LONG_TOKENS)]
    if [run.tokens for run in runs[1:]] != [batch * _SHORT_TOKENS, batch * _LONG_TOKENS]:
        raise RuntimeError("not every token came")
    step_s = (runs[2].seconds - runs[1].seconds) / (_LONG_TOKENS - _SHORT_TOKENS)
    context_tokens = prompt_tokens + (_SHORT_TOKENS + _LONG_TOKENS) // 2
    window = TimedWindow(step_s, 1, batch, 0, context_tokens)
    return _figures(bench, [window], shape, draft, batch)


@functools.lru_cache(maxsize=1)
def _random_peer(model: str) -> Any:
    """Of that shape, in bf16 on the GPU."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = config_of(model, MODELS[model])
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
