"""Engines on random weights of real shapes, cbatch and vLLM: their start, the time of a step and
tokens a second, compared with the time to read weights and KV.

cbatch's acceptance is simulated. The verification kernels run at their usual cost. Then the number
of accepted drafts is drawn on the device: each draft is accepted with probability `ACCEPTANCE`.
vLLM's time of a step is the time of 128 more tokens per sequence divided by 128, which cancels the
prompts. Both run in the calling process: otherwise their kernels could not be listed.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec import structs, to_builtins
from torch import Tensor

from bench.gpu.cells import Bench, Cell, NotAvailable, Row
from bench.gpu.kernels import CBATCH, VLLM, unpack
from bench.gpu.timing import (
    BATCHES,
    LOGIT_STD,
    MODEL,
    MODELS,
    PROMPT_TOKENS,
    SAMPLING,
    decode_cost,
    load_ceilings,
    step_kernels,
)
from bench.peers.engines import Vllm
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
from sim.cost.shapes import ModelShape

_ROOT = Path(__file__).parents[2]
ACCEPTANCE = 0.7
# (lookahead, sampling) in order of measurement; the time limit cuts off the end.
_SETTINGS = (
    ("off", "greedy"), ("off", "top_p"), ("fixed:4", "greedy"), ("adaptive", "greedy"),
    ("fixed:4", "top_p"), ("adaptive", "top_p"),
)  # fmt: skip
# Batch sizes for which the kernels of a step are listed.
_PROFILED = {("off", "greedy"): (64, 1), ("off", "top_p"): (64, 1), ("fixed:4", "greedy"): (64,)}
_PROFILED_STEPS = 6
_WARM_STEPS, _WINDOW_STEPS, _WINDOWS = 12, 10, 5
_PROFILE_S = 2.0
_WEIGHT_STD = 0.02
_HEADS = ("lm_head.weight", "model.embed_tokens.weight")
_DRAFT_LAYERS = 2
_SIZES = {  # of cbatch's pool and steps
    "num_blocks": max(BATCHES) * 16,
    "block_size": 64,  # the default on a GPU
    "max_num_seqs": max(BATCHES),
    "max_num_batched_tokens": 8192,
}
_MAX_DRAFTS = 8
_CONTEXT_TOKENS = 16 * 64 - _MAX_DRAFTS - 1  # enough for the warm-up and all windows
_SHORT_TOKENS, _LONG_TOKENS = 8, 136  # output tokens of vLLM's two timed runs
_VLLM_ENVIRONMENT = {
    "PYTHONSAFEPATH": "1",  # its processes do not import from the checkout
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def cells(bench: Bench, model: str = MODEL) -> Iterator[Cell]:
    """Yield the start, then for each setting the steps and their kernels, first without drafts."""
    return _cells(CbatchBench(bench, model), model, CBATCH, _SETTINGS)


def vllm_cells(bench: Bench) -> Iterator[Cell]:
    return _cells(VllmBench(bench), MODEL, VLLM, _SETTINGS[: len(SAMPLING)])


def _cells(subject: Any, model: str, implementation: str, settings: Any) -> Iterator[Cell]:
    labels = {"model": model, "implementation": implementation}
    yield Cell("start", labels | {"what": "start"}, subject.start)
    for lookahead, sampling in settings:
        for what, function, batches in (
            ("steps", subject.measure, BATCHES),
            ("kernels of a step", subject.profile, _PROFILED.get((lookahead, sampling), ())),
        ):
            for batch in batches:
                setting = {"batch": batch, "lookahead": lookahead, "sampling": sampling}
                run = functools.partial(function, **setting)
                key = f"{what}, {lookahead} {sampling} {batch}"
                yield Cell(key, labels | setting | {"what": what}, run)


def config_of(shape: ModelShape) -> dict[str, Any]:
    return to_builtins(shape) | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "head_dim": shape.head_size,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": shape.vocab_size - 1,
    }


def _prompts(shape: ModelShape, count: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return rng.integers(1, shape.vocab_size - 1, (count, PROMPT_TOKENS)).tolist()


# -- cbatch


class DeviceWeights(WeightSource):
    """Random weights, drawn on the device that uses them, which is fast enough for eight billion
    numbers."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.generator, self.dtype = torch.Generator(device).manual_seed(0), dtype

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        weight = torch.ones(shape, dtype=self.dtype, device=self.generator.device)
        if name.endswith("norm.weight"):
            return weight
        std = LOGIT_STD / shape[1] ** 0.5 if name in _HEADS else _WEIGHT_STD
        return weight.normal_(0.0, std, generator=self.generator)


class CbatchBench:
    """One model and a draft model with its first layers, with an engine for each setting."""

    def __init__(self, bench: Bench, model: str) -> None:
        self.bench, self.model, self.shape = bench, model, MODELS[model]
        self._executor: GpuExecutor | None = None
        self._prices: CostProfile | None = None  # step prices, measured once for `adaptive`

    def start(self) -> Row:
        """Load weights, compile and capture graphs. Return the seconds."""
        simulate_acceptance()
        began_s, device, dtype = time.perf_counter(), self.bench.device, torch.bfloat16
        source = DeviceWeights(device, dtype)
        draft_shape = structs.replace(self.shape, num_hidden_layers=_DRAFT_LAYERS)
        target, draft = (
            Decoder(parse_config(config_of(shape), Path(self.model)), source, dtype, device)
            for shape in (self.shape, draft_shape)
        )
        tokens = _CONTEXT_TOKENS + _MAX_DRAFTS + 1
        drafts: dict[str, Any] = {"draft": draft, "max_drafts": _MAX_DRAFTS}
        executor = GpuExecutor(target, max_sequence_tokens=tokens, **_SIZES, **drafts)
        executor.capture()  # otherwise the first step of each shape would include its capture
        self._executor = executor
        seconds = time.perf_counter() - began_s
        return {"seconds": seconds, "device_mib": torch.cuda.max_memory_allocated() >> 20}

    def measure(self, batch: int, lookahead: str, sampling: str) -> Row:
        """Time windows of decoding steps, each after the first tokens of all sequences."""
        engine = self._decoding(batch, lookahead, sampling)
        stats, samples = engine.scheduler.stats, []
        for _ in range(1 + _WINDOWS):
            while samples and stats.steps < samples[-1][1] + _WINDOW_STEPS:
                _advance(engine)
            counts = stats.steps, stats.emitted_tokens, stats.drafted_tokens
            samples.append((time.perf_counter(), *counts))
        seconds, steps, tokens, drafts = np.diff(np.array(samples), axis=0).T
        if engine.scheduler.num_running != batch:
            raise RuntimeError(f"{engine.scheduler.num_running} of {batch} sequences ran")
        context_tokens = PROMPT_TOKENS + (samples[0][2] + samples[-1][2]) / 2 / batch
        step_ms = seconds / steps * 1e3
        row: Row = {
            "tokens_a_row": float((tokens / steps).mean() / batch),
            "drafts_a_row": float((drafts / steps).mean() / batch),
            "context_tokens": context_tokens,
            "step_ms": statistics.median(step_ms.tolist()),
            "step_ms_low": float(step_ms.min()),
            "step_ms_high": float(step_ms.max()),
            "tokens_per_s": statistics.median((tokens / seconds).tolist()),
        }
        ceilings = load_ceilings(self.bench)
        if lookahead == "off" and ceilings is not None:
            cost = decode_cost(self.shape, batch, round(context_tokens))
            row |= {"mbytes": cost.num_bytes / 1e6, "limit_ms": cost.limit(ceilings)[0] * 1e3}
            row["over_limit"] = row["step_ms"] / row["limit_ms"]
        return row

    def profile(self, batch: int, lookahead: str, sampling: str) -> Row:
        return step_kernels(self._decoding(batch, lookahead, sampling).step, _PROFILED_STEPS)

    def _decoding(self, batch: int, lookahead: str, sampling: str) -> Engine:
        if self._executor is None:
            raise NotAvailable("the engine did not start")
        self._executor.reset()
        config = SchedulerConfig(
            **_SIZES,
            max_model_len=_CONTEXT_TOKENS,
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
        engine, tokens = Engine(core, seed=0), _CONTEXT_TOKENS - PROMPT_TOKENS
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, **SAMPLING[sampling])
        for prompt in _prompts(self.shape, batch):
            engine.add(prompt, params)
        decoding: set[str] = set()
        while len(decoding) < batch:
            decoding |= {output.request_id for output in _advance(engine)}
        for _ in range(_WARM_STEPS):
            _advance(engine)
        return engine


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


# -- vLLM


class VllmBench:
    def __init__(self, bench: Bench) -> None:
        self.bench, self.shape = bench, MODELS[MODEL]
        self._engine: Vllm | None = None
        self._note = ""

    def start(self) -> Row:
        folder, model = unpack(self.bench), self.bench.out / "model"
        began_s = time.perf_counter()
        # Exclude the checkout: vLLM also imports a package named `triton_kernels`.
        sys.path[:] = [str(folder), *(p for p in sys.path if Path(p or ".").resolve() != _ROOT)]
        os.environ |= _VLLM_ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(sys.path)}
        if importlib.util.find_spec("flashinfer") is None:
            os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
            self._note = "flashinfer is missing: vLLM samples by its own kernels"
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text(json.dumps(config_of(self.shape)))
        self._engine = Vllm(
            str(model),
            load_format="dummy",
            dtype="bfloat16",
            max_model_len=2048,
            max_num_seqs=max(BATCHES),
            gpu_memory_utilization=0.40,
            kv_cache_memory_bytes=13 << 30,
            compilation_config={"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128]},
        )
        try:
            self._engine.llm.apply_model(_set_head_weights)
        except Exception as error:
            self._note += f"; logits are flat: {type(error).__name__}: {error}"[:200]
        seconds = time.perf_counter() - began_s
        return {"version": self._engine.version, "seconds": seconds, "note": self._note}

    def measure(self, batch: int, lookahead: str, sampling: str) -> Row:
        short_s = min(self._seconds(batch, sampling, _SHORT_TOKENS) for _ in range(2))
        more_s = self._seconds(batch, sampling, _LONG_TOKENS) - short_s
        step_s = more_s / (_LONG_TOKENS - _SHORT_TOKENS)
        return {"step_ms": step_s * 1e3, "tokens_per_s": batch / step_s, "note": self._note}

    def profile(self, batch: int, lookahead: str, sampling: str) -> Row:
        engine, prompts = self.engine.llm.llm_engine, _prompts(self.shape, batch)
        requests, params = self.engine.requests(prompts, 64, **SAMPLING[sampling])
        for at, prompt in enumerate(requests):
            engine.add_request(f"{sampling} {batch} {at}", prompt, params)
        decoding: set[str] = set()
        while len(decoding) < batch:
            decoding |= {output.request_id for output in engine.step()}
        row = step_kernels(engine.step, _PROFILED_STEPS)
        while engine.has_unfinished_requests():
            engine.step()
        return row

    @property
    def engine(self) -> Vllm:
        if self._engine is None:
            raise NotAvailable("vLLM did not start")
        return self._engine

    def _seconds(self, batch: int, sampling: str, tokens: int) -> float:
        prompts, began_s = _prompts(self.shape, batch), time.perf_counter()
        outputs, _ = self.engine.run(prompts, tokens, **SAMPLING[sampling])
        seconds = time.perf_counter() - began_s
        if sum(map(len, outputs)) != batch * tokens:
            raise RuntimeError("vLLM generated fewer tokens than requested")
        return seconds


def _set_head_weights(model: Any) -> None:
    """Set the weights of the final norm and of the LM head as `DeviceWeights` does. With vLLM's
    dummy weights, which are tiny, all logits would be nearly equal."""
    model.model.norm.weight.data.fill_(1.0)
    weight = model.lm_head.weight.data
    weight.normal_(0.0, LOGIT_STD / weight.shape[1] ** 0.5)
