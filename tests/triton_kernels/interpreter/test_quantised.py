"""The product with weights of 4 and 8 bits, compared with torch, and in a decoder."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cbatch.runtime.gpu.decoder import Decoder
from cbatch.runtime.gpu.products import ProductBuilder, QuantisedDense
from cbatch.runtime.model.gguf_file import GgufTensor
from tests.runtime.blocks import stored, stored_matrix
from tests.runtime.engines import NoisyWeights, tiny_config
from triton_kernels.products.dense import keeps_bits
from triton_kernels.products.quantised import (
    Packed,
    dequantise,
    pack,
    quantised,
    quantised_reference,
)

pytestmark = pytest.mark.usefixtures("device", "unchecked_sums")


def packed(kind: str, out: int, columns: int) -> tuple[Packed, GgufTensor]:
    tensor = stored(kind, out, columns)
    matrix = pack(kind, torch.from_numpy(tensor.rows))
    assert matrix is not None
    return matrix, tensor


@pytest.mark.parametrize(
    "kind, dtype",
    [("Q4_0", torch.bfloat16), ("Q4_1", torch.float32), ("Q8_0", torch.bfloat16)],
)
def test_products_are_those_of_torch(kind: str, dtype: torch.dtype) -> None:
    weight, tensor = packed(kind, 70, 128)
    assert torch.equal(dequantise(weight), tensor.dequantised(torch.float32))
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(67, 128, generator=generator).to(dtype)
    bias = torch.randn(70, generator=generator).to(dtype) if kind == "Q4_0" else None
    out = torch.full((67, 80), 7.0, dtype=dtype)
    quantised(x, weight, bias, out[:, :70])
    expected = quantised_reference(x, weight, bias)
    rounding = 8e-3 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(out[:, :70], expected, rtol=rounding, atol=rounding)
    assert (out[:, 70:] == 7).all()


def test_rows_keep_their_bits() -> None:
    weight, _ = packed("Q4_1", 40, 128)
    x = torch.randn(70, 128, generator=torch.Generator().manual_seed(2)).bfloat16()
    product = QuantisedDense(weight, None, None)
    assert keeps_bits(product, x)


def test_what_it_does_not_take_is_none() -> None:
    assert pack("Q6_K", torch.zeros(2, 210, dtype=torch.uint8)) is None
    assert pack("Q8_0", torch.zeros(2, 3 * 34, dtype=torch.uint8)) is None  # 96 columns


SHAPE = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 128, "num_hidden_layers": 1}
CONFIG = tiny_config(**SHAPE)


EXPERTS = {"model_type": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 2}


class Stored(NoisyWeights):
    def blocks(self, name: str) -> GgufTensor | None:
        if name.endswith("experts.gate_up_proj"):
            return stored("MXFP4", 3 * 256, 64)._replace(shape=(3, 256, 64))
        if name.endswith("experts.down_proj"):
            return stored("Q8_0", 3 * 64, 128)._replace(shape=(3, 64, 128))
        return stored_matrix(CONFIG, name)


class Widened(Stored):
    def blocks(self, name: str) -> GgufTensor | None:
        return None

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        blocks = super().blocks(name)
        return super().get(name, shape) if blocks is None else blocks.dequantised(torch.float32)


@pytest.mark.parametrize("fields", [{}, EXPERTS], ids=["dense", "experts"])
def test_a_decoder_multiplies_with_what_is_stored(
    fields: dict[str, Any], device: torch.device
) -> None:
    config = tiny_config(**SHAPE, **fields)
    made = [Decoder(config, source(1), torch.float32, device) for source in (Stored, Widened)]
    stored_, wide = (
        [weight for layer in each.layers for p in layer.products() for weight in p.weights]
        for each in made
    )
    quantised_ = [isinstance(weight, Packed) for weight in stored_]
    # qkv and out; gate_up and down, before which experts have the router
    assert quantised_ == [True, True, *([False] if fields else []), True, True]
    for mine, plain in zip(stored_, wide, strict=True):
        assert torch.equal(dequantise(mine) if isinstance(mine, Packed) else mine, plain)
    assert made[0].matrix_bytes is not None and made[1].matrix_bytes is None


def test_formats_that_no_product_joins_are_widened(device: torch.device) -> None:
    class Mixed(NoisyWeights):
        def blocks(self, name: str) -> GgufTensor | None:
            return stored("MXFP4" if "up_proj" in name else "Q4_0", 128, 64)

    builder = ProductBuilder(CONFIG, Mixed(1), torch.float32, device, "fast")
    gate, up = (f"model.layers.0.mlp.{half}_proj.weight" for half in ("gate", "up"))
    assert builder._packed([gate, up]) is None
    assert builder._packed([up, up]) is not None
