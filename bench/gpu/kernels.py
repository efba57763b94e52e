"""Every kernel's time compared with its lower limit, and with peer kernels over the same inputs,
called as their own users call them: torch's, and vLLM's if `--peers` holds it."""

from __future__ import annotations

import functools
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from bench.gpu.cells import Bench, Cell, NotAvailable, Row
from bench.gpu.inputs import StepQueries, VerifyCase, check, launches, make_case, make_step
from bench.gpu.timing import (
    ATTENTION,
    CHUNK,
    DECODE,
    FEW_LONG,
    HEADS,
    VERIFY,
    Call,
    Cost,
    attention_cost,
    figures,
    input_sets,
    load_ceilings,
    product_cost,
    time_calls,
    workload,
)
from cbatch.runtime.gpu.attention import Tuning
from cbatch.runtime.sampling import noise
from triton_kernels.build import ahead
from triton_kernels.products.dense import dense
from triton_kernels.sampling import COUPLED, REJECTION, sample
from triton_kernels.sampling.launch import COLLECTING, TILING, Tiling
from triton_kernels.verification.kernel import verify_logits

CBATCH, SDPA, VLLM = "cbatch", "torch sdpa, no pages", "vllm"
LLAMA_8B_HEADS, VOCAB = HEADS["llama-8b"], 128_256
WIDTH, INTERMEDIATE = 4096, 14336  # of Llama-3.1-8B
_PAGES = (64, 16)  # default and smallest page
_SMALL_PAGES = (DECODE, VERIFY, CHUNK, FEW_LONG)  # workloads also measured with small pages
PRODUCT_ROWS = (1, 64, 512, 2048)  # rows of x in the products
_MAX_VERIFIED = 8  # tokens of a longer query count as a prompt, not as drafts to verify
_FIRST_WORKLOADS = 6  # attention workloads that are measured before sampling and products
LOGITS = ("recorded", "random")
STEPS = ((64, 4), (8, 4), (1, 4), (64, 0), (64, 7), (13, 4))  # (requests, drafts of each)
_VERIFY = (  # kernel, mode, drafts drawn from proposals, filters
    ("verify rejection", REJECTION, True, False),
    ("verify rejection, filters", REJECTION, True, True),
    ("verify coupled", COUPLED, False, False),
    ("verify coupled, filters", COUPLED, False, True),
)
_SAMPLE = (("sample", REJECTION, False, False), ("sample, filters", REJECTION, False, True))


class Subject(NamedTuple):
    """One implementation of a workload. `build` returns a launch for each of several inputs, and
    `make(seed=...)` makes one of them."""

    kernel: str
    workload: str
    implementation: str
    cost: Cost
    build: Callable[[Any], Sequence[Call]]
    make: Callable[..., Any]

    def calls(self, count: int) -> Sequence[Call]:
        return self.build([self.make(seed=seed) for seed in range(count)])


def subjects(bench: Bench) -> Iterator[Subject]:
    """Yield the first attention workloads, sampling, products, and then the rest of attention."""
    first, rest = ATTENTION[:_FIRST_WORKLOADS], ATTENTION[_FIRST_WORKLOADS:]
    return chain(attention(bench, first), sampling(bench), products(bench), attention(bench, rest))


def cells(bench: Bench) -> Iterator[Cell]:
    """Yield the compilation of all kernels by many processes, then a cell for each subject."""
    yield Cell("compiled", {"kernel": "every"}, partial(compile_all, bench))
    for subject in subjects(bench):
        labels = dict(zip(("kernel", "workload", "implementation"), subject, strict=False))
        yield Cell(" ".join(subject[:3]), labels, partial(measure, bench, subject))


def compile_all(bench: Bench) -> Row:
    with ahead.listed() as kernels:
        for subject in subjects(bench):
            if subject.implementation.startswith(CBATCH):
                subject.calls(1)[0]()
    ahead.compile_all(kernels)
    return {"kernels": len(kernels)}


def measure(bench: Bench, subject: Subject) -> Row:
    sets = input_sets(bench, subject.cost.num_bytes)
    calls = subject.calls(sets)
    if subject.kernel == "attention" and subject.implementation.startswith(CBATCH):
        check(calls[0])
    row = figures(time_calls(calls), subject.cost, load_ceilings(bench))
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
            yield subject(who, cost, partial(launches, tuning=tuning), step)
        yield subject(SDPA, cost, sdpa, partial(make_step, queries, heads, _PAGES[0], bench.device))


def sdpa(steps: Sequence[StepQueries]) -> list[Call]:
    """Return calls of torch's attention over random contiguous tensors without pages: q [B, heads,
    Q, D]; k, v [B, kv_heads, L, D]."""
    query, context = steps[0].queries[0]
    if any(q != (query, context) for q in steps[0].queries):
        raise NotAvailable("needs sequences of one length")
    mask = causal_lower_right(query, context) if 1 < query < context else None
    kinds = {"attn_mask": mask, "is_causal": query == context, "enable_gqa": True}
    calls = []
    for step in steps:
        heads, batch = step.heads, len(step.queries)
        q = step.q.reshape(batch, query, heads.kv_heads * heads.group, heads.head_dim)
        kv = q.new_empty(2, batch, heads.kv_heads, context, heads.head_dim).normal_()
        q = q.transpose(1, 2).contiguous()
        calls.append(partial(F.scaled_dot_product_attention, q, *kv, **kinds))
    return calls


def sampling(bench: Bench) -> Iterator[Subject]:
    """Yield verification of k + 1 rows per request over a whole vocabulary, and plain sampling;
    both with recorded and with random logits. The limit is one read of the logits."""
    for logits, (requests, k) in product(LOGITS, STEPS):
        for kernel, mode, proposed, filters in _VERIFY if k else _SAMPLE:
            kinds = {"mode": mode, "proposed": proposed, "filters": filters, "logits": logits}
            case = partial(make_case, [k] * requests, VOCAB, device=bench.device, **kinds)
            own = partial(verifications, filtered=filters) if k else draws
            label = f"{requests} requests k {k}, {logits} logits"
            subject = partial(Subject, kernel, label, cost=Cost(2 * requests * (k + 1) * VOCAB))
            yield subject(CBATCH, build=own, make=case)
            if filters:
                who = f"{CBATCH}, lists by tiles"
                yield subject(who, build=partial(own, tiling=COLLECTING), make=case)
            if proposed and not filters:
                yield subject(VLLM, build=partial(vllm_verification, bench), make=case)


def verifications(
    cases: Sequence[VerifyCase], *, filtered: bool, tiling: Tiling = TILING
) -> list[Call]:
    return [partial(verify_logits, *case, tiling, filtered=filtered) for case in cases]


def draws(cases: Sequence[VerifyCase], *, tiling: Tiling = TILING) -> list[Call]:
    return [partial(sample, case.batch, noise.BONUS, tiling) for case in cases]


def vllm_verification(bench: Bench, cases: Sequence[VerifyCase]) -> list[Call]:
    """Return launches of the rejection sampler of vLLM's second model runner, which takes
    logits."""
    reject = _load_vllm(unpack(bench))
    return [partial(reject, **_vllm_arguments(case)) for case in cases]


def _vllm_arguments(case: VerifyCase) -> dict[str, Any]:
    batch, counts, proposals = case.batch, case.batch.drafts.counts.long(), case.proposals
    size, k = len(counts), int(counts.max())
    requests, depths = batch.rows.requests.long(), batch.rows.depths.long()
    sampled = torch.zeros_like(requests)
    sampled[depths > 0] = batch.drafts.tokens.long()  # row 1 + j holds draft j
    return {
        "target_logits": batch.logits,
        "draft_logits": None if proposals is None else proposals.logits.view(size, k, -1),
        "draft_sampled": sampled,
        "cu_num_logits": F.pad((counts + 1).cumsum(0), (1, 0)).to(torch.int32),
        "idx_mapping": torch.arange(size, dtype=torch.int32, device=counts.device),
        "expanded_local_pos": batch.rows.depths,
        "num_speculative_steps": k,
        "pos": batch.noise.positions[requests] + depths,
        "expanded_idx_mapping": batch.rows.requests,
        "temperature": batch.requests.temperatures,
        "seed": batch.noise.keys[:, 0].contiguous(),
    }


@functools.cache
def _load_vllm(folder: Path) -> Callable[..., Any]:
    sys.path.append(str(folder))
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

    return rejection_sample


def unpack(bench: Bench) -> Path:
    """Return the folder with the package `vllm` and its requirements, unpacked if need be."""
    if bench.peers is None:
        raise NotAvailable("vLLM is not supplied (--peers)")
    if (bench.peers / "vllm").is_dir():
        return bench.peers
    folder = bench.out / "peers"
    if not (folder / "vllm").is_dir():
        with tarfile.open(bench.peers / "vllm.txz") as packed:
            packed.extractall(folder, filter="tar")
        for wheel in (bench.peers / "wheels").glob("*.whl"):
            with zipfile.ZipFile(wheel) as file:
                file.extractall(folder)
    return folder


def products(bench: Bench) -> Iterator[Subject]:
    """Yield products by fixed tiles and by the library; the ratio of their times is the cost of
    invariant numerics."""
    in_parts = partial(_dense, has_parts=True)
    functions = {CBATCH: _dense, f"{CBATCH}, sums in parts": in_parts, "torch": F.linear}
    shapes = ((2 * INTERMEDIATE, WIDTH), (WIDTH, INTERMEDIATE))
    for tokens, (outs, columns) in product(PRODUCT_ROWS, shapes):
        cost, label = product_cost(tokens, outs, columns), f"{tokens} tokens, {outs} x {columns}"
        make = partial(_operands, bench.device, (tokens, columns), (outs, columns))
        for name, function in functions.items():
            yield Subject("product", label, name, cost, partial(_each, function), make)


def _operands(device: torch.device, *shapes: tuple[int, int], seed: int) -> list[Tensor]:
    return [torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes]


def _each(function: Callable[..., Any], operands: Sequence[list[Tensor]]) -> list[Call]:
    return [partial(function, *tensors) for tensors in operands]


def _dense(x: Tensor, weight: Tensor, **more: bool) -> None:
    dense(x, weight, None, x.new_empty(len(x), len(weight)), **more)
