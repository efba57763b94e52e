"""Chains of drafters in an engine: its output, and the recorded validity of the draft's KV."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from cbatch.core.request.request import Request
from cbatch.core.scheduler import update_from_output
from cbatch.core.scheduler.plan import StepPlan, StepResult
from cbatch.core.speculation.policies import FixedPolicy
from cbatch.runtime.drafting.chain import ChainDrafter
from cbatch.runtime.drafting.lookup import LookupDrafter
from cbatch.runtime.drafting.ngram import NgramLookup
from cbatch.runtime.drafting.suffix import SuffixLookup
from tests.runtime.engines import RecordingExecutor, Run, make_request, run_engine, tiny_model
from tests.runtime.test_drafter import CheckedDraftModel

VOCAB, NOISE = 12, 0.08
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


def requests(params: dict[str, Any]) -> tuple[list[Request], Run]:
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
    chained, plain = requests(params)
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


def test_blocks_taken_for_draft_valid_though_a_lookup_drafted_them_are_caught(monkeypatch):
    """The same run, ignoring the executor's report of the draft's KV: the model's next drafts are
    wrong."""
    advance = update_from_output.advance_draft_kv

    def credulous(table: Any, step: Any) -> None:
        step.result = structs.replace(step.result, draft_kv_lens=None)
        advance(table, step)

    monkeypatch.setattr(update_from_output, "advance_draft_kv", credulous)
    chained, _ = requests(GREEDY)
    arrivals = [0] * len(CHAINS) + [RETURNS_AT] * len(CHAINS)
    with pytest.raises(AssertionError):
        run_chains(chained, arrivals=arrivals)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("lookahead", ["ema:4", "adaptive:4"])
def test_lookups_without_a_model(lookahead, depth):
    chained, plain = requests(GREEDY)
    chained = [structs.replace(r, params=structs.replace(r.params, drafter=None)) for r in chained]
    settings = {"drafter": ("ngram", "suffix"), "depth": depth, "num_blocks": 60}
    run = run_chains(chained, model=False, lookahead=lookahead, **settings)
    assert run.outputs == plain.outputs
    assert run.executor.kv_lens == [None] * len(run.executor.kv_lens)
    assert (run.accepted > 1).any() and run.scheduler.stats.preemptions > 0
