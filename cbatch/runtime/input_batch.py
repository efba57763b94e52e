"""The executor's state of every slot, and the ragged batches made from it."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from cbatch.core.request.noise import split_seed
from cbatch.core.scheduler.plan import Deltas, NewSequence
from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.model.arrays import I64, iota
from cbatch.runtime.sampling.filters import Filters
from cbatch.runtime.sampling.logits_processors import LogitsProcessors
from cbatch.runtime.sampling.logprobs import LogprobRequests
from cbatch.runtime.sampling.rejection_sampler import NoiseRows
from cbatch.runtime.sampling.structured import GrammarSource

NO_PAGE = -1


class InputBatch:
    """Struct of arrays over slots, updated by the deltas of each plan.

    `tokens[s, :num_tokens[s]]` are known. The columns after them are scratch space, e.g. for the
    drafts of the current step. `kv_len` counts valid target positions. A row of `blocks` has block
    ids by absolute block index. A row of `states`, with recurrent layers, has the state page of
    each block boundary, or -1. `failed` is the error (RowStatus) that ended a slot, or 0; a failed
    slot computes nothing more. Exactly one of three flags says how the drafts of a slot are
    verified: `greedy`, `coupled`, or `rejects` (rejection sampling).
    """

    def __init__(
        self,
        max_num_seqs: int,
        block_size: int,
        vocab_size: int,
        grammars: GrammarSource | None = None,
        *,
        recurrent: bool = False,
    ) -> None:
        self._grammars = grammars
        self.max_num_seqs = max_num_seqs
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.tokens = np.zeros((max_num_seqs, 0), dtype=np.int64)
        self.blocks = np.zeros((max_num_seqs, 0), dtype=np.int32)
        self.states = np.zeros((max_num_seqs, 0), dtype=np.int32) if recurrent else None
        self.clear()

    def clear(self) -> None:
        """Forget every slot."""
        size = self.max_num_seqs
        self.failed = np.zeros(size, dtype=np.uint8)
        self.generation = np.zeros(size, dtype=np.int32)
        self.num_tokens = np.zeros(size, dtype=np.int64)
        self.kv_len = np.zeros(size, dtype=np.int64)
        self.max_total = np.zeros(size, dtype=np.int64)
        self.logits_processors = LogitsProcessors(size, self.vocab_size, self._grammars)
        self.logprob_requests = LogprobRequests()
        self.greedy = np.ones(size, dtype=bool)
        self.rejects = np.zeros(size, dtype=bool)
        self.coupled = np.zeros(size, dtype=bool)
        self.temperature = np.ones(size, dtype=np.float32)
        self.top_k = np.full(size, self.vocab_size, dtype=np.int64)
        self.top_p = np.full(size, np.inf, dtype=np.float32)
        self.min_p = np.zeros(size, dtype=np.float32)
        self.keys = np.zeros((size, 2), dtype=np.int64)
        self.choice = np.zeros(size, dtype=np.int64)

    def append_blocks(self, deltas: Deltas) -> None:
        """Add the blocks that the deltas append; there must be at least one."""
        self.blocks = _widened(self.blocks, int(deltas.append_indices.max()) + 1)
        self.blocks[deltas.append_slots, deltas.append_indices] = deltas.append_blocks

    def add_state_pages(self, deltas: Deltas) -> None:
        """Set the state pages that the deltas give to slots; there must be at least one."""
        slots, boundaries, pages = deltas.state_pages
        assert self.states is not None
        self.states = _widened(self.states, int(boundaries.max()) + 1, fill=NO_PAGE)
        self.states[slots, boundaries] = pages

    def admit(self, a: NewSequence) -> None:
        """Fill a slot, replacing its old contents. Raises ValueError for an invalid admission."""
        slot, n = a.slot, len(a.tokens)
        if not (0 <= slot < self.max_num_seqs and 0 <= a.kv_len_tokens < n <= a.max_total_tokens):
            raise ValueError(
                f"admission of {a.request_id!r}: slot {slot}, {n} tokens, kv_len "
                f"{a.kv_len_tokens}, max_total {a.max_total_tokens} do not fit together"
            )
        self.tokens = _widened(self.tokens, a.max_total_tokens)
        self.blocks = _widened(self.blocks, len(a.blocks))
        self.tokens[slot, :n] = a.tokens
        self.blocks[slot, : len(a.blocks)] = a.blocks
        if self.states is not None:
            boundary = a.kv_len_tokens // self.block_size
            self.states = _widened(self.states, boundary + 1, fill=NO_PAGE)
            self.states[slot] = NO_PAGE
            self.states[slot, boundary] = NO_PAGE if a.state_page is None else a.state_page
        self.release(slot)
        self.generation[slot] = a.generation
        self.num_tokens[slot], self.kv_len[slot] = n, a.kv_len_tokens
        self.max_total[slot] = a.max_total_tokens
        params = a.params
        self.logits_processors.admit(a)
        self.logprob_requests.admit(a)
        self.greedy[slot] = params.greedy
        self.coupled[slot] = params.coupled and not params.greedy
        self.rejects[slot] = not (params.coupled or params.greedy)
        self.temperature[slot] = params.logits_divisor
        self.top_k[slot] = self.vocab_size if params.top_k is None else params.top_k
        # 1 keeps every token: a cumulative sum that rounds to 1 early must not cut the tail.
        self.top_p[slot] = params.top_p if params.top_p < 1 else np.inf
        self.min_p[slot] = params.min_p
        self.keys[slot] = split_seed(a.seed)
        self.choice[slot] = a.choice

    def release(self, slot: int) -> None:
        """Empty a slot. No plan fits it until it is filled again."""
        self.num_tokens[slot] = self.kv_len[slot] = 0
        self.logits_processors.release(slot)
        self.logprob_requests.release(slot)
        self.failed[slot] = 0

    def block_rows(self, slots: NDArray[np.integer], context_tokens: int) -> NDArray[np.int32]:
        """Block tables of `slots`, wide enough for `context_tokens` positions: int32 [R, width]."""
        width = -(-context_tokens // self.block_size)
        return self.blocks[:, :width].take(slots, axis=0)

    def state_rows(
        self, slots: NDArray[np.integer], context_tokens: int
    ) -> NDArray[np.int32] | None:
        """Return the state pages of `slots` at the boundaries of `context_tokens` positions, int32
        [R, boundaries + 1]; None without recurrent layers."""
        if self.states is None:
            return None
        width = context_tokens // self.block_size + 1
        self.states = _widened(self.states, width, fill=NO_PAGE)
        return self.states[:, :width].take(slots, axis=0)

    def ragged(
        self,
        slots: NDArray[np.integer],
        starts: I64,
        query_lens: NDArray[np.integer],
        num_logits: NDArray[np.integer] | NDArray[np.bool_],
    ) -> RaggedBatch:
        """Return a batch of `query_lens[i]` >= 1 known tokens of each slot, from position
        `starts[i]`, with logits for the last `num_logits[i]` tokens."""
        contexts = starts + query_lens
        ends = query_lens.cumsum()
        total, num_rows = int(ends[-1]), len(slots)
        if total == num_rows:
            positions, row_slots = starts, slots
        else:
            positions = iota(total) + (starts - ends + query_lens).repeat(query_lens)
            row_slots = slots.repeat(query_lens)
        logit_ends = num_logits.cumsum()
        total_logits = int(logit_ends[-1])
        index = iota(total_logits)
        if total_logits < total:  # row = index among logits + earlier rows without logits
            index = index + (ends - logit_ends).repeat(num_logits)
        longest = int(np.maximum.reduce(contexts))
        return RaggedBatch(
            torch.from_numpy(self.tokens[row_slots, positions]),
            torch.from_numpy(positions),
            query_lens.astype(np.int32),
            contexts.astype(np.int32),
            self.block_rows(slots, longest),
            torch.from_numpy(index),
            self.state_rows(slots, longest),
            None if self.states is None else slots.astype(np.int32),
        )

    def filters(self, slots: NDArray[np.integer]) -> Filters:
        """Return the filters of `slots`, in the same order."""
        top_k, top_p, min_p = self.top_k[slots], self.top_p[slots], self.min_p[slots]
        return Filters(
            torch.from_numpy(self.temperature[slots]),
            torch.from_numpy(top_k) if np.count_nonzero(top_k < self.vocab_size) else None,
            torch.from_numpy(top_p) if np.count_nonzero(top_p <= 1) else None,
            torch.from_numpy(min_p) if np.count_nonzero(min_p) else None,
        )

    def noise_rows(self, slots: NDArray[np.integer], positions: I64) -> NoiseRows:
        """Return the noise coordinates of the tokens at `positions` in `slots`."""
        coordinates = self.keys[slots], self.choice[slots], positions
        return NoiseRows(*map(torch.from_numpy, coordinates))


def _widened(array: NDArray[np.generic], width: int, fill: int = 0) -> NDArray[np.generic]:
    size = array.shape[1]
    if width <= size:
        return array
    return np.pad(array, ((0, 0), (0, max(width - size, size))), constant_values=fill)
