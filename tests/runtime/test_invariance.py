"""Tokens do not depend on how the engine runs: greedy ones have the same bits of logits at every
position, coupled ones the same noise.

Each variant runs the same requests as one plain run: no speculation, one sequence at a time, whole
prompts, no cache. It asserts that its variation did happen.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from cbatch.core.prices.cost_profile import CostProfile
from cbatch.core.request.request import Request
from cbatch.core.scheduler.plan import StepPlan, StepResult
from cbatch.runtime.compiled.race import race_winners
from cbatch.runtime.sampling import noise, rejection_sampler
from tests.runtime.engines import VOCAB, PricedExecutor, Run, make_request, run_engine, tiny_model

NOISE = 0.08  # moves the draft's weights so far that about half of its tokens are accepted
COUPLED: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.3, "min_p": 0.05, "choice": 1},
    {"temperature": 0.9, "repetition_penalty": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "presence_penalty": 0.8, "frequency_penalty": 0.4, "top_k": 30},
    {"temperature": 0.7, "logit_bias": {3: 1.5}, "banned_token_ids": (4, 5), "min_tokens": 9},
    {"temperature": 1.1, "allowed_token_ids": tuple(range(4, 60, 3))},
    {"temperature": 0.0, "repetition_penalty": 1.2},
)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "coupled": torch.float32}


@functools.cache
def requests(verification: str | None = None) -> tuple[Request, ...]:
    """Return greedy requests, or those of `COUPLED`. Prompts have 9 to 60 tokens; the second four
    repeat the beginning of the first four."""
    rng = np.random.default_rng(4)
    first = [rng.integers(0, VOCAB, n).tolist() for n in (9, 26, 40, 60)]
    second = [prompt[:-3] + rng.integers(0, VOCAB, 5).tolist() for prompt in first]
    params: list[dict[str, Any]] = [{}] * len(COUPLED)
    if verification is not None:
        params = [p | {"verification": verification} for p in COUPLED]
    return tuple(
        make_request(f"r{i}", prompt, max_tokens=26 + i, seed=2**40 + i, **params[i])
        for i, prompt in enumerate(first + second)
    )


class UnsteadyExecutor(PricedExecutor):
    """An executor whose every third step takes half as long again."""

    def run(self, plan: StepPlan) -> StepResult:
        result = super().run(plan)
        slower = 1.5 if len(self.chunk_steps) % 3 == 0 else 1.0
        return structs.replace(result, target_s=slower * result.target_s)


def run(kind: str, /, **settings: Any) -> Run:
    moved, dtype = settings.pop("noise", NOISE), DTYPES[kind]
    speculates = settings.get("lookahead", "off") != "off"
    draft = tiny_model(noise=moved, dtype=dtype) if speculates else None
    requested = requests("coupled" if kind == "coupled" else None)
    return run_engine(requested, tiny_model(dtype=dtype), draft, **settings)


@functools.cache
def plain(kind: str) -> Run:
    return run(kind, max_num_seqs=1, enable_prefix_caching=False)


def assert_same(varied: Run, base: Run, *, bits: bool = True) -> None:
    assert varied.outputs == base.outputs
    if bits:
        varied_bits, base_bits = varied.executor.bits, base.executor.bits
        assert base_bits.keys() <= varied_bits.keys()
        assert [key for key in base_bits if varied_bits[key] != base_bits[key]] == []


def batch_sizes(varied: Run) -> set[int]:
    return {len(step) for step in varied.executor.drafted}


def mixed_steps(varied: Run) -> int:
    """Count steps with both decoding rows and a prompt chunk that is not the last."""
    return sum(bool(chunks and deciding) for chunks, deciding in varied.executor.chunk_steps)


def ragged(varied: Run) -> bool:
    return len(np.unique(varied.drafted)) >= 3


Happened = Callable[[Run], bool]
VARIANTS: dict[str, tuple[dict[str, Any], Happened]] = {
    "together": ({}, lambda r: max(batch_sizes(r)) == len(COUPLED)),
    "staggered": (
        {"max_num_seqs": 3, "arrivals": [0, 0, 3, 3, 8, 15, 15, 60], "lookahead": "fixed:4"},
        lambda r: {1, 2, 3} <= batch_sizes(r),
    ),
    **{
        f"k = {k}": ({"lookahead": f"fixed:{k}"}, lambda r, k=k: r.drafted.max() == k)
        for k in (1, 2, 8)
    },
    "a bad draft": ({"lookahead": "fixed:3", "noise": 0.5}, lambda r: r.acceptance < 0.4),
    "ema": ({"lookahead": "ema:6"}, ragged),
    "adaptive": ({"lookahead": "adaptive:6"}, ragged),
    "tiny chunks": (
        {"lookahead": "fixed:2", "max_num_batched_tokens": 12},
        lambda r: mixed_steps(r) >= 4,
    ),
    "chunks by price": (  # the target leaves room for 8 to 32 tokens
        {
            "lookahead": "fixed:3",
            "itl_target_s": 1.25e-2,
            "cost_profile": CostProfile(5e-3, 1e-4, draft_pass_s=3e-4),
            "kind": UnsteadyExecutor,
            "clock": itertools.count(0.0, 1e-5).__next__,  # only the made-up durations pass time
            "arrivals": [0, 0, 4, 4, 8, 8, 12, 12],
        },
        lambda r: mixed_steps(r) >= 3 and len(set(r.executor.chunk_tokens)) >= 3,
    ),
    "prefix hits": (
        {"lookahead": "fixed:3", "max_num_seqs": 4},
        lambda r: r.scheduler.stats.prefix_hit_tokens >= 60,
    ),
    "preemptions": (
        {"lookahead": "fixed:3", "num_blocks": 34, "enable_prefix_caching": False},
        lambda r: r.scheduler.stats.preemptions >= 2,
    ),
    "overlap": ({"lookahead": "fixed:3", "depth": 1}, lambda r: True),
    "everything": (
        {
            "lookahead": "ema:6",
            "depth": 1,
            "num_blocks": 40,
            "max_num_batched_tokens": 32,
            "arrivals": [0, 2, 2, 2, 9, 9, 14, 20],
        },
        lambda r: r.scheduler.stats.preemptions >= 1 and r.scheduler.stats.prefix_hit_tokens > 0,
    ),
}


def check(varied: Run, base: Run, variant: str, *, bits: bool) -> None:
    settings, happened = VARIANTS[variant]
    assert_same(varied, base, bits=bits)
    assert happened(varied)
    if "lookahead" in settings:
        drafted, accepted = varied.drafted, varied.accepted
        full = (accepted == drafted) & (drafted > 0)
        assert full.any() and (accepted < drafted).any() and (drafted == 0).any()
        assert (drafted >= 2).any() == (settings["lookahead"] != "fixed:1")


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", DTYPES)
def test_tokens_and_bits(kind: str, variant: str) -> None:
    check(run(kind, **VARIANTS[variant][0]), plain(kind), variant, bits=kind != "coupled")


def test_sampled_tokens_without_drafts() -> None:
    """In rejection mode, too, tokens depend on the request alone while no row drafts."""
    requested = requests("rejection")
    alone = run_engine(requested, tiny_model(), max_num_seqs=1, enable_prefix_caching=False)
    varied = {
        "num_blocks": 40,
        "max_num_batched_tokens": 20,
        "arrivals": [0, 0, 3, 3, 9, 15, 15, 15],
    }
    together = run_engine(requested, tiny_model(), **varied)
    assert together.outputs == alone.outputs and together.scheduler.stats.preemptions > 0


def test_a_coupled_draft_shares_the_noise_of_the_target() -> None:
    """A draft that is the target agrees at every position."""
    same = run("coupled", lookahead="fixed:3", noise=0.0)
    assert same.acceptance == 1 and same.outputs == plain("coupled").outputs


def test_noise_of_the_batch_row_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: the stream is keyed by row instead of position, and a batch differs from the base."""

    def by_row(real: Any) -> Any:
        return lambda keys, at, *rest: real(keys, torch.arange(len(at)) + at[:1], *rest)

    def raced(probabilities: Any, places: Any) -> Any:
        at = places[:1, 3] + torch.arange(len(places))
        moved = torch.cat([places[:, :3], at[:, None], places[:, 4:]], dim=1)
        return race_winners(probabilities, moved)

    base = plain("coupled")
    monkeypatch.setattr(rejection_sampler, "race_winners", raced)
    for name in ("words_of", "token_words"):
        monkeypatch.setattr(noise, name, by_row(getattr(noise, name)))
    assert run("coupled", lookahead="fixed:3").outputs != base.outputs


def test_modes_share_a_step() -> None:
    """Greedy, coupled and rejection rows share batches, each as if it were alone in its mode."""
    modes = requests("rejection"), requests("coupled")
    mixed = [modes[i % 3 != 0][i] for i in range(len(COUPLED))]
    models = tiny_model(), tiny_model(noise=NOISE)
    # Enough budget for all drafts.
    settings = {"lookahead": "fixed:4", "max_num_batched_tokens": 1024}
    together = run_engine(mixed, *models, **settings)
    assert (together.accepted >= 2).any() and (together.accepted < together.drafted).any()
    for i in (0, 3, 5, 7):
        assert (
            together.outputs[f"r{i}"]
            == run_engine([mixed[i]], *models, **settings).outputs[f"r{i}"]
        )
    # Only tokens of rejection rows depend on drafts (r7 is greedy).
    for i in range(8):
        same = together.outputs[f"r{i}"] == plain("coupled").outputs[f"r{i}"]
        assert same == (i % 3 != 0)


def test_a_seed_of_the_caller_couples() -> None:
    """With `auto` a seed of the caller couples; other requests are verified by rejection."""
    base = requests("coupled")[0]
    for seed in (None, base.seed):
        params = structs.replace(base.params, verification="auto", seed=seed)
        seeded = structs.replace(base, params=params)
        outputs = run_engine(
            [seeded], tiny_model(), tiny_model(noise=NOISE), lookahead="fixed:3"
        ).outputs
        assert (outputs["r0"] == plain("coupled").outputs["r0"]) == (seed is not None)


def test_a_wrong_bit_is_noticed() -> None:
    """The comparison has power: the bits of another model's run differ."""
    other = run_engine(
        requests(), tiny_model(noise=1e-4), max_num_seqs=1, enable_prefix_caching=False
    )
    with pytest.raises(AssertionError):
        assert_same(other, plain("fp32"))
