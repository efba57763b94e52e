"""The worker of Hugging Face's `generate` and its continuous batching."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers  # noqa: F401 - imports are not timed

from bench.engine.systems import build_transformers
from bench.peers.transformers_peer import build_continuous
from bench.peers.workers.serving import serve


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
            self._system = build_continuous(
                Path(model), dtype, max_sequences=max_sequences, tokens=tokens
            )
        else:
            self._system = build_transformers(Path(model), dtype)

    def run(self, prompts: list[list[int]], output_tokens: int) -> dict[str, Any]:
        run = self._system.run(prompts, output_tokens)
        return {"seconds": run.seconds, "outputs": run.outputs}


if __name__ == "__main__":
    serve(Transformers)
