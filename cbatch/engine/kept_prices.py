"""Prices of steps on this machine, kept for the next start."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.speculation.build import policy_class
from cbatch.engine.backends import num_ranks
from cbatch.engine.loop import Executor
from cbatch.engine.prices import startup

if TYPE_CHECKING:
    from cbatch.engine.backends import AnyModel


def with_prices(
    config: SchedulerConfig,
    executor: Executor,
    paths: tuple[str | Path, str | Path | None],
    models: tuple[AnyModel, AnyModel | None],
    kv_cache_dtype: str,
) -> SchedulerConfig:
    """Return `config` with what steps cost here, measured now or at an earlier start, if its policy
    goes by prices. Where no shape of a step fits, prices are learned while serving."""
    import torch

    from cbatch.runtime.compiled import compiles, version

    if not policy_class(config.lookahead.policy).priced or not startup.can_profile(config):
        return config
    target, given = models[0], [model for model in models if model is not None]
    device = torch.device(target.device)
    cpu = f"{platform.node()} {platform.machine()} {platform.processor()} {os.cpu_count()}"
    processor = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu
    key = {
        "version": startup.VERSION,
        "models": [None if path is None else str(path) for path in paths],
        "shapes": [repr(m.config) for m in given],
        "dtype": [str(target.dtype), kv_cache_dtype],
        "numerics": target.numerics,
        "weights": [getattr(m, "block_bytes", None) for m in given],
        "compiled": version() if device.type == "cpu" and compiles(target.dtype) else None,
        "processor": processor,
        "threads": torch.get_num_threads(),
        "ranks": num_ranks(target),
        "torch": str(torch.__version__),
        "slots": config.max_num_seqs,
        "blocks": [config.num_blocks, config.block_size],
        "tokens": [config.max_num_batched_tokens, config.max_model_len],
        "drafter": config.default_chain,
    }
    profile = startup.cached_profile(key, lambda: startup.profile_costs(executor, config))
    return msgspec.structs.replace(config, cost_profile=profile)
