"""Sizes of executors: models in full width (two layers), slots, pages, types."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import pytest
import torch
from msgspec import structs
from torch import Tensor

from cbatch.runtime.gpu import attention, memory
from cbatch.runtime.gpu.attention import Tuning
from cbatch.runtime.gpu.decoder import Decoder
from cbatch.runtime.gpu.heads import CLASSES, GpuHead
from cbatch.runtime.model.config import ModelConfig
from cbatch.runtime.model.config_json import parse_config
from cbatch.runtime.model.gguf_file import GgufTensor
from cbatch.runtime.model.head_config import HeadConfig, head_layer
from cbatch.runtime.model.weight_files import WeightSource
from tests.gpu_proofs.meta import META
from tests.runtime.blocks import stored_matrix
from triton_kernels.attention import Heads

INVARIANT = "invariant"
PROCESSORS = {"sm_80": 108, "sm_90": 132, "sm_100": 148, "gfx942": 304}


def model(family: str, vocab: int, heads: tuple[int, int, int], **more: Any) -> ModelConfig:
    """Return a model. `heads`: number of query heads, of key heads, and their width."""
    num_heads, num_kv_heads, head_dim = heads
    names = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    settings = {
        "architectures": [f"{names[family]}ForCausalLM"],
        "model_type": family,
        "hidden_size": num_heads * head_dim,
        "intermediate_size": 3 * num_heads * head_dim,
        "num_hidden_layers": 2,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 1,
    }
    return parse_config(settings | more, Path("made_up"))


class Size(NamedTuple):
    name: str
    target: ModelConfig
    draft: ModelConfig | None
    slots: int
    page_tokens: int
    drafts: int = 0
    dtype: torch.dtype = torch.bfloat16
    budget_tokens: int = 2048
    blocks: int = 4096
    numerics: str = "fast"
    in_blocks: bool = False  # matrices of the layers have 4 and 8 bits
    kv_cache_dtype: str = "auto"
    # The draft is a head of the width of `draft`.
    head: Literal["eagle3", "eagle", "medusa"] | None = None


LLAMA_8B = model("llama", 128256, (32, 8, 128))
LLAMA_1B = model("llama", 128256, (32, 8, 64))
QWEN3_8B = model("qwen3", 151936, (32, 8, 128))
QWEN3_SMALL = model("qwen3", 151936, (16, 8, 128))
ODD = model("llama", 50257, (12, 12, 64))
ODD_SMALLER = model("llama", 50000, (6, 2, 64))
BLOCKS = model("llama", 32000, (16, 4, 64))
BLOCKS_BIASED = model("qwen2", 32000, (8, 2, 64))
WINDOW = model("mistral", 32003, (32, 8, 128), sliding_window=4096)

USUAL = (
    Size("llama, 33 slots", LLAMA_8B, LLAMA_1B, 33, 16, 4),
    Size("qwen3, 17 slots", QWEN3_8B, QWEN3_SMALL, 17, 64, 3),
    Size("odd vocabulary, 1 slot", ODD, ODD_SMALLER, 1, 32, 5, torch.float16, 72, 600),
    Size("window, 16 slots, no draft", WINDOW, None, 16, 128, budget_tokens=777),
    Size(
        "in blocks, keys in fp8, invariant, 5 slots",
        BLOCKS,
        BLOCKS_BIASED,
        5,
        16,
        2,
        budget_tokens=600,
        numerics=INVARIANT,
        in_blocks=True,
        kv_cache_dtype="fp8",
    ),
)
USUAL += (
    Size("an eagle-3 head, 17 slots", LLAMA_1B, LLAMA_1B, 17, 64, 4, head="eagle3"),
    Size("medusa heads, 5 slots", ODD, ODD, 5, 16, 3, budget_tokens=700, head="medusa"),
)


def draft_of(size: Size, target: Decoder) -> Decoder | GpuHead | None:
    if size.draft is None or size.head is None:
        return None if size.draft is None else decoder(size.draft, size)
    reads, layers = size.target.num_layers, size.draft.layers[: size.head != "medusa"]
    layer = structs.replace(size.draft, vocab_size=size.target.vocab_size, layers=layers)
    if size.head != "medusa":
        layer = head_layer(layer, size.head).with_mixers(window=None)
    config = HeadConfig(
        kind=size.head,
        layer=layer,
        hidden_layers=tuple(range(reads + 1)) if size.head == "eagle3" else (reads,),
        draft_vocab_size=layer.vocab_size // (2 if size.head == "eagle3" else 1),
        fc_norm=True,
        fc_bias=True,
        num_heads=2,
    )
    rows = torch.empty(layer.vocab_size, layer.hidden_size, dtype=size.dtype, device=META)
    return CLASSES[size.head](config, HeadTensors(size.dtype), target, rows)  # type: ignore[arg-type]


class _NoWeights(WeightSource):
    def __init__(self, dtype: torch.dtype, device: torch.device = META) -> None:
        self._options: Any = {"dtype": dtype, "device": device}

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, **self._options)


class HeadTensors(_NoWeights):
    """The tensors of a head that drafts the first ids."""

    file, names = "made up", frozenset(["lm_head.weight"])

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64)

    def shape_of(self, name: str) -> None:
        return None


class _Blocks(_NoWeights):
    """Weights in blocks; other tensors have no values."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self._config = config

    def blocks(self, name: str) -> GgufTensor | None:
        return stored_matrix(self._config, name)


def decoder(config: ModelConfig, size: Size) -> Decoder:
    source = _Blocks(config, size.dtype) if size.in_blocks else _NoWeights(size.dtype)
    return Decoder(config, source, size.dtype, META, size.numerics)


@contextmanager
def device_of(arch: str) -> Iterator[None]:
    """Let a device of this kind answer the executor's questions."""

    def of(
        heads: Heads,
        dtype: torch.dtype,
        device: torch.device,
        page_tokens: int,
        *more: Any,
        **given: Any,
    ) -> Tuning:
        return real(heads, dtype, torch.device("cuda"), page_tokens, *more, **given)

    real, processors = Tuning.of, SimpleNamespace(multi_processor_count=PROCESSORS[arch])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tuning, "of", of)
        patch.setattr(attention, "arch_of", lambda device: arch)
        patch.setattr(torch.cuda, "get_device_properties", lambda device: processors)
        patch.setattr(memory, "arch_of", lambda device: arch)
        yield
