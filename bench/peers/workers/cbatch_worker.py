"""The worker of cbatch."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
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

    def run(self, prompts: list[list[int]], output_tokens: int) -> dict[str, Any]:
        params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
        self._ends_s.clear()
        started_s = time.perf_counter()
        completions = self._llm.generate(prompts, params)
        seconds = time.perf_counter() - started_s
        outputs = [list(completion.token_ids) for completion in completions]
        return {"seconds": seconds, "outputs": outputs, "steps_s": np.diff(self._ends_s).tolist()}

    def logprobs(self, prompts: list[list[int]]) -> list[list[float]]:
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        logprobs = []
        for completion in self._llm.generate(prompts, params):
            entries = [entry for entry in completion.prompt_logprobs or () if entry is not None]
            logprobs.append(
                [float("-inf") if entry.logprob is None else entry.logprob for entry in entries]
            )
        return logprobs


if __name__ == "__main__":
    serve(CbatchSystem)
