"""What a step is made of, and a measured one: all that a price is found from, or asked for.

One record for whoever has to do with prices: the scheduler's price list, the profile at start-up,
`cbatch calibrate`, and the simulator, whose cost models are functions of it.
"""

from __future__ import annotations

import msgspec

IDLE_LEFT = 0.1  # of what idleness took from caches, the share that a step does not bring back


class StepWork(msgspec.Struct, gc=False):
    """The composition of one step; read-only to whoever prices it.

    A decoding row reads all of its context and computes 1 + k tokens; a chunk of a prompt attends
    to what came before it and, on average, to half of itself.
    """

    # The price list knows no more than these, and of a commit no more is told.
    rows: int = 0
    target_tokens: int = 0  # through the target model, the drafts among them
    logit_tokens: int = 0  # of these: verified or deciding
    context_tokens: int = 0  # KV positions that rows read
    draft_depth: int = 0  # sequential passes of the drafter
    draft_tokens: int = 0
    ingested_tokens: int = 0  # that the drafter catches up on
    # The rest is of those who follow the plans (`cbatch.engine.step_meter`).
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
    of its turn of the loop besides. `controlled`: `goodput` chose its depths."""

    work: StepWork
    draft_s: float
    target_s: float
    host_s: float = 0.0
    controlled: bool = False
