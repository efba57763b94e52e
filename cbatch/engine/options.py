"""Options of an engine."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from cbatch.core.prices.chunk_sizes import PROMPT_SHARE
from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import DRAFTERS, LOOKUPS, MODEL, is_chain
from cbatch.core.request.typed import convert_fields, knob, names_of
from cbatch.core.scheduler.config import QueuePolicy
from cbatch.core.speculation.build import lookahead_name, parse_lookahead
from cbatch.core.speculation.config import MAX_DRAFTS, LookaheadConfig
from cbatch.engine.unsupported import require_neutral_option


def knobs(group: str, table: str) -> dict[str, Meta]:
    """Return the marks of a struct's fields (see `knob`), by field. A line of the table has the
    name of the field and keywords of `knob`, the metavar, and the help."""
    marks = {}
    for line in table.strip().splitlines():
        words, metavar, text = (part.strip() for part in line.split("|", 2))
        field, *pairs = shlex.split(words)
        more: dict[str, Any] = dict(pair.split("=", 1) for pair in pairs)
        if "aliases" in more:
            more["aliases"] = tuple(more["aliases"].split(","))
        if "type" in more:
            more["type"] = str
        marks[field] = knob(group, text, metavar or None, **more)
    return marks


_KNOB = knobs(
    "engine",
    f"""
tokenizer | MODEL | tokenizer, if it is not with the model
dtype | | auto (the model's), float32, bfloat16
device | | auto, cpu, cuda, cuda:1
numerics | | invariant: a row's bits do not depend on the batch; fast matters on GPUs only
threads | N | CPU threads of each rank; auto: the CPUs that the process may use
model_impl | | modelling code; auto: own if it supports the model, else transformers (extra \
'models')
tensor_parallel_size aliases=tp default=1 | N | number of ranks (CPU processes) among which the \
model is sharded
lookahead type=str | POLICY | off, adaptive, ema or fixed; ema:K drafts at most K tokens, fixed:K \
always K; module:Class is a policy of your own
num_speculative_tokens aliases=spec_tokens | N | maximum number of drafts of a sequence in a \
step: K of --lookahead
drafter | NAME | {", ".join(DRAFTERS)}, mtp; repeatable, preferred first; ngram and suffix look up \
repeated text and need no draft model; mtp is the model's own head (default: model, if there is a \
draft model, else mtp, if the model has it, else suffix on CPUs)
max_num_seqs | N | maximum number of sequences in a step
num_blocks aliases=num_gpu_blocks_override default="as memory allows" | N | number of KV blocks
kv_cache_memory_bytes | BYTES | memory for the KV cache, as 4G
gpu_memory_utilization | SHARE | maximum share of a device's memory
kv_cache_dtype | | dtype of keys and values; auto: the model's; fp8: on GPUs that support it
block_size default="64 on a GPU, else 16" | TOKENS | tokens per KV block
num_state_pages default="as memory allows" | N | number of pages for the states of recurrent layers
state_interval default="as memory allows" | BLOCKS | distance between two points of a cached \
prefix from which recurrent layers can continue
max_model_len default="the model's" | TOKENS | maximum length of a sequence
max_num_batched_tokens | TOKENS | maximum number of tokens in a step
prompt_share | SHARE | prompt throughput while sequences decode, as a share of the highest; less \
gives shorter gaps between tokens (default: {PROMPT_SHARE} for serve, else 1)
itl_target_s name=itl_target | SECONDS | target for the gap between two tokens of a sequence while \
prompts are computed
min_itl_target_s name=min_itl_target | SECONDS | shortest target that a call's x-slo-itl-ms can \
set; a shorter one is raised to it
scheduling_policy name=scheduling_policy | | order in which requests get a slot
ageing_per_s name=ageing | N | gain in priority per second in the queue
enable_prefix_caching | | share the KV of equal prompt prefixes
overlap | | 1: plan the next step while one runs (default: 1 on a GPU, else 0)
seed name=engine_seed aliases=seed | SEED | seed from which requests without a seed get theirs
draft aliases=spec_model | MODEL | draft model, or an EAGLE or Medusa head of the model
speculative_config aliases=sc | JSON | draft, drafter and number of drafts, as in vLLM
""",
)

engine_knob = _KNOB.__getitem__  # for structs that have the same options
NumDrafts = Annotated[int, msgspec.Meta(ge=1, le=MAX_DRAFTS)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
ModelImpl = Literal["auto", "own", "transformers"]
DraftMethod = Literal["draft_model", "eagle", "eagle3", "medusa", "mtp"]
MTP = "mtp"  # the drafter that is the model's own head


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of an engine; `_KNOB` describes those that have flags. Every field has a default that
    suits a small machine.

    `lookahead` is a text such as "ema:8", or a `LookaheadConfig`. By default the KV cache fits what
    weights and buffers leave of `gpu_memory_utilization`, a share of the memory of the GPU or of
    the machine. `device` "auto" is a GPU if torch has one that supports all other options, else the
    CPU. `tokenizer` "none" serves token ids only. `generation_config` "none" ignores the sampling
    defaults of the model.
    """

    tokenizer: Annotated[str | None, _KNOB["tokenizer"]] = None
    dtype: Annotated[str, _KNOB["dtype"]] = "auto"
    device: Annotated[str, _KNOB["device"]] = "auto"
    numerics: Annotated[Literal["auto", "invariant", "fast"], _KNOB["numerics"]] = "auto"
    threads: Annotated[int | Literal["auto"], _KNOB["threads"]] = "auto"
    model_impl: Annotated[ModelImpl, _KNOB["model_impl"]] = "auto"
    tensor_parallel_size: Annotated[int, _KNOB["tensor_parallel_size"]] = 1
    lookahead: Annotated[str | LookaheadConfig, _KNOB["lookahead"]] = "adaptive"
    num_speculative_tokens: Annotated[NumDrafts | None, _KNOB["num_speculative_tokens"]] = None
    drafter: Annotated[tuple[str, ...] | None, _KNOB["drafter"]] = None
    max_num_seqs: Annotated[int, _KNOB["max_num_seqs"]] = 32
    num_blocks: Annotated[int | None, _KNOB["num_blocks"]] = None
    kv_cache_memory_bytes: Annotated[int | None, _KNOB["kv_cache_memory_bytes"]] = None
    gpu_memory_utilization: Annotated[Share | None, _KNOB["gpu_memory_utilization"]] = None
    kv_cache_dtype: Annotated[Literal["auto", "fp8", "fp8_e4m3"], _KNOB["kv_cache_dtype"]] = "auto"
    block_size: Annotated[int | None, _KNOB["block_size"]] = None
    num_state_pages: Annotated[int | None, _KNOB["num_state_pages"]] = None
    state_interval: Annotated[int | None, _KNOB["state_interval"]] = None
    max_model_len: Annotated[int | None, _KNOB["max_model_len"]] = None
    max_num_batched_tokens: Annotated[int, _KNOB["max_num_batched_tokens"]] = 1024
    prompt_share: Annotated[float | None, _KNOB["prompt_share"]] = None
    itl_target_s: Annotated[float | None, _KNOB["itl_target_s"]] = None
    min_itl_target_s: Annotated[float, _KNOB["min_itl_target_s"]] = 0.0
    scheduling_policy: Annotated[QueuePolicy, _KNOB["scheduling_policy"]] = "fcfs"
    ageing_per_s: Annotated[float | None, _KNOB["ageing_per_s"]] = None
    enable_prefix_caching: Annotated[bool, _KNOB["enable_prefix_caching"]] = True
    overlap: Annotated[Literal[0, 1] | None, _KNOB["overlap"]] = None
    seed: Annotated[int | None, _KNOB["seed"]] = None
    generation_config: Literal["auto", "none"] = "auto"
    random_weights_seed: int | None = None
    draft_method: DraftMethod | None = None  # kind of the draft; None: as its files say

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, str):  # a `torch.dtype`
            msgspec.structs.force_setattr(self, "dtype", str(self.dtype).removeprefix("torch."))
        convert_fields(self)
        if self.dtype == "float":  # as in vLLM
            msgspec.structs.force_setattr(self, "dtype", "float32")
        counts = "num_blocks kv_cache_memory_bytes num_state_pages state_interval max_model_len"
        for field in (*counts.split(), "threads", "tensor_parallel_size"):
            value = getattr(self, field)
            if isinstance(value, int) and value < 1:
                raise FieldError(field, f"{value!r} is not allowed", "give 1 or more, or leave out")
        pool = self.num_blocks, self.kv_cache_memory_bytes
        if self.gpu_memory_utilization is not None and pool != (None, None):
            problem = "would be ignored, since the size of the KV cache is given"
            raise FieldError("gpu_memory_utilization", problem, "leave one of them out")
        self._limit_drafts()
        self._name_own_head()
        if self.drafter is not None and not is_chain(self.drafter):
            remedy = f"name one or more of {', '.join(DRAFTERS)}, mtp, each once"
            raise FieldError("drafter", f"{self.drafter!r} is not allowed", remedy)

    def shared_with(self, kind: Any) -> dict[str, Any]:
        names = getattr(kind, "__struct_fields__", None) or kind._fields
        return {name: getattr(self, name) for name in names if name in self.__struct_fields__}

    @property
    def may_draft(self) -> bool:
        return parse_lookahead(self.lookahead).policy != "off"

    def _name_own_head(self) -> None:
        """Replace `mtp` in the chain by the name of every draft, and set the draft's method."""
        if self.drafter is None or MTP not in self.drafter:
            return
        if self.draft_method not in (None, MTP):
            problem = f"mtp and method {self.draft_method} exclude each other"
            raise FieldError("drafter", problem, "leave one of them out")
        chain = tuple(MODEL if name == MTP else name for name in self.drafter)
        msgspec.structs.force_setattr(self, "drafter", chain)
        msgspec.structs.force_setattr(self, "draft_method", MTP)

    def _limit_drafts(self) -> None:
        """Move `num_speculative_tokens` into `lookahead`, as its k."""
        lookahead, k = parse_lookahead(self.lookahead), self.num_speculative_tokens
        if k is None:
            return
        has_k = not isinstance(self.lookahead, str) or self.lookahead.split(":")[-1].isdecimal()
        if lookahead.policy == "off" or (has_k and lookahead.k != k):
            problem = f"{k} and lookahead {lookahead_name(lookahead)} exclude each other"
            raise FieldError("num_speculative_tokens", problem, "leave one of them out")
        if not has_k:
            msgspec.structs.force_setattr(self, "lookahead", f"{self.lookahead}:{k}")
        msgspec.structs.force_setattr(self, "num_speculative_tokens", None)


# The only supported values: ranks do not split the draft, and `ngram` looks up 2 to 4 tokens.
_REQUIRED = {"draft_tensor_parallel_size": 1, "prompt_lookup_max": 4, "prompt_lookup_min": 2}


class SpeculativeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields of vLLM's `speculative_config` that this engine has options for."""

    model: str | None = None
    method: Literal["ngram", "suffix"] | DraftMethod | None = None
    num_speculative_tokens: NumDrafts | None = None
    draft_tensor_parallel_size: int | None = None
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The draft model and the engine's options. `speculative_config` is converted to both.
    Raises `FieldError`."""

    draft: Annotated[str | None, _KNOB["draft"]] = None
    speculative_config: Annotated[SpeculativeConfig | None, _KNOB["speculative_config"]] = None
    engine: EngineOptions = EngineOptions()

    def __post_init__(self) -> None:
        set_field = msgspec.structs.force_setattr
        if self.speculative_config is None:
            return
        try:  # from a caller of `LLM` it is a dict
            config = msgspec.convert(self.speculative_config, SpeculativeConfig)
        except msgspec.ValidationError as error:
            remedy = f"use {', '.join(SpeculativeConfig.__struct_fields__)}"
            raise FieldError("speculative_config", str(error), remedy) from error
        for name, required in _REQUIRED.items():
            if (value := getattr(config, name)) not in (None, required):
                problem = f"{name} {value} is not supported"
                raise FieldError("speculative_config", problem, f"use {required}, or leave it out")
        lookup, k = config.method in LOOKUPS, config.num_speculative_tokens
        if lookup == (config.model is not None) and config.method != MTP:
            problem = f"method {config.method!r} with model {config.model!r}"
            remedy = "give a model, or method ngram, suffix or mtp alone"
            raise FieldError("speculative_config", problem, remedy)
        drafter = self.engine.drafter
        own_head_unused = config.method == MTP and not {MTP, MODEL} & set(drafter or (MTP,))
        if self.draft is not None or (lookup and drafter is not None) or own_head_unused:
            problem = "and draft or drafter exclude each other"
            raise FieldError("speculative_config", problem, "leave one out")
        method = {"drafter": (config.method,)} if lookup else {"draft_method": config.method}
        changes = method if k is None else method | {"num_speculative_tokens": k}
        set_field(self, "draft", config.model)
        set_field(self, "engine", msgspec.structs.replace(self.engine, **changes))
        set_field(self, "speculative_config", None)


def settings_of_keywords(options: Mapping[str, Any]) -> EngineSettings:
    """Return the settings for keyword arguments, under any of a field's names. Values have the type
    and unit of the field. Raises `FieldError` for an option that is unknown or not supported."""
    infos = [*msgspec.structs.fields(EngineSettings)[:-1], *msgspec.structs.fields(EngineOptions)]
    known = {name: info.name for info in infos for name in (info.name, *names_of(info))}
    fields: dict[str, Any] = {}
    for name, value in options.items():
        field = known.get(name)
        if field is None:
            require_neutral_option(name, value, name, set(known.values()))
        elif field in fields:
            raise FieldError(name, f"{field} is given twice", "leave one out")
        else:
            fields[field] = value
    draft = {name: fields.pop(name) for name in ("draft", "speculative_config") if name in fields}
    return EngineSettings(**draft, engine=EngineOptions(**fields))
