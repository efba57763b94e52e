"""What a step costs in `cbatch sim`: the options that say so, and the model that they name."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from cbatch.core.config import LookaheadConfig
from cbatch.core.cost import CostProfile
from cbatch.core.errors import FieldError

if TYPE_CHECKING:
    from cbatch.cli.simulate.scenario import Scenario
    from sim.costs import CostModel
    from sim.roofline import RooflineConfig

T = TypeVar("T")
GPU, MODEL_SHAPE = "H100", "llama-3.1-8b"
MAX_SLOTS, STEP_BUDGET_TOKENS, BLOCK_TOKENS = 256, 2048, 16
_SOURCES = ("step_seconds", "cost", "cost_table")
_ROOFLINE = ("gpu", "model", "tp", "draft_model")


class Priced(msgspec.Struct, kw_only=True):
    """A cost model, what it says about the engine's sizes (None: nothing), and how far it goes."""

    cost: CostModel
    names: dict[str, Any]  # for the report
    num_blocks: int | None = None
    block_size_tokens: int | None = None
    max_model_tokens: int | None = None
    draft_context_tokens: int | None = None
    catch_up_price: float | None = None
    max_slots: int | None = None
    step_budget_tokens: int | None = None
    most_slots: int | None = None
    most_step_tokens: int | None = None
    profile: CostProfile | None = None  # that `goodput` starts with

    def check(self, *, max_slots: int, step_budget_tokens: int) -> None:
        """Raises `FieldError` where steps may be larger than any that was measured."""
        for field, asked, most in (
            ("--max-slots", max_slots, self.most_slots),
            ("--step-budget", step_budget_tokens, self.most_step_tokens),
        ):
            if most is not None and asked > most:
                raise FieldError(field, f"{asked} is more than was measured", f"use <= {most}")


def first_of(default: T, *preferred: T | None) -> T:
    """The first of `preferred` that is given. Zero is, if wrongly: whoever checks it says so."""
    return next((value for value in preferred if value is not None), default)


def add_cost_options(parser: argparse.ArgumentParser) -> None:
    cost = parser.add_argument_group("cost of a step")
    cost.add_argument("--gpu", metavar="NAME", help=f"roofline of this device (default: {GPU})")
    cost.add_argument(
        "--model", metavar="NAME", help=f"shape or config.json (default: {MODEL_SHAPE})"
    )
    cost.add_argument("--tp", type=int, metavar="N", help="tensor parallel over N devices")
    cost.add_argument("--draft-model", metavar="NAME", help="shape of the draft, as --model")
    cost.add_argument("--cost", metavar="FILE", help="instead: measured by cbatch calibrate")
    cost.add_argument("--cost-table", metavar="DIR", help="instead: measured kernels or layers")
    cost.add_argument(
        "--step-seconds", type=float, metavar="S", help="instead: every step the same"
    )


def ignored_beside(scenario: Scenario) -> list[tuple[str, bool, str]]:
    """Fields that the chosen source of costs leaves without effect: (name, whether, why)."""
    found = []
    for source in _SOURCES:
        own = _tabled(scenario.cost_table) if source == "cost_table" else ()
        chosen, why = getattr(scenario, source) is not None, f"{_option(source)} is the whole cost"
        others = (*(other for other in _SOURCES if other != source), *_ROOFLINE)
        found += [(other, chosen, why) for other in others if other not in own]
    return found


def has_device(scenario: Scenario) -> bool:
    """Whether the cost is of a device whose memory is known."""
    if scenario.cost_table is not None:
        from sim.kernel_tables import holds_kernel_tables

        return holds_kernel_tables(scenario.cost_table)
    return scenario.step_seconds is None and scenario.cost is None


def _tabled(path: str | None) -> tuple[str, ...]:
    """What else counts beside such a table: one of kernels holds those of any shape."""
    from sim.kernel_tables import holds_kernel_tables

    kernels = path is not None and holds_kernel_tables(path)
    return ("model", "tp", "draft_model") if kernels else ("model",)


def _option(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def priced(scenario: Scenario, lookahead: LookaheadConfig) -> Priced:
    """Raises `FieldError` naming the option at fault."""
    if scenario.step_seconds is not None:
        return _constant(scenario.step_seconds)
    if scenario.cost is not None:
        return _calibrated(scenario.cost, lookahead.policy)
    if scenario.cost_table is not None:
        if has_device(scenario):
            return _kernels(scenario, scenario.cost_table, drafts=lookahead.policy != "off")
        return _table(scenario.cost_table, scenario.model, drafts=lookahead.policy != "off")
    return _roofline(scenario, drafts=lookahead.policy != "off")


def _constant(seconds: float) -> Priced:
    from sim.costs import ConstantCost

    names = {"cost": "constant", "step_duration_s": seconds}
    return Priced(cost=ConstantCost(step_duration_s=seconds), names=names)


def _calibrated(path: str, policy: str) -> Priced:
    from sim.calibrated import CalibratedCost, read_calibration

    found = read_calibration(Path(path))
    if policy != "off" and found.draft is None:
        raise FieldError("--lookahead", "no draft was measured", "calibrate with --draft")
    names = {"cost": "calibrated", "model": found.model, "draft_model": found.draft}
    return Priced(
        cost=CalibratedCost(found.prices, controlled=policy == "goodput"),
        names=names | {"held_out_total_error": found.held_out.total},
        most_slots=found.max_rows,
        profile=found.profile,
        **found.engine,
    )


def _table(path: str, model: str | None, *, drafts: bool) -> Priced:
    from sim.layer_profiles import read_layer_profiles
    from sim.roofline import load_shape

    if drafts:
        raise FieldError("--cost-table", "has no prices of drafts", "use --lookahead off")
    model = model or MODEL_SHAPE
    shape = load_shape(model)
    table = read_layer_profiles(Path(path), layers=shape.num_hidden_layers)
    return Priced(
        cost=table,
        names={"cost": "table", "table": path, "model": model},
        max_model_tokens=shape.max_position_embeddings,
        max_slots=min(MAX_SLOTS, table.limits.decode_rows),
        step_budget_tokens=min(STEP_BUDGET_TOKENS, table.limits.step_tokens),
        most_slots=table.limits.decode_rows,
        most_step_tokens=table.limits.step_tokens,
    )


def _kernels(scenario: Scenario, path: str, *, drafts: bool) -> Priced:
    from sim.kernel_tables import KernelCost, read_kernel_tables
    from sim.roofline import gpu_within

    tables = read_kernel_tables(path)
    devices = _devices(scenario, gpu_within(tables.device), drafts=drafts)
    cost = KernelCost(tables, devices.config)
    names = {"cost": "kernel table", "table": path, "kernels": tables.framework}
    names["from_roofline"] = ", ".join(cost.from_roofline)
    return Priced(
        cost=cost,
        names=names | devices.names,
        max_slots=min(MAX_SLOTS, first_of(MAX_SLOTS, cost.most_rows)),
        step_budget_tokens=min(STEP_BUDGET_TOKENS, cost.most_step_tokens),
        most_slots=cost.most_rows,
        most_step_tokens=cost.most_step_tokens,
        **devices.sizes,
    )


def _roofline(scenario: Scenario, *, drafts: bool) -> Priced:
    from sim.roofline import Roofline

    devices = _devices(scenario, scenario.gpu or GPU, drafts=drafts)
    names = {"cost": "roofline"} | devices.names
    return Priced(cost=Roofline(devices.config), names=names, **devices.sizes)


class _Devices(NamedTuple):
    config: RooflineConfig
    names: dict[str, Any]
    sizes: dict[str, Any]


def _devices(scenario: Scenario, gpu: str, *, drafts: bool) -> _Devices:
    """Models on devices, and what these hold."""
    from sim.roofline import RooflineConfig, load_gpu, load_shape

    model, parts = scenario.model or MODEL_SHAPE, first_of(1, scenario.tp)
    draft = None if scenario.draft_model is None else load_shape(scenario.draft_model)
    if draft is None and drafts:
        raise FieldError("--draft-model", "is missing", "drafting has a price: name the draft")
    config = RooflineConfig(
        gpu=load_gpu(gpu), shape=load_shape(model), tensor_parallel=parts, draft=draft
    )
    block_tokens = first_of(BLOCK_TOKENS, scenario.block_size)
    names = {"gpu": gpu, "model": model, "tensor_parallel": parts}
    sizes: dict[str, Any] = {
        "num_blocks": scenario.num_blocks or config.num_blocks(block_tokens),
        "max_model_tokens": config.shape.max_position_embeddings,
    }
    if draft is not None:
        sizes["catch_up_price"] = min(draft.weight_bytes / config.shape.weight_bytes, 1.0)
    return _Devices(config, names | {"draft_model": scenario.draft_model}, sizes)
