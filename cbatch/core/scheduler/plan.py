"""Messages between scheduler and executor: the plan of a step, and its result.

A plan is a batch of ragged rows. Row i computes `query_lens[i]` tokens of the sequence in slot
`slots[i]`: a chunk of a prompt, or the last known token and `num_drafts[i]` draft tokens. Any mix
of rows is one forward pass. Draft tokens are not in the plan: the executor runs the drafters, which
may draft fewer tokens than planned.
"""

from __future__ import annotations

import enum

import msgspec
import numpy as np

from cbatch.core.request.logprobs import TokenLogprobs
from cbatch.core.request.request import SamplingParams

_NOTHING = np.zeros((3, 0), dtype=np.int32)


class RowStatus(enum.IntEnum):
    """Outcome of one row of a step, as stored in `StepResult.status` (uint8)."""

    OK = 0
    NON_FINITE = 1  # NaN or infinite logits: the request ends with an error, its blocks are zeroed
    DRAFT_NON_FINITE = 2  # the draft model's logits after the `num_drafted` drafts were not finite
    NO_TOKEN = 4  # the request's constraints allow no token: it ends with an error


class NewSequence(msgspec.Struct, frozen=True):
    """A sequence that enters a slot. The executor discards the slot's previous state."""

    slot: int
    generation: int  # detects a stale result for a slot that was reused
    request_id: str
    seed: int
    choice: int
    params: SamplingParams
    stop_ids: tuple[int, ...]  # EOS and stop ids that end it (banned before min_tokens)
    tokens: np.ndarray  # int32 [n]: prompt, and the output so far if it was preempted
    num_prompt_tokens: int
    max_total_tokens: int  # prompt + max_tokens, cut to the context
    kv_len_tokens: int  # positions already in KV (prefix hit), always < n
    draft_kv_len_tokens: int  # positions already in the draft model's KV, <= kv_len_tokens
    blocks: np.ndarray  # int32: block ids by absolute block index
    state_page: int | None = None  # with the state at `kv_len_tokens`; None: the zero state

    @property
    def computes_prompt(self) -> bool:
        """True if log probabilities of the prompt are requested and not reported yet."""
        return self.params.wants_prompt(self.choice) and len(self.tokens) == self.num_prompt_tokens


class Deltas(msgspec.Struct, frozen=True):
    """Changes since the previous plan, to be applied in the order of the fields.

    With `reset` the executor first discards every slot: the other fields are the whole state.
    `zeroed_blocks` may have non-finite values, and must be zeroed before this step uses them.
    """

    reset: bool
    released: np.ndarray  # int32 slots
    zeroed_blocks: np.ndarray  # int32 block ids
    new_sequences: tuple[NewSequence, ...]
    append_slots: np.ndarray  # int32 \
    append_indices: np.ndarray  # int32  > by appended block; may replace the block at an index
    append_blocks: np.ndarray  # int32 /
    # int32 [3, pages]: slot, block boundary, and the page for the state there. Without recurrent
    # layers there are none.
    state_pages: np.ndarray = _NOTHING


_NONE = np.zeros(0, dtype=np.int32)
NO_DELTAS = Deltas(False, _NONE, _NONE, (), _NONE, _NONE, _NONE)


class PendingDeltas:
    """Changes since the previous plan. The first plan is a full snapshot."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all changes: the next plan is a full snapshot."""
        self._reset = True
        self.released: list[int] = []  # slots
        self.new_sequences: list[NewSequence] = []
        self._appended = _NOTHING  # slots, indices, blocks
        self.state_pages: list[np.ndarray] = []  # int32 [3, N]: slots, boundaries, pages

    def append(self, slots: np.ndarray, indices: np.ndarray, blocks: np.ndarray) -> None:
        """Note the blocks that a plan appends, all at once."""
        self._appended = np.empty((3, len(slots)), dtype=np.int32)
        self._appended[0], self._appended[1], self._appended[2] = slots, indices, blocks

    def take(self, to_zero: np.ndarray) -> Deltas:
        """Return the changes since the last call; `to_zero` are the blocks to zero."""
        appended, pages = self._appended, self.state_pages
        no_blocks = appended is _NOTHING and not (pages or len(to_zero))
        if no_blocks and not (self.new_sequences or self.released or self._reset):
            return NO_DELTAS
        self._appended = _NOTHING
        deltas = Deltas(
            reset=self._reset,
            released=np.asarray(self.released, dtype=np.int32) if self.released else _NONE,
            zeroed_blocks=to_zero,
            new_sequences=tuple(self.new_sequences),
            append_slots=appended[0],
            append_indices=appended[1],
            append_blocks=appended[2],
            state_pages=np.concatenate(pages, axis=1) if pages else _NOTHING,
        )
        self._reset = False
        self.released, self.new_sequences, self.state_pages = [], [], []
        return deltas


class StepPlan(msgspec.Struct, frozen=True):
    """One step. Arrays are read-only by convention and may be shared between plans.

    In a row with `num_drafts` > 0 the draft model first ingests the `catch_up` tokens that its KV
    lacks. It lacks tokens after k = 0, a prefix hit, a preemption or a full acceptance. A row with
    `catch_up` > 0 and no drafts is a slice of a longer catch-up: the draft model ingests exactly
    the next `catch_up` tokens and drafts nothing. Catch-up is planned for rows whose preferred
    drafter is the draft model. In other rows the executor decides when the draft model catches up.

    While an earlier plan is in flight the numbers are upper bounds. The executor knows the true
    positions, and cuts drafts so that a sequence never exceeds `max_total_tokens`.
    """

    step_id: int
    slots: np.ndarray  # int32 [R]
    generations: np.ndarray  # int32 [R]
    query_lens: np.ndarray  # int32 [R], a chunk or 1 + num_drafts
    num_drafts: np.ndarray  # int32 [R]
    catch_up: np.ndarray  # int32 [R], tokens that the drafter ingests, without the last known token
    wants_logits: np.ndarray  # bool [R]: False for a chunk that is not the last of its prompt
    deltas: Deltas
    keep_states: bool = True  # False: no draft head will soon read the target's hidden states

    @property
    def num_rows(self) -> int:
        return len(self.slots)


class StepResult(msgspec.Struct, frozen=True):
    """Result of a step, made by the executor.

    Row i emitted `tokens[row_splits[i] : row_splits[i + 1]]`: its `num_accepted[i]` accepted drafts
    and one more token. It emitted nothing if it wanted no logits or its status is an error.

    `draft_kv_lens` is the valid length of the draft model's KV after the step. None: the draft
    model drafted all `num_drafted` drafts, and caught up as planned.

    `expected_accepted` is the evidence from which acceptance is estimated (see acceptance.py).
    None: `num_accepted`, as it is for greedy and coupled rows. With rejection sampling it is the
    sum of 1 - TV(p, q) over positions up to and including the first rejection.

    `logprobs` has an entry for each row whose request wants log probabilities of its output or (at
    earlier positions) of its prompt.
    """

    step_id: int
    generations: np.ndarray  # int32 [R], copied from the plan
    tokens: np.ndarray  # int32 [sum of emitted]
    row_splits: np.ndarray  # int32 [R + 1]
    num_drafted: np.ndarray  # int32 [R], <= planned
    num_accepted: np.ndarray  # int32 [R], <= num_drafted
    status: np.ndarray  # uint8 [R], RowStatus
    draft_s: float = 0.0  # measured seconds, for the step-cost model
    target_s: float = 0.0
    draft_kv_lens: np.ndarray | None = None  # int32 [R]
    expected_accepted: np.ndarray | None = None  # float32 [R], finite
    logprobs: tuple[TokenLogprobs, ...] = ()
