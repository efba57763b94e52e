"""Norms and feed-forwards of transformers models in one call each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from cbatch.runtime.cpu.numerics import Numerics
from cbatch.runtime.cpu.transformers_backend.fused import FeedForward, Norm, fuse
from cbatch.runtime.cpu.transformers_backend.products import Products
from tests.runtime.marks import needs_compiler

transformers = pytest.importorskip("transformers")
pytestmark = needs_compiler

SIZES = {
    "vocab_size": 50,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "pad_token_id": 0,
}
# Modules that one call computes, by layer, and one norm behind them.
MODELS = {"Llama": 3, "Gemma2": 5, "Phi3": 3, "Qwen3": 5}


def made(family: str, **changes: Any) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES | changes)
    net = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for name, parameter in net.named_parameters():
        if "norm" in name:
            nn.init.normal_(parameter, 1.0, 0.3)
    Products(Numerics("invariant", True)).replace(net)
    return net


@pytest.mark.parametrize("family", MODELS)
@torch.inference_mode()
def test_logits_are_the_same(family: str) -> None:
    net, tokens = made(family), torch.arange(20)[None]
    expected = net(tokens, use_cache=False).logits
    assert fuse(net) == 2 * MODELS[family] + 1
    assert sum(isinstance(module, FeedForward) for module in net.modules()) == 2
    torch.testing.assert_close(net(tokens, use_cache=False).logits, expected, rtol=1e-4, atol=1e-5)


def test_what_computes_something_else_is_left_alone() -> None:
    """An activation that is not ours; a norm whose name is all there is of it; a feed-forward that
    does more."""
    net = made("Llama", hidden_act="relu")
    assert fuse(net) == 5 and not any(isinstance(m, FeedForward) for m in net.modules())

    class OddRMSNorm(nn.RMSNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 1.01

    net = made("Llama")
    layer: Any = net.get_submodule("model.layers.0")
    layer.input_layernorm = OddRMSNorm(48, eps=1e-6)
    mlp = type(layer.mlp)
    layer.mlp.__class__ = type("Odd", (mlp,), {"forward": lambda self, x: mlp.forward(self, x) * 2})
    assert fuse(net) == 5
    assert isinstance(layer.input_layernorm, OddRMSNorm) and isinstance(layer.mlp, mlp)
    assert isinstance(layer.post_attention_layernorm, Norm)
