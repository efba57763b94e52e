"""The state pages of running sequences, for models with recurrent layers.

A step reads the page at the last boundary before its first token, and writes the pages at the later
boundaries that its tokens reach. So a sequence has the page of its *current* boundary, and before
each step gets one for every boundary at which it may continue: in a chunk of a prompt the last, and
while it decodes each that its drafts may cross. The page of a boundary that rejected drafts crossed
is written again.

At some boundaries the page goes to the prefix cache: at the last one of a prompt, where a prompt
leaves a cached path, every `state_interval` blocks, and where a sequence ends. If a chunk crosses
several such boundaries, the pages before the last are *extra*: the sequence continues without them.
A slot is only given to a sequence if `pages_per_slot` pages are left for it, so that no sequence is
preempted for a page.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

import numpy as np

from cbatch.core.request.errors import FieldError
from cbatch.core.scheduler.block_pool import BlockPool, Match, Node
from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.scheduler.page_pool import NO_PAGE, PagePool
from cbatch.core.scheduler.plan import PendingDeltas
from cbatch.core.scheduler.sequence import Sequence
from cbatch.core.scheduler.slot_table import InFlightStep, SlotTable, runs


def pages_per_slot(max_drafts: int, block_size: int, *, overlaps: bool = False) -> int:
    """Return the most pages, except extra ones, that a slot has in a step of up to `max_drafts`
    drafts; `overlaps`: while another step is in flight."""
    blocks = (1 + max_drafts) / block_size  # that a decoding row may fill
    return 1 + (max(ceil(2 * blocks), 1 + ceil(blocks)) if overlaps else ceil(blocks))


class SlotPages:
    """The pages of every slot by boundary, from the current one to the last."""

    def __init__(
        self,
        config: SchedulerConfig,
        max_drafts: int,
        table: SlotTable,
        blocks: BlockPool,
        deltas: PendingDeltas,
        cache_blocks: Callable[[int], None],
    ) -> None:
        """`cache_blocks` puts the complete blocks of a slot into the prefix cache."""
        self.pool = blocks.pages = PagePool(config.num_state_pages, config.num_blocks)
        self._config, self._table, self._blocks = config, table, blocks
        self._deltas, self._cache_blocks = deltas, cache_blocks
        size = config.block_size
        self._per_slot = pages_per_slot(max_drafts, size)
        self._per_overlapped_slot = pages_per_slot(max_drafts, size, overlaps=True)
        if config.num_state_pages < self._per_slot:
            problem = f"{config.num_state_pages} cannot hold the states of a sequence"
            raise FieldError("num_state_pages", problem, f"give {self._per_slot} or more")
        slots, max_blocks = table.blocks.shape
        self.tables = np.full((slots, max_blocks + 1), NO_PAGE, dtype=np.intp)
        # By slot: the current boundary, and the last one that has a page.
        self.current, self.last = np.zeros((2, slots), dtype=np.intp)
        # Boundaries to keep, in addition to those by interval: the last one of the tokens known at
        # admission, and the one where they leave the cached path.
        self._kept = np.zeros((slots, 2), dtype=np.intp)
        self._extra: list[tuple[int, int]] = []  # slots and boundaries

    def room(self, num_new_slots: int = 0, *, overlaps: bool) -> int:
        """Return how many pages are left if all slots in use, and this many more, take as many as
        they may; `overlaps`: while another step is in flight."""
        num_slots = len(self.tables) - self._table.num_free + num_new_slots
        per_slot = self._per_overlapped_slot if overlaps else self._per_slot
        return self.pool.size - len(self._extra) - num_slots * per_slot

    # ---- before a step -------------------------------------------------------------------------

    def admit(self, slot: int, sequence: Sequence, match: Match, blocks: np.ndarray) -> int | None:
        """Begin after a prefix hit, and return the page there; None: there is no hit. Of the other
        `blocks` of the prompt, those at boundaries to keep are promised a page."""
        end = (len(sequence.tokens) - 1) // self._config.block_size
        self._kept[slot] = end, match.num_known
        hits, page = len(match.blocks), None
        self.current[slot] = self.last[slot] = hits
        if hits:
            page = self.tables[slot, hits] = self.pool.page_of(match.blocks[-1])
            self.pool.acquire([page])
        self.pool.promise(blocks[[b - 1 for b in self._to_keep(slot, hits + 1, end + 1)]])
        return page

    def reserve(self, slots: np.ndarray, num_positions: np.ndarray) -> None:
        """Give decoding slots a page at each boundary of up to `num_positions[i]` in KV."""
        ends, last = num_positions // self._config.block_size, self.last[slots]
        short = (ends > last).nonzero()[0]
        if len(short):
            self._give(*runs(slots[short], last[short] + 1, ends[short] - last[short]))
            self.last[slots[short]] = ends[short]

    def reserve_chunk(self, slot: int, num_positions: int) -> None:
        """Give a slot the page at the last boundary of a chunk that ends after `num_positions`,
        and, as far as there is room, those to keep before it."""
        begin, end = self.last.item(slot) + 1, num_positions // self._config.block_size
        if end < begin:
            return
        room = max(self.room(overlaps=True), 0)
        extra = self._to_keep(slot, begin, end)
        extra = extra[max(len(extra) - room, 0) :]
        self._extra += [(slot, boundary) for boundary in extra]
        boundaries = np.array([*extra, end])
        self._give(np.full(len(boundaries), slot), boundaries)
        self.last[slot] = end

    # ---- after a step --------------------------------------------------------------------------

    def advance_rows(
        self, running: np.ndarray, owners: list[Sequence], in_flight: list[InFlightStep]
    ) -> None:
        """Advance the running slots, and free their pages that no plan in flight reaches. The next
        page stays: the slot will need it."""
        table, size = self._table, self._config.block_size
        kv_len = table.num_tokens - table.num_uncomputed_tokens
        ends, current = kv_len[running] // size, self.current[running]
        keeps = ends % self._config.state_interval == 0
        keeps |= (ends[:, None] == self._kept[running]).any(axis=1)
        pages = self.tables[running, current]
        # The usual case, for all rows at once: one boundary, without a page to keep, and the page
        # before it is the slot's own.
        usual = (ends == current + 1) & ~keeps & (self.pool.ref_counts[pages] < 2)
        for row in ((ends > current) & ~usual).nonzero()[0].tolist():
            self.advance(running.item(row), owners[row])
        if np.count_nonzero(usual):
            slots, pages = running[usual], pages[usual]
            self.pool.release(pages[pages != NO_PAGE])
            self.tables[slots, current[usual]] = NO_PAGE
            self.current[slots] += 1
        for step in in_flight:
            kv_len[step.rows] += step.plan.query_lens
        ends = np.maximum(kv_len // size, self.current + 1)[running]
        for row in (self.last[running] > ends).nonzero()[0].tolist():
            slot, end = running.item(row), ends.item(row)
            self._release(slot, end + 1, self.last.item(slot) + 1)
            self.last[slot] = end

    def advance(self, slot: int, sequence: Sequence, *, leaves: bool = False) -> None:
        """Make the last complete boundary of a slot the current one. Give the pages to keep up to
        there to the prefix cache, and release those before it."""
        kv_len, begin = self._table.kv_len(slot), self.current.item(slot)
        end = kv_len // self._config.block_size
        kept = self._to_keep(slot, begin + 1, end + 1)
        if leaves and end not in kept:
            kept.append(end)
        # A sequence that failed counts as cached beyond its KV, so that nothing of it is cached.
        failed = self._table.num_cached_tokens.item(slot) > kv_len
        if kept and self._config.enable_prefix_caching and not failed:
            self._cache_blocks(slot)
            path = self._path(slot, sequence.root)
            for boundary in kept:
                page = self.tables.item(slot, boundary)
                if page != NO_PAGE and boundary <= len(path):
                    self.pool.give(page, path[boundary - 1])
        self._release(slot, begin, end)
        self.current[slot] = end

    def taint(self, slot: int, root: Node) -> None:
        """Remove the pages of a slot's prefix from the cache, also those of nodes whose block is
        another sequence's: their values may not be finite."""
        self.pool.forget_blocks(np.array(self._path(slot, root), dtype=np.intp))

    def free(self, slot: int) -> None:
        """Release all pages of a slot."""
        self._release(slot, self.current.item(slot), self.last.item(slot) + 1)

    # ---- inside --------------------------------------------------------------------------------

    def _to_keep(self, slot: int, begin: int, end: int) -> list[int]:
        """Return the boundaries from `begin` to `end` - 1 whose pages enter the prefix cache."""
        interval, kept = self._config.state_interval, self._kept[slot].tolist()
        return [b for b in range(begin, end) if b % interval == 0 or b in kept]

    def _path(self, slot: int, root: Node) -> list[int]:
        """Return the ready blocks of the slot's prefix in the cache."""
        num_blocks = self._table.kv_len(slot) // self._config.block_size
        return self._blocks.ready_path(self._table.tokens[slot], num_blocks, root)

    def _give(self, slots: np.ndarray, boundaries: np.ndarray) -> None:
        pages = self.pool.allocate(len(slots))
        self.tables[slots, boundaries] = pages
        self._deltas.state_pages.append(np.array([slots, boundaries, pages], dtype=np.int32))

    def _release(self, slot: int, begin: int, end: int) -> None:
        pages = self.tables[slot, begin:end]
        owned = pages[pages != NO_PAGE]
        if len(owned):
            self.pool.release(owned)
            pages[:] = NO_PAGE
            if self._extra:
                self._extra = [x for x in self._extra if x[0] != slot or not begin <= x[1] < end]
