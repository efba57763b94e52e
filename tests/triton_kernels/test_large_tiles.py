"""Products use the tiles of Hopper where both its features and its shared memory are there."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from triton_kernels.build import hopper
from triton_kernels.products import dense

CONSUMER_BYTES, SERVER_BYTES = 101_376, 232_448  # of a program, as CUDA reports


@pytest.mark.parametrize(
    "arch, shared_bytes, large",
    [
        (80, 166_912, False),
        (89, CONSUMER_BYTES, False),
        (90, SERVER_BYTES, True),
        (100, SERVER_BYTES, True),
        (120, CONSUMER_BYTES, False),
        (121, CONSUMER_BYTES, False),
    ],
)
def test_a_product_is_launched_with_a_tile_that_fits(
    arch: int, shared_bytes: int, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = SimpleNamespace(
        get_current_target=lambda: SimpleNamespace(backend="cuda", arch=arch),
        get_current_device=lambda: 1000 + arch,  # known to no other test
        utils=SimpleNamespace(get_device_properties=lambda _: {"max_shared_mem": shared_bytes}),
    )
    monkeypatch.setattr(hopper, "driver", SimpleNamespace(active=device))
    launched: dict[str, dict[str, int]] = {}

    class Kernel:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: object) -> Kernel:
            return self

        def __call__(self, *args: object, **options: int) -> None:
            launched[self.name] = options

    for name in ("described_kernel", "dense_kernel"):
        monkeypatch.setattr(dense, name, Kernel(name))
    for rows in (1, dense.MANY_ROWS):
        for outs in (4096, 32768):
            x, weight = torch.zeros(rows, 64).bfloat16(), torch.zeros(outs, 64).bfloat16()
            dense.dense(x, weight, None, torch.zeros(rows, outs).bfloat16())
            ((name, used),) = launched.items()
            assert name == ("described_kernel" if large else "dense_kernel")
            launched.clear()
            if name == "described_kernel":  # all stages are in memory at once
                values = (used["ROWS"] + used["OUTS"]) * used["COLUMNS"] * used["num_stages"]
                assert 2 * values < shared_bytes
