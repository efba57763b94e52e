"""A model in the formats that systems read: a Hugging Face directory or a GGUF file. A missing
format is written once, from the same weights."""

from __future__ import annotations

import shutil
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from bench.peers.gguf_files import BF16, F16, F32, convert, write_gguf
from bench.peers.worker import System, Worker
from bench.shapes import SHAPES, write_random_model
from cbatch.core.request.errors import FieldError
from cbatch.demo import demo_paths
from cbatch.engine.model_files import find_model, tokenizer_of
from cbatch.engine.packaged import PACKAGED
from cbatch.runtime.model.checkpoint import read_config
from cbatch.runtime.model.config import ModelConfig
from cbatch.runtime.model.gguf_file import SUFFIX, is_gguf, read_gguf
from cbatch.runtime.model.gguf_model import GgufWeights, config_of
from cbatch.text import TextTokenizer, TokenizerError

NAMES = (*SHAPES, "demo", *PACKAGED)
_PLAIN = {"F32": F32, "F16": F16, "BF16": BF16}
TYPES = (*_PLAIN, "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K_S", "Q4_K_M", "Q5_K_S", "Q5_K_M")
TYPES += ("Q6_K", "IQ4_NL", "IQ4_XS")  # llama.cpp's names of types that cbatch reads


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
        if name == "demo":
            self.source, self.draft = demo_paths()
        elif name in SHAPES:
            dtype = "float32" if name == "llama-1m" else "bfloat16"
            self.source = write_random_model(name, folder, dtype)
        else:
            self.source = Path(find_model(name)).resolve()

    @cached_property
    def cbatch_path(self) -> Path:
        is_file = is_gguf(self.source)
        if self._kind is None:
            return self.source
        if self._kind in _PLAIN and not is_file:
            return self._gguf_file(self._kind)
        if self._llama is None:
            raise FieldError("type", f"{self._kind} is written by llama.cpp", "name it by --llama")
        path = self._folder / f"{self.source.name.removesuffix(SUFFIX)}-{self._kind}.gguf"
        source = self.source if is_file else self._gguf_file("BF16")
        settings = {"model": None, "max_sequences": 0, "tokens": 0, "threads": 0, "exact": False}
        system = System("llama.cpp", "off", "llama_cpp", self._llama, self._threads, settings)
        with Worker(system) as worker:
            worker.start()
            worker.call("quantise", str(source), str(path), self._kind, self._threads)
        return path

    def gguf(self, exact: bool) -> Path:
        """Return a GGUF file for llama.cpp: cbatch's file if it is GGUF, otherwise the type
        that suits llama.cpp best: f16 for bf16, f32 for float32 and if results are compared
        (`exact`)."""
        if is_gguf(self.cbatch_path):
            return self.cbatch_path
        return self._gguf_file("F32" if exact or self.dtype == "float32" else "F16")

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
            write_gguf(path, *convert(self.source, _PLAIN[kind]))
        return path


def write_directory(file: Path, directory: Path) -> None:
    """Write a GGUF file's weights in bf16 as a directory that transformers and vLLM read, without a
    tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    gguf = read_gguf(file)
    config = config_of(gguf)
    source = GgufWeights(gguf, config, torch.bfloat16)
    with torch.device("meta"):
        hf_config = AutoConfig.for_model(config.family, **_config_fields(config))
        model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.bfloat16)
    weights = {name: source.get(name, tuple(p.shape)) for name, p in model.named_parameters()}
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    model.save_pretrained(directory)


def _config_fields(c: ModelConfig) -> dict[str, Any]:
    m = c.attention
    rope: dict[str, Any] = {"rope_type": m.rope.type, "rope_theta": m.rope.theta}
    if m.rope.divisors:  # Llama 3's scaling, for which a GGUF file has no other form
        rope |= {"rope_type": "llama3", "factor": max(m.rope.divisors), "low_freq_factor": 1.0}
        rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    elif m.rope.type != "default":
        rope |= {"factor": m.rope.factor}
    if m.rope.type == "yarn":
        rope |= {"original_max_position_embeddings": m.rope.original_max_position_tokens}
        for name in ("attention_factor", "beta_fast", "beta_slow"):
            rope[name] = getattr(m.rope, name)
    # With a linear scaling this is the length before scaling.
    stretched = m.rope.factor if m.rope.type == "linear" else 1
    return {
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.widest_inner,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": m.heads,
        "num_key_value_heads": m.kv_heads,
        "head_dim": m.key_dim,
        "max_position_embeddings": round(c.max_position_tokens / stretched),
        "rms_norm_eps": None if c.norm is None else c.norm.eps,
        "sliding_window": m.window,
        "tie_word_embeddings": c.tie_embeddings,
        "attention_bias": m.bias,
        "mlp_bias": c.feed_forward.bias,
        "bos_token_id": c.bos_token_id,
        "eos_token_id": list(c.eos_token_ids),
        "rope_parameters": rope,
    }
