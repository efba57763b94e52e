"""Decoder layers of transformers models, a call each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cbatch.runtime.cpu.compiled.fused_layer import FusedLayer
from cbatch.runtime.model.kv_cache import KVCache
from tests.runtime.marks import needs_compiler

pytest.importorskip("transformers", minversion="5.0", reason="the extra `models`")

from cbatch.runtime.cpu.transformers_backend.loading import load_transformers_model
from tests.runtime.hf_models import paged, run_all
from tests.runtime.test_rotary_of_models import RELEASE, REPLACED_IN
from tests.runtime.tiny_architectures import make_tiny

pytestmark = [
    needs_compiler,
    pytest.mark.filterwarnings("ignore::Warning"),
    pytest.mark.skipif(RELEASE not in REPLACED_IN, reason="layers as another release writes them"),
]
LAYERS = 4
# Norms before, all around and behind; queries and keys normed; residuals scaled; windows, soft caps
# and sinks; experts behind ours; factors of half a head; one product for queries, keys and values.
OURS = (
    "gemma2",
    "glm4_moe",
    "gpt_oss",
    "granite",
    "llama",
    "olmo2",
    "phi3",
    "qwen3_moe",
    "smollm3",
)
THEIRS = ("cohere2", "deepseek_v3", "gpt2", "stablelm")  # what we have not: their own code


def steps(model: Any) -> tuple[torch.Tensor, list[np.ndarray]]:
    rows = [np.random.default_rng(i).integers(3, 120, n) for i, n in enumerate((23, 11))]
    kv = KVCache(model.config, 20, 4, torch.float32, "cpu")
    return run_all(model, kv, paged(kv, rows), [1, 5, 2, 7], firsts=[9, 4]), rows


def eager(net: Any, rows: list[np.ndarray]) -> torch.Tensor:
    with torch.no_grad():
        found = [net(torch.from_numpy(r)[None], use_cache=False).logits[0] for r in rows]
    return torch.cat(found)


@pytest.mark.parametrize("kind", [*OURS, *THEIRS])
def test_layers_that_ours_computes(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, calls = make_tiny(kind, tmp_path), []
    model = load_transformers_model(tmp_path)
    ours = FusedLayer.__call__

    def counted(self: FusedLayer, *given: Any) -> Any:
        calls.append(self)
        return ours(self, *given)

    monkeypatch.setattr(FusedLayer, "__call__", counted)
    model.progress = np.zeros(1, np.int64)
    found, rows = steps(model)
    wanted = eager(net, rows)
    assert (found - wanted).abs().max() < 1e-4 * wanted.std()
    assert model.fused_layers == (LAYERS if kind in OURS else 0)
    assert len(set(calls)) == model.fused_layers and model.progress[0] >= LAYERS


def test_half_precision_too(tmp_path: Path) -> None:
    make_tiny("qwen3", tmp_path, dtype=torch.bfloat16)
    assert load_transformers_model(tmp_path).fused_layers == LAYERS


def clamped(y: torch.Tensor) -> torch.Tensor:
    return y.clamp(-1e9, 1e9)  # which no number here meets


def scaled(y: torch.Tensor) -> torch.Tensor:
    return y * 1.0


def moved(y: torch.Tensor) -> torch.Tensor:
    """By nothing but what ours calls shaping."""
    return torch.cat([y[..., 1:], y[..., :1]], dim=-1)


@pytest.mark.parametrize("more", [clamped, scaled, moved])
def test_a_layer_that_does_more_stays_itself(
    more: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    own = LlamaDecoderLayer.forward
    monkeypatch.setattr(LlamaDecoderLayer, "forward", lambda *a, **named: more(own(*a, **named)))
    net = make_tiny("llama", tmp_path)
    model = load_transformers_model(tmp_path)
    assert model.fused_layers == 0
    found, rows = steps(model)
    wanted = eager(net, rows)
    assert (found - wanted).abs().max() < 1e-4 * wanted.std()
