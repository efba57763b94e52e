"""Sampling parameters from JSON: each field checked by itself, so that an error names it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from cbatch.core.request.errors import FieldError, did_you_mean, short
from cbatch.core.request.request import SamplingParams, StructuredOutputs

SAMPLING_FIELDS = SamplingParams.__struct_fields__
# Members of `structured_outputs`, by names that fields for them have or had in other servers.
STRUCTURED_FIELDS = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "grammar": "grammar",
}


def sampling_from_json(
    values: Mapping[str, Any], defaults: SamplingParams | None = None
) -> SamplingParams:
    """Sampling parameters from decoded JSON, over `defaults`. `stop` may be one string, and null is
    as good as absent, also within `structured_outputs`, which may come by the names of
    `STRUCTURED_FIELDS`. What asks for nothing is left out before, see `without_neutral_fields`.

    Raises `FieldError` for an unknown field, a wrong type or a value out of range.
    """
    known = {name: value for name, value in values.items() if value is not None}
    for name in values:
        if name not in SAMPLING_FIELDS and name not in STRUCTURED_FIELDS:
            problem = f"is not a known field{did_you_mean(name, SAMPLING_FIELDS)}"
            raise FieldError(name, problem, f"use {', '.join(SAMPLING_FIELDS)}")
    if known.get("logprobs") is False:  # as chat clients say it
        known["logprobs"] = None
    _read_structured_outputs(known)
    base = msgspec.structs.asdict(defaults or SamplingParams())
    return SamplingParams(**(base | known))


def _read_structured_outputs(known: dict[str, Any]) -> None:
    asked = known.get("structured_outputs")
    if isinstance(asked, dict):
        members = {name: value for name, value in asked.items() if value not in (None, False)}
        known["structured_outputs"] = members
    for name in [name for name in STRUCTURED_FIELDS if name in known]:
        value = known.pop(name)
        if "structured_outputs" in known:
            problem = "beside another field that says what the output must be"
            raise FieldError(name, problem, "leave one out")
        try:
            members = {STRUCTURED_FIELDS[name]: value}
            known["structured_outputs"] = msgspec.convert(members, StructuredOutputs)
        except msgspec.ValidationError as error:
            raise FieldError(name, f"{short(value)} is not allowed", str(error)) from error


def sampling_to_json(params: SamplingParams) -> dict[str, Any]:
    """The fields that are not at their default, as they are read from JSON."""
    plain, default = (
        msgspec.json.decode(msgspec.json.encode(each), type=dict[str, Any])
        for each in (params, SamplingParams())
    )
    return {name: value for name, value in plain.items() if value != default[name]}
