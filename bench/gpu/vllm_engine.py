"""vLLM's whole engine on the same shape with random weights, in a process of its own.

The time of a step is the time of 128 more tokens
per sequence divided by 128, which cancels the prompts. The engine runs in the calling process, as
cbatch's engine does here: otherwise its kernels could not be listed.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.gpu.cells import Cell, NotAvailable, Row
from bench.gpu.environment import Bench
from bench.gpu.limits import BATCHES, LOGIT_STD, MODEL, MODELS, PROMPT_TOKENS, SAMPLING, config_of
from bench.gpu.peers import unpack
from bench.gpu.timing import STEP_KERNELS, STEPS, step_kernels

VLLM = "vllm"
_ROOT = Path(__file__).parents[2]
_PROFILED, _PROFILED_STEPS = (64, 1), 6
_SHORT_TOKENS, _LONG_TOKENS = 8, 136  # output tokens of the two timed runs
_KV_BYTES, _MEMORY_SHARE, _CONTEXT_TOKENS = 13 << 30, 0.40, 2048
_ENVIRONMENT = {
    "PYTHONSAFEPATH": "1",  # its processes do not import from the checkout
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class Peer:
    """A vLLM engine; `start` must run before the measurements."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.llm: Any = None
        self._note = ""

    def start(self) -> Row:
        folder, out = unpack(self.bench), self.bench.out
        began_s = time.perf_counter()
        # Exclude the checkout: vLLM also imports a package named `triton_kernels`.
        sys.path[:] = [str(folder), *(p for p in sys.path if Path(p or ".").resolve() != _ROOT)]
        os.environ |= _ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(sys.path)}
        if importlib.util.find_spec("flashinfer") is None:
            os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
            self._note = "flashinfer is missing: vLLM samples by its own kernels"
        import vllm

        model = out / "model"
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text(json.dumps(config_of(MODELS[MODEL])))
        self.llm = vllm.LLM(
            model=str(model),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=_CONTEXT_TOKENS,
            max_num_seqs=max(BATCHES),
            gpu_memory_utilization=_MEMORY_SHARE,
            kv_cache_memory_bytes=_KV_BYTES,
            enable_prefix_caching=False,
            compilation_config={"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128]},
        )
        try:
            self.llm.apply_model(_set_head_weights)
        except Exception as error:
            self._note += f"; logits are flat: {type(error).__name__}: {error}"[:200]
        seconds = time.perf_counter() - began_s
        return {"version": vllm.__version__, "seconds": seconds, "note": self._note}

    def _requests(self, batch: int, sampling: str, tokens: int) -> tuple[list[Any], Any]:
        if self.llm is None:
            raise NotAvailable("vLLM did not start")
        from vllm import SamplingParams

        rng, vocab = np.random.default_rng(0), MODELS[MODEL].vocab_size
        prompts = [rng.integers(1, vocab - 1, PROMPT_TOKENS).tolist() for _ in range(batch)]
        options: dict[str, Any] = {"ignore_eos": True, "detokenize": False, **SAMPLING[sampling]}
        params = SamplingParams(max_tokens=tokens, **options)
        return [{"prompt_token_ids": prompt} for prompt in prompts], params

    def _seconds(self, batch: int, sampling: str, tokens: int) -> float:
        requests = self._requests(batch, sampling, tokens)
        began_s = time.perf_counter()
        completions = self.llm.generate(*requests, use_tqdm=False)
        seconds = time.perf_counter() - began_s
        if sum(len(each.outputs[0].token_ids) for each in completions) != batch * tokens:
            raise RuntimeError("vLLM generated fewer tokens than requested")
        return seconds

    def measure(self, batch: int, sampling: str) -> Row:
        short_s = min(self._seconds(batch, sampling, _SHORT_TOKENS) for _ in range(2))
        more_s = self._seconds(batch, sampling, _LONG_TOKENS) - short_s
        step_s = more_s / (_LONG_TOKENS - _SHORT_TOKENS)
        return {"step_ms": step_s * 1e3, "tokens_per_s": batch / step_s, "note": self._note}

    def profile_step(self, batch: int, sampling: str) -> Row:
        prompts, params = self._requests(batch, sampling, 64)
        engine = self.llm.llm_engine
        for at, prompt in enumerate(prompts):
            engine.add_request(f"{sampling} {batch} {at}", prompt, params)
        decoding: set[str] = set()
        while len(decoding) < batch:
            decoding |= {output.request_id for output in engine.step()}
        row = step_kernels(engine.step, _PROFILED_STEPS)
        while engine.has_unfinished_requests():
            engine.step()
        return row


def _set_head_weights(model: Any) -> None:
    """Set the weights of the final norm and of the LM head as `bench.gpu.engine.DeviceWeights`
    does. With vLLM's dummy weights, which are tiny, all logits would be nearly equal."""
    model.model.norm.weight.data.fill_(1.0)
    weight = model.lm_head.weight.data
    weight.normal_(0.0, LOGIT_STD / weight.shape[1] ** 0.5)


def cells(bench: Bench) -> Iterator[Cell]:
    peer, labels = Peer(bench), {"model": MODEL, "implementation": VLLM}
    yield Cell("start", labels | {"what": "start"}, peer.start)
    for sampling in SAMPLING:
        for what, function, batches in (
            (STEPS, peer.measure, BATCHES),
            (STEP_KERNELS, peer.profile_step, _PROFILED),
        ):
            for batch in batches:
                setting = {"batch": batch, "lookahead": "off", "sampling": sampling, "what": what}
                run = functools.partial(function, batch, sampling)
                yield Cell(f"{what}, {sampling} {batch}", labels | setting, run)
