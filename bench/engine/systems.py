"""Engines with a common interface, their prompts, and the measurements of their runs."""

from __future__ import annotations

import functools
import gc
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from bench.engine.shapes import SHAPES
from bench.failures import Failures
from bench.report import rounded
from cbatch import LLM, SamplingParams
from cbatch.demo import demo_prompts
from cbatch.engine.model_files import tokenizer_of
from cbatch.text.outputs import Speculation

Prompts = list[list[int]]


class EngineRun(msgspec.Struct):
    """Outputs and times of batches, and statistics of their speculation."""

    seconds: float
    outputs: list[list[int]]  # token ids, in order of the prompts
    speculation: Speculation | None = None
    steps_s: list[float] = []  # durations of decoding steps, if the system reports them

    @property
    def tokens(self) -> int:
        return sum(map(len, self.outputs))

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


class System(msgspec.Struct):
    """An engine that completes a batch of prompts of equal length, greedily."""

    name: str
    lookahead: str
    run: Callable[[Prompts, int], EngineRun]

    @property
    def label(self) -> str:
        return self.name if self.lookahead == "off" else f"{self.name} {self.lookahead}"


def build_cbatch(
    model: Path, draft: Path | None, lookahead: str, args: Any, model_impl: str = "auto"
) -> tuple[System, LLM]:
    max_batch = max(args.batch)
    llm = LLM(
        model,
        draft if lookahead != "off" else None,
        dtype=args.dtype,
        numerics=args.numerics,
        lookahead=lookahead,
        max_num_seqs=max_batch,
        max_model_len=args.prompt_tokens + args.output_tokens,
        max_num_batched_tokens=max(1024, max_batch * args.prompt_tokens),
        overlap=args.overlap,
        model_impl=model_impl,
        enable_prefix_caching=False,  # every repeat has the same prompts
        tokenizer="none",
    )

    def run(prompts: Prompts, output_tokens: int) -> EngineRun:
        params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
        started_s = time.perf_counter()
        completions = llm.generate(prompts, params)
        seconds = time.perf_counter() - started_s
        total = Speculation()
        for completion in completions:
            total.merge(completion.speculation)
        return EngineRun(seconds, [list(completion.token_ids) for completion in completions], total)

    name = "cbatch, transformers' layers" if model_impl == "transformers" else "cbatch"
    return System(name, lookahead, run), llm


def build_transformers(model: Path, dtype: str) -> System:
    from transformers import AutoModelForCausalLM

    peer = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    # As with `ignore_eos`, an end token does not stop generation. A minimum length would forbid the
    # end token, which changes the text.
    peer.generation_config.eos_token_id = None

    def run(prompts: Prompts, output_tokens: int) -> EngineRun:
        ids = torch.tensor(prompts)
        started_s = time.perf_counter()
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = peer.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=output_tokens,
                pad_token_id=0,
            )
        seconds = time.perf_counter() - started_s
        return EngineRun(seconds, out[:, ids.shape[1] :].tolist())

    return System("transformers", "off", run)


def make_prompts(model: Path, tokens: int, count: int, real: bool) -> Prompts:
    """Return `count` prompts of `tokens` tokens: random ids, or the end of a demo prompt after
    others that make up the length."""
    if not real:
        rng = np.random.default_rng(0)
        vocab_size = min(shape["vocab_size"] for shape in SHAPES.values())
        return [rng.integers(1, vocab_size - 1, tokens).tolist() for _ in range(count)]
    tokenizer = tokenizer_of(model)
    texts = demo_prompts()

    @functools.cache
    def ending_with(index: int) -> list[int]:
        text = "\n\n".join((*texts[index + 1 :], *texts[: index + 1]))
        while len(ids := list(tokenizer.encode(text))) < tokens:
            text = f"{text}\n\n{text}"
        return ids[-tokens:]

    return [ending_with(i % len(texts)) for i in range(count)]


def run_batches(system: System, prompts: Prompts, batch: int, output_tokens: int) -> EngineRun:
    """Complete all prompts in successive batches and add up the times. Several small batches even
    out the differences between prompts."""
    runs = [
        system.run(prompts[at : at + batch], output_tokens) for at in range(0, len(prompts), batch)
    ]
    outputs = [ids for run in runs for ids in run.outputs]
    steps_s = [step for run in runs for step in run.steps_s]
    total = EngineRun(sum(run.seconds for run in runs), outputs, steps_s=steps_s)
    for run in runs:
        if run.speculation is not None:
            total.speculation = total.speculation or Speculation()
            total.speculation.merge(run.speculation)
    return total


def measure(
    systems: Sequence[System],
    model: Path,
    batch: int,
    args: Any,
    failures: Failures,
    *,
    real: bool,
) -> list[tuple[System, list[EngineRun]]]:
    """Return the runs of each system, one per repeat. Every other repeat runs them in reverse. A
    system that fails, now or before, is left out and is in `failures`."""
    count = -(-max(batch, args.prompts) // batch) * batch
    prompts = make_prompts(model, args.prompt_tokens, count, real)
    runs: dict[str, list[EngineRun]] = {system.label: [] for system in systems}
    for repeat in range(-1, args.repeats):  # the first warms up
        gc.collect()
        for system in systems if repeat % 2 == 0 else reversed(systems):
            if system.label in failures:
                continue
            with failures.caught(system.label):
                if repeat < 0:
                    system.run(prompts[:batch], min(8, args.output_tokens))
                else:
                    run = run_batches(system, prompts, batch, args.output_tokens)
                    runs[system.label].append(run)
    return [(system, runs[system.label]) for system in systems if system.label not in failures]


def ratio(runs: Sequence[EngineRun], base_runs: Sequence[EngineRun] | None) -> float | None:
    """Return the median over repeats of the ratio of speeds, or None without `base_runs`."""
    if base_runs is None:
        return None
    pairs = zip(runs, base_runs, strict=True)
    return rounded(statistics.median(run.tokens_per_s / base.tokens_per_s for run, base in pairs))


def median_speed(runs: Sequence[EngineRun]) -> float:
    return round(statistics.median(run.tokens_per_s for run in runs), 1)
