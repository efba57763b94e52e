"""What passes between scheduler and executor: the plan of a step, and its result.

A plan is a batch of ragged rows. Row i computes `query_lens[i]` tokens of the sequence in slot
`slots[i]`: a prefill chunk, or the last known token and `num_drafts[i]` drafted ones. There is no
mode: any mix of rows is one forward pass. Draft tokens are not in the plan; drafters live in the
executor and may return fewer than planned.
"""

from __future__ import annotations

import enum

import msgspec
import numpy as np

from cbatch.core.request.logprobs import TokenLogprobs
from cbatch.core.request.request import SamplingParams


class RowStatus(enum.IntEnum):
    """Outcome of one row of a step, as stored in `StepResult.status` (uint8)."""

    OK = 0
    NON_FINITE = 1  # NaN or infinite logits: the request ends with an error, its blocks are zeroed
    DRAFT_NON_FINITE = 2  # the draft's logits were not, behind `num_drafted` drafts, which count
    NO_TOKEN = 4  # what the request asks for leaves no token to choose: it ends with an error


class NewSequence(msgspec.Struct, frozen=True):
    """A sequence enters a slot. The executor forgets whatever the slot held before."""

    slot: int
    generation: int  # exposes a stale result for a slot that was reused
    request_id: str
    seed: int
    choice: int
    params: SamplingParams
    stop_ids: tuple[int, ...]  # EOS and stop ids that end it (banned before min_tokens)
    tokens: np.ndarray  # int32 [n]: prompt, and the output so far if it was preempted
    num_prompt_tokens: int
    max_total_tokens: int  # prompt + max_tokens, cut to the context
    kv_len_tokens: int  # positions already in KV (prefix hit), always < n
    draft_kv_len_tokens: int  # the same for the draft's KV, <= kv_len_tokens
    blocks: np.ndarray  # int32: block ids by absolute block index

    @property
    def computes_prompt(self) -> bool:
        """Whether the log probabilities of the prompt are wanted, and not reported yet."""
        return self.params.wants_prompt(self.choice) and len(self.tokens) == self.num_prompt_tokens


class Deltas(msgspec.Struct, frozen=True):
    """What changed since the previous plan. Apply in the order of the fields.

    `reset` is the full-snapshot form: forget every slot; what follows is the whole state.
    `zeroed_blocks` held non-finite values and must be zeroed before this step touches them.
    """

    reset: bool
    released: np.ndarray  # int32 slots
    zeroed_blocks: np.ndarray  # int32 block ids
    new_sequences: tuple[NewSequence, ...]
    append_slots: np.ndarray  # int32 \
    append_indices: np.ndarray  # int32  > one appended block each; an index may be set again
    append_blocks: np.ndarray  # int32 /


class StepPlan(msgspec.Struct, frozen=True):
    """One step. Arrays are read-only by convention and may be shared between plans.

    A row with `num_drafts` > 0 first lets the drafter ingest the `catch_up` tokens it has not seen
    (its KV lags after k = 0, a prefix hit, a preemption or a full acceptance). A row with
    `catch_up` > 0 and no drafts is a slice of a longer catch-up: the drafter ingests exactly the
    next `catch_up` tokens and drafts nothing. Catch-up is planned for rows whose chain begins with
    the draft model; behind other drafters the model makes up for them as it sees fit. With a plan
    still in flight these are bounds: the executor knows the true positions, and clips drafts so
    that a sequence never passes `max_total_tokens`.
    """

    step_id: int
    slots: np.ndarray  # int32 [R]
    generations: np.ndarray  # int32 [R]
    query_lens: np.ndarray  # int32 [R], a chunk or 1 + num_drafts
    num_drafts: np.ndarray  # int32 [R]
    catch_up: np.ndarray  # int32 [R], tokens the drafter ingests beyond the last known one
    wants_logits: np.ndarray  # bool [R]: False for a prefill chunk that is not the last
    deltas: Deltas

    @property
    def num_rows(self) -> int:
        return len(self.slots)


class ShadowEvidence(msgspec.Struct, frozen=True):
    """What drafters that choose with certainty would have scored, on a few rows' latest tokens. It
    is a function of emitted tokens, so k may follow it without changing the law of the output."""

    rows: np.ndarray  # int32 [n], of the plan, ascending
    trials: np.ndarray  # int32 [n], tokens before which the row's drafter had a draft
    hits: np.ndarray  # int32 [n], of these, how many its first draft would have named


class StepResult(msgspec.Struct, frozen=True):
    """Filled by the executor. Row i emitted `tokens[row_splits[i] : row_splits[i + 1]]`: nothing
    where no logits were wanted or the status is an error, else its `num_accepted[i]` accepted
    drafts and one more. `draft_kv_lens` says how far the draft model's KV is valid after the step;
    None: as if it had drafted, and caught up, whatever was planned and drafted. `expected_accepted`
    is what acceptance is estimated from; None: `num_accepted`. It is that number in greedy and in
    coupled rows; where drafts are verified by rejection, the sum of 1 - TV(p, q) over positions up
    to and including the first rejection, and no further (see acceptance.py); in blocks, over the
    same positions, of the chance that one more was accepted, given those before. `shadow` scores
    drafters on tokens that were emitted without drafts. `logprobs` has an entry for each row whose
    request asks for those of its output or (with positions before the output) of its prompt, and no
    others."""

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
    shadow: ShadowEvidence | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
