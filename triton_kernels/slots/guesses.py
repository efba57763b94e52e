"""Drafts from lookups on the host, stored where the drafts of a model would be.

The host may know one step less than the device, so a guess continues the tokens that the host knew.
If the guess begins with the tokens emitted since then, its rest becomes the drafts. Otherwise the
slot has no drafts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from triton_kernels.build.jit import jit
from triton_kernels.slots.draft_batch import DraftLayout
from triton_kernels.slots.state import LOOKED_UP, SlotState

# Words at the head of a slot's field `guess`: number of guessed tokens, and of tokens before them.
HEAD_WORDS = 2
_HEAD = tl.constexpr(HEAD_WORDS)
SLOTS_A_TIME = 64
NUM_WARPS = 2


@jit
def guess_kernel(
    state, layout, num_slots, token_width, guess_width, max_drafts, ALONE: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    in_range = slot < num_slots
    planned = tl.load(state.work + LOOKED_UP * num_slots + slot, mask=in_range, other=0)
    has_guess = in_range & (planned > 0)
    known = tl.load(state.num_tokens + slot, mask=in_range, other=0)
    total = tl.load(state.max_total + slot, mask=has_guess, other=0)
    failed = tl.load(state.failed + slot, mask=has_guess, other=0) != 0
    guess_ptr = state.guess + slot.to(tl.int64) * guess_width
    count = tl.load(guess_ptr, mask=has_guess, other=0)
    start = tl.load(guess_ptr + 1, mask=has_guess, other=0)
    text_ptr = state.tokens + slot.to(tl.int64) * token_width
    num_emitted = known - start
    agrees = has_guess & (failed == 0) & (num_emitted >= 0) & (num_emitted < count)
    for i in range(tl.max(tl.where(agrees, num_emitted, 0))):
        inside = agrees & (i < num_emitted)
        guessed = tl.load(guess_ptr + _HEAD + i, mask=inside, other=0)
        emitted = tl.load(text_ptr + start + i, mask=inside, other=0)
        agrees = agrees & (guessed == emitted)
    # A sequence never exceeds `max_total`.
    depths = tl.minimum(planned, tl.maximum(total - known - 1, 0))
    depths = tl.where(agrees, tl.minimum(depths, count - num_emitted), 0)
    first = (num_slots - 1 + slot) * max_drafts  # after the drafts of a model's rows
    for j in range(tl.max(depths)):
        is_draft = j < depths
        token = tl.load(guess_ptr + _HEAD + num_emitted + j, mask=is_draft, other=0)
        tl.store(layout.drafts + first + j, token, mask=is_draft)
        tl.store(text_ptr + known + j, token, mask=is_draft)
    writes = in_range if ALONE else has_guess
    tl.store(layout.depths + slot, depths, mask=writes)
    tl.store(layout.starts + slot, tl.where(depths > 0, first, 0), mask=writes)
    if ALONE:
        tl.store(layout.broken + slot, slot * 0, mask=in_range)
        kv = tl.load(state.draft_kv_len + slot, mask=in_range, other=0)
        tl.store(layout.next_kv + slot, kv, mask=in_range)


def take_guesses(state: SlotState, layout: DraftLayout, *, max_drafts: int, alone: bool) -> None:
    """Take drafts from `state.guess` for slots with planned lookup drafts. `alone`: no model drafts
    in this step, so this fills `layout` for all other slots, too. `max_drafts` is K of the
    layout."""
    slots = len(state.num_tokens)
    if len(layout.drafts) < (2 * slots - 1) * max_drafts:
        raise ValueError(f"layout: allocate it for {slots} slots of {max_drafts} drafts")
    if state.guess.shape[1] < HEAD_WORDS + max_drafts:
        raise ValueError(f"state.guess: {state.guess.shape[1]} words do not hold a guess")
    guess_kernel[(triton.cdiv(slots, SLOTS_A_TIME),)](
        state, layout, slots, state.tokens.shape[1], state.guess.shape[1], max_drafts,
        ALONE=alone, SLOTS=SLOTS_A_TIME, num_warps=NUM_WARPS, num_stages=1, enable_fp_fusion=True,
    )  # fmt: skip
