"""Drafting with a small model.

The executor runs the drafter, which may propose fewer tokens than planned, never more. It does not
change the distribution of the output, if it reports the true distribution from which each draft was
drawn (or None for a draft chosen with certainty).
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.compiled.threads import sampling_threads
from cbatch.runtime.cpu.decoder import Model
from cbatch.runtime.cpu.greedy import greedy_drafts
from cbatch.runtime.drafting.contract import DraftRows, ModelDrafter, Proposal
from cbatch.runtime.input_batch import InputBatch
from cbatch.runtime.kv_cache import KVCache
from cbatch.runtime.model.arrays import I64, iota
from cbatch.runtime.sampling import noise
from cbatch.runtime.sampling.filters import filtered_probs
from cbatch.runtime.sampling.rejection_sampler import draw


class DraftModel(ModelDrafter):
    """A small model with the target's vocabulary, as a drafter.

    Its KV cache uses the target's block ids. `kv_len` is the number of valid KV positions of each
    slot. It is below the target's after k = 0, a prefix hit, a preemption or a full acceptance. The
    first pass of a proposal computes the missing tokens together with the last known token.
    """

    # The token id of each logit, ascending, int64; None: logit i is that of token id i.
    vocabulary: Tensor | None = None

    def __init__(self, model: Model) -> None:
        self.model = model
        self.context_tokens = model.config.max_position_tokens

    def bind(self, table: InputBatch, num_blocks: int) -> None:
        super().bind(table, num_blocks)
        model = self.model
        self.kv = KVCache(model.config, num_blocks, table.block_size, model.dtype, model.device)
        self.kv_len = np.zeros(table.max_num_seqs, dtype=np.int64)
        self._ones = np.ones(table.max_num_seqs, dtype=np.int32)  # batches use a prefix of it

    def zero_blocks(self, block_ids: NDArray[np.int32]) -> None:
        self.kv.zero_blocks(block_ids)

    def report_progress(self, counter: NDArray[np.int64]) -> None:
        self.model.progress = counter

    def propose(self, rows: DraftRows) -> Proposal:
        slots, known = rows.slots, rows.num_tokens
        # The last draft has position known + k - 1; the draft before it must fit the context.
        depths = np.minimum(rows.num_drafts, self.context_tokens + 1 - known)
        missing = known - self.kv_len[slots]
        depths *= (missing <= rows.catch_up + 1) & (depths > 0)
        if not rows.num_drafts.all():
            self._ingest_slices(rows, missing)
        drafting = Drafting(self, rows, depths, self.vocabulary)
        active = depths.nonzero()[0]
        if len(active):
            self._ingest_and_draft(drafting, active, missing)
        # KV now holds the known tokens and all drafts but the last. A row with non-finite values
        # has no valid KV.
        drafting.close()
        drafted = drafting.depths
        self.kv_len[slots[active]] = (known - 1 + drafted)[active]
        self.kv_len[slots[drafting.non_finite]] = 0
        return Proposal(drafting.tokens, drafted, drafting.probs(), drafting.non_finite)

    def _ingest_slices(self, rows: DraftRows, missing: I64) -> None:
        """Compute the next `catch_up` tokens, except the last known, of rows without drafts."""
        slices = np.minimum(rows.catch_up, missing - 1) * (rows.num_drafts == 0)
        at = (slices > 0).nonzero()[0]
        if len(at):
            slots, lens = rows.slots[at], slices[at]
            starts = self.kv_len[slots]
            self.model.forward(self._batch(slots, starts, lens, np.zeros_like(lens)), self.kv)
            self.kv_len[slots] = starts + lens

    def _ingest_and_draft(self, drafting: Drafting, active: I64, missing: I64) -> None:
        """Run one ragged pass over the uncomputed tokens, then passes of one token for each row
        that needs more drafts."""
        rows, depths = drafting.rows, drafting.depths[active]
        slots, positions = rows.slots[active], rows.num_tokens[active]
        tables = self.table.block_rows(slots, int(np.maximum.reduce(positions + depths)))
        missing = missing[active]
        logits, depth = self._first_logits(slots, positions - missing, missing), 0
        while True:
            tokens, finite = drafting.choose(logits, active, depth)
            depth += 1
            deeper = depths > depth
            if not finite:
                deeper &= ~drafting.non_finite[active]
            at = deeper.nonzero()[0]
            if not len(at):
                return
            if len(at) < len(active):
                active, tokens, tables = active[at], tokens[at], tables[at]
                positions, depths = positions[at], depths[at]
                self._keep_rows(at)
            logits = self._next_logits(self._next_tokens(tokens, positions + (depth - 1), tables))

    def _first_logits(self, slots: NDArray[np.integer], starts: I64, query_lens: I64) -> Tensor:
        """Compute these positions. The last one of each slot gives its first draft's logits."""
        batch = self._batch(slots, starts, query_lens, self._ones[: len(slots)])
        return self.model.forward(batch, self.kv)

    def _next_logits(self, batch: RaggedBatch) -> Tensor:
        return self.model.forward(batch, self.kv)

    def _keep_rows(self, at: I64) -> None:
        """Drop the state of all rows of the latest batch but `at`: only these draft further."""

    def _batch(
        self, slots: NDArray[np.integer], starts: I64, query_lens: I64, num_logits: I64
    ) -> RaggedBatch:
        """Return a batch of known tokens. Ids beyond this model's vocabulary become its last id."""
        batch = self.table.ragged(slots, starts, query_lens, num_logits)
        if self.model.config.vocab_size < self.table.vocab_size:
            batch.tokens.clamp_(max=self.model.config.vocab_size - 1)
        return batch

    def _next_tokens(self, tokens: I64, positions: I64, tables: NDArray[np.int32]) -> RaggedBatch:
        return RaggedBatch(
            torch.from_numpy(tokens),
            torch.from_numpy(positions),
            self._ones[: len(tokens)],
            (positions + 1).astype(np.int32),
            tables,
            torch.from_numpy(iota(len(tokens))),
        )


class Drafting:
    """The drafts of one proposal, depth by depth. Column i of logits is token `vocabulary[i]`."""

    def __init__(
        self,
        drafter: ModelDrafter,
        rows: DraftRows,
        depths: I64,
        vocabulary: Tensor | None = None,
    ) -> None:
        self.rows, self.vocabulary = rows, vocabulary
        self.depths = depths  # drafts per row; cut where a row gets non-finite logits
        self._num_reduced = None if vocabulary is None else len(vocabulary)
        self.table = drafter.table
        deepest = int(np.maximum.reduce(depths))
        self.tokens = np.zeros((len(depths), deepest), dtype=np.int64)
        self.non_finite = np.zeros(len(depths), dtype=bool)
        greedy = self.table.greedy[rows.slots]
        self.sampled = None if greedy.all() else ~greedy
        self.processors = self.table.logits_processors
        self.processed = bool(self.processors.active[rows.slots].any())
        # Number of drafts in the prefix of each row's logits processors.
        self._advanced = np.zeros(len(depths), dtype=np.int64)
        self._q: list[Tensor] = []  # per depth, the rows of `_q_rows`
        self._q_rows: list[I64] = []

    @sampling_threads.limited()
    def choose(self, logits: Tensor, active: I64, depth: int) -> tuple[I64, bool]:
        """Return the next token of each active row, and whether all their logits are finite."""
        if logits.shape[1] > self.table.vocab_size:  # the draft model's vocabulary may be padded
            logits = logits[:, : self.table.vocab_size]
        if self.processed:  # processors know the target's ids
            logits = self._widened(logits, -torch.inf)
            self.processors.shape_each(logits, self.rows.slots[active])
        tokens, finite = greedy_drafts(logits)
        if logits.shape[1] == self._num_reduced:
            assert self.vocabulary is not None
            tokens = self.vocabulary.numpy()[tokens]
        all_finite = bool(finite.all())
        if not all_finite:
            self.non_finite[active[~finite]] = True
            self.depths[active[~finite]] = depth
        if self.sampled is not None:
            self._sample(logits, active, depth, tokens)
        self.tokens[active, depth] = tokens
        if self.processed:
            advanced = np.ones_like(active)
            self.processors.advance(self.rows.slots[active], tokens[:, None], advanced)
            self._advanced[active] += 1
        return tokens, all_finite

    def close(self) -> None:
        """Remove the drafts from the prefixes of the logits processors."""
        if self.processed:
            self.processors.rollback(self.rows.slots, self._advanced)

    def _sample(self, logits: Tensor, active: I64, depth: int, tokens: I64) -> None:
        """Replace the tokens of sampled rows by draws from q; keep q for the verification."""
        assert self.sampled is not None
        at = self.sampled[active].nonzero()[0]
        if not len(at):
            return
        rows = active[at]
        slots, positions = self.rows.slots[rows], self.rows.num_tokens[rows] + depth
        if len(at) < len(active):
            logits = logits[torch.from_numpy(at)]
        q = filtered_probs(logits, self.table.filters(slots))
        ids = self.vocabulary if q.shape[1] == self._num_reduced else None
        if ids is None:
            q = self._widened(q, 0.0)
        where = self.table.noise_rows(slots, positions)
        coupled = self.table.coupled[slots]
        purposes = np.where(coupled, noise.COUPLED, noise.DRAFT)
        tokens[at] = draw(q, where, torch.from_numpy(purposes), ids).numpy()
        if np.count_nonzero(coupled):  # coupled drafts are verified without q
            keep = np.flatnonzero(~coupled)
            q, rows = q[torch.from_numpy(keep)], rows[keep]
        if len(rows):  # a row that stopped never resumes, so `_q[i]` is of depth i
            self._q.append(self._widened(q, 0.0))
            self._q_rows.append(rows)

    def _widened(self, x: Tensor, rest: float) -> Tensor:
        """Map [N, drafted ids] to [N, vocab_size]; the other ids get `rest`."""
        if x.shape[1] == self.table.vocab_size:
            return x
        if x.shape[1] != self._num_reduced:
            padding = self.table.vocab_size - x.shape[1]
            return torch.nn.functional.pad(x, (0, padding), value=rest)
        assert self.vocabulary is not None
        whole = torch.full((len(x), self.table.vocab_size), rest)
        return whole.index_copy_(1, self.vocabulary, x)

    @sampling_threads.limited()
    def probs(self) -> Tensor | None:
        """Return q of every proposed draft, ordered by row and then by depth."""
        if not self._q:
            return None
        row = np.concatenate(self._q_rows)
        depth = np.repeat(iota(len(self._q_rows)), [len(r) for r in self._q_rows])
        counts = depth < self.depths[row]
        order = np.lexsort((depth, row))
        order = order[counts[order]]
        flat = torch.cat(self._q)
        if len(order) == len(row) and (order == iota(len(order))).all():
            return flat
        return flat[torch.from_numpy(order)]
