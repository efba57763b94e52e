"""A request on its way through the scheduler, and what the scheduler says about it."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from cbatch.core.plan import StepPlan, TokenLogprobs
from cbatch.core.pool import ROOT, Node
from cbatch.core.request import FinishReason, Request
from cbatch.core.slots import ONE
from cbatch.core.waiting import Rank


class Sequence(msgspec.Struct, eq=False):
    """An accepted request. Tokens and estimator live in the slot table while it runs, here while it
    waits, so they survive the loss of its slot."""

    request: Request
    rank: Rank
    stop_ids: tuple[int, ...]
    min_total_tokens: int  # a stop id at an earlier position does not end it
    max_total_tokens: int
    tokens: np.ndarray  # int32, known tokens at the last moment it waited
    estimate: tuple[float, float]  # the estimator's N and D at that moment
    slot: int | None = None
    chain_end: Node = ROOT  # in the prefix cache, of its last named block
    chain_blocks: int = 0  # blocks that have been named, promised or ready
    tokens_at_admission: int = 0
    preemptions: int = 0
    doomed: bool = False  # chosen as a victim; leaves once its plan in flight commits

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt)

    @property
    def computes_prompt(self) -> bool:
        """Every position of the prompt is to be computed, whatever the prefix cache holds: its log
        probabilities are wanted. With an output they have been reported."""
        wanted = self.request.params.wants_prompt(self.request.choice)
        return wanted and len(self.tokens) == self.num_prompt_tokens


class Finished(msgspec.Struct, frozen=True):
    """The one end of an accepted request. `output` is every token that counts, int32."""

    request_id: str
    reason: FinishReason
    output: np.ndarray
    message: str | None = None


class Reservation(msgspec.Struct, eq=False):
    """One more block for each of some slots, for a plan."""

    slots: list[int]
    capacity: list[int]  # positions that they could hold before
    blocks: np.ndarray  # intp


class Drafts(msgspec.Struct, frozen=True, eq=False):
    """How many tokens each row drafts, and what follows from it; shared by the steps that draft the
    same."""

    num_drafts: np.ndarray  # int32 [rows]
    query_lens: np.ndarray  # int32 [rows], one more, or a chunk
    total: int
    by_all: bool  # every row drafts

    @classmethod
    def of(cls, num_drafts: np.ndarray) -> Drafts:
        by_all = bool(np.count_nonzero(num_drafts) == len(num_drafts))
        return cls(num_drafts, num_drafts + ONE, int(np.add.reduce(num_drafts)), by_all)


class Flight(msgspec.Struct, eq=False):
    """A plan that has not been committed."""

    plan: StepPlan
    rows: slice | np.ndarray  # selects the plan's slots in the table
    owners: list[Sequence]  # by row
    drafts: Drafts
    plain: bool  # every row decodes one token
    has_chunks: bool  # some rows prefill
    may_end: bool  # some row may reach its last token
    reservation: Reservation | None  # all blocks appended for this plan; None: not known
    void_slots: list[int]  # ended since: their results are dropped
    held_slots: list[int]  # of these, the ones to free when this plan commits


class Commit(msgspec.Struct, frozen=True):
    """What a step added. `finished` also holds endings since the previous commit."""

    step_id: int
    owners: list[Sequence]
    tokens: np.ndarray  # int32, as the executor returned them for these rows
    row_splits: np.ndarray  # int32 [rows + 1] into `tokens`
    counts: np.ndarray  # int32 [rows], how many of a row's tokens count, after every cut
    num_drafted: np.ndarray
    num_accepted: np.ndarray
    finished: tuple[Finished, ...]
    logprobs: tuple[tuple[str, TokenLogprobs], ...] = ()  # by request id; cut nowhere

    def updates(self) -> Iterator[tuple[str, np.ndarray, int, int]]:
        """(request id, new tokens, drafted, accepted) for each row that added tokens."""
        rows = zip(
            self.owners,
            self.row_splits[:-1].tolist(),
            self.counts.tolist(),
            self.num_drafted.tolist(),
            self.num_accepted.tolist(),
            strict=True,
        )
        for owner, start, count, drafted, accepted in rows:
            if count:
                new = self.tokens[start : start + count]
                yield owner.request.request_id, new, drafted, accepted


class SchedulerStats(msgspec.Struct):
    """Totals since the start."""

    steps: int = 0
    emitted_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0  # of every admission
    prefix_hit_tokens: int = 0  # of these, found in the prefix cache
    executor_resets: int = 0
    draft_s: float = 0.0  # as the executor measured them
    target_s: float = 0.0
