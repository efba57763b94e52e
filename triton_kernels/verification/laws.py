"""What verification reads of a row of logits that was reduced: chances of tokens, fp32."""

from __future__ import annotations

import triton
import triton.language as tl

from triton_kernels.sampling import cut, tiles


@triton.jit
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


@triton.jit
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
