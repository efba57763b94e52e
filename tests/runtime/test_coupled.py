"""Coupled verification: faults would be noticed, and which requests get it.

test_invariance checks that coupled tokens depend on the request alone; its plain run is the base of
these tests.
"""

from __future__ import annotations

from typing import Any

import torch
from msgspec import structs

from cbatch.runtime.cpu.drafters.draft_model import DraftModel
from cbatch.runtime.sampling import noise
from tests.runtime.engines import Run, run_engine
from tests.runtime.pairs import tiny_model
from tests.runtime.test_invariance import COUPLED, NOISE, plain, requests, run

SAMPLED = [f"r{i}" for i in range(7)]  # r7 is greedy


def speculated(batch: Any, lookahead: str = "fixed:3", **settings: Any) -> Run:
    draft = tiny_model(noise=NOISE)
    return run_engine(batch, tiny_model(), draft, lookahead=lookahead, **settings)


def test_rejection_has_the_power_to_differ():
    """Tokens of the same requests in rejection mode do depend on which drafts were offered."""
    rejected = requests("rejection")
    off, outputs = run_engine(rejected, tiny_model()).outputs, speculated(rejected).outputs
    assert all(outputs[name] != off[name] for name in SAMPLED)
    assert outputs["r7"] == off["r7"]
    # Another noise stream.
    assert all(off[name] != plain("coupled").outputs[name] for name in SAMPLED)


def test_noise_of_the_batch_row_is_noticed(monkeypatch):
    """Broken: the stream is keyed by row instead of position, and a batch differs from the base."""

    def by_row(real: Any) -> Any:
        def words(keys: Any, positions: Any, *rest: Any) -> Any:
            return real(keys, torch.arange(len(positions)) + positions[:1], *rest)

        return words

    base = plain("coupled")
    for name in ("words_of", "token_words"):
        monkeypatch.setattr(noise, name, by_row(getattr(noise, name)))
    assert run("coupled", lookahead="fixed:3").outputs != base.outputs


class _Streams:
    """`cbatch.runtime.sampling.noise` with the original number of the coupled stream."""

    COUPLED = 4

    def __getattr__(self, name: str) -> Any:
        return getattr(noise, name)


def test_uncoupled_drafts_keep_the_tokens_but_are_accepted_less(monkeypatch):
    """Broken: drafts are drawn from another stream. The target decides alone, so only speed is
    lost."""
    coupled = run("coupled", lookahead="fixed:3")
    monkeypatch.setattr("cbatch.runtime.cpu.drafters.draft_model.noise.COUPLED", noise.DRAFT)
    # Another module reads the target's stream under the same name: restore its number there.
    monkeypatch.setattr("cbatch.runtime.sampling.rejection_sampler.noise", _Streams())
    uncoupled = run("coupled", lookahead="fixed:3")
    assert uncoupled.outputs == coupled.outputs
    assert uncoupled.acceptance < 0.8 * coupled.acceptance


def test_modes_share_a_step():
    """Greedy, coupled and rejection rows share batches, each as if it were alone in its mode."""
    modes = requests("rejection"), requests("coupled")
    mixed = [modes[i % 3 != 0][i] for i in range(len(COUPLED))]
    # Enough budget for all drafts.
    settings = {"lookahead": "fixed:4", "max_num_batched_tokens": 1024}
    mixed_run = speculated(mixed, **settings)
    assert (mixed_run.accepted >= 2).any() and (mixed_run.accepted < mixed_run.drafted).any()
    for i in (0, 3, 5, 7):
        assert mixed_run.outputs[f"r{i}"] == speculated([mixed[i]], **settings).outputs[f"r{i}"]


def test_a_seed_of_the_caller_couples(monkeypatch):
    """With `auto` a seed of the caller couples; other requests are verified by rejection."""
    rejected: set[bool] = set()
    real = DraftModel.propose

    def watch(self: DraftModel, rows: Any) -> Any:
        rejected.update(self.table.rejects[rows.slots].tolist())
        return real(self, rows)

    monkeypatch.setattr(DraftModel, "propose", watch)
    base = requests("coupled")[0]
    for seed in (None, base.seed):
        params = structs.replace(base.params, verification="auto", seed=seed)
        seeded = speculated([structs.replace(base, params=params)])
        assert (seeded.outputs["r0"] == plain("coupled").outputs["r0"]) == (seed is not None)
        assert rejected == {seed is None}
        rejected.clear()
