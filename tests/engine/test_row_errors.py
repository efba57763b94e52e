"""Errors of single rows and requests: they cost that request, and no other."""

from __future__ import annotations

import pytest

from cbatch import FieldError, FinishReason, SamplingParams
from cbatch.core.request.request import Request
from cbatch.core.scheduler.executor import errors_of_row
from cbatch.core.scheduler.plan import StepPlan, StepResult
from cbatch.engine.loop import StepLoop
from tests.engine.late import held_kernels
from tests.helpers import RecordingExecutor, World, make_config, make_request
from tests.toy_engine import make_engine

BAD = ("bad0", "bad1", "bad2")
DEPTHS = pytest.mark.parametrize("depth", [0, 1])


class Picky(RecordingExecutor):
    """An executor that cannot admit some requests, or cannot end their steps."""

    late = False

    def submit(self, plan: StepPlan) -> None:
        for new in plan.deltas.new_sequences:
            if new.request_id in BAD and not self.late:
                with errors_of_row(new.slot, new.generation):
                    raise MemoryError(f"no room for {new.request_id}")
        super().submit(plan)

    def wait(self) -> StepResult:
        result = super().wait()
        for slot, sequence in enumerate(self._slots):
            if sequence is None or sequence.num_output_tokens <= 2:
                continue
            new = sequence.admission
            if new.request_id in BAD:
                with errors_of_row(slot, new.generation):
                    raise IndexError(f"no room for {new.request_id}")
        return result


@DEPTHS
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("budget_tokens", [16, 512])
def test_a_row_at_fault_costs_its_request_only(depth: int, late: bool, budget_tokens: int) -> None:
    """Also where the requests do not fit one step, and other traffic goes on."""
    world = World(make_config(max_num_batched_tokens=budget_tokens, max_num_seqs=4), depth=depth)
    world.executor.__class__, world.executor.late = Picky, late  # type: ignore[attr-defined]
    good = [make_request(f"r{i}", 5 + 3 * i, seed=i, max_tokens=12) for i in range(9)]
    bad = [make_request(name, 9, seed=70 + i, max_tokens=12) for i, name in enumerate(BAD)]
    for i, request in enumerate(good):
        world.add(request, *bad[i // 3 : i // 3 + (i % 3 == 1)])
    world.run()
    world.assert_reference(*(request.request_id for request in good))
    for name in BAD:
        assert world.finished[name].reason is FinishReason.ERROR
        assert world.finished[name].message == f"no room for {name}"
    assert world.executor.stats.num_resets == len(BAD)


@DEPTHS
def test_the_error_of_a_row_that_has_left_its_slot_is_a_fault(depth: int) -> None:
    """Its slot may have another request by now."""
    world = World(depth=depth)
    world.add(*(make_request(f"r{i}", 7, seed=i, max_tokens=6) for i in range(3)))
    submit, faults = world.executor.submit, [1]

    def failing(plan: StepPlan) -> None:
        if len(world.commits) == 2 and faults:
            with errors_of_row(int(plan.slots[0]), int(plan.generations[0]) - faults.pop()):
                raise ValueError("an error of an earlier sequence")
        submit(plan)

    world.executor.submit = failing  # type: ignore[method-assign]
    world.loop = StepLoop(world.scheduler, world.executor, clock=world.clock, depth=depth)
    world.run()
    world.assert_reference()
    assert world.executor.stats.num_resets == 1


def refuse(request: Request) -> None:
    for field, problem in (
        ("logit_bias", len(request.params.logit_bias) > 2),
        ("stop_token_ids", len(request.params.stop_token_ids) > 2),
        ("frequency_penalty", request.params.frequency_penalty),
    ):
        if problem:
            raise FieldError(field, "is too much for this device", "use --device cpu")


@DEPTHS
@pytest.mark.parametrize(
    "params",
    [
        {"logit_bias": {5: 1.0, 6: 1.0, 7: 1.0}},
        {"stop_token_ids": (5, 6, 7)},
        {"frequency_penalty": 0.5},
    ],
)
def test_what_an_executor_refuses_never_enters(depth, params, tmp_path, monkeypatch) -> None:
    """Neither while kernels are still compiled, nor one choice of several."""
    late = held_kernels(tmp_path, monkeypatch)
    for kernels in (None, late.kernels):
        engine = make_engine(depth=depth, background_kernels=kernels)
        vars(engine.core.executor)["check"] = refuse
        others = [engine.add("abc", SamplingParams(max_tokens=5, seed=i)) for i in range(3)]
        (field,) = params
        with pytest.raises(FieldError, match=f"^{field}: is too much for this device; use"):
            engine.add("abc", SamplingParams(max_tokens=5, n=2, **params))
        assert not engine.core.waiting_for_kernels
        finished = []
        while engine.has_work:
            finished += [out.finished for out in engine.step() if out.finished]
        assert [choice.finish_reason for choice in finished] == [FinishReason.LENGTH] * len(others)
        assert engine.core.metrics().totals.executor_resets == 0
    late.end_all()
