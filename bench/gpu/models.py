"""Trained models with 28 streams and with 1, through the public `LLM`: tokens per second with and
without speculation, and whether the texts are equal. A small model waits for the host, which kernel
times do not show."""

from __future__ import annotations

import functools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from operator import eq
from pathlib import Path
from typing import Any, NamedTuple

from bench.gpu.cells import Cell, NotAvailable, Row
from bench.gpu.environment import Bench
from cbatch import LLM, Completion, SamplingParams
from cbatch.core.request.errors import FieldError
from cbatch.demo import demo_head, demo_paths, demo_prompts

_STREAMS, _TOKENS, _RUNS = 28, 96, 3
_MEASURED_S = 1.0  # at least, in runs; a policy learns prices from hundreds of steps
_COMPILED_S = 60.0  # wait at most so long for kernels of rare requests, which use the host's CPUs
_KV_BYTES = 1 << 30
_ROOT = Path(__file__).parents[2]
_CHATS = _ROOT / "bench" / "data" / "chat_prompts.json"


class ModelSetting(NamedTuple):
    """A model, what drafts for it, numerics and lookahead."""

    model: str
    drafter: str
    numerics: str
    lookahead: str

    @property
    def key(self) -> str:
        return " ".join(self)


SETTINGS = [
    *(
        ModelSetting("demo", "model", "fast", lookahead)
        for lookahead in ("off", "adaptive", "fixed:3")
    ),
    *(ModelSetting("demo", "head", "invariant", each) for each in ("off", "adaptive", "fixed:3")),
    ModelSetting("demo", "model", "invariant", "fixed:3"),
    *(
        ModelSetting("smollm2", "ngram", "invariant", each)
        for each in ("off", "adaptive", "fixed:4")
    ),
    *(ModelSetting("smollm2", "head", "invariant", each) for each in ("adaptive", "fixed:2")),
]

Texts = dict[tuple[str, str, int], list[str]]  # without drafts; by model, numerics, streams


def cells(bench: Bench) -> Iterator[Cell]:
    texts: Texts = {}
    for setting in SETTINGS:
        labels: Row = setting._asdict() | {"implementation": "cbatch"}
        subject = _Subject(bench, setting, texts)
        yield Cell(f"{setting.key}, start", labels | {"what": "start"}, subject.start, timed=False)
        for streams in (_STREAMS, 1):
            yield Cell(
                f"{setting.key}, {streams}",
                labels | {"what": "streams", "batch": streams},
                functools.partial(subject.measure, streams),
            )


class _Subject:
    def __init__(self, bench: Bench, setting: ModelSetting, texts: Texts) -> None:
        self._bench, self._setting, self._texts = bench, setting, texts
        self._llm: LLM | None = None

    def start(self) -> Row:
        if not self._bench.full:
            return {"status": "unmeasured"}
        began_s = time.perf_counter()
        try:
            self._llm = _load(self._setting)
        except FieldError as error:
            if self._setting.model == "smollm2":
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
            return {"tokens_per_s": None, "status": "unmeasured"}
        complete = _completing(self._llm, self._setting.model, streams)
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
        key = self._setting.model, self._setting.numerics, streams
        if self._setting.lookahead == "off":
            self._texts[key] = texts
        plain = self._texts.get(key)
        if streams == 1:
            self._llm = None  # frees its memory
        low, *_, high = sorted(rates)
        return {
            "tokens_per_s": statistics.median(rates),
            "tokens_per_s_low": low,
            "tokens_per_s_high": high,
            "equal_texts": None if plain is None else statistics.fmean(map(eq, texts, plain)),
        }


def _load(setting: ModelSetting) -> LLM:
    options: dict[str, Any] = {"lookahead": setting.lookahead, "numerics": setting.numerics}
    options |= {"device": "cuda", "seed": 1, "kv_cache_memory_bytes": _KV_BYTES}
    if setting.model == "demo":
        target, draft = demo_paths()
        return LLM(target, draft if setting.drafter == "model" else demo_head(), **options)
    if setting.drafter == "head":
        return LLM(setting.model, _ROOT / "tools" / "heads" / setting.model, **options)
    return LLM(setting.model, drafter=(setting.drafter,), **options)


def _completing(llm: LLM, model: str, streams: int) -> Callable[[], list[Completion]]:
    """Return a function that completes different prompts: beginnings of functions, or for `smollm2`
    requests to rewrite code and to tell stories, by turns."""
    params = SamplingParams(max_tokens=_TOKENS, temperature=0, ignore_eos=True)
    if model == "demo":
        return functools.partial(llm.generate, (demo_prompts() * _STREAMS)[:streams], params)
    chats = json.loads(_CHATS.read_text(encoding="utf-8"))
    prompts = [p for pair in zip(chats["renames"], chats["stories"], strict=True) for p in pair]
    conversations = [[{"role": "user", "content": prompt}] for prompt in prompts[:streams]]
    return functools.partial(llm.chat, conversations, params)
