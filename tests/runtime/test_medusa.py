"""Medusa heads: drafts follow the equations after any history of a sequence, and no draft changes a
text. Helpers for all heads, and `hard_life`, are in `test_eagle`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from torch import Tensor

from cbatch.core.scheduler.plan import StepPlan, StepResult
from cbatch.core.speculation.policies import FixedPolicy
from cbatch.runtime.cpu.decoder import Model
from cbatch.runtime.cpu.drafters.medusa import MedusaDrafter
from cbatch.runtime.cpu.drafters.medusa_head import MedusaHead
from cbatch.runtime.drafting.contract import DraftRows, Proposal, StepStates
from cbatch.runtime.input_batch import InputBatch
from cbatch.runtime.model.head_config import read_head
from cbatch.runtime.model.head_weights import HeadWeights
from tests.runtime import made_heads
from tests.runtime.engines import RecordingExecutor, Run, admission, make_request, run_engine
from tests.runtime.made_heads import MedusaReference
from tests.runtime.pairs import VOCAB, tiny_model
from tests.runtime.test_eagle import Cold, hard_life, law_distance, prompts, target_head

LAST = (2,)  # the last layer's output


class RecordingHead(MedusaHead):
    """A head that records its logits."""

    seen: list[Tensor]

    def logits(self, states: Tensor, rows: Sequence[Tensor]) -> list[Tensor]:
        self.seen = super().logits(states, rows)
        return [each.clone() for each in self.seen]


def load_medusa(folder: Path, target: Model) -> RecordingHead:
    weights = HeadWeights.of(folder)
    return RecordingHead(read_head(folder, target.config)[0], weights, target, target_head())


def medusa(folder: Path) -> tuple[Path, MedusaReference]:
    tensors = made_heads.medusa_tensors()
    made_heads.write_head(folder, made_heads.medusa_config(), tensors)
    return folder, MedusaReference(tensors, tiny_model().final_norm)


class CheckedMedusa(MedusaDrafter):
    """A drafter that compares the logits of every draft with those of a reader of the whole
    text."""

    def __init__(self, head: RecordingHead, reference: MedusaReference) -> None:
        super().__init__(head)
        self.cold, self.checked, self.wrong = Cold(reference, LAST), 0, 0.0
        self.drafted: dict[tuple[int, ...], list[int]] = {}

    def propose(self, rows: DraftRows) -> Proposal:
        assert isinstance(self.head, RecordingHead)
        self.head.seen = []
        proposal = super().propose(rows)
        assert len(self.head.seen) == proposal.num_drafted.max(initial=0)
        known = [
            self.table.tokens[slot, :count].tolist()
            for slot, count in zip(rows.slots.tolist(), rows.num_tokens.tolist(), strict=True)
        ]
        for row, tokens in enumerate(known):
            self.drafted[tuple(tokens)] = proposal.tokens[row, : proposal.num_drafted[row]].tolist()
        for depth, logits in enumerate(self.head.seen):
            drafting = np.flatnonzero(proposal.num_drafted > depth)
            assert len(logits) == len(drafting)
            for own, row in zip(logits, drafting.tolist(), strict=True):
                expected = self.cold.logits(known[row], proposal.tokens[row, :depth].tolist())
                self.wrong = max(self.wrong, float((own - expected).abs().max()))
                self.checked += 1
        return proposal


def checked_run(
    folder: Path, requests: Any, kind: type[CheckedMedusa] = CheckedMedusa, **settings: Any
) -> tuple[Run, CheckedMedusa]:
    target = tiny_model()
    folder, reference = medusa(folder)
    head = load_medusa(folder, target)
    drafter = kind(head, reference)
    return run_engine(requests, target, head, drafting=drafter, **settings), drafter  # type: ignore[arg-type]


def test_drafts_are_those_of_the_equations_and_no_other_head_computes(tmp_path, monkeypatch):
    requests, settings = hard_life(monkeypatch)
    run, drafter = checked_run(tmp_path, requests, **settings)
    assert drafter.checked > 200 and drafter.wrong < 1e-4
    assert run.scheduler.stats.preemptions > 0 and run.scheduler.stats.prefix_hit_tokens > 0
    assert (run.accepted > 0).any() and (run.accepted < run.drafted).any()
    assert run.outputs == run_engine(requests, tiny_model()).outputs


class _WrongPosition(CheckedMedusa):
    """Broken: it reads the state one before."""

    def read_states(self, states: StepStates) -> None:
        super().read_states(states._replace(hidden=states.hidden.roll(1, 0)))


class _Stale(CheckedMedusa):
    """Broken: it keeps the state that it drafted with when drafts were rejected."""

    def read_states(self, states: StepStates) -> None:
        before = self._states.of_slot.clone()
        super().read_states(states)
        rejected = torch.from_numpy(states.slots[states.lens == 1].astype(np.int64))
        self._states.of_slot[rejected] = before[rejected]


class _WrongRow(CheckedMedusa):
    """Broken: once a sequence has left, it takes the states of the next slots."""

    left = 0

    def release(self, slot: int) -> None:
        super().release(slot)
        self.left += 1

    def read_states(self, states: StepStates) -> None:
        super().read_states(states)
        slots = torch.from_numpy(states.slots.astype(np.int64))
        if self.left:
            self._states.of_slot[slots] = self._states.of_slot[slots.roll(1)]


@pytest.mark.parametrize("broken", [_WrongPosition, _Stale, _WrongRow])
def test_the_equations_expose_a_drafter_that_reads_the_wrong_states(broken, tmp_path, monkeypatch):
    """Broken drafters do not change the text either."""
    requests, settings = hard_life(monkeypatch)
    run, drafter = checked_run(tmp_path, requests, broken, **settings)
    assert drafter.wrong > 1e-2
    assert run.outputs == run_engine(requests, tiny_model()).outputs


def test_a_prefix_hit_and_a_while_without_drafts_cost_no_acceptance(tmp_path, monkeypatch):
    """The same tokens get the same drafts cold, on a hit, and after k = 3, 0, 3."""
    steps, pause = {"n": 0}, range(0)

    def choose(policy: Any, step: Any) -> np.ndarray:
        steps["n"] += 1
        return np.minimum(step.max_drafts, np.full(step.num_rows, 3 * (steps["n"] not in pause)))

    monkeypatch.setattr(FixedPolicy, "choose", choose)
    given = prompts(6, low=27, high=28)
    cold, hit = ([make_request(f"{n}{i}", p) for i, p in enumerate(given)] for n in ("cold", "hit"))
    arrivals = [0] * 6 + [60] * 6
    once, drafter = checked_run(tmp_path / "a", cold + hit, lookahead="fixed:3", arrivals=arrivals)
    assert once.scheduler.stats.prefix_hit_tokens == 6 * 24
    checksums = [
        [[row[1:] for row in once.executor.row_of_request[f"{name}{i}"]] for i in range(6)]
        for name in ("cold", "hit")
    ]
    assert checksums[0] == checksums[1] and (once.accepted > 0).any()
    pause, steps["n"] = range(10, 20), 0
    _, paused = checked_run(tmp_path / "b", cold, lookahead="fixed:3")
    both = drafter.drafted.keys() & paused.drafted.keys()
    late = [key for key in both if len(key) > 27 + 20]
    assert len(late) > 5 and all(drafter.drafted[key] == paused.drafted[key] for key in late)


def test_who_goes_on_from_a_shared_block_has_its_state(tmp_path):
    folder, reference = medusa(tmp_path)
    drafter = CheckedMedusa(load_medusa(folder, tiny_model()), reference)
    table = InputBatch(4, 4, VOCAB, None)
    drafter.bind(table, 16)
    tokens = prompts(1, low=9, high=10)[0]
    computed = drafter.cold.states(tokens)[:8]
    for slot, kv_len in ((0, 0), (2, 8)):
        sequence = admission(slot, tokens, blocks=[3, 7, 5], temperature=0.0)
        sequence = structs.replace(sequence, kv_len_tokens=kv_len)
        table.admit(sequence)
        drafter.admit(sequence)
        if not kv_len:
            zero, eight = np.array([0]), np.array([8])
            drafter.read_states(StepStates(np.array([slot]), zero, eight, computed))
    counts = np.array([9, 9])
    rows = DraftRows(np.array([0, 2]), counts, counts // 3, counts * 0)
    assert drafter.propose(rows).num_drafted.tolist() == [3, 3]
    assert drafter.checked == 6 and drafter.wrong < 1e-4


@pytest.mark.parametrize("params", [{}, {"top_k": 12, "min_p": 0.01}, {"repetition_penalty": 1.3}])
def test_seeded_text_does_not_depend_on_the_heads(params, tmp_path, monkeypatch):
    coupled = {"temperature": 0.9, "verification": "coupled", **params}
    requests, settings = hard_life(monkeypatch, **coupled)
    target = tiny_model()
    head = load_medusa(medusa(tmp_path)[0], target)
    run = run_engine(requests, target, head, drafting=MedusaDrafter(head), depth=1, **settings)  # type: ignore[arg-type]
    assert (run.accepted > 0).any() and (run.accepted < run.drafted).any()
    assert run.outputs == run_engine(requests, tiny_model()).outputs


class _Lies(MedusaDrafter):
    def propose(self, rows: DraftRows) -> Proposal:
        proposal = super().propose(rows)
        assert proposal.probs is not None
        return proposal._replace(probs=torch.full_like(proposal.probs, 1 / VOCAB))


def test_the_law_of_sampled_text_is_that_without_heads(tmp_path):
    target = tiny_model()
    head = load_medusa(medusa(tmp_path)[0], target)
    kept, broken = (
        law_distance(target, head, drafter) for drafter in (MedusaDrafter(head), _Lies(head))
    )
    assert kept < 5 < broken


def test_the_scheduler_sees_heads_that_never_lag(tmp_path):
    target = tiny_model()
    head = load_medusa(medusa(tmp_path)[0], target)
    lags = []

    class Watched(RecordingExecutor):
        def run(self, plan: StepPlan) -> StepResult:
            lags.append(int(plan.catch_up.max(initial=0)))
            return super().run(plan)

    requests = [make_request(f"r{i}", p) for i, p in enumerate(prompts(4))]
    drafter = MedusaDrafter(head)
    run = run_engine(requests, target, head, drafting=drafter, lookahead="fixed:6", kind=Watched)  # type: ignore[arg-type]
    assert len(lags) > 10 and not any(lags)
    assert run.drafted.max() == 4  # there are no more heads
