"""A decoder's whole forward pass as one call of C code, for models with compiled products only."""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections.abc import Sequence
from ctypes import POINTER, c_long
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cbatch.runtime.batch import PASS_ERRORS
from cbatch.runtime.compiled.build import library
from cbatch.runtime.compiled.product import CompiledProduct
from cbatch.runtime.compiled.structs import struct
from cbatch.runtime.compiled.threads import num_threads
from cbatch.runtime.cpu.lowering import (
    lower_inputs,
    lower_layers,
    lower_pairs,
    lower_table,
    norm_before,
    product_of,
)
from cbatch.runtime.kv_cache import KVCache
from cbatch.runtime.model.config import ModelConfig
from cbatch.runtime.model.records import Attention, Experts
from cbatch.runtime.model.rope import RotaryTable

if TYPE_CHECKING:
    from cbatch.runtime.cpu.linear import Linear
    from cbatch.runtime.layers import InputWeights, Layer, PairWeights
    from cbatch.runtime.rank_group import RankGroup

_Decoder, _Step = struct("decoder"), struct("step")  # of step.h
_ALIGNMENT_BYTES = 64
_SINGLE_THREAD_BELOW = 1 << 17  # a pass with fewer multiplications is fastest on one thread
_OUR_REFERENCES = 3  # references to logits memory: the decoder's, a local name's, an argument's


class CompiledDecoder:
    """The layers of a model from its embedding [vocab, hidden] to its logits. With `pair`, the
    model is a draft head that reads the state of the previous position: positions start at 1."""

    def __init__(
        self,
        config: ModelConfig,
        embedding: Tensor | CompiledProduct,
        layers: Sequence[Layer[Linear]],
        head: Linear,
        ranks: RankGroup | None = None,
        pair: PairWeights | None = None,
        inputs: InputWeights | None = None,
    ) -> None:
        """Build the structs. All products must be compiled; with `ranks`, they are a shard."""
        kernel = library()
        assert kernel is not None
        self._decode, self._memory_bytes = kernel.decode, kernel.memory_bytes
        self._decode.argtypes = [POINTER(_Decoder), POINTER(_Step)]
        self._memory_bytes.argtypes = [POINTER(_Decoder), c_long, c_long]
        self._memory_bytes.restype = c_long
        self._config, self._ranks = config, ranks
        mixers = [layer.record.mixer for layer in layers]
        self._ropes = [(m.rope, m.key_dim) if isinstance(m, Attention) else None for m in mixers]
        self._rotary = {each: RotaryTable(*each, "cpu") for each in self._ropes if each is not None}
        self.hidden_size = config.hidden_size
        self._keep_alive = embedding, layers, head, pair, inputs  # the structs below hold addresses
        self._layers = lower_layers(layers, config.max_position_tokens)
        table = embedding.panels[0] if isinstance(embedding, CompiledProduct) else embedding
        self.num_kept = int(pair is not None)  # hidden states that are kept of each row
        self.struct = _Decoder(
            layers=self._layers,
            head=product_of(head),
            head_norm=norm_before(config.norm, head),
            embedding=lower_table(embedding, config.hidden_size),
            num_layers=len(layers),
            hidden=config.hidden_size,
            vocab=config.vocab_size,
            choices=head.shape[0],
            first=int(pair is not None),
            kept=self.num_kept - 1,
            logit_cap=config.logit_softcap,
            embedding_scale=_embedding_scale(config, table.dtype),
        )
        if inputs is not None:
            self.struct.inputs = ctypes.pointer(lower_inputs(config, inputs))
        if config.input is not None and pair is not None:
            self.struct.pairs = ctypes.pointer(lower_pairs(config.input, pair))
        weakref.finalize(self, _wait_for_threads, kernel, self.struct, self._keep_alive)
        self._positions = 0
        parts = () if pair is None else (pair.input_layer, pair.only_kv)
        products = [linear for layer in layers for linear in layer.products()]
        products += [linear for linear in parts if linear is not None]
        products += [] if inputs is None else [inputs.projection]
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
        state_tables: NDArray[np.int32] | None = None,
        state_slots: NDArray[np.int32] | None = None,
    ) -> Tensor:
        """Run a pass; see `Model` for the arguments and `progress`. A drafter reads
        `states`, fp32 [T, hidden]. Kept states are written to `hidden`, if given: fp32
        [T, num_kept, hidden], or [N, 1, hidden] for a drafter. Raises IndexError with a message of
        `PASS_ERRORS`."""
        rows, num_logits = tokens.shape[0], logit_rows.shape[0]
        self._extend_rotary(int(context_lens.max()))
        logits = self.logits(num_logits)
        tokens, logit_rows = tokens.contiguous(), logit_rows.contiguous()
        query_lens, context_lens, tables = map(_ints, (query_lens, context_lens, tables))
        threads = num_threads()
        step = _Step(
            tokens.data_ptr(),
            logit_rows.data_ptr(),
            query_lens.ctypes.data,
            context_lens.ctypes.data,
            tables.ctypes.data,
            kv.address,
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
            kv.block_rows[0].dtype == torch.bfloat16,
            1 if rows <= self._single_thread_rows else threads,
            self.num_kept,
        )
        memory = kv.state
        if memory is not None and state_tables is not None and state_slots is not None:
            pages, slots = map(_ints, (state_tables, state_slots))
            step.states_of, step.ring = memory.address, memory.ring
            step.state_tables, step.state_slots = pages.ctypes.data, slots.ctypes.data
            step.state_width = pages.shape[1]
            step.pages, step.slots = memory.num_pages, memory.num_slots
        if self._ranks is None:
            self._call(step)
            return logits
        return self._run_parts(step, logits, self._ranks)

    def _call(self, step: Any) -> None:
        status = self._decode(self.struct, step)
        if status:
            raise IndexError(PASS_ERRORS[status])

    def _run_parts(self, step: Any, logits: Tensor, ranks: RankGroup) -> Tensor:
        """Run a pass in parts (`part` of step.h). Between parts, ranks add up partial sums."""
        partial = torch.empty(step.rows, self._config.hidden_size)
        step.partial = partial.data_ptr()
        end = 2 * len(self._layers)
        for part in range(end):
            step.part = part
            self._call(step)
            last, keeps_all = part >= end - 2, self.struct.kept >= 0 and bool(step.hidden)
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
                if rope is not None:
                    layer.mixer.cos_sin = self._cos_sin[rope].data_ptr()

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


def _embedding_scale(config: ModelConfig, dtype: torch.dtype) -> float:
    """Return the scale of embeddings, rounded to their `dtype`, if that is a float."""
    scale = torch.tensor(config.embedding_scale)
    return float(scale.to(dtype) if dtype.is_floating_point else scale)
