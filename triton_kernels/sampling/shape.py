"""The kernel that shapes logits, before the scan.

The *overlay* of a row has the shaped logits of its request's listed tokens. With penalties it also
has the drafts before the row that are neither listed nor forbidden. These tokens form tiles of
their own, after the dense tiles of the row. In the row itself they are forbidden: drafts by this
kernel, the others by the scan.
"""

from __future__ import annotations

import triton.language as tl

from triton_kernels.build.jit import jit
from triton_kernels.noise import device as noise_device
from triton_kernels.sampling import inputs, order, scan
from triton_kernels.sampling.order import LOWEST

IN_PROMPT = tl.constexpr(inputs.IN_PROMPT)
IS_STOP = tl.constexpr(inputs.IS_STOP)


@jit(
    do_not_specialize=["num_tiles", "num_dense", "purpose", "any_drawn"],
    do_not_specialize_on_alignment=["certain_ptr"],
)
def shape_kernel(
    batch, shaping, certain_ptr, overlay, scanned, vocab, stride, list_width, logits_step,
    num_tiles, num_dense, purpose, any_drawn, PIECES: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Write a tile of a row's overlay, [rows, list_width]; its logits lie `logits_step` apart. The
    tile's number follows the `num_dense` dense ones. A tile without entries has no mass."""
    row, tile = tl.program_id(0), tl.program_id(1)
    request = tl.load(batch.rows.requests + row)
    depth = tl.load(batch.rows.depths + row)
    at = shaping.penalties + 3 * request
    penalties = (tl.load(at), tl.load(at + 1), tl.load(at + 2))
    listed = tl.load(shaping.num_listed + request)
    num_entries = listed + drafts_before(penalties, depth)
    entry = tile * PIECES + tl.arange(0, PIECES)[:, None]
    entry = entry * PIECE + tl.arange(0, PIECE)[None, :]
    ids = tl.zeros([PIECES, PIECE], tl.int32)
    x = tl.full([PIECES, PIECE], LOWEST, tl.float32)
    has_entries = tile * PIECES * PIECE < num_entries
    if has_entries:
        ids, x = _shaped(
            batch, shaping, row, request, depth, penalties, entry, (listed, num_entries), vocab,
            stride, list_width,
        )  # fmt: skip
        valid = entry < list_width
        tl.store(overlay.ids + row.to(tl.int64) * list_width + entry, ids, mask=valid)
        tl.store(overlay.logits + row.to(tl.int64) * logits_step + entry, x, mask=valid)
    _, y = scan.store_sums(
        batch, scanned, row, num_dense + tile, request, x, x == x, vocab, num_tiles
    )
    draft_at = tl.load(batch.drafts.starts + request) + depth
    has_draft = depth < tl.load(batch.drafts.counts + request)
    draft = tl.load(batch.drafts.tokens + draft_at, mask=has_draft, other=-1)
    draft_logit = tl.max(tl.max(tl.where(ids == draft, x, LOWEST), axis=1), axis=0)
    tile_index = row.to(tl.int64) * num_tiles + num_dense + tile
    tl.store(scanned.tiles + tile_index * scan.TILE_FIELDS + scan.TILE_DRAFT_LOGIT, draft_logit)
    raced, stream, excluded = order.race_of(batch, certain_ptr, request, depth, purpose, any_drawn)
    key = order.code_of(y, ids)
    if raced & has_entries:
        seed, position, choice = order.draw_of(batch.noise, request, depth)
        words = noise_device.words_of(seed, ids, position, choice, stream)
        key = order.race_key(noise_device.exponential(words), y, ids)
        key = tl.where(ids == excluded, order.NEVER, key)
    key = tl.where(x > LOWEST, key, order.NEVER)
    scan.store_winner(scanned, tile_index, key, ids, x)


@jit
def drafts_before(penalties, depth):
    """Return the number of drafts that may have an entry."""
    repetition, presence, frequency = penalties
    return tl.where((repetition != 1.0) | (presence != 0.0) | (frequency != 0.0), depth, 0)


@jit
def _shaped(batch, shaping, row, request, depth, penalties, entry, ends, vocab, stride, list_width):
    """Return ids and shaped logits of the entries of a row; places without an entry have LOWEST.
    `ends`: the number of listed tokens, and that number plus the drafts."""
    listed, num_entries = ends
    repetition, presence, frequency = penalties
    inside, is_draft = entry < listed, (entry >= listed) & (entry < num_entries)
    at = request.to(tl.int64) * list_width + entry
    drafts = batch.drafts.tokens + tl.load(batch.drafts.starts + request)
    ids = tl.load(shaping.listed + at, mask=inside, other=0)
    ids += tl.load(drafts + entry - listed, mask=is_draft, other=0)
    words = shaping.plain + request.to(tl.int64) * tl.cdiv(vocab, 32)
    word = tl.load(words + ids // 32, mask=is_draft, other=0)
    is_draft = is_draft & ((word >> (ids % 32)) & 1 != 0)
    count = tl.load(shaping.counts + at, mask=inside, other=0)
    for j in range(num_entries - listed):
        same = ids == tl.load(drafts + j)
        count += same.to(tl.int32)
        is_draft = is_draft & ~(same & (entry - listed > j))  # each once
    has_entry = inside | is_draft
    logits_at = batch.logits + row.to(tl.int64) * stride + ids
    lowest = order.lowest_of(batch.logits.dtype.element_ty)
    raw = tl.load(logits_at, mask=has_entry, other=lowest)
    x, finite = order.cleaned(raw)
    tl.store(logits_at, (x * 0.0 + lowest).to(raw.dtype), mask=is_draft & finite)
    x += tl.load(shaping.bias + at, mask=inside, other=0.0)
    marks = tl.load(shaping.marks + at, mask=inside, other=0)
    early = tl.load(shaping.min_tokens + request) > depth
    x = tl.where((marks & IS_STOP != 0) & early, LOWEST, x)
    # Keskar et al. 2019, section 4.1; logits below 0 are multiplied.
    scaled = tl.where(x > 0, tl.div_rn(x, repetition + tl.zeros_like(x)), x * repetition)
    x = tl.where((count > 0) | (marks & IN_PROMPT != 0), scaled, x)
    x -= frequency * count.to(tl.float32) + tl.where(count > 0, presence, 0.0)
    return ids, tl.where(has_entry, tl.maximum(x, LOWEST), LOWEST)
