"""Sampling parameters from decoded JSON. Each field is checked separately, so that an error names
the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from cbatch.core.request.errors import FieldError, did_you_mean, short
from cbatch.core.request.request import SamplingParams, StructuredOutputs

SAMPLING_FIELDS = SamplingParams.__struct_fields__
# Member of `structured_outputs` by the names that other servers' requests use for it.
STRUCTURED_FIELDS = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "grammar": "grammar",
    "regex": "regex",
    "ebnf": "grammar",
}


def sampling_from_json(
    values: Mapping[str, Any], defaults: SamplingParams | None = None
) -> SamplingParams:
    """Return `defaults` overridden by the fields of decoded JSON.

    `stop` may be a single string. A null field, also within `structured_outputs`, counts as absent.
    Fields named in `STRUCTURED_FIELDS` are read as `structured_outputs`. The caller first removes
    other servers' fields with `without_neutral_fields`. Raises `FieldError` for an unknown field, a
    wrong type or a value out of range.
    """
    fields = {name: value for name, value in values.items() if value is not None}
    for name in values:
        if name not in SAMPLING_FIELDS and name not in STRUCTURED_FIELDS:
            problem = f"is not a known field{did_you_mean(name, SAMPLING_FIELDS)}"
            raise FieldError(name, problem, f"use {', '.join(SAMPLING_FIELDS)}")
    if fields.get("logprobs") is False:  # a boolean in the chat API
        fields["logprobs"] = None
    _read_structured_outputs(fields)
    base = msgspec.structs.asdict(defaults or SamplingParams())
    return SamplingParams(**(base | fields))


def _read_structured_outputs(fields: dict[str, Any]) -> None:
    """Normalise `structured_outputs` in place: drop null members, and move the fields of
    `STRUCTURED_FIELDS` into it."""
    constraint = fields.get("structured_outputs")
    if isinstance(constraint, dict):
        members = {name: value for name, value in constraint.items() if value not in (None, False)}
        fields["structured_outputs"] = members
    for name in [name for name in STRUCTURED_FIELDS if name in fields]:
        value = fields.pop(name)
        if "structured_outputs" in fields:
            problem = "cannot be combined with another field that constrains the output"
            raise FieldError(name, problem, "leave one out")
        try:
            members = {STRUCTURED_FIELDS[name]: value}
            fields["structured_outputs"] = msgspec.convert(members, StructuredOutputs)
        except msgspec.ValidationError as error:
            raise FieldError(name, f"{short(value)} is not allowed", str(error)) from error


def sampling_to_json(params: SamplingParams) -> dict[str, Any]:
    """Return the fields that differ from their defaults, in the form `sampling_from_json` reads."""
    plain, default = (
        msgspec.json.decode(msgspec.json.encode(each), type=dict[str, Any])
        for each in (params, SamplingParams())
    )
    return {name: value for name, value in plain.items() if value != default[name]}
