"""`submit` reads nothing from the device: here tensors have no data, and reading one raises.
Launches do nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import GridExecutor

from cbatch.core.scheduler.plan import Deltas, NewSequence, StepPlan
from cbatch.runtime.gpu import device_steps
from cbatch.runtime.gpu import target_pass as verifying
from cbatch.runtime.gpu.attention import Tuning
from cbatch.runtime.gpu.decoder import Decoder
from cbatch.runtime.gpu.device import Device
from cbatch.runtime.gpu.executor import GpuExecutor
from tests.runtime.engines import NoisyWeights, admission, tiny_config
from triton_kernels.attention import Tile

I32, NONE = np.int32, np.zeros(0, dtype=np.int32)
META = torch.device("meta")
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "rejection": {"verification": "rejection"},
    "blocks": {"verification": "block"},
    "shaped": {"verification": "coupled", "frequency_penalty": 0.4, "top_k": 5},
    "log probabilities": {"logprobs": 3},
    "processed": {"logprobs": 2, "logprobs_mode": "processed", "presence_penalty": 0.5},
    "prompt": {"prompt_logprobs": 1},
}


class WithoutData(Device):
    def fetch(self, source: Tensor, to: Tensor) -> None:
        assert source.shape == to.shape and source.is_meta and not to.is_meta


def executor(monkeypatch: pytest.MonkeyPatch) -> GpuExecutor:
    monkeypatch.setattr(device_steps, "device_for", lambda _: WithoutData())
    monkeypatch.setattr(GridExecutor, "__call__", lambda *_, **__: None)
    target, draft = (Decoder(tiny_config(), NoisyWeights(1), torch.float32, META) for _ in range(2))
    return GpuExecutor(
        target,
        draft=draft,
        num_blocks=8,
        block_size=16,
        max_num_seqs=2,
        max_sequence_tokens=64,
        max_num_batched_tokens=16,
        max_drafts=3,
        tuning=Tuning(Tile(16, 16, 4, 2), num_programs=2, most_partials=2),
    )


def plan(admitted: tuple[NewSequence, ...], query_len: int, drafts: int, wants: bool) -> StepPlan:
    one = np.ones(1, dtype=I32)
    return StepPlan(
        step_id=1,
        slots=one * 0,
        generations=one,
        query_lens=one * query_len,
        num_drafts=one * drafts,
        catch_up=one * 0,
        wants_logits=np.array([wants]),
        deltas=Deltas(False, NONE, NONE, admitted, NONE, NONE, NONE),
    )


def run(gpu: GpuExecutor, **params: Any) -> None:
    """Run a chunk, the rest of the prompt, and two steps that draft, one while another runs."""
    sequence = admission(0, range(9), blocks=(0,), **{"max_tokens": 9, **params})
    steps = [((sequence,), 4, 0, False), ((), 5, 0, True), ((), 4, 3, True), ((), 3, 2, True)]
    for at, step in enumerate(steps):
        gpu.submit(plan(*step))
        if at:
            gpu.wait()


@pytest.mark.parametrize("name", REQUESTS)
def test_submit_reads_nothing_from_the_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run(executor(monkeypatch), **REQUESTS[name])


def test_a_read_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = verifying.advance

    def reading(state: Any, layout: Any, *rest: Any, **more: Any) -> None:
        int(layout.num_drafted.sum())
        real(state, layout, *rest, **more)

    gpu = executor(monkeypatch)
    monkeypatch.setattr(verifying, "advance", reading)
    with pytest.raises(RuntimeError, match="meta tensors"):
        run(gpu)
