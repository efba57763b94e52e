"""The worker of Hugging Face's `generate` and its continuous batching."""

from __future__ import annotations

import logging
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from bench.engine.systems import EngineRun, Prompts, System, build_transformers
from bench.peers.workers.serving import serve

PAGE_TOKENS = 256  # tokens of a KV page: transformers' default.
PATIENCE_S = 300.0  # the longest wait for the next sequence to end.


class Transformers:
    def __init__(
        self,
        model: str,
        dtype: str,
        *,
        continuous: bool,
        max_sequences: int,
        tokens: int,
        threads: int,
    ) -> None:
        torch.set_num_threads(threads)
        if continuous:
            peer = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
            self._system = continuous_system(peer, max_sequences=max_sequences, tokens=tokens)
        else:
            self._system = build_transformers(Path(model), dtype)

    def run(self, prompts: list[list[int]], output_tokens: int) -> dict[str, Any]:
        run = self._system.run(prompts, output_tokens)
        return {"seconds": run.seconds, "outputs": run.outputs}


def continuous_system(peer: Any, *, max_sequences: int, tokens: int) -> System:
    """Return a system of up to `max_sequences` sequences of `tokens` tokens. On a CPU the KV
    cache gets this size, since the default is nine tenths of the machine's memory. The system's
    thread runs only during a batch, since it would spin while other systems are timed. Its start is
    not timed. A run raises RuntimeError if the thread dies."""
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    on_gpu = peer.device.type == "cuda"
    sizes: dict[str, Any] = {
        "page_size": PAGE_TOKENS,
        "num_blocks": max_sequences * -(-tokens // PAGE_TOKENS) + 1,
        "max_batch_tokens": max(1024, max_sequences * tokens),
        "max_requests_per_batch": max_sequences,
        "allow_block_sharing": False,  # every repeat has the same prompts
        "use_cuda_graph": False,
    }
    limits = ContinuousBatchingConfig(**({} if on_gpu else sizes))

    def run(prompts: Prompts, output_tokens: int) -> EngineRun:
        config = GenerationConfig(max_new_tokens=output_tokens, do_sample=False, eos_token_id=-1)
        with (
            warnings.catch_warnings(action="ignore"),
            peer.continuous_batching_context_manager(
                config, continuous_batching_config=limits, timeout=5, warmup=on_gpu
            ) as manager,
        ):
            _complete(manager, prompts[:1], 1)  # once it answers, it has started
            started_s = time.perf_counter()
            outputs = _complete(manager, prompts, output_tokens)
            return EngineRun(time.perf_counter() - started_s, outputs)

    return System("transformers continuous", "off", run)


def _complete(manager: Any, prompts: Prompts, output_tokens: int) -> list[list[int]]:
    names = manager.add_requests(prompts, max_new_tokens=output_tokens)
    outputs: dict[str, list[int]] = {}
    while len(outputs) < len(prompts):
        result = manager.get_result(timeout=PATIENCE_S)
        if result is None or result.error is not None:
            raise RuntimeError(f"transformers: {result.error if result else 'no answer'}")
        if result.is_finished():
            outputs[result.request_id] = list(result.generated_tokens)
    return [outputs[name] for name in names]


if __name__ == "__main__":
    serve(Transformers)
