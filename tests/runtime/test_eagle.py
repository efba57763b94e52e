"""EAGLE heads: drafts follow the equations after any history of their KV, and no draft changes a
text."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cbatch.core.scheduler.plan import NewSequence, StepPlan, StepResult
from cbatch.core.speculation.policies import FixedPolicy
from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.cpu.decoder import Model
from cbatch.runtime.cpu.drafters.eagle import EagleDrafter
from cbatch.runtime.cpu.drafters.eagle_head import EagleHead
from cbatch.runtime.drafting.contract import DraftRows, Proposal, StepStates
from cbatch.runtime.input_batch import InputBatch
from cbatch.runtime.kv_cache import KVCache
from cbatch.runtime.model.head_config import read_head
from cbatch.runtime.model.head_weights import HeadWeights
from tests.runtime import made_heads
from tests.runtime.engines import RecordingExecutor, Run, admission, make_request, run_engine
from tests.runtime.made_heads import LAYERS, FirstReference, MedusaReference, Reference
from tests.runtime.marks import needs_compiler
from tests.runtime.pairs import VOCAB, NoisyWeights, tiny_model

pytestmark = needs_compiler

CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def load(folder: Path, target: Model) -> EagleHead:
    return EagleHead(
        read_head(folder, target.config)[0], HeadWeights.of(folder), target, target_head()
    )


def target_head() -> Tensor:
    return NoisyWeights(1).get("lm_head.weight", (VOCAB, made_heads.HIDDEN))


def embedding() -> Tensor:
    return NoisyWeights(1).get("model.embed_tokens.weight", (VOCAB, made_heads.HIDDEN))


class Cold:
    """Drafts without any history: the equations, over the whole sequence."""

    def __init__(self, reference: Reference | MedusaReference, layers: tuple[int, ...]) -> None:
        self.reference, self.model = reference, tiny_model()
        self.model.keep_hidden(layers)

    def logits(self, tokens: list[int], drafts: list[int]) -> Tensor:
        return self.reference.logits(tokens, self.states(tokens), drafts)

    def states(self, tokens: list[int]) -> Tensor:
        model = self.model
        kv = KVCache(model.config, 64, 4, model.dtype, model.device)
        hidden = model.allocate_hidden(len(tokens))
        model.forward(self.batch(tokens), kv, hidden)
        assert hidden is not None
        return hidden

    @staticmethod
    def batch(tokens: list[int], start: int = 0) -> RaggedBatch:
        """Return a batch of one sequence from position `start` on, with logits of all rows."""
        n = len(tokens)
        lens, ends = np.array([n], dtype=np.int32), np.array([start + n], dtype=np.int32)
        tables, every = np.arange(64, dtype=np.int32)[None], torch.arange(n)
        return RaggedBatch(torch.tensor(tokens), every + start, lens, ends, tables, every)


class CheckedEagle(EagleDrafter):
    """A drafter that compares the logits of every draft with those of `Cold`. `wrong` is the
    largest difference so far, in standard deviations of the expected logits."""

    def __init__(self, head: EagleHead, cold: Cold) -> None:
        super().__init__(head)
        self.cold, self.checked, self.seen = cold, 0, []
        self.wrong = 0.0

    def _is_greedy(self, rows: DraftRows) -> bool:
        return False

    def _logits(self, batch: RaggedBatch, slots: Any) -> Tensor:
        logits = super()._logits(batch, slots)
        self.seen.append(logits.clone())
        return logits

    def propose(self, rows: DraftRows) -> Proposal:
        self.seen = []
        proposal = super().propose(rows)
        for depth, logits in enumerate(self.seen):
            for place, row in enumerate(np.flatnonzero(proposal.num_drafted > depth)):
                tokens = self.table.tokens[rows.slots[row], : int(rows.num_tokens[row])].tolist()
                expected = self.cold.logits(tokens, proposal.tokens[row, :depth].tolist())
                wrong = (logits[place] - expected).abs().max() / expected.std()
                self.wrong = max(self.wrong, float(wrong))
                self.checked += 1
        return proposal


def checked_run(folder: Path, reference: Reference, requests: Any, **settings: Any) -> Run:
    target = tiny_model()
    head = load(folder, target)
    drafter = settings.pop("kind_of_drafter", CheckedEagle)(
        head, Cold(reference, head.head.hidden_layers)
    )
    return run_engine(requests, target, head, drafting=drafter, **settings)  # type: ignore[arg-type]


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


def eagle3(folder: Path, **flags: bool) -> tuple[Path, Reference]:
    tensors = made_heads.eagle3_tensors()
    made_heads.write_head(folder, made_heads.eagle3_config(**flags), tensors)
    return folder, Reference(tensors, embedding(), **flags)


def eagle1(folder: Path) -> tuple[Path, Reference]:
    tensors = made_heads.eagle1_tensors()
    made_heads.write_head(folder, made_heads.llama_fields(), tensors)
    model = tiny_model()
    return folder, FirstReference(tensors, embedding(), model.final_norm, target_head())


@pytest.mark.parametrize("make", [eagle3, eagle1])
def test_drafts_are_those_of_the_equations_whatever_the_head_went_through(
    make, tmp_path, monkeypatch
):
    requests, settings = hard_life(monkeypatch)
    run = checked_run(*make(tmp_path), requests, **settings)
    drafter = run.executor.drafter
    assert isinstance(drafter, CheckedEagle)
    assert drafter.checked > 200 and drafter.wrong < 1e-4
    assert run.scheduler.stats.preemptions > 0 and run.scheduler.stats.prefix_hit_tokens > 0
    assert (run.accepted > 0).any() and (run.accepted < run.drafted).any()
    assert run.outputs == run_engine(requests, tiny_model()).outputs


class _WrongPosition(CheckedEagle):
    """Broken: it reads the state of the position itself, not of the one before."""

    def read_states(self, states: StepStates) -> None:
        hidden = states.hidden.roll(-1, 0) if len(states.hidden) > 1 else states.hidden
        super().read_states(states._replace(hidden=hidden))


class _Stale(CheckedEagle):
    """Broken: it keeps KV that it wrote while it guessed, and the state that it guessed with."""

    def read_states(self, states: StepStates) -> None:
        if states.lens.max() > 4 or self.kv_len[states.slots].min() == 0:
            super().read_states(states)
        self.kv_len[states.slots] = states.starts + states.lens


class _ForgetsBlocks(CheckedEagle):
    """Broken: after a prefix hit or a preemption it continues from the state of the slot's last
    sequence."""

    def admit(self, admission: NewSequence) -> None:
        last = self._states.of_slot
        before = last[admission.slot].clone()
        super().admit(admission)
        last[admission.slot] = before


@pytest.mark.parametrize("broken", [_WrongPosition, _Stale, _ForgetsBlocks])
def test_the_equations_expose_a_drafter_that_reads_the_wrong_states(broken, tmp_path, monkeypatch):
    """Broken drafters do not change the text either."""
    requests, settings = hard_life(monkeypatch)
    run = checked_run(*eagle3(tmp_path), requests, kind_of_drafter=broken, **settings)
    assert run.executor.drafter.wrong > 1e-2
    assert run.outputs == run_engine(requests, tiny_model()).outputs


class _Watched(EagleDrafter):
    """A drafter that records its proposals."""

    def __init__(self, head: EagleHead) -> None:
        super().__init__(head)
        self.proposed: list[tuple[list[list[int]], list[int]]] = []

    def propose(self, rows: DraftRows) -> Proposal:
        proposal = super().propose(rows)
        counts = proposal.num_drafted.tolist()
        drafts = [row[:n] for row, n in zip(proposal.tokens.tolist(), counts, strict=True)]
        self.proposed.append((drafts, counts))
        return proposal


class _OneByOne(_Watched):
    def _is_greedy(self, rows: DraftRows) -> bool:
        return False


@pytest.mark.parametrize(
    ("make", "flags"), [(eagle3, {}), (eagle3, {"norm_output": True}), (eagle1, {})]
)
def test_drafts_of_one_call_are_those_of_a_pass_each(make, flags, tmp_path, monkeypatch):
    proposals = []
    for kind in (_Watched, _OneByOne):
        requests, settings = hard_life(monkeypatch)
        target = tiny_model()
        head = load(make(tmp_path, **flags)[0], target)
        drafter = kind(head)
        run_engine(requests, target, head, drafting=drafter, **settings)
        proposals.append(drafter.proposed)
    assert proposals[0] == proposals[1]
    assert max(n for _, counts in proposals[0] for n in counts) == 4


def test_drafts_end_where_their_numbers_break(tmp_path):
    """A state is not finite: its row has no drafts, the other row has all."""
    target = tiny_model()
    head = load(eagle3(tmp_path)[0], target)
    drafter = EagleDrafter(head)
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


@pytest.mark.parametrize("params", [{"seed": 9}, {"top_k": 12, "min_p": 0.01, "seed": 8}])
def test_seeded_text_does_not_depend_on_the_head(params, tmp_path, monkeypatch):
    coupled = {"temperature": 0.9, "verification": "coupled", **params}
    requests, settings = hard_life(monkeypatch, **coupled)
    target = tiny_model()
    head = load(eagle3(tmp_path)[0], target)
    run = run_engine(requests, target, head, drafting=EagleDrafter(head), depth=1, **settings)
    assert (run.accepted > 0).any() and (run.accepted < run.drafted).any()
    assert run.outputs == run_engine(requests, tiny_model()).outputs


def test_the_law_of_sampled_text_is_that_without_a_head(tmp_path):
    """A head whose q is not what it drew from fails the test."""
    z = {}
    for kind in (EagleDrafter, _Lies):
        target = tiny_model()
        head = load(eagle3(tmp_path / kind.__name__)[0], target)
        z[kind] = law_distance(target, head, kind(head))
    assert z[EagleDrafter] < 5 < z[_Lies]


def law_distance(target: Model, head: Any, drafter: Any) -> float:
    """Compare the second and the third tokens of 2,000 sequences with a drafter and of as many
    without by a two-sample chi-square, and return the larger z. The chance of more than 5 without
    cause is below 1e-6."""
    run = _sampled(target, head, drafter, 1000)
    assert (run.accepted > 0).any()
    pairs = zip(_token_counts(run), _counts_without_drafts(), strict=True)
    return max(two_samples_z(*pair) for pair in pairs)


def _sampled(target: Model, head: Any, drafter: Any, first_seed: int) -> Run:
    asks = {"temperature": 1.0, "max_tokens": 4, "verification": "rejection"}
    requests = [make_request(f"r{i}", [5, 9, 11], seed=first_seed + i, **asks) for i in range(2000)]
    return run_engine(
        requests,
        target,
        head,
        drafting=drafter,
        lookahead="off" if drafter is None else "fixed:2",
        max_num_seqs=64,
        check=False,
        arrivals=[i // 64 for i in range(2000)],
    )


@functools.cache
def _counts_without_drafts() -> list[np.ndarray]:
    """Return counts that do not depend on how drafts are verified."""
    return _token_counts(_sampled(tiny_model(), None, None, "rejection", 1000 + 10**6))


def _token_counts(run: Run) -> list[np.ndarray]:
    tokens = np.array(list(run.outputs.values()))
    return [np.bincount(tokens[:, at], minlength=VOCAB) for at in (1, 2)]


class _Lies(EagleDrafter):
    def propose(self, rows: DraftRows) -> Proposal:
        proposal = super().propose(rows)
        assert proposal.probs is not None
        flat = torch.full_like(proposal.probs, 1 / VOCAB)
        return proposal._replace(probs=flat)


def two_samples_z(a: np.ndarray, b: np.ndarray) -> float:
    """Return z for samples of equal size: (a - b)^2 / (a + b) is chi-square with one degree less
    than there are cells."""
    seen = a + b >= 10
    a, b = np.append(a[seen], a[~seen].sum()), np.append(b[seen], b[~seen].sum())
    both = np.maximum(a + b, 1)
    statistic, df = float(((a - b) ** 2 / both).sum()), len(a) - 1
    return ((statistic / df) ** (1 / 3) - (1 - 2 / (9 * df))) / (2 / (9 * df)) ** 0.5


def test_what_is_kept_changes_once_no_thread_is_in_the_pass_before():
    """Otherwise a late thread takes loop bounds of the next pass, and reads freed memory."""
    command = [sys.executable, "-m", "tests.runtime.late_threads"]
    assert subprocess.run(command, cwd=Path(__file__).parents[2]).returncode == 0


def test_the_scheduler_sees_a_head_that_never_lags(tmp_path):
    target = tiny_model()
    head = load(eagle3(tmp_path)[0], target)
    lags = []

    class Watched(RecordingExecutor):
        def run(self, plan: StepPlan) -> StepResult:
            lags.append(int(plan.catch_up.max(initial=0)))
            return super().run(plan)

    requests = [make_request(f"r{i}", p) for i, p in enumerate(prompts(4))]
    run_engine(
        requests,
        target,
        head,
        drafting=EagleDrafter(head),
        lookahead="fixed:3",
        kind=Watched,
    )
    assert len(lags) > 10 and not any(lags)
