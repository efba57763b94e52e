from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from cbatch import FieldError, SamplingParams, StructuredOutputs
from cbatch.core.request.from_json import SAMPLING_FIELDS, sampling_from_json, sampling_to_json


def test_json_over_defaults_and_back() -> None:
    defaults = SamplingParams(max_tokens=5, temperature=0.5)
    params = sampling_from_json({"temperature": 0, "stop": "x", "stop_token_ids": [1]}, defaults)
    assert params == SamplingParams(max_tokens=5, temperature=0, stop=("x",), stop_token_ids=(1,))
    assert sampling_from_json(sampling_to_json(params)) == params
    assert sampling_to_json(SamplingParams()) == {}


def test_every_field_survives_a_round_trip_through_json() -> None:
    params = SamplingParams(
        max_tokens=5,
        min_tokens=2,
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        min_p=0.1,
        seed=4,
        n=2,
        stop=("x",),
        stop_token_ids=(1,),
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        spaces_between_special_tokens=False,
        ignore_eos=True,
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={3: 1.5, 12: -2.0},
        allowed_token_ids=(3, 12, 13),
        banned_token_ids=(13,),
        structured_outputs=StructuredOutputs(json={"enum": [1, "b"]}),
        logprobs=0,
        prompt_logprobs=2,
        logprobs_mode="processed",
        max_lookahead=3,
        drafter=("suffix", "model"),
        verification="coupled",
    )
    plain = sampling_to_json(params)
    assert set(plain) == set(SAMPLING_FIELDS)  # no field is left at its default
    assert msgspec.convert(json.loads(json.dumps(plain)), SamplingParams, str_keys=True) == params


@pytest.mark.parametrize(
    ("none", "same"),
    [
        ({"top_k": -1}, {}),
        ({"top_k": 0}, {}),
        ({"seed": -1}, {}),
        ({"stop": []}, {}),
        ({"top_p": 0, "temperature": 0.7}, {"temperature": 0.0}),
        (dict.fromkeys(SAMPLING_FIELDS), {}),
    ],
    ids=lambda values: "-".join(map(str, values.values()))[:20],
)
def test_values_by_which_other_engines_say_none(none: dict[str, Any], same: dict[str, Any]) -> None:
    assert sampling_from_json(none) == SamplingParams(**same)
    given = {name: value for name, value in none.items() if value is not None}
    assert SamplingParams(**given | ({"stop": ()} if "stop" in given else {})) == SamplingParams(
        **same
    )


@pytest.mark.parametrize(
    ("given", "structured"),
    [
        ({"guided_json": {"type": "null"}}, StructuredOutputs(json={"type": "null"})),
        ({"guided_regex": "a+", "guided_json": None}, StructuredOutputs(regex="a+")),
        ({"guided_choice": ["a", "b"]}, StructuredOutputs(choice=("a", "b"))),
        ({"guided_grammar": 'start: "a"'}, StructuredOutputs(grammar='start: "a"')),
        ({"regex": "a+"}, StructuredOutputs(regex="a+")),
        ({"ebnf": 'root ::= "a"'}, StructuredOutputs(grammar='root ::= "a"')),
        (
            {"structured_outputs": {"regex": "a", "json": None, "disable_fallback": False}},
            StructuredOutputs(regex="a"),
        ),
    ],
)
def test_other_names_of_structured_outputs(given: Any, structured: StructuredOutputs) -> None:
    assert sampling_from_json(given).structured_outputs == structured
    with pytest.raises(FieldError, match="cannot be combined with another field"):
        sampling_from_json(given | {"grammar": "root ::= [a]"})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("guided_choice", []),
        ("guided_regex", 7),
        ("colour", 1),
        ("top_k", -2),
        ("seed", -2),
        ("top_p", -0.1),
        ("temperature", "hot"),
        ("temperature", float("nan")),
        ("top_k", 1.5),
        ("n", True),
        ("stop", [1]),
        ("seed", 2**64),
        ("ignore_eos", 1),
    ],
)
def test_errors_name_the_field(field: str, value: object) -> None:
    with pytest.raises(FieldError) as caught:
        sampling_from_json({field: value})
    assert caught.value.field == field
