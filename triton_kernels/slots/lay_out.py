"""The target's pass of a step, laid out on the device from true positions.

What a plan asks are bounds while an earlier step is under way. Here it is learnt how many tokens a
row really computes, where its K and V go and which logits it needs. A program a slot; each counts
for itself where its tokens begin.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_kernels.case import Case
from triton_kernels.sample import rows as rows_module
from triton_kernels.slots.state import Asked, SlotState, case_of

IDLE = tl.constexpr(0)  # no row, failed, or at its end
RUNS = tl.constexpr(1)
MISFIT = tl.constexpr(2)  # the plan does not fit the sequence: nothing is computed
GREEDY = tl.constexpr(rows_module.GREEDY)
FRESH = tl.constexpr(Asked().fresh)
WANTS = tl.constexpr(Asked().wants_logits)
DRAFTING = tl.constexpr(Asked().drafting)
LANES = 128
NUM_WARPS = 4


class TargetLayout(NamedTuple):
    """One pass over up to T tokens with up to N rows of logits, of S slots. Tokens of padding are
    0 with KV slot -1; rows of padding belong to the last slot."""

    tokens: Tensor  # int32 [T]
    positions: Tensor  # int32 [T]
    kv_slots: Tensor  # int32 [T]
    query_starts: Tensor  # int32 [S + 1]
    contexts: Tensor  # int32 [S]
    logit_tokens: Tensor  # int32 [N]: which of the T tokens
    logit_slots: Tensor  # int32 [N]: whose they are
    logit_depths: Tensor  # int32 [N]: drafts before them
    logit_starts: Tensor  # int32 [S]: first row of logits; 0 without
    states: Tensor  # int32 [S]: IDLE, RUNS or MISFIT
    num_drafted: Tensor  # int32 [S]
    modes: Tensor  # int32 [S]: GREEDY where no logits are wanted
    noise_positions: Tensor  # int64 [S]: number of known tokens

    @classmethod
    def allocate(
        cls, slots: int, most_tokens: int, most_logits: int, device: torch.device | str
    ) -> TargetLayout:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            *(zeros(most_tokens) for _ in range(3)),
            zeros(slots + 1),
            zeros(slots),
            *(zeros(most_logits) for _ in range(3)),
            *(zeros(slots) for _ in range(4)),
            zeros(slots, dtype=torch.int64),
        )


@triton.jit
def value_of(values, mine):
    """The value of one slot, from those of all."""
    return tl.sum(tl.where(tl.arange(0, values.shape[0]) == mine, values, 0), 0)


@triton.jit
def store_tokens(
    tokens_ptr, blocks_ptr, out_tokens_ptr, out_positions_ptr, out_slots_ptr,
    position, count, first, most, most_token, PAGE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Ids, positions and KV slots of `count` tokens of a slot, to flat rows from `first` on."""
    for start in range(0, count, LANES):
        lane = start + tl.arange(0, LANES)
        held = (lane < count) & (first + lane < most)
        at = position + lane
        token = tl.load(tokens_ptr + at, mask=held, other=0)
        block = tl.load(blocks_ptr + at // PAGE, mask=held, other=0)
        tl.store(out_tokens_ptr + first + lane, tl.minimum(token, most_token), mask=held)
        tl.store(out_positions_ptr + first + lane, at, mask=held)
        tl.store(out_slots_ptr + first + lane, block * PAGE + at % PAGE, mask=held)


@triton.jit
def store_padding(
    out_tokens_ptr, out_positions_ptr, out_slots_ptr, first, most, LANES: tl.constexpr
):
    for start in range(first, most, LANES):
        lane = start + tl.arange(0, LANES)
        tl.store(out_tokens_ptr + lane, lane * 0, mask=lane < most)
        tl.store(out_positions_ptr + lane, lane * 0, mask=lane < most)
        tl.store(out_slots_ptr + lane, lane * 0 - 1, mask=lane < most)


@triton.jit
def lay_out_kernel(
    asked_ptr,
    num_tokens_ptr,
    kv_len_ptr,
    max_total_ptr,
    failed_ptr,
    slot_modes_ptr,
    slot_tokens_ptr,
    blocks_ptr,
    depths_ptr,
    broken_ptr,
    tokens_ptr,
    positions_ptr,
    kv_slots_ptr,
    query_starts_ptr,
    contexts_ptr,
    logit_tokens_ptr,
    logit_slots_ptr,
    logit_depths_ptr,
    logit_starts_ptr,
    states_ptr,
    num_drafted_ptr,
    modes_ptr,
    noise_positions_ptr,
    num_slots,
    token_width,
    block_width,
    most_tokens,
    most_logits,
    most_token,
    BLOCK_SLOTS: tl.constexpr,
    PAGE: tl.constexpr,
    LANES: tl.constexpr,
):
    mine = tl.program_id(0)
    every = tl.arange(0, BLOCK_SLOTS)
    some = every < num_slots
    fresh = tl.load(asked_ptr + FRESH * num_slots + every, mask=some, other=0)
    wants = tl.load(asked_ptr + WANTS * num_slots + every, mask=some, other=0) != 0
    drafting = tl.load(asked_ptr + DRAFTING * num_slots + every, mask=some, other=0) != 0
    known = tl.load(num_tokens_ptr + every, mask=some, other=0)
    kv = tl.load(kv_len_ptr + every, mask=some, other=0)
    total = tl.load(max_total_ptr + every, mask=some, other=0)
    failed = tl.load(failed_ptr + every, mask=some, other=0) != 0
    drafted = tl.load(depths_ptr + every, mask=some & drafting, other=0)
    broken = tl.load(broken_ptr + every, mask=some & drafting, other=0) != 0
    idle = (fresh == 0) | failed | ((known >= total) & wants)
    reached = kv + fresh
    fits = tl.where(wants, reached == known, reached <= known)
    runs = (idle == 0) & fits
    drafted = tl.where(runs & (broken == 0), drafted, 0)
    queries = tl.where(runs, fresh + drafted, 0)
    wanted = tl.where(runs & wants, 1 + drafted, 0)
    ends, logit_ends = tl.cumsum(queries, 0), tl.cumsum(wanted, 0)

    if mine == num_slots:  # one more program for what is left over
        last, last_logits = tl.sum(queries, 0), tl.sum(wanted, 0)
        tl.store(query_starts_ptr + num_slots, last)
        store_padding(tokens_ptr, positions_ptr, kv_slots_ptr, last, most_tokens, LANES)
        for start in range(last_logits, most_logits, LANES):
            lane = start + tl.arange(0, LANES)
            tl.store(logit_tokens_ptr + lane, lane * 0, mask=lane < most_logits)
            tl.store(logit_slots_ptr + lane, lane * 0 + num_slots - 1, mask=lane < most_logits)
            tl.store(logit_depths_ptr + lane, lane * 0, mask=lane < most_logits)
    else:
        query, want = value_of(queries, mine), value_of(wanted, mine)
        first, first_logits = value_of(ends, mine) - query, value_of(logit_ends, mine) - want
        position = value_of(kv, mine)
        state = tl.where(value_of(idle.to(tl.int32), mine) > 0, IDLE, MISFIT)
        state = tl.where(value_of(runs.to(tl.int32), mine) > 0, RUNS, state)
        tl.store(query_starts_ptr + mine, first)
        tl.store(contexts_ptr + mine, tl.where(query > 0, position + query, 0))
        tl.store(logit_starts_ptr + mine, tl.where(want > 0, first_logits, 0))
        tl.store(states_ptr + mine, state)
        tl.store(num_drafted_ptr + mine, value_of(drafted, mine))
        mode = tl.load(slot_modes_ptr + mine)
        tl.store(modes_ptr + mine, tl.where(want > 0, mode, GREEDY))
        tl.store(noise_positions_ptr + mine, value_of(known, mine).to(tl.int64))
        store_tokens(
            slot_tokens_ptr + mine.to(tl.int64) * token_width,
            blocks_ptr + mine.to(tl.int64) * block_width,
            tokens_ptr, positions_ptr, kv_slots_ptr,
            position, query, first, most_tokens, most_token, PAGE, LANES,
        )  # fmt: skip
        for start in range(0, want, LANES):
            lane = start + tl.arange(0, LANES)
            held = (lane < want) & (first_logits + lane < most_logits)
            at = first_logits + lane
            tl.store(logit_tokens_ptr + at, first + query - want + lane, mask=held)
            tl.store(logit_slots_ptr + at, lane * 0 + mine, mask=held)
            tl.store(logit_depths_ptr + at, lane, mask=held)


def lay_out(
    state: SlotState,
    depths: Tensor,
    broken: Tensor,
    layout: TargetLayout,
    *,
    block_size: int,
    most_token: int,
) -> None:
    """Fill `layout` for what `state.asked` asks, token ids cut to `most_token`. `depths` int32 [S]:
    drafts that lie behind the known tokens, and `broken` int32 [S]: 1 where they do not count;
    read only in a step that drafts."""
    slots = len(state.num_tokens)
    for name, tensor in (("depths", depths), ("broken", broken)):
        if tensor.dtype != torch.int32 or tuple(tensor.shape) != (slots,):
            raise ValueError(f"{name}: {tensor.dtype} {list(tensor.shape)}; give int32 {[slots]}")
    if tuple(layout.query_starts.shape) != (slots + 1,):
        raise ValueError(f"layout: allocate it for {slots} slots")
    lay_out_kernel[(slots + 1,)](
        state.asked,
        state.num_tokens,
        state.kv_len,
        state.max_total,
        state.failed,
        state.modes,
        state.tokens,
        state.blocks,
        depths,
        broken,
        *layout,
        slots,
        state.tokens.shape[1],
        state.blocks.shape[1],
        len(layout.tokens),
        len(layout.logit_tokens),
        most_token,
        BLOCK_SLOTS=max(16, triton.next_power_of_2(slots)),
        PAGE=block_size,
        LANES=LANES,
        num_warps=NUM_WARPS,
        num_stages=1,
    )


def cases() -> list[Case]:
    constexprs = {"BLOCK_SLOTS": 256, "PAGE": 16, "LANES": LANES}
    types = {"noise_positions_ptr": "*i64"}
    return [case_of("slots_lay_out", lay_out_kernel, constexprs, types=types, config="256 slots")]
