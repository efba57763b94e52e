"""Puts an engine together from model files; only here scheduler and runtime meet."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec
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
    block_size_for,
    code_of,
    depth_for,
    executor_for,
    held_drafters,
    is_gpu,
    num_ranks,
    row_invariance_of,
)
from cbatch.engine.engine import Engine
from cbatch.engine.info import EngineInfo, mib
from cbatch.engine.loading import load_models
from cbatch.engine.loop import Executor
from cbatch.engine.memory import block_bytes, num_blocks, weight_bytes
from cbatch.engine.model_files import find_model, gguf_of, load_tokenizers, tokenizer_of
from cbatch.engine.model_impl import Impl, checked_impl, choose_impl
from cbatch.engine.options import EngineOptions, lookahead_name, parse_lookahead
from cbatch.engine.ranks.executor import RankedExecutor
from cbatch.engine.ranks.messages import Probe, Serve
from cbatch.grammars import Grammars
from cbatch.runtime.model.config import GENERATION_FILE, ModelError, eos_ids_of, read_optional
from cbatch.runtime.model.head_config import is_head

if TYPE_CHECKING:
    from cbatch.engine.backends import AnyModel
    from cbatch.engine.ranks.group import Ranks
    from cbatch.runtime.cpu.executor import TorchExecutor
    from cbatch.runtime.gpu import GpuExecutor
    from cbatch.runtime.model.gguf_file import Gguf

_logger = logging.getLogger("cbatch")

_LARGEST_FP32 = float(np.finfo(np.float32).max)
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
    with ExitStack() as opened:
        options = options or EngineOptions()
        made = _load_engine(opened, model, draft, options, handles_text, log, kv_events)
        opened.pop_all()
        return made


def _load_engine(
    opened: ExitStack,
    model: str | Path,
    draft: str | Path | None,
    options: EngineOptions,
    handles_text: bool,
    log: Callable[[Event], None] | None,
    kv_events: bool,
) -> tuple[Engine, EngineInfo]:
    """What is `opened` is closed where it fails."""
    from cbatch.runtime.cpu.threaded import ThreadedExecutor

    if draft is None and MODEL in (options.drafter or ()):
        remedy = f"give a draft, or use {' or '.join(LOOKUPS)}"
        raise FieldError("drafter", "'model' needs a draft", remedy)
    model = find_model(model)
    draft = None if draft is None else find_model(draft, "draft")
    files = _checked_files(model, draft, options)
    path, draft_path = files[0].path, files[1] and files[1].path
    impls = files[0].impl, files[1].impl if files[1] is not None else "own"
    defaults = sampling_defaults(path) if options.generation_config == "auto" else {}
    tokenizer = load_tokenizers(path, draft_path, options) if handles_text else None
    device, target, draft_model, ranks = load_models(
        opened, model, draft, draft_path, options, tokenizer, impls
    )
    config = _scheduler_config(target, draft_model, options, kv_events)
    grammars = None
    if options.tokenizer != "none":
        source = options.tokenizer or model
        grammars = Grammars(
            lambda: tokenizer or tokenizer_of(source), config.vocab_size, config.eos_ids
        )
    usual = SamplingParams(**defaults)
    executor = _executor(target, draft_model, config, grammars, options, usual, ranks)
    if policy_class(config.lookahead.policy).priced:
        paths = model, draft
        config = _with_prices(config, executor, target, draft_model, paths, options.kv_cache_dtype)
    with nullcontext() if ranks is None else ranks.together(Probe()):
        invariance = row_invariance_of(target)
    info = _info(model, draft, target, draft_model, config, options, defaults, invariance)
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
        default_params=usual,
    )
    return engine, info


def _with_prices(
    config: SchedulerConfig,
    executor: Executor,
    target: AnyModel,
    draft: AnyModel | None,
    paths: tuple[str | Path, str | Path | None],
    kv_cache_dtype: str,
) -> SchedulerConfig:
    """Return `config` with what steps cost here, measured now or at an earlier start. Where no
    shape of a step fits, prices are learned while serving."""
    import torch

    from cbatch.engine.prices import startup
    from cbatch.runtime.cpu.compiled import compiles, version

    if not startup.can_profile(config):
        return config
    device = torch.device(target.device)
    cpu = f"{platform.node()} {platform.machine()} {platform.processor()} {os.cpu_count()}"
    processor = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu
    key = {
        "version": startup.VERSION,
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
    profile = startup.cached_profile(key, lambda: startup.profile_costs(executor, config))
    return msgspec.structs.replace(config, cost_profile=profile)


def _executor(
    target: AnyModel,
    draft: AnyModel | None,
    config: SchedulerConfig,
    grammars: Grammars | None,
    options: EngineOptions,
    default_params: SamplingParams,
    ranks: Ranks | None,
) -> TorchExecutor | GpuExecutor | RankedExecutor:
    made = executor_for(target, draft, config, grammars, options.kv_cache_dtype, default_params)
    if ranks is None:
        return made
    with ranks.together(Serve(config)):
        return RankedExecutor(cast("TorchExecutor", made), ranks)


class _Files(NamedTuple):
    """Where a model is, and whose code computes it. Its GGUF file is held for who reads config,
    weights and text of it."""

    path: Path
    gguf: Gguf | None
    impl: Impl


def _checked_files(
    model: str | Path, draft: str | Path | None, options: EngineOptions
) -> tuple[_Files, _Files | None]:
    target = _checked(model, "model", options)
    return target, None if draft is None else _checked_draft(draft, target, options)


def _checked(model: str | Path, field: str, options: EngineOptions) -> _Files:
    """Once its configuration can be served: before anything large loads."""
    local = Path(model).expanduser()
    refuse_model_files(local, field)
    if (local / "config.json").is_file():
        # Before torch is imported: who is refused need not wait.
        choose_impl(local, options, draft=field == "draft")
    from cbatch.runtime.model.checkpoint import resolve_directory

    path = resolve_directory(model, weights=False)
    gguf = gguf_of(path)
    return _Files(path, gguf, checked_impl(path, options, draft=field == "draft"))


def _checked_draft(draft: str | Path, target: _Files, options: EngineOptions) -> _Files:
    from cbatch.runtime.model.checkpoint import read_config, resolve_directory
    from cbatch.runtime.model.head_config import read_head

    path = resolve_directory(draft, weights=True)
    if not is_head(path):
        return _checked(draft, "draft", options)
    if target.impl == "own":
        read_head(path, read_config(target.path))
    return _Files(path, None, "own")


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
    eos_ids = target.config.eos_token_ids
    if options.tokenizer is not None and Path(options.tokenizer).is_dir():
        eos_ids = tuple(dict.fromkeys((*eos_ids, *eos_ids_of(Path(options.tokenizer)))))
    blocks = num_blocks(target, draft, options, max_tokens)
    block_tokens = block_size_for(target, options)
    if options.max_model_tokens and blocks * block_tokens < max_tokens:
        field = "num_blocks" if options.num_blocks is not None else "kv_memory_bytes"
        least = -(-max_tokens // block_tokens)
        size = block_bytes(target, draft, options)
        raise FieldError(
            field,
            f"{blocks} blocks hold no sequence of {max_tokens} tokens",
            f"give {least} blocks ({mib(least * size)}) or more, or a smaller max_model_tokens",
        )
    return SchedulerConfig(
        num_blocks=blocks,
        block_size_tokens=block_tokens,
        max_slots=options.max_slots,
        max_model_tokens=max_tokens,
        step_budget_tokens=max(options.step_budget_tokens, options.max_slots),
        vocab_size=target.config.vocab_size,
        eos_ids=eos_ids,
        prompt_share=1.0 if options.prompt_share is None else options.prompt_share,
        itl_target_s=options.itl_target_s,
        queue_policy=options.queue_policy,
        ageing_per_s=options.ageing_per_s,
        prefix_cache=options.prefix_cache,
        kv_events=kv_events,
        draft_context_tokens=draft.config.max_position_tokens if draft is not None else None,
        # Of a draft token in target tokens, about: work goes with the weights.
        catch_up_price=1.0
        if draft is None
        else min(weight_bytes(draft) / weight_bytes(target), 1.0),
        drafter=None if options.drafter is None else tuple(options.drafter),
        lookahead=parse_lookahead(options.lookahead) if drafts else LookaheadConfig(),
    )


def _info(
    model: str | Path,
    draft: str | Path | None,
    target: AnyModel,
    draft_model: AnyModel | None,
    config: SchedulerConfig,
    options: EngineOptions,
    defaults: dict[str, Any],
    invariance: tuple[bool, str],
) -> EngineInfo:
    import torch

    row_invariant, row_invariance = invariance
    ranks = num_ranks(target)
    return EngineInfo(
        model=str(model),
        draft=None if draft is None else str(draft),
        dtype=str(target.dtype).removeprefix("torch."),
        device=str(target.device),
        code=code_of(target),
        numerics=target.numerics,
        row_invariant=row_invariant,
        row_invariance=row_invariance,
        lookahead=lookahead_name(config.lookahead),
        drafter=config.default_chain,
        weight_bytes=ranks * sum(weight_bytes(m) for m in (target, draft_model) if m is not None),
        num_blocks=config.num_blocks,
        block_size_tokens=config.block_size_tokens,
        kv_memory_bytes=config.num_blocks * block_bytes(target, draft_model, options),
        max_model_tokens=config.max_model_tokens,
        num_threads=torch.get_num_threads(),
        ranks=ranks,
        sampling_defaults=defaults,
    )


def sampling_defaults(model: Path) -> dict[str, Any]:
    """How a model's makers want it sampled: fields of `SamplingParams` that its
    `generation_config.json`, or a GGUF file's metadata, set. Raises `ModelError` naming file and
    field."""
    gguf = gguf_of(model)
    file = model if gguf else model / GENERATION_FILE
    values = gguf.metadata if gguf else read_optional(file)
    found: dict[str, Any] = {}
    for name, field in (_GGUF_FIELDS if gguf else _GENERATION_FIELDS).items():
        value = values.get(name)
        if value is None:
            continue
        if gguf and isinstance(value, float) and abs(value) < _LARGEST_FP32:
            value = float(str(np.float32(value)))  # as its makers wrote it
        try:
            params = sampling_from_json({field: value})
        except FieldError as error:
            raise ModelError(
                f"{file}: {name}: {error.problem}; {error.remedy}, or do "
                'without its defaults (generation_config="none")'
            ) from error
        if getattr(params, field) is not None:
            found[field] = getattr(params, field)
        if params.greedy:  # also by a `top_p` of 0
            found["temperature"] = 0.0
    return found
