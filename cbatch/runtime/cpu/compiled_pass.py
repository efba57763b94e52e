"""A decoder's whole pass in one call, where all its products are compiled."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from ctypes import POINTER, c_float, c_long, c_void_p
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.runtime.cpu.compiled.build import library
from cbatch.runtime.cpu.compiled.product import TYPES, CompiledProduct, LinearStruct
from cbatch.runtime.model.config import ModelConfig
from cbatch.runtime.model.kv_cache import KVCache
from cbatch.runtime.model.rope import RotaryTable

if TYPE_CHECKING:
    from cbatch.runtime.cpu.layers import Layer
    from cbatch.runtime.cpu.linear import Linear

_ALIGNMENT_BYTES = 64
_ALONE_BELOW = 1 << 17  # multiplications of a pass that one thread does sooner than several
_WRONG = {
    1: "tokens: an id is not in the vocabulary",
    2: "block_tables: they do not hold the context, or name a block that is not in the cache",
    3: "logits_index: a row that is not in the batch",
}


def _fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class _Layer(ctypes.Structure):
    _fields_ = [
        *_fields(LinearStruct, "qkv out gate_up down"),
        ("qk_weight", c_void_p),
        ("window", c_long),
    ]


class _Decoder(ctypes.Structure):
    _fields_ = [
        ("layers", POINTER(_Layer)),
        ("head", LinearStruct),
        *_fields(c_void_p, "embedding cos_sin"),
        *_fields(c_long, "num_layers hidden kv_heads group dim inner vocab embedding_type"),
        ("eps", c_float),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        *_fields(
            c_void_p, "tokens wanted query_lens context_lens tables kv logits memory progress"
        ),
        *_fields(c_long, "rows sequences table_width num_wanted blocks block_size kv_half threads"),
    ]


class CompiledDecoder:
    """The layers of a model between its embedding [vocab, hidden] and its logits."""

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        embedding: Tensor | CompiledProduct,
        layers: Sequence[Layer],
        head: Linear,
        rotary: RotaryTable,
    ) -> CompiledDecoder | None:
        """None where other products than compiled ones take part."""
        products = [linear for layer in layers for linear in layer.products()]
        if any(linear.compiled is None for linear in (*products, head)):
            return None
        return cls(config, embedding, layers, head, rotary)

    def __init__(
        self,
        config: ModelConfig,
        embedding: Tensor | CompiledProduct,
        layers: Sequence[Layer],
        head: Linear,
        rotary: RotaryTable,
    ) -> None:
        """Every product of `layers`, and `head`, is compiled."""
        kernel = library()
        assert kernel is not None
        self._decode, self._memory_bytes = kernel.decode, kernel.memory_bytes
        self._decode.argtypes = [POINTER(_Decoder), POINTER(_Step)]
        self._memory_bytes.argtypes = [POINTER(_Decoder), c_long, c_long]
        self._memory_bytes.restype = c_long
        self._config, self._rotary = config, rotary
        self._held = embedding, layers, head  # the structs below hold addresses
        self._layers = (_Layer * len(layers))(*(_layer(layer, config) for layer in layers))
        if isinstance(embedding, CompiledProduct):
            (rows,), (embedding_type,) = embedding.panels, embedding.types
        else:
            rows, embedding_type = embedding, TYPES[embedding.dtype]
        self._struct = _Decoder(
            self._layers,
            _struct(head),
            rows.data_ptr(),
            None,
            len(layers),
            config.hidden_size,
            config.num_kv_heads,
            config.group_size,
            config.head_dim,
            config.intermediate_size,
            config.vocab_size,
            embedding_type,
            config.rms_norm_eps,
        )
        weakref.finalize(self, _let_go, kernel, self._struct, self._held)
        self._positions = 0
        products = [linear for layer in layers for linear in layer.products()]
        weights = sum(out * columns for out, columns in (p.shape for p in (*products, head)))
        self._alone_rows = _ALONE_BELOW // weights
        self._room_for = 0, 0  # rows and threads

    def run(
        self,
        tokens: Tensor,
        query_lens: NDArray[np.int32],
        context_lens: NDArray[np.int32],
        tables: NDArray[np.int32],
        wanted: Tensor,
        kv: KVCache,
        progress: NDArray[np.int64] | None,
    ) -> Tensor:
        """As `Model.forward`; `progress` as there. Raises IndexError for what `_WRONG` says."""
        rows, num_wanted = tokens.shape[0], wanted.shape[0]
        self._reach(int(context_lens.max()))
        logits = torch.empty(num_wanted, self._config.vocab_size)
        tokens, wanted = tokens.contiguous(), wanted.contiguous()
        query_lens, context_lens, tables = map(_ints, (query_lens, context_lens, tables))
        threads = torch.get_num_threads()
        step = _Step(
            tokens.data_ptr(),
            wanted.data_ptr(),
            query_lens.ctypes.data,
            context_lens.ctypes.data,
            tables.ctypes.data,
            kv.data.data_ptr(),
            logits.data_ptr(),
            self._room(max(rows, num_wanted), threads),
            None if progress is None else progress.ctypes.data,
            rows,
            len(query_lens),
            tables.shape[1],
            num_wanted,
            kv.num_blocks + 1,
            kv.block_size,
            kv.data.dtype == torch.bfloat16,
            1 if rows <= self._alone_rows else threads,
        )
        wrong = self._decode(self._struct, step)
        if wrong:
            raise IndexError(_WRONG[wrong])
        return logits

    def _reach(self, positions: int) -> None:
        """The factors of so many positions."""
        if positions > self._positions:
            self._cos_sin = self._rotary.cos_sin(1 << (positions - 1).bit_length())
            self._struct.cos_sin = self._cos_sin.data_ptr()
            self._positions = len(self._cos_sin)

    def _room(self, rows: int, threads: int) -> int:
        """Address of working memory for so many."""
        if rows > self._room_for[0] or threads > self._room_for[1]:
            self._room_for = 2 * rows, threads
            num_bytes = self._memory_bytes(self._struct, *self._room_for) + _ALIGNMENT_BYTES
            self._memory = torch.empty(num_bytes, dtype=torch.uint8)
        address = self._memory.data_ptr()
        return address + -address % _ALIGNMENT_BYTES


def _let_go(kernel: ctypes.CDLL, *held: object) -> None:
    """Goes when no thread looks at it any more."""
    kernel.rest()


def _ints(array: NDArray[np.integer]) -> NDArray[np.int32]:
    return np.ascontiguousarray(array, dtype=np.int32)


def _layer(layer: Layer, config: ModelConfig) -> _Layer:
    products = map(_struct, (layer.qkv, layer.out, layer.gate_up, layer.down))
    weight = layer.qk_weight
    # A window as wide as the model's context is none.
    window = config.max_position_tokens if layer.window is None else layer.window
    return _Layer(*products, None if weight is None else weight.data_ptr(), window)


def _struct(linear: Linear) -> LinearStruct:
    product = linear.compiled
    assert isinstance(product, CompiledProduct)
    return product.struct
