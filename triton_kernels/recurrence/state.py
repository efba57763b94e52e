"""The recurrence of one head, and the gate and norm of its output."""

from __future__ import annotations

import triton.language as tl

from triton_kernels.build.jit import jit

_ENTRIES = tl.constexpr(16)  # of a tile
_VALUES = tl.constexpr(4)  # field of the memory: Triton's tuples have `values` of their own


@jit
def entries_of(
    mixed_ptr, memory, entry, at, position, first, row, slot, head, key_head, ring, values,
    HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEYS_AT: tl.constexpr,
    ROW: tl.constexpr, KEY_WIDTH: tl.constexpr, WIDTH: tl.constexpr, BLOCK_KEY: tl.constexpr,
):  # fmt: skip
    """Return keys [entries, BLOCK_KEY] and values of the tokens before place `at` of a block. Keys
    of this pass are not kept yet."""
    p, old, dims = position - at + entry, entry < at, tl.arange(0, BLOCK_KEY)
    inside = (dims < KEY_DIM)[None, :]
    kept = memory.keys + (slot * ring + p % ring) * KEY_WIDTH
    kept = kept[:, None] + (key_head * KEY_DIM + dims)[None, :]
    own = mixed_ptr + (row + p - position).to(tl.int64) * ROW + KEYS_AT
    own = own[:, None] + (key_head * KEY_DIM + dims)[None, :]
    keys = tl.load(kept, mask=(old & (p < first))[:, None] & inside, other=0.0)
    keys += tl.load(own, mask=(old & (p >= first))[:, None] & inside, other=0.0)
    at_values = memory[_VALUES] + ((slot * HEADS + head) * ring + p % ring) * WIDTH
    mask = old[:, None] & (values < VALUE_DIM)[None, :]
    return keys, tl.load(at_values[:, None] + values[None, :], mask=mask, other=0.0)


@jit
def add_earlier(
    u, out, key, query, total, decays, mixed_ptr, memory, at, position, first, row, slot, head,
    key_head, ring, values, DELTA: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, KEYS_AT: tl.constexpr, ROW: tl.constexpr,
    KEY_WIDTH: tl.constexpr, WIDTH: tl.constexpr, BLOCK_KEY: tl.constexpr,
):  # fmt: skip
    """Return the value and the output of the token at place `at` of a block, with what the tokens
    before it add."""
    for e in range(0, at, _ENTRIES):
        entry = e + tl.arange(0, _ENTRIES)
        keys, earlier = entries_of(
            mixed_ptr, memory, entry, at, position, first, row, slot, head, key_head, ring, values,
            HEADS, KEY_DIM, VALUE_DIM, KEYS_AT, ROW, KEY_WIDTH, WIDTH, BLOCK_KEY,
        )  # fmt: skip
        weight = tl.exp(tl.minimum(total - tl.gather(decays, entry, 0), 0.0))
        if DELTA:
            by_key = weight * tl.sum(keys * key[None, :], 1)
            u -= tl.sum(by_key[:, None] * earlier, 0)
        by_query = weight * tl.sum(keys * query[None, :], 1)
        out += tl.sum(by_query[:, None] * earlier, 0)
    return u, out


@jit
def store_state(
    state, total, decays, mixed_ptr, memory, table, of_page, inside, position, first, row, slot,
    head, key_head, ring, values, HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, KEYS_AT: tl.constexpr, ROW: tl.constexpr,
    KEY_WIDTH: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, BLOCK_KEY: tl.constexpr,
):  # fmt: skip
    """Return the state after a whole block, whose last token is at `position`. Keep it if the
    boundary has a page."""
    state *= tl.exp(total)
    for e in range(0, PAGE, _ENTRIES):
        entry = e + tl.arange(0, _ENTRIES)
        keys, earlier = entries_of(
            mixed_ptr, memory, entry, PAGE, position + 1, first, row + 1, slot, head, key_head,
            ring, values, HEADS, KEY_DIM, VALUE_DIM, KEYS_AT, ROW, KEY_WIDTH, WIDTH, BLOCK_KEY,
        )  # fmt: skip
        weight = tl.exp(tl.minimum(total - tl.gather(decays, entry, 0), 0.0))
        keys = tl.trans(keys * weight[:, None])
        state = tl.dot(keys, earlier, state, input_precision="ieee")
    page = tl.load(table + (position + 1) // PAGE).to(tl.int64)
    at_state = memory.states + page * (HEADS * KEY_DIM * WIDTH) + of_page
    tl.store(at_state, state, mask=inside & (page >= 0))
    return state


@jit
def memory_of(
    memory, table, of_page, inside, of_head, block, first, ring, HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Return the state at the start of a block, and the decays of its tokens before `first`."""
    page = tl.load(table + block, mask=block > 0, other=0).to(tl.int64)
    at_state = memory.states + page * (HEADS * KEY_DIM * WIDTH) + of_page
    state = tl.load(at_state, mask=inside & (block > 0), other=0.0)
    places = tl.arange(0, PAGE)
    at_decays = memory.decays + of_head * ring + block * PAGE % ring + places
    return state, tl.load(at_decays, mask=places < first % PAGE, other=0.0)


@jit
def step_of(rates, head, step_bias_ptr, min_step, max_step, HEADS: tl.constexpr,
            DELTA: tl.constexpr):  # fmt: skip
    """Return the step of a token, softplus of its rate, and the factor of its value."""
    rate = tl.load(rates + (HEADS if DELTA else 0)).to(tl.float32) + tl.load(step_bias_ptr + head)
    step = tl.where(rate > 20.0, rate, tl.log(1.0 + tl.exp(tl.minimum(rate, 20.0))))
    if DELTA:
        factor = 1.0 / (1.0 + tl.exp(-tl.load(rates).to(tl.float32)))
    else:
        step = tl.minimum(tl.maximum(step, min_step), max_step)
        factor = step
    return step, factor


@jit
def recur_kernel(
    rows_ptr, mixed_ptr, out_ptr, totals_ptr, decay_ptr, step_bias_ptr, skip_ptr, sequences, memory,
    stride, table_width, ring, min_step, max_step, DELTA: tl.constexpr, HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, ROW: tl.constexpr,
    KEYS_AT: tl.constexpr, QUERIES_AT: tl.constexpr, RATES_AT: tl.constexpr,
    KEY_WIDTH: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_KEY: tl.constexpr, BLOCK_VALUE: tl.constexpr,
):  # fmt: skip
    """Compute a sequence's rows of one head and `BLOCK_VALUE` values; keep entries and states."""
    head, sequence = tl.program_id(0), tl.program_id(2)
    values = tl.program_id(1) * BLOCK_VALUE + tl.arange(0, BLOCK_VALUE)
    start = tl.load(sequences.starts + sequence)
    count = tl.load(sequences.starts + sequence + 1) - start
    if count > 0:
        first = tl.load(sequences.contexts + sequence) - count
        slot = tl.load(sequences.slots + sequence).to(tl.int64)
        table, block = sequences.pages + sequence.to(tl.int64) * table_width, first // PAGE
        dims, places = tl.arange(0, BLOCK_KEY), tl.arange(0, PAGE)
        in_key, in_value = dims < KEY_DIM, values < VALUE_DIM
        inside = in_key[:, None] & in_value[None, :]
        of_page = (head * KEY_DIM + dims)[:, None] * WIDTH + values[None, :]
        of_head, key_head = slot * HEADS + head, head // GROUP % KEY_HEADS
        state, decays = memory_of(
            memory, table, of_page, inside, of_head, block, first, ring, HEADS, KEY_DIM, WIDTH, PAGE
        )
        total = tl.sum(tl.where(places == first % PAGE - 1, decays, 0.0), 0)
        for i in range(count):
            position, row = first + i, (start + i).to(tl.int64)
            at, rates = position % PAGE, rows_ptr + row * stride + RATES_AT + head
            step, factor = step_of(rates, head, step_bias_ptr, min_step, max_step, HEADS, DELTA)
            total = tl.where(at == 0, 0.0, total) + tl.load(decay_ptr + head) * step
            decays, since = tl.where(places == at, total, decays), tl.exp(total)
            mixed, at_head = mixed_ptr + row * ROW, key_head * KEY_DIM + dims
            key = tl.load(mixed + KEYS_AT + at_head, mask=in_key, other=0.0)
            query = tl.load(mixed + QUERIES_AT + at_head, mask=in_key, other=0.0)
            at_value = (2 * KEY_HEADS * KEY_DIM if DELTA else 0) + head * VALUE_DIM + values
            value = tl.load(mixed + at_value, mask=in_value, other=0.0)
            u, out = value, since * tl.sum(state * query[:, None], 0)
            if DELTA:
                u -= since * tl.sum(state * key[:, None], 0)
            u, out = add_earlier(
                u, out, key, query, total, decays, mixed_ptr, memory, at, position, first, row,
                slot, head, key_head, ring, values, DELTA, HEADS, KEY_DIM, VALUE_DIM, KEYS_AT, ROW,
                KEY_WIDTH, WIDTH, BLOCK_KEY,
            )  # fmt: skip
            u *= factor
            out += tl.sum(key * query, 0) * u
            if skip_ptr is not None:
                out += tl.load(skip_ptr + head) * value
            kept = memory[_VALUES] + (of_head * ring + position % ring) * WIDTH + values
            tl.store(kept, u, mask=in_value)
            tl.store(out_ptr + (row * HEADS + head) * VALUE_DIM + values, out, mask=in_value)
            tl.store(totals_ptr + row * HEADS + head, total)  # equal in all programs of a head
            tl.debug_barrier()  # later tokens read the values
            if at + 1 == PAGE:
                state = store_state(
                    state, total, decays, mixed_ptr, memory, table, of_page, inside, position,
                    first, row, slot, head, key_head, ring, values, HEADS, KEY_DIM, VALUE_DIM,
                    KEYS_AT, ROW, KEY_WIDTH, WIDTH, PAGE, BLOCK_KEY,
                )  # fmt: skip


@jit
def gate_kernel(
    rows_ptr, x_ptr, weight_ptr, out_ptr, stride, eps, DELTA: tl.constexpr, PARTS: tl.constexpr,
    WIDTH: tl.constexpr, GATES_AT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gate one part of a row by SiLU, and norm it: with the delta rule before the gate."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at, inside = tl.arange(0, BLOCK), tl.arange(0, BLOCK) < WIDTH
    x = tl.load(x_ptr + (row * PARTS + part) * WIDTH + at, mask=inside, other=0.0)
    gates = rows_ptr + row * stride + GATES_AT + part * WIDTH + at
    gate = tl.load(gates, mask=inside, other=0.0).to(tl.float32)
    gate = gate / (1.0 + tl.exp(-gate))
    if not DELTA:
        x *= gate
    if weight_ptr is not None:
        x *= 1.0 / tl.sqrt_rn(tl.sum(x * x, 0) / WIDTH + eps)
        x *= tl.load(weight_ptr + (0 if DELTA else part * WIDTH) + at, mask=inside, other=0.0)
    if DELTA:
        x *= gate
    to = out_ptr + (row * PARTS + part) * WIDTH + at
    tl.store(to, x.to(out_ptr.dtype.element_ty), mask=inside)
