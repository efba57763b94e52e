"""Every field of `SamplingParams` does something or is refused by name, with drafts and without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cbatch import LLM, Completion, FieldError, SamplingParams, StructuredOutputs
from cbatch.cli.generate import SAMPLING
from cbatch.cli.main import make_parser
from cbatch.cli.options import EngineSettings
from cbatch.cli.settings import read_settings
from cbatch.core.request.from_json import SAMPLING_FIELDS, sampling_to_json
from tests.test_llm import write_model

PROMPT = "def add(a, b):"
EVEN = tuple(range(0, 90, 2))
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 5}
ENDS: dict[str, Any] = {"logit_bias": {0: 40.0}}  # token 0 wins everywhere


def tokens(done: Completion) -> object:
    assert done.error is None, done.error
    return done.token_ids


def text(done: Completion) -> object:
    return done.text


def logprobs(done: Completion) -> object:
    return done.logprobs


# By field: other parameters, its value, and the part of the completion that shows the difference.
CASES: dict[str, tuple[dict[str, Any], Any, Callable[[Completion], object]]] = {
    "max_tokens": ({}, 9, tokens),
    "min_tokens": ({"stop_token_ids": EVEN}, 12, tokens),
    "temperature": ({"seed": 5}, 1.0, tokens),
    "top_k": (SAMPLED, 1, tokens),
    "top_p": (SAMPLED, 0.02, tokens),
    "min_p": (SAMPLED, 1.0, tokens),
    "seed": (SAMPLED, 6, tokens),
    "n": (SAMPLED, 2, lambda done: len(done.choices)),
    "stop": ({}, None, lambda done: done.finish_reason),  # the value is taken from the output
    "stop_token_ids": ({}, None, lambda done: done.finish_reason),
    "include_stop_str_in_output": (ENDS | {"skip_special_tokens": False}, True, text),
    "skip_special_tokens": (ENDS | {"ignore_eos": True}, False, text),
    "spaces_between_special_tokens": (ENDS, False, text),
    "ignore_eos": ({"logit_bias": {0: 40.0}}, True, tokens),
    "repetition_penalty": ({}, 8.0, tokens),
    "presence_penalty": ({}, 2.0, tokens),
    "frequency_penalty": ({}, 2.0, tokens),
    "logit_bias": ({}, {7: 40.0}, tokens),
    "allowed_token_ids": ({}, (7, 8, 9), tokens),
    "banned_token_ids": ({}, None, tokens),
    "structured_outputs": ({}, StructuredOutputs(regex="(ab|cd){3,9}"), tokens),
    "logprobs": ({}, 1, logprobs),
    "prompt_logprobs": ({}, 1, lambda done: done.prompt_logprobs),
    "logprobs_mode": (SAMPLED | {"logprobs": 0, "top_k": 2}, "processed", logprobs),
    "max_lookahead": ({}, 0, lambda done: done.speculation.drafted_tokens),
    "drafter": ({}, ("ngram",), lambda done: (done.error, done.speculation)),
    "verification": (SAMPLED, "rejection", tokens),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    return write_model(folder / "target"), write_model(folder / "draft", layers=1)


@pytest.fixture(scope="module", params=["off", "fixed:3"])
def llm(request: pytest.FixtureRequest, models: tuple[Path, Path]) -> LLM:
    draft = None if request.param == "off" else models[1]
    options: dict[str, Any] = {"max_num_seqs": 4, "random_weights_seed": 0, "numerics": "invariant"}
    return LLM(models[0], draft, lookahead=request.param, **options)


def test_the_cases_are_all_fields() -> None:
    assert set(CASES) == set(SAMPLING_FIELDS)


@pytest.mark.parametrize("field", CASES)
def test_a_field_does_something(llm: LLM, field: str) -> None:
    speculates = llm.info.lookahead != "off"
    if field == "max_lookahead" and not speculates:
        return  # there is nothing to cap
    if field == "spaces_between_special_tokens":
        return  # this tokenizer's decoder puts none there: tests/text/test_stop.py
    without, value, look = CASES[field]
    base = {"max_tokens": 24, "temperature": 0.0} | without
    (plain,) = llm.generate(PROMPT, SamplingParams(**base))
    if value is None:
        value = {
            "stop": (plain.text[3:5],),
            "stop_token_ids": (plain.token_ids[4],),
            "banned_token_ids": (plain.token_ids[0],),
        }[field]
    (completion,) = llm.generate(PROMPT, SamplingParams(**(base | {field: value})))
    assert look(completion) != look(plain), field
    if field == "drafter" and not speculates:
        assert (completion.error or "").startswith("drafter: 'ngram' is not loaded")
    elif speculates and field != "max_lookahead":
        assert completion.speculation.drafted_tokens > 0 or len(completion.token_ids) < 4, (
            "drafts were off"
        )


def test_a_loaded_drafter_may_be_named(llm: LLM) -> None:
    (done,) = llm.generate(PROMPT, SamplingParams(drafter=("model",)))
    assert (done.error is None) == (llm.info.lookahead != "off")


def test_the_command_line_has_every_field() -> None:
    def sampling_params(*words: str) -> SamplingParams:
        args = make_parser("generate").parse_args(["generate", *words])
        return read_settings(SamplingParams, args, defaults=SAMPLING).values

    flags = """--max-tokens 5 --min-tokens 2 --temperature 0.5 --top-k 3 --top-p 0.9 --min-p 0.1
        --seed 4 -n 2 --stop x --stop-token-id 1 --ignore-eos
        --include-stop-str-in-output --no-skip-special-tokens --no-spaces-between-special-tokens
        --repetition-penalty 1.1
        --presence-penalty 0.5 --frequency-penalty -0.5 --logit-bias 3=1.5 --logit-bias 12=-2
        --allowed-token-id 3 --allowed-token-id 12 --banned-token-id 13 --logprobs 0
        --prompt-logprobs 2 --logprobs-mode processed --max-lookahead 3
        --verification coupled --structured-outputs {"regex":"a+"}"""
    params = sampling_params(*flags.split())
    # `drafter` is an option of the engine, which loads it for all prompts.
    assert set(sampling_to_json(params)) == set(SAMPLING_FIELDS) - {"drafter"}
    assert params.logit_bias == {3: 1.5, 12: -2.0}
    assert params.structured_outputs == StructuredOutputs(regex="a+")
    with pytest.raises(FieldError, match="--structured-outputs: 'a\\+' is not allowed"):
        sampling_params("--structured-outputs", "a+")
    with pytest.raises(FieldError, match=r"--logit-bias: .* is not allowed; write ID=BIAS"):
        sampling_params("--logit-bias", "3")
    for words, drafter in (("--drafter suffix --drafter model", ("suffix", "model")), ("", None)):
        args = make_parser("generate").parse_args(["generate", *words.split()])
        assert read_settings(EngineSettings, args).values.engine.drafter == drafter
