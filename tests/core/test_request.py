"""Sampling parameters and configuration name the field at fault."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from cbatch.core.request.errors import FieldError
from cbatch.core.request.from_json import SAMPLING_FIELDS, sampling_from_json, sampling_to_json
from cbatch.core.request.request import SamplingParams, StructuredOutputs
from cbatch.core.scheduler.config import SchedulerConfig
from cbatch.core.speculation.config import LookaheadConfig
from cbatch.engine.options import EngineOptions

REFUSED: dict[str, tuple[object, ...]] = {
    "max_tokens": (0, -1),
    "min_tokens": (-1, 17),
    "temperature": (math.nan, -0.5, math.inf),
    "top_k": (-2,),
    "top_p": (-0.1, 1.5, math.nan),
    "min_p": (-0.1, 1.1),
    "seed": (-2, 2**64),
    "n": (0,),
    "stop": (("",),),
    "stop_token_ids": ((-1,),),
    "max_lookahead": (-1,),
    "repetition_penalty": (0.0, -1.5, math.inf, math.nan),
    "presence_penalty": (2.1, math.nan),
    "frequency_penalty": (-2.1, math.inf),
    "logit_bias": ({-1: 1.0}, {1: math.nan}, {1: -math.inf}),
    "allowed_token_ids": ((), (3, -1)),
    "banned_token_ids": ((-1,),),
    "logprobs": (-1, 21),
    "prompt_logprobs": (-1,),
    "logprobs_mode": ("cooked",),
    "drafter": ((), ("model", "oracle"), ("ngram", "ngram")),
    "verification": ("block",),
}


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, vs in REFUSED.items() for v in vs])
def test_a_bad_value_names_its_field(field: str, value: object) -> None:
    with pytest.raises(FieldError) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert caught.value.field == field and caught.value.remedy


WRONG_TYPES: list[tuple[type[msgspec.Struct], str, object]] = [
    (SamplingParams, "max_tokens", "5"),
    (SamplingParams, "max_tokens", 5.5),
    (SamplingParams, "n", True),
    (SamplingParams, "temperature", None),
    (SamplingParams, "temperature", "hot"),
    (SamplingParams, "stop", b"x"),
    (SamplingParams, "stop", [1]),
    (SamplingParams, "stop_token_ids", 3),
    (SamplingParams, "logit_bias", [1]),
    (SamplingParams, "structured_outputs", "[a-z]+"),
    (SamplingParams, "structured_outputs", {"regex": 1}),
    (SamplingParams, "drafter", 3),
    (SamplingParams, "ignore_eos", "no"),
    (SamplingParams, "verification", []),
    (EngineOptions, "max_num_seqs", "5"),
    (EngineOptions, "threads", "4"),
    (EngineOptions, "overlap", 2),
    (EngineOptions, "numerics", "quick"),
    (EngineOptions, "scheduling_policy", None),
    (EngineOptions, "seed", "x"),
    (EngineOptions, "lookahead", 3),
    (LookaheadConfig, "k", "3"),
    (LookaheadConfig, "decay", "x"),
]


@pytest.mark.parametrize(("kind", "field", "value"), WRONG_TYPES)
def test_a_value_of_another_type_names_its_field(
    kind: type[msgspec.Struct], field: str, value: object
) -> None:
    with pytest.raises(FieldError) as caught:
        kind(**{field: value})
    assert caught.value.field == field and caught.value.remedy


def test_what_can_be_meant_only_one_way_is_taken() -> None:
    params = SamplingParams(
        stop="ab",  # type: ignore[arg-type]
        stop_token_ids=[3],  # type: ignore[arg-type]
        banned_token_ids=np.array([1, 2]),  # type: ignore[arg-type]
        max_tokens=np.int64(5),  # type: ignore[arg-type]
        temperature=1,
        structured_outputs={"regex": "a"},  # type: ignore[arg-type]
    )
    assert (params.stop, params.stop_token_ids, params.banned_token_ids) == (("ab",), (3,), (1, 2))
    assert type(params.max_tokens) is int and type(params.temperature) is float
    assert params.structured_outputs is not None and params.structured_outputs.regex == "a"
    options = EngineOptions(tokenizer=Path("a/b"), drafter="ngram")  # type: ignore[arg-type]
    assert (options.tokenizer, options.drafter) == ("a/b", ("ngram",))


@pytest.mark.parametrize(
    ("params", "stop_ids", "field"),
    [
        ({"stop_token_ids": (8,)}, (8,), "stop_token_ids"),
        ({"logit_bias": {8: 1.0}}, (), "logit_bias"),
        ({"allowed_token_ids": (1, 8)}, (), "allowed_token_ids"),
        ({"banned_token_ids": (9,)}, (), "banned_token_ids"),
        ({"banned_token_ids": tuple(range(8))}, (), "banned_token_ids"),
        ({"allowed_token_ids": (1, 2), "banned_token_ids": (2, 1)}, (), "allowed_token_ids"),
        ({"allowed_token_ids": (1,), "min_tokens": 1}, (1,), "allowed_token_ids"),
        ({"banned_token_ids": (1, 2, 3, 4, 5, 6), "min_tokens": 1}, (0, 7), "banned_token_ids"),
    ],
)
def test_ids_beyond_the_vocabulary_and_no_token_left(params, stop_ids, field) -> None:
    with pytest.raises(FieldError, match=f"^{field}: "):
        SamplingParams(**params).require_vocabulary(8, stop_ids)
    if max(params.get("allowed_token_ids", (8,))) == 8:  # with one more id there is a choice
        SamplingParams(**params).require_vocabulary(10, ())
    if params.pop("min_tokens", None):  # without it the stop id may be chosen
        SamplingParams(**params).require_vocabulary(8, stop_ids)


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids", "banned_token_ids"])
def test_lists_are_no_longer_than_the_vocabulary(field: str) -> None:
    def given(count: int) -> SamplingParams:
        return SamplingParams(**{field: (3,) * count})  # type: ignore[arg-type]

    given(8).require_vocabulary(8, ())
    with pytest.raises(FieldError, match=f"^{field}: has 100000 ids; the vocabulary has 8"):
        given(100_000).require_vocabulary(8, ())
    with pytest.raises(FieldError) as caught:
        SamplingParams(**{field: (*range(100_000), -1)})  # type: ignore[arg-type]
    assert len(str(caught.value)) < 300, "a million ids are not repeated to their sender"


def test_stop_ids_beyond_the_vocabulary_take_no_choice_away() -> None:
    params = SamplingParams(min_tokens=2, banned_token_ids=(0, 1, 2, 3, 4, 5, 6))
    params.require_vocabulary(8, (90, 91))
    with pytest.raises(FieldError):  # a stop id inside the vocabulary takes the choice away
        params.require_vocabulary(8, (7, 91))


def test_coupled_by_name_or_by_a_seed_of_the_caller() -> None:
    modes = ("auto", "rejection", "coupled")
    coupled = [SamplingParams(verification=m, seed=s).coupled for m in modes for s in (None, 0)]
    assert coupled == [False, True, False, False, True, True]


def test_an_unknown_field_is_refused_by_name() -> None:
    with pytest.raises(msgspec.ValidationError, match="temprature"):
        msgspec.json.decode(b'{"temprature": 1}', type=SamplingParams)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_blocks", 0),
        ("max_num_seqs", 0),
        ("max_model_len", 1),
        ("max_num_batched_tokens", 3),
        ("ageing_per_s", -1.0),
    ],
)
def test_a_bad_configuration_names_its_field(field: str, value: object) -> None:
    good = {"num_blocks": 8, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    with pytest.raises(FieldError, match=field):
        SchedulerConfig(**{**good, field: value})  # type: ignore[arg-type]


# --- from JSON ------------------------------------------------------------------------------------


def test_json_over_defaults_and_back() -> None:
    defaults = SamplingParams(max_tokens=5, temperature=0.5)
    params = sampling_from_json({"temperature": 0, "stop": "x", "stop_token_ids": [1]}, defaults)
    assert params == SamplingParams(max_tokens=5, temperature=0, stop=("x",), stop_token_ids=(1,))
    assert sampling_from_json(sampling_to_json(params)) == params
    assert sampling_to_json(SamplingParams()) == {}


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
        ("temperature", "hot"),
        ("n", True),
    ],
)
def test_errors_of_json_name_the_field(field: str, value: object) -> None:
    with pytest.raises(FieldError) as caught:
        sampling_from_json({field: value})
    assert caught.value.field == field
