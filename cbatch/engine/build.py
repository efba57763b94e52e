"""Builds an engine from model files: the only place that creates both scheduler and executor."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import LOOKUPS, MODEL, SamplingParams
from cbatch.core.scheduler.events import Event
from cbatch.core.scheduler.executor import OverlappedExecutor
from cbatch.core.scheduler.scheduler import Scheduler
from cbatch.engine.core import EngineCore
from cbatch.engine.engine import Engine
from cbatch.engine.info import EngineInfo, describe_engine
from cbatch.engine.loading import load_models
from cbatch.engine.model_files import (
    find_model,
    load_tokenizers,
    sampling_defaults,
    tokenizer_of,
)
from cbatch.engine.model_impl import check_files
from cbatch.engine.options import EngineOptions
from cbatch.engine.prices.startup import cached_invariance, with_prices
from cbatch.engine.scheduler_config import allowed_drafters, scheduler_config
from cbatch.engine.threaded import ThreadedExecutor
from cbatch.grammars import Grammars

if TYPE_CHECKING:
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
    defaults: dict[str, Any] = {**info.sampling_defaults}
    params = SamplingParams(**defaults)
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
    """Load a model and its draft (model or head) into an `EngineCore`. Returns the core, its
    description and, if the caller `handles_text`, the tokenizer.

    `log` gets every input of the scheduler, see `cbatch.steplog.step_log`. With `kv_events` the
    caller must call `scheduler.take_cache_changes` after every step. Raises `FieldError`, or the
    runtime's or tokenizer's error naming file and field."""
    if draft is None and MODEL in (options.drafter or ()):
        remedy = f"give a draft, or use {' or '.join(LOOKUPS)}"
        raise FieldError("drafter", "'model' needs a draft", remedy)
    model = find_model(model)
    draft = None if draft is None else find_model(draft, "draft")
    files = check_files(model, draft, options)
    path, draft_path = files[0].path, files[1] and files[1].path
    defaults = sampling_defaults(path) if options.generation_config == "auto" else {}
    tokenizer = load_tokenizers(path, draft_path, options) if handles_text else None
    with ExitStack() as opened:
        loaded = load_models(opened, model, draft, files, options, tokenizer)
        models = loaded.models
        config = scheduler_config(models, options, loaded.backend.default_block_size, kv_events)
        grammars = None
        if options.tokenizer != "none":
            source = options.tokenizer or model
            grammars = Grammars(
                lambda: tokenizer or tokenizer_of(source), config.vocab_size, config.eos_ids
            )
        executor = loaded.executor(config, grammars, SamplingParams(**defaults))
        paths, kv_dtype = (model, draft), options.kv_cache_dtype
        config = with_prices(config, executor, paths, models, kv_dtype, records=log is not None)
        invariance = cached_invariance(paths, models, kv_dtype, loaded.batch_invariance)
        info = describe_engine(model, draft, models, config, defaults, invariance)
        for line in info.lines():
            _logger.info(line)
        depth = loaded.backend.default_overlap if options.overlap is None else options.overlap
        overlaps = isinstance(executor, OverlappedExecutor)
        core = EngineCore(
            Scheduler(config, log),
            ThreadedExecutor(executor) if depth and not overlaps else executor,
            depth=depth,
            drafters=allowed_drafters(config),
            grammars=grammars,
            info=msgspec.to_builtins(info),
            resources=opened.pop_all(),
        )
    return core, info, tokenizer
