"""A scenario's cost model: roofline, calibration, layer profile, or a constant."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec

from cbatch.core.prices.calibration import Calibration, decode_calibration
from cbatch.core.request.errors import FieldError
from sim.cli.scenario import ENGINE_DEFAULTS, GPU, MODEL_SHAPE, Scenario
from sim.cost.base import CostModel, constant_cost
from sim.cost.layer_profiles import LayerProfile
from sim.cost.pool import DEFAULT_RULES, MEMORY_SHARE, PoolSettings, pool_blocks
from sim.cost.roofline import Roofline, RooflineConfig, load_gpu
from sim.cost.shapes import ModelShape, load_shape
from sim.workload.traces.files import read_whole

_NAMED = ("kv_cache_dtype", "sampling_filters")  # options that the report lists if given


class PricedScenario(msgspec.Struct, kw_only=True):
    """A scenario's cost model, and what its source implies for the scheduler's configuration."""

    cost: CostModel
    names: dict[str, Any]  # source of the costs, for the report
    engine: dict[str, Any]  # defaults for fields of the scheduler's configuration
    limits: dict[str, int | None] = {}  # by field of that configuration: its largest measured value


def price_scenario(scenario: Scenario, policy: str) -> PricedScenario:
    """Return the cost model that the options choose. `policy` is the lookahead policy. Raises
    `FieldError` naming the option."""
    drafts = policy != "off"
    if scenario.step_seconds is not None:
        names = {"cost": "constant", "step_duration_s": scenario.step_seconds}
        if not 0 < scenario.step_seconds < math.inf:
            problem = f"{scenario.step_seconds!r} is not allowed"
            raise FieldError("--step-seconds", problem, "give positive seconds")
        return PricedScenario(cost=constant_cost(scenario.step_seconds), names=names, engine={})
    if scenario.cost is not None:
        return _calibrated(scenario.cost, policy)
    if scenario.cost_table is not None:
        return _layers(scenario.cost_table, scenario.model or MODEL_SHAPE, drafts=drafts)
    config, names, engine = _devices(scenario, scenario.gpu or GPU, drafts=drafts)
    names = {"cost": "roofline"} | names
    return PricedScenario(cost=Roofline(config), names=names, engine=engine)


def read_calibration(path: Path) -> Calibration:
    """Read a file of `cbatch calibrate`. Raises `FieldError` for another format or version."""
    remedy = "write one with cbatch calibrate"
    try:
        return decode_calibration(read_whole(path))
    except FieldError as error:
        raise FieldError("--cost", f"{path} {error.problem}", error.remedy) from error
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        raise FieldError("--cost", f"{path} is not a cost profile ({error})", remedy) from error


def _calibrated(path: str, policy: str) -> PricedScenario:
    calibration = read_calibration(Path(path))
    if policy != "off" and calibration.draft is None:
        raise FieldError("--lookahead", "no draft was measured", "calibrate with --draft")
    names = {"cost": "calibrated", "machine": calibration.machine.get("cpu")}
    names |= {"model": calibration.model, "draft_model": calibration.draft}
    return PricedScenario(
        cost=calibration.prices,
        names=names | {"held_out_total_error": calibration.held_out.total},
        engine={"cost_profile": calibration.profile} | calibration.engine,
        limits={"max_num_seqs": calibration.max_rows},
    )


def _layers(path: str, model: str, *, drafts: bool) -> PricedScenario:
    if drafts:
        raise FieldError("--cost-table", "has no prices of drafts", "use --lookahead off")
    shape = load_shape(model)
    table = LayerProfile(Path(path), layers=shape.num_hidden_layers)
    return PricedScenario(
        cost=table,
        names={"cost": "table", "table": path, "model": model},
        engine={"max_model_len": shape.max_position_embeddings},
        limits={"max_num_seqs": table.max_rows, "max_num_batched_tokens": table.max_step_tokens},
    )


def _devices(
    scenario: Scenario, gpu: str, *, drafts: bool
) -> tuple[RooflineConfig, dict[str, Any], dict[str, Any]]:
    """Return the roofline's configuration, and `names` and `engine` of `PricedScenario`: defaults
    for the context length, the number of KV blocks and the catch-up price."""
    model = scenario.model or MODEL_SHAPE
    parts = 1 if scenario.tensor_parallel_size is None else scenario.tensor_parallel_size
    shape, draft = _shape(scenario, model), None
    if scenario.draft_model is not None:
        draft = _shape(scenario, scenario.draft_model)
    if draft is None and drafts:
        raise FieldError("--draft", "is missing", "drafting has a cost: name the draft model")
    config = RooflineConfig(
        gpu=load_gpu(gpu),
        shape=shape,
        tensor_parallel_size=parts,
        draft=draft,
        has_filters=bool(scenario.sampling_filters),
    )
    names: dict[str, Any] = {"gpu": gpu, "model": model, "tensor_parallel_size": parts}
    names |= {name: v for name in _NAMED if (v := getattr(scenario, name)) is not None}
    engine: dict[str, Any] = {"max_model_len": config.shape.max_position_embeddings}
    if shape.recurrent_layers:  # three pages for each slot and one for a cached prefix
        max_rows = scenario.max_num_seqs or ENGINE_DEFAULTS["max_num_seqs"]
        engine["num_state_pages"] = scenario.num_state_pages or 4 * max_rows
    if scenario.num_blocks is None:
        pool = _pool_settings(scenario, engine.get("num_state_pages", 0))
        engine["num_blocks"] = pool_blocks(config, pool)
        names |= {"pool": pool.rules, "gpu_memory_utilization": pool.gpu_memory_utilization}
    if draft is not None:
        engine["catch_up_price"] = min(draft.weight_bytes / config.shape.weight_bytes, 1.0)
    return config, names | {"draft_model": scenario.draft_model}, engine


def _shape(scenario: Scenario, model: str) -> ModelShape:
    shape = load_shape(model)
    is_fp8 = scenario.kv_cache_dtype not in (None, "auto")
    return msgspec.structs.replace(shape, kv_bytes=1) if is_fp8 else shape


def _pool_settings(scenario: Scenario, state_pages: int) -> PoolSettings:
    sizes = ENGINE_DEFAULTS | {
        name: v for name in ENGINE_DEFAULTS if (v := getattr(scenario, name)) is not None
    }
    share = scenario.gpu_memory_utilization
    return PoolSettings(
        block_tokens=sizes["block_size"],
        step_tokens=sizes["max_num_batched_tokens"],
        max_rows=sizes["max_num_seqs"],
        gpu_memory_utilization=MEMORY_SHARE if share is None else share,
        rules=scenario.pool or DEFAULT_RULES,
        state_pages=state_pages,
    )
