"""The memory of recurrent layers: states at block boundaries, and what later tokens add to them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.runtime.model.config import ModelConfig
from cbatch.runtime.model.records import Recurrence, padded


class LayerStates(NamedTuple):
    """One layer's memory, fp32. Of each page: the state of each head, and the last inputs of the
    convolution. Of each slot and token in its ring, the *entries*: the convolution's inputs, keys,
    corrected values and cumulative log decays since the block's start."""

    states: Tensor  # [pages, heads, key_dim, padded value_dim]
    tails: Tensor  # [pages, kernel - 1, padded channels]
    inputs: Tensor  # [slots, ring, padded channels]
    keys: Tensor  # [slots, ring, padded key_heads * key_dim]
    values: Tensor  # [slots, heads, ring, padded value_dim]
    decays: Tensor  # [slots, heads, ring]


class StateMemory:
    """A page has the states of all recurrent layers after a whole number of blocks. The token at
    position p of a slot has the place p % `ring` in its ring. The ring holds every block to which
    a sequence may return when up to `max_drafts` drafts are rejected.

    The compiled pass has its own layout of a state (see `recurrent.h`).
    """

    def __init__(
        self,
        config: ModelConfig,
        block_size: int,
        num_pages: int,
        num_slots: int = 1,
        max_drafts: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_pages, self.num_slots = num_pages, num_slots
        self.ring, self._device = ring_tokens(block_size, max_drafts), device
        mixers = [layer.mixer for layer in config.layers]
        self.layers = [
            self._layer(each) if isinstance(each, Recurrence) else None for each in mixers
        ]
        none = (0,) * len(LayerStates._fields)
        addresses = [
            none if layer is None else tuple(part.data_ptr() for part in layer)
            for layer in self.layers
        ]
        self._addresses = np.array(addresses, np.int64)  # `layer_states` of step.h
        self.address = self._addresses.ctypes.data

    def _layer(self, m: Recurrence) -> LayerStates:
        width, slots, channels = padded(m.value_dim), self.num_slots, padded(m.channels)
        heads = m.heads if m.key_dim else 0
        shapes = (
            (self.num_pages, heads, m.key_dim, width),
            (self.num_pages, m.kernel - 1, channels),
            (slots, self.ring, channels),
            (slots, self.ring, padded(m.key_heads * m.key_dim)),
            (slots, heads, self.ring, width),
            (slots, heads, self.ring),
        )
        return LayerStates(*(torch.zeros(shape, device=self._device) for shape in shapes))


def ring_tokens(block_size: int, max_drafts: int) -> int:
    """Return the tokens of a slot's ring: the blocks of up to `max_drafts` + 1 tokens."""
    return (max(max_drafts - 1, 0) // block_size + 2) * block_size


def slot_bytes(config: ModelConfig, block_size: int, max_drafts: int) -> int:
    """Return the bytes of one slot's entries."""
    mixers = (each.mixer for each in config.layers if isinstance(each.mixer, Recurrence))
    return 4 * ring_tokens(block_size, max_drafts) * sum(each.entry_floats for each in mixers)


def pages_of_blocks(tables: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return `state_tables` with a page for each block of `tables`, for passes without a scheduler:
    the state after a block is in the page with its number."""
    return np.pad(tables, ((0, 0), (1, 0)), constant_values=-1)
