"""A model in the formats that systems read: a Hugging Face directory or a GGUF file. A missing
format is written once, from the same weights."""

from __future__ import annotations

import json
import shutil
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bench.engine.shapes import SHAPES, write_random_model
from bench.peers import gguf_writer
from bench.peers.processes import Worker
from cbatch.core.request.errors import FieldError
from cbatch.demo import demo_paths
from cbatch.engine.model_files import find_model, tokenizer_of
from cbatch.engine.packaged import PACKAGED
from cbatch.runtime.model.checkpoint import read_config
from cbatch.runtime.model.config import ModelConfig, RopeConfig
from cbatch.runtime.model.gguf_file import SUFFIX, is_gguf, read_gguf
from cbatch.runtime.model.gguf_model import GgufWeights, config_of
from cbatch.runtime.model.rope import inverse_frequencies
from cbatch.runtime.model.shapes import num_weights
from cbatch.text import TextTokenizer, TokenizerError

DEMO = "demo"
NAMES = (*SHAPES, DEMO, *PACKAGED)
PLAIN = {"F32": gguf_writer.F32, "F16": gguf_writer.F16, "BF16": gguf_writer.BF16}
TYPES = (*PLAIN, "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K_S", "Q4_K_M", "Q5_K_S", "Q5_K_M")
TYPES += ("Q6_K", "IQ4_NL", "IQ4_XS")  # llama.cpp's names of types that cbatch reads
_DTYPES = {DEMO: "float32", "llama-1m": "float32"}
_ROPE_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "attention_factor", "beta_fast", "beta_slow"),
}
_LLAMA3_TOKENS = 8192  # context length of Llama 3's pretraining


class ModelFormats:
    """One model in all formats. With `kind` None its format is kept; otherwise cbatch and
    llama.cpp get one GGUF file of that type. Files are written to `folder`. `llama` is a Python
    with llama.cpp, which is needed to quantise a model or to convert a GGUF file."""

    def __init__(
        self, name: str, kind: str | None, folder: Path, *, llama: str | None, threads: int
    ) -> None:
        self.name = f"{Path(name).name} {kind}" if kind else Path(name).name
        self._kind, self._folder, self._llama, self._threads = kind, folder, llama, threads
        self.draft: Path | None = None
        if name == DEMO:
            self.source, self.draft = demo_paths()
        elif name in SHAPES:
            self.source = write_random_model(name, folder, _DTYPES.get(name, "bfloat16"))
        else:
            self.source = Path(find_model(name)).resolve()

    @cached_property
    def cbatch_path(self) -> Path:
        is_file = is_gguf(self.source)
        if self._kind is None:
            return self.source
        if self._kind in PLAIN and not is_file:
            return self._gguf_file(self._kind)
        if self._llama is None:
            raise FieldError("type", f"{self._kind} is written by llama.cpp", "name it by --llama")
        path = self._folder / f"{self.source.name.removesuffix(SUFFIX)}-{self._kind}.gguf"
        source = self.source if is_file else self._gguf_file("BF16")
        with Worker("llama_cpp", self._llama, self._threads) as worker:
            worker.start(
                model=None, max_sequences=0, tokens=0, threads=self._threads, exact_kv=False
            )
            worker.call("quantise", str(source), str(path), self._kind, self._threads)
        if not is_file:
            source.unlink()
        return path

    def gguf(self, exact: bool) -> Path:
        """Return a GGUF file for llama.cpp: cbatch's file if it is GGUF, otherwise the type
        that suits llama.cpp best: f16 for bf16, f32 for float32 and if results are compared
        (`exact`)."""
        if is_gguf(self.cbatch_path):
            return self.cbatch_path
        return self._gguf_file("F32" if exact or self.dtype == "float32" else "F16")

    @property
    def has_gguf_tokenizer(self) -> bool:
        """True if `gguf` has the model's tokenizer, as files that are converted from a GGUF do."""
        return is_gguf(self.source)

    @cached_property
    def directory(self) -> Path:
        if not is_gguf(self.cbatch_path):
            return self.cbatch_path
        path = self._folder / f"{self.cbatch_path.name}-directory"
        write_directory(self.cbatch_path, path)
        if not is_gguf(self.source):
            shutil.copy(self.source / "config.json", path)
        return path

    @cached_property
    def config(self) -> ModelConfig:
        return read_config(self.source)

    @property
    def dtype(self) -> str:
        """The dtype for systems that can choose one."""
        return "float32" if self._kind == "F32" else self.config.torch_dtype or "float32"

    @property
    def weight_bytes(self) -> int:
        """Bytes of the matrices that every step multiplies with, as stored in cbatch's file."""
        if not is_gguf(self.cbatch_path):
            return num_weights(self.config) * getattr(torch, self.dtype).itemsize
        tensors = read_gguf(self.cbatch_path).tensors
        looked_up = {"token_embd.weight"} if "output.weight" in tensors else set()
        return sum(
            tensor.raw.nbytes
            for name, tensor in tensors.items()
            if len(tensor.shape) == 2 and name not in looked_up
        )

    @property
    def token_flop(self) -> int:
        """Floating-point operations per prompt token, without the LM head, which only the last
        token needs."""
        return 2 * num_weights(self.config) - self.prompt_flop

    @property
    def prompt_flop(self) -> int:
        return 2 * self.config.vocab_size * self.config.hidden_size

    @property
    def quantised(self) -> bool:
        return is_gguf(self.cbatch_path) and any(
            tensor.type.elements > 1 for tensor in read_gguf(self.cbatch_path).tensors.values()
        )

    @cached_property
    def tokenizer(self) -> TextTokenizer | None:
        try:
            return tokenizer_of(self.source)
        except TokenizerError:
            return None

    def _gguf_file(self, kind: str) -> Path:
        path = self._folder / f"{self.source.name}-{kind}.gguf"
        if not path.exists():
            gguf_writer.write_gguf(self.source, path, PLAIN[kind])
        return path


def write_directory(file: Path, directory: Path) -> None:
    """Write a GGUF file's weights in bf16 as a directory that transformers and vLLM read, without a
    tokenizer. Raises ValueError for rotary frequencies that config.json cannot express."""
    gguf = read_gguf(file)
    config = config_of(gguf)
    weights = GgufWeights(gguf, config, torch.bfloat16)
    names = (gguf_writer.original_name(name) for name in gguf.tensors)
    tensors = {name: weights.get(name, weights.stored(name).shape) for name in names if name}
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config_fields(config)))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def config_fields(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of config.json. Raises ValueError as `write_directory` does."""
    c = config
    stretched = c.rope.factor if c.rope.type == "linear" else 1
    return {
        "architectures": [f"{c.family.capitalize()}ForCausalLM"],
        "model_type": c.family,
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        # With a linear scaling this is the length before scaling.
        "max_position_embeddings": round(c.max_position_tokens / stretched),
        "rms_norm_eps": c.rms_norm_eps,
        "sliding_window": c.sliding_window[0],
        "tie_word_embeddings": c.tie_embeddings,
        "attention_bias": c.attention_bias,
        "mlp_bias": c.mlp_bias,
        "bos_token_id": c.bos_token_id,
        "eos_token_id": list(c.eos_token_ids),
        "rope_parameters": _rope_fields(c),
        "dtype": "bfloat16",
    }


def _rope_fields(config: ModelConfig) -> dict[str, Any]:
    rope = config.rope
    if rope.divisors:  # a GGUF file has no other form for the scaling of Llama 3
        frequencies = inverse_frequencies(rope, config.head_dim)
        rope = RopeConfig(
            type="llama3",
            theta=rope.theta,
            factor=max(rope.divisors),
            original_max_position_tokens=_LLAMA3_TOKENS,
        )
        if not torch.allclose(inverse_frequencies(rope, config.head_dim), frequencies, rtol=1e-4):
            raise ValueError("rope_freqs.weight: the factors are not those of Llama 3")
    fields = {name: getattr(rope, name) for name in _ROPE_FIELDS[rope.type]}
    original = rope.original_max_position_tokens
    if original:
        fields["original_max_position_embeddings"] = original
    return {"rope_type": rope.type, "rope_theta": rope.theta} | fields
