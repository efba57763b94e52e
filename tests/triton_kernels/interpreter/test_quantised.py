"""The product with weights of 4 and 8 bits: against torch, and in a decoder."""

from __future__ import annotations

import pytest
import torch
from msgspec import structs
from torch import Tensor

from cbatch.runtime.gpu import Decoder
from cbatch.runtime.gpu.decoder import QuantisedDense
from cbatch.runtime.model.gguf_file import TYPES, GgufTensor
from tests.runtime.pairs import NoisyWeights, tiny_config
from tests.triton_kernels.interpreter.light import without_overflow_checks
from triton_kernels.products.dense import keeps_bits
from triton_kernels.products.quantised import (
    Packed,
    pack,
    quantised,
    quantised_reference,
    restored,
)

_KINDS = {each.name: each for each in TYPES.values()}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    without_overflow_checks(monkeypatch)


def stored(kind: str, out: int, columns: int, seed: int = 0) -> GgufTensor:
    """With blocks of a GGUF type, whose scales are small."""
    generator = torch.Generator().manual_seed(seed)
    size, count = _KINDS[kind].bytes, columns // 32
    raw = torch.randint(0, 256, (out, count, size), generator=generator).to(torch.uint8)
    heads = 2 if kind == "Q4_1" else 1
    halves = (torch.rand(out, count, heads, generator=generator) * 0.02 + 0.002).half()
    raw[..., : 2 * heads] = halves.view(torch.uint8).view(out, count, -1)
    return GgufTensor(kind, _KINDS[kind], (out, columns), raw.flatten().numpy())


def packed(kind: str, out: int, columns: int) -> tuple[Packed, GgufTensor]:
    tensor = stored(kind, out, columns)
    found = pack(kind, torch.from_numpy(tensor.rows))
    assert found is not None
    return found, tensor


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_are_those_of_torch(kind: str, dtype: torch.dtype) -> None:
    weight, tensor = packed(kind, 70, 128)
    assert torch.equal(restored(weight), tensor.dequantised(torch.float32))
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
    x = torch.randn(131, 128, generator=torch.Generator().manual_seed(2)).bfloat16()
    product = QuantisedDense(weight, None, None)
    assert keeps_bits(product, x)


def test_what_it_does_not_take_is_none() -> None:
    assert pack("Q6_K", torch.zeros(2, 210, dtype=torch.uint8)) is None
    assert pack("Q8_0", torch.zeros(2, 3 * 34, dtype=torch.uint8)) is None  # 96 columns


CONFIG = structs.replace(
    tiny_config(), hidden_size=64, head_dim=16, intermediate_size=128, num_layers=1
)


class Stored(NoisyWeights):
    """Matrices of the layers in blocks; queries have offsets, keys and values none."""

    def blocks(self, name: str) -> GgufTensor | None:
        c, place = CONFIG, name.split(".")[-2]
        if not name.endswith("proj.weight"):
            return None
        width = c.num_heads * c.head_dim
        sizes = {"q_proj": (width, c.hidden_size), "o_proj": (c.hidden_size, width)}
        sizes |= dict.fromkeys(("k_proj", "v_proj"), (c.num_kv_heads * c.head_dim, c.hidden_size))
        sizes |= dict.fromkeys(("gate_proj", "up_proj"), (c.intermediate_size, c.hidden_size))
        sizes["down_proj"] = (c.hidden_size, c.intermediate_size)
        kind = {"q_proj": "Q4_1", "o_proj": "Q8_0"}.get(place, "Q4_0")
        return stored(kind, *sizes[place], seed=len(name) + ord(place[0]))


class Widened(Stored):
    def blocks(self, name: str) -> GgufTensor | None:
        return None

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        found = super().blocks(name) if name.endswith("proj.weight") else None
        return super().get(name, shape) if found is None else found.dequantised(torch.float32)


def test_a_decoder_multiplies_with_what_is_stored() -> None:
    made = [
        Decoder(CONFIG, source(1), torch.float32, torch.device("cpu"))
        for source in (Stored, Widened)
    ]
    quantised_, wide = made
    taken = 0
    for mine, theirs in zip(quantised_.layers, wide.layers, strict=True):
        for ours, plain in zip(mine.products(), theirs.products(), strict=True):
            if isinstance(ours, QuantisedDense):
                taken += 1
                assert torch.equal(restored(ours.packed), plain.weight)
    assert taken == 4 * len(wide.layers)
    assert wide.block_bytes is None and quantised_.block_bytes is not None
