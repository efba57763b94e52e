"""Attention, compiled: against the reference, and bit for bit against itself."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bench.gpu.cells import Cell, Row
from bench.gpu.grid import HEADS, TINY_HEADS, Shape, workload
from bench.gpu.steps import Config, Pool, Step, make_step, pages_of, same_bits
from bench.gpu.tiles import TINY, config_of, programs
from bench.gpu.verdict import UNMEASURED, none_of, relative_error, within
from bench.gpu.world import Bench
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
        yield Cell(
            f"attention {name}",
            {"kernel": "attention", "case": name},
            lambda d=dtype, k=kv_dtype, p=page, o=options: _against_reference(bench, d, k, p, o),
        )
    for heads in ("llama-1b", "qwen3-0.6b", "qwen2-7b") if bench.full else ():
        yield Cell(
            f"attention heads {heads}",
            {"kernel": "attention", "case": f"heads of {heads}"},
            lambda shape=HEADS[heads]: _against_reference(
                bench, torch.bfloat16, None, 16, {}, shape
            ),
        )
    for name, run in (
        ("decode == verify, bitwise", _decode_is_verify),
        ("cuts of a chunk change no bit", _cuts),
        ("through descriptors and pointers the same bits", _descriptors),
        ("neighbours, programs and partials change no bit", _who_computes),
        ("combine in the kernel: the same bits every time", _stress),
    ):
        yield Cell(
            f"attention {name}", {"kernel": "attention", "case": name}, lambda r=run: r(bench)
        )


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


def _step(
    bench: Bench,
    name: str,
    shape: Shape,
    *,
    page: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
) -> Step:
    queries = workload(name)
    pool = Pool.make(pages_of(queries, page) + 3, page, shape, kv_dtype or dtype, bench.device)
    return make_step(queries, shape, pool, dtype)


def _config(
    bench: Bench,
    shape: Shape,
    page: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
) -> Config:
    return config_of(shape, page, bench.device, dtype, kv_dtype) if bench.full else TINY


def _against_reference(
    bench: Bench,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
    page: int,
    options: dict[str, float],
    shape: Shape = HEADS["llama-8b"],
) -> Row:
    shape = shape if bench.full else TINY_HEADS
    name = _MIXED if bench.full else _TINY_MIXED
    step = _step(bench, name, shape, page=page, dtype=dtype, kv_dtype=kv_dtype)
    if not bench.world.runs:
        return UNMEASURED
    config = _config(bench, shape, page, dtype, kv_dtype)
    given = dict(options)
    window = given.pop("window", None)
    work = step.work(config, window=None if window is None else int(window))
    found = step.run(work, programs(config, bench.device), **given)
    expected = step.reference(**options)
    return within("relative error", relative_error(found, expected), _ALLOWED[dtype])


def _decode_is_verify(bench: Bench) -> Row:
    """Every token of a verification, decoded alone; other lengths of query in between."""
    shape = HEADS["llama-8b"] if bench.full else TINY_HEADS
    step = _step(bench, "q8s3000_q40s2000_3q4s1025" if bench.full else "q4s60_q2s33", shape)
    if not bench.world.runs:
        return UNMEASURED
    config = _config(bench, shape)
    together = step.run(step.work(config), programs(config, bench.device))
    wrong = tried = 0
    for b, query in enumerate(step.queries):
        for token in range(query.query_tokens):
            alone = step.only(b, token, token)
            found = alone.run(alone.work(config), programs(config, bench.device))
            wrong += not same_bits(found[0], together[int(step.starts[b]) + token])
            tried += 1
    return none_of("tokens whose bits differ", wrong, tried)


def _cuts(bench: Bench) -> Row:
    """A chunk computed in pieces, cut anywhere."""
    shape = HEADS["llama-8b"] if bench.full else TINY_HEADS
    step = _step(bench, "q700s5000" if bench.full else "q9s40", shape)
    if not bench.world.runs:
        return UNMEASURED
    config = _config(bench, shape)
    whole = step.run(step.work(config), programs(config, bench.device))
    count = step.queries[0].query_tokens
    wrong = tried = 0
    for cuts in ((count // 2,), (1, count // 3, count - 1)) if bench.full else ((1, 4),):
        edges = [0, *cuts, count]
        for first, stop in zip(edges, edges[1:], strict=False):
            piece = step.only(0, first, stop - 1)
            found = piece.run(piece.work(config), programs(config, bench.device))
            wrong += not same_bits(found, whole[first:stop])
            tried += 1
    return none_of("pieces whose bits differ", wrong, tried)


def _descriptors(bench: Bench) -> Row:
    """Pages of 64 hold whole tiles of keys, and may be read by TMA."""
    shape, page = (HEADS["llama-8b"], 64) if bench.full else (TINY_HEADS, 16)
    step = _step(bench, _MIXED if bench.full else _TINY_MIXED, shape, page=page)
    if not bench.world.runs:
        return UNMEASURED
    found = []
    for descriptors in (True, False):
        config = _config(bench, shape, page)
        config = config._replace(tile=config.tile._replace(descriptors=descriptors))
        found.append(step.run(step.work(config), programs(config, bench.device)))
    differ = found[0] != found[1]
    return none_of("elements that differ", int(differ.sum()), differ.numel())


def _who_computes(bench: Bench) -> Row:
    """Programs, memory for partial results, and the company of other sequences."""
    shape = HEADS["llama-8b"] if bench.full else TINY_HEADS
    step = _step(bench, _MIXED if bench.full else _TINY_MIXED, shape)
    if not bench.world.runs:
        return UNMEASURED
    config = _config(bench, shape)
    many = programs(config, bench.device)
    expected = step.run(step.work(config), many)
    wrong = tried = 0
    arrangements = ((1, many), (None, 1), (None, 3 * many + 1), (7, many))
    for most_partials, num_programs in arrangements if bench.full else arrangements[:1]:
        found = step.run(step.work(config, most_partials=most_partials), num_programs)
        wrong += not same_bits(found, expected)
        tried += 1
    for b, query in enumerate(step.queries if bench.full else step.queries[:1]):
        alone = step.only(b, 0, query.query_tokens - 1)
        start = int(step.starts[b])
        found = alone.run(alone.work(config), many)
        wrong += not same_bits(found, expected[start : start + query.query_tokens])
        tried += 1
    return none_of("arrangements whose bits differ", wrong, tried)


def _stress(bench: Bench) -> Row:
    """Many parts of few results, so that programs race to be the last; one work list throughout,
    whose counters must be zero again after every launch."""
    shape = HEADS["llama-8b"] if bench.full else TINY_HEADS
    step = _step(bench, "2q8s40k_3q1s20k_40q1s2100" if bench.full else "q2s70_q1s40", shape)
    if not bench.world.runs:
        return UNMEASURED
    config = _config(bench, shape)
    work = step.work(config)
    many = programs(config, bench.device)
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
    split = int((work.items[kernel.PARTS.value, : int(work.num_items)] > 1).sum())
    if split == 0:
        return none_of("nothing was split", 1, 1)
    return none_of("launches with other bits, counters left", wrong, launches)
