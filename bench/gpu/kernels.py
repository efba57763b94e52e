"""Every kernel as a fraction of its own limit, beside the peers that can be had."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import torch

from bench.gpu import peers
from bench.gpu.batches import Case, make_case
from bench.gpu.ceilings import load_ceilings
from bench.gpu.cells import Cell, Row
from bench.gpu.correct_sampling import tiling_of
from bench.gpu.grid import (
    ATTENTION,
    CHUNK,
    DECODE,
    FEW_LONG,
    HEADS,
    LLAMA_8B_HEADS,
    TINY,
    TINY_HEADS,
    VERIFY,
    VOCAB,
    workload,
)
from bench.gpu.limits import (
    Cost,
    attention_cost,
    kv_write_cost,
    rms_norm_cost,
    sampling_cost,
    silu_mul_cost,
)
from bench.gpu.steps import Pool, Step, make_step, pages_of
from bench.gpu.tiles import TINY as TINY_CONFIG
from bench.gpu.tiles import config_of, programs
from bench.gpu.timing import Call, figures, input_sets, time_calls
from bench.gpu.verdict import relative_error
from bench.gpu.world import Bench
from triton_kernels import noise
from triton_kernels.activation import silu_mul
from triton_kernels.kv_write import kv_write
from triton_kernels.norm import rms_norm
from triton_kernels.sample import COUPLED, REJECTION, sample
from triton_kernels.verify_logits import verify_logits

SECTION = "kernels"
OURS = "cbatch"
PAGE_TOKENS = 16
_TOKENS = (64, 512, 2048)  # of the kernels that work token by token
_MOST_ERROR = 2e-2
_FIRST = 6
_LONG_PAGES = (DECODE, VERIFY, CHUNK, FEW_LONG)  # also read through descriptors
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
        attention(bench, first), sampling(bench), by_token(bench), attention(bench, rest)
    ):
        key = f"{subject.kernel} {subject.workload} {subject.implementation}"
        labels = {
            "kernel": subject.kernel,
            "workload": subject.workload,
            "implementation": subject.implementation,
        }
        yield Cell(key, labels, lambda s=subject: measure(bench, s))


def measure(bench: Bench, subject: Subject) -> Row:
    timing = None
    if bench.full or subject.implementation in (OURS, *peers.ANYWHERE):
        sets = input_sets(subject.cost.num_bytes, bench.device)
        timing = time_calls(bench, subject.build(1 if bench.warming else sets))
    return figures(timing, subject.cost, load_ceilings(bench.out))


# --- attention ------------------------------------------------------------------------------------


def attention(bench: Bench, names: Sequence[str]) -> Iterator[Subject]:
    shape = LLAMA_8B_HEADS if bench.full else TINY_HEADS
    for name in names:
        cost = attention_cost(workload(name), shape)
        made = functools.partial(_steps, bench, name)
        yield Subject("attention", name, OURS, cost, functools.partial(_ours, bench, made))
        if name in _LONG_PAGES:
            longer = functools.partial(_steps, bench, name, page_tokens=64)
            build = functools.partial(_ours, bench, longer)
            yield Subject("attention", name, f"{OURS}, pages of 64", cost, build)
        for peer, build in peers.ATTENTION.items():
            yield Subject(
                "attention", name, peer, cost, functools.partial(_theirs, bench, build, made)
            )


def _steps(bench: Bench, name: str, count: int, *, page_tokens: int = PAGE_TOKENS) -> list[Step]:
    """Steps over parts of one pool."""
    queries = workload(name)
    shape = LLAMA_8B_HEADS if bench.full else TINY_HEADS
    pages = pages_of(queries, page_tokens)
    pool = Pool.make(count * pages, page_tokens, shape, torch.bfloat16, bench.device)
    parts = (Pool(*(half[i * pages : (i + 1) * pages] for half in pool)) for i in range(count))
    return [make_step(queries, shape, part, torch.bfloat16, i) for i, part in enumerate(parts)]


def _ours(bench: Bench, made: Callable[[int], list[Step]], count: int) -> list[Call]:
    steps = made(count)
    shape, page_tokens = steps[0].shape, steps[0].pool.page_tokens
    config = config_of(shape, page_tokens, bench.device) if bench.full else TINY_CONFIG
    if not bench.world.runs:
        return []
    # Planned once a step for all layers: its cost is not the kernel's.
    work, many = steps[0].work(config), programs(config, bench.device)
    outs = [s.q.new_empty(len(s.q), s.q[0].numel()) for s in steps]
    calls = [
        functools.partial(step.run, work, many, out=out)
        for step, out in zip(steps, outs, strict=True)
    ]
    _check(bench, steps[0], calls[0])
    return calls


def _theirs(
    bench: Bench,
    build: Callable[[Bench, list[Step]], Sequence[Call]],
    made: Callable[[int], list[Step]],
    count: int,
) -> Sequence[Call]:
    steps = made(count)
    calls = build(bench, steps)
    _check(bench, steps[0], calls[0])
    return calls


def _check(bench: Bench, step: Step, call: Call) -> None:
    """What computes something else is not timed. Of calls over the pages of `step`, which name
    their output; others have inputs of their own. Raises ArithmeticError."""
    out = getattr(call, "keywords", {}).get("out")
    if out is None or bench.warming or not bench.world.runs:
        return
    out.fill_(torch.nan)
    call()
    error = relative_error(out.flatten(1), step.reference())
    if not error < _MOST_ERROR:
        raise ArithmeticError(f"relative error {error:.1e}, {_MOST_ERROR} allowed")


# --- sampling -------------------------------------------------------------------------------------


def sampling(bench: Bench) -> Iterator[Subject]:
    """Verification of k + 1 rows a request over a whole vocabulary, and plain draws."""
    vocab = VOCAB if bench.full else 96
    every = ((64, 0), (13, 4), (64, 4), (64, 7), (8, 4), (1, 4))
    for requests, k in every if bench.full else ((6, 2),):
        rows = requests * (k + 1)
        name = f"{requests} requests k {k}"
        for kernel, mode, proposed, filters in (
            ("verify coupled", COUPLED, False, False),
            ("verify rejection", REJECTION, True, False),
            ("verify coupled, filters", COUPLED, False, True),
            ("verify rejection, filters", REJECTION, True, True),
        ):
            if (not k and kernel != "verify coupled") or (filters and not bench.full):
                continue
            cost = sampling_cost(rows, requests * k if proposed else 0, vocab)
            made = functools.partial(
                _cases, bench, requests, k, vocab, mode, proposed=proposed, filters=filters
            )
            yield Subject(kernel, name, OURS, cost, functools.partial(_verifications, bench, made))
            for peer, build in peers.VERIFICATION.items() if proposed and not filters else ():
                yield Subject(kernel, name, peer, cost, lambda n, b=build, m=made: b(bench, m(n)))
    cost = sampling_cost(64, 0, vocab)
    made = functools.partial(_cases, bench, 64 if bench.full else 3, 0, vocab, REJECTION)
    yield Subject("sample", "64 rows", OURS, cost, functools.partial(_draws, bench, made))
    for peer, build in peers.SAMPLING.items():
        yield Subject("sample", "64 rows", peer, cost, lambda n, b=build: b(bench, made(n)))


def _cases(
    bench: Bench,
    requests: int,
    k: int,
    vocab: int,
    mode: int,
    count: int,
    *,
    proposed: bool = False,
    filters: bool = False,
) -> list[Case]:
    return [
        make_case(
            [k] * requests,
            vocab,
            device=bench.device,
            mode=mode,
            proposed=proposed,
            filters=filters,
            seed=seed,
        )
        for seed in range(count)
    ]


def _verifications(bench: Bench, made: Callable[[int], list[Case]], count: int) -> list[Call]:
    return [functools.partial(verify_logits, *case, tiling_of(bench)) for case in made(count)]


def _draws(bench: Bench, made: Callable[[int], list[Case]], count: int) -> list[Call]:
    return [
        functools.partial(sample, case.batch, noise.BONUS, tiling_of(bench)) for case in made(count)
    ]


# --- token by token -------------------------------------------------------------------------------


def by_token(bench: Bench) -> Iterator[Subject]:
    width, inner = (_WIDTH, _INTERMEDIATE) if bench.full else (32, 48)
    for tokens in _TOKENS if bench.full else (3,):
        name = f"{tokens} tokens"
        for adds in (False, True):
            kernel = "rms_norm add" if adds else "rms_norm"
            cost = rms_norm_cost(tokens, width, adds=adds)
            made = functools.partial(_norm_inputs, bench, tokens, width, adds)
            for implementation, build in ({OURS: our_norm} | peers.NORM).items():
                yield _elementwise(bench, kernel, name, implementation, cost, made, build)
        cost = silu_mul_cost(tokens, inner)
        made = functools.partial(_activation_inputs, bench, tokens, inner)
        for implementation, build in ({OURS: our_activation} | peers.ACTIVATION).items():
            yield _elementwise(bench, "silu_mul", name, implementation, cost, made, build)
        shape = LLAMA_8B_HEADS if bench.full else TINY_HEADS
        cost = kv_write_cost(tokens, shape)
        build_writes = functools.partial(_writes, bench, tokens)
        yield Subject("kv_write", name, OURS, cost, build_writes)


def _elementwise(
    bench: Bench,
    kernel: str,
    name: str,
    implementation: str,
    cost: Cost,
    made: Callable[[], tuple[torch.Tensor | None, ...]],
    build: Callable[..., Call],
) -> Subject:
    def calls(count: int) -> list[Call]:
        return [build(bench, *made()) for _ in range(count)]

    return Subject(kernel, name, implementation, cost, calls)


def our_norm(
    bench: Bench, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None
) -> Call:
    return functools.partial(rms_norm, x, weight, 1e-6, residual)


def our_activation(bench: Bench, gate_up: torch.Tensor) -> Call:
    return functools.partial(silu_mul, gate_up)


def _norm_inputs(
    bench: Bench, tokens: int, width: int, adds: bool
) -> tuple[torch.Tensor | None, ...]:
    x, residual = (
        torch.randn(tokens, width, device=bench.device, dtype=torch.bfloat16) for _ in range(2)
    )
    weight = torch.randn(width, device=bench.device, dtype=torch.bfloat16)
    return x, weight, residual if adds else None


def _activation_inputs(bench: Bench, tokens: int, inner: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(tokens, 2 * inner, device=bench.device, dtype=torch.bfloat16),)


def _writes(bench: Bench, tokens: int, count: int) -> list[Call]:
    shape = HEADS["llama-8b"] if bench.full else TINY_HEADS
    device, pages = bench.device, -(-tokens // PAGE_TOKENS)
    turns = torch.randn(4096, shape.head_dim // 2, 2, device=device)
    calls = []
    for seed in range(count):
        pool = Pool.make(pages, PAGE_TOKENS, shape, torch.bfloat16, device, seed)
        roles = (tokens, shape.kv_heads, shape.group + 2, shape.head_dim)
        fused = torch.randn(roles, device=device, dtype=torch.bfloat16)
        positions = torch.randint(4096, (tokens,), device=device, dtype=torch.int32)
        slots = torch.randperm(pages * PAGE_TOKENS, device=device)[:tokens].int()
        calls.append(functools.partial(kv_write, fused, positions, slots, turns, *pool))
    return calls
