"""The CPU as a device of an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, cast

import torch

from cbatch.core.request.errors import FieldError
from cbatch.runtime.backend import Impl, LoadRequest, Requirements
from cbatch.runtime.cpu.decoder import Model, load_model
from cbatch.runtime.cpu.drafters.kinds import HEADS
from cbatch.runtime.cpu.loaded import CpuModels
from cbatch.runtime.cpu.transformers_backend.loading import load_transformers_model
from cbatch.runtime.cpu.transformers_backend.sharing import check_shared
from cbatch.runtime.drafting.heads.loading import load_head
from cbatch.runtime.model.checkpoint import read_config, resolve_directory
from cbatch.runtime.model.config import ModelConfig
from cbatch.runtime.model.sharding import shard_config
from cbatch.runtime.rank_group import RankGroup
from cbatch.system.machine import usable_cpus


class CpuBackend:
    """The CPU, with torch and kernels in C. Planning would take CPU time from a running step, so by
    default planning and steps do not overlap."""

    default_block_size = 16
    default_overlap: Literal[0, 1] = 0

    def may_auto_select(self, needs: Requirements) -> bool:
        return True

    def require_device(self, device: str) -> None:
        pass

    def check_supported(self, needs: Requirements) -> None:
        if needs.kv_cache_dtype != "auto":
            problem = f"{needs.kv_cache_dtype!r} is not supported on a CPU"
            raise FieldError("kv_cache_dtype", problem, "leave it out, or use --device cuda")
        if needs.tensor_parallel_size > 1:
            path = resolve_directory(needs.model, weights=False)
            if needs.impls[0] == "transformers":
                check_shared(path, needs.tensor_parallel_size)
            else:
                shard_config(read_config(path), needs.tensor_parallel_size)

    def why_not_compiled(self, config: ModelConfig, num_ranks: int) -> str | None:
        if num_ranks > 1:
            return "cannot be sharded over ranks"
        return None

    def set_threads(self, threads: int | Literal["auto"], num_ranks: int) -> None:
        """Set the number of torch's threads. By default a rank has its share of the CPUs, or fewer
        if torch's own number (`OMP_NUM_THREADS`) is lower."""
        default = min(torch.get_num_threads(), max(1, usable_cpus() // num_ranks))
        torch.set_num_threads(default if threads == "auto" else threads)

    def load(self, request: LoadRequest, ranks: RankGroup | None = None) -> CpuModels:
        target = _load(request.model, request.impls[0], request, request.numerics, ranks)
        if request.draft is None:
            return CpuModels(target, None)
        if not request.trial_texts:
            # Verification fixes the text, whatever computes the drafts.
            return CpuModels(target, _load(request.draft, request.impls[1], request, "auto", None))
        return CpuModels(target, load_head(request, target, target, HEADS))


def _load(
    path: str | Path, impl: Impl, request: LoadRequest, numerics: str, ranks: RankGroup | None
) -> Model:
    settings: Any = {"dtype": request.dtype, "random_weights_seed": request.random_weights_seed}
    settings["numerics"] = numerics
    if impl == "transformers":  # it has the interface of a `Model`
        return cast("Model", load_transformers_model(path, ranks=ranks, **settings))
    return load_model(path, ranks=ranks, **settings)
