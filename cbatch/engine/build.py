"""Builds an engine from model files: the only place that creates both scheduler and executor."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import (
    DEFAULT_LOOKUP,
    DRAFTERS,
    LOOKUPS,
    MODEL,
    SamplingParams,
)
from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.scheduler.events import Event
from cbatch.core.scheduler.executor import Executor, OverlappedExecutor, WatchedExecutor
from cbatch.core.scheduler.scheduler import Scheduler
from cbatch.core.speculation.build import parse_lookahead
from cbatch.core.speculation.config import LookaheadConfig
from cbatch.engine.core import EngineCore
from cbatch.engine.engine import Engine
from cbatch.engine.info import EngineInfo, describe_engine, weight_bytes
from cbatch.engine.loop import ThreadedExecutor
from cbatch.engine.memory import cache_sizes
from cbatch.engine.model_files import (
    ModelFiles,
    backend_of,
    check_files,
    default_device,
    find_model,
    load_tokenizers,
    sampling_defaults,
    tokenizer_of,
)
from cbatch.engine.options import MTP, EngineOptions
from cbatch.engine.prices.shapes import MAX_PROFILED_DRAFTS
from cbatch.engine.prices.startup import cached_invariance, max_drafts, with_prices
from cbatch.engine.ranks.group import LOADED, Probe, RankedExecutor, Ranks, Serve
from cbatch.grammars import Grammars
from cbatch.runtime.backend import (
    Backend,
    Impl,
    LargestStep,
    LoadedModels,
    LoadRequest,
    Requirements,
    TrialTexts,
)
from cbatch.runtime.model.config import eos_ids_of
from cbatch.system.machine import mib
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
    if draft is None and MODEL in (options.drafter or ()) and options.draft_method != MTP:
        remedy = f"give a draft, or use {' or '.join((MTP, *LOOKUPS))}"
        raise FieldError("drafter", "'model' needs a draft", remedy)
    model = find_model(model)
    draft = None if draft is None else find_model(draft, "draft")
    files = check_files(model, draft, options)
    path, draft_path = files[0].path, None if files[1] is None or files[1].head else files[1].path
    defaults = sampling_defaults(path) if options.generation_config == "auto" else {}
    tokenizer = load_tokenizers(path, draft_path, options) if handles_text else None
    with ExitStack() as opened:
        loaded = load_models(opened, model, draft, files, options, tokenizer)
        models = loaded.models
        if models.draft is None:
            draft = None
        elif draft is None:
            draft = model
        paths, kv_dtype = (model, draft), options.kv_cache_dtype
        probe = loaded.batch_invariance
        invariance = cache(lambda: cached_invariance(paths, models, kv_dtype, probe))
        block_size = loaded.backend.default_block_size
        sizes = block_size, kv_events
        config = _config_with_default(models, options, *sizes, lambda: invariance()[0])
        grammars = None
        if options.tokenizer != "none":
            source = options.tokenizer or model
            grammars = Grammars(
                lambda: tokenizer or tokenizer_of(source), config.vocab_size, config.eos_ids
            )
        executor = loaded.executor(config, grammars, SamplingParams(**defaults))
        config = with_prices(config, executor, paths, models, kv_dtype, records=log is not None)
        info = describe_engine(model, draft, models, config, defaults, invariance())
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


# Texts on which a draft head is tested, to reject a head of another model.
_TEXTS = (
    "The water cycle describes how water moves through the air, the land and the sea. "
    "The sun heats the sea, and some of the water evaporates. The vapour rises, cools "
    "down, and forms clouds. When the drops in a cloud get too heavy, they fall as rain "
    "or snow, and the water flows back.",
    "def mean(values):\n    total = 0.0\n    count = 0\n    for value in values:\n        "
    "total += value\n        count += 1\n    if count == 0:\n        raise "
    'ValueError("mean of nothing")\n    return total / count\n\n\nclass Stack:\n    def '
    "__init__(self):\n        self.items = []\n",
    "Once upon a time there was a small village at the foot of a mountain. Every morning "
    "the baker got up before the sun, lit the fire in his oven and made bread for "
    "everyone. One day a stranger came to the door and asked him for a loaf. He said "
    "that he had no money, but that he could tell a story.",
    "def read_settings(path):\n    settings = {}\n    with open(path) as file:\n        for "
    "line in file:\n            line = line.strip()\n            if not line or "
    'line.startswith("#"):\n                continue\n            key, _, value = '
    'line.partition("=")\n            settings[key.strip()] = value.strip()\n    return '
    "settings\n",
    "Question: What is the difference between a list and a tuple?\nAnswer: A list can be "
    "changed after it was made: items can be added, removed or replaced. A tuple cannot "
    "be changed. So a tuple can be the key of a dictionary, and a list cannot. Use a "
    "list where the number of items changes, and a tuple for a few values that belong "
    "together, such as a point with two coordinates.",
)
_NUM_RANDOM_TOKENS = 256  # length of the random text, if there is no tokenizer


class Loaded(NamedTuple):
    """Loaded models and their backend. `ranks`: the other tensor-parallel ranks, if any."""

    backend: Backend
    models: LoadedModels
    ranks: Ranks | None

    def executor(
        self, config: SchedulerConfig, grammars: Grammars | None, default_params: SamplingParams
    ) -> Executor:
        executor = self.models.executor(config, max_drafts(config), grammars, default_params)
        if self.ranks is None:
            return executor
        assert isinstance(executor, WatchedExecutor)
        with self.ranks.on_all_ranks(Serve(config)):
            return RankedExecutor(executor, self.ranks)

    def batch_invariance(self) -> tuple[bool, str]:
        with nullcontext() if self.ranks is None else self.ranks.on_all_ranks(Probe()):
            return self.models.batch_invariance()


def load_models(
    opened: ExitStack,
    model: str | Path,
    draft: str | Path | None,
    files: tuple[ModelFiles, ModelFiles | None],
    options: EngineOptions,
    tokenizer: TextTokenizer | None,
) -> Loaded:
    """Load the models of an engine, and start its other ranks, which `opened` will close. `files`
    belong to model and draft. Raises `FieldError` if the device does not support the options."""
    impls: tuple[Impl, Impl]
    impls = files[0].impl, "own" if files[1] is None else files[1].impl
    needs = Requirements(model=model, impls=impls, **options.shared_with(Requirements))
    head = files[1].path if files[1] is not None and files[1].head else None
    device = default_device(needs) if options.device == "auto" else options.device
    backend = backend_of(device)
    backend.check_supported(needs)
    backend.require_device(device)
    backend.set_threads(options.threads, options.tensor_parallel_size)
    texts = () if head is None else _trial_texts(model, tokenizer, options)
    fields = options.shared_with(LoadRequest) | {"device": device, "draft": head or draft}
    fields["head_is_optional"] = files[1] is not None and files[1].head == "found"
    request = LoadRequest(model=model, impls=impls, trial_texts=texts, **fields)
    if options.tensor_parallel_size == 1:
        return Loaded(backend, backend.load(request), None)
    ranks = Ranks(options.tensor_parallel_size, request, options.tokenizer)
    opened.callback(ranks.close)
    models = backend.load(request, ranks.group)
    ranks.expect_answer(LOADED)
    return Loaded(backend, models, ranks)


def trial_texts(vocab_size: int, tokenizer: TextTokenizer | None) -> TrialTexts:
    if tokenizer is None:
        tokens = np.random.default_rng(0).integers(0, vocab_size, _NUM_RANDOM_TOKENS)
        return (tuple(tokens.tolist()),)
    return tuple(tuple(i for i in tokenizer.encode(text) if i < vocab_size) for text in _TEXTS)


def _trial_texts(
    model: str | Path, tokenizer: TextTokenizer | None, options: EngineOptions
) -> TrialTexts:
    from cbatch.runtime.model.checkpoint import read_config, resolve_directory

    if tokenizer is None and options.tokenizer != "none":
        tokenizer = tokenizer_of(options.tokenizer or model)
    return trial_texts(read_config(resolve_directory(model, weights=False)).vocab_size, tokenizer)


# ---- the scheduler's configuration ------------------------------------------------------------


def _config_with_default(
    models: LoadedModels,
    options: EngineOptions,
    default_block_size: int,
    kv_events: bool,
    is_invariant: Callable[[], bool],
) -> SchedulerConfig:
    """Return the configuration of an engine, with the default drafter if its drafts fit."""
    if _drafts_by_default(models, options) and is_invariant():
        drafting = msgspec.structs.replace(options, drafter=(DEFAULT_LOOKUP,))
        try:
            return scheduler_config(models, drafting, default_block_size, kv_events)
        except FieldError as error:
            _logger.info("nothing drafts: %s", error)
    return scheduler_config(models, options, default_block_size, kv_events)


def _drafts_by_default(models: LoadedModels, options: EngineOptions) -> bool:
    """Return whether lookups draft although no option names them. They do not on a GPU, where their
    gain has not been measured, nor for recurrent layers, whose states would need more memory."""
    target, named = models.target, models.draft is not None or options.drafter is not None
    on_cpu = target.device.type == "cpu"
    return on_cpu and options.may_draft and not (named or target.config.recurrent)


def scheduler_config(
    models: LoadedModels, options: EngineOptions, default_block_size: int, kv_events: bool
) -> SchedulerConfig:
    """Return the configuration for an engine's options. Raises `FieldError` for limits that the
    models or the memory do not allow."""
    target, draft = models.target, models.draft
    context = target.config.max_position_tokens
    max_tokens = options.max_model_len or context
    if max_tokens > context:
        problem = f"{max_tokens} is more than the model's context"
        raise FieldError("max_model_len", problem, f"use <= {context}")
    can_draft = draft is not None or options.drafter is not None
    lookahead = parse_lookahead(options.lookahead) if can_draft else LookaheadConfig()
    eos_ids = target.config.eos_token_ids
    if options.tokenizer is not None and Path(options.tokenizer).is_dir():
        eos_ids = tuple(dict.fromkeys((*eos_ids, *eos_ids_of(Path(options.tokenizer)))))
    largest = LargestStep(
        max_num_seqs=options.max_num_seqs,
        max_sequence_tokens=max_tokens,
        max_num_batched_tokens=max(options.max_num_batched_tokens, options.max_num_seqs),
        block_size=options.block_size or default_block_size,
        max_drafts=0 if lookahead.policy == "off" else max(lookahead.k, MAX_PROFILED_DRAFTS),
    )
    sizes = cache_sizes(models, options, largest)
    needed = -(-max_tokens // largest.block_size)
    if options.max_model_len and sizes.num_blocks < needed:
        memory = mib(needed * models.kv_block_bytes(largest.block_size))
        raise FieldError(
            "num_blocks" if options.num_blocks is not None else "kv_cache_memory_bytes",
            f"{sizes.num_blocks} blocks cannot hold a sequence of {max_tokens} tokens",
            f"give {needed} blocks ({memory}) or more, or a smaller max_model_len",
        )
    fields = options.shared_with(SchedulerConfig) | {
        **sizes._asdict(),
        "block_size": largest.block_size,
        "max_model_len": max_tokens,
        "max_num_batched_tokens": largest.max_num_batched_tokens,
        "prompt_share": 1.0 if options.prompt_share is None else options.prompt_share,
        "lookahead": lookahead,
    }
    return SchedulerConfig(
        **fields,
        vocab_size=target.config.vocab_size,
        eos_ids=eos_ids,
        queue_policy=options.scheduling_policy,
        kv_events=kv_events,
        draft_context_tokens=draft.config.max_position_tokens if draft is not None else None,
        draft_lags=getattr(draft, "lags", True),
        # Cost of a draft token relative to a target token, estimated from the sizes of the weights.
        catch_up_price=1.0
        if draft is None
        else min(weight_bytes(draft) / weight_bytes(target, models.num_ranks), 1.0),
    )


def allowed_drafters(config: SchedulerConfig) -> tuple[str, ...]:
    if not config.default_chain:
        return ()
    return DRAFTERS if config.draft_context_tokens is not None else LOOKUPS
