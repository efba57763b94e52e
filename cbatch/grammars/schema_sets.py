"""JSON schemas as sets of values: emptiness and complements.

Both are conservative. An empty schema may be taken for non-empty, and a complement may lack values.
A complement never contains a value that is valid by the schema.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

Schema = Any  # a JSON object, true or false
_NUMBER = frozenset(("fraction", "integer"))
TYPES = _NUMBER | {"array", "boolean", "null", "object", "string"}
_NAMES: dict[type, str] = {bool: "boolean", str: "string", list: "array", dict: "object"}
_MAX_DEPTH = 4  # levels of references and nested schemas that are followed
MAX_PARTS = 50_000  # parts that all calls on one schema may visit: a bound on time


class SchemaSets:
    """Emptiness and complements of schemas. `target` returns the schema that a `$ref` names."""

    def __init__(self, target: Callable[[str], Schema]) -> None:
        self._target = target
        self._budget = MAX_PARTS

    def parts(self, schema: Schema, depth: int) -> Iterator[dict[str, Any]]:
        """Yield schemas whose conjunction equals `schema`: itself, and the schemas of its `allOf`
        and `$ref`. False becomes an empty `enum`; True yields nothing."""
        self._budget -= 1
        if isinstance(schema, dict):
            yield schema
        elif not schema:
            yield {"enum": []}
        if isinstance(schema, dict) and depth < _MAX_DEPTH and self._budget > 0:
            for inner in schema.get("allOf", ()):
                yield from self.parts(inner, depth + 1)
            if "$ref" in schema:
                yield from self.parts(self._target(schema["$ref"]), depth + 1)

    def empty(self, *schemas: Schema, depth: int = 0) -> bool:
        """Return True if no value is valid by all of the schemas. False may mean undecided."""
        parts = [part for schema in schemas for part in self.parts(schema, depth)]
        types = TYPES.intersection(*map(_types, parts))
        values = [each for each in map(_values, parts) if each is not None]
        if not types or (values and not any(all(v in each for each in values) for v in values[0])):
            return True
        if depth >= _MAX_DEPTH or self._budget <= 0:
            return False
        for part in parts:
            others = [other for other in parts if other is not part]
            for choices in _choices(part):
                if all(self.empty(each, *others, depth=depth + 1) for each in choices):
                    return True
        names = dict.fromkeys(name for part in parts for name in part.get("required", ()))
        return types == {"object"} and any(
            self.empty(*_property(parts, name), depth=depth + 1) for name in names
        )

    def complements(self, schema: Schema, depth: int = 0) -> list[Schema]:
        """Return schemas whose values are all invalid by `schema`; [] if none is known."""
        schemas: list[Schema] = []
        for part in self.parts(schema, depth) if depth < _MAX_DEPTH else ():
            schemas += (
                {"type": "object", "properties": {name: False}} for name in part.get("required", ())
            )
            schemas += (
                {"type": "object", "required": [name], "properties": {name: complement}}
                for name, inner in part.get("properties", {}).items()
                for complement in self.complements(inner, depth + 1)
            )
            schemas += [*_of_types(TYPES - _types(part)), *_other_values(_values(part) or [])]
            for choices in _choices(part):
                sides = [self.complements(each, depth + 1) for each in choices]
                if all(sides):
                    schemas.append({"allOf": [{"anyOf": side} for side in sides]})
            if "not" in part:
                schemas.append(part["not"])
        return schemas


def _choices(part: dict[str, Any]) -> list[list[Schema]]:
    return [part[keyword] for keyword in ("anyOf", "oneOf") if keyword in part]


def _values(part: dict[str, Any]) -> list[Any] | None:
    return [part["const"]] if "const" in part else part.get("enum")


def _type_of(value: Any) -> str:
    if type(value) in (int, float):
        return "integer" if value % 1 == 0 else "fraction"
    return _NAMES.get(type(value), "null")


def _types(part: dict[str, Any]) -> frozenset[str]:
    """Return the possible types of a value. A number is an "integer" or a "fraction"."""
    kind, values = part.get("type", TYPES), _values(part)
    types = frozenset([kind] if isinstance(kind, str) else kind)
    types = types | _NUMBER if "number" in types else types
    return types if values is None else types & frozenset(map(_type_of, values))


def _of_types(types: frozenset[str]) -> list[Schema]:
    """Return schemas of `types`. JSON Schema has no type for fractions alone: they are left out."""
    names = types - _NUMBER | ({"number"} if types >= _NUMBER else types & {"integer"})
    return [{"type": sorted(names)}] if names else []


def _other_values(values: list[Any]) -> list[Schema]:
    """Return schemas of the strings and booleans that are not among `values`."""
    texts = [value for value in values if isinstance(value, str)]
    truths = {value for value in values if isinstance(value, bool)}
    schemas: list[Schema] = [{"const": not truth} for truth in truths if len(truths) == 1]
    if texts:
        schemas.append({"type": "string", "pattern": f"^{_other_than(texts)}$"})
    return schemas


def _other_than(texts: list[str]) -> str:
    """Return a regular expression of all texts except `texts`."""
    rests: dict[str, list[str]] = {}
    for text in filter(None, texts):
        rests.setdefault(f"\\u{{{ord(text[0]):x}}}", []).append(text[1:])
    patterns = [f"[^{''.join(rests)}][\\s\\S]*"] if rests else ["[\\s\\S]+"]
    patterns += [first + _other_than(rest) for first, rest in rests.items()]
    return f"({'|'.join(patterns)}){'' if '' in texts else '?'}"


def _property(parts: list[dict[str, Any]], name: str) -> Iterator[Schema]:
    """Yield the schemas for property `name` of an object that is valid by all `parts`."""
    for part in parts:
        if name in part.get("properties", {}):
            yield part["properties"][name]
        elif "patternProperties" not in part:
            yield part.get("additionalProperties", True)
