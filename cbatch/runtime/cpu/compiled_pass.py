"""A decoder's whole forward pass as one call of C code, for models with compiled products only."""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections.abc import Sequence
from ctypes import POINTER, c_float, c_long, c_void_p
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.runtime.compiled.build import library
from cbatch.runtime.compiled.experts import Gating, MixtureStruct
from cbatch.runtime.compiled.product import TYPES, CompiledProduct, LinearStruct
from cbatch.runtime.compiled.structs import fields
from cbatch.runtime.compiled.threads import num_threads
from cbatch.runtime.kv_cache import KVCache
from cbatch.runtime.model.config import ModelConfig
from cbatch.runtime.model.records import Experts
from cbatch.runtime.model.rope import RotaryTable

if TYPE_CHECKING:
    from cbatch.runtime.cpu.linear import Linear
    from cbatch.runtime.layers import Layer
    from cbatch.runtime.rank_group import RankGroup

_ALIGNMENT_BYTES = 64
_SINGLE_THREAD_BELOW = 1 << 17  # a pass with fewer multiplications is fastest on one thread
_OUR_REFERENCES = 3  # references to logits memory: the decoder's, a local name's, an argument's
PASS_ERRORS = {  # by the status that a pass returns
    1: "tokens: an id is not in the vocabulary",
    2: "block_tables: too short for the context, or with a block that is not in the cache",
    3: "logits_index: a row that is not in the batch",
}


class _Layer(ctypes.Structure):
    _fields_ = [
        *fields(LinearStruct, "qkv out gate_up down"),
        *fields(c_void_p, "qk_weight after_attention after_forward sinks cos_sin"),
        ("experts", POINTER(MixtureStruct)),
        *fields(c_long, "window kept"),
    ]


class _Reader(ctypes.Structure):
    _fields_ = [
        *fields(LinearStruct, "input_layer only_kv"),
        *fields(c_void_p, "token_norm state_norm"),
        *fields(c_long, "normed_residual plain_in plain_out"),
    ]


class DecoderStruct(ctypes.Structure):
    _fields_ = [
        ("layers", POINTER(_Layer)),
        ("head", LinearStruct),
        ("embedding", c_void_p),
        ("reader", POINTER(_Reader)),
        *fields(c_long, "num_layers hidden kv_heads group dim inner vocab embedding_type"),
        *fields(c_long, "choices first kept"),
        *fields(c_long, "centred plain parallel whole_heads gating gated adds_later"),
        *fields(c_float, "eps scale cap logit_cap embedding_scale residual_scale"),
    ]


class StepStruct(ctypes.Structure):
    _fields_ = [
        *fields(c_void_p, "tokens logit_rows query_lens context_lens tables kv logits memory"),
        *fields(c_void_p, "progress states hidden"),
        *fields(c_long, "rows sequences table_width num_logit_rows blocks block_size kv_half"),
        *fields(c_long, "threads num_kept"),
        *fields(c_void_p, "sums partial"),
        ("part", c_long),
    ]


class StateReading(NamedTuple):
    """The way a drafter's first layer combines tokens and hidden states; see `reader` of step.h.
    The norms are norm weights times sqrt(hidden), fp32 [hidden]."""

    input_layer: Linear | None
    only_kv: Linear | None
    token_norm: Tensor | None
    state_norm: Tensor | None
    normed_residual: bool = False
    plain_in: bool = False
    plain_out: bool = False


class CompiledDecoder:
    """The layers of a model from its embedding [vocab, hidden] to its logits. With `reading`,
    the model is a drafter that reads the state of the previous position: positions start at 1."""

    def __init__(
        self,
        config: ModelConfig,
        embedding: Tensor | CompiledProduct,
        layers: Sequence[Layer[Linear]],
        head: Linear,
        reading: StateReading | None = None,
        ranks: RankGroup | None = None,
    ) -> None:
        """Build the structs. All products must be compiled; with `ranks`, they are a shard."""
        kernel = library()
        assert kernel is not None
        self._decode, self._memory_bytes = kernel.decode, kernel.memory_bytes
        self._decode.argtypes = [POINTER(DecoderStruct), POINTER(StepStruct)]
        self._memory_bytes.argtypes = [POINTER(DecoderStruct), c_long, c_long]
        self._memory_bytes.restype = c_long
        self._config, self._ranks = config, ranks
        mixers = [layer.record.mixer for layer in layers]
        self._ropes = [mixer.rope for mixer in mixers]
        self._rotary = {m.rope: RotaryTable(m.rope, m.key_dim, "cpu") for m in mixers}
        self.hidden_size = config.hidden_size
        self._reader = None if reading is None else _reader(reading)
        self._keep_alive = embedding, layers, head, reading  # the structs below hold addresses
        self._layers = (_Layer * len(layers))(*(_layer(layer, config) for layer in layers))
        if isinstance(embedding, CompiledProduct):
            (rows,), (embedding_type,) = embedding.panels, embedding.types
        else:
            rows, embedding_type = embedding, TYPES[embedding.dtype]
        self.num_kept = int(reading is not None)  # hidden states that are kept of each row
        self.struct = DecoderStruct(
            self._layers,
            _struct(head),
            rows.data_ptr(),
            None if self._reader is None else ctypes.pointer(self._reader),
            len(layers),
            config.hidden_size,
            config.attention.kv_heads,
            config.attention.group,
            config.attention.key_dim,
            config.widest_inner,
            config.vocab_size,
            embedding_type,
            head.shape[0],
            int(reading is not None),
            self.num_kept - 1,
            *_flags(config, rows.dtype),
        )
        weakref.finalize(self, _wait_for_threads, kernel, self.struct, self._keep_alive)
        self._positions = 0
        parts = () if reading is None else (reading.input_layer, reading.only_kv)
        products = [linear for layer in layers for linear in layer.products()]
        products += [linear for linear in parts if linear is not None]
        weights = sum(out * columns for out, columns in (p.shape for p in (*products, head)))
        for layer in layers:
            if isinstance(f := layer.record.feed_forward, Experts):
                weights += (f.chosen + f.shared) * 3 * config.hidden_size * f.inner
        self._single_thread_rows = _SINGLE_THREAD_BELOW // weights
        self._capacity = 0, 0  # rows and threads for which the working memory suffices
        self._logits_memory = np.empty(0, np.float32)

    def keep(self, layers: tuple[int, ...]) -> None:
        """Let passes return the inputs of these layers, in this order. Number `num_layers` means
        the output of the last layer."""
        kernel = library()
        assert kernel is not None
        kernel.rest()  # a thread of the previous pass may still read the fields that change here
        kept_index = {layer: at for at, layer in enumerate(layers)}
        for index, layer in enumerate(self._layers):
            layer.kept = kept_index.get(index, -1)
        self.struct.kept = kept_index.get(len(self._layers), -1)
        self.num_kept = len(layers)

    def run(
        self,
        tokens: Tensor,
        query_lens: NDArray[np.int32],
        context_lens: NDArray[np.int32],
        tables: NDArray[np.int32],
        logit_rows: Tensor,
        kv: KVCache,
        progress: NDArray[np.int64] | None,
        states: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Run a pass; see `Model` for the arguments and `progress`. A drafter reads
        `states`, fp32 [T, hidden]. Kept states are written to `hidden`, fp32 [T, num_kept, hidden],
        or [N, 1, hidden] for a drafter. Raises IndexError with a message of `PASS_ERRORS`."""
        rows, num_logits = tokens.shape[0], logit_rows.shape[0]
        if self.num_kept and hidden is None:
            num_states = num_logits if states is not None else rows
            hidden = torch.empty(num_states, self.num_kept, self._config.hidden_size)
        self._extend_rotary(int(context_lens.max()))
        logits = self.logits(num_logits)
        tokens, logit_rows = tokens.contiguous(), logit_rows.contiguous()
        query_lens, context_lens, tables = map(_ints, (query_lens, context_lens, tables))
        threads = num_threads()
        step = StepStruct(
            tokens.data_ptr(),
            logit_rows.data_ptr(),
            query_lens.ctypes.data,
            context_lens.ctypes.data,
            tables.ctypes.data,
            kv.data.data_ptr(),
            logits.data_ptr(),
            self._work_address(max(rows, num_logits), threads),
            None if progress is None else progress.ctypes.data,
            None if states is None else states.data_ptr(),
            None if hidden is None else hidden.data_ptr(),
            rows,
            len(query_lens),
            tables.shape[1],
            num_logits,
            kv.num_blocks + 1,
            kv.block_size,
            kv.data.dtype == torch.bfloat16,
            1 if rows <= self._single_thread_rows else threads,
            self.num_kept,
        )
        if self._ranks is None:
            self._call(step)
            return logits
        return self._run_parts(step, logits, self._ranks)

    def step_template(self, rows: int, positions: int, kv: KVCache) -> StepStruct:
        """Return a step for C code that runs several passes of up to `rows` rows and `positions`
        positions. It has only the fields that are equal in all these passes."""
        self._extend_rotary(positions)
        threads = num_threads()
        return StepStruct(
            kv=kv.data.data_ptr(),
            memory=self._work_address(rows, threads),
            blocks=kv.num_blocks + 1,
            block_size=kv.block_size,
            kv_half=kv.data.dtype == torch.bfloat16,
            threads=1 if rows <= self._single_thread_rows else threads,
        )

    def _call(self, step: StepStruct) -> None:
        status = self._decode(self.struct, step)
        if status:
            raise IndexError(PASS_ERRORS[status])

    def _run_parts(self, step: StepStruct, logits: Tensor, ranks: RankGroup) -> Tensor:
        """Run a pass in parts (`part` of step.h). Between parts, ranks add up partial sums."""
        partial = torch.empty(step.rows, self._config.hidden_size)
        step.partial = partial.data_ptr()
        end = 2 * len(self._layers)
        for part in range(end):
            step.part = part
            self._call(step)
            last, keeps_all = part >= end - 2, self.struct.kept >= 0
            if last and not step.num_logit_rows and not keeps_all:
                return logits.new_empty(0, self._config.vocab_size)
            sums = ranks.sum(partial if not last or keeps_all else partial[: step.num_logit_rows])
            step.sums = sums.data_ptr()
        step.part = end
        self._call(step)
        return ranks.columns(logits, self._config.vocab_size)

    def _extend_rotary(self, positions: int) -> None:
        if positions > self._positions:
            self._positions = 1 << (positions - 1).bit_length()
            self._cos_sin = {r: t.cos_sin(self._positions) for r, t in self._rotary.items()}
            for layer, rope in zip(self._layers, self._ropes, strict=True):
                layer.cos_sin = self._cos_sin[rope].data_ptr()

    def logits(self, rows: int) -> Tensor:
        """Return memory for logits, [rows, vocab]. The same memory is reused once no tensor refers
        to it. The system clears new memory, which takes a tenth of a step of 128 rows."""
        vocab, memory = self.struct.choices, self._logits_memory
        count = rows * vocab
        num_floats = count + _ALIGNMENT_BYTES // 4
        if memory.size < num_floats or sys.getrefcount(memory) > _OUR_REFERENCES:
            self._logits_memory = memory = np.empty(num_floats, np.float32)
        first = -memory.ctypes.data % _ALIGNMENT_BYTES // 4
        return torch.from_numpy(memory[first : first + count]).view(rows, vocab)

    def _work_address(self, rows: int, threads: int) -> int:
        if rows > self._capacity[0] or threads > self._capacity[1]:
            self._capacity = 2 * rows, threads
            num_bytes = self._memory_bytes(self.struct, *self._capacity) + _ALIGNMENT_BYTES
            self._memory = torch.empty(num_bytes, dtype=torch.uint8)
        address = self._memory.data_ptr()
        return address + -address % _ALIGNMENT_BYTES


def _wait_for_threads(kernel: ctypes.CDLL, *kept_alive: object) -> None:
    """Wait until no thread reads the structs, before they are freed."""
    kernel.rest()


def _ints(array: NDArray[np.integer]) -> NDArray[np.int32]:
    return np.ascontiguousarray(array, dtype=np.int32)


def _layer(layer: Layer[Linear], config: ModelConfig) -> _Layer:
    down = LinearStruct() if layer.down is None else _struct(layer.down)
    weights = layer.qk_weight, layer.after_attention, layer.after_forward, layer.sinks
    addresses = [None if weight is None else weight.data_ptr() for weight in weights]
    # A window as long as the model's context has no effect.
    window = layer.record.mixer.window or config.max_position_tokens
    struct = _Layer(*map(_struct, (layer.qkv, layer.out, layer.gate_up)), down, *addresses)
    struct.window, struct.kept = window, -1
    if layer.experts is not None:
        assert isinstance(layer.record.feed_forward, Experts)
        struct.experts = ctypes.pointer(layer.experts.mixture(layer.record.feed_forward))
        norm = layer.router_norm
        struct.gate_up.scale = None if norm is None else norm.data_ptr()
    return struct


def _flags(config: ModelConfig, dtype: torch.dtype) -> tuple[float, ...]:
    """Return the fields of `DecoderStruct` from `centred` on. The scale of embeddings is rounded to
    their `dtype`, if that is a float."""
    m, f = config.attention, config.layers[0].feed_forward
    norm = config.norm or m.norm or f.norm
    embedding_scale = torch.tensor(config.embedding_scale)
    if dtype.is_floating_point:
        embedding_scale = embedding_scale.to(dtype)
    experts = any(isinstance(layer.feed_forward, Experts) for layer in config.layers)
    later = bool(m.out_norm or f.out_norm or m.out_scale != 1 or experts)
    return (
        norm.centred,
        m.norm is None and config.input is None,
        config.layers[0].parallel,
        m.norms_whole,
        Gating[f.activation.upper()],
        getattr(f, "gated", True),
        later,
        norm.eps,
        m.scale,
        m.soft_cap,
        config.logit_softcap,
        embedding_scale.item(),
        m.out_scale,
    )


def _reader(reading: StateReading) -> _Reader:
    parts = [LinearStruct() if p is None else _struct(p) for p in reading[:2]]
    norms = [None if norm is None else norm.data_ptr() for norm in reading[2:4]]
    return _Reader(*parts, *norms, *reading[4:])


def _struct(linear: Linear) -> LinearStruct:
    product = linear.compiled
    assert isinstance(product, CompiledProduct)
    return product.struct
