"""The paged KV cache of one model."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.runtime.model.config import ModelConfig
from cbatch.runtime.model.records import Attention, Recurrence
from cbatch.runtime.state_memory import StateMemory
from cbatch.system.pages import zeros_populated_in_background

_ALIGNMENT_BYTES = 64


class KVCache:
    """K and V in blocks of `block_size` tokens. Callers use the block ids 0 .. num_blocks - 1.

    Memory per layer: [kv_heads, blocks, block_size, 2 (K, V), head_dim]. K and V of a token are
    adjacent, as in the projection that makes them. The tokens of one head in one block are
    contiguous. So a write copies one run per (token, head), a gather copies one run per (block,
    head), and gathered tiles are operands of a batched product without another copy. The compiled
    pass reads blocks in place and stores K of a block transposed (see `paged.h`). One extra block,
    `scratch_block`, stays zero; it replaces blocks that a block table does not have.

    `block_rows[layer]` is [kv_heads * blocks, values of one head in one block]; a layer that reads
    the K and V of another has that layer's. If all layers have their own, of
    one shape, with equal dimensions of K and V, there is also a view: `data` [layers, 2, kv_heads,
    blocks, block_size, head_dim].
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        num_pages: int = 0,
        num_slots: int = 1,
        max_drafts: int = 0,
    ) -> None:
        """Allocate blocks, and for a model with recurrent layers also `num_pages` state pages and
        the entries of `num_slots` slots (see `StateMemory`)."""
        if num_blocks < 1 or block_size < 1:
            raise ValueError(
                f"num_blocks and block_size must be positive, got {num_blocks} and {block_size}"
            )
        self.num_blocks, self.block_size = num_blocks, block_size
        self.scratch_block = num_blocks
        self.state: StateMemory | None = None
        if config.recurrent:
            sizes = block_size, num_pages, num_slots, max_drafts
            self.state = StateMemory(config, *sizes, device=device)
        place, mixers = torch.device(device), [layer.mixer for layer in config.layers]
        # Zeroed, not empty: positions never written are masked, but they must be finite.
        attention = [mixer for mixer in mixers if isinstance(mixer, Attention)]
        shared = any(mixer.kv_from is not None for mixer in attention)
        shapes = {(mixer.kv_heads, mixer.key_dim, mixer.value_dim) for mixer in attention}
        heads, dim, value_dim = shapes.pop() if shapes else (0, 0, 0)
        if config.recurrent or shapes or shared or dim != value_dim:
            self.block_rows = _layers(mixers, num_blocks + 1, block_size, dtype, place)
            self.address = self._address_layers()
            return
        memory = _zeros(
            (config.num_layers, heads, num_blocks + 1, block_size, 2, dim), dtype, place
        )
        self.data = memory.permute(0, 4, 1, 2, 3, 5)
        self.block_rows = [layer.view(-1, block_size * 2 * dim) for layer in memory]
        self.address = self._address_layers()

    def _address_layers(self) -> int:
        """Return the address of an array with the addresses of all layers."""
        self._addresses = np.array([layer.data_ptr() for layer in self.block_rows], np.int64)
        return self._addresses.ctypes.data

    @torch.inference_mode()
    def zero_blocks(self, block_ids: Sequence[int] | NDArray[np.integer]) -> None:
        """Zero the contents of blocks, so that non-finite values in them cannot spread."""
        ids = np.asarray(block_ids, dtype=np.int64)
        if ids.size == 0:
            return
        if ids.min() < 0 or ids.max() >= self.num_blocks:
            raise ValueError(f"block ids must lie in 0..{self.num_blocks - 1}, got {ids.tolist()}")
        for layer in self.block_rows:
            if not layer.numel():
                continue
            index = torch.from_numpy(ids).to(layer.device)
            bits = layer.view(torch.uint8) if layer.itemsize == 1 else layer
            bits.view(-1, self.num_blocks + 1, bits.shape[1]).index_fill_(1, index, 0)

    @staticmethod
    def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
        """Return the bytes of one block over all layers."""
        per_token = sum(layer.mixer.kv_values for layer in config.layers)
        return per_token * block_size * dtype.itemsize


def _layers(
    mixers: Sequence[Attention | Recurrence],
    blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[Tensor]:
    widths = [block_size * (mixer.key_dim + mixer.value_dim) for mixer in mixers]
    counts = [mixer.kv_values * blocks * block_size for mixer in mixers]
    steps = [-(-count // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for count in counts]
    parts = _zeros((sum(steps),), dtype, device).split(steps)
    rows = [
        part[:count].view(count // width, width)
        for part, count, width in zip(parts, counts, widths, strict=True)
    ]
    sources = [mixer.kv_from if isinstance(mixer, Attention) else None for mixer in mixers]
    return [rows[i if source is None else source] for i, source in enumerate(sources)]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros aligned to 64 bytes, so that every row of a head begins at a cache line."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    pages = zeros_populated_in_background(num_bytes + _ALIGNMENT_BYTES)
    start = -pages.ctypes.data % _ALIGNMENT_BYTES
    return torch.from_numpy(pages[start : start + num_bytes]).view(dtype).view(shape)
