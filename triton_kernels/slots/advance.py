"""After the verdict: slots move on by what they emitted, and a step's result is packed."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from triton_kernels.case import Case
from triton_kernels.sample.rows import Shaping
from triton_kernels.slots.lay_out import MISFIT, RUNS, TargetLayout
from triton_kernels.slots.state import Asked, SlotState, case_of
from triton_kernels.verify_logits import Decision

# Fields of a slot's row of the result; behind them are the tokens that it emitted.
STATUS, DRAFTED, ACCEPTED, EMITTED, DRAFT_KV_LEN, NUM_FIELDS = range(6)
# Statuses.
OK, NON_FINITE, DRAFT_NON_FINITE, DOES_NOT_FIT = range(4)

_FRESH = tl.constexpr(Asked().fresh)
_WANTS = tl.constexpr(Asked().wants_logits)
_DRAFTING = tl.constexpr(Asked().drafting)
_LANES = 256
_NUM_WARPS = 1


@triton.jit
def _emitted(tokens_ptr, known, accepted, next_token, i):
    """Token i of those that a slot emits: accepted drafts lie in place, then the next one."""
    draft = tl.load(tokens_ptr + known + i, mask=i < accepted, other=0)
    return tl.where(i < accepted, draft, next_token)


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
    plain_ptr,
    listed_ptr,
    num_listed_ptr,
    bias_ptr,
    counts_ptr,
    marks_ptr,
    penalties_ptr,
    min_tokens_ptr,
    result_ptr,
    num_slots,
    token_width,
    list_width,
    plain_words,
    result_width,
    DECIDED: tl.constexpr,
    SHAPED: tl.constexpr,
    LANES: tl.constexpr,
):
    mine = tl.program_id(0)
    state = tl.load(states_ptr + mine)
    runs = state == RUNS
    wants = tl.load(asked_ptr + _WANTS * num_slots + mine) != 0
    drafting = tl.load(asked_ptr + _DRAFTING * num_slots + mine) != 0
    drafted = tl.load(num_drafted_ptr + mine)
    known, kv = tl.load(num_tokens_ptr + mine), tl.load(kv_len_ptr + mine)
    failed = tl.load(failed_ptr + mine) != 0
    slot_ptr = tokens_ptr + mine.to(tl.int64) * token_width
    accepted, emits, next_token = known * 0, known * 0, known * 0
    if DECIDED:
        decides = runs & wants
        accepted = tl.load(accepted_ptr + mine, mask=decides, other=0)
        next_token = tl.load(next_tokens_ptr + mine, mask=decides, other=0)
        finite = tl.load(finite_ptr + mine, mask=decides, other=1) != 0
        emits = tl.where(decides & finite, accepted + 1, 0)
        failed = failed | (finite == 0)
        tl.store(slot_ptr + known + accepted, next_token, mask=emits > 0)
        tl.store(num_tokens_ptr + mine, known + emits)
        tl.store(failed_ptr + mine, failed.to(tl.int32))
    kv += tl.where(runs, tl.load(asked_ptr + _FRESH * num_slots + mine) + accepted, 0)
    tl.store(kv_len_ptr + mine, kv)
    broken = tl.load(broken_ptr + mine, mask=drafting, other=0) != 0
    draft_kv = tl.load(draft_kv_len_ptr + mine)
    draft_kv = tl.where(drafting, tl.load(next_draft_kv_ptr + mine), draft_kv)
    draft_kv = tl.minimum(tl.where(broken, 0, draft_kv), kv)
    tl.store(draft_kv_len_ptr + mine, draft_kv)

    out_ptr = result_ptr + mine * result_width
    status = tl.where(broken, 2, 0)
    status = tl.where(failed, 1, status)
    tl.store(out_ptr, tl.where(state == MISFIT, 3, status))
    tl.store(out_ptr + 1, drafted)
    tl.store(out_ptr + 2, tl.maximum(emits - 1, 0))
    tl.store(out_ptr + 3, emits)
    tl.store(out_ptr + 4, draft_kv)
    if DECIDED:
        for i in range(emits):
            token = _emitted(slot_ptr, known, accepted, next_token, i)
            tl.store(out_ptr + 5 + i, token)
    if SHAPED:
        left = tl.load(min_tokens_ptr + mine)
        tl.store(min_tokens_ptr + mine, tl.maximum(left - emits, 0))
        repetition = tl.load(penalties_ptr + 3 * mine)
        others = tl.load(penalties_ptr + 3 * mine + 1) != 0.0
        others = others | (tl.load(penalties_ptr + 3 * mine + 2) != 0.0)
        if others | (repetition != 1.0):
            at = mine.to(tl.int64) * list_width
            used = tl.load(num_listed_ptr + mine)
            for i in range(emits):
                token = _emitted(slot_ptr, known, accepted, next_token, i)
                used = _count_token(
                    plain_ptr + mine.to(tl.int64) * plain_words,
                    listed_ptr + at, bias_ptr + at, counts_ptr + at, marks_ptr + at,
                    token, used, LANES,
                )  # fmt: skip
            tl.store(num_listed_ptr + mine, used)


def advance(
    state: SlotState,
    layout: TargetLayout,
    decision: Decision | None,
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
    if result.dim() != 2 or result.shape[0] != slots or result.shape[1] <= NUM_FIELDS - 1:
        raise ValueError(f"result: {list(result.shape)}; give [{slots}, more than {NUM_FIELDS}]")
    lists: Shaping | tuple[None, ...] = state.shaping
    if not shaped:
        lists = (None,) * len(Shaping._fields)
    accepted = (None,) * 3 if decision is None else decision
    advance_kernel[(slots,)](
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
        *lists,
        result,
        slots,
        state.tokens.shape[1],
        state.listed.shape[1],
        state.plain.shape[1],
        result.shape[1],
        DECIDED=decision is not None,
        SHAPED=shaped,
        LANES=_LANES,
        num_warps=_NUM_WARPS,
        num_stages=1,
    )


def cases() -> list[Case]:
    found = []
    verdict = ("accepted_ptr", "next_tokens_ptr", "finite_ptr")
    shaping = tuple(f"{name}_ptr" for name in Shaping._fields)
    for decided, shaped in ((True, True), (True, False), (False, False)):
        constexprs = {"DECIDED": decided, "SHAPED": shaped, "LANES": _LANES}
        constexprs |= {} if decided else dict.fromkeys(verdict)
        constexprs |= {} if shaped else dict.fromkeys(shaping)
        types = {"bias_ptr": "*fp32", "penalties_ptr": "*fp32"}
        config = f"{'shaped' if shaped else 'plain'}{'' if decided else ', no logits'}"
        found.append(
            case_of(
                "slots_advance",
                advance_kernel,
                constexprs,
                types=types,
                config=config,
                num_warps=_NUM_WARPS,
            )
        )
    return found
