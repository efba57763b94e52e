"""The worker of the machine's limits: an engine that only multiplies with its weights, or reads
them once a step if that takes longer."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from bench.peers.workers.serving import serve

READ_BYTES = 1 << 30  # size of the buffer that is read; larger than any cache.
WIDTH = 2048  # rows and columns of the multiplied matrices.
TRIES = 4  # timed runs, of which the fastest counts


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
        """A step reads `weight_bytes` and takes `row_flop` for each sequence. A prompt takes
        `token_flop` per token, and `prompt_flop` once. Products are in bf16 or fp32, whichever is
        faster here."""
        torch.set_num_threads(threads)
        self._weight_bytes, self._token_flop = weight_bytes, token_flop
        self._prompt_flop, self._row_flop = prompt_flop, row_flop
        # numpy allocates large pages, unlike torch; reading them is a fifth faster.
        self._buffer = torch.from_numpy(np.ones(READ_BYTES // 4, dtype=np.float32))
        matrix = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0))
        self._matrix = min(
            matrix, matrix.bfloat16(), key=lambda candidate: best_s(lambda: candidate @ candidate)
        )

    def run(self, prompts: list[list[int]], output_tokens: int) -> dict[str, Any]:
        """Return the time for these prompts at the machine's present speed."""
        bytes_per_s = READ_BYTES / best_s(self._buffer.sum)
        flop_per_s = 2 * WIDTH**3 / best_s(lambda: self._matrix @ self._matrix)
        flop = sum(len(prompt) * self._token_flop + self._prompt_flop for prompt in prompts)
        reading_s = self._weight_bytes / bytes_per_s
        multiplying_s = len(prompts) * self._row_flop / flop_per_s
        steps_s = [max(reading_s, multiplying_s)] * (output_tokens - 1)
        outputs = [[0] * output_tokens for _ in prompts]
        seconds = flop / flop_per_s + sum(steps_s)
        return {"seconds": seconds, "outputs": outputs, "steps_s": steps_s}


def best_s(do: Callable[[], Any]) -> float:
    spent_s = []
    for _ in range(TRIES):
        started_s = time.perf_counter()
        do()
        spent_s.append(time.perf_counter() - started_s)
    return min(spent_s)


if __name__ == "__main__":
    serve(MachineLimits)
