"""A request on its way through the scheduler, and what the scheduler says about it."""

from __future__ import annotations

import msgspec
import numpy as np

from cbatch.core.request.logprobs import TokenLogprobs
from cbatch.core.request.output import Ending, OutputRow
from cbatch.core.request.request import MODEL, Request
from cbatch.core.scheduler.block_pool import ROOT, Node
from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.scheduler.queue import Rank


class Sequence(msgspec.Struct, eq=False):
    """An accepted request. Tokens and estimator live in the slot table while it runs, here while it
    waits, so they survive the loss of its slot."""

    request: Request
    rank: Rank
    root: Node  # of the prefix cache, by its salt
    stop_ids: tuple[int, ...]
    min_total_tokens: int  # a stop id at an earlier position does not end it
    max_total_tokens: int
    tokens: np.ndarray  # int32, known tokens at the last moment it waited
    carried: tuple[float, float] | None = None  # what the lookahead policy remembers of it
    slot: int | None = None
    chain_end: Node = ROOT  # in the prefix cache, of its last named block
    chain_blocks: int = 0  # blocks that have been named, promised or ready
    tokens_at_admission: int = 0
    overtaken_tokens: int = 0  # of later prompts, computed since while this one waited
    preemptions: int = 0
    pending_preemption: bool = False  # chosen as a victim; leaves once its plan in flight commits

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt)

    @property
    def computes_prompt(self) -> bool:
        """Every position of the prompt is to be computed, whatever the prefix cache holds: its log
        probabilities are wanted. With an output they have been reported."""
        wanted = self.request.params.wants_prompt(self.request.choice)
        return wanted and len(self.tokens) == self.num_prompt_tokens

    def draft_limits(self, config: SchedulerConfig) -> tuple[int, int]:
        """How many tokens may be known before a step, for it to draft, and for the draft model to
        catch up. With n known a row drafts at most the first less n: its last token is never a
        draft's successor, and the draft model reads no position beyond its own context. Behind
        other drafters it seldom has its turn: what it then lacks would mostly be paid in vain."""
        asked, context = self.request.params.drafter, config.draft_context_tokens
        chain = config.default_chain if asked is None else asked
        end = self.max_total_tokens - 1
        if context is None or not chain or chain[0] != MODEL:
            return end, 0
        return min(end, context) if len(chain) == 1 else end, context


class Finished(Ending, frozen=True, kw_only=True):
    """`output` is every token that counts, int32."""

    output: np.ndarray


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

    def updates(self) -> list[OutputRow]:
        """Of each row that added tokens."""
        tokens = self.tokens.tolist()
        rows = zip(
            self.owners,
            self.row_splits[:-1].tolist(),
            self.counts.tolist(),
            self.num_drafted.tolist(),
            self.num_accepted.tolist(),
            strict=True,
        )
        return [
            OutputRow(owner.request.request_id, tokens[start : start + count], drafted, accepted)
            for owner, start, count, drafted, accepted in rows
            if count
        ]


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
