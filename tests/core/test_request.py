"""Sampling parameters and configuration name the field at fault."""

from __future__ import annotations

import math

import msgspec
import pytest

from cbatch.core.config import SchedulerConfig
from cbatch.core.errors import FieldError
from cbatch.core.request import SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("temperature", math.nan),
        ("temperature", -0.5),
        ("temperature", math.inf),
        ("top_k", 0),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("seed", -1),
        ("seed", 2**64),
        ("n", 0),
        ("stop", ("",)),
        ("stop_token_ids", (-1,)),
        ("max_lookahead", -1),
    ],
)
def test_a_bad_value_names_its_field(field: str, value: object) -> None:
    with pytest.raises(FieldError) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert caught.value.field == field and caught.value.remedy


def test_an_unknown_field_is_refused_by_name() -> None:
    with pytest.raises(msgspec.ValidationError, match="temprature"):
        msgspec.json.decode(b'{"temprature": 1}', type=SamplingParams)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_blocks", 0),
        ("max_slots", 0),
        ("max_model_tokens", 1),
        ("step_budget_tokens", 3),
        ("ageing_per_s", -1.0),
    ],
)
def test_a_bad_configuration_names_its_field(field: str, value: object) -> None:
    good = {"num_blocks": 8, "max_slots": 4, "step_budget_tokens": 64}
    with pytest.raises(FieldError, match=field):
        SchedulerConfig(**{**good, field: value})  # type: ignore[arg-type]
