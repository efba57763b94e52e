"""llama.cpp through llama-cpp-python's own bindings: one context, a sequence a prompt; a Llama in
Hugging Face's files becomes a GGUF file, by the `gguf` package."""

from __future__ import annotations

import ctypes
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from bench.engine.systems import EngineRun, Prompts, System

CELLS_MULTIPLE = 256  # it rounds a sequence's share of its KV cells


def build_llama_cpp(
    model: Path,
    folder: Path,
    dtype: str,
    *,
    most: int,
    tokens: int,
    threads: int,
    exact_kv: bool = False,
) -> System:
    """Up to `most` sequences of `tokens`. KV is float16, its default, or with `exact_kv` float32.
    Raises ImportError where it is not installed."""
    import llama_cpp

    path = folder / f"{model.name}-{dtype}.gguf"
    if not path.exists():
        write_gguf(model, path, dtype)
    engine = _Context(llama_cpp, path, most, tokens, threads, exact_kv)
    return System("llama.cpp", "off", engine.run)


class _Context:
    def __init__(
        self, lib: Any, path: Path, most: int, tokens: int, threads: int, exact_kv: bool
    ) -> None:
        self._lib = lib
        lib.llama_backend_init()
        self._quiet = lib.llama_log_callback(lambda *_: None)  # kept: C calls it
        lib.llama_log_set(self._quiet, ctypes.c_void_p(0))
        params = lib.llama_model_default_params()
        model = lib.llama_model_load_from_file(str(path).encode(), params)
        if not model:
            raise RuntimeError(f"llama.cpp cannot load {path.name}")
        self._vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
        context = lib.llama_context_default_params()
        context.n_ctx = most * -(-tokens // CELLS_MULTIPLE) * CELLS_MULTIPLE
        context.n_batch = context.n_ubatch = max(512, most)
        context.n_seq_max = most
        context.n_threads = context.n_threads_batch = threads
        if exact_kv:
            context.type_k = context.type_v = lib.GGML_TYPE_F32
        self._most_batch = context.n_batch
        self._context = lib.llama_init_from_model(model, context)
        if not self._context:
            raise RuntimeError("llama.cpp cannot make a context")
        self._batch = lib.llama_batch_init(self._most_batch, 0, 1)

    def run(self, prompts: Prompts, output_tokens: int) -> EngineRun:
        lib = self._lib
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
            picked = self._decode(flat[part], at[part], whose[part], last[part])
            chosen[whose[part][last[part]]] = picked
        columns = [chosen]
        for at_step in range(length, length + output_tokens - 1):
            positions = np.full(count, at_step)
            chosen = self._decode(chosen, positions, sequences, np.ones(count, dtype=bool))
            columns.append(chosen)
        return EngineRun(time.perf_counter() - started_s, np.stack(columns, axis=1).tolist())

    def _decode(
        self, tokens: np.ndarray, positions: np.ndarray, sequences: np.ndarray, wants: np.ndarray
    ) -> np.ndarray:
        """The likeliest next token wherever one is wanted."""
        lib, batch, count = self._lib, self._batch, len(tokens)
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
            return np.zeros(0, dtype=np.int32)
        logits = lib.llama_get_logits(self._context)
        found = np.ctypeslib.as_array(logits, (wanted, self._vocab_size)).argmax(axis=1)
        return found.astype(np.int32)


_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(model: Path, path: Path, dtype: str) -> None:
    """`dtype` is float16 or float32, of matrices; vectors are float32, as that engine wants them.
    Without a tokenizer: what runs it gives token ids. Raises ValueError for other families."""
    from gguf import GGUFWriter

    fields = json.loads((model / "config.json").read_text())
    unusual = fields.get("attention_bias") or fields.get("mlp_bias") or _is_scaled(fields)
    if fields["model_type"] != "llama" or unusual:
        raise ValueError(f"{model.name}: only plain Llamas are converted")
    heads, kv_heads = fields["num_attention_heads"], fields["num_key_value_heads"]
    head_dim = fields.get("head_dim") or fields["hidden_size"] // heads
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(fields["max_position_embeddings"])
    writer.add_embedding_length(fields["hidden_size"])
    writer.add_block_count(fields["num_hidden_layers"])
    writer.add_feed_forward_length(fields["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(_rope_theta(fields))
    writer.add_layer_norm_rms_eps(fields["rms_norm_eps"])
    writer.add_vocab_size(fields["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no dictionary
                found = tensors.get_tensor(name).to(torch.float32).numpy()
                turned = {"q_proj": heads, "k_proj": kv_heads}.get(name.split(".")[-2])
                if turned is not None:
                    found = _interleaved(found, turned)
                kept = np.float32 if found.ndim == 1 else np.dtype(dtype)
                writer.add_tensor(_name(name), np.ascontiguousarray(found, dtype=kept))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _is_scaled(fields: dict[str, Any]) -> bool:
    parameters = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    return parameters.get("rope_type", "default") != "default"


def _rope_theta(fields: dict[str, Any]) -> float:
    parameters = fields.get("rope_parameters") or fields
    return float(parameters.get("rope_theta", 10_000.0))


def _name(name: str) -> str:
    whole = _WHOLE.get(name.removesuffix(".weight"))
    if whole is not None:
        return f"{whole}.weight"
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_LAYER[rest.removesuffix('.weight')]}.weight"


def _interleaved(matrix: np.ndarray, heads: int) -> np.ndarray:
    """Rows as RoPE pairs them there: neighbours, where these files pair halves."""
    rows, columns = matrix.shape
    halves = matrix.reshape(heads, 2, rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)
