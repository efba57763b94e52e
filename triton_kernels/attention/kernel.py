"""The attention kernel: a fixed number of programs over the items of a `WorkList`."""

from __future__ import annotations

import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from triton_kernels.build.jit import jit

# Fields of a work item; `items` is int32 [capacity, ITEM_FIELDS].
SEQUENCE = tl.constexpr(0)  # row of the block tables
ROW = tl.constexpr(1)  # flat row of the item's first token
TOKENS = tl.constexpr(2)
POSITION = tl.constexpr(3)  # absolute position of the first token
FIRST_SPLIT = tl.constexpr(4)
STOP_SPLIT = tl.constexpr(5)
SLOT = tl.constexpr(6)  # index of the item's partial result
PART = tl.constexpr(7)  # 0 .. parts - 1; the parts of one result have successive slots
PARTS = tl.constexpr(8)  # 1: the result is written directly
ITEM_FIELDS = tl.constexpr(9)


@jit
def _fold(peak, mass, acc, more_peak, more_mass, more_acc):
    """Merge the online softmax of two sets of keys. Merging a set without visible keys changes no
    bit.

    The fused multiply-adds are explicit, so that every call rounds in the same way.
    """
    both = tl.maximum(peak, more_peak)
    base = tl.where(both == float("-inf"), 0.0, both)
    old, new = tl.exp2(peak - base), tl.exp2(more_peak - base)
    mass = tl.fma(mass, old, more_mass * new)
    acc = tl.fma(acc, tl.broadcast_to(old[:, None], acc.shape), more_acc * new[:, None])
    return both, mass, acc


@jit
def _attend_keys(
    q, pool, table_ptr, position, first_key, start, stop, scale, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr, FIRST: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """Return the softmax over keys [start, stop): maximum (log 2 units), sum, weighted V."""
    ROWS: tl.constexpr = q.shape[0]
    positions = position + tl.arange(0, ROWS) // GROUP
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, q.shape[1]], tl.float32)
    # Page ids are fetched one tile ahead, so that loads of K and V do not wait for them.
    page = _page_ids(table_ptr, start, first_key, stop, PAGE, KEYS)
    masked = start
    # In prefill most key tiles are visible to all queries, and need no mask.
    if ROWS >= 128 and WINDOW is None and FIRST == 0:
        masked = tl.minimum(tl.maximum((position + 1) // KEYS * KEYS, start), stop)
        for tile in range(start, masked, KEYS):
            peak, mass, acc, page = _attend_tile(
                q, pool, table_ptr, positions, first_key, tile, stop, scale, peak, mass, acc, page,
                HEAD_DIM, PAGE, KEYS, FIRST, WINDOW, SOFT_CAP, DESCRIPTORS, False,
            )  # fmt: skip
    for tile in range(masked, stop, KEYS):
        peak, mass, acc, page = _attend_tile(
            q, pool, table_ptr, positions, first_key, tile, stop, scale, peak, mass, acc, page,
            HEAD_DIM, PAGE, KEYS, FIRST, WINDOW, SOFT_CAP, DESCRIPTORS, True,
        )  # fmt: skip
    return peak, mass, acc


@jit
def _attend_tile(
    q, pool, table_ptr, positions, first_key, tile, stop, scale, peak, mass, acc, page,
    HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr, FIRST: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, DESCRIPTORS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the KEYS keys of `page` to the softmax; return it and the page ids of the next tile.
    Without MASKED every row sees all keys."""
    keys = tile + tl.arange(0, KEYS)
    following = _page_ids(table_ptr, tile + KEYS, first_key, stop, PAGE, KEYS)
    if DESCRIPTORS:
        k, v = _load_whole(pool, page, tile % PAGE, KEYS, q.shape[1])
    else:
        valid = (keys >= first_key) & (keys < stop)
        k, v = _load_valid(pool, page, keys % PAGE, valid, HEAD_DIM, q.shape[1])
    x = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
    if SOFT_CAP is not None:
        x, scale = _capped(x * scale, SOFT_CAP), 1.0
    if MASKED:
        visible = keys[None, :] <= positions[:, None]
        if FIRST > 0:
            visible = visible & (keys[None, :] >= FIRST)
        if WINDOW is not None:
            visible = visible & (keys[None, :] > positions[:, None] - WINDOW)
        x = tl.where(visible, x, float("-inf"))
    top = tl.maximum(peak, tl.max(x, 1) * scale)
    base = tl.where(top == float("-inf"), 0.0, top) if MASKED else top
    p = tl.exp2(x * scale - base[:, None])
    old = tl.exp2(peak - base)
    mass = tl.fma(mass, old, tl.sum(p, 1))
    acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc * old[:, None], input_precision="ieee")
    return top, mass, acc, following


@jit
def _page_ids(table_ptr, tile, first_key, stop, PAGE: tl.constexpr, KEYS: tl.constexpr):
    """Load the page id of a tile of keys, or of each key if a tile spans several pages."""
    if PAGE % KEYS == 0:
        page = tl.load(table_ptr + tile // PAGE, mask=tile < stop, other=0)
    else:
        keys = tile + tl.arange(0, KEYS)
        page = tl.load(table_ptr + keys // PAGE, mask=(keys >= first_key) & (keys < stop), other=0)
    return page


@jit
def _load_valid(pool, page, offset, valid, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """Load K and V through pointers. Keys with `valid` false are not read: their memory may have
    NaN, which a weight of 0 does not remove."""
    k_ptr, v_ptr, kv_head, stride_page, stride_slot, stride_kv_head = pool
    dims = tl.arange(0, BLOCK_DIM)
    at = (page * stride_page + offset * stride_slot)[:, None] + dims[None, :]
    inside = valid[:, None]
    if BLOCK_DIM != HEAD_DIM:
        inside = inside & (dims < HEAD_DIM)[None, :]
    head = kv_head.to(tl.int64) * stride_kv_head
    k = tl.load(k_ptr + head + at, mask=inside, other=0.0)
    v = tl.load(v_ptr + head + at, mask=inside, other=0.0)
    return k, v


@jit
def _load_whole(pool, page, offset, KEYS: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """Load K and V by TMA, including unused slots of the page, which must be finite."""
    k = pool[0].load([page, pool[2], offset, 0]).reshape(KEYS, BLOCK_DIM)
    v = pool[1].load([page, pool[2], offset, 0]).reshape(KEYS, BLOCK_DIM)
    return k, v


@jit
def _capped(x, SOFT_CAP: tl.constexpr):
    """Return cap * tanh(x / cap) in log 2 units."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    doubled = x * (2.0 / SOFT_CAP)  # 2 x log2(e) / cap: exp2 of it is exp(2 x / cap)
    return (SOFT_CAP * LOG2_E) * (1.0 - 2.0 / (1.0 + tl.exp2(doubled)))


@jit
def _load_partial(
    stats_ptr, sums_ptr, place, rows, valid, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Load a partial result, not from the L1 cache: it misses other processors' stores."""
    dims = tl.arange(0, BLOCK_DIM)
    stats_at = stats_ptr + place * (2 * ROWS) + rows
    sums_at = sums_ptr + place * (ROWS * HEAD_DIM) + rows[:, None] * HEAD_DIM + dims[None, :]
    inside = valid[:, None] & (dims < HEAD_DIM)[None, :]
    peak = tl.load(stats_at, mask=valid, other=float("-inf"), cache_modifier=".cg")
    mass = tl.load(stats_at + ROWS, mask=valid, other=0.0, cache_modifier=".cg")
    acc = tl.load(sums_at, mask=inside, other=0.0, cache_modifier=".cg")
    return peak, mass, acc


@jit
def _combine(
    parts, out_ptr, sinks_ptr, stride_token, tokens, v_scale, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Fold the parts of a result in order and store it. `parts`: statistics, sums, index of the
    first part, number of parts, index step between parts."""
    stats_ptr, sums_ptr, first, count, step = parts
    STRIP: tl.constexpr = 16
    for start in range(0, tokens * GROUP, STRIP):
        rows = start + tl.arange(0, STRIP)
        valid = rows < tokens * GROUP
        peak, mass, acc = _load_partial(
            stats_ptr, sums_ptr, first, rows, valid, HEAD_DIM, BLOCK_DIM, ROWS
        )
        for i in tl.range(1, count, num_stages=4):  # stages: several loads in flight
            next_peak, next_mass, next_acc = _load_partial(
                stats_ptr, sums_ptr, first + i * step, rows, valid, HEAD_DIM, BLOCK_DIM, ROWS
            )
            peak, mass, acc = _fold(peak, mass, acc, next_peak, next_mass, next_acc)
        _store_result(
            out_ptr, sinks_ptr, stride_token, rows, tokens, (peak, mass, acc), v_scale, GROUP,
            HEAD_DIM,
        )  # fmt: skip


@jit
def _store_partial(
    stats_ptr, sums_ptr, place, tokens, peak, mass, acc, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr
):
    ROWS: tl.constexpr = acc.shape[0]
    rows, dims = tl.arange(0, ROWS), tl.arange(0, acc.shape[1])
    valid = rows // GROUP < tokens
    stats_at = stats_ptr + place * (2 * ROWS) + rows
    sums_at = sums_ptr + place * (ROWS * HEAD_DIM) + rows[:, None] * HEAD_DIM + dims[None, :]
    tl.store(stats_at, peak, mask=valid)
    tl.store(stats_at + ROWS, mass, mask=valid)
    tl.store(sums_at, acc, mask=valid[:, None] & (dims < HEAD_DIM)[None, :])


@jit
def _store_result(
    out_ptr, sinks_ptr, stride_token, rows, tokens, sums, v_scale, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Normalise and store a result. `out_ptr`: first token, first head of the group; `sinks_ptr`:
    its first sink. `sums`: maximum, sum, weighted V."""
    peak, mass, acc = sums
    if sinks_ptr is not None:
        LOG2_E: tl.constexpr = 1.4426950408889634
        sink = tl.load(sinks_ptr + rows % GROUP) * LOG2_E
        top = tl.maximum(peak, sink)
        old = tl.exp2(peak - top)
        mass = tl.fma(mass, old, tl.exp2(sink - top))
        acc = acc * old[:, None]
    dims = tl.arange(0, acc.shape[1])
    at = (rows // GROUP) * stride_token + (rows % GROUP) * HEAD_DIM
    inside = (rows // GROUP < tokens)[:, None] & (dims < HEAD_DIM)[None, :]
    result = acc / tl.where(mass == 0.0, 1.0, mass)[:, None] * v_scale  # padding rows have mass 0
    tl.store(
        out_ptr + at[:, None] + dims[None, :], result.to(out_ptr.dtype.element_ty), mask=inside
    )


@jit
def _load_item(item_ptr):
    return (
        tl.load(item_ptr + SEQUENCE),
        tl.load(item_ptr + ROW),
        tl.load(item_ptr + TOKENS),
        tl.load(item_ptr + POSITION),
        tl.load(item_ptr + FIRST_SPLIT),
        tl.load(item_ptr + STOP_SPLIT),
        tl.load(item_ptr + SLOT),
        tl.load(item_ptr + PART),
        tl.load(item_ptr + PARTS),
    )


@jit
def _attend(
    q, pool, table_ptr, position, tokens, first_split, stop_split, scale, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr,
    FOLDS: tl.constexpr, FIRST: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """Return maximum, sum and weighted V of the softmax over an item's splits. With FOLDS each
    split is computed on its own, and the splits are folded in order."""
    ROWS: tl.constexpr = q.shape[0]
    end = position + tokens
    first_key = FIRST
    if WINDOW is not None:
        first_key = tl.maximum(position - WINDOW + 1, FIRST)
    start = tl.maximum(first_split * SPLIT, first_key // KEYS * KEYS)
    # `end` is changed here because of a fault of Triton before 3.9. If a value that a loop carries
    # is only used as the bound of an inner loop, it keeps the value from before the first
    # iteration.
    end = tl.minimum(stop_split * SPLIT, end)
    if FOLDS:
        peak = tl.full([ROWS], float("-inf"), tl.float32)
        mass = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, q.shape[1]], tl.float32)
        for split in tl.range(first_split, stop_split, disable_licm=True):
            more_peak, more_mass, more_acc = _attend_keys(
                q, pool, table_ptr, position, first_key, tl.maximum(split * SPLIT, start),
                tl.minimum((split + 1) * SPLIT, end), scale, GROUP, HEAD_DIM, PAGE, KEYS, FIRST,
                WINDOW, SOFT_CAP, DESCRIPTORS,
            )  # fmt: skip
            peak, mass, acc = _fold(peak, mass, acc, more_peak, more_mass, more_acc)
    else:
        peak, mass, acc = _attend_keys(
            q, pool, table_ptr, position, first_key, start, end, scale, GROUP, HEAD_DIM, PAGE, KEYS,
            FIRST, WINDOW, SOFT_CAP, DESCRIPTORS,
        )  # fmt: skip
    return peak, mass, acc


@jit
def attention_kernel(
    q_ptr, k_pages, v_pages, tables_ptr, sinks_ptr, out_ptr, items_ptr, num_items_ptr, sums_ptr,
    stats_ptr, arrived_ptr, scale, v_scale, stride_q_token, stride_q_head, stride_page, stride_slot,
    stride_kv_head, stride_table, stride_out_token, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, SPLIT: tl.constexpr, FOLDS: tl.constexpr, FIRST: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, DESCRIPTORS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute the work items of a step. A tile's rows are (token, head of the group) pairs, so K
    and V are read once for all heads of a group.

    k_pages and v_pages are pointers to pools or, with DESCRIPTORS, descriptors of [pages, kv_heads,
    page_tokens, head_dim], for which the strides are not used. With EARLY, work items and block
    tables are read before the previous kernel has ended."""
    row_ids, dims = tl.arange(0, ROWS), tl.arange(0, BLOCK_DIM)
    num_work = tl.load(num_items_ptr) * KV_HEADS
    # An item is fetched while the previous one is computed. The first is in bounds even without
    # work.
    item = _load_item(items_ptr + tl.program_id(0) // KV_HEADS * ITEM_FIELDS)
    if EARLY:
        gdc_wait()
    for work in tl.range(tl.program_id(0), num_work, tl.num_programs(0), disable_licm=True):
        kv_head = work % KV_HEADS
        sequence, row, tokens, position, first_split, stop_split, slot, part, parts = item
        following = tl.minimum(work + tl.num_programs(0), num_work - 1) // KV_HEADS
        item = _load_item(items_ptr + following * ITEM_FIELDS)
        inside = (row_ids // GROUP < tokens)[:, None] & (dims < HEAD_DIM)[None, :]
        q_at = (row_ids // GROUP) * stride_q_token + (row_ids % GROUP) * HEAD_DIM
        q_base = q_ptr + row.to(tl.int64) * stride_q_token + kv_head.to(tl.int64) * stride_q_head
        q = tl.load(q_base + q_at[:, None] + dims[None, :], mask=inside, other=0.0)
        pool = (k_pages, v_pages, kv_head, stride_page, stride_slot, stride_kv_head)
        peak, mass, acc = _attend(
            q, pool, tables_ptr + sequence.to(tl.int64) * stride_table, position, tokens,
            first_split, stop_split, scale, GROUP, HEAD_DIM, PAGE, KEYS, SPLIT, FOLDS, FIRST,
            WINDOW, SOFT_CAP, DESCRIPTORS,
        )  # fmt: skip
        to_ptr = out_ptr + row.to(tl.int64) * stride_out_token + kv_head * (GROUP * HEAD_DIM)
        head_sinks_ptr = None if sinks_ptr is None else sinks_ptr + kv_head * GROUP
        if parts > 1:
            place = slot.to(tl.int64) * KV_HEADS + kv_head
            _store_partial(stats_ptr, sums_ptr, place, tokens, peak, mass, acc, GROUP, HEAD_DIM)
            first = place - part.to(tl.int64) * KV_HEADS
            if _is_last(arrived_ptr + first, parts):
                _combine(
                    (stats_ptr, sums_ptr, first, parts, KV_HEADS), to_ptr, head_sinks_ptr,
                    stride_out_token, tokens, v_scale, GROUP, HEAD_DIM, BLOCK_DIM, ROWS,
                )  # fmt: skip
        else:
            _store_result(
                to_ptr, head_sinks_ptr, stride_out_token, row_ids, tokens, (peak, mass, acc),
                v_scale, GROUP, HEAD_DIM,
            )  # fmt: skip


@jit
def _is_last(arrived_ptr, parts):
    """Count a finished part; return whether it is the last of its result. If so, reset the counter
    for the next layer."""
    # The barrier orders all threads' stores before the count, so the last program sees every part.
    tl.debug_barrier()
    last = tl.atomic_add(arrived_ptr, 1, sem="acq_rel") == parts - 1
    if last:
        tl.store(arrived_ptr, 0)
    return last
