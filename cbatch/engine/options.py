"""Options of an engine."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

import msgspec

from cbatch.core.prices.step_costs import PROMPT_SHARE
from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import DRAFTERS, is_chain
from cbatch.core.request.typed import convert_fields, knob
from cbatch.core.scheduler import knobs
from cbatch.core.scheduler.config import QueuePolicy
from cbatch.core.speculation.build import parse_lookahead
from cbatch.core.speculation.config import LookaheadConfig

_engine = partial(knob, "engine")
_DRAFTER = (
    f"{', '.join(DRAFTERS)}; repeatable, preferred first; ngram and suffix look up repeated text "
    "and need no draft model (default: model, if there is a draft model)"
)
ModelImpl = Literal["auto", "own", "transformers"]


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of an engine. Every field has a default that suits a small machine.

    `lookahead` is "off", "ema", "adaptive", "fixed:4" (k drafts), "ema:8" (at most k drafts), or a
    `LookaheadConfig`. `drafter` lists the drafters of a request that names none, preferred first:
    "model" (the draft model), "ngram" and "suffix" (lookups of repeated text, without a model). Its
    default is the draft model, or no drafting without one.

    The KV cache has `num_blocks` blocks, or as many as fit `kv_memory_bytes`, or as many as fit a
    share of the memory. Its dtype is the model's; `kv_cache_dtype` "fp8" ("fp8_e4m3" is the same)
    halves its size. `overlap` 1, the default on a GPU, plans a step while another one runs. `seed`
    makes the seeds that are drawn for requests without a seed reproducible.

    `device` "auto" is a GPU that supports all other options, if torch has one, else the CPU.
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
    tensor_parallel_size: Annotated[int, knobs.TENSOR_PARALLEL_SIZE] = 1
    lookahead: Annotated[str | LookaheadConfig, knobs.LOOKAHEAD] = "adaptive"
    drafter: Annotated[tuple[str, ...] | None, _engine(_DRAFTER, "NAME")] = None
    max_num_seqs: Annotated[int, knobs.MAX_NUM_SEQS] = 32
    num_blocks: Annotated[int | None, knobs.NUM_BLOCKS] = None
    kv_memory_bytes: Annotated[
        int | None,
        _engine("memory for the KV cache", "GIB", name="kv_memory", type=float | None, unit=2**30),
    ] = None
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8", "fp8_e4m3"],
        _engine("dtype of keys and values; auto: the model's; fp8: on GPUs that support it"),
    ] = "auto"
    block_size: Annotated[int | None, knobs.BLOCK_SIZE] = None
    max_model_len: Annotated[int | None, knobs.MAX_MODEL_LEN] = None
    max_num_batched_tokens: Annotated[int, knobs.MAX_NUM_BATCHED_TOKENS] = 1024
    prompt_share: Annotated[
        float | None,
        _engine(
            "prompt throughput while sequences decode, as a share of the highest; less gives "
            f"shorter gaps between tokens (default: {PROMPT_SHARE} for serve, else 1)",
            "SHARE",
        ),
    ] = None
    itl_target_s: Annotated[float | None, knobs.ITL_TARGET] = None
    queue_policy: Annotated[QueuePolicy, knobs.QUEUE_POLICY] = "fcfs"
    ageing_per_s: Annotated[
        float | None, _engine("gain in priority per second in the queue", "N", name="ageing")
    ] = None
    enable_prefix_caching: Annotated[bool, knobs.PREFIX_CACHE] = True
    overlap: Annotated[
        Literal[0, 1] | None,
        _engine("1: plan the next step while one runs (default: 1 on a GPU, else 0)"),
    ] = None
    seed: Annotated[
        int | None,
        _engine("seed from which requests without a seed get theirs", "SEED", name="engine_seed"),
    ] = None
    generation_config: Literal["auto", "none"] = "auto"
    random_weights_seed: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, str):  # a dtype of torch
            msgspec.structs.force_setattr(self, "dtype", str(self.dtype).removeprefix("torch."))
        convert_fields(self)
        counts = "num_blocks", "kv_memory_bytes", "max_model_len", "threads", "tensor_parallel_size"
        for field in counts:
            value = getattr(self, field)
            if isinstance(value, int) and value < 1:
                raise FieldError(field, f"{value!r} is not allowed", "give 1 or more, or leave out")
        parse_lookahead(self.lookahead)
        if self.drafter is not None and not is_chain(self.drafter):
            remedy = f"name one or more of {', '.join(DRAFTERS)}, each once"
            raise FieldError("drafter", f"{self.drafter!r} is not allowed", remedy)
