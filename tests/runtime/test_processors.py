"""Shaping of logits: each processor against its definition, and through the engine by position."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cbatch.core.request import SamplingParams
from cbatch.runtime import processors
from cbatch.runtime.processors import Chain, Penalties, processors_of
from tests.runtime.engines import Run, make_request, run_engine
from tests.runtime.pairs import VOCAB, tiny_model
from tests.runtime.reference import next_logits

NOISE = 0.06
SMALL = 12
STOPS = (0, 5, 900)  # the last is beyond the vocabulary, as the EOS id of a model may be


def slow_shape(
    logits: np.ndarray, params: SamplingParams, stops: Any, prompt: list[int], output: list[int]
) -> np.ndarray:
    """The definition, id by id, in float64."""
    used, counts = set(prompt) | set(output), Counter(output)
    shaped = []
    for token, logit in enumerate(logits.tolist()):
        allowed = params.allowed_token_ids is None or token in params.allowed_token_ids
        early = token in stops and len(output) < params.min_tokens
        if not allowed or token in params.banned_token_ids or early:
            shaped.append(-np.inf)
            continue
        logit += params.logit_bias.get(token, 0.0)
        if token in used:
            penalty = params.repetition_penalty
            logit = logit / penalty if logit > 0 else logit * penalty
        logit -= params.frequency_penalty * counts[token]
        shaped.append(logit - params.presence_penalty * (counts[token] > 0))
    return np.array(shaped)


token = st.integers(0, SMALL - 1)
params_strategy = st.builds(
    SamplingParams,
    min_tokens=st.integers(0, 4),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.6, -0.4]),
    frequency_penalty=st.sampled_from([0.0, 0.3, -0.2]),
    logit_bias=st.dictionaries(token, st.floats(-5, 5, width=32), max_size=3),
    allowed_token_ids=st.none() | st.lists(token, min_size=1, max_size=8).map(tuple),
    banned_token_ids=st.lists(token, max_size=3).map(tuple),
)
# Tokens to add, or how many to take back.
moves_strategy = st.lists(st.lists(token, min_size=1, max_size=6) | st.integers(1, 5), max_size=8)


def check_chain(params: SamplingParams, prompt: list[int], moves: list[Any]) -> None:
    chain, output = processors_of(params, STOPS, prompt, SMALL), []
    rng = np.random.default_rng(len(prompt))
    for move in [[], *moves]:
        if isinstance(move, int):
            count = min(move, len(output))
            chain.rollback(count)
            output = output[: len(output) - count]
        else:
            for each in move:
                chain.advance(each)
            output += move
        logits = rng.normal(size=SMALL).astype(np.float32) * 3
        row, fresh_row = torch.from_numpy(logits.copy()), torch.from_numpy(logits.copy())
        chain.shape(row)
        fresh = processors_of(params, STOPS, prompt, SMALL)
        for each in output:
            fresh.advance(each)
        fresh.shape(fresh_row)
        assert torch.equal(row, fresh_row), "not what a rebuilt one gives"
        want = slow_shape(logits, params, STOPS, prompt, output)
        assert np.allclose(row.numpy(), want, atol=1e-4), (params, prompt, output)


@given(params_strategy, st.lists(token, max_size=20), moves_strategy)
@settings(max_examples=120, deadline=None, derandomize=True)
def test_shaping_follows_its_definition(params, prompt, moves):
    check_chain(params, prompt, moves)


def test_penalties_grow_beyond_their_first_room():
    params = SamplingParams(repetition_penalty=1.2, frequency_penalty=0.1)
    chain = processors_of(params, (), [3], 1000)
    tokens = np.random.default_rng(0).integers(0, 1000, 700).tolist()
    for each in tokens:
        chain.advance(each)
    chain.rollback(300)
    row = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    want = slow_shape(row.double().numpy(), params, (), [3], tokens[:400])
    chain.shape(row)
    assert np.allclose(row.numpy(), want, atol=1e-4) and len(set(tokens)) > 128


class _KeepsPlaces(Penalties):
    """Counts go back, but what was first seen in a draft stays seen."""

    def rollback(self, count: int) -> None:
        for _ in range(count):
            self._count(self._place[self._output.pop()], -1)


class _NeverGoesBack(Penalties):
    def rollback(self, count: int) -> None:
        pass


@pytest.mark.parametrize("broken", [_KeepsPlaces, _NeverGoesBack])
def test_a_rollback_that_leaves_something_is_noticed(monkeypatch, broken):
    monkeypatch.setattr(processors, "Penalties", broken)
    with pytest.raises(AssertionError):
        check_chain(SamplingParams(repetition_penalty=1.5), [1, 2], [[3, 4, 5], 2, [6]])


# --- through the engine --------------------------------------------------------------------------

EVEN = tuple(range(0, VOCAB, 2))
SHAPES: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 1.4},
    {"presence_penalty": 1.2, "frequency_penalty": 0.5},
    {"frequency_penalty": -0.3, "logit_bias": {7: 2.0, 9: -3.0}},
    {"allowed_token_ids": tuple(range(5, 45)), "banned_token_ids": (6, 8, 10)},
    {"min_tokens": 12, "stop_token_ids": EVEN, "repetition_penalty": 1.2},
    {},
)


def requests(**extra: Any) -> list[Any]:
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, VOCAB, 4 + 5 * i).tolist() for i in range(len(SHAPES))]
    return [
        make_request(f"r{i}", prompt, **(SHAPES[i] | extra)) for i, prompt in enumerate(prompts)
    ]


def speculate(**settings: Any) -> Run:
    run = run_engine(
        requests(), tiny_model(), tiny_model(noise=NOISE), lookahead="fixed:4", **settings
    )
    rejected = (run.accepted < run.drafted).sum()
    assert rejected > 10 and (run.accepted >= 2).any() and (run.drafted == 0).any()
    assert ((run.accepted == run.drafted) & (run.drafted > 1)).any()
    return run


def test_greedy_tokens_are_the_best_of_the_shaped_logits():
    """Every token of a speculated run, against plain shaping of the model's logits behind it."""
    model, run = tiny_model(), speculate()
    moved = 0
    for request in requests():
        output, prompt = run.outputs[request.request_id], list(request.prompt)
        raw = next_logits(model, [prompt + output[:n] for n in range(len(output))])
        for n, logits in enumerate(raw):
            shaped = slow_shape(
                logits, request.params, request.params.stop_token_ids, prompt, output[:n]
            )
            assert shaped[output[n]] >= shaped.max() - 1e-4, (request.request_id, n)
            moved += int(logits.argmax()) != output[n]
    assert moved > 20, "the shaping changed nothing"


@pytest.mark.parametrize("depth", [0, 1])
def test_shaped_tokens_do_not_depend_on_preemptions_hits_or_lookahead(depth):
    plain = run_engine(requests(), tiny_model(), max_slots=1, prefix_cache=False)
    run = speculate(depth=depth, num_blocks=44, step_budget_tokens=64)
    assert run.scheduler.stats.preemptions > 0
    assert run.outputs == plain.outputs
    doubled = [*requests(), *(r.__class__(**_renamed(r)) for r in requests())]
    arrivals = [0] * len(SHAPES) + [60] * len(SHAPES)
    hits = run_engine(
        doubled, tiny_model(), tiny_model(noise=NOISE), lookahead="fixed:3", arrivals=arrivals
    )
    assert hits.scheduler.stats.prefix_hit_tokens > 20
    for name, output in plain.outputs.items():
        assert hits.outputs[name] == hits.outputs["again-" + name] == output


def _renamed(request: Any) -> dict[str, Any]:
    fields = {f: getattr(request, f) for f in request.__struct_fields__}
    return fields | {"request_id": "again-" + request.request_id}


def _stale_prefix(self: Any, logits: Any, slots: Any, starts: Any, num_drafted: Any, _: Any):
    """Shapes every row of a run as if no draft stood before it."""
    for i in self.active[slots].nonzero()[0].tolist():
        for j in range(int(num_drafted[i]) + 1):
            self._chains[int(slots[i])].shape(logits[int(starts[i]) + j])
    return {}


def _bonus_only(self: Any, logits: Any, slots: Any, starts: Any, num_drafted: Any, _: Any):
    """Shapes only the row behind the last draft, as engines did that dropped their guard."""
    for i in self.active[slots].nonzero()[0].tolist():
        self._chains[int(slots[i])].shape(logits[int(starts[i] + num_drafted[i])])
    return {}


@pytest.mark.parametrize("broken", [_stale_prefix, _bonus_only])
def test_shaping_without_the_draft_prefix_is_noticed(monkeypatch, broken):
    plain = run_engine(requests(), tiny_model())
    monkeypatch.setattr(processors.Shaping, "shape_runs", broken)
    run = run_engine(requests(), tiny_model(), tiny_model(noise=NOISE), lookahead="fixed:4")
    assert run.outputs != plain.outputs and run.outputs["r5"] == plain.outputs["r5"]


def test_drafts_that_are_not_rolled_back_are_noticed(monkeypatch):
    plain = run_engine(requests(), tiny_model())
    monkeypatch.setattr(processors.Shaping, "rollback", lambda *_: None)
    run = run_engine(requests(), tiny_model(), tiny_model(noise=NOISE), lookahead="fixed:4")
    assert run.outputs != plain.outputs


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_are_shaped_too(monkeypatch, temperature):
    """A draft that ignores what the request asks for guesses worse."""
    shaped = run_engine(
        requests(temperature=temperature),
        tiny_model(),
        tiny_model(noise=0.02),
        lookahead="fixed:3",
    )
    monkeypatch.setattr(processors.Shaping, "shape_each", lambda *_: None)
    blind = run_engine(
        requests(temperature=temperature),
        tiny_model(),
        tiny_model(noise=0.02),
        lookahead="fixed:3",
    )
    assert shaped.acceptance > blind.acceptance + 0.1


def test_requests_without_shaping_pay_nothing(monkeypatch):
    for name in ("shape", "advance", "rollback"):
        monkeypatch.setattr(Chain, name, lambda *_: pytest.fail("a plain row was visited"))
    plain = [make_request(f"r{i}", [i, 2, 3], temperature=i % 2) for i in range(4)]
    run = run_engine(plain, tiny_model(), tiny_model(noise=NOISE), lookahead="fixed:3")
    assert run.acceptance > 0.2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_of_another_vocabulary_is_shaped_by_the_targets_ids(temperature):
    bias = {VOCAB - 1: 50.0}  # an id that the draft does not have
    always = [make_request("r", [1, 2, 3], logit_bias=bias, temperature=temperature)]
    for vocab_size in (VOCAB - 8, VOCAB + 8):
        draft = tiny_model(noise=NOISE, vocab_size=vocab_size)
        run = run_engine(always, tiny_model(), draft, lookahead="fixed:3")
        assert set(run.outputs["r"]) == {VOCAB - 1} and run.drafted.any()
        assert run.accepted.any() == (vocab_size > VOCAB)
