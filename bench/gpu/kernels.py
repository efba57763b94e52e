"""Every kernel's time compared with its lower limit, and with peer kernels if available."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.gpu import peers
from bench.gpu.ceilings import load_ceilings
from bench.gpu.cells import Cell, Row
from bench.gpu.environment import Bench
from bench.gpu.limits import (
    ATTENTION,
    CHUNK,
    DECODE,
    FEW_LONG,
    LLAMA_8B_HEADS,
    VERIFY,
    VOCAB,
    Cost,
    attention_cost,
    product_cost,
    sampling_cost,
    workload,
)
from bench.gpu.steps import VerifyCase, check, launches, make_case, make_step
from bench.gpu.timing import Call, figures, input_sets, time_calls
from cbatch.runtime.gpu.attention import Tuning
from cbatch.runtime.sampling import noise
from triton_kernels.build import ahead
from triton_kernels.products.dense import dense
from triton_kernels.sampling import COUPLED, REJECTION, sample
from triton_kernels.verification.kernel import verify_logits

CBATCH = "cbatch"
SDPA, VLLM = "torch sdpa, no pages", "vllm"
_PAGES = (64, 16)  # default and smallest page
_PRODUCT_ROWS = (1, 64, 512, 2048)  # rows of x in the products
_MAX_VERIFIED = 8  # tokens of a longer query count as a prompt, not as drafts to verify
_FIRST_WORKLOADS = 6  # attention workloads that are measured before sampling and products
_SMALL_PAGES = (DECODE, VERIFY, CHUNK, FEW_LONG)  # workloads also measured with small pages
_WIDTH, _INTERMEDIATE = 4096, 14336  # of Llama-3.1-8B
_STEPS = ((64, 4), (8, 4), (1, 4), (64, 0), (64, 7), (13, 4))  # (requests, drafts of each)
_VERIFY = (  # kernel, mode, drafts drawn from proposals, filters
    ("verify rejection", REJECTION, True, False),
    ("verify rejection, filters", REJECTION, True, True),
    ("verify coupled", COUPLED, False, False),
    ("verify coupled, filters", COUPLED, False, True),
)
_SAMPLE = (("sample", REJECTION, False, False), ("sample, filters", REJECTION, False, True))


class Subject(NamedTuple):
    """One implementation of a workload. `build(n)` returns launches over n separate sets of
    inputs."""

    kernel: str
    workload: str
    implementation: str
    cost: Cost
    build: Callable[[int], Sequence[Call]]


def subjects(bench: Bench) -> Iterator[Subject]:
    """Yield the first attention workloads, sampling, products, and then the rest of attention."""
    first, rest = ATTENTION[:_FIRST_WORKLOADS], ATTENTION[_FIRST_WORKLOADS:]
    return chain(attention(bench, first), sampling(bench), products(bench), attention(bench, rest))


def cells(bench: Bench) -> Iterator[Cell]:
    """Yield the compilation of all kernels by many processes, then a cell for each subject."""
    yield Cell("compiled", {"kernel": "every"}, partial(_compile, bench))
    for subject in subjects(bench):
        labels = dict(zip(("kernel", "workload", "implementation"), subject, strict=False))
        yield Cell(" ".join(subject[:3]), labels, partial(measure, bench, subject))


def _compile(bench: Bench) -> Row:
    with ahead.listed() as kernels:
        for subject in subjects(bench):
            if subject.implementation.startswith(CBATCH):
                subject.build(1)[0]()
    ahead.compile_all(kernels)
    return {"kernels": len(kernels)}


def measure(bench: Bench, subject: Subject) -> Row:
    sets = input_sets(bench, subject.cost.num_bytes)
    calls = subject.build(sets)
    if subject.kernel == "attention" and subject.implementation.startswith(CBATCH):
        check(calls[0])
    times = time_calls(calls)
    row = figures(times, subject.cost, load_ceilings(bench))
    return row | {"input_sets": sets, "beyond_l2": sets * subject.cost.num_bytes > bench.l2_bytes}


def attention(bench: Bench, names: Sequence[str]) -> Iterator[Subject]:
    heads = LLAMA_8B_HEADS
    for name in names:
        queries = workload(name)
        lens = [q.query_tokens for q in queries if q.query_tokens <= _MAX_VERIFIED]
        subject = partial(Subject, "attention", name)
        cost = attention_cost(queries, heads)
        for page in _PAGES[: 2 if name in _SMALL_PAGES else 1]:
            # The tuning of an executor whose verifications have these lengths.
            longest = max(lens, default=1)
            tuning = Tuning.of(heads, torch.bfloat16, bench.device, page, query_tokens=longest)
            step = partial(make_step, queries, heads, page, bench.device)
            who = CBATCH if page == _PAGES[0] else f"{CBATCH}, pages of {page}"
            yield subject(who, cost, partial(_over, partial(launches, tuning=tuning), step))
        step = partial(make_step, queries, heads, _PAGES[0], bench.device)
        yield subject(SDPA, cost, partial(_over, peers.sdpa, step))


def sampling(bench: Bench) -> Iterator[Subject]:
    """Yield verification of k + 1 rows per request over a whole vocabulary, and plain sampling;
    both with recorded and with random logits."""
    for logits, (requests, k) in product(("recorded", "random"), _STEPS):
        for kernel, mode, proposed, filters in _VERIFY if k else _SAMPLE:
            kinds = {"mode": mode, "proposed": proposed, "filters": filters, "logits": logits}
            case = partial(make_case, [k] * requests, VOCAB, device=bench.device, **kinds)
            own = partial(verifications, filtered=filters) if k else draws
            builds: dict[str, Callable[..., Sequence[Call]]] = {CBATCH: own}
            if proposed and not filters:
                builds[VLLM] = partial(peers.vllm_verification, bench)
            label = f"{requests} requests k {k}, {logits} logits"
            cost = sampling_cost(requests * (k + 1), VOCAB)
            for implementation, build in builds.items():
                yield Subject(kernel, label, implementation, cost, partial(_over, build, case))


def verifications(cases: Sequence[VerifyCase], *, filtered: bool) -> list[Call]:
    return [partial(verify_logits, *case, filtered=filtered) for case in cases]


def draws(cases: Sequence[VerifyCase]) -> list[Call]:
    return [partial(sample, case.batch, noise.BONUS) for case in cases]


def products(bench: Bench) -> Iterator[Subject]:
    """Yield products by fixed tiles and by the library; the ratio of their times is the cost of
    invariant numerics."""
    width, inner = _WIDTH, _INTERMEDIATE
    random = partial(torch.randn, device=bench.device, dtype=torch.bfloat16)
    for tokens in _PRODUCT_ROWS:
        for outs, columns in ((2 * inner, width), (width, inner)):
            cost = product_cost(tokens, outs, columns)

            def build(
                function: Any, x: tuple[int, int], w: tuple[int, int], count: int
            ) -> list[Call]:
                return [partial(function, random(x), random(w)) for _ in range(count)]

            for implementation, function in (CBATCH, _dense), ("torch", torch.nn.functional.linear):
                calls = partial(build, function, (tokens, columns), (outs, columns))
                label = f"{tokens} tokens, {outs} x {columns}"
                yield Subject("product", label, implementation, cost, calls)


def _dense(x: Tensor, weight: Tensor) -> None:
    dense(x, weight, None, x.new_empty(len(x), len(weight)))


def _over(build: Callable[[Any], Sequence[Call]], make: Callable[..., Any], count: int) -> Any:
    return build([make(seed=seed) for seed in range(count)])
