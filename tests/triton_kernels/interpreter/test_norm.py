"""Norms and activations compared with their references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from triton_kernels.layers.activation import ACTIVATIONS, activate, activate_reference
from triton_kernels.layers.norm import norm_rows, norm_rows_reference

pytestmark = pytest.mark.usefixtures("device")

DTYPES = [torch.float32, BF16 := torch.bfloat16, torch.float16]


def spaced(rows: int, width: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Return random rows with NaN between them."""
    generator = torch.Generator().manual_seed(seed)
    buffer = torch.full((rows, width + 3), torch.nan, dtype=dtype)
    buffer[:, :width] = torch.randn(rows, width, generator=generator).to(dtype)
    return buffer[:, :width]


def ulp(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [48, 64, 1000])
def test_norm_gives_the_reference_within_an_ulp(dtype: torch.dtype, width: int) -> None:
    x, weight = spaced(5, width, dtype, 0), spaced(1, width, dtype, 1)[0].contiguous()
    y, expected = norm_rows(x, weight, 1e-6), norm_rows_reference(x, weight, 1e-6)
    torch.testing.assert_close(y, expected, rtol=ulp(dtype) * 2, atol=1e-6)
    library = torch.nn.functional.rms_norm(x.float(), (width,), weight.float(), 1e-6)
    torch.testing.assert_close(y.float(), library, rtol=ulp(dtype) * 2, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm_gives_the_reference_within_an_ulp(dtype: torch.dtype) -> None:
    """The mean is far from 0, and elements beyond the width do not count."""
    x, (weight, bias) = spaced(3, 72, dtype, 6) + 3, torch.randn(2, 72)
    y = norm_rows(x, weight, 1e-5, bias=bias, centred=True)
    expected = norm_rows_reference(x, weight, 1e-5, bias=bias, centred=True)
    torch.testing.assert_close(y, expected, rtol=ulp(dtype) * 2, atol=4e-6)
    library = torch.nn.functional.layer_norm(x.float(), (72,), weight, bias, 1e-5)
    torch.testing.assert_close(y.float(), library, rtol=ulp(dtype) * 2, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_kept_of_an_addition_is_what_is_normed(dtype: torch.dtype) -> None:
    x, weight = spaced(4, 96, dtype, 2), torch.ones(96, dtype=dtype)
    residual = spaced(4, 96, dtype, 3)
    twin = residual.clone()
    y = norm_rows(x, weight, 1e-5, residual)
    expected = norm_rows_reference(x, weight, 1e-5, twin)
    assert torch.equal(residual, twin) and not torch.equal(residual, spaced(4, 96, dtype, 3))
    torch.testing.assert_close(y, expected, rtol=ulp(dtype) * 2, atol=1e-6)
    assert torch.equal(y, norm_rows(residual, weight, 1e-5))


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("kind, dtype", [*zip(ACTIVATIONS, [*DTYPES, BF16], strict=True)])
def test_activation_gives_the_reference_within_an_ulp(
    kind: str, dtype: torch.dtype, gated: bool
) -> None:
    rows = spaced(2, 2 * 1300, dtype, 4) * 3
    more = {"gated": gated, "factors": torch.tensor([0.8, 0.3, 0.5]) if kind == "xielu" else None}
    y, expected = activate(rows, kind, **more), activate_reference(rows, kind, **more)
    torch.testing.assert_close(y, expected, rtol=ulp(dtype) * 2, atol=1e-6)


def test_rows_do_not_see_each_other() -> None:
    x, weight = spaced(6, 200, torch.float32, 5), torch.ones(200)
    assert torch.equal(norm_rows(x, weight, 1e-6)[4:5], norm_rows(x[4:5], weight, 1e-6))
    assert torch.equal(activate(x)[4:5], activate(x[4:5]))


def test_shapes_are_checked_by_name() -> None:
    x = torch.ones(2, 8)
    with pytest.raises(ValueError, match="weight"):
        norm_rows(x, torch.ones(7), 1e-6)
    with pytest.raises(ValueError, match="residual"):
        norm_rows(x, torch.ones(8), 1e-6, torch.ones(3, 8))
    with pytest.raises(ValueError, match="bias"):
        norm_rows(x, torch.ones(8), 1e-6, bias=torch.ones(7))
    with pytest.raises(ValueError, match="kind: 'tanh'"):
        activate(x, "tanh")
    with pytest.raises(ValueError, match="x: "):
        norm_rows(x.double(), torch.ones(8), 1e-6)
    for bad in (torch.ones(2, 7), torch.ones(8, 2).t(), x.double()):
        with pytest.raises(ValueError, match="rows"):
            activate(bad)
