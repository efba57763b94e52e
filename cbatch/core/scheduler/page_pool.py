"""State pages of recurrent layers: which are free, in use, or owned by nodes of the prefix cache.

A page has the states of all recurrent layers at one block boundary: after the first j blocks of a
sequence. A node of the trie (see block_pool.py) may own the page for the boundary after its block.
A prefix hit ends at such a node, because recurrent layers can only continue from a state.
"""

from __future__ import annotations

import numpy as np

from cbatch.core.scheduler.caching_pool import CachingPool

NO_PAGE = -1


class PagePool(CachingPool):
    """Allocates `num_pages` pages. A page that a node owns is cached, and evicted by itself."""

    def __init__(self, num_pages: int, num_blocks: int) -> None:
        super().__init__(num_pages)
        self._pages = np.full(num_blocks, NO_PAGE, dtype=np.intp)  # by block: its node's page
        self._owners = np.zeros(num_pages, dtype=np.intp)  # block by page, if a node owns the page
        # By block: whether its node will own a page as soon as it is ready.
        self._promised = np.zeros(num_blocks, dtype=np.bool_)

    def page_of(self, block: int) -> int:
        """Return the page of the block's node, or `NO_PAGE`."""
        return self._pages.item(block)

    def longest(self, path: list[int]) -> int:
        """Return the number of leading blocks of a path up to the last one that owns a page."""
        owned = (self._pages[path] != NO_PAGE).nonzero()[0]
        return owned.item(-1) + 1 if len(owned) else 0

    def promise(self, blocks: np.ndarray) -> None:
        """Note that a running sequence will give a page to these blocks."""
        self._promised[blocks] = True

    def any_promised(self, blocks: list[int]) -> bool:
        return bool(self._promised[blocks].any())

    def give(self, page: int, block: int) -> None:
        """Let the node of a block own a page. If the node has one, with equal contents, that page
        counts as used just now."""
        owned = self._pages.item(block)
        if owned == NO_PAGE:
            self._pages[block], self._owners[page], self._ready[page] = page, block, True
        elif owned != page:
            self.acquire([owned])
            self.release(np.array([owned]))

    def forget_blocks(self, blocks: np.ndarray) -> None:
        """Remove the pages of nodes that leave the trie."""
        self._promised[blocks] = False
        pages = self._pages[blocks]
        pages = pages[pages != NO_PAGE]
        if len(pages):
            self._forget(pages)
            unreferenced = pages[self.ref_counts[pages] == 0]
            self._cached.remove(unreferenced)
            self._free += unreferenced.tolist()

    def _forget(self, pages: np.ndarray) -> None:
        owned = pages[self._ready[pages]]
        self._pages[self._owners[owned]] = NO_PAGE
        self._ready[owned] = False

    def check(self) -> None:
        """Also check that nodes and pages refer to each other."""
        super().check()
        blocks = (self._pages != NO_PAGE).nonzero()[0]
        pages = self._pages[blocks]
        assert (self._owners[pages] == blocks).all(), "a page has two owners"
        assert np.array_equal(np.sort(pages), self._ready.nonzero()[0])
