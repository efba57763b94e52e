"""The executor and its `CudaDevice` on a stream that runs nothing before the host waits, with
graphs that are tapes. Every step equals the CPU executor's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import pytest
import torch

from cbatch.core.scheduler.plan import StepResult
from cbatch.runtime.gpu import device_steps, masking
from cbatch.runtime.gpu import target_pass as verifying
from cbatch.runtime.gpu.device import CudaDevice, CudaQueueEvent
from cbatch.runtime.gpu.device_steps import DeviceSteps
from cbatch.runtime.gpu.executor import GpuExecutor
from cbatch.runtime.gpu.target_pass import TargetPass
from tests.gpu_proofs.interpreted.references import use_queued_references
from tests.gpu_proofs.interpreted.stream import DeviceFault, HostReads, Stream, substituted
from tests.runtime.engines import make_request
from tests.triton_kernels.interpreter import twins
from tests.gpu_proofs.interpreted.light import without_overflow_checks
from tests.gpu_proofs.interpreted.test_executor import (
    happened,
    poisoned,
    prompts,
    sampled_requests,
)
from tests.triton_kernels.interpreter.test_host_drafts import (
    LateTwins,
    chained,
    run_chains,
    run_structured,
)
from tests.gpu_proofs.interpreted.twins import (
    CPU,
    Differs,
    Pair,
    ReplayingDevice,
    Twins,
    run_twins,
)
from triton_kernels.sampling.mask import mask_logits
from triton_kernels.slots.guesses import take_guesses

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


class Captures(CudaDevice):
    """A device that captures a step when it first meets it: capturing all steps ahead would take
    long here."""

    def run(self, key: Hashable, function: Callable[[], None]) -> None:
        self.deferred = (key,)
        super().run(key, function)


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stream]:
    without_overflow_checks(monkeypatch)
    with substituted() as stream:
        monkeypatch.setattr(twins, "ReplayingDevice", lambda: Captures(CPU))
        yield stream


@pytest.fixture
def light(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    use_queued_references(stream, monkeypatch)


def replayed(stream: Stream) -> Counter[str]:
    assert stream.seen["captured"] > 3 and stream.seen["replayed"] > 4
    return stream.seen


@pytest.mark.usefixtures("light")
@pytest.mark.parametrize("depth", [0, 1])
def test_greedy_requests_come_and_go(stream: Stream, depth: int) -> None:
    _, seen = run_twins(
        prompts(23, 5, 30, 12, max_tokens=8),
        Pair(),
        Pair(noise=0.05),
        lookahead="fixed:3",
        depth=depth,
        arrivals=[0, 0, 1, 5],
        max_num_seqs=3,
        max_num_batched_tokens=20,
    )
    happened(seen, "accepted", "rejected", "mixed steps", "slots used again", "catch-ups")
    replayed(stream)


@pytest.mark.usefixtures("light")
@pytest.mark.parametrize("depth", [0, 1])
def test_sampled_and_shaped_requests(stream: Stream, depth: int) -> None:
    _, seen = run_twins(
        sampled_requests(),
        Pair(),
        Pair(noise=0.05),
        lookahead="fixed:3",
        depth=depth,
        max_num_batched_tokens=48,
    )
    happened(seen, "accepted", "rejected", "all accepted", "ragged k")
    replayed(stream)


@pytest.mark.usefixtures("light")
@pytest.mark.parametrize("depth", [0, 1])
def test_preempted_and_cancelled_requests(stream: Stream, depth: int) -> None:
    outputs, seen = run_twins(
        prompts(14, 13, 12, 9, max_tokens=22),
        Pair(),
        Pair(noise=0.05),
        lookahead="fixed:2",
        depth=depth,
        num_blocks=6,
        max_num_batched_tokens=48,
        cancels={"r1": 6},
    )
    assert len(outputs["r1"]) < 22 == len(outputs["r0"])
    happened(seen, "preemptions", "resumed", "slots used again", "accepted", "rejected")
    replayed(stream)


@pytest.mark.usefixtures("light")
@pytest.mark.parametrize("depth", [0, 1])
def test_faults_resets_and_values_that_are_not_finite(
    stream: Stream, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token 60 poisons the target, 59 the draft; twice a step fails after it was queued."""
    real, steps = GpuExecutor.decide, iter(range(1000))

    def failing(executor: GpuExecutor, step: Any) -> None:
        real(executor, step)
        if next(steps) in (3, 8):
            raise RuntimeError("a fault of the device")

    monkeypatch.setattr(GpuExecutor, "decide", failing)
    outputs, seen = run_twins(
        poisoned(9, 9, 9),
        Pair(poison=60),
        Pair(noise=0.05, poison=59),
        lookahead="fixed:2",
        depth=depth,
        max_num_seqs=3,
        num_faults=2,
    )
    assert outputs["target"] == []
    assert [len(outputs[name]) for name in ("draft", "sound", "later")] == [9, 9, 9]
    happened(seen, "target not finite", "draft not finite", "blocks zeroed", "accepted")
    replayed(stream)


@pytest.mark.usefixtures("light")
@pytest.mark.parametrize("depth", [0, 1])
def test_log_probabilities(stream: Stream, depth: int) -> None:
    asks = {"temperature": 0.7, "top_k": 9, "logprobs": 2, "logprobs_mode": "processed"}
    requests = [
        make_request("raw", range(4, 10), max_tokens=4, logprobs=3),
        make_request("processed", range(8, 12), max_tokens=4, **asks),
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
    assert seen["log probabilities"] == 4 + 4 + 23
    assert not replayed(stream)["reads"]


def compare(depth: int = 1) -> None:
    requests = [
        make_request("plain", range(4, 9), max_tokens=9),
        make_request("shaped", range(9, 12), max_tokens=9, frequency_penalty=2.0),
        make_request("coupled", range(2, 9), max_tokens=9, temperature=1.0, verification="coupled"),
        make_request("later", range(30, 50), max_tokens=9, min_tokens=2),
    ]
    arrivals = [0, 2, 1, 4]
    run_twins(
        requests, Pair(), Pair(noise=0.06), lookahead="fixed:3", depth=depth, arrivals=arrivals
    )


@pytest.mark.usefixtures("light", "stream")
def test_what_the_planted_faults_break_is_sound() -> None:
    compare(0)
    compare(1)


def reading(real: Any, state: Any, layout: Any, *rest: Any, **more: Any) -> None:
    """Broken: the host reads how many tokens were drafted."""
    int(layout.num_drafted.sum())
    real(state, layout, *rest, **more)


def waiting_for_nothing(real: Any, event: Any) -> None:
    """Broken: the result is read before it has come."""


def one_message(real: Any, executor: Any, message: Any, buffers: Any) -> None:
    """Broken: all messages are written to the same memory."""
    buffers.message = executor.__dict__.setdefault("_only", torch.zeros(9999, dtype=torch.int32))
    real(executor, message, buffers)


def moved_result(real: Any, target: Any, *arguments: Any) -> None:
    """Broken: memory that graphs use moves in every step."""
    target.result = torch.zeros_like(target.result)
    real(target, *arguments)


def key_without_shaping(real: Any, device: Any, key: Any, function: Any) -> None:
    """Broken: one graph for shaped and other steps."""
    unshaped = (part for part in key[1:] if not isinstance(part, bool | tuple))
    real(device, (key[0], *unshaped), function)


def key_without_tokens(real: Any, device: Any, key: Any, function: Any) -> None:
    """Broken: one graph for steps of all numbers of tokens."""
    real(device, key[:1] if key[0] == "target" else key, function)


def private_tokens(real: Any, target: Any, *arguments: Any) -> None:
    """Broken: tokens are in memory that a graph allocated for itself."""
    real(target, *arguments)
    layout = target.layout
    target.layout = layout._replace(logit_tokens=layout.logit_tokens + 0)


@pytest.mark.usefixtures("light", "stream")
@pytest.mark.parametrize(
    "owner, name, broken, raised",
    [
        (verifying, "advance", reading, HostReads),
        (CudaQueueEvent, "wait", waiting_for_nothing, (Differs, AssertionError)),
        (DeviceSteps, "send", one_message, Differs),
        (TargetPass, "decide", moved_result, Differs),
        (Captures, "run", key_without_shaping, Differs),
        (Captures, "run", key_without_tokens, (Differs, DeviceFault)),
        (TargetPass, "_forward", private_tokens, (Differs, DeviceFault)),
    ],
)
def test_planted_faults_are_caught(
    owner: Any, name: str, broken: Any, raised: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **more: broken(real, *args, **more))
    with pytest.raises(raised):
        compare()


Step = tuple[list[int], ...]


def steps_of(run: Callable[..., Any], depth: int) -> tuple[list[Step], Counter[str]]:
    """Return the result of each step of a run, and counts of events. Without a plan in flight a
    step equals that of the CPU executor."""
    steps: list[Step] = []

    class Noting(LateTwins if depth else Twins):  # type: ignore[misc]
        def wait(self) -> StepResult:
            result: StepResult = super().wait()
            kept = result.tokens, result.row_splits, result.num_drafted, result.num_accepted
            steps.append(tuple(each.tolist() for each in kept))
            return result

    _, seen = run(depth=depth, twins_kind=Noting)
    return steps, seen


def steps_at_once(
    run: Callable[..., Any], depth: int, monkeypatch: pytest.MonkeyPatch
) -> list[Step]:
    """Return the steps of a device that runs operations at once."""
    with monkeypatch.context() as patch:
        patch.setattr(twins, "ReplayingDevice", ReplayingDevice)
        return steps_of(run, depth)[0]


RUNS: dict[str, Callable[..., Any]] = {
    "lookups": lambda **more: run_chains(chained(True, max_tokens=8), **more),
    "grammars": lambda **more: run_structured(True, **more),
}


@pytest.mark.usefixtures("light")
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("name", RUNS)
def test_lookups_and_grammars(
    stream: Stream, name: str, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, seen = steps_of(RUNS[name], depth)
    happened(seen, "accepted", "rejected" if name == "lookups" else "no token")
    assert seen["plans in flight"] or not depth
    replayed(stream)
    assert steps_at_once(RUNS[name], depth, monkeypatch) == steps


@pytest.mark.usefixtures("light")
def test_a_grammar_with_a_plan_under_way(stream: Stream) -> None:
    _, seen = run_structured(False, depth=1)
    happened(seen, "plans in flight", "no token")
    replayed(stream)


def guesses_of_another_place(patch: pytest.MonkeyPatch) -> None:
    """Broken: guesses are not advanced by the tokens emitted since."""

    def unmoved(state: Any, layout: Any, **more: Any) -> None:
        state.guess[:, 1] -= 1
        take_guesses(state, layout, **more)

    patch.setattr(device_steps, "take_guesses", unmoved)


def overwritten_guesses(patch: pytest.MonkeyPatch) -> None:
    """Broken: the message of a step is overwritten before it was sent."""
    real = DeviceSteps.send
    patch.setattr(DeviceSteps, "send", lambda *given: one_message(real, *given))


def masks_after_the_verdict(patch: pytest.MonkeyPatch) -> None:
    """Broken: masks come after the step has decided."""
    decide, waiting = TargetPass.decide, []
    patch.setattr(masking, "mask_logits", lambda *given: waiting.append(given))

    def deciding(target: TargetPass, *given: Any) -> None:
        decide(target, *given)
        for arguments in waiting:
            mask_logits(*arguments)
        waiting.clear()

    patch.setattr(TargetPass, "decide", deciding)


def drafts_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    """Broken: the grammar checks drafts before they have come."""
    decide = GpuExecutor.decide

    def deciding(executor: GpuExecutor, step: Any) -> None:
        if step.drafting is not None:
            patch.setattr(step.drafting[1], "wait", lambda: None)
        decide(executor, step)

    patch.setattr(GpuExecutor, "decide", deciding)


@pytest.mark.usefixtures("light", "stream")
@pytest.mark.parametrize(
    "name, depth, plant",
    [
        ("lookups", 0, guesses_of_another_place),
        ("lookups", 1, guesses_of_another_place),
        ("lookups", 1, overwritten_guesses),
        ("grammars", 0, masks_after_the_verdict),
        ("grammars", 1, masks_after_the_verdict),
        ("grammars", 0, drafts_not_waited_for),
        ("grammars", 1, drafts_not_waited_for),
    ],
)
def test_planted_faults_of_the_host_side_are_caught(
    name: str, depth: int, plant: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = steps_at_once(RUNS[name], depth, monkeypatch) if depth else None
    plant(monkeypatch)
    try:
        steps, _ = steps_of(RUNS[name], depth)
    except (Differs, DeviceFault, AssertionError):
        return
    assert depth and steps != sound
