"""The engine and `bench.gpu` attend alike."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from bench.gpu.limits import HEADS
from bench.gpu.steps import config_of
from cbatch.runtime.gpu.attention import Tuning
from triton_kernels.attention import Heads


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
@pytest.mark.parametrize("name", HEADS)
def test_the_engine_attends_by_the_tile_that_is_tested(
    name: str, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 64 rows and more, which sm_90 multiplies by wgmma, for groups of two heads, too."""
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    device, shape = torch.device("cuda"), HEADS[name]
    for page_tokens in (16, 64):
        tested = config_of(shape, page_tokens, device)
        tuning = Tuning.of(Heads(*shape), torch.bfloat16, device, page_tokens)
        assert (tuning.tile, tuning.split_tokens) == (tested.tile, tested.split_tokens)
        assert tuning.num_programs == 132 * tested.tile.programs
        assert tuning.tile.rows >= 64
