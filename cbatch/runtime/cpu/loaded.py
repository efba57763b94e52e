"""Loaded models on a CPU: memory for KV, the invariance test, the executor."""

from __future__ import annotations

import os
import platform

from cbatch.core.request.request import SamplingParams
from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.runtime.backend import LargestStep
from cbatch.runtime.compiled import compiles, version
from cbatch.runtime.cpu.decoder import Model
from cbatch.runtime.cpu.drafters.kinds import drafter_of
from cbatch.runtime.cpu.executor import TorchExecutor
from cbatch.runtime.cpu.invariance import probe_batch_invariance
from cbatch.runtime.drafting.heads.head import Head
from cbatch.runtime.drafting.lookups import chain_drafter
from cbatch.runtime.kv_cache import KVCache
from cbatch.runtime.sampling.structured import GrammarSource
from cbatch.runtime.state_memory import slot_bytes
from cbatch.system.machine import memory_bytes

KV_SHARE = 0.25  # default share of the machine's memory for KV


class CpuModels:
    """A target and its draft. With several ranks the target is this rank's shard."""

    def __init__(self, target: Model, draft: Model | Head | None) -> None:
        self.target, self.draft = target, draft

    @property
    def num_ranks(self) -> int:
        return 1 if self.target.ranks is None else self.target.ranks.size

    @property
    def code(self) -> str:
        return self.target.code

    @property
    def price_key(self) -> dict[str, object]:
        return {
            "compiled": version() if compiles(self.target.dtype) else None,
            "processor": f"{platform.node()} {platform.machine()} {platform.processor()} "
            f"{os.cpu_count()}",
        }

    def kv_block_bytes(self, block_size: int) -> int:
        models = (self.target,) if self.draft is None else (self.target, self.draft)
        sizes = [KVCache.block_bytes(each.config, block_size, each.dtype) for each in models]
        return self.num_ranks * sum(sizes)

    def state_bytes(self, block_size: int, max_drafts: int) -> tuple[int, int]:
        config = self.target.config
        return config.state_page_bytes, slot_bytes(config, block_size, max_drafts)

    def kv_memory_bytes(self, step: LargestStep, share: float | None, weight_bytes: int) -> int:
        total_bytes = memory_bytes()
        return int(total_bytes * KV_SHARE if share is None else total_bytes * share - weight_bytes)

    def batch_invariance(self) -> tuple[bool, str]:
        report = probe_batch_invariance(self.target)
        return report.batch_invariant, str(report)

    def executor(
        self,
        config: SchedulerConfig,
        max_drafts: int,
        grammars: GrammarSource | None = None,
        default_params: SamplingParams | None = None,
    ) -> TorchExecutor:
        model = None if self.draft is None else drafter_of(self.draft)
        return TorchExecutor(
            self.target,
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            num_state_pages=config.num_state_pages,
            max_drafts=max_drafts,
            drafter=chain_drafter(config, model) if max_drafts else None,
            grammars=grammars,
        )
