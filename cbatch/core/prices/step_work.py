"""The composition of a step and its measured durations, to which prices are fitted.

The lookahead policy, the measurement at start-up, `cbatch calibrate` and the simulator use it.
"""

from __future__ import annotations

import msgspec

# While a machine is idle, caches lose data. After each step this share of the loss remains.
IDLE_DECAY = 0.1


class StepWork(msgspec.Struct, gc=False):
    """The composition of one step. Cost models only read it.

    A decoding row reads all of its context and computes 1 + k tokens. A chunk of a prompt attends
    to the context before it and, on average, to half of itself.
    """

    # A commit sets these fields; the lookahead policy learns prices from them.
    rows: int = 0
    target_tokens: int = 0  # tokens through the target model, drafts included
    logit_tokens: int = 0  # part of `target_tokens` that needs logits
    context_tokens: int = 0  # KV positions that rows read
    draft_depth: int = 0  # sequential passes of the drafter
    draft_tokens: int = 0
    ingested_tokens: int = 0  # tokens that the drafter catches up on
    # `SlotCounts` (`slot_counts.py`) sets these fields, which depend on earlier plans, too.
    decode_rows: int = 0  # part of `rows` that decodes or verifies
    decode_longest_tokens: int = 0  # most KV positions that a decoding row reads
    decode_shortest_tokens: int = 0  # fewest KV positions that a decoding row reads
    decode_pairs: int = 0  # query-key pairs of decoding rows
    prefill_tokens: int = 0  # part of `target_tokens` that is in chunks
    prefill_context_tokens: int = 0  # part of `context_tokens` that chunks read
    prefill_pairs: int = 0  # query-key pairs of chunks
    draft_context_tokens: int = 0  # context of the rows that draft
    admitted: int = 0  # requests that entered a slot
    steps_since_prefill: int = 0  # 0: this step computes a chunk
    idle_s: float = 0.0  # idle time before the step, or `IDLE_DECAY` times the last step's value

    @property
    def decode_context_tokens(self) -> int:
        return self.context_tokens - self.prefill_context_tokens


class StepSample(msgspec.Struct, frozen=True):
    """The composition of a measured step, and its durations in seconds; 0 means not measured."""

    work: StepWork
    draft_s: float  # passes of the drafter
    target_s: float  # the rest of the executor's time
    host_s: float = 0.0  # of the step loop around the executor
    adaptive: bool = False  # whether the adaptive policy chose the draft lengths
