"""An executor's state of a sequence, and of a row while a step runs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cbatch.core.scheduler.plan import NewSequence, RowStatus
from tests.checking.kv import ContractBreachError
from tests.checking.language import EMPTY_PREFIX, extend_hash


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ContractBreachError(message)


class CheckedSlot:
    """State of one admitted sequence. `hashes[i]` is the hash of the first i + 1 tokens."""

    def __init__(self, admission: NewSequence) -> None:
        a = self.admission = admission
        self.num_tokens = len(a.tokens)
        self.tokens = np.zeros(a.max_total_tokens, np.int32)
        self.tokens[: self.num_tokens] = a.tokens
        self.hashes = np.zeros(a.max_total_tokens, np.uint64)
        state = EMPTY_PREFIX
        for i, token in enumerate(a.tokens.tolist()):
            state = extend_hash(state, token)
            self.hashes[i] = state
        self.kv_len_tokens = a.kv_len_tokens
        self.draft_kv_len_tokens = a.draft_kv_len_tokens
        self.blocks = np.asarray(a.blocks, np.int32)
        self.states: dict[int, int] = {}  # state page by block boundary
        self.failed = False
        self.draft_was_reset = False
        self.chain: tuple[str, ...] = ()  # filled by the drafters

    @property
    def label(self) -> str:
        return f"request {self.admission.request_id} in slot {self.admission.slot}"

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.admission.num_prompt_tokens

    def append(self, token: int) -> None:
        last = int(self.hashes[self.num_tokens - 1])
        self.tokens[self.num_tokens] = token
        self.hashes[self.num_tokens] = extend_hash(last, token)
        self.num_tokens += 1

    def set_block(self, index: int, block: int) -> None:
        require(index <= len(self.blocks), f"{self.label}: block index {index} leaves a gap")
        if index == len(self.blocks):
            self.blocks = np.append(self.blocks, np.int32(block))
        else:
            self.blocks[index] = block


@dataclass
class RowState:
    """One row while the step runs: it computes positions [kv_len, kv_len + query_len)."""

    slot: CheckedSlot
    query_len: int
    planned_drafts: int
    num_drafts: int
    catch_up: int
    wants_logits: bool
    status: RowStatus = RowStatus.OK
    num_accepted: int = 0
    drafter: str | None = None  # the drafter of the row
    emitted: tuple[int, ...] = ()
    context_tokens: int = 0
