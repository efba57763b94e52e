"""The executor: plans and true positions, broken numbers, faults, and what costs nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cbatch.core.request.request import FinishReason
from cbatch.core.scheduler.executor import RowError
from cbatch.core.scheduler.plan import Deltas, NewSequence, RowStatus, StepPlan, StepResult
from cbatch.engine.loop import ThreadedExecutor, VoidedStepError
from cbatch.runtime.cpu.decoder import Model
from cbatch.runtime.cpu.drafters.draft_model import DraftModel
from cbatch.runtime.cpu.executor import TorchExecutor
from cbatch.runtime.drafting.chain import ChainDrafter
from cbatch.runtime.drafting.lookup import LookupDrafter
from cbatch.runtime.drafting.lookups import NgramLookup
from tests.runtime.engines import (
    VOCAB,
    RecordingExecutor,
    admission,
    make_request,
    run_engine,
    tiny_model,
)
from tests.runtime.reference import written_kv

NOISE = 0.08
SIZES: dict[str, int] = {"num_blocks": 256, "block_size": 4, "max_num_seqs": 8}


def prompts(count: int, seed: int = 1, low: int = 2, high: int = 40) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, rng.integers(low, high)).tolist() for _ in range(count)]


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def admit(slot: int, prompt: list[int], **settings: Any) -> NewSequence:
    blocks = range(slot * 16, slot * 16 + 16)
    settings = {"temperature": 0.0, "max_tokens": 64, "blocks": blocks} | settings
    return admission(slot, prompt, **settings)


def make_plan(
    step_id: int,
    rows: list[tuple[int, int, int, int, bool]],
    *,
    admitted: tuple[NewSequence, ...] = (),
    released: np.ndarray | None = None,
) -> StepPlan:
    """Make a plan from `rows`: (slot, query_len, num_drafts, catch_up, wants_logits)."""
    columns = np.array(rows, dtype=np.int32).reshape(-1, 5).T
    none = ints()
    deltas = Deltas(False, none if released is None else released, none, admitted, *[none] * 3)
    return StepPlan(
        step_id=step_id,
        slots=columns[0],
        generations=np.ones_like(columns[0]),
        query_lens=columns[1],
        num_drafts=columns[2],
        catch_up=columns[3],
        wants_logits=columns[4].astype(bool),
        deltas=deltas,
    )


def executor_with(draft: Model | None = None, **sizes: int) -> TorchExecutor:
    drafter = None if draft is None else DraftModel(draft)
    return TorchExecutor(tiny_model(), drafter=drafter, **(SIZES | sizes))


# --- plans ----------------------------------------------------------------------------------------


def test_result_of_a_ragged_step():
    """A chunk, a last chunk and two decodes, with and without drafts, share one step."""
    executor = executor_with(tiny_model(noise=NOISE))
    first = [(slot, 5, 0, 0, True) for slot in (0, 1)]
    admitted = tuple(admit(s, list(range(3, 3 + n))) for s, n in ((0, 5), (1, 5), (2, 9), (3, 4)))
    executor.run(make_plan(0, first, admitted=admitted))
    rows = [(0, 4, 3, 5, True), (1, 1, 0, 0, True), (2, 6, 0, 0, False), (3, 4, 0, 0, True)]
    result = executor.run(make_plan(1, rows))
    counts = np.diff(result.row_splits)
    assert counts.tolist() == [1 + int(result.num_accepted[0]), 1, 0, 1]
    assert result.num_drafted.tolist() == [3, 0, 0, 0] and not result.status.any()
    assert len(result.tokens) == counts.sum() and result.tokens.dtype == np.int32
    assert result.draft_s > 0 and result.target_s > 0
    table = executor.table
    assert table.kv_len[:4].tolist() == [6 + int(result.num_accepted[0]), 6, 6, 4]
    assert table.num_tokens[:4].tolist() == [7 + int(result.num_accepted[0]), 7, 9, 5]


@pytest.mark.parametrize("chain", [False, True])
def test_a_step_tells_that_it_goes_on(chain: bool):
    """Steps of the target and of the draft, also in a chain, report progress."""
    draft = tiny_model(noise=NOISE)
    drafter = DraftModel(draft)
    if chain:
        drafter = ChainDrafter(
            model=drafter, lookups={"ngram": LookupDrafter(NgramLookup())}, default=("model",)
        )
    executor = TorchExecutor(tiny_model(), drafter=drafter, **SIZES)
    counter = np.zeros(1, dtype=np.int64)
    executor.report_progress(counter)
    executor.run(make_plan(0, [(0, 5, 0, 0, True)], admitted=(admit(0, [1, 2, 3, 4, 5]),)))
    alone = int(counter[0])
    assert alone >= executor.model.config.num_layers
    executor.run(make_plan(1, [(0, 4, 3, 5, True)]))
    assert counter[0] >= alone + 4 * draft.config.num_layers, "three drafts and a verification"


def test_a_plan_that_does_not_fit_is_refused():
    executor = executor_with()
    executor.run(make_plan(0, [(0, 5, 0, 0, True)], admitted=(admit(0, [1, 2, 3, 4, 5]),)))
    with pytest.raises(ValueError, match="query_lens"):
        executor.run(make_plan(1, [(0, 2, 0, 0, True)]))
    stale = make_plan(2, [(0, 1, 0, 0, True)])
    stale.generations[0] = 7
    with pytest.raises(ValueError, match="generations"):
        executor.run(stale)
    with pytest.raises(ValueError, match="query_lens"):
        executor.run(make_plan(3, [(0, 1, 0, 0, True)], released=ints(0)))
    with pytest.raises(RowError, match="max_total"):
        executor.run(make_plan(4, [], admitted=(admit(1, [1, 2, 3], max_total=2),)))


def test_reports_of_a_step_are_in_the_order_of_its_rows() -> None:
    """A chunk, a greedy row and one of rejection share a step."""
    executor = TorchExecutor(tiny_model(), drafter=DraftModel(tiny_model(noise=0.08)), **SIZES)
    sampled = {"temperature": 1.0, "verification": "rejection"}
    admitted = (admit(0, [1, 2, 3, 4]), admit(1, [1, 2, 3, 5], **sampled), admit(2, range(3, 12)))
    executor.run(make_plan(0, [(s, 4, 0, 0, True) for s in (0, 1)], admitted=admitted))
    rows = [(2, 6, 0, 0, False), (1, 4, 3, 4, True), (0, 4, 3, 4, True)]
    result = executor.run(make_plan(1, rows))
    assert result.expected_accepted is not None
    chunk, rejection, greedy = result.expected_accepted.tolist()
    assert chunk == 0 and greedy == result.num_accepted[2] and rejection % 1 > 0


def test_drafts_are_clipped_and_a_full_row_emits_nothing():
    """The plan was made while another was in flight, so its upper bounds may pass the end; the row
    does not."""
    draft = tiny_model()  # the target itself: all drafts are accepted
    executor = executor_with(draft)
    executor.run(
        make_plan(0, [(0, 5, 0, 0, True)], admitted=(admit(0, [1, 2, 3, 4, 5], max_total=9),))
    )
    result = executor.run(make_plan(1, [(0, 5, 4, 5, True)]))
    assert result.num_drafted.tolist() == [2] and result.num_accepted.tolist() == [2]
    assert executor.table.num_tokens[0] == 9
    result = executor.run(make_plan(2, [(0, 5, 4, 1, True)]))
    assert len(result.tokens) == 0 and result.num_drafted.tolist() == [0]
    assert result.status.tolist() == [RowStatus.OK] and executor.table.num_tokens[0] == 9


def test_catch_up_beyond_what_was_paid_for_drafts_nothing():
    executor = executor_with(tiny_model(noise=NOISE))
    executor.run(make_plan(0, [(0, 5, 0, 0, True)], admitted=(admit(0, [1, 2, 3, 4, 5]),)))
    assert executor.run(make_plan(1, [(0, 3, 2, 4, True)])).num_drafted.tolist() == [0]
    assert executor.run(make_plan(2, [(0, 3, 2, 6, True)])).num_drafted.tolist() == [2]


def test_plain_steps_touch_neither_draft_nor_sampler(monkeypatch):
    """Trap 2 (k = 0 is not free). With k = 0 in all rows the plain path runs; greedy rows draw
    nothing."""
    draft = tiny_model(noise=NOISE)
    monkeypatch.setattr(draft, "forward", lambda *_: pytest.fail("the draft ran"))
    monkeypatch.setattr(
        "cbatch.runtime.cpu.verify.rejection_verify", lambda *_: pytest.fail("sampled")
    )
    executor = executor_with(draft)
    executor.run(make_plan(0, [(0, 5, 0, 0, True)], admitted=(admit(0, [1, 2, 3, 4, 5]),)))
    result = executor.run(make_plan(1, [(0, 1, 0, 0, True)]))
    assert len(result.tokens) == 1 and result.draft_s == 0


# --- contents of KV -------------------------------------------------------------------------------


class _KvChecker(RecordingExecutor):
    """An executor that checks after each step that valid KV equals that of the emitted tokens
    computed again (flaw A1)."""

    checks = 0

    def __init__(self, model: Model, **settings: Any) -> None:
        super().__init__(model, **settings)
        self.emitted: dict[int, list[int]] = {}  # prompt and output by slot, from the results

    def run(self, plan: StepPlan) -> StepResult:
        for a in plan.deltas.new_sequences:
            self.emitted[a.slot] = a.tokens.tolist()
        result = super().run(plan)
        table, size = self.table, self.table.block_size
        for row, slot in enumerate(plan.slots.tolist()):
            first, last = result.row_splits[row : row + 2]
            self.emitted[slot] += result.tokens[first:last].tolist()
            length = int(table.kv_len[slot])
            fresh = TorchExecutor(self.model, num_blocks=64, block_size=size, max_num_seqs=1)
            tokens = self.emitted[slot][: length + 1]
            # One position more is known than is in KV.
            one = admit(0, tokens, max_total=len(tokens) + 1, blocks=range(64))
            fresh.run(make_plan(0, [(0, length, 0, 0, False)], admitted=(one,)))
            for position in range(length):
                block, at = int(table.blocks[slot, position // size]), position % size
                own = written_kv(self.model, self.kv, 0, block, at)
                recomputed = written_kv(self.model, fresh.kv, 0, position // size, at)
                assert torch.equal(own, recomputed) and own.any()
            self.checks += 1
        return result


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_flaw_a1_kv_is_that_of_the_emitted_tokens(temperature):
    target = tiny_model(dtype=torch.bfloat16)
    draft = tiny_model(noise=NOISE, dtype=torch.bfloat16)
    requests = [
        make_request(f"r{i}", p, max_tokens=16, temperature=temperature, seed=i)
        for i, p in enumerate(prompts(3, high=12))
    ]
    run = run_engine(requests, target, draft, lookahead="fixed:3", kind=_KvChecker)
    assert run.executor.checks > 20
    assert (run.accepted < run.drafted).any() and run.accepted.any()


# --- broken numbers and faults --------------------------------------------------------------------


class _PoisonTarget(RecordingExecutor):
    """An executor that writes NaN into the first block of a request's target KV before one step."""

    victim, step = "r1", 6
    poisoned: int | None = None
    reused_by: str | None = None

    def run(self, plan: StepPlan) -> StepResult:
        if plan.step_id == self.step:
            slot = next(s for s, name in self.owner.items() if name == self.victim)
            self.poisoned = int(self.table.blocks[slot, 0])
            self.kv.data[:, :, :, self.poisoned] = torch.nan
        for a in plan.deltas.new_sequences:
            if self.poisoned is not None and self.poisoned in a.blocks:
                self.reused_by = a.request_id
        if self.poisoned is not None and self.poisoned in plan.deltas.zeroed_blocks:
            self.was_zeroed = True
        return super().run(plan)


@pytest.mark.parametrize(("depth", "lookahead"), [(0, "off"), (1, "fixed:3")])
def test_non_finite_logits_end_one_request_and_its_blocks_are_clean_for_a_neighbour(
    depth, lookahead
):
    target, draft = tiny_model(), tiny_model(noise=NOISE)
    requests = [
        make_request(f"r{i}", p, max_tokens=30)
        for i, p in enumerate(prompts(6, seed=2, low=20, high=30))
    ]
    requests[5] = make_request("r5", requests[1].prompt, max_tokens=30)  # would hit its prefix
    run = run_engine(
        requests, target, draft, lookahead=lookahead, depth=depth, num_blocks=40, kind=_PoisonTarget
    )
    clean = run_engine(requests, target)
    assert run.reasons.pop("r1") is FinishReason.ERROR and "finite" in (run.messages["r1"] or "")
    lost = run.outputs.pop("r1")
    assert lost == clean.outputs.pop("r1")[: len(lost)]
    assert run.outputs == clean.outputs and set(run.reasons.values()) == {FinishReason.LENGTH}
    assert run.executor.was_zeroed and run.executor.reused_by is not None


class _Faulty(RecordingExecutor):
    def run(self, plan: StepPlan) -> StepResult:
        result = super().run(plan)
        if plan.step_id in (5, 11):
            raise RuntimeError("injected after the state changed")
        return result


@pytest.mark.parametrize("depth", [0, 1])
def test_requests_survive_faults_of_the_executor(depth):
    target = tiny_model(dtype=torch.bfloat16)
    draft = tiny_model(noise=NOISE, dtype=torch.bfloat16)
    requests = [make_request(f"r{i}", p) for i, p in enumerate(prompts(4))]
    run = run_engine(
        requests, target, draft, lookahead="fixed:3", depth=depth, kind=_Faulty, num_faults=2
    )
    assert run.scheduler.stats.executor_resets == 2
    assert run.outputs == run_engine(requests, target).outputs


# --- the worker thread ----------------------------------------------------------------------------


class _Scripted:
    """An executor that returns the plan's id as result, and fails at the given steps."""

    def __init__(self, *failing: int) -> None:
        self.failing, self.ran, self.resets = failing, [], 0

    def check(self, request: Any) -> None:
        pass

    def run(self, plan: StepPlan) -> Any:
        self.ran.append(plan.step_id)
        if plan.step_id in self.failing:
            raise RuntimeError(f"step {plan.step_id}")
        return plan.step_id

    def reset(self) -> None:
        self.resets += 1


def test_results_come_in_order_and_a_failure_voids_what_follows():
    scripted = _Scripted(2)
    threaded = ThreadedExecutor(scripted)
    for step in range(4):
        threaded.submit(make_plan(step, []))
    assert [threaded.wait(), threaded.wait()] == [0, 1] and threaded.num_pending == 2
    with pytest.raises(RuntimeError, match="step 2"):
        threaded.wait()
    with pytest.raises(VoidedStepError, match="step 3"):
        threaded.wait()
    with pytest.raises(RuntimeError, match="submit"):
        threaded.wait()
    threaded.submit(make_plan(4, []))
    threaded.reset()
    assert threaded.num_pending == 0 and scripted.resets == 1
    threaded.submit(make_plan(5, []))
    assert threaded.wait() == 5 and scripted.ran == [0, 1, 2, 5]
    threaded.close()
    threaded.close()
