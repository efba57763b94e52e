"""Heads on the GPU executor draft the same as on the CPU, step by step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from cbatch.runtime.drafting.heads.trial import best_reading
from cbatch.runtime.gpu.attention import Tuning
from cbatch.runtime.gpu.draft_pass import DeviceStates
from cbatch.runtime.gpu.modelling import OneCall
from tests.gpu_proofs.interpreted.fitted_heads import eagle1, eagle3, medusa
from tests.gpu_proofs.interpreted.stream import Stream
from tests.gpu_proofs.interpreted.test_executor import (
    BOTH_DEPTHS,
    happened,
    poisoned,
    prompts,
    sampled_requests,
    was_replayed,
)
from tests.gpu_proofs.interpreted.twins import Differs, Pair, run_twins
from tests.runtime import made_heads
from tests.runtime.engines import make_request
from tests.runtime.marks import needs_compiler
from triton_kernels.attention import Tile

pytestmark = [
    needs_compiler,
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]
MAKERS = [eagle3, eagle1, medusa]


@BOTH_DEPTHS
@pytest.mark.parametrize("make", [*MAKERS, partial(eagle3, norm_output=True)])
def test_captured_steps_are_those_of_the_cpu(
    make: Any, depth: int, tmp_path: Path, stream: Stream
) -> None:
    """A prompt of one token has no state before it. Prefix hits, and sampled requests."""
    target, shared = Pair(), [(11 * j) % 61 for j in range(33)]
    prefixes = [make_request(f"shared {i}", [*shared, i], max_tokens=9) for i in range(2)]
    requests = [*prompts(23, 1, 30, max_tokens=12), *prefixes, *sampled_requests()[1:3]]
    names = [f"{i} {request.request_id}" for i, request in enumerate(requests)]
    requests = [
        msgspec.structs.replace(r, request_id=n) for r, n in zip(requests, names, strict=True)
    ]
    _, seen = run_twins(
        requests,
        target,
        make(tmp_path, target, requests[:4]),
        lookahead="fixed:3",
        depth=depth,
        arrivals=[0, 0, 1, 2, 12, 6, 7],
        max_num_seqs=3,
        max_num_batched_tokens=20,
    )
    happened(seen, "accepted", "rejected", "unfinished chunks", "mixed steps", "slots used again")
    happened(seen, "prefix hits", *(["plans in flight"] if depth else []))
    was_replayed(stream)
    assert not stream.seen["reads"], "the host never waits"


@pytest.mark.usefixtures("stream")
@pytest.mark.parametrize("make", [eagle3, medusa])
def test_preempted_requests_resume(make: Any, tmp_path: Path) -> None:
    target, requests = Pair(), prompts(14, 13, 12, max_tokens=22)
    _, seen = run_twins(
        requests,
        target,
        make(tmp_path, target, requests),
        lookahead="fixed:3",
        depth=1,
        num_blocks=6,
        max_num_batched_tokens=48,
    )
    happened(seen, "preemptions", "resumed", "slots used again", "accepted", "rejected")


@pytest.mark.usefixtures("stream")
@BOTH_DEPTHS
@pytest.mark.parametrize("make", [eagle3, medusa])
def test_values_that_are_not_finite(make: Any, depth: int, tmp_path: Path) -> None:
    """States of a poisoned target reach neither reused slots nor blocks."""
    requests = poisoned(6, 6, 3)
    outputs, seen = run_twins(
        requests,
        Pair(poison=60),
        make(tmp_path, Pair(), requests),
        lookahead="fixed:2",
        depth=depth,
        num_blocks=4,
        max_num_seqs=3,
    )
    assert outputs["target"] == []
    assert [len(outputs[name]) for name in ("draft", "sound", "later")] == [6, 6, 3]
    happened(seen, "target not finite", "blocks zeroed", "slots used again")


# Padding rows of the attention output are uninitialised; no request reads what becomes of them.
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
@pytest.mark.usefixtures("bare_stream")
@pytest.mark.parametrize("make", [eagle3, medusa])
def test_all_kernels_together(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel is replaced; the head has queries of 16 numbers, as a tile needs."""
    monkeypatch.setattr(made_heads, "DIM", 16)
    requests = [
        make_request("greedy", range(5, 19), max_tokens=6),
        make_request(
            "rejection", range(9, 12), max_tokens=3, temperature=0.7, verification="rejection"
        ),
    ]
    target = Pair()
    _, seen = run_twins(
        requests,
        target,
        make(tmp_path, target, requests),
        lookahead="fixed:2",
        arrivals=[0, 1],
        max_num_seqs=2,
        tuning=Tuning(Tile(16, 16, 4, 2), num_programs=2, max_partials=4, split_tokens=16),
    )
    happened(seen, "accepted", "mixed steps")


def a_position_late(patch: pytest.MonkeyPatch) -> None:
    """Broken: tokens are paired with the states of their own positions."""
    real = DeviceStates.read
    patch.setattr(DeviceStates, "read", lambda *given: real(*given) * 0 + given[-1])


def last_row(patch: pytest.MonkeyPatch) -> None:
    """Broken: slots keep the state of their last row, which may be a rejected draft."""
    real = DeviceStates.after_verification

    def after_verification(self: DeviceStates, layout: Any) -> None:
        kv = self._state.kv_len.clone()
        self._state.kv_len.copy_(torch.where(kv > 0, layout.contexts, kv))
        real(self, layout)
        self._state.kv_len.copy_(kv)

    patch.setattr(DeviceStates, "after_verification", after_verification)


def blocks_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Broken: after a prefix hit a sequence continues from the state of the slot's last one."""

    def before(self: DeviceStates) -> Tensor:
        return self._slot_states.masked_fill((self._state.kv_len == 0)[:, None], 0.0)

    patch.setattr(DeviceStates, "before", before)


@pytest.mark.usefixtures("stream")
@pytest.mark.parametrize(
    "make, plant",
    [
        (eagle3, a_position_late),
        (eagle3, blocks_forgotten),
        (medusa, last_row),
    ],
)
def test_heads_that_read_wrong_states_are_caught(
    make: Any, plant: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, prompt = Pair(), [(11 * j) % 61 for j in range(33)]
    texts = prompt, prompt, [5, 7]
    requests = [make_request(f"r{i}", text, max_tokens=10) for i, text in enumerate(texts)]
    head = make(tmp_path, target, prompts(20, 9, max_tokens=20))
    run_twins(requests, target, head, lookahead="fixed:3", arrivals=[0, 8, 4])
    plant(monkeypatch)
    with pytest.raises(Differs):
        run_twins(requests, target, head, lookahead="fixed:3", arrivals=[0, 8, 4])


@pytest.mark.usefixtures("stream")
@pytest.mark.parametrize("make", MAKERS)
def test_a_head_is_tried_as_on_a_cpu(make: Any, tmp_path: Path) -> None:
    target, requests = Pair(), prompts(23, 30, max_tokens=20)
    head = make(tmp_path, target, requests)
    texts = [list(request.prompt) for request in requests]
    of_cpu = best_reading([head.model], target.model, texts)
    of_gpu = best_reading([head.decoder], OneCall(target.decoder), texts)  # type: ignore[arg-type]
    assert of_gpu.hits.tolist() == of_cpu.hits.tolist()
    assert of_gpu.chance == of_cpu.chance and target.decoder.hidden_layers == ()
