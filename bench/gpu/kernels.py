"""Every kernel's time compared with its lower limit, and with peer kernels if available."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.gpu import peers
from bench.gpu.batches import VerifyCase, make_case
from bench.gpu.ceilings import load_ceilings
from bench.gpu.cells import Cell, NotAvailable, Row
from bench.gpu.environment import Bench, l2_bytes
from bench.gpu.limits import (
    ATTENTION,
    CHUNK,
    DECODE,
    FEW_LONG,
    LLAMA_8B_HEADS,
    TINY_HEADS,
    VERIFY,
    VOCAB,
    Cost,
    GridHeads,
    attention_cost,
    product_cost,
    sampling_cost,
    workload,
)
from bench.gpu.limits import TINY as TINY_ATTENTION
from bench.gpu.steps import TINY as TINY_TUNING
from bench.gpu.steps import StepQueries, launches, make_steps, relative_error, tuning_of
from bench.gpu.timing import Call, figures, input_sets, time_calls
from cbatch.runtime.sampling import noise
from triton_kernels.build import ahead
from triton_kernels.products.dense import dense
from triton_kernels.sampling import COUPLED, REJECTION, sample
from triton_kernels.verification.kernel import verify_logits

CBATCH = "cbatch"
PAGE_TOKENS, _SHORT_PAGE_TOKENS = 64, 16  # default and smallest page
_PRODUCT_ROWS = (1, 64, 512, 2048)  # rows of x in the products
MOST_ERROR = 2e-2  # largest relative error of an attention result
_MOST_VERIFIED = 8  # tokens of a longer query count as a prompt, not as drafts to verify
_FIRST_WORKLOADS = 6  # attention workloads that are measured before sampling and products
_SHORT_PAGES = (DECODE, VERIFY, CHUNK, FEW_LONG)  # workloads also measured with short pages
_WIDTH, _INTERMEDIATE = 4096, 14336  # of Llama-3.1-8B


class Subject(NamedTuple):
    """One implementation of a workload. `build(n)` returns launches over n separate sets of inputs.
    It raises `NotAvailable` if a peer is not available."""

    kernel: str
    workload: str
    implementation: str
    cost: Cost
    build: Callable[[int], Sequence[Call]]


def subjects(bench: Bench) -> Iterator[Subject]:
    """Yield the first attention workloads, sampling, products, and then the rest of attention."""
    names = ATTENTION if bench.full else TINY_ATTENTION
    return chain(
        attention(bench, names[:_FIRST_WORKLOADS]),
        sampling(bench),
        products(bench),
        attention(bench, names[_FIRST_WORKLOADS:]),
    )


def cells(bench: Bench) -> Iterator[Cell]:
    """Yield the compilation of all kernels by many processes, then a cell for each subject."""
    yield Cell("compiled", {"kernel": "every"}, partial(_compile, bench), timed=False)
    for subject in subjects(bench):
        labels = dict(zip(("kernel", "workload", "implementation"), subject, strict=False))
        yield Cell(" ".join(subject[:3]), labels, partial(measure, bench, subject))


def _compile(bench: Bench) -> Row:
    if not bench.full:
        return {"status": "unmeasured"}
    with ahead.listed() as kernels:
        for subject in subjects(bench._replace(listing=True)):
            if subject.implementation.startswith(CBATCH):
                for call in subject.build(1):
                    call()
    ahead.compile_all(kernels)
    with suppress(NotAvailable):
        peers.load_vllm(bench)
    return {"kernels": len(kernels)}


def measure(bench: Bench, subject: Subject) -> Row:
    timing, sets = None, 1
    if bench.full or subject.implementation in (CBATCH, *peers.RUN_WITHOUT_GPU):
        sets = input_sets(subject.cost.num_bytes, bench.device)
        timing = time_calls(bench, subject.build(sets))
    beyond_l2 = sets * subject.cost.num_bytes > l2_bytes(bench.device)
    row = figures(timing, subject.cost, load_ceilings(bench.out))
    return row | {"input_sets": sets, "beyond_l2": beyond_l2 if bench.full else None}


def _heads(bench: Bench) -> GridHeads:
    return LLAMA_8B_HEADS if bench.full else TINY_HEADS


# --- attention ------------------------------------------------------------------------------------


def attention(bench: Bench, names: Sequence[str]) -> Iterator[Subject]:
    shape = _heads(bench)
    builds: dict[str, Callable[..., Sequence[Call]]] = {CBATCH: own_attention} | peers.ATTENTION
    for name in names:
        cost = attention_cost(workload(name), shape)
        subject = partial(Subject, "attention", name)
        for implementation, build in builds.items():
            checked = partial(_checked, bench, name, build)
            yield subject(implementation, cost, checked)
            if implementation == CBATCH and name in _SHORT_PAGES:
                short = partial(checked, page_tokens=_SHORT_PAGE_TOKENS)
                yield subject(f"{CBATCH}, pages of {_SHORT_PAGE_TOKENS}", cost, short)


def own_attention(bench: Bench, steps: Sequence[StepQueries]) -> list[Call]:
    step, tuning = steps[0], TINY_TUNING
    if bench.full:  # the tuning of an executor whose verifications have these query lengths
        query_tokens = max(
            (q.query_tokens for q in step.queries if q.query_tokens <= _MOST_VERIFIED), default=1
        )
        page_tokens = step.pool.page_tokens
        tuning = tuning_of(
            step.shape, page_tokens, bench.device, numerics="fast", query_tokens=query_tokens
        )
    return launches(bench, steps, tuning)


def _checked(
    bench: Bench,
    name: str,
    build: Callable[[Bench, Sequence[StepQueries]], Sequence[Call]],
    count: int,
    page_tokens: int = PAGE_TOKENS,
) -> Sequence[Call]:
    """Return launches over `count` steps. If the first call has an `out` keyword, its result is
    compared with the reference; other calls have inputs of their own. Raises ArithmeticError for a
    wrong result, so that it is not timed."""
    shape = _heads(bench)
    steps = make_steps(workload(name), shape, page_tokens, bench.device, count)
    calls = build(bench, steps)
    out = getattr(calls[0], "keywords", {}).get("out") if calls else None
    if out is None or bench.listing or not bench.mode.runs:
        return calls
    out.fill_(torch.nan)
    calls[0]()
    error = relative_error(out.flatten(1), steps[0].reference())
    if not error < MOST_ERROR:
        raise ArithmeticError(f"relative error {error:.1e}, {MOST_ERROR} allowed")
    return calls


# --- sampling -------------------------------------------------------------------------------------


def sampling(bench: Bench) -> Iterator[Subject]:
    """Yield verification of k + 1 rows per request over a whole vocabulary, and plain sampling;
    both with recorded and with random logits."""
    vocab = VOCAB if bench.full else 2048
    for logits, (requests, k) in product(("recorded", "random"), _STEPS if bench.full else _TINY):
        for kernel, mode, proposed, filters in _VERDICTS if k else _DRAWS:
            cost = sampling_cost(requests * (k + 1), vocab)
            kinds = {"mode": mode, "proposed": proposed, "filters": filters, "logits": logits}
            verify = partial(verifications, filtered=filters)
            builds: dict[str, Callable[..., Sequence[Call]]] = {CBATCH: verify if k else draws}
            builds |= peers.VERIFICATION if proposed and not filters else {}
            for implementation, build in builds.items():
                arguments = bench, build, [k] * requests, vocab, kinds
                label = f"{requests} requests k {k}, {logits} logits"
                yield Subject(kernel, label, implementation, cost, partial(_over_cases, *arguments))


_STEPS = ((64, 4), (8, 4), (1, 4), (64, 0), (64, 7), (13, 4))  # (requests, drafts of each)
_TINY = ((2, 1), (2, 0))
_VERDICTS = (
    ("verify rejection", REJECTION, True, False),
    ("verify rejection, filters", REJECTION, True, True),
    ("verify coupled", COUPLED, False, False),
    ("verify coupled, filters", COUPLED, False, True),
)
_DRAWS = (("sample", REJECTION, False, False), ("sample, filters", REJECTION, False, True))


def _over_cases(
    bench: Bench,
    build: Callable[..., Sequence[Call]],
    drafts: list[int],
    vocab: int,
    kinds: dict[str, Any],
    count: int,
) -> Sequence[Call]:
    seeds = range(count)
    if not bench.mode.runs:
        kinds = kinds | {"proposed": False}  # a kernel would have to draw the drafts
    cases = [make_case(drafts, vocab, device=bench.device, seed=seed, **kinds) for seed in seeds]
    return build(bench, cases)


def verifications(bench: Bench, cases: Sequence[VerifyCase], *, filtered: bool) -> list[Call]:
    return [partial(verify_logits, *case, filtered=filtered) for case in cases]


def draws(bench: Bench, cases: Sequence[VerifyCase]) -> list[Call]:
    return [partial(sample, case.batch, noise.BONUS) for case in cases]


# --- products -------------------------------------------------------------------------------------


def products(bench: Bench) -> Iterator[Subject]:
    """Yield products by fixed tiles and by the library; the ratio of their times is the cost of
    invariant numerics."""
    width, inner = (_WIDTH, _INTERMEDIATE) if bench.full else (32, 48)
    for tokens in _PRODUCT_ROWS if bench.full else (3,):
        for outs, columns in ((2 * inner, width), (width, inner)):
            cost = product_cost(tokens, outs, columns)
            for implementation, function in _PRODUCTS.items():
                build = partial(_over_matrices, bench, function, (tokens, columns), (outs, columns))
                label = f"{tokens} tokens, {outs} x {columns}"
                yield Subject("product", label, implementation, cost, build)


def _dense(x: Tensor, weight: Tensor) -> None:
    dense(x, weight, None, x.new_empty(len(x), len(weight)))


_PRODUCTS: dict[str, Callable[..., Any]] = {CBATCH: _dense, "torch": torch.nn.functional.linear}


def _over_matrices(
    bench: Bench, function: Callable[..., Any], x: tuple[int, ...], w: tuple[int, ...], count: int
) -> list[Call]:
    def random(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, device=bench.device, dtype=torch.bfloat16)

    return [partial(function, random(x), random(w)) for _ in range(count)]
