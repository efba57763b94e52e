"""The composition of a step and its measured durations, to which prices are fitted.

The scheduler, the measurement at start-up, `cbatch calibrate` and the simulator use it.
"""

from __future__ import annotations

import msgspec


class StepWork(msgspec.Struct, gc=False):
    """The composition of one step. Cost models only read it.

    A decoding row reads all of its context and computes 1 + k tokens. A chunk of a prompt attends
    to the context before it and, on average, to half of itself.
    """

    # A commit sets these fields. Prices are learned from them.
    rows: int = 0
    target_tokens: int = 0  # tokens through the target model, drafts included
    logit_tokens: int = 0  # part of `target_tokens` that needs logits
    context_tokens: int = 0  # KV positions that rows read
    decode_pairs: int = 0  # query-key pairs of decoding rows
    prefill_tokens: int = 0  # part of `target_tokens` that is in chunks
    prefill_pairs: int = 0  # query-key pairs of chunks
    draft_depth: int = 0  # sequential passes of the drafter
    draft_tokens: int = 0
    ingested_tokens: int = 0  # tokens that the drafter catches up on
    # `SlotCounts` (`slot_counts.py`) sets these fields, too.
    decode_rows: int = 0  # part of `rows` that decodes or verifies
    decode_longest_tokens: int = 0  # most KV positions that a decoding row reads
    decode_shortest_tokens: int = 0  # fewest KV positions that a decoding row reads
    prefill_context_tokens: int = 0  # part of `context_tokens` that chunks read
    draft_context_tokens: int = 0  # context of the rows that draft
    admitted: int = 0  # requests that entered a slot

    @classmethod
    def decoding(cls, rows: int, context_tokens: int) -> StepWork:
        """Return a step in which rows decode one token each."""
        work = cls(rows=rows, decode_rows=rows, target_tokens=rows, logit_tokens=rows)
        work.context_tokens = work.decode_pairs = context_tokens
        return work

    @property
    def plain(self) -> StepWork:
        """Return the step of the same decoding rows without drafts and chunks."""
        return StepWork.decoding(self.decode_rows, self.decode_context_tokens)

    @property
    def decode_context_tokens(self) -> int:
        return self.context_tokens - self.prefill_context_tokens

    @property
    def pairs(self) -> int:
        return self.decode_pairs + self.prefill_pairs


class StepSample(msgspec.Struct, frozen=True):
    """The composition of a measured step, and its durations in seconds; 0 means not measured."""

    work: StepWork
    draft_s: float  # passes of the drafter
    target_s: float  # the rest of the executor's time
    host_s: float = 0.0  # of the step loop around the executor
    hidden_s: float = 0.0  # passes of the drafter that did not count, as the host took longer

    @property
    def rest_s(self) -> float:
        """Return the seconds of the step without the drafter's; 0 if they were not measured."""
        return self.target_s + self.host_s if self.target_s > 0 else 0.0
