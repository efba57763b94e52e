"""Description of an engine: models, device, options and memory."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from cbatch.core.request.request import MODEL
from cbatch.runtime.model.config import GENERATION_FILE
from cbatch.runtime.model.gguf_file import SUFFIX


class EngineInfo(msgspec.Struct, frozen=True):
    """Description of an engine, for a log or a report."""

    model: str
    draft: str | None
    dtype: str
    device: str
    numerics: str
    row_invariant: bool  # results of a row do not depend on the batch
    row_invariance: str  # the same as a sentence, with the kernels in use
    lookahead: str
    drafter: tuple[str, ...]  # of a request that names none, preferred first; (): no drafting
    weight_bytes: int  # of both models, in all ranks
    num_blocks: int
    block_size: int
    kv_memory_bytes: int
    max_model_len: int
    num_threads: int  # of each rank
    ranks: int = 1  # of tensor parallelism
    code: str = "our own"  # the modelling code in use
    sampling_defaults: dict[str, float | int] = {}  # from the model's files, of `SamplingParams`

    def lines(self) -> list[str]:
        """Return the description as lines of text for a log."""
        draft = f", draft {self.draft}" if self.draft else ""
        by = f" by {', '.join(self.drafter)}" if self.drafter not in ((), (MODEL,)) else ""
        lookahead = self.lookahead + by
        defaults = ", ".join(f"{name} {value}" for name, value in self.sampling_defaults.items())
        shared = f" in {self.ranks} ranks" if self.ranks > 1 else ""
        factor = f"{self.ranks} x " if self.ranks > 1 else ""
        return [
            f"model {self.model}{draft}: {self.dtype} on {self.device}{shared}, "
            f"lookahead {lookahead}",
            f"code: {self.code}",
            self.row_invariance,
            f"KV: {self.num_blocks} blocks of {self.block_size} tokens, "
            f"{mib(self.kv_memory_bytes)}; {self._context()}",
            f"weights: {mib(self.weight_bytes)}; "
            f"engine threads: {factor}{self.num_threads} of {os.cpu_count()}",
            *([f"defaults of calls, by {self._defaults_from()}: {defaults}"] if defaults else ()),
        ]

    def _defaults_from(self) -> str:
        return "general.sampling" if Path(self.model).suffix == SUFFIX else GENERATION_FILE

    def _context(self) -> str:
        pool_tokens = self.num_blocks * self.block_size
        if pool_tokens >= self.max_model_len:
            return f"context {self.max_model_len} tokens"
        return (
            f"sequences of at most {pool_tokens} tokens, the size of the pool "
            f"(context {self.max_model_len})"
        )


def mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.0f} MiB"
