"""The worker of llama.cpp, through llama-cpp-python's own bindings: one context, one sequence per
prompt. Its Python needs only the bindings and numpy."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path
from typing import Any

import llama_cpp as lib
import numpy as np

from bench.peers.workers.serving import serve

CELLS_MULTIPLE = 256  # llama.cpp rounds a sequence's KV cells up to a multiple of this


class LlamaCpp:
    def __init__(
        self, model: str | None, *, max_sequences: int, tokens: int, threads: int, exact: bool
    ) -> None:
        """Load a model for up to `max_sequences` sequences of `tokens` tokens. KV is float16, the
        default, or float32 with `exact`. Without a model the object can only quantise files."""
        lib.llama_backend_init()
        self._quiet = lib.llama_log_callback(lambda *_: None)  # C calls it: it must stay alive
        lib.llama_log_set(self._quiet, ctypes.c_void_p(0))
        if model is None:
            return
        params = lib.llama_model_default_params()
        # With AMX, its repacked layouts of quantised weights crash the process (0.3.36).
        params.use_extra_bufts = "amx_int8" not in Path("/proc/cpuinfo").read_text()
        loaded_model = lib.llama_model_load_from_file(model.encode(), params)
        if not loaded_model:
            raise RuntimeError(f"llama.cpp cannot load {model}")
        self._vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(loaded_model))
        context = lib.llama_context_default_params()
        context.n_ctx = max_sequences * -(-tokens // CELLS_MULTIPLE) * CELLS_MULTIPLE
        context.n_batch = context.n_ubatch = max(512, max_sequences)
        context.n_seq_max = max_sequences
        context.n_threads = context.n_threads_batch = threads
        if exact:
            context.type_k = context.type_v = lib.GGML_TYPE_F32
        self._max_batch = context.n_batch
        self._context = lib.llama_init_from_model(loaded_model, context)
        if not self._context:
            raise RuntimeError("llama.cpp cannot make a context")
        self._batch = lib.llama_batch_init(self._max_batch, 0, 1)

    def run(self, prompts: list[list[int]], output_tokens: int) -> tuple[Any, list[float]]:
        """Return the outputs, and the times at which steps ended."""
        lib.llama_memory_clear(lib.llama_get_memory(self._context), True)
        count, length = len(prompts), len(prompts[0])
        sequences, columns = np.arange(count), []
        # Prompts fill whole batches; only the last position of each needs logits.
        all_ids, at = np.asarray(prompts, dtype=np.int32).ravel(), np.tile(np.arange(length), count)
        sequence_of, is_last = np.repeat(sequences, length), at == length - 1
        chosen = np.zeros(count, dtype=np.int32)
        for first in range(0, len(all_ids), self._max_batch):
            part = slice(first, first + self._max_batch)
            logits = self._decode(all_ids[part], at[part], sequence_of[part], is_last[part])
            chosen[sequence_of[part][is_last[part]]] = logits.argmax(axis=1)
        ends_s, all_rows = [time.perf_counter()], np.ones(count, dtype=bool)
        for position in range(length, length + output_tokens - 1):
            columns.append(chosen)
            logits = self._decode(chosen, np.full(count, position), sequences, all_rows)
            chosen = logits.argmax(axis=1).astype(np.int32)
            ends_s.append(time.perf_counter())
        return np.stack([*columns, chosen], axis=1).tolist(), ends_s

    def quantise(self, source: str, target: str, kind: str, threads: int) -> None:
        """Convert a file into type `kind`, a name of llama.cpp's such as Q4_K_M; the source may be
        quantised. Raises RuntimeError."""
        params = lib.llama_model_quantize_default_params()
        params.ftype = getattr(lib, f"LLAMA_FTYPE_{'ALL' if kind == 'F32' else 'MOSTLY'}_{kind}")
        params.allow_requantize = True
        params.nthread = threads
        if lib.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params)):
            raise RuntimeError(f"llama.cpp cannot write {kind}")

    def _decode(
        self, tokens: np.ndarray, positions: np.ndarray, sequences: Any, needs_logits: Any
    ) -> np.ndarray:
        """Return logits [positions that need them, V], valid until the next call."""
        batch, count = self._batch, len(tokens)
        batch.n_tokens = count
        np.ctypeslib.as_array(batch.token, (count,))[:] = tokens
        np.ctypeslib.as_array(batch.pos, (count,))[:] = positions
        np.ctypeslib.as_array(batch.n_seq_id, (count,))[:] = 1
        for index, sequence in enumerate(sequences.tolist()):
            batch.seq_id[index][0] = sequence
        np.ctypeslib.as_array(batch.logits, (count,))[:] = needs_logits
        status = lib.llama_decode(self._context, batch)
        if status:
            raise RuntimeError(f"llama_decode: {status}")
        num_logits = int(np.count_nonzero(needs_logits))
        if not num_logits:
            return np.zeros((0, self._vocab_size), dtype=np.float32)
        logits = lib.llama_get_logits(self._context)
        return np.ctypeslib.as_array(logits, (num_logits, self._vocab_size))


if __name__ == "__main__":
    serve(LlamaCpp)
