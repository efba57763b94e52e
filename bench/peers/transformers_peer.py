"""transformers' continuous batching on the CPU, as its `generate_batch` runs it."""

from __future__ import annotations

import time
import warnings
from pathlib import Path

from bench.engine import Prompts, Run, System


def build_continuous(model: Path, dtype: str) -> System:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    peer = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()

    def run(prompts: Prompts, output_tokens: int) -> Run:
        config = GenerationConfig(max_new_tokens=output_tokens, do_sample=False, eos_token_id=-1)
        started_s = time.perf_counter()
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = peer.generate_batch(inputs=prompts, generation_config=config)
        seconds = time.perf_counter() - started_s
        return Run(seconds, sum(len(output.generated_tokens) for output in found.values()))

    return System("transformers continuous", "off", run)
