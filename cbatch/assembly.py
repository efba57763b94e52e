"""Puts an engine together from model directories; only here scheduler and runtime meet."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast, get_args

import msgspec

from cbatch.backends import (
    executor_for,
    held_drafters,
    is_gpu,
    load_for,
    refuse_unserved,
    row_invariance_of,
    serves_grammars,
)
from cbatch.core.config import LookaheadConfig, LookaheadPolicy, QueuePolicy, SchedulerConfig
from cbatch.core.errors import FieldError
from cbatch.core.events import Event
from cbatch.core.request import DRAFTERS, LOOKUPS, MODEL, is_chain
from cbatch.core.scheduler import Scheduler
from cbatch.engine.loop import Executor, OverlappedExecutor
from cbatch.engine.process import EngineParts
from cbatch.engine.recorder import Recorder
from cbatch.grammars import Grammars
from cbatch.info import EngineInfo, mib
from cbatch.logs import LogFormat
from cbatch.logs import configure as configure_logs
from cbatch.notyet import refuse_model_files
from cbatch.stepwise import Engine
from cbatch.text import TextTokenizer, load_tokenizer

if TYPE_CHECKING:
    import torch

    from cbatch.backends import AnyModel

_logger = logging.getLogger("cbatch")

_DEFAULT_K = {"goodput": 8, "ema": 8, "fixed": 4}  # the cap of one, the constant of the other
MEMORY_SHARE = {"cpu": 0.25, "cuda": 0.85}  # of the memory, for KV, unless a size is given


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a model is served. Every field has a default that fits a small machine.

    `lookahead` is "off", "ema", "goodput", "fixed:4" (the number is k; with "ema:8" the cap), or a
    `LookaheadConfig`. `drafter` names who drafts for a request that does not say, preferred first:
    "model" (the draft), "ngram" and "suffix" (they guess by what the text repeats, and need no
    draft). By default that is the draft, and without one nothing is drafted. KV takes `num_blocks`
    blocks, or as many as `kv_memory_bytes` holds, or a share of the machine's memory. `overlap` 1
    plans a step while one runs. `seed` makes the seeds drawn for requests without one reproducible.
    `tokenizer` is where the tokenizer lies, if not with the model; "none" does without text.
    """

    dtype: str = "auto"
    device: str = "auto"
    numerics: Literal["auto", "invariant", "fast"] = "auto"
    lookahead: str | LookaheadConfig = "goodput"
    drafter: tuple[str, ...] | None = None
    max_slots: int = 32
    num_blocks: int | None = None
    kv_memory_bytes: int | None = None
    block_size_tokens: int = 16
    max_model_tokens: int | None = None
    step_budget_tokens: int = 1024
    queue_policy: QueuePolicy = "fcfs"
    ageing_per_s: float | None = None
    prefix_cache: bool = True
    overlap: Literal[0, 1] = 0
    seed: int | None = None
    tokenizer: str | None = None
    random_weights_seed: int | None = None

    def __post_init__(self) -> None:
        for field in ("num_blocks", "kv_memory_bytes", "max_model_tokens"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise FieldError(field, f"{value!r} is not allowed", "give 1 or more, or leave out")
        for field, allowed in (
            ("overlap", (0, 1)),
            ("numerics", ("auto", "invariant", "fast")),
            ("queue_policy", get_args(QueuePolicy)),
        ):
            if getattr(self, field) not in allowed:
                remedy = "use " + " or ".join(map(repr, allowed))
                raise FieldError(field, f"{getattr(self, field)!r} is not known", remedy)
        parse_lookahead(self.lookahead)
        if self.drafter is not None and not is_chain(self.drafter):
            remedy = f"name one or more of {', '.join(DRAFTERS)}, each once"
            raise FieldError("drafter", f"{self.drafter!r} is not allowed", remedy)


def parse_lookahead(value: str | LookaheadConfig) -> LookaheadConfig:
    """From "off", "goodput", "ema:8", "fixed:4". Raises `FieldError`."""
    if isinstance(value, LookaheadConfig):
        return value
    policy, _, k = value.partition(":")
    if policy == "off" and not k:
        return LookaheadConfig(policy="off")
    if policy in _DEFAULT_K and (k.isdecimal() or not k) and not value.endswith(":"):
        chosen = cast(LookaheadPolicy, policy)
        return LookaheadConfig(policy=chosen, k=int(k) if k else _DEFAULT_K[policy])
    remedy = "use off, goodput, ema or fixed, the last three with k as in goodput:8"
    raise FieldError("lookahead", f"{value!r} is not known", remedy)


def lookahead_name(config: LookaheadConfig) -> str:
    return "off" if config.policy == "off" else f"{config.policy}:{config.k}"


def load_engine(
    model: str | Path,
    draft: str | Path | None = None,
    options: EngineOptions | None = None,
    *,
    handles_text: bool = True,
    log: Callable[[Event], None] | None = None,
) -> tuple[Engine, EngineInfo]:
    """Loads a model, and the draft that guesses for it, into an `Engine` to be driven by the
    caller. With `handles_text` False it is given token ids alone. `log` is given every input of its
    scheduler, see `cbatch.engine.steplog`. Raises `FieldError`, or the runtime's or tokenizer's
    error naming file and field."""
    options = options or EngineOptions()
    if draft is None and MODEL in (options.drafter or ()):
        remedy = f"give a draft, or use {' or '.join(LOOKUPS)}"
        raise FieldError("drafter", "'model' needs a draft", remedy)
    paths = _checked(model, "model"), None if draft is None else _checked(draft, "draft")
    tokenizer = load_tokenizers(*paths, options) if handles_text else None
    device = _device(options.device)
    refuse_unserved(
        device,
        numerics=options.numerics,
        drafter=options.drafter,
        block_size_tokens=options.block_size_tokens,
    )

    def load(path: str | Path) -> AnyModel:
        return load_for(
            device,
            path,
            dtype=options.dtype,
            numerics=options.numerics,
            random_weights_seed=options.random_weights_seed,
        )

    target = load(model)
    draft_model = load(draft) if draft is not None else None
    config = _scheduler_config(target, draft_model, options)
    grammars = None
    if options.tokenizer != "none" and serves_grammars(device):
        source = options.tokenizer or model
        grammars = Grammars(
            lambda: tokenizer or load_tokenizer(source), config.vocab_size, config.eos_ids
        )
    executor = executor_for(target, draft_model, config, grammars)
    if config.lookahead.policy == "goodput":
        config = _with_prices(config, executor, target, draft_model, (model, draft))
    info = _info(model, draft, target, draft_model, config)
    for line in info.lines():
        _logger.info(line)
    engine = Engine(
        Scheduler(config, log),
        _overlapped(executor) if options.overlap and not is_gpu(device) else executor,
        tokenizer=tokenizer,
        depth=options.overlap,
        seed=options.seed,
        drafters=held_drafters(config, device),
        grammars=grammars,
    )
    return engine, info


class EngineFactory(msgspec.Struct, frozen=True):
    """`load_engine`, to be called in a process of its own, which handles token ids alone."""

    model: str | Path
    draft: str | Path | None
    options: EngineOptions
    log_format: LogFormat = "text"
    record: str | Path | None = None  # a step log, which it appends to

    def __call__(self) -> EngineParts:
        configure_logs(self.log_format, logging.WARNING)
        recorder = None if self.record is None else Recorder(self.record)
        engine, info = load_engine(
            self.model, self.draft, self.options, handles_text=False, log=recorder
        )
        if engine.grammars is not None:
            engine.grammars.prepare()
        return EngineParts(
            engine.scheduler,
            engine.loop,
            engine.drafters,
            msgspec.to_builtins(info),
            follows_grammars=engine.grammars is not None,
            close=None if recorder is None else recorder.close,
        )


def load_tokenizers(
    model: str | Path, draft: str | Path | None, options: EngineOptions
) -> TextTokenizer | None:
    """The model's, or None if the options want none. Raises `TokenizerError` if the draft's is not
    the same. Loads nothing of the runtime."""
    if options.tokenizer == "none":
        return None
    tokenizer = load_tokenizer(options.tokenizer or model)
    if draft is not None:
        load_tokenizer(draft).require_same_as(tokenizer)
    return tokenizer


def _with_prices(
    config: SchedulerConfig,
    executor: Executor,
    target: AnyModel,
    draft: AnyModel | None,
    paths: tuple[str | Path, str | Path | None],
) -> SchedulerConfig:
    """With what steps cost here: measured now, or kept from an earlier start on this machine."""
    import torch

    from cbatch.engine.profile import VERSION, cached_profile, profile_costs
    from cbatch.runtime.compiled import compiles, version

    device = torch.device(target.device)
    processor = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()
    key = {
        "version": VERSION,
        "models": [None if path is None else str(path) for path in paths],
        "shapes": [repr(m.config) for m in (target, draft) if m is not None],
        "dtype": str(target.dtype),
        "numerics": target.numerics,
        "compiled": version() if compiles(2, target.dtype) else None,
        "processor": processor,
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "slots": config.max_slots,
        "blocks": [config.num_blocks, config.block_size_tokens],
        "tokens": [config.step_budget_tokens, config.max_model_tokens],
        "drafter": config.default_chain,
    }
    profile = cached_profile(key, lambda: profile_costs(executor, config))
    return msgspec.structs.replace(config, cost_profile=profile)


def _cpu_name() -> str:
    return f"{platform.node()} {platform.machine()} {platform.processor()} {os.cpu_count()}"


def _checked(model: str | Path, field: str) -> Path:
    """The model's directory, once its configuration can be served: before anything large loads."""
    from cbatch.runtime.config import load_config
    from cbatch.runtime.weights import resolve_directory

    refuse_model_files(Path(model), field)
    path = resolve_directory(model, weights=False)
    load_config(path)
    return path


def _device(name: str) -> str:
    import torch

    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def _scheduler_config(
    target: AnyModel, draft: AnyModel | None, options: EngineOptions
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
        size = _block_bytes(target, draft, options.block_size_tokens)
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
        draft_context_tokens=draft.config.max_position_tokens if draft is not None else None,
        catch_up_price=1.0 if draft is None else _catch_up_price(target, draft),
        drafter=None if options.drafter is None else tuple(options.drafter),
        lookahead=parse_lookahead(options.lookahead) if drafts else LookaheadConfig(),
    )


def _num_blocks(
    target: AnyModel, draft: AnyModel | None, options: EngineOptions, max_tokens: int
) -> int:
    """As asked, or enough for every slot at full length within the memory for KV."""
    if options.num_blocks is not None:
        return options.num_blocks
    size = _block_bytes(target, draft, options.block_size_tokens)
    if options.kv_memory_bytes is not None:
        if options.kv_memory_bytes < size:
            remedy = f"give at least {size} bytes ({size / 2**30:.2g} GiB)"
            raise FieldError("kv_memory_bytes", "holds no block", remedy)
        return options.kv_memory_bytes // size
    wanted = options.max_slots * -(-max_tokens // options.block_size_tokens)
    return max(1, min(wanted, _memory_for_kv_bytes(target.device) // size))


def _block_bytes(target: AnyModel, draft: AnyModel | None, block_size_tokens: int) -> int:
    from cbatch.runtime.kv import KVCache

    models = [target] if draft is None else [target, draft]
    return sum(KVCache.block_bytes(m.config, block_size_tokens, m.dtype) for m in models)


def _memory_for_kv_bytes(device: torch.device | str) -> int:
    import torch

    kind = torch.device(device).type
    if kind == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
        return int(free_bytes * MEMORY_SHARE["cuda"])
    try:
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError):  # not a POSIX system
        memory_bytes = 4 * 2**30
    return int(memory_bytes * MEMORY_SHARE["cpu"])


def _overlapped(executor: Executor) -> OverlappedExecutor:
    from cbatch.runtime.threaded import ThreadedExecutor

    return ThreadedExecutor(executor)


def _info(
    model: str | Path,
    draft: str | Path | None,
    target: AnyModel,
    draft_model: AnyModel | None,
    config: SchedulerConfig,
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
        kv_memory_bytes=config.num_blocks
        * _block_bytes(target, draft_model, config.block_size_tokens),
        max_model_tokens=config.max_model_tokens,
        num_threads=torch.get_num_threads(),
    )


def _catch_up_price(target: AnyModel, draft: AnyModel) -> float:
    """Of a draft token in target tokens, about: work goes with the weights."""
    return min(_weight_bytes(draft) / _weight_bytes(target), 1.0)


def _weight_bytes(model: AnyModel) -> int:
    """Of the matrices as the checkpoint has them; norms and biases are next to nothing."""
    from cbatch.runtime.numerics import weight_shapes

    c = model.config
    count = sum(rows * columns * n for (rows, columns), n in weight_shapes(c).items())
    if not c.tie_embeddings:
        count += c.vocab_size * c.hidden_size
    return count * model.dtype.itemsize
