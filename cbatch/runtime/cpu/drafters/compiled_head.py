"""An EAGLE head on the CPU. A step makes two calls to its C kernel (heads.h): `ingest` reads the
target's hidden states, and `draft` makes all drafts of all rows."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_long, c_void_p
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.runtime.compiled.build import library
from cbatch.runtime.compiled.product import LinearStruct
from cbatch.runtime.compiled.threads import num_threads
from cbatch.runtime.cpu.compiled_pass import PASS_ERRORS, CompiledDecoder, DecoderStruct, StepStruct
from cbatch.runtime.cpu.linear import Linear
from cbatch.runtime.input_batch import InputBatch
from cbatch.runtime.kv_cache import KVCache
from cbatch.runtime.model.arrays import I64

_ALIGNMENT_BYTES = 64


# The structs mirror those of heads.h, which describes their fields.
class _Head(ctypes.Structure):
    _fields_ = [
        ("decoder", POINTER(DecoderStruct)),
        ("fc", LinearStruct),
        *((name, c_void_p) for name in ("norm", "carry_norm", "vocabulary")),
        *((name, c_long) for name in ("layers", "width", "normed", "carries_normed")),
    ]


class _SlotTable(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("tokens", "blocks", "of_slot", "of_block")),
        *((name, c_long) for name in ("token_stride", "block_stride")),
    ]


class _HeadCall(ctypes.Structure):
    _fields_ = [
        ("head", POINTER(_Head)),
        ("table", POINTER(_SlotTable)),
        ("step_template", POINTER(StepStruct)),
        ("work", c_void_p),
    ]


class StateFusing(NamedTuple):
    """The mapping of a position's hidden states [layers, width] to one input state of the head.

    First come RMS norms with the weights `norms`, fp32 [layers * width]; None: no norm. Each
    layer's state is normed alone, or with `norms_all` the concatenation of them. Then `fc` maps the
    concatenation to one state. `fc` is None if the head reads one layer, whose state is the input.
    """

    layers: int
    width: int
    fc: Linear | None
    norms: Tensor | None
    norms_all: bool


class SlotStates(NamedTuple):
    """The slots, the head's KV cache, and its input states at the last position of each slot
    (`of_slot` fp32 [slots, hidden]) and of each KV block (`of_block` fp32 [blocks, hidden])."""

    table: InputBatch
    kv: KVCache
    of_slot: Tensor
    of_block: Tensor


class CompiledHead:
    """The C kernel of an EAGLE head.

    `vocabulary` int64 maps the index of a logit to the target's token id; None: they are equal.
    Each draft reads the output state of the draft before it. With `carries_normed`, it reads that
    state after an RMS norm with the weights `carry_norm`, fp32 [hidden]; None: all weights are 1.
    """

    def __init__(
        self,
        decoder: CompiledDecoder,
        fusing: StateFusing,
        vocabulary: Tensor | None,
        *,
        carries_normed: bool,
        carry_norm: Tensor | None,
    ) -> None:
        kernel = library()
        assert kernel is not None
        self._decoder, self._fuse, self._fusing = decoder, kernel.fuse, fusing
        self._ingest, self._draft, self._bytes = kernel.ingest, kernel.draft, kernel.head_bytes
        # The kernel divides by the root of the sum of squares, not of their mean, so the weights
        # include the root of the number of elements.
        norm_size = fusing.width * (fusing.layers if fusing.norms_all else 1)
        norms = fusing.norms
        if norms is not None:
            norms = (norms.flatten() * norm_size**0.5).contiguous()
        size = decoder.hidden_size
        carry = None if carry_norm is None else (carry_norm * size**0.5).contiguous()
        self._tensors = norms, carry, vocabulary  # keeps them alive: the struct has their addresses
        fc = None if fusing.fc is None else fusing.fc.compiled
        self._struct = _Head(
            ctypes.pointer(decoder.struct),
            LinearStruct() if fc is None else fc.struct,
            *(None if each is None else each.data_ptr() for each in self._tensors),
            fusing.layers,
            fusing.width,
            norm_size,
            carries_normed,
        )
        self._pointer = ctypes.pointer(self._struct)
        self._slot_arrays: tuple[object, ...] = (None,) * 4  # arrays that `_slot_table` points to
        self._slot_table: Any = None
        self._fuse.argtypes = [POINTER(_HeadCall), c_void_p, c_long, c_void_p]
        self._fuse.restype = None
        self._ingest.argtypes = [POINTER(_HeadCall), *[c_void_p] * 4, *[c_long] * 3]
        self._draft.argtypes = [POINTER(_HeadCall), *[c_void_p] * 3, *[c_long] * 3, *[c_void_p] * 2]
        self._bytes.argtypes = [POINTER(_Head), *[c_long] * 3]
        self._bytes.restype = c_long
        self._work = torch.empty(0, dtype=torch.uint8)

    def fuse(self, hidden: Tensor) -> Tensor:
        """Return the head's input states [T, hidden] from states fp32 [T, layers, width]."""
        rows, hidden = len(hidden), hidden.contiguous()
        fused = torch.empty(rows, self._decoder.hidden_size)
        step = StepStruct(threads=num_threads())
        work = self._work_address(rows, 1, 1)
        call = _HeadCall(self._pointer, None, ctypes.pointer(step), work)
        self._fuse(call, hidden.data_ptr(), rows, fused.data_ptr())
        return fused

    def ingest(
        self, states: SlotStates, slots: NDArray[np.integer], starts: I64, lens: I64, hidden: Tensor
    ) -> None:
        """Write the head's K and V at positions [starts[i], starts[i] + lens[i]) of slots[i].

        `hidden` has the target's states at these positions, fp32 [sum of lens, layers, width]. A
        slot may occur several times, with successive positions. Updates the last states in
        `states`."""
        rows, longest = len(hidden), int((starts + lens).max())
        table_width = min(-(-longest // states.kv.block_size), states.table.blocks.shape[1])
        call = self._setting(states, rows, len(slots), longest, table_width)
        arrays = [_longs(array) for array in (slots, starts, lens)]
        addresses, hidden = map(_address, arrays), hidden.contiguous()
        sizes = len(slots), rows, table_width
        self._raise(self._ingest(call, hidden.data_ptr(), *addresses, *sizes))

    def draft(
        self, states: SlotStates, slots: NDArray[np.integer], known: I64, depths: I64
    ) -> tuple[I64, I64, NDArray[np.bool_]]:
        """Draft up to `depths[i]` >= 1 tokens greedily for slots[i], which has `known[i]` tokens.

        Return the drafts [R, deepest], the number of drafts of each row, and bool [R]: whether a
        row's drafting ended early because its logits were not finite."""
        rows, deepest = len(slots), int(depths.max())
        longest = int((known + depths).max())
        table_width = min(-(-longest // states.kv.block_size), states.table.blocks.shape[1])
        call = self._setting(states, rows, rows, longest, table_width)
        drafts = np.zeros((rows, deepest), dtype=np.int64)
        failed = np.zeros(rows, dtype=np.bool_)
        counts = np.array(depths, dtype=np.int64)
        arrays = [_longs(slots), _longs(known), counts]
        addresses = map(_address, arrays)
        sizes = rows, deepest, table_width
        self._raise(self._draft(call, *addresses, *sizes, _address(drafts), _address(failed)))
        return drafts, counts, failed

    def _setting(
        self, states: SlotStates, rows: int, sequences: int, positions: int, table_width: int
    ) -> _HeadCall:
        step = ctypes.pointer(self._decoder.step_template(rows, positions, states.kv))
        work = self._work_address(rows, sequences, table_width)
        return _HeadCall(self._pointer, self._slot_table_pointer(states), step, work)

    def _slot_table_pointer(self, states: SlotStates) -> Any:
        """Return a pointer to the struct with the slots' addresses, rebuilt if an array changed."""
        table = states.table
        arrays = table.tokens, table.blocks, states.of_slot, states.of_block
        if any(a is not b for a, b in zip(arrays, self._slot_arrays, strict=True)):
            addresses = _address(table.tokens), _address(table.blocks)
            state_addresses = states.of_slot.data_ptr(), states.of_block.data_ptr()
            strides = table.tokens.shape[1], table.blocks.shape[1]
            self._slot_table = ctypes.pointer(_SlotTable(*addresses, *state_addresses, *strides))
            self._slot_arrays = arrays
        return self._slot_table

    def _work_address(self, *sizes: int) -> int:
        num_bytes = self._bytes(self._struct, *sizes) + _ALIGNMENT_BYTES
        if len(self._work) < num_bytes:
            self._work = torch.empty(2 * num_bytes, dtype=torch.uint8)
        address = self._work.data_ptr()
        return address + -address % _ALIGNMENT_BYTES

    @staticmethod
    def _raise(status: int) -> None:
        if status:
            raise IndexError(PASS_ERRORS[status])


def _address(array: NDArray[np.generic]) -> int:
    assert array.flags.c_contiguous
    return array.ctypes.data


def _longs(array: NDArray[np.integer]) -> I64:
    return np.ascontiguousarray(array, dtype=np.int64)
