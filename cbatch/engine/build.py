"""Builds an engine from model files: the only place that creates both scheduler and executor."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import LOOKUPS, MODEL, SamplingParams
from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.scheduler.events import Event
from cbatch.core.scheduler.scheduler import Scheduler
from cbatch.core.speculation.build import lookahead_name, parse_lookahead
from cbatch.core.speculation.config import LookaheadConfig
from cbatch.engine.backends import (
    allowed_drafters,
    block_size_for,
    code_of,
    depth_for,
    executor_for,
    is_gpu,
    num_ranks,
    row_invariance_of,
)
from cbatch.engine.core import EngineCore
from cbatch.engine.engine import Engine
from cbatch.engine.info import EngineInfo, mib
from cbatch.engine.kept_prices import with_prices
from cbatch.engine.loading import load_models
from cbatch.engine.memory import block_bytes, num_blocks, weight_bytes
from cbatch.engine.model_files import (
    find_model,
    load_tokenizers,
    sampling_defaults,
    tokenizer_of,
)
from cbatch.engine.model_impl import check_files
from cbatch.engine.options import EngineOptions
from cbatch.engine.ranks.executor import RankedExecutor
from cbatch.engine.ranks.messages import Probe, Serve
from cbatch.grammars import Grammars
from cbatch.runtime.model.config import eos_ids_of

if TYPE_CHECKING:
    from cbatch.engine.backends import AnyModel
    from cbatch.engine.ranks.group import Ranks
    from cbatch.runtime.cpu.executor import TorchExecutor
    from cbatch.runtime.gpu.executor import GpuExecutor
    from cbatch.text import TextTokenizer

_logger = logging.getLogger("cbatch")


def load_engine(
    model: str | Path,
    draft: str | Path | None = None,
    options: EngineOptions | None = None,
    *,
    log: Callable[[Event], None] | None = None,
    kv_events: bool = False,
) -> tuple[Engine, EngineInfo]:
    """Load a model and its draft into an `Engine`; see `load_core` for parameters and errors."""
    options = options or EngineOptions()
    core, info, tokenizer = load_core(model, draft, options, log=log, kv_events=kv_events)
    usual: dict[str, Any] = {**info.sampling_defaults}
    params = SamplingParams(**usual)
    return Engine(core, tokenizer=tokenizer, seed=options.seed, default_params=params), info


def load_core(
    model: str | Path,
    draft: str | Path | None,
    options: EngineOptions,
    *,
    handles_text: bool = True,
    log: Callable[[Event], None] | None = None,
    kv_events: bool = False,
) -> tuple[EngineCore, EngineInfo, TextTokenizer | None]:
    """Load a model and its draft (model or head) into an `EngineCore`. Returns it with a
    description and, if the caller `handles_text`, the tokenizer.

    `log` gets every input of the scheduler, see `cbatch.steplog.step_log`. With `kv_events` the
    caller must call `scheduler.take_cache_changes` after every step. Raises `FieldError`, or the
    runtime's or tokenizer's error naming file and field."""
    from cbatch.runtime.cpu.threaded import ThreadedExecutor

    if draft is None and MODEL in (options.drafter or ()):
        remedy = f"give a draft, or use {' or '.join(LOOKUPS)}"
        raise FieldError("drafter", "'model' needs a draft", remedy)
    model = find_model(model)
    draft = None if draft is None else find_model(draft, "draft")
    files = check_files(model, draft, options)
    path, draft_path = files[0].path, files[1] and files[1].path
    impls = files[0].impl, files[1].impl if files[1] is not None else "own"
    defaults = sampling_defaults(path) if options.generation_config == "auto" else {}
    tokenizer = load_tokenizers(path, draft_path, options) if handles_text else None
    with ExitStack() as opened:
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
        models = target, draft_model
        config = with_prices(config, executor, (model, draft), models, options.kv_cache_dtype)
        with nullcontext() if ranks is None else ranks.together(Probe()):
            invariance = row_invariance_of(target)
        info = _info(model, draft, target, draft_model, config, options, defaults, invariance)
        for line in info.lines():
            _logger.info(line)
        depth = depth_for(device, options.overlap)
        core = EngineCore(
            Scheduler(config, log),
            ThreadedExecutor(executor) if depth and not is_gpu(device) else executor,
            depth=depth,
            drafters=allowed_drafters(config),
            grammars=grammars,
            info=msgspec.to_builtins(info),
            closing=opened.pop_all(),
        )
    return core, info, tokenizer


def _executor(
    target: AnyModel,
    draft: AnyModel | None,
    config: SchedulerConfig,
    grammars: Grammars | None,
    options: EngineOptions,
    default_params: SamplingParams,
    ranks: Ranks | None,
) -> TorchExecutor | GpuExecutor | RankedExecutor:
    executor = executor_for(target, draft, config, grammars, options.kv_cache_dtype, default_params)
    if ranks is None:
        return executor
    with ranks.together(Serve(config)):
        return RankedExecutor(cast("TorchExecutor", executor), ranks)


def _scheduler_config(
    target: AnyModel, draft: AnyModel | None, options: EngineOptions, kv_events: bool
) -> SchedulerConfig:
    context = target.config.max_position_tokens
    max_tokens = options.max_model_len or context
    if max_tokens > context:
        raise FieldError(
            "max_model_len",
            f"{max_tokens} is more than the model's context",
            f"use <= {context}",
        )
    drafts = draft is not None or options.drafter is not None
    eos_ids = target.config.eos_token_ids
    if options.tokenizer is not None and Path(options.tokenizer).is_dir():
        eos_ids = tuple(dict.fromkeys((*eos_ids, *eos_ids_of(Path(options.tokenizer)))))
    blocks = num_blocks(target, draft, options, max_tokens)
    block_tokens = block_size_for(target, options)
    if options.max_model_len and blocks * block_tokens < max_tokens:
        field = "num_blocks" if options.num_blocks is not None else "kv_memory_bytes"
        least = -(-max_tokens // block_tokens)
        size = block_bytes(target, draft, options)
        raise FieldError(
            field,
            f"{blocks} blocks cannot hold a sequence of {max_tokens} tokens",
            f"give {least} blocks ({mib(least * size)}) or more, or a smaller max_model_len",
        )
    return SchedulerConfig(
        num_blocks=blocks,
        block_size=block_tokens,
        max_num_seqs=options.max_num_seqs,
        max_model_len=max_tokens,
        max_num_batched_tokens=max(options.max_num_batched_tokens, options.max_num_seqs),
        vocab_size=target.config.vocab_size,
        eos_ids=eos_ids,
        prompt_share=1.0 if options.prompt_share is None else options.prompt_share,
        itl_target_s=options.itl_target_s,
        queue_policy=options.queue_policy,
        ageing_per_s=options.ageing_per_s,
        enable_prefix_caching=options.enable_prefix_caching,
        kv_events=kv_events,
        draft_context_tokens=draft.config.max_position_tokens if draft is not None else None,
        # Cost of a draft token relative to a target token, estimated by the size of the weights.
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
        block_size=config.block_size,
        kv_memory_bytes=config.num_blocks * block_bytes(target, draft_model, options),
        max_model_len=config.max_model_len,
        num_threads=torch.get_num_threads(),
        ranks=ranks,
        sampling_defaults=defaults,
    )
