"""Drafts from lookups on the host, stored where the drafts of a model would be.

The host may know one step less than the device, so a guess continues the tokens that the host knew.
If the guess begins with the tokens emitted since then, its rest becomes the drafts. Otherwise the
slot has no drafts.
"""

from __future__ import annotations

from functools import partial

import triton
import triton.language as tl

from triton_kernels.build.case import KernelCase, case_of
from triton_kernels.build.jit import jit
from triton_kernels.slots.draft_batch import LAYOUT_TYPES, DraftLayout
from triton_kernels.slots.state import LIMITS, LOOKED_UP, STATE_TYPES, SlotState

# Words at the head of a slot's field `guess`: number of guessed tokens, and of tokens before them.
HEAD_WORDS = 2
_HEAD = tl.constexpr(HEAD_WORDS)
_SLOTS = 64
_NUM_WARPS = 2


@jit
def guess_kernel(
    state, layout, num_slots, token_width, guess_width, most_drafts, ALONE: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    there = slot < num_slots
    planned = tl.load(state.asked + LOOKED_UP * num_slots + slot, mask=there, other=0)
    guesses = there & (planned > 0)
    known = tl.load(state.num_tokens + slot, mask=there, other=0)
    total = tl.load(state.max_total + slot, mask=guesses, other=0)
    failed = tl.load(state.failed + slot, mask=guesses, other=0) != 0
    guess_ptr = state.guess + slot.to(tl.int64) * guess_width
    count = tl.load(guess_ptr, mask=guesses, other=0)
    start = tl.load(guess_ptr + 1, mask=guesses, other=0)
    text_ptr = state.tokens + slot.to(tl.int64) * token_width
    passed = known - start
    agrees = guesses & (failed == 0) & (passed >= 0) & (passed < count)
    for i in range(tl.max(tl.where(agrees, passed, 0))):
        inside = agrees & (i < passed)
        guessed = tl.load(guess_ptr + _HEAD + i, mask=inside, other=0)
        emitted = tl.load(text_ptr + start + i, mask=inside, other=0)
        agrees = agrees & (guessed == emitted)
    # A sequence never exceeds `max_total`.
    depths = tl.minimum(planned, tl.maximum(total - known - 1, 0))
    depths = tl.where(agrees, tl.minimum(depths, count - passed), 0)
    first = (num_slots - 1 + slot) * most_drafts  # after the drafts of a model's rows
    for j in range(tl.max(depths)):
        deep = j < depths
        token = tl.load(guess_ptr + _HEAD + passed + j, mask=deep, other=0)
        tl.store(layout.drafts + first + j, token, mask=deep)
        tl.store(text_ptr + known + j, token, mask=deep)
    writes = there if ALONE else guesses
    tl.store(layout.depths + slot, depths, mask=writes)
    tl.store(layout.starts + slot, tl.where(depths > 0, first, 0), mask=writes)
    if ALONE:
        tl.store(layout.broken + slot, slot * 0, mask=there)
        kv = tl.load(state.draft_kv_len + slot, mask=there, other=0)
        tl.store(layout.next_kv + slot, kv, mask=there)


def take_guesses(state: SlotState, layout: DraftLayout, *, most_drafts: int, alone: bool) -> None:
    """Take drafts from `state.guess` for slots with planned lookup drafts. `alone`: no model drafts
    in this step, so this fills `layout` for all other slots, too. `most_drafts` is K of the
    layout."""
    slots = len(state.num_tokens)
    if len(layout.drafts) < (2 * slots - 1) * most_drafts:
        raise ValueError(f"layout: allocate it for {slots} slots of {most_drafts} drafts")
    if state.guess.shape[1] < HEAD_WORDS + most_drafts:
        raise ValueError(f"state.guess: {state.guess.shape[1]} words do not hold a guess")
    guess_kernel[(triton.cdiv(slots, _SLOTS),)](
        state, layout, slots, state.tokens.shape[1], state.guess.shape[1], most_drafts,
        ALONE=alone, SLOTS=_SLOTS, num_warps=_NUM_WARPS, num_stages=1, enable_fp_fusion=True,
    )  # fmt: skip


def cases() -> list[KernelCase]:
    types = {"state": STATE_TYPES, "layout": LAYOUT_TYPES}
    case = partial(case_of, limits=LIMITS, num_warps=_NUM_WARPS, types=types)
    return [
        case("slots_guesses", config, guess_kernel, {"ALONE": alone, "SLOTS": _SLOTS})
        for config, alone in (("alone", True), ("with a model", False))
    ]
