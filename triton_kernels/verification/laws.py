"""What verification reads of a row of logits that was reduced: chances of tokens, fp32."""

from __future__ import annotations

import triton.language as tl

from triton_kernels.build.jit import jit
from triton_kernels.sampling import cut, tiles


@jit
def chance(floats_ptr, ids_ptr, logits_ptr, rows, drafts, inverse, mask):
    """The filtered probability of `drafts` in the rows that decide on them, fp32; 0 without."""
    maxima = tl.load(floats_ptr + 2 * rows, mask=mask, other=0.0)
    mass = tl.load(floats_ptr + 2 * rows + 1, mask=mask, other=1.0)
    cut_key = tl.load(ids_ptr + 4 * rows + 1, mask=mask, other=0)
    cut_id = tl.load(ids_ptr + 4 * rows + 2, mask=mask, other=0)
    y = (maxima - tl.load(logits_ptr + rows, mask=mask, other=float("-inf"))) * inverse
    key = tiles.key_of(y)
    kept = mask & ((key < cut_key) | ((key == cut_key) & (drafts < cut_id)))
    return tl.where(kept, tl.exp(-y) / tl.where(mass > 0.0, mass, 1.0), 0.0)


@jit
def law_of_tile(
    view, shaping, floats_ptr, ids_ptr, rows, inverse, tile, num_dense, BLOCK: tl.constexpr,
    SHAPED: tl.constexpr,
):  # fmt: skip
    """Ids and filtered probabilities of a tile of the given rows, [ROWS, BLOCK]."""
    passes = (view, shaping, tl.load(floats_ptr + 2 * rows), inverse, num_dense, num_dense)
    ids, keys, weights = cut.ordered_tile(passes, tile, BLOCK, SHAPED)
    kept = tiles.before(keys, ids, tl.load(ids_ptr + 4 * rows + 1), tl.load(ids_ptr + 4 * rows + 2))
    mass = tl.load(floats_ptr + 2 * rows + 1)
    mass = tl.where(mass > 0.0, mass, 1.0)
    return ids, tl.where(kept, weights / mass[:, None], 0.0)


@jit
def laws_of_tile(
    batch, proposals, reduced, q_reduced, request, row, depth, drafted, tile, vocab, stride,
    q_stride, shaping, PROPOSED: tl.constexpr, SHAPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Ids, p of the rows, and q of the drafts that they decide on, [ROWS, BLOCK]: one-hot where
    these were chosen with certainty, 0 where a row is not `drafted`."""
    num_dense = tl.cdiv(vocab, BLOCK)
    drafts, draft_start = batch.drafts.tokens, tl.load(batch.drafts.starts + request)
    inverse = tiles.inverse(tl.load(batch.requests.temperatures + request))
    at = row.to(tl.int64) * stride
    view = (batch.logits, vocab, at, request, depth, drafts, draft_start)
    ids, p = law_of_tile(
        view, shaping, reduced.floats, reduced.ids, row, inverse, tile, num_dense, BLOCK, SHAPED
    )
    draft = tl.load(drafts + draft_start + depth, mask=drafted, other=0)
    q = (drafted[:, None] & (ids == draft[:, None])).to(tl.float32)
    if PROPOSED:
        unsure = drafted & (tl.load(proposals.certain + request) == 0)
        if tl.max(unsure.to(tl.int32), axis=0) > 0:
            q_row = tl.where(unsure, draft_start + depth, 0)
            at = q_row.to(tl.int64) * q_stride
            view = (proposals.logits, vocab, at, request, depth, drafts, draft_start)
            floats, found = q_reduced.floats, q_reduced.ids
            _, drawn_from = law_of_tile(
                view, shaping, floats, found, q_row, inverse, tile, num_dense, BLOCK, SHAPED
            )
            q = tl.where(unsure[:, None], drawn_from, q)
    return ids, p, q
