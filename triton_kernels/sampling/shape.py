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
    do_not_specialize=["num_tiles", "num_dense", "purpose", "drawn"],
    do_not_specialize_on_alignment=["certain_ptr"],
)
def shape_kernel(
    batch, shaping, certain_ptr, overlay, scanned, vocab, stride, list_width, logits_step,
    num_tiles, num_dense, purpose, drawn, PIECES: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Write a tile of a row's overlay, [rows, list_width]; its logits lie `logits_step` apart. The
    tile's number follows the `num_dense` dense ones. A tile without entries has no mass."""
    row, tile = tl.program_id(0), tl.program_id(1)
    request = tl.load(batch.rows.requests + row)
    depth = tl.load(batch.rows.depths + row)
    at = shaping.penalties + 3 * request
    penalties = (tl.load(at), tl.load(at + 1), tl.load(at + 2))
    listed = tl.load(shaping.num_listed + request)
    used = listed + drafts_before(penalties, depth)
    entry = tile * PIECES + tl.arange(0, PIECES)[:, None]
    entry = entry * PIECE + tl.arange(0, PIECE)[None, :]
    ids = tl.zeros([PIECES, PIECE], tl.int32)
    x = tl.full([PIECES, PIECE], LOWEST, tl.float32)
    there = tile * PIECES * PIECE < used
    if there:
        ids, x = _shaped(
            batch, shaping, row, request, depth, penalties, entry, (listed, used), vocab, stride,
            list_width,
        )  # fmt: skip
        held = entry < list_width
        tl.store(overlay.ids + row.to(tl.int64) * list_width + entry, ids, mask=held)
        tl.store(overlay.logits + row.to(tl.int64) * logits_step + entry, x, mask=held)
    _, y = scan.leave_sums(
        batch, scanned, row, num_dense + tile, request, x, x == x, vocab, num_tiles
    )
    draft_at = tl.load(batch.drafts.starts + request) + depth
    drafted = depth < tl.load(batch.drafts.counts + request)
    draft = tl.load(batch.drafts.tokens + draft_at, mask=drafted, other=-1)
    of_draft = tl.max(tl.max(tl.where(ids == draft, x, LOWEST), axis=1), axis=0)
    out = row.to(tl.int64) * num_tiles + num_dense + tile
    tl.store(scanned.tiles + out * scan.TILE_FIELDS + scan.TILE_DRAFT_LOGIT, of_draft)
    raced, stream, excluded = order.race_of(batch, certain_ptr, request, depth, purpose, drawn)
    key = order.code_of(y, ids)
    if raced & there:
        seed, position, choice = order.draw_of(batch.noise, request, depth)
        words = noise_device.words_of(seed, ids, position, choice, stream)
        key = order.race_key(noise_device.exponential(words), y, ids)
        key = tl.where(ids == excluded, order.NEVER, key)
    key = tl.where(x > LOWEST, key, order.NEVER)
    scan.leave_winner(scanned, out, key, ids, x)


@jit
def drafts_before(penalties, depth):
    """Return the number of drafts that may have an entry."""
    repetition, presence, frequency = penalties
    return tl.where((repetition != 1.0) | (presence != 0.0) | (frequency != 0.0), depth, 0)


@jit
def _shaped(batch, shaping, row, request, depth, penalties, entry, ends, vocab, stride, list_width):
    """Return ids and shaped logits of the entries of a row; places without an entry have LOWEST.
    `ends`: the number of listed tokens, and that number plus the drafts."""
    listed, used = ends
    repetition, presence, frequency = penalties
    inside, drafted = entry < listed, (entry >= listed) & (entry < used)
    at = request.to(tl.int64) * list_width + entry
    drafts = batch.drafts.tokens + tl.load(batch.drafts.starts + request)
    ids = tl.load(shaping.listed + at, mask=inside, other=0)
    ids += tl.load(drafts + entry - listed, mask=drafted, other=0)
    words = shaping.plain + request.to(tl.int64) * tl.cdiv(vocab, 32)
    word = tl.load(words + ids // 32, mask=drafted, other=0)
    drafted = drafted & ((word >> (ids % 32)) & 1 != 0)
    times = tl.load(shaping.counts + at, mask=inside, other=0)
    for j in range(used - listed):
        same = ids == tl.load(drafts + j)
        times += same.to(tl.int32)
        drafted = drafted & ~(same & (entry - listed > j))  # each once
    there = inside | drafted
    spot = batch.logits + row.to(tl.int64) * stride + ids
    lowest = order.lowest_of(batch.logits.dtype.element_ty)
    raw = tl.load(spot, mask=there, other=lowest)
    x, sound = order.cleaned(raw)
    tl.store(spot, (x * 0.0 + lowest).to(raw.dtype), mask=drafted & sound)
    x += tl.load(shaping.bias + at, mask=inside, other=0.0)
    marks = tl.load(shaping.marks + at, mask=inside, other=0)
    early = tl.load(shaping.min_tokens + request) > depth
    x = tl.where((marks & IS_STOP != 0) & early, LOWEST, x)
    # Keskar et al. 2019, section 4.1; logits below 0 are multiplied.
    scaled = tl.where(x > 0, tl.div_rn(x, repetition + tl.zeros_like(x)), x * repetition)
    x = tl.where((times > 0) | (marks & IN_PROMPT != 0), scaled, x)
    x -= frequency * times.to(tl.float32) + tl.where(times > 0, presence, 0.0)
    return ids, tl.where(there, tl.maximum(x, LOWEST), LOWEST)
