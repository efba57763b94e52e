"""The draft model's passes of a step, laid out on the device: first a ragged pass over the tokens
missing in its KV, then passes of one token per row while any row has drafts left."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_kernels.build.check import check_tensor
from triton_kernels.build.jit import jit
from triton_kernels.slots.state import (
    CATCH_UP,
    NEW_TOKENS,
    NUM_DRAFTS,
    WANTS,
    SlotState,
)
from triton_kernels.slots.target_batch import LANES, NUM_WARPS, owners_of, store_tokens

ROWS = 64
TAKE_WARPS = 2


class DraftLayout(NamedTuple):
    """Passes of S slots, in which up to R rows draft up to K tokens each. The drafts of slot s, and
    their distributions, begin at `starts[s]` = r K, with r its row. Rows of padding belong to the
    last slot. After all rows, `drafts` has room for K lookup drafts of every slot."""

    tokens: Tensor  # int32 [T]: token ids of a pass; later passes have R tokens
    positions: Tensor  # int32 [T]
    kv_slots: Tensor  # int32 [T]
    query_starts: Tensor  # int32 [S + 1], of the first pass
    contexts: Tensor  # int32 [S]
    row_starts: Tensor  # int32 [S + 1], of the later passes
    row_contexts: Tensor  # int32 [S]
    row_slots: Tensor  # int32 [R]
    row_tokens: Tensor  # int32 [R]: index of the row's last token, below T
    depths: Tensor  # int32 [S]: drafts of the slot; fewer if its logits become non-finite
    starts: Tensor  # int32 [S]
    broken: Tensor  # int32 [S]: 1 if its logits became non-finite: its draft KV is invalid
    next_kv: Tensor  # int32 [S]: valid positions in the draft's KV after the step
    noise_positions: Tensor  # int64 [S]: number of known tokens
    drafts: Tensor  # int32 [R K + S K]

    @classmethod
    def allocate(
        cls, slots: int, max_tokens: int, max_drafts: int, device: torch.device | str
    ) -> DraftLayout:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        rows = slots - 1
        return cls(
            *(zeros(max_tokens) for _ in range(3)),
            zeros(slots + 1),
            zeros(slots),
            zeros(slots + 1),
            zeros(slots),
            zeros(rows),
            zeros(rows),
            *(zeros(slots) for _ in range(4)),
            zeros(slots, dtype=torch.int64),
            zeros((rows + slots) * max_drafts),
        )


@jit(do_not_specialize=["max_tokens", "max_rows", "max_token"])
def draft_batch_kernel(
    state, layout, num_slots, token_width, block_width, max_tokens, max_rows, max_drafts,
    max_token, context_tokens, BLOCK_SLOTS: tl.constexpr, PAGE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    slots = tl.arange(0, BLOCK_SLOTS)
    in_range = slots < num_slots
    new_tokens = tl.load(state.work + NEW_TOKENS * num_slots + slots, mask=in_range, other=0)
    planned = tl.load(state.work + NUM_DRAFTS * num_slots + slots, mask=in_range, other=0)
    catch_up = tl.load(state.work + CATCH_UP * num_slots + slots, mask=in_range, other=0)
    wants = tl.load(state.work + WANTS * num_slots + slots, mask=in_range, other=0) != 0
    known = tl.load(state.num_tokens + slots, mask=in_range, other=0)
    kv = tl.load(state.draft_kv_len + slots, mask=in_range, other=0)
    total = tl.load(state.max_total + slots, mask=in_range, other=0)
    failed = tl.load(state.failed + slots, mask=in_range, other=0) != 0
    active = (new_tokens > 0) & (failed == 0) & ((known < total) | (wants == 0))
    # A sequence never exceeds `max_total`; a row without drafts left must not catch up either.
    allowed = tl.minimum(planned, tl.maximum(total - known - 1, 0))
    catch_up = tl.where((planned > 0) & (allowed == 0), 0, catch_up)
    missing = known - kv
    # The last draft has position known + k - 1; the token before it must fit the context.
    depths = tl.minimum(allowed, context_tokens + 1 - known)
    can_draft = active & (missing <= catch_up + 1)
    depths = tl.where(can_draft, tl.maximum(depths, 0), 0)
    catch_up_tokens = tl.maximum(tl.minimum(catch_up, missing - 1), 0)
    catch_up_tokens = tl.where(active & (allowed == 0), catch_up_tokens, 0)
    queries = tl.where(depths > 0, missing, catch_up_tokens)
    has_drafts = (depths > 0).to(tl.int32)
    ends, row_ends = tl.cumsum(queries, 0), tl.cumsum(has_drafts, 0)
    first_rows, last_tokens = row_ends - has_drafts, ends - 1
    if tl.program_id(0) == 0:
        tl.store(layout.query_starts + slots, ends - queries, mask=in_range)
        tl.store(layout.query_starts + num_slots, tl.sum(queries, 0))
        tl.store(layout.contexts + slots, tl.where(queries > 0, kv + queries, 0), mask=in_range)
        tl.store(layout.row_starts + slots, first_rows, mask=in_range)
        tl.store(layout.row_starts + num_slots, tl.sum(has_drafts, 0))
        tl.store(layout.depths + slots, depths, mask=in_range)
        tl.store(layout.starts + slots, first_rows * has_drafts * max_drafts, mask=in_range)
        tl.store(layout.broken + slots, slots * 0, mask=in_range)
        kv_after = tl.where(depths > 0, known - 1 + depths, kv + queries)
        tl.store(layout.next_kv + slots, kv_after, mask=in_range)
        tl.store(layout.noise_positions + slots, known.to(tl.int64), mask=in_range)

    lanes = tl.program_id(0) * LANES + tl.arange(0, LANES)
    owners = owners_of(ends, lanes, BLOCK_SLOTS)
    positions = lanes + tl.gather(kv - ends + queries, owners, 0)
    valid = lanes < tl.sum(queries, 0)
    store_tokens(
        state, layout, lanes, owners, positions, valid, token_width, block_width, max_tokens,
        max_token, PAGE,
    )  # fmt: skip
    owners = owners_of(row_ends, lanes, BLOCK_SLOTS)
    valid = lanes < tl.sum(has_drafts, 0)
    inside = lanes < max_rows
    tl.store(layout.row_slots + lanes, tl.where(valid, owners, num_slots - 1), mask=inside)
    token = tl.gather(last_tokens, owners, 0)
    tl.store(layout.row_tokens + lanes, tl.where(valid, token, 0), mask=inside)


def make_draft_batch(
    state: SlotState,
    layout: DraftLayout,
    *,
    block_size: int,
    max_drafts: int,
    max_token: int,
    context_tokens: int,
) -> None:
    """Fill `layout` for the first pass. `max_drafts` is K of the layout, `max_token` the last id
    in the draft model's vocabulary, `context_tokens` its context length."""
    slots = len(state.num_tokens)
    if tuple(layout.query_starts.shape) != (slots + 1,):
        raise ValueError(f"layout: allocate it for {slots} slots")
    longest = max(len(layout.tokens), len(layout.row_slots))
    draft_batch_kernel[(triton.cdiv(longest, LANES),)](
        state, layout, slots, state.tokens.shape[1], state.blocks.shape[1], len(layout.tokens),
        len(layout.row_slots), max_drafts, max_token, context_tokens,
        BLOCK_SLOTS=max(16, triton.next_power_of_2(slots)), PAGE=block_size, LANES=LANES,
        num_warps=NUM_WARPS, num_stages=1, enable_fp_fusion=True,
    )  # fmt: skip


@jit(do_not_specialize=["num_rows", "depth", "max_token"])
def take_drafts_kernel(
    drawn_ptr, state, layout, num_rows, num_slots, depth, token_width, block_width, max_drafts,
    max_token, PAGE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < num_rows
    slot = tl.load(layout.row_slots + row, mask=live, other=num_slots - 1)
    num_drafts = tl.load(layout.depths + slot, mask=slot < num_slots - 1, other=0)
    known = tl.load(state.num_tokens + slot)
    draft = row * max_drafts + depth
    token = tl.load(drawn_ptr + 2 * draft, mask=live, other=0)
    finite = tl.load(drawn_ptr + 2 * draft + 1, mask=live, other=1) != 0
    is_draft = depth < num_drafts
    breaks = is_draft & (finite == 0)
    # Earlier drafts still count: dropping them for a later result would change the distribution.
    tl.store(layout.broken + slot, row * 0 + 1, mask=breaks)
    tl.store(layout.depths + slot, row * 0 + depth, mask=breaks)
    kept = is_draft & finite
    tl.store(layout.drafts + draft, token, mask=live)
    position = known + depth
    slot = slot.to(tl.int64)
    tl.store(state.tokens + slot * token_width + position, token, mask=kept)
    # The next pass. A row that does not continue attends to its first key only, and writes no KV.
    continues = kept & (depth + 1 < num_drafts)
    block = tl.load(state.blocks + slot * block_width + position // PAGE, mask=continues, other=0)
    kv_slot = tl.where(continues, block * PAGE + position % PAGE, -1)
    tl.store(layout.tokens + row, tl.where(continues, tl.minimum(token, max_token), 0), mask=live)
    tl.store(layout.positions + row, tl.where(continues, position, 0), mask=live)
    tl.store(layout.kv_slots + row, kv_slot, mask=live)
    context = tl.where(continues, position + 1, 1)
    tl.store(layout.row_contexts + slot, context, mask=live & (slot < num_slots - 1))


def take_drafts(
    state: SlotState,
    layout: DraftLayout,
    drawn: Tensor,
    num_rows: int,
    depth: int,
    *,
    block_size: int,
    max_drafts: int,
    max_token: int,
) -> None:
    """Take draft number `depth` (from 0) of the first `num_rows` rows, and lay out the next pass.
    `drawn` int32 [R * K, 2] has at `row * K + depth` the token, and whether its logits were finite.
    Raises ValueError if the layout is for fewer rows."""
    slots = len(state.num_tokens)
    check_tensor("drawn", drawn, torch.int32, (len(layout.row_slots) * max_drafts, 2))
    if num_rows > len(layout.row_slots):
        raise ValueError(f"num_rows: {num_rows}, layout for {len(layout.row_slots)}")
    take_drafts_kernel[(triton.cdiv(num_rows, ROWS),)](
        drawn, state, layout, num_rows, slots, depth, state.tokens.shape[1],
        state.blocks.shape[1], max_drafts, max_token, PAGE=block_size, ROWS=ROWS,
        num_warps=TAKE_WARPS, num_stages=1, enable_fp_fusion=True,
    )  # fmt: skip
