"""The scheduler's record of a request, the result of a commit, and statistics."""

from __future__ import annotations

import msgspec
import numpy as np

from cbatch.core.request.logprobs import TokenLogprobs
from cbatch.core.request.output import OutputRow
from cbatch.core.request.request import MODEL, FinishReason, Request
from cbatch.core.scheduler.block_pool import ROOT, Node
from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.scheduler.queue import Rank


class Sequence(msgspec.Struct, eq=False):
    """An accepted request. While it runs, its tokens are in the slot table and its acceptance
    estimate in the policy; while it waits, both are here."""

    request: Request
    rank: Rank
    level: float  # priority level: no sequence overtakes a sequence of a lower level
    root: Node  # root of the prefix cache for the request's salt
    stop_ids: tuple[int, ...]
    min_total_tokens: int  # a stop id at an earlier position does not end the request
    max_total_tokens: int
    tokens: np.ndarray  # int32, known tokens when it last waited
    policy_state: tuple[float, float] | None = None  # of the lookahead policy, after a preemption
    slot: int | None = None
    last_node: Node = ROOT  # in the prefix cache, of the last block that has a node
    num_nodes: int = 0  # leading blocks that have nodes, promised or ready
    tokens_at_admission: int = 0
    overtaken_tokens: int = 0  # tokens of later prompts, computed while this sequence prefills
    preemptions: int = 0
    pending_preemption: bool = False  # to be preempted when its plan in flight commits

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt)

    @property
    def computes_prompt(self) -> bool:
        """True if every position of the prompt must be computed, without prefix hits, for the log
        probabilities of the prompt. With output tokens, they have been reported already."""
        requested = self.request.params.wants_prompt(self.request.choice)
        return requested and len(self.tokens) == self.num_prompt_tokens

    def draft_limits(self, config: SchedulerConfig) -> tuple[int, int]:
        """Return `lookahead_end` and `catch_up_end` of the slot table.

        With n known tokens a row drafts at most `lookahead_end` - n: a token is sampled after the
        drafts, and the draft model reads no position beyond its context. Catch-up is planned while
        n <= `catch_up_end`, which is 0 if the draft model is absent, or only the fallback of a
        lookup: a fallback seldom needs its KV.
        """
        requested, context = self.request.params.drafter, config.draft_context_tokens
        chain = config.default_chain if requested is None else requested
        end = self.max_total_tokens - 1
        if context is None or not chain or chain[0] != MODEL:
            return end, 0
        return min(end, context) if len(chain) == 1 else end, context


class Finished(msgspec.Struct, frozen=True):
    """The end of a request. `output` is its whole output, int32, already cut at a stop. `message`
    explains an error."""

    request_id: str
    reason: FinishReason
    message: str | None
    output: np.ndarray


class Commit(msgspec.Struct, frozen=True):
    """New tokens of a step by row, and the requests that ended since the previous commit."""

    step_id: int
    owners: list[Sequence]
    tokens: np.ndarray  # int32, as the executor returned them for these rows
    row_splits: np.ndarray  # int32 [rows + 1] into `tokens`
    counts: np.ndarray  # int32 [rows], tokens of each row that remain after the cut at its end
    num_drafted: np.ndarray
    num_accepted: np.ndarray
    finished: tuple[Finished, ...]
    logprobs: tuple[tuple[str, TokenLogprobs], ...] = ()  # by request id; of cut tokens, too

    def updates(self) -> list[OutputRow]:
        """Return the output of each row that added tokens."""
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
    prompt_tokens: int = 0  # known tokens at each admission, again after a preemption
    prefix_hit_tokens: int = 0  # part of `prompt_tokens` that was in the prefix cache
    executor_resets: int = 0
    draft_s: float = 0.0  # measured by the executor
    target_s: float = 0.0  # measured by the executor
