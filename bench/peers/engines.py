"""The engines that are compared: `python -m bench.peers.engines NAME` runs one. The Python of a
peer needs the peer and numpy, but not cbatch.

The process reads calls of one object's methods, a JSON line each, and answers. `run` returns the
outputs, and the times at which steps ended if the engine reports steps.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

Prompts = list[list[int]]
_CBATCH_BLOCK, _OPENVINO_BLOCK, _LLAMA_CELLS = (
    16,
    32,
    256,
)  # tokens of a block; llama.cpp's multiple
_VLLM_SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
_VLLM_PRELOADED = ("vllm/libs/libtcmalloc*.so*", "../../libiomp5.so")


class Cbatch:
    """cbatch, with its own layers or those of transformers."""

    def __init__(
        self,
        model: str,
        draft: str | None,
        *,
        exact: bool,
        max_sequences: int,
        tokens: int,
        step_tokens: int,
        threads: int,
        **options: str,
    ) -> None:
        """Load a model for up to `max_sequences` sequences of `tokens` tokens; with `exact`, in
        float32, which dequantises weights."""
        import torch

        import cbatch

        torch.set_num_threads(threads)
        self._params = cbatch.SamplingParams
        self._llm = cbatch.LLM(
            Path(model),
            None if draft is None else Path(draft),
            dtype="float32" if exact else "auto",
            max_num_seqs=max_sequences,
            max_model_len=tokens,
            max_num_batched_tokens=step_tokens,
            num_blocks=max_sequences * (-(-tokens // _CBATCH_BLOCK) + 1),
            block_size=_CBATCH_BLOCK,
            enable_prefix_caching=False,  # every repeat has the same prompts
            tokenizer="none",
            **options,
        )
        self._ends_s: list[float] = []
        step = self._llm.engine.step

        def timed_step() -> Any:
            outputs = step()
            self._ends_s.append(time.perf_counter())
            return outputs

        self._llm.engine.step = timed_step  # type: ignore[method-assign]

    def run(self, prompts: Prompts, output_tokens: int) -> tuple[Prompts, list[float]]:
        params = self._params(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
        self._ends_s.clear()
        completions = self._llm.generate(prompts, params)
        return [list(completion.token_ids) for completion in completions], self._ends_s

    def logprobs(self, prompts: Prompts) -> list[list[float]]:
        params = self._params(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        return [
            [-math.inf if entry.logprob is None else entry.logprob for entry in entries if entry]
            for completion in self._llm.generate(prompts, params)
            for entries in [completion.prompt_logprobs or ()]
        ]


class LlamaCpp:
    """llama.cpp, through llama-cpp-python's own bindings: one context, one sequence per prompt."""

    def __init__(
        self, model: str | None, *, max_sequences: int, tokens: int, threads: int, exact: bool
    ) -> None:
        """Load a model. KV is float16, the default, or float32 with `exact`. Without a model the
        object can only quantise files."""
        import llama_cpp as lib

        self._lib = lib
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
        context.n_ctx = max_sequences * -(-tokens // _LLAMA_CELLS) * _LLAMA_CELLS
        context.n_batch = context.n_ubatch = self._max_batch = max(512, max_sequences)
        context.n_seq_max = max_sequences
        context.n_threads = context.n_threads_batch = threads
        if exact:
            context.type_k = context.type_v = lib.GGML_TYPE_F32
        self._context = lib.llama_init_from_model(loaded_model, context)
        if not self._context:
            raise RuntimeError("llama.cpp cannot make a context")
        self._batch = lib.llama_batch_init(self._max_batch, 0, 1)

    def run(self, prompts: Prompts, output_tokens: int) -> tuple[Prompts, list[float]]:
        import numpy as np

        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)
        count, length = len(prompts), len(prompts[0])
        sequences, columns = np.arange(count), []
        # Prompts fill whole batches; only the last position of each needs logits.
        all_ids, at = np.asarray(prompts, dtype=np.int32).ravel(), np.tile(np.arange(length), count)
        sequence_of, is_last = np.repeat(sequences, length), at == length - 1
        chosen = np.zeros(count, dtype=np.int32)
        for first in range(0, len(all_ids), self._max_batch):
            part = slice(first, first + self._max_batch)
            tokens = self._decode(all_ids[part], at[part], sequence_of[part], is_last[part])
            chosen[sequence_of[part][is_last[part]]] = tokens
        ends_s, all_rows = [time.perf_counter()], np.ones(count, dtype=bool)
        for position in range(length, length + output_tokens - 1):
            columns.append(chosen)
            chosen = self._decode(chosen, np.full(count, position), sequences, all_rows)
            ends_s.append(time.perf_counter())
        return np.stack([*columns, chosen], axis=1).tolist(), ends_s

    def quantise(self, source: str, target: str, kind: str, threads: int) -> None:
        """Convert a file into type `kind`, a name of llama.cpp's such as Q4_K_M; the source may be
        quantised. Raises RuntimeError."""
        lib = self._lib
        params = lib.llama_model_quantize_default_params()
        params.ftype = getattr(lib, f"LLAMA_FTYPE_{'ALL' if kind == 'F32' else 'MOSTLY'}_{kind}")
        params.allow_requantize, params.nthread = True, threads
        if lib.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params)):
            raise RuntimeError(f"llama.cpp cannot write {kind}")

    def _decode(self, tokens: Any, positions: Any, sequences: Any, needs_logits: Any) -> Any:
        import numpy as np

        batch, count = self._batch, len(tokens)
        batch.n_tokens = count
        for field, values in (
            (batch.token, tokens),
            (batch.pos, positions),
            (batch.n_seq_id, 1),
            (batch.logits, needs_logits),
        ):
            np.ctypeslib.as_array(field, (count,))[:] = values
        for index, sequence in enumerate(sequences.tolist()):
            batch.seq_id[index][0] = sequence
        if status := self._lib.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode: {status}")
        num_logits = int(np.count_nonzero(needs_logits))
        if not num_logits:
            return np.zeros(0, dtype=np.int32)
        logits = self._lib.llama_get_logits(self._context)
        logits = np.ctypeslib.as_array(logits, (num_logits, self._vocab_size))
        return logits.argmax(axis=1).astype(np.int32)


class LlamaCppPython:
    """llama.cpp through llama-cpp-python's class, one sequence after the other, with prompt lookup
    of `drafts` tokens if that is not 0."""

    def __init__(self, model: str, *, tokens: int, threads: int, drafts: int) -> None:
        from llama_cpp import Llama
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        lookup = LlamaPromptLookupDecoding(num_pred_tokens=drafts) if drafts else None
        own = {"n_ctx": tokens, "n_threads": threads, "n_threads_batch": threads}
        self._llama = Llama(model, draft_model=lookup, verbose=False, **own)

    def run(self, prompts: Prompts, output_tokens: int) -> tuple[Prompts, list[float]]:
        generated = [self._llama.generate(ids, temp=0.0) for ids in prompts]
        return [[*islice(tokens, output_tokens)] for tokens in generated], []


class OpenVino:
    """OpenVINO GenAI's continuous batching, which reads GGUF files itself."""

    def __init__(
        self,
        model: str,
        *,
        max_sequences: int,
        tokens: int,
        step_tokens: int,
        threads: int,
        exact: bool,
    ) -> None:
        """Load a model. With `exact`, activations and KV are float32; otherwise OpenVINO chooses
        their types by the processor."""
        import openvino_genai as genai

        scheduler = genai.SchedulerConfig()
        scheduler.max_num_seqs = max_sequences
        scheduler.max_num_batched_tokens = step_tokens
        scheduler.num_kv_blocks = max_sequences * (-(-tokens // _OPENVINO_BLOCK) + 1)
        scheduler.enable_prefix_caching = False  # every repeat has the same prompts
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads}
        if exact:
            properties |= {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
            properties |= {"DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
        self._config = genai.GenerationConfig
        self._pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)

    def run(self, prompts: Prompts, output_tokens: int) -> tuple[Prompts, list[float]]:
        import numpy as np
        import openvino

        config = self._config(max_new_tokens=output_tokens, ignore_eos=True)
        inputs = [openvino.Tensor(np.asarray([ids], dtype=np.int64)) for ids in prompts]
        handles = [self._pipeline.add_request(i, ids, config) for i, ids in enumerate(inputs)]
        ends_s = []
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            ends_s.append(time.perf_counter())
        return [list(handle.read_all()[0].generated_ids) for handle in handles], ends_s


class Vllm:
    """vLLM without a separate engine process; it reports no steps."""

    def __init__(self, model: str, **options: Any) -> None:
        import vllm

        # vLLM's cache of compiled code depends on the given path, so every run gives the same path.
        os.chdir(Path(model).parent)
        self.version, self._params = vllm.__version__, vllm.SamplingParams
        options |= {"skip_tokenizer_init": True, "enable_prefix_caching": False}
        self.llm = vllm.LLM(model=Path(model).name, **options)

    def requests(self, prompts: Prompts, tokens: int, **sampling: float) -> tuple[list[Any], Any]:
        """Return the arguments of `generate` for outputs of `tokens` tokens."""
        lengths = {"max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True}
        params = self._params(detokenize=False, **lengths, **sampling)
        return [{"prompt_token_ids": ids} for ids in prompts], params

    def run(
        self, prompts: Prompts, output_tokens: int, temperature: float = 0.0, **sampling: float
    ) -> tuple[Prompts, list[float]]:
        requests = self.requests(prompts, output_tokens, temperature=temperature, **sampling)
        completions = self.llm.generate(*requests, use_tqdm=False)
        return [list(completion.outputs[0].token_ids) for completion in completions], []


def _preload() -> None:
    """Restart this process with the libraries that vLLM's documentation recommends, if present."""
    os.environ |= _VLLM_SETTINGS
    package = find_spec("vllm")
    if package is None or package.origin is None or "LD_PRELOAD" in os.environ:
        return
    site = Path(package.origin).parents[1]
    files = [str(file) for pattern in _VLLM_PRELOADED for file in sorted(site.glob(pattern))[:1]]
    os.environ["LD_PRELOAD"] = ":".join(files)
    os.execv(sys.executable, [sys.executable, "-m", "bench.peers.engines", *sys.argv[1:]])


ENGINES: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {  # by name; modules to import
    "cbatch": (Cbatch, ("torch", "cbatch.llm")),
    "llama.cpp": (LlamaCpp, ("numpy", "llama_cpp")),
    "llama-cpp-python": (LlamaCppPython, ("numpy", "llama_cpp")),
    "openvino": (OpenVino, ("numpy", "openvino", "openvino_genai")),
    "vllm": (Vllm, ("vllm",)),
}


def serve(name: str) -> None:
    """Serve calls on standard input until it ends. The first line has the arguments of the engine,
    every further line a method and its arguments. Answers have the value and the seconds it took.
    Output of libraries goes to standard error."""
    if name == "vllm":
        _preload()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    construct, modules = ENGINES[name]
    for module in modules:
        __import__(module)
    answers.write("{}\n")  # imports are done, which are not timed
    engine = None
    for line in sys.stdin:
        call, started_s = json.loads(line), time.perf_counter()
        if engine is None:
            engine, value = construct(**call), None
        else:
            value = getattr(engine, call["method"])(*call["arguments"])
        seconds = time.perf_counter() - started_s
        answers.write(json.dumps({"value": value, "seconds": seconds}) + "\n")


if __name__ == "__main__":
    serve(sys.argv[1])
