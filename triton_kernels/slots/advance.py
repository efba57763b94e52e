"""Applies a step's results to the slots, and packs the result for the host."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from triton_kernels.build.jit import jit
from triton_kernels.slots.state import DRAFTING, NEW_TOKENS, WANTS, SlotState
from triton_kernels.slots.target_batch import IDLE, MISFIT, RUNS, TargetLayout
from triton_kernels.verification.kernel import VerifyOutput

# Fields of a slot's row of the result, before the tokens that the slot emitted.
STATUS, DRAFTED, ACCEPTED, EMITTED, DRAFT_KV, NUM_FIELDS = range(6)
# Statuses.
OK, NON_FINITE, DRAFT_NON_FINITE, DOES_NOT_FIT = range(4)

_AT_STATUS, _AT_DRAFTED, _AT_ACCEPTED, _AT_EMITTED, _AT_DRAFT_KV, _AT_TOKENS = map(
    tl.constexpr, range(6)
)
_OK, _NON_FINITE, _DRAFT_NON_FINITE, _DOES_NOT_FIT = map(tl.constexpr, range(4))
LANES = 256
SLOTS_A_TIME = 64
NUM_WARPS = 2


@jit
def advance_kernel(
    state, layout, decision, broken_ptr, next_draft_kv_ptr, result_ptr, num_slots, token_width,
    result_width, DECIDED: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    in_range = slot < num_slots
    phase = tl.load(layout.states + slot, mask=in_range, other=IDLE)
    runs = phase == RUNS
    wants = tl.load(state.work + WANTS * num_slots + slot, mask=in_range, other=0) != 0
    drafting = tl.load(state.work + DRAFTING * num_slots + slot, mask=in_range, other=0) != 0
    known = tl.load(state.num_tokens + slot, mask=in_range, other=0)
    kv = tl.load(state.kv_len + slot, mask=in_range, other=0)
    failed = tl.load(state.failed + slot, mask=in_range, other=0) != 0
    out_ptr = result_ptr + slot * result_width
    accepted, emits = known * 0, known * 0
    if DECIDED:
        has_logits = runs & wants
        accepted = tl.load(decision.num_accepted + slot, mask=has_logits, other=0)
        next_token = tl.load(decision.next_tokens + slot, mask=has_logits, other=0)
        finite = tl.load(decision.finite + slot, mask=has_logits, other=1) != 0
        emits = tl.where(has_logits & finite, accepted + 1, 0)
        failed = failed | (finite == 0)
        # Accepted drafts are stored already.
        end_ptr = state.tokens + slot.to(tl.int64) * token_width + known
        for i in range(tl.max(emits, 0)):
            draft = tl.load(end_ptr + i, mask=i < accepted, other=0)
            token = tl.where(i < accepted, draft, next_token)
            tl.store(out_ptr + _AT_TOKENS + i, token, mask=i < emits)
        tl.store(end_ptr + accepted, next_token, mask=emits > 0)
        tl.store(state.num_tokens + slot, known + emits, mask=in_range)
        tl.store(state.failed + slot, failed.to(tl.int32), mask=in_range)
    new_tokens = tl.load(state.work + NEW_TOKENS * num_slots + slot, mask=runs, other=0)
    kv += tl.where(runs, new_tokens + accepted, 0)
    tl.store(state.kv_len + slot, kv, mask=in_range)
    drafting = drafting & in_range
    broken = tl.load(broken_ptr + slot, mask=drafting, other=0) != 0
    draft_kv = tl.load(state.draft_kv_len + slot, mask=in_range, other=0)
    next_draft_kv = tl.load(next_draft_kv_ptr + slot, mask=drafting, other=0)
    draft_kv = tl.minimum(tl.where(drafting, next_draft_kv, draft_kv), kv)
    draft_kv = tl.where(broken, 0, draft_kv)
    tl.store(state.draft_kv_len + slot, draft_kv, mask=in_range)

    status = tl.where(failed, _NON_FINITE, tl.where(broken, _DRAFT_NON_FINITE, _OK))
    status = tl.where(phase == MISFIT, _DOES_NOT_FIT, status)
    tl.store(out_ptr + _AT_STATUS, status, mask=in_range)
    drafted = tl.load(layout.num_drafted + slot, mask=in_range, other=0)
    tl.store(out_ptr + _AT_DRAFTED, drafted, mask=in_range)
    tl.store(out_ptr + _AT_ACCEPTED, tl.maximum(emits - 1, 0), mask=in_range)
    tl.store(out_ptr + _AT_EMITTED, emits, mask=in_range)
    tl.store(out_ptr + _AT_DRAFT_KV, draft_kv, mask=in_range)


@jit(do_not_specialize=["plain_words"])
def count_kernel(
    shaping, result_ptr, list_width, plain_words, result_width, LANES: tl.constexpr
):  # fmt: skip
    """Count a slot's emitted tokens in the lists that shape its logits; one program per slot."""
    slot = tl.program_id(0).to(tl.int64)
    row_ptr = result_ptr + slot * result_width
    emitted = tl.load(row_ptr + _AT_EMITTED)
    if emitted > 0:
        remaining = tl.load(shaping.min_tokens + slot)
        tl.store(shaping.min_tokens + slot, tl.maximum(remaining - emitted, 0))
        used = tl.load(shaping.num_listed + slot)
        if _has_penalties(shaping.penalties + 3 * slot):
            for i in range(emitted):
                token = tl.load(row_ptr + _AT_TOKENS + i)
                at = slot * list_width
                used = _count_token(
                    shaping.plain + slot * plain_words, shaping.listed + at, shaping.bias + at,
                    shaping.counts + at, shaping.marks + at, token, used, LANES,
                )  # fmt: skip
            tl.store(shaping.num_listed + slot, used)


@jit
def _has_penalties(penalties_ptr):
    costs = tl.abs(tl.load(penalties_ptr + 1)) + tl.abs(tl.load(penalties_ptr + 2))
    return (tl.load(penalties_ptr) != 1.0) | (costs != 0.0)


@jit
def _count_token(
    plain_ptr, listed_ptr, bias_ptr, counts_ptr, marks_ptr, token, used, LANES: tl.constexpr
):
    """Count one more `token` in the output; return the length of the list."""
    place = used * 0 - 1
    for start in range(0, used, LANES):
        lane = start + tl.arange(0, LANES)
        ids = tl.load(listed_ptr + lane, mask=lane < used, other=-1)
        place = tl.maximum(place, tl.max(tl.where(ids == token, lane, -1), 0))
    is_new = place < 0
    place = tl.where(is_new, used, place)
    count = tl.load(counts_ptr + place, mask=is_new == 0, other=0)
    tl.store(listed_ptr + place, token, mask=is_new)
    tl.store(bias_ptr + place, 0.0, mask=is_new)
    tl.store(marks_ptr + place, 0, mask=is_new)
    tl.store(counts_ptr + place, count + 1)
    word = tl.load(plain_ptr + token // 32)
    tl.store(plain_ptr + token // 32, word & ~(1 << (token % 32)), mask=is_new)
    tl.debug_barrier()  # the next token reads the list
    return used + is_new.to(tl.int32)


def advance(
    state: SlotState,
    layout: TargetLayout,
    decision: VerifyOutput | None,
    broken: Tensor,
    next_draft_kv: Tensor,
    result: Tensor,
    *,
    shaped: bool,
) -> None:
    """Apply a step's results to `state`. `decision` is None if no logits were computed. `broken`
    and `next_draft_kv` int32 [S] come from the draft's passes. `shaped`: some row shapes its
    logits. `result` is int32 [S, NUM_FIELDS + most tokens that a row emits]. Raises ValueError
    naming the argument that does not fit."""
    slots = len(state.num_tokens)
    if result.dim() != 2 or result.shape[0] != slots or result.shape[1] <= NUM_FIELDS:
        raise ValueError(f"result: {list(result.shape)}; give [{slots}, more than {NUM_FIELDS}]")
    advance_kernel[(triton.cdiv(slots, SLOTS_A_TIME),)](
        state, layout, decision, broken, next_draft_kv, result, slots, state.tokens.shape[1],
        result.shape[1], DECIDED=decision is not None, SLOTS=SLOTS_A_TIME, num_warps=NUM_WARPS,
        num_stages=1, enable_fp_fusion=True,
    )  # fmt: skip
    if shaped and decision is not None:
        count_kernel[(slots,)](
            state.shaping, result, state.listed.shape[1], state.plain.shape[1], result.shape[1],
            LANES=LANES, num_warps=NUM_WARPS, num_stages=1, enable_fp_fusion=True,
        )  # fmt: skip
