"""Sampling parameters from JSON: each field checked by itself, so that an error names it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from cbatch.core.request.errors import FieldError, did_you_mean
from cbatch.core.request.request import SamplingParams

SAMPLING_FIELDS = SamplingParams.__struct_fields__


def sampling_from_json(
    values: Mapping[str, Any], defaults: SamplingParams | None = None
) -> SamplingParams:
    """Sampling parameters from decoded JSON, over `defaults`. `stop` may be one string, and null is
    as good as absent. What asks for nothing here is left out before, see `without_neutral_fields`.

    Raises `FieldError` for an unknown field, a wrong type or a value out of range.
    """
    known = {name: value for name, value in values.items() if value is not None}
    for name in values:
        if name not in SAMPLING_FIELDS:
            problem = f"is not a known field{did_you_mean(name, SAMPLING_FIELDS)}"
            raise FieldError(name, problem, f"use {', '.join(SAMPLING_FIELDS)}")
    if known.get("logprobs") is False:  # as chat clients say it
        known["logprobs"] = None
    base = msgspec.structs.asdict(defaults or SamplingParams())
    return SamplingParams(**(base | known))


def sampling_to_json(params: SamplingParams) -> dict[str, Any]:
    """The fields that are not at their default, as JSON values."""
    plain = msgspec.to_builtins(params, str_keys=True)
    default = msgspec.to_builtins(SamplingParams())
    return {name: value for name, value in plain.items() if value != default[name]}
