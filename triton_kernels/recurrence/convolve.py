"""The short convolution of a recurrent layer, and the entries that later passes need."""

from __future__ import annotations

import triton.language as tl

from triton_kernels.build.jit import jit

_KEY_EPS = tl.constexpr(1e-6)  # of the L2 norm of queries and keys
_NEVER = tl.constexpr(2**31 - 1)


@jit
def owner_of(row, sequences, count, BLOCK: tl.constexpr):
    """Return the sequence of a row; `count` for padding."""
    at = tl.arange(0, BLOCK)
    ends = tl.load(sequences.starts + 1 + at, mask=at < count, other=_NEVER)
    return tl.sum((ends <= row).to(tl.int32), 0)


@jit
def input_at(rows_ptr, row, channel, mask, stride, INNER: tl.constexpr, INPUTS: tl.constexpr,
             GATES: tl.constexpr):  # fmt: skip
    """Return the convolution's inputs of a row: with `GATES` the product of gates and inputs."""
    at = rows_ptr + row * stride + INPUTS + channel
    x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    if GATES:
        x *= tl.load(at + 2 * INNER, mask=mask, other=0.0).to(tl.float32)
    return x


@jit
def convolve_kernel(
    rows_ptr, out_ptr, weight_ptr, bias_ptr, sequences, memory, count, stride, table_width, ring,
    RULE: tl.constexpr, INNER: tl.constexpr, KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    WIDTH: tl.constexpr, KERNEL: tl.constexpr, INPUTS: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_SEQUENCES: tl.constexpr,
):  # fmt: skip
    """Convolve a row's channels: a head of queries or keys, which the delta rule norms, or `BLOCK`
    values. Keep the last inputs of a whole block."""
    row, part = tl.program_id(0), tl.program_id(1)
    owner = owner_of(row, sequences, count, BLOCK_SEQUENCES)
    if owner < count:
        scan: tl.constexpr = RULE == "scan"
        gates: tl.constexpr = RULE == "convolution"
        is_key, at = part < 2 * KEY_HEADS, tl.arange(0, BLOCK)
        values = (part - 2 * KEY_HEADS) * BLOCK
        begin = tl.where(
            is_key, (INNER if scan else 0) + part * KEY_DIM,
            (0 if scan else 2 * KEY_HEADS * KEY_DIM) + values,
        )  # fmt: skip
        channel, inside = begin + at, at < tl.where(is_key, KEY_DIM, INNER - values)
        start, context = tl.load(sequences.starts + owner), tl.load(sequences.contexts + owner)
        first = context - (tl.load(sequences.starts + owner + 1) - start)
        slot = tl.load(sequences.slots + owner).to(tl.int64)
        table = sequences.pages + owner.to(tl.int64) * table_width
        position, block = first + row - start, first // PAGE
        page = tl.load(table + block, mask=block > 0, other=0).to(tl.int64)
        tails = memory.tails + (page + 1) * ((KERNEL - 1) * WIDTH) + channel
        ends = (position + 1) % PAGE == 0
        next_page = tl.load(table + (position + 1) // PAGE, mask=ends, other=-1).to(tl.int64)
        tail = memory.tails + next_page * ((KERNEL - 1) * WIDTH) + channel
        total = tl.zeros([BLOCK], tl.float32)
        if bias_ptr is not None:
            total = tl.load(bias_ptr + channel, mask=inside, other=0.0)
        for i in tl.static_range(KERNEL):
            p = position + (i - KERNEL + 1)
            known, before = p >= block * PAGE, p - block * PAGE
            x = input_at(
                rows_ptr, (row + p - position).to(tl.int64), channel, inside & (p >= first),
                stride, INNER, INPUTS, gates,
            )  # fmt: skip
            ring_at = memory.inputs + (slot * ring + p % ring) * WIDTH + channel
            x += tl.load(ring_at, mask=inside & known & (p < first), other=0.0)
            x += tl.load(tails + before * WIDTH, mask=inside & (p >= 0) & (known == 0), other=0.0)
            total += tl.load(weight_ptr + i * WIDTH + channel, mask=inside, other=0.0) * x
            if i > 0:
                tl.store(tail + (i - 1) * WIDTH, x, mask=inside & (next_page >= 0))
        if gates:
            gate_at = rows_ptr + row.to(tl.int64) * stride + INNER + channel
            total *= tl.load(gate_at, mask=inside, other=0.0).to(tl.float32)
        else:
            total = tl.where(inside, total / (1.0 + tl.exp(-total)), 0.0)
        if RULE == "delta":
            by = 1.0 / tl.sqrt_rn(tl.sum(total * total, 0) + _KEY_EPS)
            by *= tl.where(part < KEY_HEADS, KEY_DIM**-0.5, 1.0)
            total *= tl.where(is_key, by, 1.0)
        to = out_ptr + row.to(tl.int64) * (2 * KEY_HEADS * KEY_DIM + INNER) + channel
        tl.store(to, total.to(out_ptr.dtype.element_ty), mask=inside)


@jit
def keep_kernel(
    rows_ptr, mixed_ptr, totals_ptr, sequences, memory, count, stride, ring, INNER: tl.constexpr,
    HEADS: tl.constexpr, KEYS: tl.constexpr, KEYS_AT: tl.constexpr, KEY_WIDTH: tl.constexpr,
    WIDTH: tl.constexpr, INPUTS: tl.constexpr, GATES: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_SEQUENCES: tl.constexpr,
):  # fmt: skip
    """Keep a row's inputs, keys and decays in its slot's ring, if a later row does not take their
    place. Values are there already."""
    row, part = tl.program_id(0), tl.program_id(1)
    owner = owner_of(row, sequences, count, BLOCK_SEQUENCES)
    if owner < count:
        later = tl.load(sequences.starts + owner + 1) - row
        position = tl.load(sequences.contexts + owner) - later
        slot, wide_row = tl.load(sequences.slots + owner).to(tl.int64), row.to(tl.int64)
        place, kept = slot * ring + position % ring, later <= ring
        at = part * BLOCK + tl.arange(0, BLOCK)
        inside = kept & (at < 2 * KEYS + INNER)
        x = input_at(rows_ptr, wide_row, at, inside, stride, INNER, INPUTS, GATES)
        tl.store(memory.inputs + place * WIDTH + at, x, mask=inside)
        if KEYS > 0:
            inside = kept & (at < KEYS)
            key = tl.load(mixed_ptr + wide_row * (2 * KEYS + INNER) + KEYS_AT + at, mask=inside)
            tl.store(memory.keys + place * KEY_WIDTH + at, key, mask=inside)
            head = tl.arange(0, BLOCK_HEADS)
            inside = kept & (head < HEADS) & (part == 0)
            total = tl.load(totals_ptr + wide_row * HEADS + head, mask=inside)
            to = memory.decays + (slot * HEADS + head) * ring + position % ring
            tl.store(to, total, mask=inside)
