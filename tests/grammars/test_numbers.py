"""Accepted texts obey the bounds of a schema; bounds that cannot be obeyed are rejected."""

from __future__ import annotations

from typing import Any

import jsonschema_rs
import pytest

from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import StructuredOutputs
from cbatch.demo import demo_paths
from cbatch.grammars import Grammars
from cbatch.text import load_tokenizer

TOKENIZER = load_tokenizer(demo_paths()[0])
GRAMMARS = Grammars(lambda: TOKENIZER, TOKENIZER.vocab_size, (0,))
EDGES = [0, 1, 5, 2**53, 2**53 + 1, 2**60, 2**60 + 200, 2**60 + 250, 2**63 - 1, 2**63, 2**64]
EDGES += [2**255, 2**256]
NUMBERS = sorted(
    {sign * (each + more) for each in EDGES for more in (-1, 0, 1) for sign in (-1, 1)}
)


def follows(schema: Any, text: str) -> bool:
    matcher = GRAMMARS.matcher(StructuredOutputs(json=schema))
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("kind", ["integer", "number"])
@pytest.mark.parametrize(
    "bounds",
    [
        {"minimum": 0, "maximum": 2**256 - 1},
        {"minimum": -(2**63), "maximum": 2**63 - 1},
        {"minimum": 0, "exclusiveMaximum": 2**64},
        {"exclusiveMinimum": -(2**200), "maximum": -1},
        {"maximum": 1e300, "minimum": 1},
        {"minimum": 1, "maximum": 2**60 + 200},  # between two doubles
        {"exclusiveMinimum": -(2**60) - 199, "maximum": 0},
    ],
)
def test_bounds_of_any_size_are_obeyed(kind: str, bounds: dict[str, float]) -> None:
    schema = {"type": kind} | bounds
    accepted = [number for number in NUMBERS if follows(schema, str(number))]
    assert len(accepted) >= 4, "a value within the bounds is rejected"
    for number in accepted:
        jsonschema_rs.validate(schema, number)


@pytest.mark.parametrize(
    "schema",
    [
        {"minimum": 2**255},
        {"type": "array", "items": {"exclusiveMaximum": -(2**70)}},
        {"const": 2**100},
        {"$defs": {"id": {"enum": [1, 2**53 + 1]}}, "properties": {"a": {"$ref": "#/$defs/id"}}},
        {"anyOf": [{"const": [-(2**60)]}]},
        {"properties": {"a": {"enum": ["x", {"deep": [-(2**64)]}]}}},
    ],
)
def test_bounds_that_cannot_be_obeyed_are_rejected(schema: Any) -> None:
    with pytest.raises(FieldError, match="json: #.*/[a-zA-Z]+: -?[0-9]+ is outside the supp"):
        GRAMMARS.matcher(StructuredOutputs(json=schema))


def test_a_divisor_that_is_too_large_is_rejected() -> None:
    for divisor in (2**33, 2**53 + 1, 10**30):
        with pytest.raises(FieldError, match="multipleOf.*too many digits"):
            GRAMMARS.matcher(StructuredOutputs(json={"type": "integer", "multipleOf": divisor}))


def test_bounds_of_an_old_draft_are_obeyed() -> None:
    """In old drafts a boolean `exclusiveMaximum` says whether `maximum` itself is allowed."""
    schema = {"type": "integer", "minimum": 1, "maximum": 7, "exclusiveMaximum": True}
    assert follows(schema, "6") and not follows(schema, "7") and not follows(schema, "0")


def test_other_numbers_are_not_changed() -> None:
    """A property with the name of a keyword, a default, and a length stay unchanged."""
    properties = {"maximum": {"type": "boolean"}, "x": {"default": 2**80, "const": 1}}
    schema = {"type": "object", "properties": properties, "required": ["maximum", "x"]}
    assert follows(schema, '{"maximum": true, "x": 1}')
    assert not follows(schema, '{"maximum": 1, "x": 1}')
