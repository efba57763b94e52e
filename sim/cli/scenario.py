"""One simulation as a value: it can be compared, changed, and run in another process. Its fields
are the options of the command line."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from functools import partial
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta

from cbatch.system.knobs import knob

# What counts where neither an option nor the cost of a step says otherwise.
GPU, MODEL_SHAPE = "H100", "llama-3.1-8b"
ACCEPTANCE, ROUTER = "0.7", "round-robin"
USUAL: dict[str, Any] = {
    "max_slots": 256,
    "step_budget_tokens": 2048,
    "block_size_tokens": 16,
    "queue_policy": "fcfs",
}

_SOURCES = ("step_seconds", "cost", "cost_table")
_ROOFLINE = ("gpu", "model", "tp", "draft_model")
_reading, _load, _fleet = (partial(knob, name) for name in ("reading", "load", "fleet"))
_cost, _engine = partial(knob, "cost of a step"), partial(knob, "engine")
_ABOUT = {
    "engine": "Of a step log: sizes, queue and prefix cache are by default those that it names."
}


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """How a trace is read."""

    format: Annotated[str | None, _reading("what the trace must be (default: found out)")] = None
    skip_empty: Annotated[bool, _reading("leave out requests without prompt or output")] = False
    block_tokens: Annotated[
        int | None, _reading("tokens of a block in hash_ids (default: the format's)", "N")
    ] = None
    time_unit: Annotated[
        Literal["s", "ms", "us", "ns"] | None, _reading("of stamps (default: the format's)")
    ] = None
    spread: Annotated[
        float | None,
        _reading(
            "stamps are rounded to so many seconds: spread them (3 for Mooncake conversations)",
            "SECONDS",
        ),
    ] = None


class Scenario(Reading, frozen=True, kw_only=True):
    """None: left to a default that depends on others."""

    trace: str
    slo: tuple[str, ...] = ()
    requests: Annotated[int | None, _load("the first N only", "N")] = None
    rate: Annotated[float | None, _load("times as many requests a second", "X")] = None
    concurrency: Annotated[int | None, _load("N clients, stamps ignored", "N")] = None
    think: Annotated[float | None, _load("pause of such a client", "SECONDS")] = None
    latency: Annotated[float | None, _load("of a request outside of the engine", "SECONDS")] = None
    seed: Annotated[int, _load("")] = 0
    gpu: Annotated[str | None, _cost(f"roofline of this device (default: {GPU})", "NAME")] = None
    model: Annotated[
        str | None, _cost(f"shape or config.json (default: {MODEL_SHAPE})", "NAME")
    ] = None
    tp: Annotated[int | None, _cost("tensor parallel over N devices", "N")] = None
    draft_model: Annotated[str | None, _cost("shape of the draft, as --model", "NAME")] = None
    cost: Annotated[str | None, _cost("instead: measured by cbatch calibrate", "FILE")] = None
    cost_table: Annotated[str | None, _cost("instead: measured kernels or layers", "DIR")] = None
    step_seconds: Annotated[float | None, _cost("instead: every step the same", "S")] = None
    lookahead: Annotated[str, _engine("off, fixed:4, ...", "POLICY")] = "off"
    acceptance: Annotated[
        str | None,
        _engine(
            "of drafts: 0.7 (the chance of each), positions:0.8,0.6 (by depth), beta:0.7,8 (mean "
            "and concentration over requests), drift:0.9,0.4,64 (high, low, tokens between "
            "changes), recorded:FILE (JSON, 0 and 1 by request and position); default: "
            f"{ACCEPTANCE}",
            "MODEL",
        ),
    ] = None
    max_slots: Annotated[int | None, _engine(f"default: {USUAL['max_slots']}")] = None
    step_budget: Annotated[
        int | None, _engine(f"tokens of a step, at most (default: {USUAL['step_budget_tokens']})")
    ] = None
    itl_target: Annotated[
        float | None, _engine("longest gap between tokens while prompts are read", "SECONDS")
    ] = None
    block_size: Annotated[
        int | None, _engine(f"tokens of a KV block (default: {USUAL['block_size_tokens']})")
    ] = None
    num_blocks: Annotated[int | None, _engine("KV blocks (default: what the device holds)")] = None
    pool: Annotated[
        str | None,
        _engine(
            "what is kept beside KV: vllm-0.19, vllm-0.21 (default; graphs as well), or instead a "
            "file of a recorded run that says its number of blocks",
            "RULES",
        ),
    ] = None
    memory_share: Annotated[
        float | None, _engine("of a device's memory, at most (default: 0.9)", "X")
    ] = None
    max_model_tokens: Annotated[int | None, _engine("context (default: the model's)")] = None
    queue_policy: Annotated[
        Literal["fcfs", "priority", "shortest"] | None,
        _engine(f"default: {USUAL['queue_policy']}"),
    ] = None
    no_prefix_cache: Annotated[bool | None, _engine("")] = None
    replicas: Annotated[int, _fleet("engines, all the same", "N")] = 1
    router: Annotated[
        str | None,
        _fleet(f"round-robin, least-loaded, prefix-affine (default: {ROUTER})", "NAME"),
    ] = None
    host: Annotated[
        str | None,
        _fleet("processors that engines, their servers and the client share: JSON", "FILE"),
    ] = None

    def ignored(self) -> dict[str, str]:
        """Options that the others leave without effect, and why."""
        open_loop, off = self.concurrency is None, self.lookahead == "off"
        unused = (
            ("think", open_loop, "there are no clients: give --concurrency"),
            ("rate", not open_loop, "--concurrency ignores the stamps"),
            ("spread", not open_loop, "--concurrency ignores the stamps"),
            ("acceptance", off, "nobody drafts: give --lookahead"),
            ("draft_model", off, "nobody drafts: give --lookahead"),
            *self._ignored_beside_cost(),
            *self._ignored_beside_pool(),
            ("router", self.replicas == 1, "there is one replica: give --replicas"),
        )
        return {
            flag_of(name): why
            for name, ignored, why in unused
            if ignored and getattr(self, name) is not None
        }

    @property
    def holds_kernel_tables(self) -> bool:
        """Whether its table is of kernels: then it holds those of models of any shape."""
        from sim.cost.kernel_tables import holds_kernel_tables

        return self.cost_table is not None and holds_kernel_tables(self.cost_table)

    @property
    def has_device(self) -> bool:
        """Whether the cost is of a device whose memory is known."""
        if self.cost_table is not None:
            return self.holds_kernel_tables
        return self.step_seconds is None and self.cost is None

    @property
    def records_pool(self) -> bool:
        """Whether its pool is that of a run that was recorded."""
        from sim.cost.pool import RULES

        return self.pool is not None and self.pool not in RULES

    def _ignored_beside_pool(self) -> list[tuple[str, bool, str]]:
        if self.num_blocks is not None:
            whole = "--num-blocks is the whole pool"
            return [("pool", True, whole), ("memory_share", True, whole)]
        if self.records_pool:
            return [("memory_share", True, "--pool is the whole pool")]
        unknown = "no device's memory is known: give --num-blocks, or --pool a file"
        return [(field, not self.has_device, unknown) for field in ("pool", "memory_share")]

    def _ignored_beside_cost(self) -> list[tuple[str, bool, str]]:
        """What the chosen source of costs leaves without effect: (field, whether, why)."""
        tabled = ("model", "tp", "draft_model") if self.holds_kernel_tables else ("model",)
        found = []
        for source in _SOURCES:
            own = tabled if source == "cost_table" else ()
            chosen, why = getattr(self, source) is not None, f"{flag_of(source)} is the whole cost"
            others = (*(other for other in _SOURCES if other != source), *_ROOFLINE)
            found += [(other, chosen, why) for other in others if other not in own]
        return found


def flag_of(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def add_flags(
    parser: argparse._ActionsContainer, kind: type[msgspec.Struct], *, but: Collection[str] = ()
) -> None:
    """A flag for each field that says what its help is, in groups unless `parser` is one itself.
    A switch that others may decide has one for each side."""
    groups: dict[str, argparse._ActionsContainer] = {}
    for field in msgspec.structs.fields(kind):
        meta = next((m for m in get_args(field.type) if isinstance(m, Meta)), None)
        if meta is None or meta.extra is None or field.name in but:
            continue
        name = meta.extra["group"]
        if name not in groups:
            grouped = isinstance(parser, argparse.ArgumentParser)
            groups[name] = parser.add_argument_group(name, _ABOUT.get(name)) if grouped else parser
        group = groups[name]
        plain = get_args(field.type)[0]
        plain = next((k for k in get_args(plain) if k is not NoneType), plain)
        more: dict[str, Any] = {"default": field.default, "help": meta.description or None}
        has_two_sides = plain is bool and field.default is None
        if has_two_sides:
            group = group.add_mutually_exclusive_group()
        if plain is bool:
            more["action"] = "store_true"
        elif get_origin(plain) is Literal:
            more["choices"] = list(get_args(plain))
        else:
            more |= {"type": plain, "metavar": meta.extra["metavar"]}
        group.add_argument(flag_of(field.name), **more)
        if has_two_sides:
            other = flag_of(field.name.removeprefix("no_"))
            group.add_argument(other, action="store_false", default=None, dest=field.name)


def scenario_of(args: argparse.Namespace) -> Scenario:
    """Options have the names of the fields."""
    values = {name: getattr(args, name) for name in Scenario.__struct_fields__}
    return Scenario(**values | {"slo": tuple(args.slo)})
