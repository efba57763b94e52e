"""Trained models with 28 streams and with 1, through the public `LLM`: tokens per second with and
without speculation, and whether the texts are equal. A small model waits for the host, which kernel
times do not show."""

from __future__ import annotations

import functools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from operator import eq
from pathlib import Path
from typing import Any

from bench.gpu.cells import Bench, Cell, NotAvailable, Row
from cbatch import LLM, Completion, SamplingParams
from cbatch.core.request.errors import FieldError
from cbatch.demo import demo_head, demo_paths, demo_prompts

_STREAMS, _TOKENS, _RUNS = 28, 96, 3
_MEASURED_S = 1.0  # at least, in runs; a policy learns prices from hundreds of steps
_COMPILED_S = 60.0  # longest wait for kernels of rare requests, which use the host's CPUs
_KV_BYTES = 1 << 30
_ROOT = Path(__file__).parents[2]
_CHATS = _ROOT / "bench" / "data" / "chat_prompts.json"
HEADS = {"demo": demo_head(), "smollm2": _ROOT / "tools" / "smollm2_head"}
# Model, what drafts for it, numerics; lookaheads.
_SETTINGS = {
    ("demo", "model", "fast"): ("off", "adaptive", "fixed:3"),
    ("demo", "head", "invariant"): ("off", "adaptive", "fixed:3"),
    ("demo", "model", "invariant"): ("fixed:3",),
    ("smollm2", "ngram", "invariant"): ("off", "adaptive", "fixed:4"),
    ("smollm2", "head", "invariant"): ("adaptive", "fixed:2"),
}


def cells(bench: Bench) -> Iterator[Cell]:
    """Yield a cell for each setting and number of streams; the first includes the start."""
    texts: dict[Any, list[str]] = {}  # without drafts; by model, numerics, streams
    for names, lookaheads in _SETTINGS.items():
        for lookahead in lookaheads:
            setting = dict(zip(("model", "drafter", "numerics"), names, strict=True))
            setting["lookahead"] = lookahead
            load = functools.cache(partial(_load, **setting))
            for streams in (_STREAMS, 1):
                labels = setting | {"implementation": "cbatch", "what": "streams", "batch": streams}
                run = partial(measure, load, setting, streams, texts)
                yield Cell(f"{' '.join(setting.values())}, {streams}", labels, run)


def measure(load: Any, setting: dict[str, str], streams: int, texts: dict[Any, list[str]]) -> Row:
    """Return the median speed of several runs, after one warm-up run, and the share of texts that
    equal those without drafts, if these were measured."""
    complete = _completing(load(), setting["model"], streams)
    complete()
    rates, measured_s = [], 0.0
    while len(rates) < _RUNS or measured_s < _MEASURED_S:
        began_s = time.perf_counter()
        completions = complete()
        seconds = time.perf_counter() - began_s
        rates.append(sum(len(c.token_ids) for each in completions for c in each.choices) / seconds)
        measured_s += seconds
    if streams == 1:
        load.cache_clear()  # frees its memory
    key, completed = (setting["model"], setting["numerics"], streams), [c.text for c in completions]
    if setting["lookahead"] == "off":
        texts[key] = completed
    same = map(eq, completed, texts[key]) if key in texts else None
    return {
        "tokens_per_s": statistics.median(rates),
        "tokens_per_s_low": min(rates),
        "tokens_per_s_high": max(rates),
        "equal_texts": None if same is None else statistics.fmean(same),
    }


def _load(model: str, drafter: str, numerics: str, lookahead: str) -> LLM:
    """Load a model and wait for kernels of rare requests, whose compilation uses the host."""
    options: dict[str, Any] = {"lookahead": lookahead, "numerics": numerics, "device": "cuda"}
    options |= {"seed": 1, "kv_cache_memory_bytes": _KV_BYTES}
    target, draft = demo_paths() if model == "demo" else (model, None)
    if drafter == "head":
        draft = HEADS[model]
    if drafter == "ngram":
        options["drafter"] = (drafter,)
    try:
        llm = LLM(target, draft, **options)
    except FieldError as error:
        raise NotAvailable(str(error)) from error
    kernels, until_s = llm.engine.core.background_kernels, time.monotonic() + _COMPILED_S
    while kernels.pending and time.monotonic() < until_s:
        time.sleep(0.1)
    return llm


def _completing(llm: LLM, model: str, streams: int) -> Callable[[], list[Completion]]:
    """Return a function that completes different prompts: beginnings of functions, or for `smollm2`
    requests to rewrite code and to tell stories, by turns."""
    params = SamplingParams(max_tokens=_TOKENS, temperature=0, ignore_eos=True)
    if model == "demo":
        return partial(llm.generate, (demo_prompts() * _STREAMS)[:streams], params)
    chats = json.loads(_CHATS.read_text(encoding="utf-8"))
    prompts = [p for pair in zip(chats["renames"], chats["stories"], strict=True) for p in pair]
    conversations = [[{"role": "user", "content": prompt}] for prompt in prompts[:streams]]
    return partial(llm.chat, conversations, params)
