"""Puts an engine together from model files; only here scheduler and runtime meet."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import numpy as np

from cbatch.core.request.errors import FieldError
from cbatch.core.request.from_json import sampling_from_json
from cbatch.core.request.request import LOOKUPS, MODEL, SamplingParams
from cbatch.core.request.unsupported import refuse_model_files
from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.scheduler.events import Event
from cbatch.core.scheduler.scheduler import Scheduler
from cbatch.core.speculation.build import policy_class
from cbatch.core.speculation.config import LookaheadConfig
from cbatch.engine.backends import (
    depth_for,
    executor_for,
    gpu_step_bytes,
    held_drafters,
    is_gpu,
    kv_dtype_of,
    load_for,
    refuse_unserved,
    row_invariance_of,
    usual_device,
)
from cbatch.engine.engine import Engine
from cbatch.engine.heads import take_head
from cbatch.engine.info import EngineInfo, mib
from cbatch.engine.model_files import find_model, gguf_of, tokenizer_of
from cbatch.engine.options import EngineOptions, lookahead_name, parse_lookahead
from cbatch.grammars import Grammars
from cbatch.runtime.model.config import GENERATION_FILE, ModelError, read_generation_config
from cbatch.runtime.model.head_config import is_head
from cbatch.system.cpus import given_cpus
from cbatch.text import TextTokenizer

if TYPE_CHECKING:
    from cbatch.engine.backends import AnyModel
    from cbatch.runtime.cpu.decoder import Model
    from cbatch.runtime.model.gguf_file import Gguf

_logger = logging.getLogger("cbatch")

_LARGEST_FP32 = float(np.finfo(np.float32).max)
# For KV, unless a size is given: of the machine's memory; of what a GPU has left beside weights and
# what steps work in.
MEMORY_SHARE = {"cpu": 0.25, "cuda": 0.85}
# Fields of the file that vLLM heeds too, and what we call them. `do_sample` is none: a call that
# leaves its temperature out is sampled, at 1 where the file has none.
_GENERATION_FIELDS = {
    "repetition_penalty": "repetition_penalty",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
}
_GGUF_FIELDS = {
    "general.sampling.penalty_repeat": "repetition_penalty",
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
}


def load_engine(
    model: str | Path,
    draft: str | Path | None = None,
    options: EngineOptions | None = None,
    *,
    handles_text: bool = True,
    log: Callable[[Event], None] | None = None,
    kv_events: bool = False,
) -> tuple[Engine, EngineInfo]:
    """Loads a model, and the draft that guesses for it, into an `Engine` to be driven by the
    caller. With `handles_text` False it is given token ids alone. `log` is given every input of its
    scheduler, see `cbatch.steplog.step_log`. With `kv_events` the caller takes
    `scheduler.take_cache_changes` after every step. Raises `FieldError`, or the runtime's or
    tokenizer's error naming file and field."""
    from cbatch.runtime.cpu.threaded import ThreadedExecutor

    options = options or EngineOptions()
    if draft is None and MODEL in (options.drafter or ()):
        remedy = f"give a draft, or use {' or '.join(LOOKUPS)}"
        raise FieldError("drafter", "'model' needs a draft", remedy)
    model = find_model(model)
    draft = None if draft is None else find_model(draft, "draft")
    files = _checked(model, "model"), None if draft is None else _checked_draft(draft, model)
    path, draft_path = files[0].path, files[1] and files[1].path
    defaults = sampling_defaults(path) if options.generation_config == "auto" else {}
    tokenizer = load_tokenizers(path, draft_path, options) if handles_text else None
    device, target, draft_model = _load_models(model, draft, draft_path, options, tokenizer)
    config = _scheduler_config(target, draft_model, options, kv_events)
    grammars = None
    if options.tokenizer != "none":
        source = options.tokenizer or model
        grammars = Grammars(
            lambda: tokenizer or tokenizer_of(source), config.vocab_size, config.eos_ids
        )
    executor = executor_for(target, draft_model, config, grammars, options.kv_cache_dtype)
    if policy_class(config.lookahead.policy).priced:
        from cbatch.engine.kept_prices import with_prices

        paths = model, draft
        config = with_prices(config, executor, target, draft_model, paths, options.kv_cache_dtype)
    info = _info(model, draft, target, draft_model, config, options, defaults)
    for line in info.lines():
        _logger.info(line)
    depth = depth_for(device, options.overlap)
    engine = Engine(
        Scheduler(config, log),
        ThreadedExecutor(executor) if depth and not is_gpu(device) else executor,
        tokenizer=tokenizer,
        depth=depth,
        seed=options.seed,
        drafters=held_drafters(config),
        grammars=grammars,
        default_params=SamplingParams(**defaults),
    )
    return engine, info


def load_tokenizers(
    model: str | Path, draft: str | Path | None, options: EngineOptions
) -> TextTokenizer | None:
    """The model's, or None if the options want none. Raises `TokenizerError` if the draft's is not
    the same. Loads nothing of the runtime."""
    if options.tokenizer == "none":
        return None
    tokenizer = tokenizer_of(options.tokenizer or model)
    if draft is not None and not is_head(Path(draft)):
        tokenizer_of(draft).require_same_as(tokenizer)
    return tokenizer


class _Files(NamedTuple):
    """Where a model is. Its GGUF file is held for who reads config, weights and text of it."""

    path: Path
    gguf: Gguf | None


def _checked(model: str | Path, field: str) -> _Files:
    """Once its configuration can be served: before anything large loads."""
    from cbatch.runtime.model.checkpoint import read_config, resolve_directory

    refuse_model_files(Path(model), field)
    path = resolve_directory(model, weights=False)
    gguf = gguf_of(path)
    read_config(path)
    return _Files(path, gguf)


def _checked_draft(draft: str | Path, model: str | Path) -> _Files:
    from cbatch.runtime.model.checkpoint import read_config, resolve_directory
    from cbatch.runtime.model.head_config import read_head

    path = resolve_directory(draft, weights=True)
    if not is_head(path):
        return _checked(draft, "draft")
    read_head(path, read_config(resolve_directory(model, weights=False)))
    return _Files(path, None)


def _load_models(
    model: str | Path,
    draft: str | Path | None,
    draft_path: Path | None,
    options: EngineOptions,
    tokenizer: TextTokenizer | None,
) -> tuple[str, AnyModel, AnyModel | None]:
    """Where they are served, the target and its draft."""
    asked: dict[str, Any] = {
        name: getattr(options, name) for name in ("block_size_tokens", "kv_cache_dtype")
    }
    head = draft_path if draft_path is not None and is_head(draft_path) else None
    asked["head"] = head
    device = options.device
    if device == "auto":
        device = usual_device(numerics=options.numerics, **asked)
    refuse_unserved(device, **asked)
    if not is_gpu(device):
        _share_processors(options.threads)
    load = partial(
        load_for,
        device,
        dtype=options.dtype,
        numerics=options.numerics,
        random_weights_seed=options.random_weights_seed,
    )
    target = load(model)
    if head is not None:
        return device, target, take_head(head, cast("Model", target), model, tokenizer)
    return device, target, None if draft is None else load(draft)


def _share_processors(threads: int | Literal["auto"]) -> None:
    """`OMP_NUM_THREADS` and its like are torch's to look at."""
    import torch

    given = min(torch.get_num_threads(), given_cpus())
    torch.set_num_threads(given if threads == "auto" else threads)


def _scheduler_config(
    target: AnyModel, draft: AnyModel | None, options: EngineOptions, kv_events: bool
) -> SchedulerConfig:
    context = target.config.max_position_tokens
    max_tokens = options.max_model_tokens or context
    if max_tokens > context:
        raise FieldError(
            "max_model_tokens",
            f"{max_tokens} is more than the model's context",
            f"use <= {context}",
        )
    drafts = draft is not None or options.drafter is not None
    num_blocks = _num_blocks(target, draft, options, max_tokens)
    if options.max_model_tokens and num_blocks * options.block_size_tokens < max_tokens:
        field = "num_blocks" if options.num_blocks is not None else "kv_memory_bytes"
        least = -(-max_tokens // options.block_size_tokens)
        size = _block_bytes(target, draft, options)
        raise FieldError(
            field,
            f"{num_blocks} blocks hold no sequence of {max_tokens} tokens",
            f"give {least} blocks ({mib(least * size)}) or more, or a smaller max_model_tokens",
        )
    return SchedulerConfig(
        num_blocks=num_blocks,
        block_size_tokens=options.block_size_tokens,
        max_slots=options.max_slots,
        max_model_tokens=max_tokens,
        step_budget_tokens=max(options.step_budget_tokens, options.max_slots),
        vocab_size=target.config.vocab_size,
        eos_ids=target.config.eos_token_ids,
        queue_policy=options.queue_policy,
        ageing_per_s=options.ageing_per_s,
        prefix_cache=options.prefix_cache,
        kv_events=kv_events,
        draft_context_tokens=draft.config.max_position_tokens if draft is not None else None,
        # Of a draft token in target tokens, about: work goes with the weights.
        catch_up_price=1.0
        if draft is None
        else min(_weight_bytes(draft) / _weight_bytes(target), 1.0),
        drafter=None if options.drafter is None else tuple(options.drafter),
        lookahead=parse_lookahead(options.lookahead) if drafts else LookaheadConfig(),
    )


def _num_blocks(
    target: AnyModel, draft: AnyModel | None, options: EngineOptions, max_tokens: int
) -> int:
    """As asked, or enough for every slot at full length within the memory for KV."""
    if options.num_blocks is not None:
        return options.num_blocks
    size = _block_bytes(target, draft, options)
    if options.kv_memory_bytes is not None:
        if options.kv_memory_bytes < size:
            remedy = f"give at least {size} bytes ({size / 2**30:.2g} GiB)"
            raise FieldError("kv_memory_bytes", "holds no block", remedy)
        return options.kv_memory_bytes // size
    wanted = options.max_slots * -(-max_tokens // options.block_size_tokens)
    kv_bytes = _memory_for_kv_bytes(target, draft, options, max_tokens)
    return max(1, min(wanted, kv_bytes // size))


def _block_bytes(target: AnyModel, draft: AnyModel | None, options: EngineOptions) -> int:
    from cbatch.runtime.model.kv_cache import KVCache

    return sum(
        KVCache.block_bytes(
            model.config, options.block_size_tokens, kv_dtype_of(model, options.kv_cache_dtype)
        )
        for model in (target, draft)
        if model is not None
    )


def _memory_for_kv_bytes(
    target: AnyModel, draft: AnyModel | None, options: EngineOptions, max_tokens: int
) -> int:
    import torch

    from cbatch.runtime.cpu.numerics import memory_bytes

    device = torch.device(target.device)
    if device.type != "cuda":
        return int(memory_bytes() * MEMORY_SHARE["cpu"])
    free_bytes, _ = torch.cuda.mem_get_info(device)
    taken_bytes = gpu_step_bytes(target, draft, options, max_tokens)
    if taken_bytes >= free_bytes:
        raise FieldError(
            "max_slots",
            f"steps work in {mib(taken_bytes)}, {mib(free_bytes)} are free beside the weights",
            "use fewer slots, a smaller step_budget_tokens or max_model_tokens",
        )
    return int((free_bytes - taken_bytes) * MEMORY_SHARE["cuda"])


def _info(
    model: str | Path,
    draft: str | Path | None,
    target: AnyModel,
    draft_model: AnyModel | None,
    config: SchedulerConfig,
    options: EngineOptions,
    defaults: dict[str, Any],
) -> EngineInfo:
    import torch

    row_invariant, row_invariance = row_invariance_of(target)
    return EngineInfo(
        model=str(model),
        draft=None if draft is None else str(draft),
        dtype=str(target.dtype).removeprefix("torch."),
        device=str(target.device),
        numerics=target.numerics,
        row_invariant=row_invariant,
        row_invariance=row_invariance,
        lookahead=lookahead_name(config.lookahead),
        drafter=config.default_chain,
        weight_bytes=sum(_weight_bytes(m) for m in (target, draft_model) if m is not None),
        num_blocks=config.num_blocks,
        block_size_tokens=config.block_size_tokens,
        kv_memory_bytes=config.num_blocks * _block_bytes(target, draft_model, options),
        max_model_tokens=config.max_model_tokens,
        num_threads=torch.get_num_threads(),
        sampling_defaults=defaults,
    )


def _weight_bytes(model: AnyModel) -> int:
    """Of the matrices as they are held; norms and biases are next to nothing."""
    from cbatch.runtime.cpu.numerics import num_weights

    held: int | None = getattr(model, "block_bytes", None)
    if held is not None:
        return held
    c = model.config
    count = num_weights(c)
    if not c.tie_embeddings:
        count += c.vocab_size * c.hidden_size
    return count * model.dtype.itemsize


def sampling_defaults(model: Path) -> dict[str, Any]:
    """How a model's makers want it sampled: fields of `SamplingParams` that its
    `generation_config.json`, or a GGUF file's metadata, set. Raises `ModelError` naming file and
    field."""
    gguf = gguf_of(model)
    file = model if gguf else model / GENERATION_FILE
    values = gguf.metadata if gguf else read_generation_config(model)
    found: dict[str, Any] = {}
    for name, field in (_GGUF_FIELDS if gguf else _GENERATION_FIELDS).items():
        value = values.get(name)
        of_all = field == "top_k" and isinstance(value, int | float) and value in (-1, 0)
        if value is None or of_all:
            continue
        if gguf and isinstance(value, float) and abs(value) < _LARGEST_FP32:
            value = float(str(np.float32(value)))  # as its makers wrote it
        try:
            found[field] = getattr(sampling_from_json({field: value}), field)
        except FieldError as error:
            raise ModelError(
                f"{file}: {name}: {error.problem}; {error.remedy}, or do "
                'without its defaults (generation_config="none")'
            ) from error
    return found
