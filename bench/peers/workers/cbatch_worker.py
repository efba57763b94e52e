"""The worker of cbatch."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch

from bench.peers.workers.serving import serve
from cbatch import LLM, SamplingParams

BLOCK_TOKENS = 16


class CbatchSystem:
    def __init__(
        self,
        model: str,
        draft: str | None,
        *,
        exact: bool,
        max_sequences: int,
        tokens: int,
        step_tokens: int,
        threads: int,
        **options: str,
    ) -> None:
        """Load a model for up to `max_sequences` sequences of `tokens` tokens; with `exact`, in
        float32, which dequantises weights."""
        torch.set_num_threads(threads)
        self._llm = LLM(
            Path(model),
            None if draft is None else Path(draft),
            dtype="float32" if exact else "auto",
            max_num_seqs=max_sequences,
            max_model_len=tokens,
            max_num_batched_tokens=step_tokens,
            num_blocks=max_sequences * (-(-tokens // BLOCK_TOKENS) + 1),
            block_size=BLOCK_TOKENS,
            enable_prefix_caching=False,  # every repeat has the same prompts
            tokenizer="none",
            **options,
        )
        self._step = self._llm.engine.step
        self._llm.engine.step = self._timed_step  # type: ignore[method-assign]
        self._ends_s: list[float] = []

    def _timed_step(self) -> Any:
        outputs = self._step()
        self._ends_s.append(time.perf_counter())
        return outputs

    def run(self, prompts: list[list[int]], output_tokens: int) -> tuple[Any, list[float]]:
        """Return the outputs, and the times at which steps ended."""
        params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
        self._ends_s.clear()
        completions = self._llm.generate(prompts, params)
        return [list(completion.token_ids) for completion in completions], self._ends_s

    def logprobs(self, prompts: list[list[int]]) -> list[list[float]]:
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        return [
            [-math.inf if entry.logprob is None else entry.logprob for entry in entries if entry]
            for completion in self._llm.generate(prompts, params)
            for entries in [completion.prompt_logprobs or ()]
        ]


if __name__ == "__main__":
    serve(CbatchSystem)
