"""What the machine allows: an engine that does nothing but multiply with its weights, and read them
once a step where that takes longer."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from bench.peers.workers.serving import serve

READ_BYTES = 1 << 30  # beyond any cache
WIDTH = 2048  # of the matrices
TRIES = 4


class MachineLimits:
    def __init__(
        self,
        weight_bytes: int,
        token_flop: float,
        prompt_flop: float,
        row_flop: float,
        *,
        threads: int,
    ) -> None:
        """`weight_bytes` are read a step, in which each sequence takes `row_flop`; a prompt takes
        `token_flop` a token, and `prompt_flop` once. Products are of bf16 or of fp32, whichever is
        faster here."""
        torch.set_num_threads(threads)
        self._weight_bytes, self._token_flop = weight_bytes, token_flop
        self._prompt_flop, self._row_flop = prompt_flop, row_flop
        # numpy asks for large pages, as torch does not: a fifth faster to read.
        self._buffer = torch.from_numpy(np.ones(READ_BYTES // 4, dtype=np.float32))
        drawn = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0))
        self._matrix = min(drawn, drawn.bfloat16(), key=lambda each: _best_s(lambda: each @ each))

    def run(self, prompts: list[list[int]], output_tokens: int) -> dict[str, Any]:
        """As long as these would take, by what the machine can do just now."""
        bytes_per_s = READ_BYTES / _best_s(self._buffer.sum)
        flop_per_s = 2 * WIDTH**3 / _best_s(lambda: self._matrix @ self._matrix)
        flop = sum(len(prompt) * self._token_flop + self._prompt_flop for prompt in prompts)
        reading_s = self._weight_bytes / bytes_per_s
        multiplying_s = len(prompts) * self._row_flop / flop_per_s
        steps_s = [max(reading_s, multiplying_s)] * (output_tokens - 1)
        outputs = [[0] * output_tokens for _ in prompts]
        seconds = flop / flop_per_s + sum(steps_s)
        return {"seconds": seconds, "outputs": outputs, "steps_s": steps_s}


def _best_s(do: Callable[[], Any]) -> float:
    spent_s = []
    for _ in range(TRIES):
        started_s = time.perf_counter()
        do()
        spent_s.append(time.perf_counter() - started_s)
    return min(spent_s)


if __name__ == "__main__":
    serve(MachineLimits)
