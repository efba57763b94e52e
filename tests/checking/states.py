"""A shadow of the state pages: the prefix whose state each page has."""

from __future__ import annotations

import numpy as np

from tests.checking.kv import POISON, UNWRITTEN, ContractBreachError
from tests.checking.slots import CheckedSlot, require

WRONG = 2  # no prefix has this hash


class ShadowStates:
    """Prefix hashes (uint64) by state page. Without pages nothing is checked."""

    def __init__(self, num_pages: int, block_size: int) -> None:
        self._cells = np.zeros(num_pages, np.uint64)
        self._size = block_size

    def admit(self, slot: CheckedSlot) -> None:
        a = slot.admission
        boundary, odd = divmod(a.kv_len_tokens, self._size)
        if not len(self._cells):
            require(a.state_page is None, f"{slot.label}: a page, but the model has no states")
            return
        require(not odd, f"{slot.label}: begins within a block, where no state is")
        require((a.state_page is None) == (not boundary), f"{slot.label}: page and hit disagree")
        if a.state_page is not None:
            slot.states[boundary] = a.state_page

    def give(self, slot: CheckedSlot, boundary: int, page: int) -> None:
        require(0 <= page < len(self._cells), f"page {page} does not exist")
        slot.states[boundary] = page

    def check_read(self, slot: CheckedSlot) -> None:
        """Raise unless the state before the row's first token is the state of its prefix."""
        boundary = slot.kv_len_tokens // self._size
        if not boundary or not len(self._cells):
            return
        page = slot.states.get(boundary)
        require(page is not None, f"{slot.label}: no page at boundary {boundary}")
        cell, expected = int(self._cells[page]), int(slot.hashes[boundary * self._size - 1])
        if cell != expected:
            what = {UNWRITTEN: "nothing", POISON: "a non-finite value"}.get(cell, "another state")
            raise ContractBreachError(f"{slot.label}: page {page}, block {boundary}: {what}")

    def write(self, slot: CheckedSlot, start: int, hashes: np.ndarray) -> list[int]:
        """Write the states at the boundaries after `start` that tokens with these hashes reach, and
        return the pages."""
        first, last = start // self._size, (start + len(hashes)) // self._size
        written = []
        for boundary in range(first + 1, last + 1) if len(self._cells) else ():
            page = slot.states.get(boundary)
            require(
                page is not None or boundary < last, f"{slot.label}: no page at boundary {boundary}"
            )
            if page is not None:
                self._cells[page] = hashes[boundary * self._size - 1 - start]
                written.append(page)
        return written

    def clear(self) -> None:
        self._cells[:] = UNWRITTEN
