"""How the memory for KV is split between blocks and the state pages of recurrent layers."""

from __future__ import annotations

from typing import Any, cast

import pytest

from cbatch.core.request.errors import FieldError
from cbatch.engine import memory
from cbatch.engine.memory import CacheSizes, cache_sizes
from cbatch.engine.options import EngineOptions
from cbatch.runtime.backend import LargestStep, LoadedModels

BLOCK, PAGE, SLOT = 1000, 40_000, 3000  # bytes


class Models:
    def __init__(self, memory_bytes: int, page_bytes: int, block_bytes: int) -> None:
        self._memory_bytes, self._page_bytes = memory_bytes, page_bytes
        self._block_bytes = block_bytes

    def kv_block_bytes(self, block_size: int) -> int:
        return self._block_bytes

    def state_bytes(self, block_size: int, max_drafts: int) -> tuple[int, int]:
        return (self._page_bytes, SLOT) if self._page_bytes else (0, 0)

    def kv_memory_bytes(self, *_: object) -> int:
        return self._memory_bytes


def sizes(
    monkeypatch: pytest.MonkeyPatch,
    memory_bytes: int,
    *,
    page_bytes: int = PAGE,
    block_bytes: int = BLOCK,
    **options: Any,
) -> CacheSizes:
    monkeypatch.setattr(memory, "total_weight_bytes", lambda _: 0)
    given = EngineOptions(max_num_seqs=8, **options)
    largest = LargestStep(8, 1600, 1024, 16, max_drafts=8)
    models = Models(memory_bytes, page_bytes, block_bytes)
    return cache_sizes(cast("LoadedModels", models), given, largest)


def test_pages_and_blocks_share_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    ample = sizes(monkeypatch, 10**8)
    assert ample.num_blocks == 8 * 100  # all slots at full length
    assert ample.state_interval == PAGE // BLOCK  # as many bytes of KV as a page has
    # Two pages and one for a cached prefix per slot, and one per interval.
    assert ample.num_state_pages == 8 * 3 + 800 // 40
    # With less memory, slots share half of it. The rest is split between blocks and their pages.
    scarce = sizes(monkeypatch, 1_000_000 + 8 * SLOT)
    assert scarce == CacheSizes(260, 12 + 7, 40)
    assert scarce.num_blocks * BLOCK + 12 * PAGE + 260 / 40 * PAGE <= 1_000_000
    tiny = sizes(monkeypatch, 10_000)  # too little for one sequence, which is served all the same
    assert (tiny.num_blocks, tiny.num_state_pages) == (1, 2 + 1)
    assert sizes(monkeypatch, 10**8, enable_prefix_caching=False).num_state_pages == 8 * 2
    assert sizes(monkeypatch, 10**8, page_bytes=5).state_interval == 8
    assert sizes(monkeypatch, 10**8, page_bytes=0) == CacheSizes(800, 0, 1)
    # Layers without attention: blocks have no bytes, and yet their number is limited.
    assert sizes(monkeypatch, 10**8, block_bytes=0) == CacheSizes(800, 8 * 3 + 4, 256)
    bare = sizes(monkeypatch, 0, block_bytes=0, kv_cache_memory_bytes=10**7)
    assert 800 < bare.num_blocks < 256 * 10**7 / PAGE


def test_given_sizes_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    given = sizes(monkeypatch, 10**6, num_state_pages=5, state_interval=3, num_blocks=7)
    assert given == CacheSizes(7, 5, 3)
    assert sizes(monkeypatch, 0, kv_cache_memory_bytes=10**6).num_state_pages < 20
    with pytest.raises(FieldError, match="kv_cache_memory_bytes: does not hold one block"):
        sizes(monkeypatch, 0, kv_cache_memory_bytes=2 * PAGE + 8 * SLOT)
    for field in ("num_state_pages", "state_interval"):
        with pytest.raises(FieldError, match=f"{field}: would be ignored"):
            sizes(monkeypatch, 10**6, page_bytes=0, **{field: 4})
