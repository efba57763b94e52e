"""The kernels around attention, compiled, against their references; and the noise, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from bench.gpu.cells import Cell, Row
from bench.gpu.limits import HEADS, TINY_HEADS
from bench.gpu.verdict import check, none_of, relative_error, within
from bench.gpu.world import Bench
from triton_kernels.layers.activation import silu_mul, silu_mul_reference
from triton_kernels.layers.kv_write import kv_write, kv_write_reference
from triton_kernels.layers.norm import rms_norm, rms_norm_reference
from triton_kernels.noise import device as noise_device
from triton_kernels.noise import host as noise

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_PADDING_EVERY = 7


def cells(bench: Bench) -> Iterator[Cell]:
    for dtype in _DTYPES if bench.full else (torch.bfloat16,):
        name = str(dtype).removeprefix("torch.")
        for kernel, run in (("rms_norm", _norm), ("silu_mul", _activation), ("kv_write", _write)):
            yield check(bench, kernel, name, run, dtype)
    fp8 = torch.bfloat16, torch.float8_e4m3fn
    yield check(bench, "kv_write", "bfloat16 to fp8, norms", _write, *fp8)
    yield check(bench, "noise", "words and exponentials", _noise)


def _random(bench: Bench, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator(bench.device).manual_seed(seed)
    return torch.randn(shape, device=bench.device, generator=generator).to(dtype)


def _norm(bench: Bench, dtype: torch.dtype) -> Row:
    """Alone and with an addition, at every width that is shipped, rows lying apart."""
    worst = 0.0
    for width in (1024, 2048, 4096, 5120, 8192) if bench.full else (48,):
        x = _random(bench, 300, width + 16, dtype=dtype)[:, :width]
        weight = _random(bench, width, seed=1)
        for residual in (None, _random(bench, 300, width, seed=2)):
            kept = None if residual is None else residual.clone()
            found = rms_norm(x, weight, 1e-6, kept)
            wanted = rms_norm_reference(x, weight, 1e-6, residual)
            worst = max(worst, relative_error(found, wanted))
            if residual is not None and kept is not None:
                worst = max(worst, relative_error(kept, residual))
    return within("relative error", worst, torch.finfo(dtype).eps)


def _activation(bench: Bench, dtype: torch.dtype) -> Row:
    worst = 0.0
    for width in (3072, 8192, 14336) if bench.full else (40,):
        gate_up = _random(bench, 300, 2 * width, dtype=dtype)
        worst = max(worst, relative_error(silu_mul(gate_up), silu_mul_reference(gate_up)))
    return within("relative error", worst, torch.finfo(dtype).eps)


def _write(bench: Bench, dtype: torch.dtype, kv_dtype: torch.dtype | None = None) -> Row:
    """Scattered slots, padding among the rows, norms with fp8; what is not written stays poison."""
    shape = HEADS["qwen2-7b"] if bench.full else TINY_HEADS
    count, page, context = (500, 16, 4096) if bench.full else (9, 16, 64)
    pages = -(-2 * count // page)
    fused = _random(bench, count, shape.kv_heads, shape.group + 2, shape.head_dim, dtype=dtype)
    generator = torch.Generator(bench.device).manual_seed(3)
    slots = torch.randperm(pages * page, device=bench.device, generator=generator)[:count].int()
    slots[::_PADDING_EVERY] = -1
    positions = torch.randint(context, (count,), device=bench.device, generator=generator).int()
    angles = _random(bench, context, shape.head_dim // 2)
    turns = torch.stack((angles.cos(), angles.sin()), dim=-1)
    sizes = pages, page, shape.kv_heads, 2, shape.head_dim
    pool = torch.full(sizes, torch.nan, device=bench.device).to(kv_dtype or dtype)
    weight = _random(bench, shape.group + 1, shape.head_dim, seed=4) if kv_dtype else None
    written = []
    for write in (kv_write, kv_write_reference):
        rows, stored = fused.clone(), pool.clone()
        halves = stored[:, :, :, 0], stored[:, :, :, 1]
        write(rows, positions, slots, turns, *halves, qk_weight=weight)
        written.append((rows, stored.float()))
    (rows, stored), (wanted_rows, wanted) = written
    if not torch.equal(stored.isnan(), wanted.isnan()):
        return none_of("slots that were or were not written", 1, 1)
    error = relative_error(stored.nan_to_num(), wanted.nan_to_num())
    # Of fp8 a last bit of fp32 may decide between two neighbours.
    allowed = torch.finfo(kv_dtype).eps / 4 if kv_dtype else torch.finfo(dtype).eps
    return within("relative error", max(error, relative_error(rows, wanted_rows)), allowed)


@triton.jit
def _noise_kernel(keys_ptr, positions_ptr, words_ptr, values_ptr, purpose, BLOCK: tl.constexpr):
    rows = tl.program_id(0) + tl.arange(0, 1)
    first = tl.program_id(1) * BLOCK
    seeds = noise_device.load_seeds(keys_ptr, rows)
    positions = tl.load(positions_ptr + rows)
    zeros = positions * 0
    words = noise_device.tile_words(seeds, first, positions, zeros, zeros + purpose, BLOCK)
    at = rows[:, None] * (tl.num_programs(1) * BLOCK) + first + tl.arange(0, BLOCK)[None, :]
    tl.store(words_ptr + at, words.to(tl.int64))
    tl.store(values_ptr + at, noise_device.exponential(words))


def _noise(bench: Bench) -> Row:
    """As `triton_kernels.noise.host` gives it, which has the golden vectors of the
    specification."""
    rows, tiles, block = (64, 37, 4096) if bench.full else (2, 2, 64)
    generator = torch.Generator(bench.device).manual_seed(5)
    keys = torch.randint(2**32, (rows, 2), device=bench.device, generator=generator)
    positions = torch.randint(10**6, (rows,), device=bench.device, generator=generator)
    words = torch.empty(rows, tiles * block, dtype=torch.int64, device=bench.device)
    values = torch.empty(rows, tiles * block, device=bench.device)
    given = keys, positions, words, values, noise.COUPLED
    _noise_kernel[(rows, tiles)](*given, BLOCK=block, num_warps=8, enable_fp_fusion=False)
    zeros = torch.zeros_like(positions)
    wanted = noise.token_words(keys, positions, zeros, zeros + noise.COUPLED, words.shape[1])
    wrong = (words != wanted) | (values != noise.exponential(wanted))
    return none_of("words or exponentials whose bits differ", int(wrong.sum()), wrong.numel())
