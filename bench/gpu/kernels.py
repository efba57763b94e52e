"""Every kernel as a fraction of its own limit, beside the peers that can be had."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.gpu import peers
from bench.gpu.batches import VerifyCase, make_case
from bench.gpu.ceilings import load_ceilings
from bench.gpu.cells import Cell, Row
from bench.gpu.correct_sampling import tiling_of
from bench.gpu.limits import (
    ATTENTION,
    CHUNK,
    DECODE,
    FEW_LONG,
    LLAMA_8B_HEADS,
    TINY,
    TINY_HEADS,
    VERIFY,
    VOCAB,
    Cost,
    GridHeads,
    attention_cost,
    kv_write_cost,
    product_cost,
    rms_norm_cost,
    sampling_cost,
    silu_mul_cost,
    workload,
)
from bench.gpu.steps import TINY as TINY_TUNING
from bench.gpu.steps import Pool, StepQueries, launches, make_steps, tuning_of
from bench.gpu.timing import Call, figures, input_sets, time_calls
from bench.gpu.verdict import relative_error
from bench.gpu.world import Bench, l2_bytes
from triton_kernels.layers.activation import silu_mul, silu_mul_reference
from triton_kernels.layers.kv_write import kv_write
from triton_kernels.layers.norm import rms_norm, rms_norm_reference
from triton_kernels.noise import host as noise
from triton_kernels.products.dense import dense
from triton_kernels.sampling import COUPLED, REJECTION, sample
from triton_kernels.verification.kernel import verify_logits

OURS, INDUCTOR, LIBRARY = "cbatch", "torch inductor", "torch"
PAGE_TOKENS, _SHORT_PAGE_TOKENS = 64, 16  # ours by default; vLLM's
_TOKENS = (64, 512, 2048)  # of the kernels that work token by token
_MOST_ERROR = 2e-2
_MOST_VERIFIED = 8
_FIRST = 6
_SHORT_PAGES = (DECODE, VERIFY, CHUNK, FEW_LONG)  # of which short ones are read, too
_WIDTH, _INTERMEDIATE = 4096, 14336  # of Llama-3.1-8B


class Subject(NamedTuple):
    """One implementation of a workload. `build(n)` makes launches over n sets of inputs, no two of
    which share any; peers raise `Absent` where they cannot be had."""

    kernel: str
    workload: str
    implementation: str
    cost: Cost
    build: Callable[[int], Sequence[Call]]


def cells(bench: Bench) -> Iterator[Cell]:
    """The workloads with a target, the other kernels, and then the rest of attention."""
    names = ATTENTION if bench.full else TINY
    first, rest = names[:_FIRST], names[_FIRST:]
    for subject in chain(
        attention(bench, first),
        sampling(bench),
        by_token(bench),
        products(bench),
        attention(bench, rest),
    ):
        labels = dict(zip(("kernel", "workload", "implementation"), subject, strict=False))
        yield Cell(" ".join(subject[:3]), labels, functools.partial(measure, bench, subject))


def measure(bench: Bench, subject: Subject) -> Row:
    timing, sets = None, 1
    if bench.full or subject.implementation in (OURS, *peers.ANYWHERE):
        sets = input_sets(subject.cost.num_bytes, bench.device)
        timing = time_calls(bench, subject.build(1 if bench.warming else sets))
    around = sets * subject.cost.num_bytes > l2_bytes(bench.device)
    row = figures(timing, subject.cost, load_ceilings(bench.out))
    return row | {"input_sets": sets, "beyond_l2": around if bench.full else None}


def _heads(bench: Bench) -> GridHeads:
    return LLAMA_8B_HEADS if bench.full else TINY_HEADS


# --- attention ------------------------------------------------------------------------------------


def attention(bench: Bench, names: Sequence[str]) -> Iterator[Subject]:
    shape = _heads(bench)
    builds: dict[str, Callable[..., Sequence[Call]]] = {OURS: ours} | peers.ATTENTION
    for name in names:
        cost = attention_cost(workload(name), shape)
        subject = functools.partial(Subject, "attention", name)
        for implementation, build in builds.items():
            checked = functools.partial(_checked, bench, name, build)
            short = functools.partial(checked, page_tokens=_SHORT_PAGE_TOKENS)
            yield subject(implementation, cost, checked if implementation == OURS else short)
            if implementation == OURS and name in _SHORT_PAGES:
                yield subject(f"{OURS}, pages of {_SHORT_PAGE_TOKENS}", cost, short)


def ours(bench: Bench, steps: Sequence[StepQueries]) -> list[Call]:
    step, shipped = steps[0], TINY_TUNING
    if bench.full:  # as an executor would have it that drafts so many tokens, or none
        few = max(
            (q.query_tokens for q in step.queries if q.query_tokens <= _MOST_VERIFIED), default=1
        )
        page_tokens = step.pool.page_tokens
        shipped = tuning_of(
            step.shape, page_tokens, bench.device, numerics="fast", query_tokens=few
        )
    return launches(bench, steps, shipped)


def _checked(
    bench: Bench,
    name: str,
    build: Callable[[Bench, Sequence[StepQueries]], Sequence[Call]],
    count: int,
    page_tokens: int = PAGE_TOKENS,
) -> Sequence[Call]:
    """Launches over `count` steps. What computes something else is not timed: raises
    ArithmeticError. Held against the reference are calls over the pages of a step, which name their
    output; others have inputs of their own."""
    shape = _heads(bench)
    steps = make_steps(workload(name), shape, page_tokens, bench.device, count)
    calls = build(bench, steps)
    out = getattr(calls[0], "keywords", {}).get("out") if calls else None
    if out is None or bench.warming or not bench.world.runs:
        return calls
    out.fill_(torch.nan)
    calls[0]()
    error = relative_error(out.flatten(1), steps[0].reference())
    if not error < _MOST_ERROR:
        raise ArithmeticError(f"relative error {error:.1e}, {_MOST_ERROR} allowed")
    return calls


# --- sampling -------------------------------------------------------------------------------------


def sampling(bench: Bench) -> Iterator[Subject]:
    """Verification of k + 1 rows a request over a whole vocabulary, and plain draws."""
    vocab = VOCAB if bench.full else 96
    every = ((64, 0), (13, 4), (64, 4), (64, 7), (8, 4), (1, 4))
    for requests, k in every if bench.full else ((6, 2),):
        rows = requests * (k + 1)
        for kernel, mode, proposed, filters in (
            ("verify coupled", COUPLED, False, False),
            ("verify rejection", REJECTION, True, False),
            ("verify coupled, filters", COUPLED, False, True),
            ("verify rejection, filters", REJECTION, True, True),
        ):
            if (not k and kernel != "verify coupled") or (filters and not bench.full):
                continue
            cost = sampling_cost(rows, requests * k if proposed else 0, vocab)
            compared = peers.VERIFICATION if proposed and not filters else {}
            kinds = {"mode": mode, "proposed": proposed, "filters": filters}
            for implementation, build in ({OURS: verifications} | compared).items():
                made = functools.partial(_over_cases, bench, build, [k] * requests, vocab, kinds)
                yield Subject(kernel, f"{requests} requests k {k}", implementation, cost, made)
    rows, cost = 64 if bench.full else 3, sampling_cost(64, 0, vocab)
    for implementation, build in ({OURS: draws} | peers.SAMPLING).items():
        made = functools.partial(_over_cases, bench, build, [0] * rows, vocab, {"mode": REJECTION})
        yield Subject("sample", "64 rows", implementation, cost, made)


def _over_cases(
    bench: Bench,
    build: Callable[..., Sequence[Call]],
    drafts: list[int],
    vocab: int,
    kinds: dict[str, Any],
    count: int,
) -> Sequence[Call]:
    cases = [
        make_case(drafts, vocab, device=bench.device, seed=seed, **kinds) for seed in range(count)
    ]
    return build(bench, cases)


def verifications(bench: Bench, cases: Sequence[VerifyCase]) -> list[Call]:
    verify = functools.partial(verify_logits, blocks=False)
    return [functools.partial(verify, *case, tiling_of(bench)) for case in cases]


def draws(bench: Bench, cases: Sequence[VerifyCase]) -> list[Call]:
    return [functools.partial(sample, c.batch, noise.BONUS, tiling_of(bench)) for c in cases]


# --- token by token -------------------------------------------------------------------------------


def by_token(bench: Bench) -> Iterator[Subject]:
    width, inner = (_WIDTH, _INTERMEDIATE) if bench.full else (32, 48)
    for tokens in _TOKENS if bench.full else (3,):
        norm = {"x": (tokens, width), "weight": (width,)}
        adding = norm | {"residual": norm["x"]}
        for kernel, cost, functions, shapes in (
            ("rms_norm", rms_norm_cost(tokens, width, adds=False), _NORM, norm),
            ("rms_norm add", rms_norm_cost(tokens, width, adds=True), _NORM, adding),
            ("silu_mul", silu_mul_cost(tokens, inner), _SILU, {"gate_up": (tokens, 2 * inner)}),
        ):
            for implementation, function in functions.items():
                made = functools.partial(_over_inputs, bench, function, shapes)
                yield Subject(kernel, f"{tokens} tokens", implementation, cost, made)
        cost = kv_write_cost(tokens, _heads(bench))
        made = functools.partial(_writes, bench, tokens)
        yield Subject("kv_write", f"{tokens} tokens", OURS, cost, made)


def products(bench: Bench) -> Iterator[Subject]:
    """By fixed tiles, beside the library's: what invariant numerics cost."""
    width, inner = (_WIDTH, _INTERMEDIATE) if bench.full else (32, 48)
    for tokens in (1, *_TOKENS) if bench.full else (3,):
        for outs, columns in ((2 * inner, width), (width, inner)):
            cost = product_cost(tokens, outs, columns)
            shapes = {"x": (tokens, columns), "weight": (outs, columns)}
            for implementation, function in _PRODUCTS.items():
                made = functools.partial(_over_inputs, bench, function, shapes)
                label = f"{tokens} tokens, {outs} x {columns}"
                yield Subject("product", label, implementation, cost, made)


def _dense(x: Tensor, weight: Tensor) -> Tensor:
    out = x.new_empty(len(x), len(weight))
    dense(x, weight, None, out)
    return out


_PRODUCTS: dict[str, Callable[..., Any]] = {OURS: _dense, LIBRARY: torch.nn.functional.linear}


def _over_inputs(
    bench: Bench, function: Callable[..., Any], shapes: dict[str, tuple[int, ...]], count: int
) -> list[Call]:
    """`function` is called by the names of its tensors."""

    def call() -> Call:
        tensors = {
            name: torch.randn(shape, device=bench.device, dtype=torch.bfloat16)
            for name, shape in shapes.items()
        }
        return functools.partial(function, **tensors)

    return [call() for _ in range(count)]


_NORM: dict[str, Callable[..., Any]] = {
    OURS: functools.partial(rms_norm, eps=1e-6),
    INDUCTOR: lambda **given: peers.inductor(rms_norm_reference)(eps=1e-6, **given),
}
_SILU: dict[str, Callable[..., Any]] = {
    OURS: silu_mul,
    INDUCTOR: lambda **given: peers.inductor(silu_mul_reference)(**given),
}


def _writes(bench: Bench, tokens: int, count: int) -> list[Call]:
    def call() -> Call:
        shape, device = _heads(bench), bench.device
        pages = -(-tokens // PAGE_TOKENS)
        turns = torch.randn(4096, shape.head_dim // 2, 2, device=device)
        pool = Pool.make(pages, PAGE_TOKENS, shape, torch.bfloat16, device)
        roles = (tokens, shape.kv_heads, shape.group + 2, shape.head_dim)
        fused = torch.randn(roles, device=device, dtype=torch.bfloat16)
        positions = torch.randint(4096, (tokens,), device=device, dtype=torch.int32)
        slots = torch.randperm(pages * PAGE_TOKENS, device=device)[:tokens].int()
        return functools.partial(kv_write, fused, positions, slots, turns, *pool)

    return [call() for _ in range(count)]
