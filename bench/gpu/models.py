"""Trained models with 28 streams and with 1, through the public `LLM`: tokens per second with and
without speculation, and whether the texts are equal. A small model waits for the host, which kernel
times do not show."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from operator import eq
from pathlib import Path
from typing import Any

from bench.gpu.cells import Cell, NotAvailable, Row
from bench.gpu.environment import Bench
from cbatch import LLM, Completion, SamplingParams
from cbatch.core.request.errors import FieldError
from cbatch.demo import demo_head, demo_paths, demo_prompts

_STREAMS, _TOKENS, _RUNS = 28, 96, 3
_MEASURED_S = 1.0  # at least, in runs; a policy learns prices from hundreds of steps
_COMPILED_S = 60.0  # longest wait for kernels of rare requests, which use the host's CPUs
_KV_BYTES = 1 << 30
_ROOT = Path(__file__).parents[2]
_CHATS = _ROOT / "bench" / "data" / "chat_prompts.json"
# Model, what drafts for it, numerics; lookaheads.
_SETTINGS = {
    ("demo", "model", "fast"): ("off", "adaptive", "fixed:3"),
    ("demo", "head", "invariant"): ("off", "adaptive", "fixed:3"),
    ("demo", "model", "invariant"): ("fixed:3",),
    ("smollm2", "ngram", "invariant"): ("off", "adaptive", "fixed:4"),
    ("smollm2", "head", "invariant"): ("adaptive", "fixed:2"),
}
Texts = dict[tuple[str, str, int], list[str]]  # without drafts; by model, numerics, streams


def cells(bench: Bench) -> Iterator[Cell]:
    texts: Texts = {}
    for names, lookaheads in _SETTINGS.items():
        for lookahead in lookaheads:
            setting = dict(zip(("model", "drafter", "numerics"), names, strict=True))
            setting["lookahead"] = lookahead
            labels, key = setting | {"implementation": "cbatch"}, " ".join(setting.values())
            subject = _Subject(bench, setting, texts)
            yield Cell(f"{key}, start", labels | {"what": "start"}, subject.start)
            for streams in (_STREAMS, 1):
                what = {"what": "streams", "batch": streams}
                yield Cell(f"{key}, {streams}", labels | what, partial(subject.measure, streams))


class _Subject:
    def __init__(self, bench: Bench, setting: dict[str, str], texts: Texts) -> None:
        self._bench, self._setting, self._texts = bench, setting, texts
        self._llm: LLM | None = None

    def start(self) -> Row:
        if not self._bench.full:
            raise NotAvailable("no GPU")
        began_s = time.perf_counter()
        try:
            self._llm = _load(**self._setting)
        except FieldError as error:
            if self._setting["model"] == "smollm2":
                raise NotAvailable(str(error)) from error
            raise
        seconds = time.perf_counter() - began_s
        kernels, until_s = self._llm.engine.core.background_kernels, time.monotonic() + _COMPILED_S
        while kernels.pending and time.monotonic() < until_s:
            time.sleep(0.1)
        return {"seconds": seconds}

    def measure(self, streams: int) -> Row:
        """Return the median speed of several runs, after one warm-up run, and the share of texts
        that equal those without drafts, if these were measured."""
        if self._llm is None:
            raise NotAvailable("the model did not start")
        complete = _completing(self._llm, self._setting["model"], streams)
        complete()
        rates: list[float] = []
        measured_s = 0.0
        while len(rates) < _RUNS or measured_s < _MEASURED_S:
            began_s = time.perf_counter()
            completions = complete()
            seconds = time.perf_counter() - began_s
            tokens = sum(len(c.token_ids) for each in completions for c in each.choices)
            rates.append(tokens / seconds)
            measured_s += seconds
        texts = [each.text for each in completions]
        key = self._setting["model"], self._setting["numerics"], streams
        if self._setting["lookahead"] == "off":
            self._texts[key] = texts
        plain = self._texts.get(key)
        if streams == 1:
            self._llm = None  # frees its memory
        return {
            "tokens_per_s": statistics.median(rates),
            "tokens_per_s_low": min(rates),
            "tokens_per_s_high": max(rates),
            "equal_texts": None if plain is None else statistics.fmean(map(eq, texts, plain)),
        }


def _load(model: str, drafter: str, numerics: str, lookahead: str) -> LLM:
    options: dict[str, Any] = {"lookahead": lookahead, "numerics": numerics, "device": "cuda"}
    options |= {"seed": 1, "kv_cache_memory_bytes": _KV_BYTES}
    if model == "demo":
        target, draft = demo_paths()
        return LLM(target, draft if drafter == "model" else demo_head(), **options)
    if drafter == "head":
        return LLM(model, _ROOT / "tools" / "heads" / model, **options)
    return LLM(model, drafter=(drafter,), **options)


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
