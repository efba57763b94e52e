"""The composition of a step and its measured durations, from which prices are fitted.

The lookahead policy, the measurement at start-up, `cbatch calibrate` and the simulator share them.
"""

from __future__ import annotations

import msgspec

IDLE_LEFT = 0.1  # share of what idle time evicted from caches that a step does not bring back


class StepWork(msgspec.Struct, gc=False):
    """The composition of one step. Cost models only read it.

    A decoding row reads all of its context and computes 1 + k tokens; a chunk of a prompt attends
    to what came before it and, on average, to half of itself.
    """

    # A commit fills in these, from which the lookahead policy learns prices.
    rows: int = 0
    target_tokens: int = 0  # through the target model, the drafts among them
    logit_tokens: int = 0  # of these: verified or deciding
    context_tokens: int = 0  # KV positions that rows read
    draft_depth: int = 0  # sequential passes of the drafter
    draft_tokens: int = 0
    ingested_tokens: int = 0  # that the drafter catches up on
    # The others need the plans before this one (`SlotCounts` in `slot_counts.py`).
    decode_rows: int = 0  # of `rows`, the ones that decode or verify
    decode_longest_tokens: int = 0  # the most KV positions that one of them reads, and the least
    decode_shortest_tokens: int = 0
    decode_pairs: int = 0  # query-key pairs of decoding rows
    prefill_tokens: int = 0  # of `target_tokens`, and of `context_tokens`, those of chunks
    prefill_context_tokens: int = 0
    prefill_pairs: int = 0
    draft_context_tokens: int = 0  # context of the rows that draft
    admitted: int = 0  # requests that entered a slot
    steps_since_prefill: int = 0  # 0: this one computes a chunk
    idle_s: float = 0.0  # without work until this step; after each, `IDLE_LEFT` of it counts on

    @property
    def decode_context_tokens(self) -> int:
        return self.context_tokens - self.prefill_context_tokens


class StepSample(msgspec.Struct, frozen=True):
    """One measured step: seconds of the drafter's passes, of what else the executor measures, and
    of the loop around it. `controlled`: the adaptive policy chose its depths."""

    work: StepWork
    draft_s: float
    target_s: float
    host_s: float = 0.0
    controlled: bool = False
