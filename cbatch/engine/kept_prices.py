"""A step's measured prices, kept on disk: the next start on this machine finds them there."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from cbatch.core.prices.cost_profile import CostProfile
from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.engine.backends import num_ranks
from cbatch.engine.loop import Executor
from cbatch.engine.step_profile import can_profile, profile_costs
from cbatch.system.cache import cache_folder

if TYPE_CHECKING:
    from cbatch.engine.backends import AnyModel

VERSION = 4  # of what is measured and fitted: prices kept by another are measured anew
_logger = logging.getLogger("cbatch")


def cached_profile(
    key: Mapping[str, object], measure: Callable[[], CostProfile], folder: Path | None = None
) -> CostProfile:
    """The profile stored for `key` (whatever prices depend on), or a new one, stored. No cache, or
    a file that cannot be read or written, costs a measurement, never a failure."""
    folder = folder or cache_folder("costs")
    if folder is None:
        _logger.warning("no home for a cache (HOME, XDG_CACHE_HOME): step costs are measured anew")
        return measure()
    digest = hashlib.sha256(msgspec.json.encode(dict(sorted(key.items())))).hexdigest()[:24]
    path = folder / f"{digest}.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=CostProfile)
    except FileNotFoundError:
        pass
    except (OSError, msgspec.MsgspecError, ValueError) as error:
        _logger.warning("step costs in %s cannot be used (%s): measuring anew", path, error)
    profile = measure()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_bytes(msgspec.json.format(msgspec.json.encode(profile)))
        part.replace(path)
    except OSError as error:
        _logger.warning("step costs could not be kept in %s: %s", path, error)
    return profile


def with_prices(
    config: SchedulerConfig,
    executor: Executor,
    target: AnyModel,
    draft: AnyModel | None,
    paths: tuple[str | Path, str | Path | None],
    kv_cache_dtype: str,
) -> SchedulerConfig:
    """With what steps cost here: measured now, or kept from an earlier start on this machine. Where
    nothing that is measured fits it is learnt while serving."""
    if not can_profile(config):
        return config
    import torch

    from cbatch.runtime.cpu.compiled import compiles, version

    device = torch.device(target.device)
    cpu = f"{platform.node()} {platform.machine()} {platform.processor()} {os.cpu_count()}"
    processor = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu
    key = {
        "version": VERSION,
        "models": [None if path is None else str(path) for path in paths],
        "shapes": [repr(m.config) for m in (target, draft) if m is not None],
        "dtype": [str(target.dtype), kv_cache_dtype],
        "numerics": target.numerics,
        "weights": [getattr(m, "block_bytes", None) for m in (target, draft) if m is not None],
        "compiled": version() if device.type == "cpu" and compiles(target.dtype) else None,
        "processor": processor,
        "threads": torch.get_num_threads(),
        "ranks": num_ranks(target),
        "torch": str(torch.__version__),
        "slots": config.max_slots,
        "blocks": [config.num_blocks, config.block_size_tokens],
        "tokens": [config.step_budget_tokens, config.max_model_tokens],
        "drafter": config.default_chain,
    }
    profile = cached_profile(key, lambda: profile_costs(executor, config))
    return msgspec.structs.replace(config, cost_profile=profile)
