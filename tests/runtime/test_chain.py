"""A chain of drafters: which drafter gets a row, what it reports, which positions the draft model
catches up with, and the output of an engine with chains."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import Request
from cbatch.core.scheduler.plan import NewSequence, StepPlan, StepResult
from cbatch.core.speculation.policies import FixedPolicy
from cbatch.runtime.cpu.drafters.draft_model import DraftModel
from cbatch.runtime.drafting import chain as chain_module
from cbatch.runtime.drafting.chain import ChainDrafter
from cbatch.runtime.drafting.contract import DraftRows, Proposal
from cbatch.runtime.drafting.lookup import Lookup, LookupDrafter
from cbatch.runtime.drafting.lookups import NgramLookup, SuffixLookup
from cbatch.runtime.input_batch import InputBatch
from cbatch.runtime.model.arrays import I64
from tests.runtime.engines import (
    RecordingExecutor,
    Run,
    admission,
    make_request,
    run_engine,
    tiny_model,
)
from tests.runtime.test_drafter import CheckedDraftModel
from tests.runtime.test_statistics import FILTERS, Z_BOUND, sample, z_against

VOCAB, NOISE = 12, 0.08


class Scripted(Lookup):
    """A lookup that always, or never, has the same guess."""

    def __init__(self, token: int | None) -> None:
        self.token = token

    def guess(self, text: I64, depth: int) -> list[int]:
        return [] if self.token is None else [self.token] * depth


class ScriptedModel(DraftModel):
    """A draft model without a model: it drafts token 3 and reports random q, as sampled rows
    get."""

    def __init__(self, context_tokens: int = 100, broken_slots: tuple[int, ...] = ()) -> None:
        self.context_tokens, self.broken_slots = context_tokens, broken_slots
        self.asked: list[DraftRows] = []
        self.q: list[torch.Tensor] = []

    def bind(self, table: InputBatch, num_blocks: int) -> None:
        self.table, self.kv_len = table, np.zeros(table.max_num_seqs, dtype=np.int64)

    def propose(self, rows: DraftRows) -> Proposal:
        self.asked.append(rows)
        broken = np.isin(rows.slots, self.broken_slots)
        drafted = rows.num_drafts * ~broken
        tokens = np.full((len(drafted), int(drafted.max(initial=0))), 3, dtype=np.int64)
        num_q = int(drafted[self.table.rejects[rows.slots]].sum())
        self.q.append(torch.rand((num_q, VOCAB)))
        return Proposal(tokens, drafted, self.q[-1] if num_q else None, broken)


def scripted(model: ScriptedModel | None = None, **chains: Any) -> tuple[ChainDrafter, InputBatch]:
    """Return a chain with slots 0, 1, ... of the given chains and parameters; `ngram` finds
    nothing, `suffix` guesses 9."""
    lookups = {
        "ngram": LookupDrafter(Scripted(None)),
        "suffix": LookupDrafter(Scripted(9)),
    }
    chain = ChainDrafter(model=model, lookups=lookups, default=("ngram", "suffix"))
    table = InputBatch(8, 4, VOCAB)
    chain.bind(table, 16)
    for slot, (names, temperature) in enumerate(chains["slots"]):
        admission = admit(slot, names, temperature)
        table.admit(admission)
        chain.admit(admission)
    return chain, table


def admit(slot: int, names: tuple[str, ...] | None, temperature: float = 0.0) -> NewSequence:
    return admission(slot, range(5), max_total=200, drafter=names, temperature=temperature)


def ask(chain: ChainDrafter, table: InputBatch, depths: list[int], catch_up: int = 4) -> Proposal:
    slots = np.arange(len(depths), dtype=np.int32)
    owed = np.full(len(depths), catch_up, dtype=np.int32)
    return chain.propose(DraftRows(slots, table.num_tokens[slots], np.array(depths), owed))


def drafts(proposal: Proposal) -> list[list[int]]:
    rows = zip(proposal.tokens, proposal.num_drafted, strict=True)
    return [row[:n].tolist() for row, n in rows]


def test_a_row_goes_to_the_first_of_its_chain_that_has_something():
    model = ScriptedModel(broken_slots=(5,))
    slots = [
        (None, 0.0),
        (("ngram", "model"), 0.0),
        (("model", "suffix"), 0.0),
        (("ngram",), 0.0),
        (("suffix", "model"), 0.0),
        (("model", "suffix"), 0.0),  # a broken draft is reported, and the row has none
    ]
    chain, table = scripted(model, slots=slots)
    proposal = ask(chain, table, [2, 1, 3, 2, 1, 2])
    assert drafts(proposal) == [[9, 9], [3], [3, 3, 3], [], [9], []]
    assert proposal.non_finite.tolist() == [False] * 5 + [True] and proposal.probs is None
    assert sum(len(rows.slots) for rows in model.asked) == 3
    chain.release(1)
    assert drafts(ask(chain, table, [2, 1]))[1] == []
    chain.reset()
    chain.admit(admit(0, ("suffix",)))
    assert drafts(ask(chain, table, [2])) == [[9, 9]]


def test_a_model_that_is_not_loaded_or_past_its_context_is_passed_over():
    slots = [(("model", "suffix"), 0.0), (("model",), 0.0)]
    assert drafts(ask(*scripted(slots=slots), [1, 1])) == [[9], []]
    assert drafts(ask(*scripted(ScriptedModel(context_tokens=4), slots=slots), [1, 1])) == [[9], []]


def test_names_that_are_not_loaded_are_refused_by_name():
    chain, _ = scripted(slots=[])
    chain.check(("suffix", "ngram"))
    with pytest.raises(FieldError, match=r"drafter: 'model' is not loaded; use: ngram, suf"):
        chain.check(("ngram", "model"))
    with pytest.raises(FieldError, match="drafter"):
        ChainDrafter(lookups={}, default=("ngram",))


def test_probabilities_are_the_models_where_it_drew_and_one_hot_elsewhere():
    """Only rejection rows have probabilities; greedy and coupled rows have none."""
    model = ScriptedModel()
    slots = [
        (("suffix",), 1.0),
        (("model",), 1.0),
        (("ngram", "suffix"), 1.0),
        (("suffix",), 0.0),
        (("ngram", "model"), 1.0),
        (("model",), 0.0),
        (("suffix",), 1.0),
    ]
    chain, table = scripted(model, slots=slots)
    proposal = ask(chain, table, [2, 2, 1, 2, 1, 3, 0])
    assert drafts(proposal) == [[9, 9], [3, 3], [9], [9, 9], [3], [3, 3, 3], []]
    one_hot = torch.nn.functional.one_hot(torch.tensor(9), VOCAB).float()
    (drawn,) = model.q  # one call, whichever drafter was called before
    expected = torch.stack([one_hot, one_hot, *drawn[:2], one_hot, *drawn[2:]])
    assert torch.equal(proposal.probs, expected)
    alone, table = scripted(ScriptedModel(), slots=[(("model",), 1.0), (("suffix",), 0.0)])
    assert ask(alone, table, [2, 2]).probs is alone.model.q[-1]
    certain, table = scripted(ScriptedModel(), slots=[(("suffix",), 1.0)])
    assert ask(certain, table, [2]).probs is None


def test_the_model_makes_up_for_others_at_once_or_in_slices():
    model = ScriptedModel(context_tokens=2 * chain_module.CATCH_UP_TOKENS)
    chain, table = scripted(model, slots=[(("model", "suffix"), 0.0), (("model",), 0.0)])
    table.num_tokens[:2] = [chain_module.CATCH_UP_TOKENS + 20, 60]
    assert drafts(ask(chain, table, [1, 2], catch_up=1)) == [[9], [3, 3]]
    (rows,) = model.asked
    assert rows.num_drafts.tolist() == [0, 2]
    assert rows.catch_up.tolist() == [chain_module.CATCH_UP_TOKENS, 59]
    model.kv_len[0] = chain_module.CATCH_UP_TOKENS
    assert drafts(ask(chain, table, [1, 2], catch_up=1)) == [[3], [3, 3]]
    ask(chain, table, [0, 0], catch_up=7)  # a planned slice
    assert model.asked[-1].catch_up.tolist() == [7, 7]


def test_the_law_of_sampled_tokens_is_kept_by_a_chain(monkeypatch):
    """Rows drafted by model and lookup share steps; z bounds as in test_statistics."""
    mixed: list[bool] = []

    class Watched(ChainDrafter):
        def propose(self, rows: DraftRows) -> Proposal:
            proposal = super().propose(rows)
            if proposal.probs is not None:
                one_hot = (proposal.probs == 1).any(dim=1)
                mixed.append(bool(one_hot.any() and not one_hot.all()))
            return proposal

    def make(draft: Any) -> ChainDrafter:
        lookups = {"ngram": LookupDrafter(NgramLookup(1, 2))}
        return Watched(model=DraftModel(draft), lookups=lookups, default=("ngram", "model"))

    monkeypatch.setattr("tests.runtime.engines.DraftModel", make)
    run = sample(lookahead="fixed:3")
    assert abs(z_against(run, FILTERS[0])) < Z_BOUND
    assert sum(mixed) > 10 and run.acceptance > 0.1

    merge = chain_module.merged_probs
    monkeypatch.setattr(chain_module, "merged_probs", lambda *args: merge(*args).flip(0))
    assert z_against(sample(lookahead="fixed:3"), FILTERS[0]) > 1.5 * Z_BOUND


# --- in an engine

CHAINS = (
    ("suffix", "model"),
    ("ngram",),
    ("ngram", "model"),
    ("model",),
    ("suffix",),
    ("model", "suffix", "ngram"),
)
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 50}
COUPLED = GREEDY | {"temperature": 0.4, "verification": "coupled"}
# Step in which the second half enters, whose prompts continue outputs of the first half.
RETURNS_AT = 120


class WatchedExecutor(RecordingExecutor):
    """An executor that also records lengths of the draft's KV, and prefix hits."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.kv_lens: list[np.ndarray | None] = []
        self.hits: list[tuple[int, int]] = []  # target and draft positions of an admission

    def run(self, plan: StepPlan) -> StepResult:
        self.hits += [(a.kv_len_tokens, a.draft_kv_len_tokens) for a in plan.deltas.new_sequences]
        result = super().run(plan)
        self.kv_lens.append(result.draft_kv_lens)
        return result


@functools.cache
def target() -> Any:
    return tiny_model(vocab_size=VOCAB, dtype=torch.bfloat16)


def chained_requests(params: dict[str, Any]) -> tuple[list[Request], Run]:
    """Return one request of each chain, requests of the model that continue their outputs, and the
    plain run of all."""
    rng = np.random.default_rng(6)
    first = [
        make_request(f"r{i}", rng.integers(0, VOCAB, 9 + 5 * i).tolist(), drafter=c, **params)
        for i, c in enumerate(CHAINS)
    ]
    said = run_engine(first, target()).outputs
    again = [
        make_request(f"again {r.request_id}", (*r.prompt, *said[r.request_id]), **params)
        for r in first
    ]
    again = [
        structs.replace(r, params=structs.replace(r.params, drafter=("model",))) for r in again
    ]
    return first + again, run_engine(first + again, target())


def run_chains(requests: list[Request], *, model: bool = True, **settings: Any) -> Run:
    drafts = [tiny_model(vocab_size=VOCAB, noise=NOISE, dtype=torch.bfloat16) for _ in range(2)]
    default = settings.setdefault("drafter", ("suffix", "model"))
    chain = ChainDrafter(
        model=CheckedDraftModel(*drafts) if model else None,
        lookups={"ngram": LookupDrafter(NgramLookup()), "suffix": LookupDrafter(SuffixLookup())},
        default=default,
    )
    settings = {
        "lookahead": "fixed:3",
        "drafting": chain,
        "kind": WatchedExecutor,
    } | settings
    return run_engine(requests, target(), drafts[0] if model else None, **settings)


def pause_drafting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make k 3, then 0 for a while, then 3."""
    calls = 0

    def choose(policy: Any, step: Any) -> np.ndarray:
        nonlocal calls
        calls += 1
        return step.max_drafts * (calls % 24 < 8)

    monkeypatch.setattr(FixedPolicy, "choose", choose)


@pytest.mark.parametrize("params", [GREEDY, COUPLED], ids=["greedy", "coupled"])
@pytest.mark.parametrize(("depth", "num_blocks"), [(0, 256), (1, 256), (0, 44)])
def test_output_is_that_of_plain_decoding(params, depth, num_blocks, monkeypatch):
    """Every chain runs at once, with k 3 -> 0 -> 3, preemptions, and prefix hits on blocks that
    lookups drafted. The model's drafts are always compared with those of a cold one."""
    pause_drafting(monkeypatch)
    chained, plain = chained_requests(params)
    arrivals = [0] * len(CHAINS) + [RETURNS_AT] * len(CHAINS)
    run = run_chains(chained, depth=depth, num_blocks=num_blocks, arrivals=arrivals)
    assert run.outputs == plain.outputs
    executor = run.executor
    assert isinstance(executor, WatchedExecutor)
    stats = run.scheduler.stats
    assert (stats.preemptions > 0) == (num_blocks < 256)
    if num_blocks == 256:
        part = [kv > draft for kv, draft in executor.hits if kv]
        assert len(part) >= 4 and any(part) and not all(part)
    assert any(lens is not None for lens in executor.kv_lens)
    for request in chained:
        assert any(d for _, d, _ in executor.row_of_request[request.request_id])
    accepted, drafted = run.accepted, run.drafted
    assert (accepted < drafted).any() and (accepted[drafted == 3] == 3).any() and 0 in drafted


@pytest.mark.parametrize("lookahead, depth", [("ema:4", 1), ("adaptive:4", 0)])
def test_lookups_without_a_model(lookahead, depth):
    chained, plain = chained_requests(GREEDY)
    chained = [structs.replace(r, params=structs.replace(r.params, drafter=None)) for r in chained]
    settings = {"drafter": ("ngram", "suffix"), "depth": depth, "num_blocks": 60}
    run = run_chains(chained, model=False, lookahead=lookahead, **settings)
    assert run.outputs == plain.outputs
    assert run.executor.kv_lens == [None] * len(run.executor.kv_lens)
    assert (run.accepted > 1).any() and run.scheduler.stats.preemptions > 0
