"""Keys and values in fp8: stored values, and independence of a row's bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cbatch.runtime.gpu.decoder import Decoder
from cbatch.runtime.gpu.executor import GpuExecutor
from cbatch.runtime.kv_cache import KVCache
from tests.runtime.engines import NoisyWeights, make_request, tiny_config
from tests.triton_kernels.interpreter.light import (
    use_reference_verdicts,
    use_references,
    without_overflow_checks,
)
from tests.triton_kernels.interpreter.test_host_drafts import LateTwins
from tests.triton_kernels.interpreter.twins import Pair, run_twins

FP8 = torch.float8_e4m3fn
SCALES = [(0.5, 0.25), (1.0, 2.0)]


@pytest.fixture(autouse=True)
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    without_overflow_checks(monkeypatch)
    use_references(monkeypatch)
    use_reference_verdicts(monkeypatch)


def kind(kv_dtype: torch.dtype | None, made: list[GpuExecutor]) -> type[LateTwins]:
    class Kind(LateTwins):
        @staticmethod
        def _gpu_executor(*given: Any) -> GpuExecutor:
            *rest, settings = given
            target = rest[0].decoder
            target.kv_scales = SCALES[: target.config.num_layers]
            made.append(LateTwins._gpu_executor(*rest, settings | {"kv_dtype": kv_dtype}))
            return made[-1]

    return Kind


def run(
    kv_dtype: torch.dtype | None, lookahead: str, slots: int
) -> tuple[dict[str, list[int]], GpuExecutor]:
    made: list[GpuExecutor] = []
    requests = [
        make_request(f"r{i}", [(7 * i + 3 * j) % 61 for j in range(n)], max_tokens=6)
        for i, n in enumerate((23, 5, 12))
    ]
    outputs, seen = run_twins(
        requests,
        Pair(),
        Pair(noise=0.04) if lookahead != "off" else None,
        lookahead=lookahead,
        max_num_seqs=slots,
        max_num_batched_tokens=20,
        twins_kind=kind(kv_dtype, made),
    )
    if lookahead != "off":
        assert seen["accepted"] and seen["rejected"]
    return outputs, made[0]


def test_values_are_stored_divided_by_their_scales_and_text_does_not_follow_the_batch() -> None:
    plain, exact = run(None, "off", 1)
    alone, small = run(FP8, "off", 1)
    together, _ = run(FP8, "fixed:3", 3)
    assert alone == together
    assert small.kv.data.dtype == FP8 and small.kv.data.nbytes * 4 == exact.kv.data.nbytes
    # The first layer's output for the first prompt does not depend on stored keys and values.
    k, v = exact.kv.data[0, 0, :, 0], exact.kv.data[0, 1, :, 0]
    stored = small.kv.data[0, 0, :, 0], small.kv.data[0, 1, :, 0]
    for unscaled, as_fp8, scale in zip((k, v), stored, SCALES[0], strict=True):
        assert unscaled.abs().max() > 0
        assert torch.equal((unscaled / scale).to(FP8).float(), as_fp8.float())


def test_blocks_in_fp8_are_zeroed() -> None:
    kv = KVCache(tiny_config(), 3, 16, FP8, "cpu")
    kv.data.view(torch.uint8).fill_(7)
    kv.zero_blocks([1])
    zero = [bool((kv.data[:, :, :, i].float() == 0).all()) for i in range(3)]
    assert zero == [False, True, False]


def test_scales_come_from_the_checkpoint() -> None:
    class Scaled(NoisyWeights):
        def scalar(self, name: str) -> float | None:
            return {"model.layers.1.self_attn.k_scale": 0.125}.get(name)

    decoder = Decoder(tiny_config(), Scaled(1), torch.float32, torch.device("cpu"))
    assert decoder.kv_scales[:2] == [(1.0, 1.0), (0.125, 1.0)]
