"""Recurrent mixers by torch, token by token: the reference of the compiled pass."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from cbatch.runtime.batch import PASS_ERRORS
from cbatch.runtime.kv_cache import KVCache
from cbatch.runtime.layers import RecurrenceWeights
from cbatch.runtime.model.records import Recurrence
from cbatch.runtime.state_memory import LayerStates

_KEY_EPS = 1e-6  # of the L2 norm of queries and keys


class StateRows(NamedTuple):
    """Rows [row, row + length) of a step, at positions from `first`. `pages` are its row of
    `state_tables`."""

    row: int
    length: int
    first: int
    slot: int
    pages: list[int]
    block_size: int
    ring: int

    @property
    def boundary(self) -> int:
        """Return the last block boundary at or before the first row."""
        return self.first // self.block_size

    def places(self, start: int, end: int) -> NDArray[np.int64]:
        """Return the places in the ring of positions [start, end)."""
        return np.arange(start, end) % self.ring

    def page_of(self, boundary: int) -> int:
        """Return the page that keeps the state at a boundary; without an own one, the page of the
        last boundary in the step."""
        page = self.pages[boundary]
        return page if page >= 0 else self.pages[(self.first + self.length) // self.block_size]


def plan_states(
    query_lens: NDArray[np.int32],
    context_lens: NDArray[np.int32],
    kv: KVCache,
    tables: NDArray[np.int32] | None,
    slots: NDArray[np.int32] | None,
) -> list[StateRows]:
    """Return the rows of each sequence. Raises IndexError with a message of `PASS_ERRORS`."""
    assert kv.state is not None
    if tables is None or slots is None:
        raise IndexError(PASS_ERRORS[4])
    sequences, row = [], 0
    for length, context, pages, slot in zip(
        query_lens.tolist(), context_lens.tolist(), tables.tolist(), slots.tolist(), strict=True
    ):
        first, last = (context - length) // kv.block_size, context // kv.block_size
        needed = {each for each in (first, last) if each}
        valid = last < len(pages) and all(pages[each] >= 0 for each in needed)
        written = pages[first : last + 1]
        if not valid or max(written) >= kv.state.num_pages or not 0 <= slot < kv.state.num_slots:
            raise IndexError(PASS_ERRORS[4])
        sizes = kv.block_size, kv.state.ring
        sequences.append(StateRows(row, length, context - length, slot, pages, *sizes))
        row += length
    return sequences


def mix(
    m: Recurrence,
    weights: RecurrenceWeights,
    memory: LayerStates,
    rows: Tensor,
    sequence: StateRows,
) -> Tensor:
    """Return the output [length, inner] before the last projection, from the sequence's rows of the
    first projection."""
    inner, channels = m.inner, m.channels
    if m.rule == "convolution":
        before, after, inputs = rows.split([inner] * 3, dim=1)
        return after * _convolved(m, weights, memory, before * inputs, sequence)
    if m.rule == "delta":
        inputs, gate, beta, rates = rows.split([channels, inner, m.heads, m.heads], dim=1)
    else:
        gate, inputs, rates = rows.split([inner, channels, m.heads], dim=1)
    mixed = F.silu(_convolved(m, weights, memory, inputs, sequence))
    assert weights.decay is not None and weights.step_bias is not None
    steps, keys = F.softplus(rates + weights.step_bias), m.key_heads * m.key_dim
    if m.rule == "delta":
        q, k, v = mixed.split([keys, keys, inner], dim=1)
    else:
        v, k, q = mixed.split([inner, keys, keys], dim=1)
    v = v.unflatten(1, (m.heads, -1))
    q, k = (x.unflatten(1, (m.key_heads, -1)) for x in (q, k))
    if m.rule == "delta":
        q, k = (x * (x.square().sum(-1, keepdim=True) + _KEY_EPS).rsqrt() for x in (q, k))
        parts = q * m.key_dim**-0.5, k, v, beta.sigmoid(), weights.decay * steps
        out = _recurrence(m, memory, parts, sequence)
        out = F.rms_norm(out, (m.value_dim,), weights.norm, m.norm_eps)
        return out.flatten(1) * F.silu(gate)
    steps = steps.clamp(m.min_step, m.max_step)
    out = _recurrence(m, memory, (q, k, v, steps, weights.decay * steps), sequence)
    assert weights.skip is not None
    out = (out + weights.skip[:, None] * v).flatten(1) * F.silu(gate)
    if weights.norm is None:
        return out
    groups = F.rms_norm(out.unflatten(1, (m.groups, -1)), (inner // m.groups,), eps=m.norm_eps)
    return groups.flatten(1) * weights.norm


def _convolved(
    m: Recurrence,
    weights: RecurrenceWeights,
    memory: LayerStates,
    inputs: Tensor,
    sequence: StateRows,
) -> Tensor:
    """Return the causal convolution of the inputs [length, channels], and keep what later steps
    need of them."""
    size, tail = sequence.block_size, m.kernel - 1
    start, end = sequence.boundary * size, sequence.first + sequence.length
    slot = memory.inputs[sequence.slot, :, : m.channels]
    before = inputs.new_zeros(tail, m.channels)
    if start:
        before = memory.tails[sequence.pages[sequence.boundary], :, : m.channels]
    known = slot[sequence.places(start, sequence.first)]
    every = torch.cat([before, known, inputs])  # from position `start` - `tail` on
    for boundary in range(sequence.boundary + 1, end // size + 1):
        at = boundary * size - start
        memory.tails[sequence.page_of(boundary), :, : m.channels] = every[at : at + tail]
    kept = max(sequence.first, end - sequence.ring)
    slot[sequence.places(kept, end)] = inputs[kept - sequence.first :]
    windows = every[sequence.first - start :].unfold(0, m.kernel, 1)  # [length, channels, kernel]
    output = (windows * weights.conv[:, : m.channels].T).sum(-1)
    return output if weights.conv_bias is None else output + weights.conv_bias[: m.channels]


def _recurrence(
    m: Recurrence, memory: LayerStates, parts: tuple[Tensor, ...], sequence: StateRows
) -> Tensor:
    """Return S^T q of each row [length, heads, value_dim]: S decays, and gains k u^T. With the
    delta rule u = factor (v - S^T k), otherwise u = factor v."""
    size, width = sequence.block_size, m.value_dim
    q, k, v, factors, decays = parts
    own_keys, (q, k) = k, (_by_head(m, x, dim=1) for x in (q, k))
    state = k.new_zeros(m.heads, m.key_dim, width)
    if sequence.boundary:
        state = memory.states[sequence.pages[sequence.boundary], ..., :width].clone()
    keys, values = memory.keys[sequence.slot], memory.values[sequence.slot, ..., :width]
    own_decays, outputs, total = memory.decays[sequence.slot], [], k.new_zeros(m.heads)
    for place in sequence.places(sequence.boundary * size, sequence.first):
        key = keys[place, : m.key_heads * m.key_dim].unflatten(0, (m.key_heads, -1))
        key = _by_head(m, key, dim=0)
        state = state * (own_decays[:, place] - total).exp()[:, None, None]
        state = state + key[:, :, None] * values[:, place, None]
        total = own_decays[:, place].clone()
    for row in range(sequence.length):
        position = sequence.first + row
        place = position % sequence.ring
        total = decays[row] if position % size == 0 else total + decays[row]
        state = state * decays[row].exp()[:, None, None]
        value = v[row]
        if m.rule == "delta":
            value = value - torch.einsum("hkv,hk->hv", state, k[row])
        value = value * factors[row, :, None]
        state = state + k[row, :, :, None] * value[:, None]
        outputs.append(torch.einsum("hkv,hk->hv", state, q[row]))
        own = own_keys[row].flatten()
        keys[place, : len(own)] = own
        values[:, place], own_decays[:, place] = value, total
        if (position + 1) % size == 0:
            page = sequence.page_of((position + 1) // size)
            memory.states[page, ..., :width] = state
    return torch.stack(outputs)


def _by_head(m: Recurrence, of_keys: Tensor, dim: int) -> Tensor:
    """Return what each value head reads of its key head along a dimension."""
    group = m.heads // m.key_heads
    if m.tiled:
        return torch.cat([of_keys] * group, dim)
    return of_keys.repeat_interleave(group, dim)
