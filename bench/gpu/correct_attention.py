"""Attention, compiled: against the reference, and bit for bit against itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.gpu.cells import Cell, Row
from bench.gpu.limits import HEADS, TINY_HEADS, workload
from bench.gpu.steps import (
    TINY,
    Pool,
    StepQueries,
    make_step,
    pages_of,
    same_bits,
    tuning_of,
)
from bench.gpu.verdict import check, none_of, relative_error, within
from bench.gpu.world import Bench
from cbatch.runtime.gpu.attention import Tuning
from triton_kernels.attention import kernel

# Decodes, verifications, chunks that end inside a split and at its end, the shortest there is.
_MIXED = "5q1s3000_3q8s2049_q300s1500_q64_2q4s1k_q1_q1s9000"
_TINY_MIXED = "q1s70_q3s40_q1"
_ALLOWED = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}
_STRESS_LAUNCHES = 2000


def cells(bench: Bench) -> Iterator[Cell]:
    for dtype, kv_dtype, page, options in _grid(bench):
        name = f"{_short(dtype)}{f'/{_short(kv_dtype)}' if kv_dtype else ''} page {page}"
        name += "".join(f" {key} {value}" for key, value in options.items())
        case = {"dtype": dtype, "kv_dtype": kv_dtype, "page": page}
        yield check(bench, "attention", name, _against_reference, case, options)
    for heads in ("llama-1b", "qwen3-0.6b", "qwen2-7b") if bench.full else ():
        name = f"heads of {heads}"
        yield check(bench, "attention", name, _against_reference, {"heads": heads}, {})
    for name, run in (
        ("decode == verify, bitwise", _decode_is_verify),
        ("cuts of a chunk change no bit", _cuts),
        ("through descriptors and pointers the same bits", _descriptors),
        ("neighbours, programs and partials change no bit", _who_computes),
        ("combine in the kernel: the same bits every time", _stress),
    ):
        yield check(bench, "attention", name, run)


def _grid(bench: Bench) -> Iterator[tuple[torch.dtype, torch.dtype | None, int, dict[str, float]]]:
    bf16 = torch.bfloat16
    yield bf16, None, 16, {}
    yield bf16, None, 64, {"window": 1000, "soft_cap": 30.0}
    yield torch.float32, None, 16, {}
    if bench.full:
        yield bf16, None, 128, {}
        yield torch.float16, None, 16, {}
        yield torch.float16, None, 32, {"window": 1000}
        yield bf16, torch.float8_e4m3fn, 16, {"k_scale": 0.7, "v_scale": 1.9}
        yield bf16, torch.float8_e5m2, 64, {"k_scale": 0.7, "v_scale": 1.9}


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class _Case(NamedTuple):
    """A step, and how it is launched."""

    step: StepQueries
    config: Tuning
    programs: int

    @classmethod
    def make(
        cls,
        bench: Bench,
        full: str,
        tiny: str,
        *,
        heads: str = "llama-8b",
        page: int = 16,
        dtype: torch.dtype = torch.bfloat16,
        kv_dtype: torch.dtype | None = None,
    ) -> _Case:
        """Workloads at full size, and interpreted."""
        shape = HEADS[heads] if bench.full else TINY_HEADS
        queries = workload(full if bench.full else tiny)
        pool = Pool.make(pages_of(queries, page) + 3, page, shape, kv_dtype or dtype, bench.device)
        config = tuning_of(shape, page, bench.device, dtype, kv_dtype) if bench.full else TINY
        step = make_step(queries, shape, pool, dtype)
        return cls(step, config, config.num_programs)

    def run(self, **options: Any) -> Tensor:
        return self.step.run(self.step.work(self.config), self.programs, **options)

    def only(self, sequence: int, first: int, last: int) -> Tensor:
        """The result of the tokens `first`..`last` of a sequence, computed alone."""
        return self._replace(step=self.step.only(sequence, first, last)).run()


def _against_reference(bench: Bench, case: dict[str, Any], options: dict[str, float]) -> Row:
    made = _Case.make(bench, _MIXED, _TINY_MIXED, **case)
    given = dict(options)
    window = given.pop("window", None)
    work = made.step.work(made.config, window=None if window is None else int(window))
    found = made.step.run(work, made.programs, **given)
    error = relative_error(found, made.step.reference(**options))
    return within("relative error", error, _ALLOWED[case.get("dtype", torch.bfloat16)])


def _decode_is_verify(bench: Bench) -> Row:
    """Every token of a verification, decoded alone; other lengths of query in between."""
    case = _Case.make(bench, "q8s3000_q40s2000_3q4s1025", "q4s60_q2s33")
    together = case.run()
    wrong = tried = 0
    for b, query in enumerate(case.step.queries):
        for token in range(query.query_tokens):
            alone = case.only(b, token, token)
            wrong += not same_bits(alone[0], together[int(case.step.starts[b]) + token])
            tried += 1
    return none_of("tokens whose bits differ", wrong, tried)


def _cuts(bench: Bench) -> Row:
    """A chunk computed in pieces, cut anywhere."""
    case = _Case.make(bench, "q700s5000", "q9s40")
    whole, count = case.run(), case.step.queries[0].query_tokens
    wrong = tried = 0
    for cuts in ((count // 2,), (1, count // 3, count - 1)) if bench.full else ((1, 4),):
        edges = [0, *cuts, count]
        for first, stop in zip(edges, edges[1:], strict=False):
            wrong += not same_bits(case.only(0, first, stop - 1), whole[first:stop])
            tried += 1
    return none_of("pieces whose bits differ", wrong, tried)


def _descriptors(bench: Bench) -> Row:
    """Pages of 64 hold whole tiles of keys, and may be read by TMA."""
    case = _Case.make(bench, _MIXED, _TINY_MIXED, page=64 if bench.full else 16)
    found = []
    for descriptors in (True, False):
        tile = case.config.tile._replace(descriptors=descriptors)
        config = case.config._replace(tile=tile)
        many = config.num_programs
        found.append(case._replace(config=config, programs=many).run())
    differ = found[0] != found[1]
    return none_of("elements that differ", int(differ.sum()), differ.numel())


def _who_computes(bench: Bench) -> Row:
    """Programs, memory for partial results, and the company of other sequences."""
    case = _Case.make(bench, _MIXED, _TINY_MIXED)
    step, many = case.step, case.programs
    expected = case.run()
    wrong = tried = 0
    arrangements = ((1, many), (None, 1), (None, 3 * many + 1), (7, many))
    for most_partials, num_programs in arrangements if bench.full else arrangements[:1]:
        found = step.run(step.work(case.config, most_partials=most_partials), num_programs)
        wrong += not same_bits(found, expected)
        tried += 1
    for b, query in enumerate(step.queries if bench.full else step.queries[:1]):
        rows = slice(int(step.starts[b]), int(step.starts[b]) + query.query_tokens)
        wrong += not same_bits(case.only(b, 0, query.query_tokens - 1), expected[rows])
        tried += 1
    return none_of("arrangements whose bits differ", wrong, tried)


def _stress(bench: Bench) -> Row:
    """Many parts of few results, so that programs race to be the last; one work list throughout,
    whose counters must be zero again after every launch."""
    case = _Case.make(bench, "2q8s40k_3q1s20k_40q1s2100", "q2s70_q1s40")
    step, many = case.step, case.programs
    work = step.work(case.config)
    expected = step.run(work, many)
    out = torch.empty_like(expected)
    differing = torch.zeros((), dtype=torch.int64, device=bench.device)
    launches = _STRESS_LAUNCHES if bench.full else 3
    for launch in range(launches):
        out.fill_(torch.nan)
        step.run(work, many - launch % 7 if bench.full else 1 + launch, out)
        differing += (out != expected).any()
        if launch % 64 == 63 and bench.left_s() <= 0:
            launches = launch + 1
            break
    wrong = int(differing) + int(work.partials.arrived.count_nonzero())
    if not int((work.items[: int(work.num_items), kernel.PARTS.value] > 1).sum()):
        return none_of("nothing was split", 1, 1)
    return none_of("launches with other bits, counters left", wrong, launches)
