"""Options of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from cbatch.core.prices.chunk_sizes import PROMPT_SHARE
from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import DRAFTERS, LOOKUPS, is_chain
from cbatch.core.request.typed import convert_fields, knob, mark_of, names_of
from cbatch.core.scheduler.config import QueuePolicy
from cbatch.core.speculation.build import lookahead_name, parse_lookahead
from cbatch.core.speculation.config import MAX_DRAFTS, LookaheadConfig
from cbatch.engine.unsupported import require_neutral_option

_engine = partial(knob, "engine")
_DRAFTER = (
    f"{', '.join(DRAFTERS)}; repeatable, preferred first; ngram and suffix look up repeated text "
    "and need no draft model (default: model, if there is a draft model)"
)
NumDrafts = Annotated[int, msgspec.Meta(ge=1, le=MAX_DRAFTS)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
ModelImpl = Literal["auto", "own", "transformers"]
DraftMethod = Literal["draft_model", "eagle", "eagle3", "medusa"]


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of an engine. Every field has a default that suits a small machine.

    `lookahead` is "off", "ema", "adaptive", "fixed:4" (k drafts), "ema:8" (at most k drafts), or a
    `LookaheadConfig`. `drafter` lists the default drafters of requests, preferred first: "model"
    (the draft model), "ngram" and "suffix" (lookups of repeated text, without a model). Without it
    the draft model drafts, if there is a draft model.

    The KV cache has `num_blocks` blocks, or fills `kv_cache_memory_bytes`. By default it fits
    what weights and buffers leave of `gpu_memory_utilization`, a share of the memory of the GPU or
    of the machine. `kv_cache_dtype` "fp8" (or "fp8_e4m3") halves the size of the KV cache; by
    default its dtype is the model's. `overlap` 1, the default on a GPU, plans a step while the
    previous step runs. `seed` determines the seeds of requests without a seed.

    `device` "auto" is a GPU if torch has a GPU that supports all other options, else the CPU.
    `model_impl` selects the modelling code: our own, for four families and 30 more on a CPU, or
    transformers, which needs the extra `models`. "auto" is our own if it supports the model.
    `threads` is the number of CPU threads; by default the CPUs that the process may use, by
    affinity and quota. `tokenizer` is a path, if the tokenizer is not with the model; "none" serves
    token ids only. `generation_config` "none" ignores the sampling defaults of the model.
    """

    tokenizer: Annotated[str | None, _engine("tokenizer, if it is not with the model", "MODEL")] = (
        None
    )
    dtype: Annotated[str, _engine("auto (the model's), float32, bfloat16")] = "auto"
    device: Annotated[str, _engine("auto, cpu, cuda, cuda:1")] = "auto"
    numerics: Annotated[
        Literal["auto", "invariant", "fast"],
        _engine("invariant: a row's bits do not depend on the batch"),
    ] = "auto"
    threads: Annotated[
        int | Literal["auto"],
        _engine("CPU threads of each rank; auto: the CPUs that the process may use", "N"),
    ] = "auto"
    model_impl: Annotated[
        ModelImpl,
        _engine(
            "modelling code; auto: own if it supports the model, else transformers (extra 'models')"
        ),
    ] = "auto"
    tensor_parallel_size: Annotated[
        int,
        _engine(
            "number of ranks (CPU processes) among which the model is sharded",
            "N",
            aliases=("tp",),
            default=1,
        ),
    ] = 1
    lookahead: Annotated[
        str | LookaheadConfig,
        _engine(
            "off, adaptive, ema or fixed; ema:K drafts at most K tokens, fixed:K always K; "
            "module:Class is a policy of your own",
            "POLICY",
            type=str,
        ),
    ] = "adaptive"
    num_speculative_tokens: Annotated[
        NumDrafts | None,
        _engine(
            "maximum number of drafts of a sequence in a step: K of --lookahead",
            "N",
            aliases=("spec_tokens",),
        ),
    ] = None
    drafter: Annotated[tuple[str, ...] | None, _engine(_DRAFTER, "NAME")] = None
    max_num_seqs: Annotated[int, _engine("maximum number of sequences in a step", "N")] = 32
    num_blocks: Annotated[
        int | None,
        _engine(
            "number of KV blocks",
            "N",
            aliases=("num_gpu_blocks_override",),
            default="as memory allows",
        ),
    ] = None
    kv_cache_memory_bytes: Annotated[
        int | None, _engine("memory for the KV cache, as 4G", "BYTES")
    ] = None
    gpu_memory_utilization: Annotated[
        Share | None, _engine("maximum share of a device's memory", "SHARE")
    ] = None
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8", "fp8_e4m3"],
        _engine("dtype of keys and values; auto: the model's; fp8: on GPUs that support it"),
    ] = "auto"
    block_size: Annotated[
        int | None, _engine("tokens per KV block", "TOKENS", default="64 on a GPU, else 16")
    ] = None
    max_model_len: Annotated[
        int | None, _engine("maximum length of a sequence", "TOKENS", default="the model's")
    ] = None
    max_num_batched_tokens: Annotated[
        int, _engine("maximum number of tokens in a step", "TOKENS")
    ] = 1024
    prompt_share: Annotated[
        float | None,
        _engine(
            "prompt throughput while sequences decode, as a share of the highest; less gives "
            f"shorter gaps between tokens (default: {PROMPT_SHARE} for serve, else 1)",
            "SHARE",
        ),
    ] = None
    itl_target_s: Annotated[
        float | None,
        _engine(
            "target for the gap between two tokens of a sequence while prompts are computed",
            "SECONDS",
            name="itl_target",
        ),
    ] = None
    min_itl_target_s: Annotated[
        float,
        _engine(
            "shortest target that a call's x-slo-itl-ms can set; a shorter one is raised to it",
            "SECONDS",
            name="min_itl_target",
        ),
    ] = 0.0
    scheduling_policy: Annotated[
        QueuePolicy, _engine("order in which requests get a slot", name="scheduling_policy")
    ] = "fcfs"
    ageing_per_s: Annotated[
        float | None, _engine("gain in priority per second in the queue", "N", name="ageing")
    ] = None
    enable_prefix_caching: Annotated[bool, _engine("share the KV of equal prompt prefixes")] = True
    overlap: Annotated[
        Literal[0, 1] | None,
        _engine("1: plan the next step while one runs (default: 1 on a GPU, else 0)"),
    ] = None
    seed: Annotated[
        int | None,
        _engine(
            "seed from which requests without a seed get theirs",
            "SEED",
            name="engine_seed",
            aliases=("seed",),
        ),
    ] = None
    generation_config: Literal["auto", "none"] = "auto"
    random_weights_seed: int | None = None
    draft_method: DraftMethod | None = None  # kind of the draft; None: as its files say

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, str):  # a `torch.dtype`
            msgspec.structs.force_setattr(self, "dtype", str(self.dtype).removeprefix("torch."))
        convert_fields(self)
        if self.dtype == "float":  # as in vLLM
            msgspec.structs.force_setattr(self, "dtype", "float32")
        counts = "num_blocks kv_cache_memory_bytes max_model_len threads tensor_parallel_size"
        for field in counts.split():
            value = getattr(self, field)
            if isinstance(value, int) and value < 1:
                raise FieldError(field, f"{value!r} is not allowed", "give 1 or more, or leave out")
        pool = self.num_blocks, self.kv_cache_memory_bytes
        if self.gpu_memory_utilization is not None and pool != (None, None):
            problem = "would be ignored, since the size of the KV cache is given"
            raise FieldError("gpu_memory_utilization", problem, "leave one of them out")
        self._limit_drafts()
        if self.drafter is not None and not is_chain(self.drafter):
            remedy = f"name one or more of {', '.join(DRAFTERS)}, each once"
            raise FieldError("drafter", f"{self.drafter!r} is not allowed", remedy)

    def shared_with(self, kind: Any) -> dict[str, Any]:
        """Return the options that are also fields of `kind`, a struct or named tuple, by name."""
        names = getattr(kind, "__struct_fields__", None) or kind._fields
        return {name: getattr(self, name) for name in names if name in self.__struct_fields__}

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


def engine_knob(field: str) -> Meta:
    """Return the mark of a field of `EngineOptions`, for a struct that has the same option."""
    (info,) = (each for each in msgspec.structs.fields(EngineOptions) if each.name == field)
    return mark_of(info)


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

    draft: Annotated[
        str | None,
        _engine(
            "draft model, or an EAGLE or Medusa head of the model",
            "MODEL",
            aliases=("spec_model",),
        ),
    ] = None
    speculative_config: Annotated[
        SpeculativeConfig | None,
        _engine("draft, drafter and number of drafts, as in vLLM", "JSON", aliases=("sc",)),
    ] = None
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
        if lookup == (config.model is not None):
            problem = f"method {config.method!r} with model {config.model!r}"
            remedy = "give a model, or method ngram or suffix alone"
            raise FieldError("speculative_config", problem, remedy)
        if self.draft is not None or (lookup and self.engine.drafter is not None):
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
