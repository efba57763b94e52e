"""transformers' continuous batching on random weights, as its `generate_batch` runs it."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch

SHORT_TOKENS, LONG_TOKENS = 16, 80
MEAN_TOKENS = (SHORT_TOKENS + LONG_TOKENS) // 2  # of output behind a prompt, in what is timed


@lru_cache(maxsize=1)
def _model(text: str) -> Any:
    """The model of a config.json's text, random, in bf16 on the GPU."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = json.loads(text)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def step_seconds(fields: Mapping[str, Any], batch: int, prompt_tokens: int) -> float:
    """Seconds of a decoding step of the batch: what more tokens cost, so that prompts and set-up
    cancel. Raises ImportError without transformers."""
    from transformers import GenerationConfig

    model = _model(json.dumps(fields))
    rng = np.random.default_rng(0)
    high = model.config.vocab_size - 1
    prompts = [rng.integers(1, high, prompt_tokens).tolist() for _ in range(batch)]

    def run(tokens: int) -> float:
        config = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1)
        started_s = time.perf_counter()
        found = model.generate_batch(inputs=prompts, generation_config=config)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started_s
        emitted = sum(len(output.generated_tokens) for output in found.values())
        if emitted != batch * tokens:
            raise RuntimeError(f"{emitted} tokens came, {batch * tokens} were asked for")
        return seconds

    run(SHORT_TOKENS)  # set-up that is kept
    return (run(LONG_TOKENS) - run(SHORT_TOKENS)) / (LONG_TOKENS - SHORT_TOKENS)
