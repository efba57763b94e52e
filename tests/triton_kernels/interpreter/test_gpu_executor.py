"""The GPU executor gives the results of the CPU executor, step by step. Most kernels of a decoder
are replaced by their references (`light`), with which other tests compare them."""

from __future__ import annotations

from collections import Counter
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from triton.runtime.errors import OutOfResources

from cbatch.core.request.request import Request
from cbatch.runtime.gpu import device as device_module
from cbatch.runtime.gpu import draft_pass as drafting
from cbatch.runtime.gpu import target_pass as verifying
from cbatch.runtime.gpu.attention import Tuning
from cbatch.runtime.gpu.draft_pass import DraftPasses
from cbatch.runtime.gpu.executor import GpuExecutor
from cbatch.runtime.gpu.slots import HostSlots
from tests.runtime.engines import make_request
from tests.triton_kernels.interpreter.light import (
    use_reference_verdicts,
    use_references,
    without_overflow_checks,
)
from tests.triton_kernels.interpreter.twins import Differs, Pair, run_twins
from triton_kernels.attention import Tile
from triton_kernels.sampling.inputs import COUPLED, REJECTION, LogitsBatch

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    without_overflow_checks(monkeypatch)


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
@pytest.mark.parametrize(
    "lookahead, depth, noise", [("off", 0, 0.0), ("fixed:3", 0, 0.06), ("fixed:3", 1, 0.045)]
)
def test_greedy_requests_come_and_go(lookahead: str, depth: int, noise: float) -> None:
    outputs, seen = run_twins(
        prompts(23, 5, 30, 12, max_tokens=8),
        Pair(),
        Pair(noise=noise),
        lookahead=lookahead,
        depth=depth,
        arrivals=[0, 0, 1, 5],
        max_num_seqs=3,
        max_num_batched_tokens=20,
    )
    assert {len(tokens) for tokens in outputs.values()} == {8}
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
        prompts(14, 13, 12, max_tokens=22),
        Pair(),
        Pair(noise=0.05),
        lookahead="fixed:2",
        depth=depth,
        num_blocks=6,
        max_num_batched_tokens=48,
    )
    happened(seen, "preemptions", "resumed", "slots used again", "accepted", "rejected")


SAMPLED: list[dict[str, Any]] = [
    {"verification": "coupled"},
    {"verification": "rejection"},
    {"verification": "rejection", "top_k": 12, "top_p": 0.9, "frequency_penalty": 0.4},
    {"verification": "coupled", "min_p": 0.02, "min_tokens": 6, "stop_token_ids": (22, 12)},
    {"temperature": 0.0, "repetition_penalty": 1.4, "logit_bias": {7: 3.0, 9: -4.0}},
    {"verification": "rejection", "allowed_token_ids": tuple(range(0, 64, 2))},
    {"banned_token_ids": (46, 38), "presence_penalty": 1.0, "max_lookahead": 0},
]


def sampled_requests() -> list[Request]:
    return [
        make_request(
            f"r{i}", range(5 + i, 10 + 2 * i), **{"temperature": 0.8, "max_tokens": 7, **params}
        )
        for i, params in enumerate(SAMPLED)
    ]


@pytest.mark.usefixtures("light")
@pytest.mark.parametrize("depth", [0, 1])
def test_sampled_and_shaped_requests(depth: int) -> None:
    outputs, seen = run_twins(
        sampled_requests(),
        Pair(),
        Pair(noise=0.05),
        lookahead="fixed:3",
        depth=depth,
        max_num_batched_tokens=48,
    )
    happened(seen, "slots used again", "accepted", "rejected", "all accepted", "ragged k")
    assert all(token % 2 == 0 for token in outputs["r5"])
    assert not {46, 38} & set(outputs["r6"])


# Padding rows of the attention output are uninitialised; no request reads what becomes of them.
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
def test_all_kernels_together() -> None:
    """No kernel is replaced: a window, norms of queries and keys, biases, keys in two splits."""
    more: dict[str, Any] = {"sliding_window": (None, 5), "qk_norm": True, "num_kv_heads": 1}
    biases = {"attention_bias": True, "attention_out_bias": True, "mlp_bias": True}
    requests = [
        make_request("greedy", range(5, 19), max_tokens=4),
        make_request(
            "rejection", range(9, 12), max_tokens=3, temperature=0.7, verification="rejection"
        ),
    ]
    _, seen = run_twins(
        requests,
        Pair(**more, **biases),
        Pair(noise=0.03, **more, **biases),
        lookahead="fixed:2",
        arrivals=[0, 1],
        max_num_seqs=3,
        tuning=Tuning(Tile(16, 16, 4, 2), num_programs=2, max_partials=4, split_tokens=16),
    )
    happened(seen, "accepted", "mixed steps")


@pytest.mark.usefixtures("light")
def test_a_smaller_draft_and_a_shorter_context() -> None:
    """The draft has fewer tokens than the target, and no positions beyond 24."""
    _, seen = run_twins(
        prompts(12, 20, max_tokens=9),
        Pair(),
        Pair(noise=0.05, vocab_size=50, max_position_tokens=24),
        lookahead="fixed:3",
    )
    happened(seen, "drafted", "rejected")


def poisoned(draft: int, sound: int, later: int) -> list[Request]:
    """Return requests that reach token 60, which breaks the target, and 59, which breaks the draft;
    and others of the given length."""
    return [
        make_request("target", [3, 60, 4], max_tokens=6),
        make_request("draft", [5, 59, 6], max_tokens=draft),
        make_request("sound", [7, 8, 9], max_tokens=sound),
        make_request("later", range(20, 30), max_tokens=later),
    ]


@pytest.mark.usefixtures("light")
@pytest.mark.parametrize("depth", [0, 1])
def test_values_that_are_not_finite(depth: int) -> None:
    """Token 60 poisons the target, 59 the draft. The first request ends with an error, the second
    continues without drafts, the third is unaffected. Slots and blocks are used again."""
    outputs, seen = run_twins(
        poisoned(6, 6, 3),
        Pair(poison=60),
        Pair(noise=0.05, poison=59),
        lookahead="fixed:2",
        depth=depth,
        num_blocks=4,
        max_num_seqs=3,
    )
    assert outputs["target"] == []
    assert [len(outputs[name]) for name in ("draft", "sound", "later")] == [6, 6, 3]
    happened(seen, "target not finite", "draft not finite", "blocks zeroed", "accepted")


@pytest.mark.usefixtures("light")
@pytest.mark.parametrize("depth", [0, 1])
def test_a_draft_that_breaks_on_what_it_drew(depth: int) -> None:
    """Tokens drawn before the break count; the KV after them does not."""
    requests = [
        make_request(f"r{i}", range(5 + i, 10 + i), max_tokens=7, temperature=temperature)
        for i, temperature in enumerate([0.0, 0.9, 1.2, 0.0])
    ]
    _, seen = run_twins(
        requests, Pair(), Pair(noise=0.05, poison=46), lookahead="fixed:3", depth=depth
    )
    happened(seen, "draft not finite", "drafts before a break", "accepted", "rejected")


@pytest.mark.usefixtures("light")
@pytest.mark.parametrize("depth", [0, 1])
def test_log_probabilities(depth: int) -> None:
    requests = [
        make_request("raw", range(4, 10), max_tokens=4, logprobs=3),
        make_request(
            "processed",
            range(8, 12),
            max_tokens=4,
            temperature=0.7,
            top_k=9,
            presence_penalty=0.6,
            logprobs=2,
            logprobs_mode="processed",
        ),
        make_request("prompt", range(20, 44), max_tokens=2, prompt_logprobs=2),
    ]
    _, seen = run_twins(
        requests,
        Pair(),
        Pair(noise=0.05),
        lookahead="fixed:2",
        depth=depth,
        max_num_batched_tokens=16,
    )
    happened(seen, "accepted", "unfinished chunks")
    assert seen["log probabilities"] == 4 + 4 + 23


@pytest.mark.usefixtures("light")
@pytest.mark.parametrize(
    "depth, error",
    [
        (0, OutOfResources(300_000, 232_448, "shared memory")),
        (1, RuntimeError("Triton Error [CUDA]: invalid argument")),
    ],
)
def test_what_triton_raises_in_a_step_costs_time_and_no_tokens(
    depth: int, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is raised in the middle of the fourth step, whose drafts are on the device by then."""
    real, calls = verifying.advance, Counter[str]()

    def fourth_fails(*arguments: Any, **more: Any) -> None:
        calls["advance"] += 1
        if calls["advance"] == 4:
            raise error
        real(*arguments, **more)

    monkeypatch.setattr(verifying, "advance", fourth_fails)
    requests = prompts(23, 5, max_tokens=8)
    outputs, seen = run_twins(
        requests, Pair(), Pair(noise=0.05), lookahead="fixed:2", depth=depth, num_faults=1
    )
    assert {len(tokens) for tokens in outputs.values()} == {8}
    happened(seen, "resumed", "accepted")


@pytest.mark.usefixtures("light")
def test_drafting_is_not_charged_with_what_the_host_prepares(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The clock advances by 100 s while the host works, and by 7 s in each pass of the draft."""
    now_s, measured = [0.0], []

    def goes_on(owner: type, name: str, seconds: float) -> None:
        real = getattr(owner, name)

        def slow(*arguments: Any) -> Any:
            now_s[0] += seconds
            return real(*arguments)

        monkeypatch.setattr(owner, name, slow)

    def report(self: GpuExecutor, step: Any) -> Any:
        result = reported(self, step)
        depth = int(step.plan.num_drafts.max())
        measured.append((result.draft_s, result.target_s, depth))
        return result

    monkeypatch.setattr(device_module, "time", SimpleNamespace(perf_counter=lambda: now_s[0]))
    goes_on(HostSlots, "update", 100.0)
    goes_on(DraftPasses, "_draft", 7.0)
    reported = GpuExecutor.report
    monkeypatch.setattr(GpuExecutor, "report", report)
    run_twins(prompts(5, max_tokens=6), Pair(), Pair(noise=0.05), lookahead="fixed:2")
    assert {depth for *_, depth in measured} >= {0, 2}
    for draft_s, target_s, depth in measured:
        assert target_s == 100.0 and draft_s == 7.0 * depth


def all_accepted(
    real: Any, state: Any, layout: Any, decision: Any, *rest: Any, **more: Any
) -> None:
    """Broken: every draft counts as accepted."""
    if decision is not None:
        decision = decision._replace(num_accepted=layout.num_drafted)
    real(state, layout, decision, *rest, **more)


def nothing_counted(real: Any, *arguments: Any, shaped: bool) -> None:
    """Broken: the output is not counted for penalties."""
    real(*arguments, shaped=False)


def noise_of_its_own(real: Any, batch: LogitsBatch, purpose: int, **more: Any) -> None:
    """Broken: coupled requests draft with other noise than they are verified with."""
    modes = torch.where(batch.requests.modes == COUPLED, REJECTION, batch.requests.modes)
    real(batch._replace(requests=batch.requests._replace(modes=modes)), purpose, **more)


def one_more_in_kv(real: Any, state: Any, layout: Any, **settings: Any) -> None:
    """Broken: the draft's KV is taken to have one more token."""
    real(state, layout, **settings)
    layout.next_kv.add_(1)


@pytest.mark.usefixtures("light")
@pytest.mark.parametrize(
    "module, name, broken",
    [
        (verifying, "advance", all_accepted),
        (verifying, "advance", nothing_counted),
        (drafting, "draw", noise_of_its_own),
        (drafting, "make_draft_batch", one_more_in_kv),
    ],
)
def test_broken_executors_are_caught(
    module: ModuleType, name: str, broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, partial(broken, getattr(module, name)))
    requests = [
        make_request("plain", range(4, 9), max_tokens=6),
        make_request("shaped", range(9, 12), max_tokens=6, frequency_penalty=2.0),
        make_request("coupled", range(2, 9), max_tokens=6, temperature=1.0, verification="coupled"),
    ]
    with pytest.raises(Differs):
        run_twins(requests, Pair(), Pair(noise=0.06), lookahead="fixed:3")
