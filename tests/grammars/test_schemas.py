"""Keywords of JSON schemas that llguidance does not support: they are rewritten or rejected.

The judge is `jsonschema_rs`: accepted texts must be valid by the original schema.
"""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbatch.core.request.errors import FieldError
from cbatch.core.request.request import StructuredOutputs
from cbatch.grammars import Grammars
from cbatch.grammars import schemas as schemas_module
from cbatch.grammars.schemas import SchemaSets
from cbatch.text import TextTokenizer
from tests.text.toy_tokenizers import byte_level

TOKENIZER = TextTokenizer(byte_level(), "toy")
GRAMMARS = Grammars(lambda: TOKENIZER, TOKENIZER.vocab_size, (0,))
WORDS = [TOKENIZER.token_bytes(i) for i in range(TOKENIZER.vocab_size)]
VALUES: list[Any] = [None, True, False, 0, 1, 2, 1.5, "", "a", "b", "ab", "logs", [], ["a"], {}]
for name, value in (("a", 1), ("a", "x"), ("b", 1), ("b", "x"), ("c", True), ("kind", "a")):
    VALUES += [{name: value}, {name: value, "a": 1}, {"kind": "b", name: value}]
    VALUES += [{"a": 1, "b": "x", name: value}, {"kind": "c", "b": 1, name: value}]


def follows(outputs: StructuredOutputs, text: str) -> bool:
    matcher, ids = GRAMMARS.matcher(outputs), TOKENIZER.encode(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def accepted(schema: Any) -> list[Any]:
    outputs = StructuredOutputs(json=schema)
    return [each for each in VALUES if follows(outputs, json.dumps(each))]


def written(schema: Any, rng: random.Random) -> str | None:
    """Return a random text that the grammar accepts, with a preference for ending; None if it does
    not end."""
    matcher, text = GRAMMARS.matcher(StructuredOutputs(json=schema)), b""
    for length in range(600):
        if matcher.is_accepting() and rng.random() < 0.7:
            return text.decode()
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        ids = np.unpackbits(bits, bitorder="little").nonzero()[0].tolist()
        ids = [i for i in ids if i and WORDS[i].isascii()]
        if not ids:
            return text.decode()
        weights = [30 ** sum(c in b'"}]' for c in WORDS[i][:1]) + length // 200 for i in ids]
        (token,) = rng.choices(ids, weights)
        assert matcher.try_consume_tokens([token]) == 1
        text += WORDS[token]
    return None


def open_object(name: str, **schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {name: schema}, "required": [name]}


def kind(letter: str, name: str) -> dict[str, Any]:
    made = open_object("kind", const=letter)
    made["properties"][name] = {"type": "integer"}
    return made


AB = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
# Schemas, and values that their grammars must accept.
FOLLOWED: dict[str, tuple[Any, list[Any]]] = {
    "oneOf of open objects": (
        {"oneOf": [open_object("a", type="integer"), open_object("b", type="integer")]},
        [{"a": 1}, {"b": 1}],
    ),
    "oneOf of required": (
        AB | {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a": 1}, {"b": "x"}],
    ),
    "oneOf distinguished by a constant in a reference": (
        {
            "oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/components/B"}],
            "$defs": {"A": kind("a", "a")},
            "components": {"B": {"allOf": [kind("b", "a")]}},
        },
        [{"kind": "a", "a": 1}, {"kind": "b", "a": 1}],
    ),
    "oneOf distinguished by required members of the outer object": (
        {
            "type": "object",
            "required": ["kind"],
            "allOf": [{"oneOf": [{"properties": {"kind": {"const": c}}} for c in "abc"]}],
        },
        [{"kind": "a"}, {"kind": "b", "a": 1}],
    ),
    "oneOf of types": ({"oneOf": [{"type": "string"}, {"enum": [1, 2]}]}, ["a", 1]),
    "not of types": ({"not": {"type": ["array", "object", "null"]}}, ["a", 1, True]),
    "not of a value": ({"type": "string", "not": {"enum": ["logs", "a", ""]}}, ["ab", "b"]),
    "not of required": (AB | {"not": {"required": ["a", "b"]}}, [{"a": 1}, {"b": "x"}]),
    "not of either": (
        AB | {"not": {"anyOf": [{"required": ["a"]}, open_object("b", const="x")]}},
        [{}],
    ),
    "a property that must not be": (AB | {"properties": {"a": {"not": {}}}}, [{}, {"b": "x"}]),
    "if, then, else": (
        {
            **kind("a", "a"),
            "properties": {"kind": {"enum": ["a", "b"]}, "a": {}, "b": {}},
            "if": {"properties": {"kind": {"const": "a"}}},
            "then": {"required": ["a"]},
            "else": {"required": ["b"]},
        },
        [{"kind": "a", "a": 1}, {"kind": "b", "b": "x"}],
    ),
    "an if for each kind": (
        {
            "type": "object",
            "properties": {"kind": {"enum": list("abcde")}, "a": {}, "b": {}, "c": {}},
            "required": ["kind"],
            "allOf": [
                {"if": {"properties": {"kind": {"const": k}}}, "then": {"required": ["ab"[n % 2]]}}
                for n, k in enumerate("abcde")
            ],
        },
        [{"kind": "a", "a": 1}, {"kind": "b", "b": "x"}],
    ),
    "if of what may be absent": (
        AB | {"if": open_object("a"), "then": {"required": ["b"]}},
        [{}, {"a": 1, "b": "x"}],
    ),
    "dependencies": (
        AB | {"dependencies": {"a": ["b"], "b": {"properties": {"a": {"const": 1}}}}},
        [{}, {"a": 1, "b": "x"}],
    ),
    "dependentRequired": (AB | {"dependentRequired": {"a": ["b"]}}, [{}, {"b": "x"}]),
    "dependentSchemas": (AB | {"dependentSchemas": {"a": {"required": ["b"]}}}, [{}, {"b": "x"}]),
    "propertyNames, a pattern": (
        {"type": "object", "propertyNames": {"pattern": "^[a-b]$"}},
        [{"a": 1}, {"b": "x"}],
    ),
    "propertyNames, values": (
        {
            "type": "object",
            "propertyNames": {"$ref": "#/$defs/N"},
            "additionalProperties": {"type": "integer"},
            "$defs": {"N": {"type": "string", "enum": ["a", "c"]}},
        },
        [{}, {"a": 1}],
    ),
    "an unknown format": (open_object("a", type="string", format="path"), [{"a": "x"}]),
    "annotations": (
        {
            **AB,
            "deprecated": True,
            "default": {"not": 3},
            "examples": [2**80],
            "x-order": {"if": 1},
        },
        [{}, {"a": 1}],
    ),
}
FORMATS = ("path", "password", "binary", "base64", "uri-reference", "regex", "iri", "", "byte")


@pytest.mark.parametrize("name", FOLLOWED)
def test_accepted_values_are_valid(name: str) -> None:
    schema, kept = FOLLOWED[name]
    valid = jsonschema_rs.validator_for(schema)
    values = accepted(schema)
    assert [each for each in values if not valid.is_valid(each)] == []
    assert all(each in values for each in kept), values
    rng, whole = random.Random(5), 0
    for _ in range(10):
        text = written(schema, rng)
        if text is not None:
            whole += 1
            valid.validate(json.loads(text))
    assert whole > 2


def test_the_judge_detects_a_wrong_rewriting(monkeypatch: pytest.MonkeyPatch) -> None:
    """With wrong complements, invalid texts are accepted."""
    schema, _ = FOLLOWED["oneOf of open objects"]
    monkeypatch.setattr(SchemaSets, "complements", lambda *_: [True])
    values = accepted({**schema, "title": "another grammar"})
    assert not all(jsonschema_rs.is_valid(schema, each) for each in values)


@pytest.mark.parametrize("format_", FORMATS)
def test_an_unknown_format_is_ignored(format_: str) -> None:
    outputs = StructuredOutputs(json={"type": "string", "format": format_})
    assert follows(outputs, '"any thing"')


def test_many_optional_properties() -> None:
    properties = {f"p{i}": {"type": "integer"} for i in range(450)}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    assert follows(StructuredOutputs(json=schema), '{"p3": 1, "p200": 2, "p449": 3}')
    assert not follows(StructuredOutputs(json=schema), '{"p3": 1, "p450": 2}')
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(999)}}
    with pytest.raises(
        FieldError, match="[0-9]+ optional parts or choices in one place, the limit"
    ):
        GRAMMARS.check(StructuredOutputs(json=schema))


def test_a_property_has_one_name() -> None:
    """Escapes cannot spell the property's name differently."""
    outputs = StructuredOutputs(json={"properties": {"a": {"type": "integer"}}})
    assert follows(outputs, '{"a": 1}') and follows(outputs, '{"b": "x"}')
    assert not follows(outputs, '{"\\u0061": "x"}')


def place(keyword: str, value: Any) -> dict[str, Any]:
    return {"properties": {"a": {"items": {keyword: value}}}}


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (place("contains", {}), "#/properties/a/items/contains: is not supported"),
        (place("unevaluatedProperties", False), "unevaluatedProperties: is not supported"),
        (place("oneOf", [{"type": "string"}, {"pattern": "a"}]), "items/oneOf: .* both 0 and 1"),
        (place("not", {"pattern": "a"}), "items/not: its negation"),
        (place("if", {"pattern": "a"}) | {}, None),
        (
            {"if": {"pattern": "a"}, "then": {"maxLength": 3}},
            "#/if: its negation is not supported",
        ),
        (place("propertyNames", {"minLength": 2}), "items/propertyNames: is not supported here"),
        (
            place("uniqueItems", True),
            "items/uniqueItems: is only supported for",
        ),
        (place("pattern", "^(?!a)"), "#/properties/a/items/pattern: has lookaround"),
        (place("maximum", -(2**60)), "items/maximum: -1152921504606846976 is outside"),
        (place("$ref", "#/$defs/X"), "#/\\$defs/X: is not within the schema"),
        (place("$ref", "https://x.y/z.json"), "z.json: is not within the schema; put it under"),
        ({"$defs": {"X": {"type": "frog"}}, "$ref": "#/$defs/X"}, "frog"),
        ({"properties": {"a": 3}}, "#/properties/a: is not a JSON schema"),
        ([], "#: is not a JSON schema"),
    ],
)
def test_unsupported_keywords_are_rejected_with_their_place(schema: Any, words: str | None) -> None:
    outputs = StructuredOutputs(json=json.dumps(schema))
    if words is None:
        GRAMMARS.check(outputs)  # it requires nothing
        return
    with pytest.raises(FieldError, match=words):
        GRAMMARS.check(outputs)


def test_descriptions_do_not_count() -> None:
    schema = {**AB, "description": "x" * 100_000}
    assert follows(StructuredOutputs(json=schema), '{"a": 1}')
    with pytest.raises(FieldError, match="has [0-9]+ characters; use <= 65536"):
        GRAMMARS.check(StructuredOutputs(json={"enum": ["x" * 70_000]}))


ADDRESS = {**open_object("s", type="string"), "additionalProperties": False}


@pytest.mark.parametrize(
    ("root", "reference", "address"),
    [
        ({}, "#/$defs/x", {}),
        ({}, "address.json", {"$id": "address.json"}),
        ({"$id": "https://e.com/root"}, "/schemas/x", {"$id": "https://e.com/schemas/x"}),
        ({"$id": "https://e.com/root"}, "https://e.com/schemas/x", {"$id": "/schemas/x"}),
        ({"$id": "https://e.com/root"}, "https://e.com/root#/$defs/x", {}),
        ({"id": "https://e.com/root#"}, "#x", {"id": "#x"}),
        ({}, "#x", {"$anchor": "x"}),
    ],
)
def test_references_within_the_schema(root: Any, reference: str, address: Any) -> None:
    schema = {**root, **open_object("a", **{"$ref": reference}), "$defs": {"x": ADDRESS | address}}
    assert follows(StructuredOutputs(json=schema), '{"a": {"s": "x"}}')
    assert not follows(StructuredOutputs(json=schema), '{"a": 1}')


def test_a_schema_may_refer_to_itself() -> None:
    schema = {"type": "object", "properties": {"n": {"$ref": "#"}}, "additionalProperties": False}
    outputs = StructuredOutputs(json=schema)
    assert follows(outputs, '{"n": {"n": {}}}') and not follows(outputs, '{"n": {"m": {}}}')


# ---- schemas within other grammars ------------------------------------------------------------


def test_a_schema_in_a_lark_grammar_is_rewritten_too() -> None:
    """Its white space is limited, and its keywords and numbers apply. Text that only looks like a
    schema stays unchanged."""
    schema = json.dumps(FOLLOWED["oneOf of required"][0])
    lark = (
        '// %json { in a comment\nstart: "%json {" /%json \\{/ <[5]>? a # %json {\n'
        f"a: %json\n  {schema}\n"
    )
    outputs = StructuredOutputs(grammar=lark)
    begin = "%json {%json {"
    assert follows(outputs, begin + '{"a": 1}') and follows(outputs, begin + '{\n  "b" : "x"}')
    assert not follows(outputs, begin + '{"a": 1, "b": "x"}')
    assert not follows(outputs, begin + '{   "a": 1}')
    around = StructuredOutputs(regex="[a-c]", around=f"start: @answer a\na: %json {schema}")
    assert follows(around, 'b{"a": 1}') and not follows(around, 'b{  "a": 1}')
    for field in ("grammar", "around"):
        broken = {"regex": "a"} if field == "around" else {}
        broken[field] = 'start: mine\nmine: %json {"const": 9007199254740993}'
        with pytest.raises(FieldError, match="mine: #/const: 9007199254740993 is outside"):
            GRAMMARS.check(StructuredOutputs(**broken))
    with pytest.raises(FieldError, match="cannot be read"):
        GRAMMARS.check(StructuredOutputs(grammar="start: %json {"))


# ---- sets of values -----------------------------------------------------------------------------

leaves = st.sampled_from(
    [True, {"type": "string"}, {"type": "integer"}, {"type": ["number", "null"]}, {"const": "a"}]
    + [{"enum": ["a", "b", 1]}, {"const": True}, {"type": "object"}, {"required": ["a"]}]
    + [{"type": "object", "required": ["kind"], "properties": {"kind": {"const": "a"}}}, False]
    + [{"properties": {"a": {"type": "string"}}}, {"additionalProperties": False}]
    + [{"$ref": "#/x"}, {"not": {"type": "string"}}, {"patternProperties": {"^a": False}}]
)
schemas = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.fixed_dictionaries({"anyOf": st.lists(inner, min_size=1, max_size=3)}),
        st.fixed_dictionaries({"allOf": st.lists(inner, min_size=1, max_size=3)}),
        st.fixed_dictionaries({"properties": st.fixed_dictionaries({"b": inner})}),
        st.fixed_dictionaries({"required": st.just(["b"]), "additionalProperties": inner}),
    ),
    max_leaves=6,
)


def check_sets(a: Any, b: Any) -> None:
    target = {"type": "object", "required": ["kind"], "properties": {"kind": {"const": "b"}}}

    def valid(schema: Any) -> list[Any]:
        text = json.dumps(schema).replace('"#/x"', '"#/$defs/x"')
        whole = {"allOf": [json.loads(text)], "$defs": {"x": target}}
        judge = jsonschema_rs.validator_for(whole)
        return [each for each in VALUES if judge.is_valid(each)]

    sets = SchemaSets(lambda reference: target)
    inside = valid(a)
    for way in sets.complements(a):
        assert not [each for each in valid(way) if any(each is other for other in inside)]
    if sets.empty(a, b):
        assert valid({"allOf": [a, b]}) == []


@given(schemas, schemas)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_emptiness_and_complements_are_correct(a: Any, b: Any) -> None:
    check_sets(a, b)


@given(schemas, schemas)
@settings(max_examples=50, deadline=None, derandomize=True)
def test_emptiness_and_complements_are_correct_beyond_the_limit(a: Any, b: Any) -> None:
    limit, schemas_module.MAX_PARTS = schemas_module.MAX_PARTS, 3
    try:
        check_sets(a, b)
    finally:
        schemas_module.MAX_PARTS = limit


def test_branches_are_compared_within_bounds() -> None:
    """The time to compare unions that refer to each other is limited."""
    definitions = {
        f"d{i}": {
            "type": "object",
            "required": ["x", "y"],
            "properties": {n: {"oneOf": branches} for n in "xy"},
        }
        for i in range(9)
        for branches in ([{"$ref": f"#/$defs/d{j}"} for j in range(9)],)
    }
    schema = {"$defs": definitions, "oneOf": [{"$ref": f"#/$defs/d{i}"} for i in range(9)]}
    seen: list[int] = []
    parts = SchemaSets.parts

    def counted(self: SchemaSets, *args: Any) -> Any:
        seen.append(self._budget)
        return parts(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SchemaSets, "parts", counted)
        with pytest.raises(FieldError, match="oneOf: values may be valid by both"):
            GRAMMARS.check(StructuredOutputs(json=schema))
    assert len(seen) < 20 * schemas_module.MAX_PARTS
    assert all(before >= after for before, after in pairwise(seen[:100]))
