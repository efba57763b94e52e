"""The GPU executor gives what the CPU executor gives, step by step. The kernels of a decoder are
mostly replaced by their references (`light`), with which they are compared elsewhere."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from cbatch.core.request import Request
from tests.runtime.engines import make_request
from tests.triton_kernels.interpreter.light import use_reference_verdicts, use_references
from tests.triton_kernels.interpreter.twins import Pair, run_twins

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    use_references(monkeypatch)
    use_reference_verdicts(monkeypatch)


def happened(seen: Counter[str], *events: str) -> None:
    missing = [event for event in events if not seen[event]]
    assert not missing, f"did not happen: {missing}, but {dict(seen)}"


def prompts(*lengths: int, **params: Any) -> list[Request]:
    return [
        make_request(f"r{i}", [(7 * i + 3 * j) % 61 for j in range(n)], **params)
        for i, n in enumerate(lengths)
    ]


@pytest.mark.usefixtures("light")
@pytest.mark.parametrize("lookahead, depth", [("off", 0), ("fixed:3", 0), ("fixed:3", 1)])
def test_greedy_requests_come_and_go(lookahead: str, depth: int) -> None:
    outputs, seen = run_twins(
        prompts(23, 5, 40, 12, 9, max_tokens=10),
        Pair(),
        Pair(noise=0.05),
        lookahead=lookahead,
        depth=depth,
        arrivals=[0, 0, 1, 4, 9],
        max_slots=3,
        step_budget_tokens=20,
    )
    assert {len(tokens) for tokens in outputs.values()} == {10}
    happened(seen, "unfinished chunks", "slots used again")
    if lookahead != "off":
        happened(seen, "accepted", "all accepted", "rejected", "mixed steps", "ragged k")
        happened(seen, "catch-ups", "slices")
    if depth:
        happened(seen, "plans in flight", "void rows", "drafted fewer")


@pytest.mark.usefixtures("light")
@pytest.mark.parametrize("depth", [0, 1])
def test_preempted_requests_resume(depth: int) -> None:
    _, seen = run_twins(
        prompts(30, 28, 26, max_tokens=24),
        Pair(),
        Pair(noise=0.05),
        lookahead="fixed:2",
        depth=depth,
        num_blocks=7,
        step_budget_tokens=48,
    )
    happened(seen, "preemptions", "resumed", "slots used again", "accepted", "rejected")


SAMPLED: list[dict[str, Any]] = [
    {"verification": "coupled"},
    {"verification": "rejection"},
    {"verification": "rejection", "top_k": 12, "top_p": 0.9, "frequency_penalty": 0.4},
    {"verification": "coupled", "min_p": 0.02, "min_tokens": 6, "stop_token_ids": (22, 12)},
    {"temperature": 0.0, "repetition_penalty": 1.4, "logit_bias": {7: 3.0, 9: -4.0}},
    {"verification": "rejection", "allowed_token_ids": tuple(range(0, 64, 2))},
    {"banned_token_ids": (46, 38), "presence_penalty": 1.0, "verification": "coupled"},
]


def sampled_requests() -> list[Request]:
    return [
        make_request(f"r{i}", range(5 + i, 20 + 2 * i), **{"max_tokens": 9, **common, **params})
        for i, params in enumerate(SAMPLED)
        for common in [{"temperature": 0.8, "seed": 11 + i}]
    ]


@pytest.mark.usefixtures("light")
@pytest.mark.parametrize("lookahead, depth", [("off", 0), ("fixed:3", 0), ("fixed:3", 1)])
def test_sampled_and_shaped_requests(lookahead: str, depth: int) -> None:
    outputs, seen = run_twins(
        sampled_requests(),
        Pair(),
        Pair(noise=0.05),
        lookahead=lookahead,
        depth=depth,
        step_budget_tokens=48,
    )
    happened(seen, "slots used again")
    if lookahead != "off":
        happened(seen, "accepted", "rejected", "all accepted")
    assert all(token % 2 == 0 for token in outputs["r5"])
    assert not {46, 38} & set(outputs["r6"])


def test_all_kernels_together() -> None:
    """Nothing is replaced: a window, norms of queries and keys, biases, and drafts of all kinds."""
    more: dict[str, Any] = {"sliding_window": (None, 20), "qk_norm": True}
    biases = {"attention_bias": True, "attention_out_bias": True, "mlp_bias": True}
    requests = [
        make_request("greedy", range(5, 30), max_tokens=4),
        make_request(
            "rejection",
            range(9, 14),
            max_tokens=4,
            temperature=0.7,
            top_p=0.95,
            presence_penalty=0.3,
            verification="rejection",
        ),
    ]
    _, seen = run_twins(
        requests,
        Pair(**more, **biases),
        Pair(noise=0.03, **more, **biases),
        lookahead="fixed:2",
        max_slots=2,
    )
    happened(seen, "accepted", "mixed steps")
