"""Drafters: who guesses the next tokens of a slot before the target verifies them.

A drafter lives in the executor. It may propose fewer tokens than planned, never more, and nothing
it does can change the law of what is emitted: it only has to report the true distribution its
tokens were drawn from (or None where it chose with certainty).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.core.plan import Admission, ShadowEvidence
from cbatch.runtime.index import I64, iota
from cbatch.runtime.kv import KVCache
from cbatch.runtime.model import Model, RaggedBatch, RunAhead
from cbatch.runtime.rows import SlotTable
from cbatch.runtime.sampling import (
    filtered_probs,
    filters_of,
    greedy_drafts,
    noise_rows,
)
from triton_kernels import noise
from triton_kernels.verify import draw


class DraftRows(NamedTuple):
    """Rows that a drafter works for: each has `num_drafts` >= 1, or a slice to catch up."""

    slots: NDArray[np.integer]
    num_tokens: I64  # known tokens; the first draft stands at this position
    num_drafts: I64
    # With drafts: the most unseen tokens beyond the last known one that the plan paid for.
    # Without: a slice of a long catch-up; exactly that many tokens are to be ingested now.
    catch_up: NDArray[np.integer]


class Proposal(NamedTuple):
    """`tokens[i, :num_drafted[i]]` are the drafts of row i.

    `probs` fp32 [sum of num_drafted over rows that are verified by rejection (`table.rejects`), V],
    row after row: the distributions they were drawn from. None: every draft was chosen with
    certainty.
    """

    tokens: I64  # [R, max k]
    num_drafted: I64  # [R], <= num_drafts
    probs: Tensor | None
    non_finite: NDArray[np.bool_]  # [R]: the draft's own numbers were broken, nothing drafted


class Drafter(Protocol):
    """Contract of a drafter. All calls come from the executor, in the order of a step."""

    def bind(self, table: SlotTable, num_blocks: int, device: torch.device) -> None:
        """Called once, before anything else: the slots and the block pool it shares."""

    def reset(self) -> None:
        """Forget every slot."""

    def zero_blocks(self, block_ids: NDArray[np.int32]) -> None:
        """Blocks that held non-finite values; zero what it keeps in them."""

    def admit(self, admission: Admission) -> None:
        """A sequence entered a slot; the drafter's KV holds its first `draft_kv_len_tokens`."""

    def release(self, slot: int) -> None:
        """The slot is empty: what was kept for it can go."""

    def propose(self, rows: DraftRows) -> Proposal:
        """Draft for `rows`, each as deep as its own `num_drafts`."""

    def truncate(self, slots: NDArray[np.integer], kv_len_tokens: I64) -> None:
        """After verification: only the first `kv_len_tokens[i]` positions of a slot are valid."""

    def kv_lens(self, slots: NDArray[np.integer]) -> I64 | None:
        """How many positions of the draft model's KV are valid; None: as many as follow from what
        was planned and drafted."""

    def score(self, slots: NDArray[np.integer], num_drafted: I64 | None) -> ShadowEvidence | None:
        """After a step in which `slots` drafted so many tokens (None: nobody any): how drafts of
        rows without would have done, by row of `slots`. Not every step, and not every row."""


class DraftModel:
    """A small model of the target's vocabulary as drafter.

    Its KV cache has the target's block ids. `kv_len` counts its valid positions per slot; it lags
    after k = 0, a prefix hit, a preemption or a full acceptance, and the first pass of a proposal
    ingests what is missing together with the last known token.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self.context_tokens = model.config.max_position_tokens

    def bind(self, table: SlotTable, num_blocks: int, device: torch.device) -> None:
        if self.model.device != device:
            raise ValueError(
                f"draft: it is on {self.model.device}, the target on {device}; load both on one"
            )
        self.table = table
        self.kv = KVCache(
            self.model.config, num_blocks, table.block_size_tokens, self.model.dtype, device
        )
        self.kv_len = np.zeros(table.max_slots, dtype=np.int64)

    def reset(self) -> None:
        self.kv_len[:] = 0

    def zero_blocks(self, block_ids: NDArray[np.int32]) -> None:
        self.kv.zero_blocks(block_ids)

    def admit(self, admission: Admission) -> None:
        self.kv_len[admission.slot] = admission.draft_kv_len_tokens

    def release(self, slot: int) -> None:
        self.kv_len[slot] = 0

    def truncate(self, slots: NDArray[np.integer], kv_len_tokens: I64) -> None:
        self.kv_len[slots] = np.minimum(self.kv_len[slots], kv_len_tokens)

    def kv_lens(self, slots: NDArray[np.integer]) -> I64 | None:
        return None

    def score(self, slots: NDArray[np.integer], num_drafted: I64 | None) -> ShadowEvidence | None:
        return None  # a model that did not draft cannot tell what it would have

    def propose(self, rows: DraftRows) -> Proposal:
        slots, known = rows.slots, rows.num_tokens
        # The last draft stands at position known + k - 1; its predecessor must fit the context.
        depths = np.minimum(rows.num_drafts, self.context_tokens + 1 - known)
        missing = known - self.kv_len[slots]
        unable = (missing > rows.catch_up + 1) | (depths < 0)
        if np.count_nonzero(unable):
            depths[unable] = 0
        if np.count_nonzero(rows.num_drafts) < len(slots):
            self._ingest_slices(rows, missing)
        drafting = _Drafting(self, rows, depths)
        active = depths.nonzero()[0]
        if len(active):
            self._ingest_and_draft(drafting, active, missing)
        # KV now holds the known tokens and all drafts but the last; where it held values that are
        # not finite, nothing that counts.
        drafting.close()
        drafted = drafting.take_depths()
        self.kv_len[slots[active]] = (known - 1 + drafted)[active]
        self.kv_len[slots[drafting.non_finite]] = 0
        return Proposal(drafting.tokens, drafted, drafting.probs(), drafting.non_finite)

    def _ingest_slices(self, rows: DraftRows, missing: I64) -> None:
        """Rows without drafts: their next `catch_up` tokens, short of the last known one."""
        slices = np.minimum(rows.catch_up, missing - 1) * (rows.num_drafts == 0)
        at = np.flatnonzero(slices > 0)
        if len(at):
            slots, lens = rows.slots[at], slices[at]
            starts = self.kv_len[slots]
            self.model.forward(self._batch(slots, starts, lens, np.zeros_like(lens)), self.kv)
            self.kv_len[slots] = starts + lens

    def _ingest_and_draft(self, drafting: _Drafting, active: I64, missing: I64) -> None:
        """First a ragged pass over the unseen tokens, then one token a pass, while any row goes
        deeper."""
        everyone = len(active) == len(drafting.depths)
        slots, positions, depths = drafting.rows.slots, drafting.rows.num_tokens, drafting.depths
        if not everyone:
            slots, positions, depths = slots[active], positions[active], depths[active]
            missing = missing[active]
        tables = self.table.block_rows(slots, int((positions + depths).max()))
        shallowest, deepest = int(depths.min()), int(depths.max())
        ahead: RunAhead | None = None
        if int(missing.max()) > 1:
            ones = np.ones(len(slots), dtype=np.int64)
            batch = self._batch(slots, positions - missing, missing, ones)
            logits = self.model.forward(batch, self.kv)
        else:
            tokens = self.table.tokens[slots, positions - 1]
            ahead = RunAhead(self.model, self.kv, positions - 1, tables, shallowest)
            logits = ahead.next(self._known(torch.from_numpy(tokens).to(self.model.device)))
        for depth in range(1, deepest + 1):
            tokens, finite = drafting.choose(logits, active, depth - 1)
            if depth == deepest:
                return
            if depth >= shallowest or not finite:
                keep = (depths > depth) & ~drafting.non_finite[active]
                if not np.count_nonzero(keep):
                    return
                active, tokens, tables = active[keep], tokens[keep], tables[keep]
                positions, depths = positions[keep], depths[keep]
                shallowest, deepest, ahead = int(depths.min()), int(depths.max()), None
            if ahead is None:  # as far as every row goes: beyond, a table may name foreign blocks
                passes = shallowest - depth
                ahead = RunAhead(self.model, self.kv, positions + depth - 1, tables, passes)
            logits = ahead.next(torch.from_numpy(tokens).to(self.model.device))

    def _batch(
        self, slots: NDArray[np.integer], starts: I64, query_lens: I64, wanted: I64
    ) -> RaggedBatch:
        batch = self.table.ragged(slots, starts, query_lens, wanted, self.model.device)
        self._known(batch.tokens)
        return batch

    def _known(self, tokens: Tensor) -> Tensor:
        """`tokens`, changed to what this model knows: its vocabulary may be the smaller one."""
        if self.model.config.vocab_size < self.table.vocab_size:
            tokens.clamp_(max=self.model.config.vocab_size - 1)
        return tokens


class _Drafting:
    """The choices of one proposal as it deepens."""

    def __init__(self, drafter: DraftModel, rows: DraftRows, depths: I64) -> None:
        self.rows, self.depths = rows, depths
        self.table = drafter.table
        self.device = drafter.model.device
        self.tokens = np.zeros((len(depths), max(int(depths.max()), 0)), dtype=np.int64)
        self.non_finite = np.zeros(len(depths), dtype=bool)
        greedy = self.table.greedy[rows.slots]
        self.sampled = None if np.count_nonzero(greedy) == len(greedy) else ~greedy
        shaping = self.table.shaping
        self.shaped = shaping.num_active > 0 and np.count_nonzero(shaping.active[rows.slots]) > 0
        self._advanced = np.zeros_like(depths)  # tokens by which the prefixes are ahead
        self._q: list[Tensor] = []  # per depth, the rows of `_q_rows`
        self._q_rows: list[I64] = []

    def take_depths(self) -> I64:
        """How many drafts stand in each row."""
        if np.count_nonzero(self.non_finite):
            self.depths[self.non_finite] = 0
        return self.depths

    def choose(self, logits: Tensor, active: I64, depth: int) -> tuple[I64, bool]:
        """Next token of each active row, and whether all their numbers were finite."""
        if logits.shape[1] > self.table.vocab_size:  # a draft may pad the vocabulary further
            logits = logits[:, : self.table.vocab_size]
        if self.shaped:
            slots = self.rows.slots[active]
            padding = self.table.vocab_size - logits.shape[1]
            if padding:  # processors know the target's ids
                logits = torch.nn.functional.pad(logits, (0, padding), value=-torch.inf)
            self.table.shaping.shape_each(logits, slots)
        tokens, finite = greedy_drafts(logits)
        all_are = np.count_nonzero(finite) == len(finite)
        if not all_are:
            self.non_finite[active[~finite]] = True
        if self.sampled is not None:
            self._sample(logits, active, depth, tokens)
        self.tokens[active, depth] = tokens
        if self.shaped:
            advanced = np.ones_like(active)
            self.table.shaping.advance(self.rows.slots[active], tokens[:, None], advanced)
            self._advanced[active] += 1
        return tokens, all_are

    def close(self) -> None:
        """The prefixes of the processors are the known tokens again."""
        if self.shaped:
            self.table.shaping.rollback(self.rows.slots, self._advanced)

    def _sample(self, logits: Tensor, active: I64, depth: int, tokens: I64) -> None:
        """Overwrite the tokens of sampled rows with draws from q; keep q where it will be asked."""
        assert self.sampled is not None
        at = self.sampled[active].nonzero()[0]
        if not len(at):
            return
        rows = active[at]
        slots, positions = self.rows.slots[rows], self.rows.num_tokens[rows] + depth
        if len(at) < len(active):
            logits = logits[torch.from_numpy(at).to(self.device)]
        q = filtered_probs(logits, filters_of(self.table, slots, self.device))
        padding = self.table.vocab_size - q.shape[1]
        if padding:
            q = torch.nn.functional.pad(q, (0, padding))
        where = noise_rows(self.table, slots, positions, self.device)
        coupled = self.table.coupled[slots]
        purposes = np.where(coupled, noise.COUPLED, noise.DRAFT)
        tokens[at] = draw(q, where, torch.from_numpy(purposes).to(self.device)).cpu().numpy()
        if np.count_nonzero(coupled):  # a coupled draft is compared, never weighed
            keep = np.flatnonzero(~coupled)
            q, rows = q[torch.from_numpy(keep).to(self.device)], rows[keep]
        if len(rows):  # rows only drop out with depth: the next q is always one deeper
            self._q.append(q)
            self._q_rows.append(rows)

    def probs(self) -> Tensor | None:
        """q of every draft that stands, row after row and by depth within a row."""
        if not self._q:
            return None
        row = np.concatenate(self._q_rows)
        depth = np.repeat(iota(len(self._q_rows)), [len(r) for r in self._q_rows])
        stands = depth < self.depths[row]
        order = np.lexsort((depth, row))
        order = order[stands[order]]
        flat = torch.cat(self._q)
        if len(order) == len(row) and (order == iota(len(order))).all():
            return flat
        return flat[torch.from_numpy(order).to(self.device)]
