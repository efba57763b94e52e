"""Prices of steps, measured before the first request and cached on disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from cbatch.core.prices.cost_profile import CostProfile
from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.scheduler.executor import Executor
from cbatch.core.speculation.build import policy_class
from cbatch.engine.prices.fit import fit_profile
from cbatch.engine.prices.shapes import StepRunner, can_profile, shapes_for
from cbatch.runtime.backend import LoadedModels
from cbatch.system.cache import cached_result

_PROBE_VERSION = 1  # of the test for batch invariance; results of another are not used
VERSION = 7  # version of measurement and fit; cached prices of another version are measured again
# Seconds for all measurements (default: 3), and the folder that caches their results. Tests set
# both, since costs that are measured while other tests run are not for a user's engines.
_SECONDS, _FOLDER = "CBATCH_PROFILE_SECONDS", "CBATCH_COSTS"


def with_prices(
    config: SchedulerConfig,
    executor: Executor,
    paths: tuple[str | Path, str | Path | None],
    models: LoadedModels,
    kv_cache_dtype: str,
    *,
    records: bool = False,
) -> SchedulerConfig:
    """Return `config` with prices, measured now or at an earlier start, if its policy or its chunks
    use prices, or the engine `records` a step log, which then has them. If the engine is too small
    for the shapes, prices are learned while serving."""
    drafts_priced = records or policy_class(config.lookahead.policy).priced
    if not (drafts_priced or config.prompt_share < 1) or not can_profile(config):
        return config
    key = models_key(paths, models, kv_cache_dtype) | {
        "version": VERSION,
        "slots": config.max_num_seqs,
        "blocks": [config.num_blocks, config.block_size, config.num_state_pages],
        "tokens": [config.max_num_batched_tokens, config.max_model_len],
        "drafter": config.default_chain,
    }
    measured = config
    if not (drafts_priced and max_drafts(config)):
        measured = msgspec.structs.replace(config, drafter=None, draft_context_tokens=None)
        key["drafter"] = ()
    folder = Path(os.environ[_FOLDER]) if _FOLDER in os.environ else None
    measure = partial(profile_costs, executor, measured)
    profile = cached_result("costs", key, CostProfile, measure, folder)
    return msgspec.structs.replace(config, cost_profile=profile)


def cached_invariance(
    paths: tuple[str | Path, str | Path | None],
    models: LoadedModels,
    kv_cache_dtype: str,
    probe: Callable[[], tuple[bool, str]],
) -> tuple[bool, str]:
    """Return the result of `probe`, a test for batch invariance, now or at an earlier start."""
    key = models_key(paths, models, kv_cache_dtype) | {"version": _PROBE_VERSION}
    return cached_result("invariance", key, tuple[bool, str], probe)


def models_key(
    paths: tuple[str | Path, str | Path | None], models: LoadedModels, kv_cache_dtype: str
) -> dict[str, object]:
    """Return what results measured with loaded models depend on: models, machine and code."""
    import torch

    target = models.target
    loaded_models = [target] if models.draft is None else [target, models.draft]
    return {
        "models": [None if path is None else str(path) for path in paths],
        "shapes": [repr(m.config) for m in loaded_models],
        "dtype": [str(target.dtype), kv_cache_dtype],
        "numerics": target.numerics,
        "weights": [m.matrix_bytes for m in loaded_models],
        **models.price_key,
        "threads": torch.get_num_threads(),
        "ranks": models.num_ranks,
        "torch": str(torch.__version__),
    }


def max_drafts(config: SchedulerConfig) -> int:
    """Return the maximum number of drafts of a row, measured shapes included; 0: no drafting."""
    if not config.default_chain or config.lookahead.policy == "off":
        return 0
    shapes = shapes_for(config) if policy_class(config.lookahead.policy).priced else []
    return max(config.lookahead.k, *(shape.num_drafts for shape in shapes), 0)


def profile_costs(
    executor: Executor, config: SchedulerConfig, *, budget_s: float | None = None
) -> CostProfile:
    """Return prices measured in about `budget_s` seconds. Resets the executor. Without a drafter
    (`config.default_chain`) nothing is measured of drafting: its prices are guesses, relative to a
    step."""
    if budget_s is None:
        budget_s = float(os.environ.get(_SECONDS, 3.0))
    samples = StepRunner(executor, config).measure(shapes_for(config), budget_s)
    executor.reset()
    return fit_profile(samples)
