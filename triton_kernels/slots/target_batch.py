"""The target's pass of a step, laid out on the device from true positions.

While an earlier step is running, a plan has only upper bounds. The kernel here computes how many
tokens each row really has, where their K and V go, and which logits are needed. Each program writes
some of the tokens, and computes for itself which rows they belong to.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from triton_kernels.build.jit import jit
from triton_kernels.sampling import inputs as rows_module
from triton_kernels.slots.state import DRAFTING, NEW_TOKENS, WANTS, SlotState

IDLE = tl.constexpr(0)  # no row, failed, or at its end
RUNS = tl.constexpr(1)
MISFIT = tl.constexpr(2)  # the plan does not fit the sequence: nothing is computed
GREEDY = tl.constexpr(rows_module.GREEDY)
LANES = 128
NUM_WARPS = 4


class TargetLayout(NamedTuple):
    """A pass of S slots with up to T tokens and up to N rows of logits. Tokens of padding are 0
    with KV slot -1; rows of padding belong to the last slot."""

    tokens: Tensor  # int32 [T]
    positions: Tensor  # int32 [T]
    kv_slots: Tensor  # int32 [T]
    query_starts: Tensor  # int32 [S + 1]
    contexts: Tensor  # int32 [S]
    logit_tokens: Tensor  # int32 [N]: index of the token, below T
    logit_slots: Tensor  # int32 [N]: slot of the row
    logit_depths: Tensor  # int32 [N]: number of drafts before the row
    logit_starts: Tensor  # int32 [S]: first row of logits, or 0
    states: Tensor  # int32 [S]: IDLE, RUNS or MISFIT
    num_drafted: Tensor  # int32 [S]
    modes: Tensor  # int32 [S]: GREEDY for slots without logits
    noise_positions: Tensor  # int64 [S]: number of known tokens

    @classmethod
    def allocate(
        cls, slots: int, max_tokens: int, max_logits: int, device: torch.device | str
    ) -> TargetLayout:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            *(zeros(max_tokens) for _ in range(3)),
            zeros(slots + 1),
            zeros(slots),
            *(zeros(max_logits) for _ in range(3)),
            *(zeros(slots) for _ in range(4)),
            zeros(slots, dtype=torch.int64),
        )


@jit
def owners_of(ends, items, BLOCK: tl.constexpr):
    """Return the slot of each of `items` [LANES]: the number of `ends` [BLOCK], ascending, that are
    not above it; BLOCK - 1 for items after the last slot. By bisection."""
    low = items * 0
    for i in tl.static_range(1, 32):
        if (BLOCK >> i) > 0:
            ends_before = tl.gather(ends, low + (BLOCK >> i) - 1, 0) <= items
            low += tl.where(ends_before, BLOCK >> i, 0)
    return low


@jit
def store_tokens(
    state, layout, lanes, owners, positions, valid, token_width, block_width, max_tokens,
    max_token, PAGE: tl.constexpr,
):  # fmt: skip
    """Store ids, positions and KV slots of flat tokens; tokens not `valid` are padding."""
    owners = owners.to(tl.int64)
    token = tl.load(state.tokens + owners * token_width + positions, mask=valid, other=0)
    block = tl.load(state.blocks + owners * block_width + positions // PAGE, mask=valid, other=0)
    kv_slot = tl.where(valid, block * PAGE + positions % PAGE, -1)
    inside = lanes < max_tokens
    tl.store(layout.tokens + lanes, tl.minimum(token, max_token), mask=inside)
    tl.store(layout.positions + lanes, tl.where(valid, positions, 0), mask=inside)
    tl.store(layout.kv_slots + lanes, kv_slot, mask=inside)


@jit(do_not_specialize=["max_tokens", "max_logits", "max_token"])
def target_batch_kernel(
    state, depths_ptr, layout, num_slots, token_width, block_width, max_tokens, max_logits,
    max_token, BLOCK_SLOTS: tl.constexpr, PAGE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    slots = tl.arange(0, BLOCK_SLOTS)
    in_range = slots < num_slots
    new_tokens = tl.load(state.work + NEW_TOKENS * num_slots + slots, mask=in_range, other=0)
    wants = tl.load(state.work + WANTS * num_slots + slots, mask=in_range, other=0) != 0
    drafting = tl.load(state.work + DRAFTING * num_slots + slots, mask=in_range, other=0) != 0
    known = tl.load(state.num_tokens + slots, mask=in_range, other=0)
    kv = tl.load(state.kv_len + slots, mask=in_range, other=0)
    total = tl.load(state.max_total + slots, mask=in_range, other=0)
    failed = tl.load(state.failed + slots, mask=in_range, other=0) != 0
    drafted = tl.load(depths_ptr + slots, mask=in_range & drafting, other=0)
    idle = (new_tokens == 0) | failed | ((known >= total) & wants)
    kv_after = kv + new_tokens
    runs = (idle == 0) & tl.where(wants, kv_after == known, kv_after <= known)
    drafted = tl.where(runs, drafted, 0)
    queries = tl.where(runs, new_tokens + drafted, 0)
    num_logits = tl.where(runs & wants, 1 + drafted, 0)
    ends, logit_ends = tl.cumsum(queries, 0), tl.cumsum(num_logits, 0)
    if tl.program_id(0) == 0:
        tl.store(layout.query_starts + slots, ends - queries, mask=in_range)
        tl.store(layout.query_starts + num_slots, tl.sum(queries, 0))
        tl.store(layout.contexts + slots, tl.where(queries > 0, kv + queries, 0), mask=in_range)
        first_logits = tl.where(num_logits > 0, logit_ends - num_logits, 0)
        tl.store(layout.logit_starts + slots, first_logits, mask=in_range)
        phase = tl.where(runs, RUNS, tl.where(idle, IDLE, MISFIT))
        tl.store(layout.states + slots, phase, mask=in_range)
        tl.store(layout.num_drafted + slots, drafted, mask=in_range)
        mode = tl.load(state.modes + slots, mask=in_range, other=GREEDY)
        tl.store(layout.modes + slots, tl.where(num_logits > 0, mode, GREEDY), mask=in_range)
        tl.store(layout.noise_positions + slots, known.to(tl.int64), mask=in_range)

    lanes = tl.program_id(0) * LANES + tl.arange(0, LANES)
    owners = owners_of(ends, lanes, BLOCK_SLOTS)
    positions = lanes + tl.gather(kv - ends + queries, owners, 0)
    valid = lanes < tl.sum(queries, 0)
    store_tokens(
        state, layout, lanes, owners, positions, valid, token_width, block_width, max_tokens,
        max_token, PAGE,
    )  # fmt: skip
    owners = owners_of(logit_ends, lanes, BLOCK_SLOTS)
    valid = lanes < tl.sum(num_logits, 0)
    depths = lanes - tl.gather(logit_ends - num_logits, owners, 0)
    token = tl.gather(ends - num_logits, owners, 0) + depths
    inside = lanes < max_logits
    tl.store(layout.logit_tokens + lanes, tl.where(valid, token, 0), mask=inside)
    tl.store(layout.logit_slots + lanes, tl.where(valid, owners, num_slots - 1), mask=inside)
    tl.store(layout.logit_depths + lanes, tl.where(valid, depths, 0), mask=inside)


def make_target_batch(
    state: SlotState, depths: Tensor, layout: TargetLayout, *, block_size: int, max_token: int
) -> None:
    """Fill `layout` for the work in `state.work`. Token ids are clamped to `max_token`.
    `depths` int32 [S] counts the drafts after the known tokens; it is read only in drafting
    steps."""
    slots = len(state.num_tokens)
    if depths.dtype != torch.int32 or tuple(depths.shape) != (slots,):
        raise ValueError(f"depths: {depths.dtype} {list(depths.shape)}; give int32 {[slots]}")
    if tuple(layout.query_starts.shape) != (slots + 1,):
        raise ValueError(f"layout: allocate it for {slots} slots")
    longest = max(len(layout.tokens), len(layout.logit_tokens))
    target_batch_kernel[(triton.cdiv(longest, LANES),)](
        state, depths, layout, slots, state.tokens.shape[1], state.blocks.shape[1],
        len(layout.tokens), len(layout.logit_tokens), max_token,
        BLOCK_SLOTS=max(16, triton.next_power_of_2(slots)), PAGE=block_size, LANES=LANES,
        num_warps=NUM_WARPS, num_stages=1, enable_fp_fusion=True,
    )  # fmt: skip
