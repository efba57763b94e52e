"""Options of one simulation, as an immutable struct that can be sent to another process. Each field
is an option of the command line; engine options are those of `EngineOptions`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Annotated, Any, Literal

from cbatch.cli.settings import flag_of
from cbatch.core.request.errors import FieldError
from cbatch.core.request.typed import knob
from cbatch.core.scheduler.config import QueuePolicy
from cbatch.engine.options import engine_knob
from sim.cost.pool import RULES
from sim.workload.arrivals import require_positive
from sim.workload.options import RATE_SCALE_KNOB, SLO_KNOB, THINK_KNOB, Reading, warn
from sim.workload.traces.changes import rate_of
from sim.workload.traces.request import TraceRequest

# Defaults for options that neither the user nor the cost model gives.
GPU, MODEL_SHAPE = "H100", "llama-3.1-8b"
ACCEPTANCE, ROUTER = "0.7", "round-robin"
ENGINE_DEFAULTS: dict[str, Any] = {
    "max_num_seqs": 256,
    "max_num_batched_tokens": 2048,
    "block_size": 16,
    "queue_policy": "fcfs",
}
# Options that set the field of `SchedulerConfig` with the same name.
STATES = ("num_state_pages", "state_interval")
SIZES = (*ENGINE_DEFAULTS, *STATES, "num_blocks", "max_model_len", "itl_target_s", "prompt_share")

KvCacheDtype = Literal["auto", "fp8", "fp8_e4m3"]
_SOURCES = ("step_seconds", "cost", "cost_table")
_STAMPS, _DRAFTING = ("rate", "rate_scale", "spread"), ("acceptance", "draft_model")
_ROOFLINE = (
    *("gpu", "model", "tensor_parallel_size", "draft_model"),
    *("kv_cache_dtype", "sampling_filters"),
)
_load, _fleet = (partial(knob, name) for name in ("load", "fleet"))
_cost, _engine = partial(knob, "cost of a step"), partial(knob, "engine")


class TraceFile(Reading, frozen=True, kw_only=True):
    trace: Annotated[str, knob("", "trace file, plain or gzip", "TRACE")]


class PacedTrace(TraceFile, frozen=True, kw_only=True):
    """A trace, and options to change its arrival rate."""

    rate: Annotated[float | None, _load("scale the trace to R requests per second", "R")] = None
    rate_scale: Annotated[float | None, RATE_SCALE_KNOB] = None

    def scale_of(self, requests: Callable[[], Iterable[TraceRequest]]) -> float:
        """Return the factor by which --rate or --rate-scale multiplies the trace's rate. `requests`
        opens the trace, to measure its rate. Raises `FieldError`."""
        if self.rate is None:
            return 1.0 if self.rate_scale is None else self.rate_scale
        if self.rate_scale is not None:
            problem = "would be ignored, since --rate sets the rate"
            raise FieldError("rate_scale", problem, "leave one of them out")
        require_positive("rate", self.rate)
        own_per_s = rate_of(requests())
        warn(
            f"--rate {self.rate:g} is in requests per second; the trace has {own_per_s:.4g}. To "
            "give a multiple of the trace's rate, use --rate-scale"
        )
        return self.rate / own_per_s


class Scenario(PacedTrace, frozen=True, kw_only=True):
    """All options of a simulation. None means not given: the default depends on other options."""

    slo: Annotated[tuple[str, ...], SLO_KNOB] = ()
    requests: Annotated[int | None, _load("only the first N requests", "N")] = None
    concurrency: Annotated[int | None, _load("N clients instead of timestamps", "N")] = None
    think: Annotated[float | None, THINK_KNOB] = None
    latency: Annotated[float | None, _load("time of a request outside the engine", "S")] = None
    seed: Annotated[int, _load("seed of all random draws")] = 0
    gpu: Annotated[
        str | None, _cost("device whose roofline prices a step", "NAME", default=GPU)
    ] = None
    model: Annotated[
        str | None, _cost("model shape, or a config.json", "NAME", default=MODEL_SHAPE)
    ] = None
    tensor_parallel_size: Annotated[int | None, engine_knob("tensor_parallel_size")] = None
    draft_model: Annotated[
        str | None,
        _cost(
            "shape of the draft model, as in --model",
            "NAME",
            name="draft",
        ),
    ] = None
    kv_cache_dtype: Annotated[KvCacheDtype | None, engine_knob("kv_cache_dtype")] = None
    sampling_filters: Annotated[
        bool | None, _cost("requests sample with top_p, top_k or min_p, by a roofline")
    ] = None
    cost: Annotated[
        str | None, _cost("cost profile of cbatch calibrate, instead of a roofline", "FILE")
    ] = None
    cost_table: Annotated[
        str | None, _cost("profile of a model's layers, instead of a roofline", "DIR")
    ] = None
    step_seconds: Annotated[
        float | None, _cost("constant duration of a step, instead of a roofline", "S")
    ] = None
    price_per_hour: Annotated[
        float | None, _cost("price of a device per hour, for tokens per dollar", "DOLLARS")
    ] = None
    lookahead: Annotated[str, engine_knob("lookahead")] = "off"
    acceptance: Annotated[
        str | None,
        _engine(
            "acceptance model: 0.7 (probability of each draft), positions:0.8,0.6 (by depth), "
            "beta:0.7,8 (mean and concentration over requests), drift:0.9,0.4,64 (high, low, "
            "tokens between changes), recorded:FILE (JSON, 0 and 1 by request and position)",
            "MODEL",
            default=ACCEPTANCE,
        ),
    ] = None
    max_num_seqs: Annotated[int | None, engine_knob("max_num_seqs")] = None
    max_num_batched_tokens: Annotated[int | None, engine_knob("max_num_batched_tokens")] = None
    prompt_share: Annotated[float | None, engine_knob("prompt_share")] = None
    itl_target_s: Annotated[float | None, engine_knob("itl_target_s")] = None
    block_size: Annotated[int | None, engine_knob("block_size")] = None
    num_blocks: Annotated[int | None, engine_knob("num_blocks")] = None
    num_state_pages: Annotated[int | None, engine_knob("num_state_pages")] = None
    state_interval: Annotated[int | None, engine_knob("state_interval")] = None
    pool: Annotated[
        str | None,
        _engine(
            "rules for the size of the KV pool: vllm-0.19, or vllm-0.21 (default), which reserves "
            "memory for graphs; or a file of a recorded run that has its number of blocks",
            "RULES",
        ),
    ] = None
    gpu_memory_utilization: Annotated[float | None, engine_knob("gpu_memory_utilization")] = None
    max_model_len: Annotated[int | None, engine_knob("max_model_len")] = None
    queue_policy: Annotated[QueuePolicy | None, engine_knob("scheduling_policy")] = None
    enable_prefix_caching: Annotated[bool | None, engine_knob("enable_prefix_caching")] = None
    replicas: Annotated[int, _fleet("number of identical engines", "N")] = 1
    router: Annotated[
        str | None,
        _fleet("round-robin, least-loaded, prefix-affine", "NAME", default=ROUTER),
    ] = None

    def ignored(self) -> dict[str, str]:
        """Return the given fields that other fields make ineffective, each with the reason."""
        open_loop, off = self.concurrency is None, self.lookahead == "off"
        unused = (
            ("think", open_loop, "there are no clients: give --concurrency"),
            *((n, not open_loop, "--concurrency ignores timestamps") for n in _STAMPS),
            *((n, off, "nothing is drafted: give --lookahead") for n in _DRAFTING),
            *self._ignored_by_cost(),
            *self._ignored_by_pool(),
            ("router", self.replicas == 1, "there is one replica: give --replicas"),
        )
        given = {name for name, *_ in unused if getattr(self, name) is not None}
        return {name: why for name, ignored, why in unused if ignored and name in given}

    @property
    def has_device(self) -> bool:
        """True if the cost model describes a GPU with a known memory size."""
        return all(getattr(self, source) is None for source in _SOURCES)

    @property
    def records_pool(self) -> bool:
        """True if --pool is the file of a recorded run, not the name of a rule."""
        return self.pool is not None and self.pool not in RULES

    def _ignored_by_pool(self) -> list[tuple[str, bool, str]]:
        if self.num_blocks is not None:
            whole = "--num-blocks sets the pool"
            return [("pool", True, whole), ("gpu_memory_utilization", True, whole)]
        if self.records_pool:
            return [("gpu_memory_utilization", True, "--pool sets the pool")]
        unknown = "the memory of the device is not known: give --num-blocks, or a file to --pool"
        fields = "pool", "gpu_memory_utilization"
        return [(field, not self.has_device, unknown) for field in fields]

    def _ignored_by_cost(self) -> list[tuple[str, bool, str]]:
        """Return (field, ignored, reason) rows for the fields that a source of costs replaces."""
        return [
            (other, getattr(self, source) is not None, f"{flag_of(source)} sets the whole cost")
            for source in _SOURCES
            for other in (*_SOURCES, *_ROOFLINE)
            if other != source and (source, other) != ("cost_table", "model")
        ]


def refuse_ignored(*scenarios: Scenario) -> None:
    """Raise `FieldError` for an option that all `scenarios` ignore."""
    first, *others = (scenario.ignored() for scenario in scenarios)
    for option, why in first.items():
        if all(option in other for other in others):
            raise FieldError(option, f"would be ignored, since {why}", "leave one of them out")
