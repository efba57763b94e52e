from __future__ import annotations

import pytest

from cbatch import FieldError, SamplingParams
from cbatch.params import sampling_from_json, sampling_to_json


def test_json_over_defaults_and_back() -> None:
    defaults = SamplingParams(max_tokens=5, temperature=0.5)
    params = sampling_from_json({"temperature": 0, "stop": "x", "stop_token_ids": [1]}, defaults)
    assert params == SamplingParams(max_tokens=5, temperature=0, stop=("x",), stop_token_ids=(1,))
    assert sampling_from_json(sampling_to_json(params)) == params
    assert sampling_to_json(SamplingParams()) == {}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("colour", 1),
        ("temperature", "hot"),
        ("temperature", float("nan")),
        ("temperature", None),
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
