"""The worker of OpenVINO GenAI's continuous batching, which reads GGUF files itself. Its Python
needs openvino-genai alone."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai

from bench.peers.workers.serving import serve

BLOCK_TOKENS = 32  # OpenVINO's KV block on CPUs


class OpenVino:
    def __init__(
        self,
        model: str,
        *,
        max_sequences: int,
        tokens: int,
        step_tokens: int,
        threads: int,
        exact: bool,
    ) -> None:
        """Load a model for up to `max_sequences` sequences of `tokens` tokens, and steps of at most
        `step_tokens` tokens. With `exact`, activations and KV are float32; otherwise OpenVINO
        chooses their types by the processor."""
        scheduler = genai.SchedulerConfig()
        scheduler.max_num_seqs = max_sequences
        scheduler.max_num_batched_tokens = step_tokens
        scheduler.num_kv_blocks = max_sequences * (-(-tokens // BLOCK_TOKENS) + 1)
        scheduler.enable_prefix_caching = False  # every repeat has the same prompts
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads}
        if exact:
            properties |= {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
            properties |= {"DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
        self._pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)

    def run(self, prompts: list[list[int]], output_tokens: int) -> tuple[Any, list[float]]:
        """Return the outputs, and the times at which steps ended."""
        config = genai.GenerationConfig(max_new_tokens=output_tokens, ignore_eos=True)
        inputs = [openvino.Tensor(np.asarray([ids], dtype=np.int64)) for ids in prompts]
        handles = [self._pipeline.add_request(i, ids, config) for i, ids in enumerate(inputs)]
        ends_s = []
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            ends_s.append(time.perf_counter())
        return [list(handle.read_all()[0].generated_ids) for handle in handles], ends_s


if __name__ == "__main__":
    serve(OpenVino)
