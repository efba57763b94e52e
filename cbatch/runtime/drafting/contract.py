"""The interface between the executor and drafters."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from cbatch.core.scheduler.plan import Deltas, NewSequence
from cbatch.runtime.input_batch import InputBatch
from cbatch.runtime.model.arrays import I64


class DraftRows(NamedTuple):
    """Rows that need drafts (`num_drafts` >= 1), or a slice of a long catch-up."""

    slots: NDArray[np.integer]
    num_tokens: I64  # known tokens; the first draft gets this position
    num_drafts: I64
    # With drafts: the maximum number of uncomputed tokens, without the last known token, that the
    # plan allows. Without drafts: the exact number of tokens of a long catch-up to compute now.
    catch_up: NDArray[np.integer]


class Proposal(NamedTuple):
    """The drafts of a step: those of row i are `tokens[i, :num_drafted[i]]`.

    `probs` has the distributions that drafts were drawn from: fp32 [sum of num_drafted over rows
    verified by rejection (`table.rejects`), V], row after row. None: every draft was chosen with
    certainty.
    """

    tokens: I64  # [R, max k]
    num_drafted: I64  # [R], <= num_drafts
    probs: Tensor | None
    # [R] whether the drafter's logits became non-finite after these drafts. The drafts still count:
    # dropping them because of a later result would change the output's distribution. The drafter's
    # KV of such a row is invalid.
    non_finite: NDArray[np.bool_]


class StepStates(NamedTuple):
    """Hidden states of the target at the positions that a step made valid. Row i has `lens[i]`
    positions, from `starts[i]` on. `hidden` is fp32 [sum of lens, len(hidden_layers), hidden_size],
    row after row. Rejected drafts are left out; the token after each position is known."""

    slots: NDArray[np.integer]
    starts: I64
    lens: I64
    hidden: Tensor


class Drafter:
    """The interface of a drafter. The executor calls, in the order of a step: `admit` and
    `release`, `propose`, and after the target's pass `read_states` and `truncate`. The default
    methods suit a drafter without state."""

    # The target's layers whose hidden states the drafter reads (see `Model.keep_hidden`).
    hidden_layers: tuple[int, ...] = ()

    def bind(self, table: InputBatch, num_blocks: int) -> None:
        """Set the slots and the number of KV blocks. Called once, before anything else."""
        self.table = table

    def reset(self) -> None:
        """Forget every slot."""

    def zero_blocks(self, block_ids: NDArray[np.int32]) -> None:
        """Zero the drafter's KV in blocks that held non-finite values."""

    def append_blocks(self, deltas: Deltas) -> None:
        """Note the blocks that the deltas append; there must be at least one."""

    def report_progress(self, counter: NDArray[np.int64]) -> None:
        """Report progress of the drafter's own model, as `TorchExecutor.report_progress` does."""

    def admit(self, admission: NewSequence) -> None:
        """Add a sequence in its slot. Its first `draft_kv_len_tokens` are in the drafter's KV."""

    def release(self, slot: int) -> None:
        """Free the state of a slot that is now empty."""

    def propose(self, rows: DraftRows) -> Proposal:
        """Draft for `rows`, up to `num_drafts` tokens each."""
        raise NotImplementedError

    def read_states(self, states: StepStates) -> None:
        """Read the hidden states of a step. Called after steps with `StepPlan.keep_states` or
        drafts, if `hidden_layers` is set."""

    def truncate(self, slots: NDArray[np.integer], kv_len_tokens: I64) -> None:
        """After verification: only `kv_len_tokens[i]` positions of each slot remain valid."""

    def kv_lens(self, slots: NDArray[np.integer]) -> I64 | None:
        """Return the numbers of valid positions in the drafter's KV; None: they follow from the
        plan and the numbers of drafts."""
        return None


class ModelDrafter(Drafter):
    """A drafter whose KV cache has the target's block ids. `kv_len` [slots] counts its valid
    positions; `context_tokens` is its context length."""

    context_tokens: int
    kv_len: I64

    def reset(self) -> None:
        self.kv_len[:] = 0

    def admit(self, admission: NewSequence) -> None:
        self.kv_len[admission.slot] = admission.draft_kv_len_tokens

    def release(self, slot: int) -> None:
        self.kv_len[slot] = 0

    def truncate(self, slots: NDArray[np.integer], kv_len_tokens: I64) -> None:
        self.kv_len[slots] = np.minimum(self.kv_len[slots], kv_len_tokens)
