"""llama.cpp through llama-cpp-python's own bindings: one context, a sequence a prompt. Needs these
and numpy."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path
from typing import Any

import llama_cpp as lib
import numpy as np

from bench.peers.workers.serving import serve

CELLS_MULTIPLE = 256  # it rounds a sequence's share of its KV cells


class LlamaCpp:
    def __init__(
        self, model: str | None, *, most: int, tokens: int, threads: int, exact_kv: bool
    ) -> None:
        """Up to `most` sequences of `tokens`. KV is float16, its default, or with `exact_kv`
        float32. Without a model it can quantise files and nothing else."""
        lib.llama_backend_init()
        self._quiet = lib.llama_log_callback(lambda *_: None)  # kept: C calls it
        lib.llama_log_set(self._quiet, ctypes.c_void_p(0))
        if model is None:
            return
        params = lib.llama_model_default_params()
        # With AMX its other layouts of quantised weights end the process (0.3.36).
        params.use_extra_bufts = "amx_int8" not in Path("/proc/cpuinfo").read_text()
        loaded = lib.llama_model_load_from_file(model.encode(), params)
        if not loaded:
            raise RuntimeError(f"llama.cpp cannot load {model}")
        self._vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(loaded))
        context = lib.llama_context_default_params()
        context.n_ctx = most * -(-tokens // CELLS_MULTIPLE) * CELLS_MULTIPLE
        context.n_batch = context.n_ubatch = max(512, most)
        context.n_seq_max = most
        context.n_threads = context.n_threads_batch = threads
        if exact_kv:
            context.type_k = context.type_v = lib.GGML_TYPE_F32
        self._most_batch = context.n_batch
        self._context = lib.llama_init_from_model(loaded, context)
        if not self._context:
            raise RuntimeError("llama.cpp cannot make a context")
        self._batch = lib.llama_batch_init(self._most_batch, 0, 1)

    def run(self, prompts: list[list[int]], output_tokens: int) -> dict[str, Any]:
        lib.llama_memory_clear(lib.llama_get_memory(self._context), True)
        started_s = time.perf_counter()
        count, length = len(prompts), len(prompts[0])
        tokens = np.asarray(prompts, dtype=np.int32)
        sequences = np.arange(count)
        # Prompts fill whole batches; the last position of each wants logits.
        flat, at = tokens.ravel(), np.tile(np.arange(length), count)
        whose, last = np.repeat(sequences, length), np.tile(np.arange(length) == length - 1, count)
        chosen = np.zeros(count, dtype=np.int32)
        for first in range(0, len(flat), self._most_batch):
            part = slice(first, first + self._most_batch)
            logits = self._decode(flat[part], at[part], whose[part], last[part])
            chosen[whose[part][last[part]]] = logits.argmax(axis=1)
        columns, ends_s = [chosen], [time.perf_counter()]
        everywhere = np.ones(count, dtype=bool)
        for at_step in range(length, length + output_tokens - 1):
            positions = np.full(count, at_step)
            logits = self._decode(chosen, positions, sequences, everywhere)
            chosen = logits.argmax(axis=1).astype(np.int32)
            columns.append(chosen)
            ends_s.append(time.perf_counter())
        outputs, steps_s = np.stack(columns, axis=1).tolist(), np.diff(ends_s).tolist()
        return {"seconds": ends_s[-1] - started_s, "outputs": outputs, "steps_s": steps_s}

    def logprobs(self, prompts: list[list[int]]) -> list[list[float]]:
        return [self._logprobs(np.asarray(ids, dtype=np.int32)) for ids in prompts]

    def _logprobs(self, ids: np.ndarray) -> list[float]:
        lib.llama_memory_clear(lib.llama_get_memory(self._context), True)
        found: list[float] = []
        for first in range(0, len(ids) - 1, self._most_batch):
            at = np.arange(first, min(first + self._most_batch, len(ids) - 1))
            everywhere = np.ones(len(at), dtype=bool)
            logits = self._decode(ids[at], at, np.zeros_like(at), everywhere).astype(np.float64)
            top = logits.max(axis=1)
            whole = top + np.log(np.exp(logits - top[:, None]).sum(axis=1))
            found += (logits[np.arange(len(at)), ids[at + 1]] - whole).tolist()
        return found

    def quantise(self, source: str, target: str, kind: str, threads: int) -> None:
        """Into `kind` of its own names, as Q4_K_M; from any, also from another that is quantised.
        Raises RuntimeError."""
        params = lib.llama_model_quantize_default_params()
        params.ftype = getattr(lib, f"LLAMA_FTYPE_{'ALL' if kind == 'F32' else 'MOSTLY'}_{kind}")
        params.allow_requantize = True
        params.nthread = threads
        if lib.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params)):
            raise RuntimeError(f"llama.cpp cannot write {kind}")

    def _decode(
        self, tokens: np.ndarray, positions: np.ndarray, sequences: np.ndarray, wants: np.ndarray
    ) -> np.ndarray:
        """Logits [those that are wanted, V], valid until the next call."""
        batch, count = self._batch, len(tokens)
        batch.n_tokens = count
        np.ctypeslib.as_array(batch.token, (count,))[:] = tokens
        np.ctypeslib.as_array(batch.pos, (count,))[:] = positions
        np.ctypeslib.as_array(batch.n_seq_id, (count,))[:] = 1
        for index, sequence in enumerate(sequences.tolist()):
            batch.seq_id[index][0] = sequence
        np.ctypeslib.as_array(batch.logits, (count,))[:] = wants
        status = lib.llama_decode(self._context, batch)
        if status:
            raise RuntimeError(f"llama_decode: {status}")
        wanted = int(np.count_nonzero(wants))
        if not wanted:
            return np.zeros((0, self._vocab_size), dtype=np.float32)
        logits = lib.llama_get_logits(self._context)
        return np.ctypeslib.as_array(logits, (wanted, self._vocab_size))


if __name__ == "__main__":
    serve(LlamaCpp)
