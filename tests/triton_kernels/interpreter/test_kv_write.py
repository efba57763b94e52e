"""Norm, RoPE and the paged write in the interpreter, compared with the reference and the CPU
runtime."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from cbatch.runtime.model.records import Rope
from cbatch.runtime.model.rope import RotaryTable
from triton_kernels.layers.kv_write import kv_write, kv_write_reference

pytestmark = pytest.mark.usefixtures("device")

TOKENS, KV_HEADS, NUM_PAGES, LONGEST = 7, 2, 4, 600
TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3.2e-2}


class Write(NamedTuple):
    """Rows at scattered positions and slots, one of padding; a pool of NaN."""

    fused: Tensor
    positions: Tensor
    slots: Tensor
    cos_sin: Tensor
    k_pages: Tensor
    v_pages: Tensor

    @classmethod
    def make(
        cls,
        *,
        group: int = 2,
        head_dim: int = 16,
        page_tokens: int = 16,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
    ) -> Write:
        gen = torch.Generator().manual_seed(0)
        slots = torch.randperm(NUM_PAGES * page_tokens, generator=gen)[:TOKENS].int()
        slots[3] = -1
        pool = torch.full((KV_HEADS, NUM_PAGES, page_tokens, 2, head_dim), float("nan"))
        k_pages, v_pages = pool.to(kv_dtype or dtype).permute(3, 1, 2, 0, 4)
        fused = torch.randn(TOKENS, KV_HEADS, group + 2, head_dim, generator=gen) * 3
        positions = torch.randint(LONGEST, (TOKENS,), generator=gen).int()
        table = RotaryTable(Rope(), head_dim, fused.device)
        return cls(fused.to(dtype), positions, slots, table.cos_sin(LONGEST), k_pages, v_pages)

    def both(self, **options: Any) -> tuple[Write, Write]:
        """Return the buffers after the kernel, and after the reference."""
        by_kernel, expected = (Write(*(field.clone() for field in self)) for _ in range(2))
        kv_write(*by_kernel, **options)
        kv_write_reference(*expected, **options)
        return by_kernel, expected

    def written(self) -> list[Tensor]:
        return [self.fused.float(), self.k_pages.float(), self.v_pages.float()]


def differ(actual: Write, expected: Write, tolerance: float) -> bool:
    """Compare projection and pool; poison must be at the same places."""
    pairs = zip(actual.written(), expected.written(), strict=True)
    return not all(
        torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True) for a, b in pairs
    )


def weight_of(group: int, head_dim: int, *, whole: bool = False) -> Tensor:
    shape = (*(KV_HEADS,) * whole, group + 1, head_dim)
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) + 0.5


@pytest.mark.parametrize(
    "group, head_dim, page_tokens, dtype, norm",
    [
        (1, 64, 16, torch.float32, ""),
        (2, 16, 32, torch.bfloat16, "heads"),
        (7, 16, 64, torch.float16, "heads"),
        (3, 48, 128, torch.float32, "heads"),
        (3, 48, 16, torch.bfloat16, ""),
        (1, 16, 32, torch.float16, ""),
        (3, 48, 16, torch.float32, "whole"),
        (3, 48, 16, torch.float32, "rotated"),
    ],
)
def test_against_the_reference(
    group: int, head_dim: int, dtype: torch.dtype, page_tokens: int, norm: str
) -> None:
    write = Write.make(group=group, head_dim=head_dim, dtype=dtype, page_tokens=page_tokens)
    weight = weight_of(group, head_dim, whole=norm == "whole") if norm else None
    by_kernel, expected = write.both(qk_weight=weight, norms_rotated=norm == "rotated")
    assert not differ(by_kernel, expected, TOLERANCE[dtype])
    assert differ(by_kernel, write, TOLERANCE[dtype])
    assert by_kernel.k_pages.isnan().sum() == (NUM_PAGES * page_tokens - 6) * KV_HEADS * head_dim
    assert torch.equal(by_kernel.fused[3], write.fused[3])  # padding
    assert torch.equal(by_kernel.fused[:, :, group:], write.fused[:, :, group:])  # K and V stay


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("dtype, page_tokens", [*zip(TOLERANCE, (16, 128, 32), strict=True)])
def test_fp8_is_bounded(kv_dtype: torch.dtype, dtype: torch.dtype, page_tokens: int) -> None:
    write = Write.make(dtype=dtype, kv_dtype=kv_dtype, page_tokens=page_tokens)
    write.fused[0] *= 1e3
    by_kernel, expected = write.both(k_scale=0.05, v_scale=3.0)
    # A last bit of fp32 may decide between two neighbours.
    assert not differ(by_kernel, expected, 2 * torch.finfo(kv_dtype).eps)
    stored = by_kernel.k_pages.float()
    assert stored[~stored.isnan()].abs().max() == torch.finfo(kv_dtype).max


@pytest.mark.parametrize("whole", [False, True])
def test_bits_of_a_row_are_its_own(whole: bool) -> None:
    write, weight = Write.make(), weight_of(2, 16, whole=whole)
    together, _ = write.both(qk_weight=weight)
    for row in range(TOKENS):
        alone = write._replace(
            fused=write.fused[row : row + 1],
            positions=write.positions[row : row + 1],
            slots=write.slots[row : row + 1],
        )
        by_kernel, _ = alone.both(qk_weight=weight)
        assert torch.equal(by_kernel.fused[0], together.fused[row])
        slot = int(write.slots[row])
        if slot >= 0:
            page, offset = divmod(slot, 16)
            assert torch.equal(by_kernel.k_pages[page, offset], together.k_pages[page, offset])


def test_arguments_that_do_not_fit_are_named() -> None:
    write = Write.make()
    bad: dict[str, Write] = {
        "fused": write._replace(fused=write.fused.flatten(1)),
        "positions": write._replace(positions=write.positions.long()),
        "slots": write._replace(slots=write.slots[:-1]),
        "cos_sin": write._replace(cos_sin=write.cos_sin[:, :4]),
        "k_pages": write._replace(k_pages=write.k_pages[..., :8]),
        "v_pages": write._replace(v_pages=write.v_pages.clone().contiguous()),
    }
    for name, wrong in bad.items():
        with pytest.raises(ValueError, match=f"^{name}: "):
            kv_write(*wrong)
    with pytest.raises(ValueError, match=r"^qk_weight: "):
        kv_write(*write, qk_weight=weight_of(1, 16))
