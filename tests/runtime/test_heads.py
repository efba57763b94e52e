"""EAGLE and Medusa heads: drafts follow the equations after any history, and no draft changes a
text."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from torch import Tensor

from cbatch.core.request.request import Request
from cbatch.core.scheduler.plan import NewSequence, StepPlan, StepResult
from cbatch.core.speculation.policies import FixedPolicy
from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.cpu.decoder import Model
from cbatch.runtime.cpu.drafters.eagle import EagleDrafter
from cbatch.runtime.cpu.drafters.kinds import HEADS, drafter_of
from cbatch.runtime.cpu.drafters.medusa import MedusaDrafter
from cbatch.runtime.cpu.executor import TorchExecutor
from cbatch.runtime.drafting.contract import DraftRows, Proposal, StepStates
from cbatch.runtime.drafting.heads.trial import fresh_kv, whole_text
from cbatch.runtime.input_batch import InputBatch
from cbatch.runtime.model.head_config import read_head
from cbatch.runtime.model.head_weights import HeadWeights
from cbatch.runtime.model.sharding import ShardedWeights, shard_config
from cbatch.runtime.rank_group import RankGroup
from cbatch.runtime.sampling import noise
from cbatch.runtime.sampling.rejection_sampler import NoiseRows, draw
from tests.runtime import made_heads
from tests.runtime.engines import (
    VOCAB,
    NoisyWeights,
    RecordingExecutor,
    Run,
    admission,
    make_request,
    run_engine,
    tiny_config,
    tiny_model,
)
from tests.runtime.made_heads import (
    LAYERS,
    Cold,
    FirstReference,
    MedusaReference,
    Reference,
    embedding,
    target_head,
)
from tests.runtime.marks import needs_compiler
from tests.runtime.test_ranks import by_ranks

pytestmark = needs_compiler


def load(folder: Path, target: Model) -> Any:
    config = read_head(folder, target.config)[0]
    return HEADS[config.kind](config, HeadWeights.of(folder), target, target_head())


def eagle3(folder: Path, **flags: bool) -> Reference:
    tensors = made_heads.eagle3_tensors()
    made_heads.write_head(folder, made_heads.eagle3_config(**flags), tensors)
    return Reference(tensors, embedding(), **flags)


def eagle1(folder: Path) -> Reference:
    tensors = made_heads.eagle1_tensors()
    made_heads.write_head(folder, made_heads.llama_fields(), tensors)
    return FirstReference(tensors, embedding(), tiny_model().final_norm, target_head())


def medusa(folder: Path) -> MedusaReference:
    tensors = made_heads.medusa_tensors()
    made_heads.write_head(folder, made_heads.medusa_config(), tensors)
    return MedusaReference(tensors, tiny_model().final_norm)


KINDS = pytest.mark.parametrize("make", [eagle3, eagle1, medusa])
TWO_KINDS = pytest.mark.parametrize("make", [eagle3, medusa])


class Checked:
    """A drafter that compares the logits of every draft with those of `Cold`. `wrong` is the
    largest difference so far, in standard deviations of the expected logits."""

    cold: Cold
    checked, wrong = 0, 0.0
    table: InputBatch

    def propose(self, rows: DraftRows) -> Proposal:
        self.seen: list[Tensor] = []
        proposal: Proposal = super().propose(rows)  # type: ignore[misc]
        assert len(self.seen) == proposal.num_drafted.max(initial=0), "no other head computes"
        for depth, logits in enumerate(self.seen):
            drafting = np.flatnonzero(proposal.num_drafted > depth).tolist()
            for own, row in zip(logits, drafting, strict=True):
                tokens = self.table.tokens[rows.slots[row], : int(rows.num_tokens[row])].tolist()
                drafts = proposal.tokens[row, :depth].tolist()
                expected = self.expected(int(rows.slots[row]), tokens, drafts)
                wrong = (own - expected).abs().max() / expected.std()
                self.wrong = max(self.wrong, float(wrong))
                self.checked += 1
        return proposal

    def expected(self, slot: int, tokens: list[int], drafts: list[int]) -> Tensor:
        return self.cold.logits(tokens, drafts)


class CheckedEagle(Checked, EagleDrafter):
    def _choices(self, batch: RaggedBatch, states: Tensor) -> Tensor:
        logits = super()._choices(batch, states)
        self.seen.append(logits.clone())
        return logits


class CheckedMedusa(Checked, MedusaDrafter):
    def __init__(self, head: Any) -> None:
        super().__init__(head)
        real = head.logits

        def logits(states: Tensor, rows: Sequence[Tensor]) -> list[Tensor]:
            self.seen = real(states, rows)
            return [each.clone() for each in self.seen]

        head.logits = logits


def checked_run(make: Any, folder: Path, requests: Any, kind: Any = None, **settings: Any) -> Run:
    target, reference = tiny_model(), make(folder)
    head = load(folder, target)
    drafter = (kind or (CheckedMedusa if make is medusa else CheckedEagle))(head)
    drafter.cold = Cold(reference, head.head.hidden_layers)
    return run_engine(requests, target, head, drafting=drafter, **settings)


def prompts(count: int, seed: int = 1, low: int = 1, high: int = 40) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, rng.integers(low, high)).tolist() for _ in range(count)]


def hard_life(monkeypatch: pytest.MonkeyPatch, **params: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return requests and settings: k varies by step and row and is 0 for a while; with
    preemptions, prefix hits and chunks."""
    rng, steps = np.random.default_rng(3), {"n": 0}

    def choose(policy: Any, step: Any) -> np.ndarray:
        steps["n"] += 1
        k = rng.integers(0, 5, step.num_rows) * (not 10 <= steps["n"] < 20)
        return np.minimum(step.max_drafts, k.astype(np.int32))

    monkeypatch.setattr(FixedPolicy, "choose", choose)
    shared = prompts(1, seed=9, low=24, high=25)[0]
    requests = [
        make_request(f"r{i}", (shared if i % 2 else []) + p, max_tokens=24, **params)
        for i, p in enumerate(prompts(8))
    ]
    size = {"num_blocks": 40, "max_num_batched_tokens": 40, "max_num_seqs": 6}
    return requests, {"lookahead": "fixed:4", **size}


@KINDS
def test_drafts_are_those_of_the_equations_whatever_the_head_went_through(
    make, tmp_path, monkeypatch
):
    requests, settings = hard_life(monkeypatch)
    run = checked_run(make, tmp_path, requests, **settings)
    assert run.executor.drafter.checked > 200 and run.executor.drafter.wrong < 1e-4
    assert run.scheduler.stats.preemptions > 0 and run.scheduler.stats.prefix_hit_tokens > 0
    assert (run.accepted > 0).any() and (run.accepted < run.drafted).any()
    assert run.outputs == run_engine(requests, tiny_model()).outputs


class _WrongPosition(CheckedEagle):
    """Broken: it reads the state of the position itself, not of the one before."""

    def read_states(self, states: StepStates) -> None:
        hidden = states.hidden.roll(-1, 0) if len(states.hidden) > 1 else states.hidden
        super().read_states(states._replace(hidden=hidden))


class _ForgetsBlocks(CheckedEagle):
    """Broken: after a prefix hit or a preemption it continues from the state of the slot's last
    sequence."""

    def admit(self, admission: NewSequence) -> None:
        before = self._states.of_slot[admission.slot].clone()
        super().admit(admission)
        self._states.of_slot[admission.slot] = before


class _Stale(CheckedMedusa):
    """Broken: it keeps the state that it drafted with when drafts were rejected."""

    def read_states(self, states: StepStates) -> None:
        before = self._states.of_slot.clone()
        super().read_states(states)
        rejected = torch.from_numpy(states.slots[states.lens == 1].astype(np.int64))
        self._states.of_slot[rejected] = before[rejected]


@pytest.mark.parametrize("broken", [_WrongPosition, _ForgetsBlocks, _Stale])
def test_the_equations_expose_a_drafter_that_reads_the_wrong_states(broken, tmp_path, monkeypatch):
    """Broken drafters do not change the text either."""
    requests, settings = hard_life(monkeypatch)
    run = checked_run(
        medusa if broken is _Stale else eagle3, tmp_path, requests, broken, **settings
    )
    assert run.executor.drafter.wrong > 1e-2
    assert run.outputs == run_engine(requests, tiny_model()).outputs


def test_drafts_end_where_their_numbers_break(tmp_path):
    """A state is not finite: its row has no drafts, the other row has all."""
    eagle3(tmp_path)
    drafter = EagleDrafter(load(tmp_path, tiny_model()))
    table = InputBatch(2, 4, VOCAB)
    drafter.bind(table, 8)
    for slot in range(2):
        blocks = range(4 * slot, 4 * slot + 4)
        table.admit(admission(slot, [5, 9, 11], max_total=16, blocks=blocks))
    states = torch.randn(4, len(LAYERS), made_heads.HIDDEN)
    states[1] = torch.nan
    slots, twos = np.arange(2, dtype=np.int32), np.full(2, 2)
    drafter.read_states(StepStates(slots, np.zeros(2, dtype=np.int64), twos, states))
    drafts = drafter.propose(DraftRows(slots, np.full(2, 3), np.full(2, 3), np.zeros(2, dtype=int)))
    assert drafts.num_drafted.tolist() == [0, 3] and drafts.non_finite.tolist() == [True, False]


@pytest.mark.usefixtures("torch_pass")
def test_the_row_without_a_state_has_numbers(tmp_path):
    eagle3(tmp_path)
    head = load(tmp_path, tiny_model())
    hidden = torch.randn(3, len(LAYERS), made_heads.HIDDEN)
    batch = whole_text(torch.tensor([5, 9, 11]))
    with torch.inference_mode():
        assert not head.first_logits(batch, fresh_kv(head, 3), hidden).isnan().any()


class _Honest:
    """A drafter whose drafts are compared with draws from the q that it reports."""

    drawn = 0
    table: InputBatch

    def propose(self, rows: DraftRows) -> Proposal:
        proposal: Proposal = super().propose(rows)  # type: ignore[misc]
        counts = proposal.num_drafted
        if proposal.probs is not None:
            at = [(i, depth) for i, n in enumerate(counts.tolist()) for depth in range(n)]
            row, depth = np.array(at, dtype=np.int64).reshape(-1, 2).T
            where: NoiseRows = self.table.noise_rows(rows.slots[row], rows.num_tokens[row] + depth)
            assert draw(proposal.probs, where, noise.DRAFT).tolist() == [
                proposal.tokens[i, j] for i, j in at
            ]
            assert torch.allclose(proposal.probs.sum(dim=1), torch.ones(len(at)))
            self.drawn += len(at)
        return proposal


class _HonestEagle(_Honest, CheckedEagle):
    pass


class _HonestMedusa(_Honest, CheckedMedusa):
    pass


@TWO_KINDS
def test_sampled_drafts_are_drawn_from_the_q_that_is_reported(make, tmp_path, monkeypatch):
    """With it the law is the target's: test_statistics."""
    rejection = {"temperature": 0.9, "top_k": 30, "verification": "rejection"}
    requests, settings = hard_life(monkeypatch, **rejection)
    kind = _HonestMedusa if make is medusa else _HonestEagle
    run = checked_run(make, tmp_path, requests, kind, **settings)
    assert run.executor.drafter.drawn > 200 and (run.accepted > 0).any()


@pytest.mark.parametrize(("make", "seed"), [(eagle3, 8), (medusa, 7)])
def test_seeded_text_does_not_depend_on_the_head(make, seed, tmp_path, monkeypatch):
    coupled = {"temperature": 0.9, "verification": "coupled", "top_k": 12, "min_p": 0.01}
    requests, settings = hard_life(monkeypatch, seed=seed, **coupled)
    target = tiny_model()
    make(tmp_path)
    head = load(tmp_path, target)
    run = run_engine(requests, target, head, drafting=drafter_of(head), depth=1, **settings)
    assert (run.accepted > 0).any() and (run.accepted < run.drafted).any()
    assert run.outputs == run_engine(requests, tiny_model()).outputs


@TWO_KINDS
def test_the_scheduler_sees_a_head_that_never_lags(make, tmp_path):
    target, lags = tiny_model(), []
    make(tmp_path)
    head = load(tmp_path, target)

    class Watched(RecordingExecutor):
        def run(self, plan: StepPlan) -> StepResult:
            lags.append(int(plan.catch_up.max(initial=0)))
            return super().run(plan)

    requests = [make_request(f"r{i}", p) for i, p in enumerate(prompts(4))]
    settings = {"lookahead": "fixed:6", "kind": Watched}
    run = run_engine(requests, target, head, drafting=drafter_of(head), **settings)
    assert len(lags) > 10 and not any(lags)
    assert run.drafted.max() == (4 if make is medusa else 6), "there are no more heads"


def test_what_is_kept_changes_once_no_thread_is_in_the_pass_before():
    """Otherwise a late thread takes loop bounds of the next pass, and reads freed memory."""
    command = [sys.executable, "-m", "tests.runtime.late_threads"]
    assert subprocess.run(command, cwd=Path(__file__).parents[2]).returncode == 0


class Counting(TorchExecutor):
    """An executor that counts drafts, and patches nothing that other threads see."""

    def run(self, plan: StepPlan) -> StepResult:
        result = super().run(plan)
        for name, values in (("drafted", result.num_drafted), ("accepted", result.num_accepted)):
            self.__dict__.setdefault(name, []).append(values)
        return result


def served(ranks: RankGroup, requests: list[Request], folder: Path | None, **settings: Any) -> Run:
    """Run the engine of one rank; all ranks make the same plans."""
    config = tiny_config()
    source = ShardedWeights(NoisyWeights(1), config, ranks.rank, ranks.size)
    target = Model(shard_config(config, ranks.size), source, torch.float32, "invariant", ranks)
    head = None if folder is None else load(folder, target)
    drafter = None if head is None else drafter_of(head)
    sizes = {"num_blocks": 256, "block_size": 4, "max_num_seqs": 8}
    sizes |= {name: settings[name] for name in sizes if name in settings}
    settings["executor"] = Counting(target, drafter=drafter, **sizes)
    settings["lookahead"] = "off" if head is None else "fixed:4"
    return run_engine(requests, target, head, drafting=drafter, **settings)


@KINDS
def test_ranks_draft_the_same_and_change_no_text(make, tmp_path):
    """Requests are greedy and seeded. They run with k = 4, preemptions and prefix hits, and with k
    = 0 while the head reads along."""
    make(tmp_path)
    shared = prompts(1, seed=9, low=24, high=25)[0]
    seeded = {"temperature": 0.8, "verification": "coupled"}
    requests = [
        make_request(f"r{i}", (shared if i % 2 else []) + prompt, max_tokens=24, seed=i,
                     **(seeded if i % 3 == 2 else {}))
        for i, prompt in enumerate(prompts(8))
    ]  # fmt: skip
    outputs = by_ranks(2, partial(served, requests=requests, folder=None))[0].outputs
    idle = [structs.replace(r, params=structs.replace(r.params, max_lookahead=0)) for r in requests]
    hard = {"num_blocks": 40, "max_num_batched_tokens": 40, "max_num_seqs": 6}
    for chosen, scarce in ((requests, hard), (idle, {})):
        runs = by_ranks(2, partial(served, requests=chosen, folder=tmp_path, **scarce))
        states = [run.executor.drafter._states.of_slot for run in runs]
        assert torch.equal(*states) and bool(states[0].any())
        for run in runs:
            assert run.outputs == outputs
            assert (run.accepted > 0).any() == (run.accepted < run.drafted).any()
            assert (run.accepted > 0).any() == (chosen is requests)
        stats = runs[0].scheduler.stats
        assert chosen is idle or (stats.preemptions > 0 and stats.prefix_hit_tokens > 0)
