"""Matrix products with constant weights, by the compiled kernel."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from ctypes import POINTER, c_int, c_long, c_void_p
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from cbatch.runtime.compiled.build import library
from cbatch.runtime.compiled.structs import constants, struct
from cbatch.runtime.compiled.threads import num_threads

_ALIGNMENT_BYTES = 64
_SLAB_BYTES = 1 << 25  # memory that the panels of small matrices share
_slab: Tensor | None = None  # the free rest of the current slab
_slab_lock = threading.Lock()
_PANELS_AT_ONCE = 256  # panels packed in one copy
SINGLE_THREAD_BELOW = 1 << 18  # multiplications below which one thread is faster than several
MAX_LANES = 16  # floats in the widest vector of any build
# ggml's numbers of these types.
TYPES = {torch.float32: 0, torch.bfloat16: 30}
BLOCK_TYPES = {"Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q4_K": 12, "Q5_K": 13}
BLOCK_TYPES |= {"Q2_K": 10, "Q3_K": 11, "Q6_K": 14, "IQ4_NL": 20, "IQ4_XS": 23, "MXFP4": 39}


Segment, LinearStruct = struct("segment"), struct("linear")  # of problem.h
_row_forms = constants("row_form")


class Blocks(NamedTuple):
    """A matrix [out, columns] in blocks of a GGUF type, as stored in a file. `rows` is uint8 [out,
    bytes of a row]; `type` is the name of the type."""

    type: str
    columns: int
    rows: NDArray


class OutputRuns(NamedTuple):
    """The columns of a product's result that one of its matrices fills: runs of `length` columns,
    their starts `pitch` apart, from column `first` on."""

    length: int
    pitch: int
    first: int


class CompiledProduct:
    """The product y = (x * in_scale) W^T + bias of fp32 rows x [T, in], contiguous: fp32 [T, out].

    Weights are fp32 or bf16; see `of_blocks` for other types. A whole pass multiplies its rows by
    `scale`, which is `in_scale` in fp32.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, in_scale: Tensor | None) -> None:
        """Pack the weights. Raises ValueError if `compiles` is False for them."""
        kernel = library()
        if kernel is None or not compiles(weight.dtype):
            raise ValueError(f"weight: {weight.dtype} of {tuple(weight.shape)} has no kernel")
        out, columns = weight.shape
        panels = panels_of(weight, kernel.lanes())
        segment = Segment(panels.data_ptr(), out, out, out, 0, TYPES[weight.dtype])
        self._fill_struct((out, columns), [panels], [segment], bias, in_scale, block_types=())

    @classmethod
    def of_blocks(
        cls,
        parts: Sequence[tuple[Blocks, OutputRuns]],
        bias: Tensor | None,
        in_scale: Tensor | None,
    ) -> CompiledProduct:
        """Return the product of several matrices with the same columns, stacked or interleaved.
        Rows of x are rounded to 8 bits, 32 columns at a time (see blocks.h). Needs
        `compiles_blocks`."""
        kernel, product = library(), cls.__new__(cls)
        assert kernel is not None
        columns = parts[0][0].columns
        panel_list, segments = [], []
        for blocks, run in parts:
            panels = _packed(kernel, blocks)
            panel_list.append(panels)
            number = BLOCK_TYPES[blocks.type]
            segments.append(Segment(panels.data_ptr(), len(blocks.rows), *run, number))
        out = sum(len(blocks.rows) for blocks, _ in parts)
        types = tuple(sorted({blocks.type for blocks, _ in parts}))
        shape = out, columns
        product._fill_struct(shape, panel_list, segments, bias, in_scale, block_types=types)
        return product

    def _fill_struct(
        self,
        shape: tuple[int, int],
        panels: list[Tensor],
        segments: list[Any],
        bias: Tensor | None,
        in_scale: Tensor | None,
        *,
        block_types: tuple[str, ...],
    ) -> None:
        """Fill the struct, and keep a reference to all memory whose address it holds."""
        kernel = library()
        assert kernel is not None
        self.shape, self.panels, self.block_types = shape, panels, block_types
        self._bias = None if bias is None else bias.float().contiguous()
        self.scale = None if in_scale is None else in_scale.float().contiguous()
        self._segments = (Segment * len(segments))(*segments)
        self.struct = LinearStruct(self._segments, address_of(self._bias), len(segments), shape[1])
        self._call = kernel.product
        self._call.argtypes = [POINTER(LinearStruct), c_void_p, c_void_p, c_long, c_long, c_long]

    @property
    def types(self) -> set[int]:
        """ggml's type numbers of the segments."""
        return {segment.type for segment in self._segments}

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """Type and number of outputs of each segment."""
        return tuple((segment.type, segment.out) for segment in self._segments)

    @property
    def row_form(self) -> Any:
        """The form of the rows that it reads: a `row_form` of problem.h."""
        return _row_forms(_asked("row_form", self.struct))

    @property
    def can_gate(self) -> bool:
        """True if it can output silu(gate) * up of its outputs gate | up."""
        return bool(_asked("can_gate", self.struct))

    @property
    def num_bytes(self) -> int:
        return sum(panels.nbytes for panels in self.panels)

    def __call__(self, x: Tensor, rows: int) -> Tensor:
        out, columns = self.shape
        x = x if self.scale is None else x * self.scale
        y = x.new_empty(rows, out)
        threads = 1 if rows * out * columns < SINGLE_THREAD_BELOW else num_threads()
        if self._call(self.struct, x.data_ptr(), y.data_ptr(), rows, out, threads):
            raise MemoryError(f"a product of {rows} rows with {columns} columns")
        return y


def _asked(question: str, of: Any) -> int:
    function = getattr(library(), question)
    function.argtypes = [POINTER(LinearStruct)]
    return int(function(of))


def compiles(dtype: torch.dtype) -> bool:
    """Return whether there is a kernel here for weights of this type."""
    return dtype in TYPES and library() is not None


def compiles_blocks(blocks: Blocks) -> bool:
    """Return whether there is a kernel here for a matrix of these blocks."""
    return blocks.type in BLOCK_TYPES and library() is not None


def _packed(kernel: ctypes.CDLL, blocks: Blocks) -> Tensor:
    out, columns, number = len(blocks.rows), blocks.columns, BLOCK_TYPES[blocks.type]
    kernel.bytes_of_panel.argtypes, kernel.bytes_of_panel.restype = [c_int, c_long], c_long
    panels = -(-out // kernel.lanes())
    memory = _aligned(panels * kernel.bytes_of_panel(number, columns), torch.uint8)
    kernel.pack.argtypes = [c_int, c_void_p, c_long, c_long, c_void_p, c_long]
    kernel.pack.restype = None
    rows = np.ascontiguousarray(blocks.rows)
    threads = num_threads()
    kernel.pack(number, rows.ctypes.data, out, columns, memory.data_ptr(), threads)
    return memory


def _aligned(count: int, dtype: torch.dtype) -> Tensor:
    """Allocate memory for panels. Small matrices share a slab: allocations below some MiB get no
    huge pages, and page table lookups would slow products of few rows."""
    global _slab
    num_bytes = -(-count * dtype.itemsize // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    if num_bytes > _SLAB_BYTES // 4:
        return _fresh(num_bytes).view(dtype)[:count]
    with _slab_lock:
        if _slab is None or len(_slab) < num_bytes:
            _slab = _fresh(_SLAB_BYTES)
        chunk, _slab = _slab[:num_bytes], _slab[num_bytes:]
    return chunk.view(dtype)[:count]


def _fresh(num_bytes: int) -> Tensor:
    memory = torch.empty(num_bytes + _ALIGNMENT_BYTES, dtype=torch.uint8)
    start = -memory.data_ptr() % _ALIGNMENT_BYTES
    return memory[start : start + num_bytes]


def panels_of(weight: Tensor, lanes: int) -> Tensor:
    """Pack weights [out, in] into aligned panels: [panels, in, lanes], or for bf16 pairs of
    columns, [panels, in / 2, lanes, 2]. The last panel and the last pair are padded with zeros.
    """
    pair = 2 if weight.dtype == torch.bfloat16 else 1
    out, columns = weight.shape[0], weight.shape[1] + weight.shape[1] % pair
    count = -(-out // lanes)
    memory = _aligned(count * lanes * columns, weight.dtype)
    panels = memory.view(count, columns // pair, -1, pair)
    for first in range(0, count, _PANELS_AT_ONCE):  # a copy of all panels would double the memory
        part = weight[first * lanes : (first + _PANELS_AT_ONCE) * lanes]
        part = F.pad(part, (0, columns - weight.shape[1], 0, -len(part) % lanes))
        paired = part.view(-1, lanes, columns // pair, pair).transpose(1, 2)
        panels[first : first + _PANELS_AT_ONCE].copy_(paired)
    return panels


def address_of(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
