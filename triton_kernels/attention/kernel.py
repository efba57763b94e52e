"""The attention kernel: work items of `planner`, a fixed number of programs, one launch."""

from __future__ import annotations

import triton
import triton.language as tl

# Fields of a work item; `items` is int32 [ITEM_FIELDS, capacity].
SEQUENCE = tl.constexpr(0)  # row of the block tables
ROW = tl.constexpr(1)  # flat row of its first token
TOKENS = tl.constexpr(2)
POSITION = tl.constexpr(3)  # absolute, of its first token
FIRST_SPLIT = tl.constexpr(4)
STOP_SPLIT = tl.constexpr(5)
SLOT = tl.constexpr(6)  # where its partial result goes
PART = tl.constexpr(7)  # 0 .. parts - 1; slots of the parts of one result follow one another
PARTS = tl.constexpr(8)  # 1: the result is written directly
ITEM_FIELDS = 9


@triton.jit
def _fold(peak, mass, acc, more_peak, more_mass, more_acc):
    """One softmax over the keys of both; adding one without visible keys changes no bit.

    The fused multiply-adds are spelled out: every place that folds must round alike.
    """
    both = tl.maximum(peak, more_peak)
    base = tl.where(both == float("-inf"), 0.0, both)
    old, new = tl.exp2(peak - base), tl.exp2(more_peak - base)
    mass = tl.fma(mass, old, more_mass * new)
    acc = tl.fma(acc, tl.broadcast_to(old[:, None], acc.shape), more_acc * new[:, None])
    return both, mass, acc


@triton.jit
def _attend_split(
    q,
    k_ptr,
    v_ptr,
    table_ptr,
    positions,
    first_key,
    start,
    stop,
    scale,
    stride_page,
    stride_slot,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):
    """Running maximum (log 2 units), sum and weighted V over the keys [start, stop)."""
    ROWS: tl.constexpr = q.shape[0]
    lanes, dims = tl.arange(0, KEYS), tl.arange(0, BLOCK_DIM)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
    # Page ids are fetched one tile ahead, so that loads of K and V depend on nothing in flight.
    if PAGE % KEYS == 0:
        page = tl.load(table_ptr + start // PAGE, mask=start < stop, other=0)
    else:
        keys = start + lanes
        page = tl.load(table_ptr + keys // PAGE, mask=(keys >= first_key) & (keys < stop), other=0)
    for tile in range(start, stop, KEYS):
        keys = tile + lanes
        here = page * stride_page
        if PAGE % KEYS == 0:
            page = tl.load(table_ptr + (tile + KEYS) // PAGE, mask=tile + KEYS < stop, other=0)
        else:
            page = tl.load(table_ptr + (keys + KEYS) // PAGE, mask=keys + KEYS < stop, other=0)
        at = (here + (keys % PAGE) * stride_slot)[:, None] + dims[None, :]
        held = ((keys >= first_key) & (keys < stop))[:, None]
        if BLOCK_DIM != HEAD_DIM:
            held = held & (dims < HEAD_DIM)[None, :]
        # Memory outside is never read: it may hold anything, and 0 times NaN is NaN.
        k = tl.load(k_ptr + at, mask=held, other=0.0).to(q.dtype)
        v = tl.load(v_ptr + at, mask=held, other=0.0).to(q.dtype)
        x = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if SOFT_CAP is not None:
            x = _capped(x, SOFT_CAP)
        visible = keys[None, :] <= positions[:, None]
        if WINDOW is not None:
            visible = visible & (keys[None, :] > positions[:, None] - WINDOW)
        x = tl.where(visible, x, float("-inf"))
        top = tl.maximum(peak, tl.max(x, 1))
        base = tl.where(top == float("-inf"), 0.0, top)
        p = tl.exp2(x - base[:, None])
        old = tl.exp2(peak - base)
        mass = tl.fma(mass, old, tl.sum(p, 1))
        acc = tl.dot(p.to(q.dtype), v, acc * old[:, None], input_precision="ieee")
        peak = top
    return peak, mass, acc


@triton.jit
def _capped(x, SOFT_CAP: tl.constexpr):
    """cap * tanh(x / cap) of scores in log 2 units."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    doubled = x * (2.0 / SOFT_CAP)  # 2 x log2(e) / cap: exp2 of it is exp(2 x / cap)
    return (SOFT_CAP * LOG2_E) * (1.0 - 2.0 / (1.0 + tl.exp2(doubled)))


@triton.jit
def _load_partial(
    stats_ptr,
    sums_ptr,
    place,
    rows,
    held,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    ROWS: tl.constexpr,
):
    """From beyond the first-level cache, which other processors' stores do not reach."""
    dims = tl.arange(0, BLOCK_DIM)
    stats_at = stats_ptr + place * (2 * ROWS) + rows
    sums_at = sums_ptr + place * (ROWS * HEAD_DIM) + rows[:, None] * HEAD_DIM + dims[None, :]
    inside = held[:, None] & (dims < HEAD_DIM)[None, :]
    peak = tl.load(stats_at, mask=held, other=float("-inf"), cache_modifier=".cg")
    mass = tl.load(stats_at + ROWS, mask=held, other=0.0, cache_modifier=".cg")
    acc = tl.load(sums_at, mask=inside, other=0.0, cache_modifier=".cg")
    return peak, mass, acc


@triton.jit
def _combine(
    stats_ptr,
    sums_ptr,
    first,
    parts,
    step,
    out_ptr,
    stride_token,
    tokens,
    v_scale,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    ROWS: tl.constexpr,
):
    STRIP: tl.constexpr = 16
    for start in range(0, tokens * GROUP, STRIP):
        rows = start + tl.arange(0, STRIP)
        held = rows < tokens * GROUP
        peak, mass, acc = _load_partial(
            stats_ptr, sums_ptr, first, rows, held, HEAD_DIM, BLOCK_DIM, ROWS
        )
        for i in range(1, parts):
            next_peak, next_mass, next_acc = _load_partial(
                stats_ptr, sums_ptr, first + i * step, rows, held, HEAD_DIM, BLOCK_DIM, ROWS
            )
            peak, mass, acc = _fold(peak, mass, acc, next_peak, next_mass, next_acc)
        _store_result(out_ptr, stride_token, rows, tokens, mass, acc, v_scale, GROUP, HEAD_DIM)


@triton.jit
def _store_partial(
    stats_ptr,
    sums_ptr,
    place,
    tokens,
    peak,
    mass,
    acc,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    ROWS: tl.constexpr = acc.shape[0]
    rows, dims = tl.arange(0, ROWS), tl.arange(0, acc.shape[1])
    held = rows // GROUP < tokens
    stats_at = stats_ptr + place * (2 * ROWS) + rows
    sums_at = sums_ptr + place * (ROWS * HEAD_DIM) + rows[:, None] * HEAD_DIM + dims[None, :]
    tl.store(stats_at, peak, mask=held)
    tl.store(stats_at + ROWS, mass, mask=held)
    tl.store(sums_at, acc, mask=held[:, None] & (dims < HEAD_DIM)[None, :])


@triton.jit
def _store_result(
    out_ptr,
    stride_token,
    rows,
    tokens,
    mass,
    acc,
    v_scale,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """`out_ptr` is that of the first token and the first head of the group."""
    dims = tl.arange(0, acc.shape[1])
    at = (rows // GROUP) * stride_token + (rows % GROUP) * HEAD_DIM
    inside = (rows // GROUP < tokens)[:, None] & (dims < HEAD_DIM)[None, :]
    result = acc / tl.where(mass == 0.0, 1.0, mass)[:, None] * v_scale  # rows of no token have none
    tl.store(
        out_ptr + at[:, None] + dims[None, :], result.to(out_ptr.dtype.element_ty), mask=inside
    )


@triton.jit
def attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    tables_ptr,
    out_ptr,
    items_ptr,
    num_items_ptr,
    sums_ptr,
    stats_ptr,
    arrived_ptr,
    scale,
    v_scale,
    item_capacity,
    stride_q_token,
    stride_q_head,
    stride_page,
    stride_slot,
    stride_kv_head,
    stride_table,
    stride_out_token,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):
    """A row of a tile is (token, head of the group): K and V are read once for all of them."""
    row_ids, dims = tl.arange(0, ROWS), tl.arange(0, BLOCK_DIM)
    tokens_of, heads_of = row_ids // GROUP, row_ids % GROUP
    num_work = tl.load(num_items_ptr) * KV_HEADS
    for work in tl.range(tl.program_id(0), num_work, tl.num_programs(0), disable_licm=True):
        item_ptr = items_ptr + work // KV_HEADS
        kv_head = tl.cast(work % KV_HEADS, tl.int64)
        sequence = tl.load(item_ptr + SEQUENCE * item_capacity)
        row = tl.load(item_ptr + ROW * item_capacity)
        tokens = tl.load(item_ptr + TOKENS * item_capacity)
        position = tl.load(item_ptr + POSITION * item_capacity)
        first_split = tl.load(item_ptr + FIRST_SPLIT * item_capacity)
        stop_split = tl.load(item_ptr + STOP_SPLIT * item_capacity)
        slot = tl.load(item_ptr + SLOT * item_capacity)
        part = tl.load(item_ptr + PART * item_capacity)
        parts = tl.load(item_ptr + PARTS * item_capacity)

        inside = (tokens_of < tokens)[:, None] & (dims < HEAD_DIM)[None, :]
        q_at = tokens_of * stride_q_token + heads_of * HEAD_DIM
        q_base = q_ptr + row.to(tl.int64) * stride_q_token + kv_head * stride_q_head
        q = tl.load(q_base + q_at[:, None] + dims[None, :], mask=inside, other=0.0)

        end = position + tokens
        first_key = 0
        if WINDOW is not None:
            first_key = tl.maximum(position - WINDOW + 1, 0)
        peak = tl.full([ROWS], float("-inf"), tl.float32)
        mass = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
        for split in tl.range(first_split, stop_split, disable_licm=True):
            more_peak, more_mass, more_acc = _attend_split(
                q,
                k_ptr + kv_head * stride_kv_head,
                v_ptr + kv_head * stride_kv_head,
                tables_ptr + sequence.to(tl.int64) * stride_table,
                position + tokens_of,
                first_key,
                tl.maximum(split * SPLIT, first_key // KEYS * KEYS),
                tl.minimum((split + 1) * SPLIT, end),
                scale,
                stride_page,
                stride_slot,
                HEAD_DIM,
                BLOCK_DIM,
                PAGE,
                KEYS,
                WINDOW,
                SOFT_CAP,
            )
            peak, mass, acc = _fold(peak, mass, acc, more_peak, more_mass, more_acc)

        to_ptr = out_ptr + row.to(tl.int64) * stride_out_token + kv_head * (GROUP * HEAD_DIM)
        if parts > 1:
            place = slot.to(tl.int64) * KV_HEADS + kv_head
            _store_partial(stats_ptr, sums_ptr, place, tokens, peak, mass, acc, GROUP, HEAD_DIM)
            # All threads have stored before one of them says so; whoever comes last sees it all.
            tl.debug_barrier()
            first = place - part.to(tl.int64) * KV_HEADS
            complete = tl.atomic_add(arrived_ptr + first, 1, sem="acq_rel") == parts - 1
            if complete:
                tl.store(arrived_ptr + first, 0)  # for the next layer
                _combine(
                    stats_ptr,
                    sums_ptr,
                    first,
                    parts,
                    KV_HEADS,
                    to_ptr,
                    stride_out_token,
                    tokens,
                    v_scale,
                    GROUP,
                    HEAD_DIM,
                    BLOCK_DIM,
                    ROWS,
                )
        else:
            _store_result(
                to_ptr, stride_out_token, row_ids, tokens, mass, acc, v_scale, GROUP, HEAD_DIM
            )
