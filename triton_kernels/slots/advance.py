"""After the verdict: slots move on by what they emitted, and a step's result is packed."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from triton_kernels.build.case import KernelCase, case_of
from triton_kernels.slots.state import LIMITS, Asked, SlotState
from triton_kernels.slots.target_batch import IDLE, MISFIT, RUNS, TargetLayout
from triton_kernels.verification.kernel import VerifyOutput

# Fields of a slot's row of the result; behind them are the tokens that it emitted.
STATUS, DRAFTED, ACCEPTED, EMITTED, NUM_FIELDS = range(5)
# Statuses.
OK, NON_FINITE, DRAFT_NON_FINITE, DOES_NOT_FIT = range(4)

_NEW_TOKENS = tl.constexpr(Asked().num_new_tokens)
_WANTS = tl.constexpr(Asked().wants_logits)
_DRAFTING = tl.constexpr(Asked().drafting)
_OK, _NON_FINITE = tl.constexpr(OK), tl.constexpr(NON_FINITE)
_AT_STATUS, _AT_DRAFTED = tl.constexpr(STATUS), tl.constexpr(DRAFTED)
_AT_ACCEPTED, _AT_EMITTED = tl.constexpr(ACCEPTED), tl.constexpr(EMITTED)
_AT_TOKENS = tl.constexpr(NUM_FIELDS)
_DRAFT_NON_FINITE, _DOES_NOT_FIT = tl.constexpr(DRAFT_NON_FINITE), tl.constexpr(DOES_NOT_FIT)
_LANES = 256
_SLOTS = 64
_NUM_WARPS = 2


@triton.jit
def advance_kernel(
    asked_ptr,
    states_ptr,
    num_drafted_ptr,
    broken_ptr,
    next_draft_kv_ptr,
    accepted_ptr,
    next_tokens_ptr,
    finite_ptr,
    tokens_ptr,
    num_tokens_ptr,
    kv_len_ptr,
    draft_kv_len_ptr,
    failed_ptr,
    result_ptr,
    num_slots,
    token_width,
    result_width,
    DECIDED: tl.constexpr,
    SLOTS: tl.constexpr,
):
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    there = slot < num_slots
    state = tl.load(states_ptr + slot, mask=there, other=IDLE)
    runs = state == RUNS
    wants = tl.load(asked_ptr + _WANTS * num_slots + slot, mask=there, other=0) != 0
    drafting = tl.load(asked_ptr + _DRAFTING * num_slots + slot, mask=there, other=0) != 0
    known = tl.load(num_tokens_ptr + slot, mask=there, other=0)
    kv = tl.load(kv_len_ptr + slot, mask=there, other=0)
    failed = tl.load(failed_ptr + slot, mask=there, other=0) != 0
    out_ptr = result_ptr + slot * result_width
    accepted, emits = known * 0, known * 0
    if DECIDED:
        decides = runs & wants
        accepted = tl.load(accepted_ptr + slot, mask=decides, other=0)
        next_token = tl.load(next_tokens_ptr + slot, mask=decides, other=0)
        finite = tl.load(finite_ptr + slot, mask=decides, other=1) != 0
        emits = tl.where(decides & finite, accepted + 1, 0)
        failed = failed | (finite == 0)
        # Accepted drafts lie in place already.
        end_ptr = tokens_ptr + slot.to(tl.int64) * token_width + known
        for i in range(tl.max(emits, 0)):
            draft = tl.load(end_ptr + i, mask=i < accepted, other=0)
            token = tl.where(i < accepted, draft, next_token)
            tl.store(out_ptr + _AT_TOKENS + i, token, mask=i < emits)
        tl.store(end_ptr + accepted, next_token, mask=emits > 0)
        tl.store(num_tokens_ptr + slot, known + emits, mask=there)
        tl.store(failed_ptr + slot, failed.to(tl.int32), mask=there)
    new_tokens = tl.load(asked_ptr + _NEW_TOKENS * num_slots + slot, mask=runs, other=0)
    kv += tl.where(runs, new_tokens + accepted, 0)
    tl.store(kv_len_ptr + slot, kv, mask=there)
    drafting = drafting & there
    broken = tl.load(broken_ptr + slot, mask=drafting, other=0) != 0
    draft_kv = tl.load(draft_kv_len_ptr + slot, mask=there, other=0)
    next_draft_kv = tl.load(next_draft_kv_ptr + slot, mask=drafting, other=0)
    draft_kv = tl.minimum(tl.where(drafting, next_draft_kv, draft_kv), kv)
    draft_kv = tl.where(broken, 0, draft_kv)
    tl.store(draft_kv_len_ptr + slot, draft_kv, mask=there)

    status = tl.where(failed, _NON_FINITE, tl.where(broken, _DRAFT_NON_FINITE, _OK))
    status = tl.where(state == MISFIT, _DOES_NOT_FIT, status)
    tl.store(out_ptr + _AT_STATUS, status, mask=there)
    drafted = tl.load(num_drafted_ptr + slot, mask=there, other=0)
    tl.store(out_ptr + _AT_DRAFTED, drafted, mask=there)
    tl.store(out_ptr + _AT_ACCEPTED, tl.maximum(emits - 1, 0), mask=there)
    tl.store(out_ptr + _AT_EMITTED, emits, mask=there)


@triton.jit
def count_kernel(
    result_ptr,
    plain_ptr,
    listed_ptr,
    num_listed_ptr,
    bias_ptr,
    counts_ptr,
    marks_ptr,
    penalties_ptr,
    min_tokens_ptr,
    list_width,
    plain_words,
    result_width,
    LANES: tl.constexpr,
):
    """What a slot emitted counts in the lists that shape its logits; a program a slot."""
    slot = tl.program_id(0).to(tl.int64)
    row_ptr = result_ptr + slot * result_width
    emitted = tl.load(row_ptr + _AT_EMITTED)
    if emitted > 0:
        left = tl.load(min_tokens_ptr + slot)
        tl.store(min_tokens_ptr + slot, tl.maximum(left - emitted, 0))
        used = tl.load(num_listed_ptr + slot)
        if _has_penalties(penalties_ptr + 3 * slot):
            for i in range(emitted):
                token = tl.load(row_ptr + _AT_TOKENS + i)
                at = slot * list_width
                used = _count_token(
                    plain_ptr + slot * plain_words, listed_ptr + at, bias_ptr + at,
                    counts_ptr + at, marks_ptr + at, token, used, LANES,
                )  # fmt: skip
            tl.store(num_listed_ptr + slot, used)


@triton.jit
def _has_penalties(penalties_ptr):
    costs = tl.abs(tl.load(penalties_ptr + 1)) + tl.abs(tl.load(penalties_ptr + 2))
    return (tl.load(penalties_ptr) != 1.0) | (costs != 0.0)


@triton.jit
def _count_token(
    plain_ptr, listed_ptr, bias_ptr, counts_ptr, marks_ptr, token, used, LANES: tl.constexpr
):
    """One more of `token` in the output; returns the length of the list."""
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
    tl.debug_barrier()  # the next token looks through the list
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
    """Move the slots of `state` on. `decision` None: no logits were wanted. `broken` and
    `next_draft_kv` int32 [S] are those of the draft's pass; `shaped`: some row shapes its logits.
    `result` int32 [S, fields, then the most tokens that a row emits]. Raises ValueError naming the
    argument that does not fit."""
    slots = len(state.num_tokens)
    if result.dim() != 2 or result.shape[0] != slots or result.shape[1] <= NUM_FIELDS:
        raise ValueError(f"result: {list(result.shape)}; give [{slots}, more than {NUM_FIELDS}]")
    accepted = (None,) * 3 if decision is None else decision
    advance_kernel[(triton.cdiv(slots, _SLOTS),)](
        state.asked,
        layout.states,
        layout.num_drafted,
        broken,
        next_draft_kv,
        *accepted,
        state.tokens,
        state.num_tokens,
        state.kv_len,
        state.draft_kv_len,
        state.failed,
        result,
        slots,
        state.tokens.shape[1],
        result.shape[1],
        DECIDED=decision is not None,
        SLOTS=_SLOTS,
        num_warps=_NUM_WARPS,
        num_stages=1,
    )
    if shaped and decision is not None:
        count_kernel[(slots,)](
            result,
            *state.shaping,
            state.listed.shape[1],
            state.plain.shape[1],
            result.shape[1],
            LANES=_LANES,
            num_warps=_NUM_WARPS,
            num_stages=1,
        )


def cases() -> list[KernelCase]:
    verdict = dict.fromkeys(("accepted_ptr", "next_tokens_ptr", "finite_ptr"))
    moved = {
        "decided": {"DECIDED": True, "SLOTS": _SLOTS},
        "no logits": {"DECIDED": False, "SLOTS": _SLOTS, **verdict},
    }
    found = [
        case_of("slots_advance", config, advance_kernel, made, LIMITS, num_warps=_NUM_WARPS)
        for config, made in moved.items()
    ]
    types = {"bias_ptr": "*fp32", "penalties_ptr": "*fp32"}
    entries, config = {"LANES": _LANES}, f"{_LANES} entries"
    counted = case_of(
        "slots_count", config, count_kernel, entries, LIMITS, num_warps=_NUM_WARPS, types=types
    )
    return [*found, counted]
