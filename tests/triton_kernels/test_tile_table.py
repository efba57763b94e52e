"""The static table of attention tiles: its contents, and the choice from it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from triton_kernels.attention import Heads, tile_for
from triton_kernels.attention.table import PATH, entries
from triton_kernels.build import hopper
from triton_kernels.products import dense

LLAMA_8B = Heads(kv_heads=8, group=4, head_dim=128)


def test_every_entry_can_be_launched() -> None:
    for key, tile in entries().items():
        assert tile.rows == key.rows >= key.group
        assert all(n & (n - 1) == 0 and n >= 16 for n in (tile.rows, tile.keys))
        assert not tile.descriptors or (
            key.page_tokens % tile.keys == 0 and key.arch in ("sm_90", "sm_100")
        )
        assert tile.max_registers * 32 * tile.num_warps * tile.programs <= 65536


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "gfx942"])
@pytest.mark.parametrize("page_tokens", [16, 32, 64, 128])
@pytest.mark.parametrize(
    "heads", [LLAMA_8B, Heads(2, 7, 64), Heads(8, 1, 96), Heads(1, 8, 256), Heads(4, 5, 128)]
)
def test_every_usual_model_finds_a_tile(arch: str, page_tokens: int, heads: Heads) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        tile = tile_for(heads, dtype, page_tokens, arch=arch)
        assert tile.rows >= heads.group
        assert not tile.descriptors or page_tokens % tile.keys == 0


def test_descriptors_serve_long_pages_of_new_devices() -> None:
    for arch, new in (("sm_80", False), ("sm_90", True), ("sm_100", True), ("gfx942", False)):
        for page_tokens in (16, 32, 64, 128):
            tile = tile_for(LLAMA_8B, torch.bfloat16, page_tokens, arch=arch)
            assert tile.descriptors == (new and page_tokens >= 64)


def test_rows_choose_among_tiles() -> None:
    """The smallest tile that holds the requested rows is chosen; without a request, and beyond all
    tiles, the largest."""
    sizes = [
        tile_for(LLAMA_8B, torch.bfloat16, 64, arch="sm_90", rows=rows).rows
        for rows in (4, 16, 17, 1000, None)
    ]
    assert sizes == [16, 16, 32, 128, 128]


def test_what_the_table_lacks_is_refused_by_name() -> None:
    for wrong in (
        {"heads": LLAMA_8B._replace(head_dim=512)},
        {"heads": LLAMA_8B._replace(group=64)},
        {"page_tokens": 8},
        {"arch": "sm_80", "kv_dtype": torch.float8_e4m3fn},
    ):
        given = {
            "heads": LLAMA_8B, "dtype": torch.bfloat16, "page_tokens": 16, "arch": "sm_90", **wrong
        }  # fmt: skip
        with pytest.raises(ValueError, match=r"^tile: none for "):
            tile_for(**given)


def test_another_table_can_be_read(tmp_path: Path) -> None:
    table = json.loads(PATH.read_text())
    table["tiles"] = table["tiles"][:1]
    path = tmp_path / "tiles.json"
    path.write_text(json.dumps(table))
    assert len(entries(path)) == 1
    del table["tiles"][0]["keys"]
    broken = tmp_path / "broken.json"
    broken.write_text(json.dumps(table))
    with pytest.raises(ValueError, match=r"^broken\.json: "):
        entries(broken)


# --- products use the tiles of Hopper where its features and its shared memory are there ----------

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
