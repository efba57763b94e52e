"""Coupled verification: what would be noticed if it went wrong, and who gets it.

That coupled tokens depend on the request alone is in test_invariance, with the plain run that these
tests compare with.
"""

from __future__ import annotations

from typing import Any

import torch
from msgspec import structs

from cbatch.runtime.cpu.drafters.draft_model import DraftModel
from tests.runtime.engines import Run, run_engine
from tests.runtime.pairs import tiny_model
from tests.runtime.test_invariance import COUPLED, NOISE, plain, requests, run
from triton_kernels.noise import host as noise

SAMPLED = [f"r{i}" for i in range(7)]  # r7 is greedy


def speculated(asked: Any, lookahead: str = "fixed:3", **settings: Any) -> Run:
    draft = tiny_model(noise=NOISE)
    return run_engine(asked, tiny_model(), draft, lookahead=lookahead, **settings)


def test_rejection_has_the_power_to_differ():
    """The same requests in rejection mode: their tokens do depend on which drafts were offered."""
    ours = requests("rejection")
    off, found = run_engine(ours, tiny_model()).outputs, speculated(ours).outputs
    assert all(found[name] != off[name] for name in SAMPLED)
    assert found["r7"] == off["r7"]
    assert all(off[name] != plain("coupled").outputs[name] for name in SAMPLED)  # another stream


def test_noise_of_the_batch_row_is_noticed(monkeypatch):
    """The stream keyed by row instead of position: the base no longer agrees with a batch."""

    def by_row(real: Any) -> Any:
        def words(keys: Any, positions: Any, *rest: Any) -> Any:
            return real(keys, torch.arange(len(positions)) + positions[:1], *rest)

        return words

    base = plain("coupled")
    for name in ("words_of", "token_words"):
        monkeypatch.setattr(noise, name, by_row(getattr(noise, name)))
    assert run("coupled", lookahead="fixed:3").outputs != base.outputs


class _Streams:
    """`triton_kernels.noise.host` with the right number of the coupled stream."""

    COUPLED = 4

    def __getattr__(self, name: str) -> Any:
        return getattr(noise, name)


def test_uncoupled_drafts_keep_the_tokens_but_are_accepted_less(monkeypatch):
    """Drafts drawn from another stream: the target decides alone, so nothing but speed is lost."""
    coupled = run("coupled", lookahead="fixed:3")
    monkeypatch.setattr("cbatch.runtime.cpu.drafters.draft_model.noise.COUPLED", noise.DRAFT)
    # The target's stream is read in another module under the same name: give it back its number.
    monkeypatch.setattr("cbatch.runtime.sampling.rejection_sampler.noise", _Streams())
    found = run("coupled", lookahead="fixed:3")
    assert found.outputs == coupled.outputs
    assert found.acceptance < 0.8 * coupled.acceptance


def test_modes_share_a_step():
    """Greedy, coupled and rejection rows in one batch, each as if it were alone in its mode."""
    modes = requests("rejection"), requests("coupled")
    mixed = [modes[i % 3 != 0][i] for i in range(len(COUPLED))]
    settings = {"lookahead": "fixed:4", "max_num_batched_tokens": 1024}  # never short of drafts
    found = speculated(mixed, **settings)
    assert (found.accepted >= 2).any() and (found.accepted < found.drafted).any()
    for i in (0, 3, 5, 7):
        assert found.outputs[f"r{i}"] == speculated([mixed[i]], **settings).outputs[f"r{i}"]


def test_a_seed_of_the_caller_couples(monkeypatch):
    """`auto`: the params of a caller with a seed carry it; others are verified by rejection."""
    rejected: set[bool] = set()
    real = DraftModel.propose

    def watch(self: DraftModel, rows: Any) -> Any:
        rejected.update(self.table.rejects[rows.slots].tolist())
        return real(self, rows)

    monkeypatch.setattr(DraftModel, "propose", watch)
    base = requests("coupled")[0]
    for seed in (None, base.seed):
        params = structs.replace(base.params, verification="auto", seed=seed)
        found = speculated([structs.replace(base, params=params)])
        assert (found.outputs["r0"] == plain("coupled").outputs["r0"]) == (seed is not None)
        assert rejected == {seed is None}
        rejected.clear()
