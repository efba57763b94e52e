"""Attention over paged KV, layer by layer, for models whose other operations run in torch."""

from __future__ import annotations

from ctypes import POINTER, c_long
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.runtime.compiled.build import library
from cbatch.runtime.compiled.structs import struct
from cbatch.runtime.compiled.threads import num_threads
from cbatch.runtime.model.records import Attention

_ALIGNMENT_BYTES = 64
_NUMBERS_OF_A_ROW = 6  # int64 per row: its sequence, its position, a `piece` (4)
_NO_WINDOW = 1 << 40  # tokens: longer than any context
_WRONG = "block_tables: too short for the context, or with a block that is not in the cache"


AttendedStepStruct, LayerStruct = struct("attention_step"), struct("attention_layer")


class LayerAttention:
    """A layer's attention parameters in the form that the kernel takes."""

    def __init__(self, mixer: Attention, sinks: Tensor | None = None) -> None:
        """Raises ValueError for parameters that the kernel does not support. `sinks`: [heads]."""
        _check(mixer, sinks)
        kernel = library()
        if kernel is None:
            raise ValueError("attention: there are no kernels for this machine")
        self.mixer = mixer
        self._sinks = None if sinks is None else sinks.detach().float().contiguous()
        floats = kernel.attention_floats
        floats.argtypes, floats.restype = [c_long] * 3, c_long
        self.scratch_floats = int(floats(mixer.group, mixer.key_dim, mixer.value_dim))
        self.struct = LayerStruct(
            sinks=None if self._sinks is None else self._sinks.data_ptr(),
            kv_heads=mixer.kv_heads,
            group=mixer.group,
            dim=mixer.key_dim,
            value_dim=mixer.value_dim,
            window=_NO_WINDOW if mixer.window is None else mixer.window,
            scale=mixer.scale,
            cap=mixer.soft_cap,
        )


def _check(m: Attention, sinks: Tensor | None) -> None:
    """Raises ValueError for parameters that the kernel does not support."""
    if min(m.heads, m.kv_heads, m.key_dim, m.value_dim) < 1 or m.heads % m.kv_heads:
        raise ValueError(
            f"heads: {m.heads} queries of {m.key_dim} to {m.kv_heads} of {m.value_dim}"
        )
    if m.key_dim % 2:
        raise ValueError(f"key_dim: {m.key_dim} is odd, but K is stored in pairs")
    if m.window is not None and m.window < 1:
        raise ValueError(f"window: {m.window}, which excludes every token")
    if m.soft_cap < 0:
        raise ValueError(f"soft_cap: {m.soft_cap} is below 0")
    if sinks is not None and tuple(sinks.shape) != (m.heads,):
        raise ValueError(f"sinks: {tuple(sinks.shape)} for {m.heads} heads")


class CompiledAttention:
    """Attention of one model: creates its steps, and owns their working memory."""

    def __init__(self) -> None:
        """Raises ValueError without kernels."""
        kernel = library()
        if kernel is None:
            raise ValueError("attention: there are no kernels for this machine")
        self.kernel = kernel
        kernel.begin_attention.argtypes = [POINTER(AttendedStepStruct)]
        kernel.end_attention.argtypes, kernel.end_attention.restype = [], None
        kernel.attend_layer.argtypes = [POINTER(AttendedStepStruct), POINTER(LayerStruct)]
        kernel.attend_layer.restype = None
        self._numbers = np.empty(0, np.int64)
        self._scratch = torch.empty(0)

    def step(
        self,
        query_lens: NDArray[np.integer],
        context_lens: NDArray[np.integer],
        block_tables: NDArray[np.integer],
        *,
        num_blocks: int,
        block_size: int,
    ) -> AttentionStep:
        """Return a step of a ragged batch of B sequences. Sequence b has `query_lens[b]` rows, the
        last one at position `context_lens[b]` - 1. `block_tables` [B, W] has ids below `num_blocks`
        of blocks of `block_size` positions. Entering the step raises IndexError if the tables do
        not hold the context."""
        rows, threads = int(query_lens.sum()), num_threads()
        arrays = [np.ascontiguousarray(x, np.int32) for x in (query_lens, context_lens)]
        tables = np.ascontiguousarray(block_tables, np.int32)
        if len(self._numbers) < rows * _NUMBERS_OF_A_ROW:
            self._numbers = np.empty(2 * rows * _NUMBERS_OF_A_ROW, np.int64)
        numbers = self._numbers.ctypes.data
        values = AttendedStepStruct(
            rows=struct("ragged")(
                *(each.ctypes.data for each in (*arrays, tables)),
                rows,
                len(arrays[0]),
                tables.shape[1],
                num_blocks,
                block_size,
            ),
            sequences=numbers,
            positions=numbers + 8 * rows,
            pieces=numbers + 16 * rows,
            threads=threads,
        )
        return AttentionStep(self, values, (*arrays, tables))

    def scratch(self, floats: int, threads: int) -> int:
        """Return the address of working memory: `floats` for each thread."""
        if self._scratch.numel() < floats * threads + _ALIGNMENT_BYTES:
            self._scratch = torch.empty(floats * threads + _ALIGNMENT_BYTES)
        address = self._scratch.data_ptr()
        return address + -address % _ALIGNMENT_BYTES


class AttentionStep:
    """A context manager for one step: call `attend` for each layer inside it. Threads stay awake
    between these calls and sleep afterwards."""

    def __init__(self, of: CompiledAttention, values: Any, kept_alive: tuple[object, ...]) -> None:
        self._of, self.struct, self._kept_alive = of, values, kept_alive

    def __enter__(self) -> AttentionStep:
        if self._of.kernel.begin_attention(self.struct):
            raise IndexError(_WRONG)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._of.kernel.end_attention()

    def attend(
        self,
        layer: LayerAttention,
        blocks: Tensor,
        queries: Tensor,
        keys: Tensor | None,
        values: Tensor | None,
    ) -> Tensor:
        """Write keys [..., kv_heads, T, key_dim] and values [..., kv_heads, T, value_dim] to
        `blocks`. Then return the attention of queries [..., heads, T, key_dim]: fp32 [T, heads,
        value_dim].

        Keys and values are None if the blocks hold them already. Leading dimensions are 1. fp32
        inputs with dense rows are not copied. `blocks` is the layer's KV cache, contiguous fp32 or
        bf16 [kv_heads * num_blocks, block_size * (key_dim + value_dim)]: for each head and block K,
        then V (see paged.h). Raises ValueError for other shapes.
        """
        shape, call, step = layer.mixer, layer.struct, self.struct
        self._point(layer, blocks)
        queries = _rows(queries, "queries", (shape.heads, step.rows.rows, shape.key_dim))
        call.query_head, call.query_row, _ = queries.stride()
        call.queries, call.keys = queries.data_ptr(), None
        if keys is not None and values is not None:
            keys = _rows(keys, "keys", (shape.kv_heads, step.rows.rows, shape.key_dim))
            values = _rows(values, "values", (shape.kv_heads, step.rows.rows, shape.value_dim))
            call.keys, call.values = keys.data_ptr(), values.data_ptr()
            call.key_head, call.key_row, _ = keys.stride()
            call.value_head, call.value_row, _ = values.stride()
        out = torch.empty(step.rows.rows, shape.heads, shape.value_dim)
        call.out = out.data_ptr()
        self._of.kernel.attend_layer(step, call)
        return out

    def _point(self, layer: LayerAttention, blocks: Tensor) -> None:
        """Set the addresses of the layer's blocks and of the step's working memory. Raises
        ValueError for blocks of another size or type."""
        shape, step = layer.mixer, self.struct
        width = shape.key_dim + shape.value_dim
        size = shape.kv_heads * step.rows.blocks * step.rows.block_size * width
        if blocks.numel() != size or blocks.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"blocks: {blocks.numel()} of {blocks.dtype} for {size} numbers")
        layer.struct.blocks, layer.struct.half = blocks.data_ptr(), blocks.dtype == torch.bfloat16
        if layer.scratch_floats > step.scratch_size:
            step.scratches = self._of.scratch(layer.scratch_floats, step.threads)
            step.scratch_size = layer.scratch_floats


def _rows(x: Tensor, name: str, shape: tuple[int, int, int]) -> Tensor:
    """Return `x` as fp32 of this shape with a dense last dimension. Raises ValueError for other
    shapes."""
    if x.shape[-3:] != shape or x.numel() != shape[0] * shape[1] * shape[2]:
        raise ValueError(f"{name}: {tuple(x.shape)}, of which the last should be {shape}")
    if x.dim() > 3:
        x = x[(0,) * (x.dim() - 3)]
    if x.dtype != torch.float32 or x.stride(2) != 1:
        x = x.float().contiguous()
    return x
