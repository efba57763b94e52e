"""Shaping of logits: each processor compared with its definition, and by position in an engine."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import SamplingParams, StructuredOutputs
from cbatch.runtime.sampling import logits_processors as processors
from cbatch.runtime.sampling.logits_processors import ProcessorChain, processors_of
from tests.runtime.engines import VOCAB, Run, make_request, run_engine, tiny_model
from tests.runtime.reference import next_logits

NOISE = 0.06
SMALL = 12
STOPS = (0, 5, 900)  # the last is beyond the vocabulary, as the EOS id of a model may be


def slow_shape(
    logits: np.ndarray, params: SamplingParams, stops: Any, prompt: list[int], output: list[int]
) -> np.ndarray:
    """Shape by the definition, id by id, in float64."""
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
# Tokens to add, or the number of tokens to take back.
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
            for token in move:
                chain.advance(token)
            output += move
        logits = rng.normal(size=SMALL).astype(np.float32) * 3
        row, fresh_row = torch.from_numpy(logits.copy()), torch.from_numpy(logits.copy())
        chain.shape(row)
        fresh = processors_of(params, STOPS, prompt, SMALL)
        for token in output:
            fresh.advance(token)
        fresh.shape(fresh_row)
        assert torch.equal(row, fresh_row), "not what a rebuilt one gives"
        want = slow_shape(logits, params, STOPS, prompt, output)
        assert np.allclose(row.numpy(), want, atol=1e-4), (params, prompt, output)


@given(params_strategy, st.lists(token, max_size=20), moves_strategy)
@settings(max_examples=80, deadline=None, derandomize=True)
def test_shaping_follows_its_definition(params, prompt, moves):
    check_chain(params, prompt, moves)


# --- through the engine ---------------------------------------------------------------------------

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
    """Every token of a speculated run is compared with plain shaping of the model's logits."""
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


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_are_shaped_too(monkeypatch, temperature):
    """A draft model that ignores the request's parameters guesses worse."""
    shaped = run_engine(
        requests(temperature=temperature), tiny_model(), tiny_model(noise=0.02), lookahead="fixed:3"
    )
    monkeypatch.setattr(processors.LogitsProcessors, "shape_each", lambda *_: None)
    blind = run_engine(
        requests(temperature=temperature), tiny_model(), tiny_model(noise=0.02), lookahead="fixed:3"
    )
    assert shaped.acceptance > blind.acceptance + 0.1


def test_choices_of_a_call_share_what_their_lists_became(monkeypatch):
    """Lists may be as long as the vocabulary, and many choices enter in one step."""
    made = []
    lists = processors.token_lists
    monkeypatch.setattr(processors, "token_lists", lambda p: made.append(p) or lists(p))
    params = {"banned_token_ids": tuple(range(5, VOCAB)), "logit_bias": {1: 2.0}, "max_tokens": 6}
    first = make_request("r0", [1, 2, 3], **params)
    call = [msgspec.structs.replace(first, request_id=f"r{i}", choice=i) for i in range(4)]
    other = make_request("other", [1, 2, 3], **(params | {"banned_token_ids": (1,)}))
    together = run_engine([*call, other], tiny_model(), max_num_seqs=8)
    assert len(made) == 2
    assert all(max(together.outputs[f"r{i}"]) < 5 for i in range(4))
    assert 1 not in together.outputs["other"]


def test_requests_without_shaping_pay_nothing(monkeypatch):
    for name in ("shape", "advance", "rollback"):
        monkeypatch.setattr(ProcessorChain, name, lambda *_: pytest.fail("a plain row was visited"))
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


def test_an_executor_without_grammars_refuses_by_name():
    params = SamplingParams(structured_outputs=StructuredOutputs(regex="a+"))
    with pytest.raises(FieldError, match="^structured_outputs: is not supported here"):
        processors_of(params, (), [1], VOCAB)
